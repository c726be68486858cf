"""Between torch tensors on the host and padded, sharded arrays on the devices.

Both directions copy once. JAX on CPU takes host memory over without a copy where it is aligned (``may_alias=False`` does not
prevent that), and steps run asynchronously; an array that shares memory with the user's tensor would change when
the user writes into the tensor, also while a step runs. So `to_device` returns when the copy is made, unless the
caller promises that nobody writes. Padding is added on the host; nothing is compiled for a new shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphacc._compat.jax_ import placer, x64
from graphacc.errors import GraphError
from graphacc.graph import Codes
from graphacc.runtime.distributed import note, process_count, process_index
from graphacc.runtime.layout import Index, Item, bounds, dtype_of, extent, orders, pieces, sharding, stored_shape
from graphacc.runtime.reference import block as part_of
from graphacc.runtime.reference import coordinates
from graphacc.runtime.transfer import processes_of, settle

_VIEWS = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}
"""Dtypes that torch cannot hand to numpy: the dtype of equal size that it can, and what numpy then views it as."""


SMALL_BYTES = 1 << 16
"""Up to this size what an upload costs is the call, not the copy."""


def to_device(tensor: torch.Tensor, item: Item, mesh: Mesh, *, copy: bool = True) -> jax.Array:
    """A global tensor as the padded, sharded array of `item`.

    Args:
        tensor: of the item's global shape and dtype, on any torch device.
        copy: False allows the array to share the tensor's memory: only for a tensor that nobody writes into while the
            array lives.

    Raises:
        GraphError: the tensor has another shape or dtype than the item.
    """
    return Uploader(item, mesh)(tensor, copy=copy)


class Uploader:
    """`to_device` for one item, which every step may upload: what does not depend on the tensor is worked out once."""

    def __init__(self, item: Item, mesh: Mesh):
        self.item = item
        shape, self._dtype, self._layout = stored_shape(item), dtype_of(item), sharding(item, mesh)
        self._size, self._is_stored_as_it_is = math.prod(shape) * self._dtype.itemsize, shape == item.shape and not orders(item)
        self._placer = _placer(shape, self._dtype, self._layout)

    def __call__(self, tensor: torch.Tensor, *, copy: bool = True) -> jax.Array:
        item = self.item
        if tensor.shape != item.shape or tensor.dtype != item.dtype:
            raise GraphError(
                f"{item.kind.value} {item.target!r} is {item.dtype}{list(item.shape)} in the compiled graph, "
                f"got {tensor.dtype}{list(tensor.shape)}"
            )
        host = numpy_view(tensor)
        block = (host if self._is_stored_as_it_is else stored(host, item)).__getitem__
        return _placed(self._placer, self._size, self._layout, block, copy=copy)


def to_codes(tensor: torch.Tensor, codes: Codes) -> torch.Tensor:
    """The messages of the parts of a global tensor, uint8 [size of each shard, ..., bytes]."""
    sizes = {shard.axis: shard.size for shard in codes.shards}
    parts = torch.stack([part_of(tensor.detach(), codes.shards, at).flatten() for at in coordinates(sizes)])
    messages = torch.ops.graphacc.quantize_blocks(parts, codes.bits, codes.block)
    return messages.unflatten(0, tuple(sizes.values())) if sizes else messages[0]


def from_parts(part: torch.Tensor, item: Item, mesh: Mesh) -> jax.Array:
    """The array of `item` from one part per process, equal in shape: they lie behind one another, in the processes' order.

    Args:
        part: this process's; one dim, `item.shape[dim]` divided by the number of processes, tells which dim it is a part of.

    Raises:
        GraphError: the part does not fit the item.
    """
    count = jax.process_count()
    dims = [dim for dim, size in enumerate(part.shape) if (*part.shape[:dim], size * count, *part.shape[dim + 1 :]) == item.shape]
    if not dims or part.dtype != item.dtype:
        raise GraphError(
            f"{item.kind.value} {item.target!r} is {item.dtype}{list(item.shape)} in the compiled graph, of which "
            f"{part.dtype}{list(part.shape)} is no part of {count} processes"
        )
    by_process = Mesh(mesh.devices.reshape(count, -1), ("process", "device"))
    whole = NamedSharding(by_process, PartitionSpec(*(None,) * dims[0], "process"))
    copied = np.array(numpy_view(part))  # the loop may write into the part while the step runs
    with x64():
        array = jax.make_array_from_process_local_data(whole, copied, item.shape)
        return _stored_on_devices(dataclasses.replace(item, name="", target=""), sharding(item, mesh))(array)


@functools.lru_cache(maxsize=256)
def _stored_on_devices(item: Item, layout: NamedSharding):
    """From a tensor's array, in any sharding, to the array of an item: `stored`, on the devices."""

    def stored(array: jax.Array) -> jax.Array:
        for dim, order in orders(item).items():
            array = jnp.take(array, np.where(order < 0, item.shape[dim], order), axis=dim, mode="fill", fill_value=0)
        return jnp.pad(array, [(0, big - small) for big, small in zip(stored_shape(item), array.shape)])

    return jax.jit(stored, out_shardings=layout)


def place(shape: tuple[int, ...], dtype: np.dtype, layout: NamedSharding, block: Callable, *, copy: bool) -> jax.Array:
    """The array whose blocks on this process's devices are ``block(index)``, numpy arrays.

    Args:
        copy: returns when the blocks may be written again. A large array then has memory of the device's own, which a
            program that it is donated to can overwrite in place; a small one is copied on the host, six times faster.
    """
    return _placed(_placer(shape, dtype, layout), math.prod(shape) * dtype.itemsize, layout, block, copy=copy)


def _placed(placer: Callable, size: int, layout: NamedSharding, block: Callable, *, copy: bool) -> jax.Array:
    small = size <= SMALL_BYTES
    duplicate = np.array if copy and small else np.asarray
    array = placer(lambda index: duplicate(block(index)))
    if not copy or small:
        return array
    with x64():
        if layout.mesh.devices.flat[0].platform == "cpu":
            array = jax.device_put(array, layout, may_alias=False)
    return array.block_until_ready()


_placer = functools.lru_cache(maxsize=1024)(placer)
"""What only depends on the form of a tensor is worked out once."""


def from_blocks(read: Callable[[Index], np.ndarray], item: Item, mesh: Mesh) -> jax.Array:
    """The array of `item` from blocks of the tensor, each of which is read once, for the devices of this process alone.

    Args:
        read: gives a block of the tensor, without padding, in memory of its own.
    """
    padded, known = stored_shape(item), {}

    def block(index: tuple[slice, ...]) -> np.ndarray:
        outer = bounds(index, padded)
        key = tuple((part.start, part.stop) for part in outer)
        if key not in known:
            known[key] = _padded_block(read, item, outer)
        return known[key]

    return place(padded, dtype_of(item), sharding(item, mesh), block, copy=True)


def _padded_block(read: Callable[[Index], np.ndarray], item: Item, outer: Index) -> np.ndarray:
    parts = [(here, read(there)) for here, there in pieces(outer, item)]
    if len(parts) == 1 and parts[0][1].shape == extent(outer):
        return parts[0][1]
    result = np.zeros(extent(outer), dtype_of(item))
    for here, values in parts:
        result[here] = values
    return result


def needed(item: Item, mesh: Mesh) -> Iterator[Index]:
    """The blocks of the tensor that `from_blocks` reads in this process."""
    padded = stored_shape(item)
    indices = sharding(item, mesh).addressable_devices_indices_map(padded).values()
    for outer in {tuple((part.start, part.stop) for part in bounds(index, padded)) for index in indices if index is not None}:
        yield from (there for _, there in pieces(tuple(slice(*part) for part in outer), item))


def to_torch(array: jax.Array, item: Item, *, copy: bool = True) -> torch.Tensor:
    """The global tensor of an item's array on the host, without padding; waits for the array.

    Args:
        copy: False allows the tensor to share the array's memory, if one CPU device holds all of it: only for an array that is
            neither donated nor read by a program after the caller writes into the tensor.
    """
    if not copy and _is_here(array) and _is_whole(array, item):
        return torch.from_dlpack(array.addressable_shards[0].data)
    if array.is_fully_replicated and array.shape == item.shape and not item.shards and _is_here(array):
        return torch_view(np.array(array.addressable_shards[0].data))
    result = torch.empty(item.shape, dtype=item.dtype)
    host = numpy_view(result)
    if not _is_here(array):
        note(f"reads {item.kind.value} {item.target!r}")
    for index, block in _blocks(array).items():
        values = np.asarray(block)
        for here, there in pieces(tuple(slice(*part) for part in index), item):
            host[there] = values[here]
    return result


def numpy_view(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values as a numpy array, sharing its memory if it is an ordinary CPU tensor."""
    if tensor.dtype not in _VIEWS:
        return tensor.numpy(force=True)
    carrier, dtype = _VIEWS[tensor.dtype]
    return tensor.detach().view(carrier).numpy(force=True).view(dtype)


def torch_view(array: np.ndarray) -> torch.Tensor:
    """A numpy array's values as a tensor that shares its memory; the array must be writable."""
    for dtype, (carrier, view) in _VIEWS.items():
        if array.dtype == view:
            return torch.from_numpy(array.view(np.uint8 if carrier == torch.uint8 else np.int16)).view(dtype)
    return torch.from_numpy(array)


def stored(host: np.ndarray, item: Item) -> np.ndarray:
    """The global array as it is stored: padded, and in the order of the devices' blocks."""
    for dim, order in orders(item).items():
        taken = np.take(host, np.maximum(order, 0), axis=dim)
        taken[(slice(None),) * dim + (order < 0,)] = 0
        host = taken
    shape = stored_shape(item)
    if host.shape == shape:
        return host
    padded = np.zeros(shape, host.dtype)
    padded[tuple(slice(0, size) for size in host.shape)] = host
    return padded


def _blocks(array: jax.Array) -> dict[tuple, jax.Array | np.ndarray]:
    """Index ((start, stop), ...) -> block, each once, together the whole array."""
    if not _is_here(array):
        settle()
        owners = processes_of(array.sharding.device_set)
        gathered = len(owners) == process_count()
        whole = multihost_utils.process_allgather(array, tiled=True) if gathered else _from_owners(array, min(owners))
        return {tuple((0, size) for size in array.shape): whole}
    found = {}
    for shard in array.addressable_shards:
        key = tuple((part.start, part.stop) for part in bounds(shard.index, array.shape))
        if key not in found:
            start_copy(shard.data)
            found[key] = shard.data
    return found


def start_copy(data: jax.Array) -> None:
    """Let the copy of one device's array to the host begin. On CPU there is nothing to copy, and since jaxlib 0.11 a program could not reuse the array's memory any more."""
    if next(iter(data.devices())).platform != "cpu":
        data.copy_to_host_async()


def _is_here(array: jax.Array) -> bool:
    """Whether every process has all values of an array, and reads it without the others."""
    if array.is_fully_addressable and process_count() == 1:
        return True
    return array.is_fully_replicated and len(processes_of(array.sharding.device_set)) == process_count()


def _from_owners(array: jax.Array, owner: int) -> np.ndarray:
    """The values of an array that lies on devices of some processes, in all; process `owner` is one of them."""
    with x64():
        replicated = _replicate(NamedSharding(array.sharding.mesh, PartitionSpec()))(array)
        host = np.zeros(array.shape, array.dtype)
        if process_index() == owner:
            host = np.asarray(replicated.addressable_shards[0].data)
        data = multihost_utils.broadcast_one_to_all(np.frombuffer(host.tobytes(), np.uint8), is_source=process_index() == owner)
    return np.asarray(data).view(host.dtype).reshape(host.shape)


@functools.lru_cache(maxsize=256)
def _replicate(layout: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=layout)


def _is_whole(array: jax.Array, item: Item) -> bool:
    dlpack_knows = not (item.dtype.is_floating_point and item.dtype.itemsize == 1)
    return len(array.sharding.device_set) == 1 and array.shape == item.shape and array.platform() == "cpu" and dlpack_knows
