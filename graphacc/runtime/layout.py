"""How a tensor of a StepGraph's signature lies on a mesh.

An item is an `Input` or an `Output`. Its global array on the devices has the padded shape: the tensor itself stands at the
start of every dim, zeros behind it.
"""

import collections

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphacc.graph import Input, Output, padded_shape
from graphacc.lowering.dtypes import to_jax

Item = Input | Output
Index = tuple[slice, ...]  # one slice with explicit bounds per dim, half-open


def partition_spec(item: Item) -> PartitionSpec:
    """The mesh axes of every dim; major to minor where several axes split one dim."""
    axes: dict[int, list[str]] = collections.defaultdict(list)
    for shard in item.shards:
        axes[shard.dim].append(shard.axis)
    return PartitionSpec(*(_entry(axes.get(dim, [])) for dim in range(max(axes, default=-1) + 1)))


def _entry(axes: list[str]) -> None | str | tuple[str, ...]:
    return tuple(axes) if len(axes) > 1 else axes[0] if axes else None


def sharding(item: Item, mesh: Mesh) -> NamedSharding:
    """The sharding of an item's array; mesh axes that its `shards` do not name hold copies."""
    for shard in item.shards:
        size = mesh.shape.get(shard.axis)
        assert size == shard.size, f"{item.kind.value} {item.target!r}: {shard} does not fit the mesh {dict(mesh.shape)}"
    return NamedSharding(mesh, partition_spec(item))


def stored_shape(item: Item) -> tuple[int, ...]:
    """The global shape of an item's array, with padding."""
    return padded_shape(item.shape, item.shards)


def dtype_of(item: Item) -> np.dtype:
    return to_jax(item.dtype)


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
