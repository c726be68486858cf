"""How a tensor of a StepGraph's signature lies on a mesh.

An item is an `Input` or an `Output`. Its global array on the devices is the devices' blocks behind one another, each padded with
zeros at its end. Along most dims that is the tensor itself, with zeros behind it. Along a dim that is split in interleaved blocks
(`MeshShard.outer`), or padded within a block of another axis, the tensor's elements stand in the order that `stored_order` gives.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphacc.graph import Input, MeshShard, Output, padded_shape
from graphacc.lowering.dtypes import to_jax

Item = Input | Output
Index = tuple[slice, ...]  # one slice with explicit bounds per dim, half-open


def partition_spec(item: Item) -> PartitionSpec:
    """The mesh axes of every dim; major to minor where several axes split one dim."""
    return _partition_spec(item.shards)


def _partition_spec(shards: tuple[MeshShard, ...]) -> PartitionSpec:
    axes: dict[int, list[str]] = collections.defaultdict(list)
    for shard in shards:
        axes[shard.dim].append(shard.axis)
    return PartitionSpec(*(_entry(axes.get(dim, [])) for dim in range(max(axes, default=-1) + 1)))


def _entry(axes: list[str]) -> str | tuple[str, ...] | None:
    return tuple(axes) if len(axes) > 1 else axes[0] if axes else None


def sharding(item: Item, mesh: Mesh) -> NamedSharding:
    """The sharding of an item's array; mesh axes that its `shards` do not name hold copies."""
    for shard in item.shards:
        size = mesh.shape.get(shard.axis)
        assert size == shard.size, f"{item.kind.value} {item.target!r}: {shard} does not fit the mesh {dict(mesh.shape)}"
    return _named_sharding(item.shards, mesh)


@functools.lru_cache(maxsize=4096)
def _named_sharding(shards: tuple[MeshShard, ...], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, _partition_spec(shards))


def summed(item: Item) -> Item:
    """The layout of the gradient whose terms an item holds, one on each rank of an axis; of any other, the item."""
    count = item.num_terms
    if not count:
        return item
    shards = tuple(dataclasses.replace(shard, dim=shard.dim - count) for shard in item.shards if shard.dim >= count)
    return dataclasses.replace(item, shape=item.shape[count:], shards=shards, num_terms=0)


def stored_shape(item: Item) -> tuple[int, ...]:
    """The global shape of an item's array, with padding."""
    return padded_shape(item.shape, item.shards)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return to_jax(dtype)


def dtype_of(item: Item) -> np.dtype:
    return numpy_dtype(item.dtype)


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The part of an index that lies inside `shape`, with explicit bounds.

    Examples:
        >>> bounds((slice(8, 12), slice(None)), (10, 3))
        (slice(8, 10, None), slice(0, 3, None))
    """
    clipped = []
    for part, size in zip(index, shape, strict=True):
        start, stop, _ = part.indices(size)
        clipped.append(slice(start, max(start, stop)))
    return tuple(clipped)


def extent(index: Index) -> tuple[int, ...]:
    """The shape of what an index with explicit bounds selects."""
    return tuple(part.stop - part.start for part in index)


@functools.lru_cache(maxsize=1024)
def stored_order(size: int, shards: tuple[MeshShard, ...]) -> np.ndarray | None:
    """Position in the stored array -> position in the tensor, -1 for padding, of a dim of `size` that `shards` split.

    None where the tensor stands at the start of the dim in its own order.

    Examples:
        >>> stored_order(8, (MeshShard(axis="tp", size=2, dim=0, outer=2),))
        array([0, 1, 4, 5, 2, 3, 6, 7])
        >>> stored_order(8, (MeshShard(axis="tp", size=2, dim=0),)) is None
        True
    """
    blocks = [np.arange(size)]
    for shard in shards:
        length = -(-len(blocks[0]) // shard.size) * shard.size
        padded = [np.pad(block, (0, length - len(block)), constant_values=-1) for block in blocks]
        parts = [block.reshape(shard.outer, shard.size, -1) for block in padded]
        blocks = [part[:, rank].reshape(-1) for part in parts for rank in range(shard.size)]
    order = np.concatenate(blocks)
    plain = np.arange(len(order))
    return None if np.array_equal(order, np.where(plain < size, plain, -1)) else order


def orders(item: Item) -> dict[int, np.ndarray]:
    """Dim -> `stored_order`, of the dims whose order is not the tensor's own."""
    found = {}
    for dim in sorted({shard.dim for shard in item.shards}):
        order = stored_order(item.shape[dim], tuple(shard for shard in item.shards if shard.dim == dim))
        if order is not None:
            found[dim] = order
    return found


def whole(shape: Iterable[int]) -> Index:
    """The index of all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def pieces(index: Index, item: Item) -> Iterator[tuple[Index, Index]]:
    """The parts of a block of the stored array that lie together in the tensor: (where in the block, where in the tensor)."""
    runs = [list(_runs(part, item.shape[dim], orders(item).get(dim))) for dim, part in enumerate(index)]
    for combined in itertools.product(*runs):
        yield tuple(run[0] for run in combined), tuple(run[1] for run in combined)


def _runs(part: slice, size: int, order: np.ndarray | None) -> Iterator[tuple[slice, slice]]:
    """One dim's share of `pieces`."""
    if order is None:
        stop = min(part.stop, size)
        if stop > part.start:
            yield slice(0, stop - part.start), slice(part.start, stop)
        return
    positions = order[part]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    for run in np.split(np.arange(len(positions)), edges):
        first = int(positions[run[0]])
        if first >= 0:
            yield slice(int(run[0]), int(run[-1]) + 1), slice(first, first + len(run))
