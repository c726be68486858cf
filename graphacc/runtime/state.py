"""The values that stay on the devices between programs: parameters, buffers, optimizer state, gradients.

In a pipeline every stage has a mesh of its own, and a value lives on the mesh of one stage. Another stage that reads it gets a
copy, which is kept until the value is replaced.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from graphacc._compat.jax_ import x64
from graphacc.graph import Codes, Kind, local_shape
from graphacc.runtime.layout import Item, dtype_of, orders, sharding, stored_shape
from graphacc.runtime.transfer import note_started, send, settle

Key = tuple[Kind, str]  # kind and target


class Slots:
    """The values of the state that a program reads, or gives, at every run: hundreds, which are looked up together."""

    def __init__(self, items: Iterable[Item]):
        self.items = list(items)
        self.keys: list[Key] = [(item.kind, item.target) for item in self.items]
        self.kept: list[Item] | None = None  # the layouts that the values had at the last look, all as they are wanted


class TrainState:
    """Arrays by kind and target, each with the item that describes its layout."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh  # where values live for which no other mesh is named
        self._values: dict[Key, tuple[jax.Array, Item]] = {}
        self._meshes: dict[Key, Mesh] = {}  # of values that live elsewhere
        self._copies: dict[Key, dict[Mesh, tuple[jax.Array, Item]]] = {}

    def set(self, item: Item, array: jax.Array, mesh: Mesh | None = None) -> None:
        """Keep an array, which lies on `mesh`, as the value of the item's kind and target."""
        expected = (stored_shape(item), dtype_of(item))
        assert (array.shape, array.dtype) == expected, (
            f"{item.kind.value} {item.target!r}: {array.shape} {array.dtype} is not {expected}"
        )
        self.set_result(item, array, mesh)

    def set_result(self, item: Item, array: jax.Array, mesh: Mesh | None = None) -> None:
        """`set`, for a result of a program, which was compiled to give what its outputs say (see `Program`)."""
        key = item.kind, item.target
        self._values[key] = (array, item)
        if mesh is None or mesh is self.mesh:
            self._meshes.pop(key, None)
        else:
            self._meshes[key] = mesh
        self._copies.pop(key, None)

    def set_results(self, slots: Slots, arrays: Sequence[jax.Array]) -> None:
        """`set_result` for all of them."""
        self._values.update(zip(slots.keys, zip(arrays, slots.items), strict=True))
        for key in slots.keys if self._meshes or self._copies else ():
            self._meshes.pop(key, None)
            self._copies.pop(key, None)

    def get_all(self, slots: Slots) -> list[jax.Array]:
        """`get` for all of them, from where all values live."""
        found = [self._values[key] for key in slots.keys if key in self._values]
        if not self._meshes and slots.kept == [item for _, item in found]:  # quick, as items that are the same objects are not compared
            return [array for array, _ in found]
        arrays = [self.get(item) for item in slots.items]
        slots.kept = [self._values[key][1] for key in slots.keys]
        return arrays

    def get(self, item: Item, mesh: Mesh | None = None) -> jax.Array:
        """The value in the item's layout; where it was kept in another one, it is moved, and kept in the new one.

        Args:
            mesh: where it is read, if that is not where all values live.
        """
        key, mesh = (item.kind, item.target), mesh or self.mesh
        array, kept = self.find(*key)
        if (there := self._meshes.get(key, self.mesh)) is not mesh and there != mesh:
            return self._copy(item, mesh)
        if kept.shards is not item.shards and kept.shards != item.shards:
            array = relayout(array, kept, item, mesh)
            self.set(item, array, mesh)
        return array

    def _copy(self, item: Item, mesh: Mesh) -> jax.Array:
        key = item.kind, item.target
        copies = self._copies.setdefault(key, {})
        if mesh not in copies or copies[mesh][1].shards != item.shards:
            array, kept = self._values[key]
            if kept.shards != item.shards:
                array = relayout(array, kept, item, self.mesh_of(*key))
            copies[mesh] = send(array, item, self.mesh_of(*key), mesh), item
        return copies[mesh][0]

    def find(self, kind: Kind, target: str) -> tuple[jax.Array, Item]:
        """A value and its layout as it is kept."""
        assert (kind, target) in self._values, f"the state holds no {kind.value} {target!r}"
        return self._values[kind, target]

    def holds(self, kind: Kind, target: str) -> bool:
        return (kind, target) in self._values

    def mesh_of(self, kind: Kind, target: str) -> Mesh:
        """Where a value lives."""
        return self._meshes.get((kind, target), self.mesh)

    def codes_of(self, kind: Kind, target: str) -> Codes | None:
        """The codes that a value is kept as; None: it is kept as it is."""
        return getattr(self.find(kind, target)[1], "codes", None)

    def discard(self, kind: Kind, target: str) -> None:
        """Forget a value, if there is one; its memory is free when nothing else refers to it."""
        for held in (self._values, self._meshes, self._copies):
            held.pop((kind, target), None)

    def keys(self) -> Iterator[Key]:
        return iter(list(self._values))

    def bytes_per_device(self, *kinds: Kind) -> int:
        """Bytes on one device, padding included, of the mesh that holds most; of all kinds if none is named."""
        totals: dict[Mesh, int] = collections.defaultdict(int)
        for key, (_, item) in self._values.items():
            size = math.prod(local_shape(item.shape, item.shards)) * dtype_of(item).itemsize
            for mesh in (self.mesh_of(*key), *self._copies.get(key, {})):
                totals[mesh] += size if not kinds or key[0] in kinds else 0
        return max(totals.values(), default=0)


def relayout(array: jax.Array, old: Item, new: Item, mesh: Mesh) -> jax.Array:
    """An item's array in another layout, moved between the devices."""
    assert (old.shape, old.dtype) == (new.shape, new.dtype), f"{old} and {new} are different tensors"
    if mesh.is_multi_process:
        settle()
    with x64():
        if stored_shape(old) == stored_shape(new) and not orders(old) and not orders(new):
            moved = jax.device_put(array, sharding(new, mesh))
        else:
            moved = _restore(dataclasses.replace(old, target=""), dataclasses.replace(new, target=""), sharding(new, mesh))(array)
    note_started([moved])
    return moved


@functools.lru_cache(maxsize=256)
def _restore(old: Item, new: Item, layout: jax.sharding.NamedSharding):
    """From one stored form to another, by way of the tensor itself."""

    def restore(array: jax.Array) -> jax.Array:
        for dim, order in orders(old).items():
            places = np.flatnonzero(order >= 0)
            array = jnp.take(array, places[np.argsort(order[places])], axis=dim)
        array = array[tuple(slice(0, size) for size in old.shape)]
        for dim, order in orders(new).items():
            array = jnp.take(array, np.where(order < 0, new.shape[dim], order), axis=dim, mode="fill", fill_value=0)
        return jnp.pad(array, [(0, big - small) for big, small in zip(stored_shape(new), array.shape)])

    return jax.jit(restore, out_shardings=layout)
