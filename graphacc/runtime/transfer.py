"""Values that go from the mesh of one pipeline stage to another's, also where the stages lie in different processes.

Within one process JAX copies between devices. Between processes a program on the devices of both meshes moves the blocks by a
collective-permute: JAX's own cross-host `device_put` is not there on every platform (jax 0.10.2 on CPU: "does not support cross-host device
transfers").

Order. All processes go through one list of programs and transfers, in the same order. What needs another process is started only when
everything that this process has started before is done (`settle`), so the first entry of the list that is not done has its inputs
and its peers. Without that wait pp=4 on two processes hung (jaxlib 0.10.2, CPU), every device in a collective-permute; the likely cause,
not proven, is that programs with one local device are started in any order and each holds a thread of a small pool.

An array on a mesh without a device of this process has shape, dtype and sharding, but no data: programs take and give such
arrays like others.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from graphacc._compat.jax_ import x64
from graphacc.runtime.distributed import process_count, process_index
from graphacc.runtime.layout import Item, dtype_of, partition_spec, sharding, stored_shape


def processes_of(devices: Iterable[jax.Device]) -> set[int]:
    """The numbers of the processes that own the devices."""
    return {device.process_index for device in devices}


def without_data(item: Item, mesh: Mesh) -> jax.Array:
    """The array of `item` on a mesh that has no device of this process."""
    with x64():
        return jax.make_array_from_single_device_arrays(stored_shape(item), sharding(item, mesh), [], dtype=dtype_of(item))


_started: list[jax.Array] = []
"""Of each program since the last `settle` one result."""


def note_started(results: Sequence[jax.Array]) -> None:
    """A program was started, and gives these arrays."""
    own = [array for array in results if array.addressable_shards] if process_count() > 1 else []
    if own:
        _started.append(min(own, key=lambda array: array.nbytes))


def settle() -> None:
    """Wait for every program that was noted; before one is started that other processes take part in."""
    for array in _started:
        if not array.is_deleted():  # else a program that was noted later has taken it over
            array.block_until_ready()
    _started.clear()


def zeros_on(mesh: Mesh, *items: Item) -> list[jax.Array]:
    """Zeros with the layouts of `items`, made on the devices by one program."""
    if process_index() not in processes_of(mesh.devices.flat):
        return [without_data(item, mesh) for item in items]
    with x64():
        return _zeros(tuple((stored_shape(item), dtype_of(item), sharding(item, mesh)) for item in items))()


@functools.lru_cache(maxsize=256)
def _zeros(forms: tuple[tuple[tuple[int, ...], np.dtype, NamedSharding], ...]) -> Callable[[], list[jax.Array]]:
    return jax.jit(lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in forms], out_shardings=[layout for _, _, layout in forms])


def send(array: jax.Array, item: Item, source: Mesh, target: Mesh) -> jax.Array:
    """The array of `item`, which lies on `source`, with the same layout on `target`, a mesh of equal shape; within a process without waiting."""
    owners = processes_of([*source.devices.flat, *target.devices.flat])
    with x64():
        if owners == {process_index()}:
            return jax.device_put(array, sharding(item, target))
        if process_index() not in owners:
            return without_data(item, target)
        layout, move = _exchange(partition_spec(item), source, target)
        blocks = [shard.data for side in (array, *zeros_on(target, item)) for shard in side.addressable_shards]
        settle()
        moved = move(jax.make_array_from_single_device_arrays(array.shape, layout, blocks))
        note_started([moved])
        there = set(target.devices.flat)
        received = [shard.data for shard in moved.addressable_shards if shard.device in there]
        return jax.make_array_from_single_device_arrays(array.shape, sharding(item, target), received, dtype=array.dtype)


@functools.lru_cache(maxsize=256)
def _exchange(spec: PartitionSpec, source: Mesh, target: Mesh) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """The layout of an array with other blocks on `source` than on `target`, and the program that moves the first to the second."""
    assert source.devices.shape == target.devices.shape, f"{source} and {target} differ in shape"
    both = _mesh(np.stack([source.devices, target.devices]), "stage", *source.axis_names)

    def move(block: jax.Array) -> jax.Array:
        return jax.lax.ppermute(block, "stage", [(0, 1)])

    layout = NamedSharding(both, spec)
    return layout, jax.jit(jax.shard_map(move, mesh=both, in_specs=spec, out_specs=spec, check_vma=False), out_shardings=layout)


def send_to_all(array: jax.Array, source: Mesh, meshes: Sequence[Mesh]) -> jax.Array:
    """An array that every device of `source` holds whole, on one device of every process that has a device in `meshes`."""
    first: dict[int, jax.Device] = {}
    for device in [*source.devices.flat, *(device for mesh in meshes for device in mesh.devices.flat)]:
        first.setdefault(device.process_index, device)
    layout, spread = _spread(tuple(first.values()), source.devices.flat[0].process_index)
    own = first[process_index()]
    with x64():
        held = [shard.data for shard in array.addressable_shards if shard.device == own]
        block = held or [jax.device_put(np.zeros(array.shape, array.dtype), own)]
        settle()
        result = spread(jax.make_array_from_single_device_arrays(array.shape, layout, block))
    note_started([result])
    return result


@functools.lru_cache(maxsize=256)
def _spread(devices: tuple[jax.Device, ...], owner: int) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """The layout of an array with another block on each device, and the program that gives all that of process `owner`."""
    mesh = _mesh(np.array(devices), "process")
    place = [device.process_index for device in devices].index(owner)

    def spread(block: jax.Array) -> jax.Array:
        return jax.lax.all_gather(block, "process")[place]

    layout, spec = NamedSharding(mesh, PartitionSpec()), PartitionSpec()
    return layout, jax.jit(jax.shard_map(spread, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), out_shardings=layout)


def _mesh(devices: np.ndarray, *axes: str) -> Mesh:
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
