"""The values that stay on the devices between programs: parameters, buffers, optimizer state, gradients.

In a pipeline every stage has a mesh of its own, and a value lives on the mesh of one stage. Another stage that reads it gets a
copy, which is kept until the value is replaced.

Numbers that are equal for many parameters, such as their counts of steps, are one array under several keys (`TrainState.unite`): a program reads and replaces it under
the first of them.
"""

import collections
import functools
import itertools
import math
import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from graphacc._compat.jax_ import x64
from graphacc.graph import Codes, Kind, Output, local_shape
from graphacc.runtime.distributed import process_index
from graphacc.runtime.layout import Item, dtype_of, orders, sharding, stored_shape, summed
from graphacc.runtime.transfer import note_started, processes_of, send, settle, without_data

Key = tuple[Kind, str]  # kind and target

_ARRAY, _ITEM = operator.itemgetter(0), operator.itemgetter(1)

_NOTHING = (None, None)


class Slots:
    """The values of the state that a program reads, or gives, at every run: hundreds, which are looked up together."""

    def __init__(self, items: Iterable[Item]):
        self.items = list(items)
        self.keys: list[Key] = [(item.kind, item.target) for item in self.items]
        self.kept: collections.deque[list[Item | None]] = collections.deque(maxlen=4)  # the layouts that the values had when they were looked at, all as they are wanted: an accumulator has that of zeros, and that of a result
        self.version = -1  # of the state, then


class TrainState:
    """Arrays by kind and target, each with the item that describes its layout."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh  # where values live for which no other mesh is named
        self._values: dict[Key, tuple[jax.Array, Item]] = {}
        self._meshes: dict[Key, Mesh] = {}  # of values that live elsewhere
        self._copies: dict[Key, dict[Mesh, tuple[jax.Array, Item]]] = {}
        self._first: dict[Key, Key] = {}  # the key that has the value of this one
        self._others: dict[Key, list[Key]] = {}  # the same, from there
        self._numbers: dict[Key, Hashable] = {}  # values of numbers that no program has read yet
        self.version = 0  # of the numbers: changes where they are set, or share their values in another way

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
        self._part(key)
        self._numbers.pop(key, None)
        self.version += _is_number(item)
        self._values[key] = (array, item)
        if mesh is None or mesh is self.mesh:
            self._meshes.pop(key, None)
        else:
            self._meshes[key] = mesh
        self._copies.pop(key, None)

    def set_results(self, slots: Slots, arrays: Sequence[jax.Array]) -> None:
        """`set_result` for all of them; keys that share a value go on sharing it."""
        self._values.update(zip(slots.keys, zip(arrays, slots.items), strict=True))
        for key in slots.keys if self._meshes or self._copies else ():
            self._meshes.pop(key, None)
            self._copies.pop(key, None)

    def get_all(self, slots: Slots) -> list[jax.Array]:
        """`get` for all of them, from where all values live."""
        self.unite_for(slots)
        found = list(map(self._values.get, slots.keys, itertools.repeat(_NOTHING)))
        if not self._meshes and any(map(_are_same, slots.kept, itertools.repeat(list(map(_ITEM, found))))):
            return list(map(_ARRAY, found))
        arrays = [self.get(item) for item in slots.items]
        slots.kept.append([self._values[key][1] for key in slots.keys])
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

    def unite_for(self, slots: Slots) -> None:
        """Let numbers share their values as these items' aliases say, whose values are equal."""
        if slots.version != self.version:
            for item in filter(_is_number, slots.items):
                self.unite(item.target, getattr(item, "aliases", ()))
            slots.version = self.version

    def unite(self, target: str, others: Sequence[str]) -> None:
        """Keep one value for the numbers of several parameters, which are equal, and for no further ones.

        Args:
            target: of the optimizer's state; the value is kept under it.
            others: the targets that share it.
        """
        key, rest = (Kind.STATE, target), [(Kind.STATE, other) for other in others]
        for each in (key, *rest):
            self._numbers.pop(each, None)
        if self._others.get(key, []) == rest and key not in self._first:
            return
        wanted = dict.fromkeys((key, *rest))
        held = [each for each in wanted if self.holds(*each)]
        if not held:
            return
        value = self.find(*held[0])
        for each in dict.fromkeys(self._first.get(each, each) for each in held):
            left = [other for other in (each, *self._others.get(each, [])) if other not in wanted]
            if left:
                with x64():
                    self._share(left, (self._values[each][0].copy(), self._values[each][1]))
        self._share(list(wanted), value)

    def _share(self, keys: Sequence[Key], value: tuple[jax.Array, Item]) -> None:
        """Keep a value under several keys, of which nothing else shares one with the first."""
        first, *others = keys
        for held in (self._values, self._first, self._others):
            for key in keys:
                held.pop(key, None)
        self._values[first] = value
        self._first |= dict.fromkeys(others, first)
        if others:
            self._others[first] = others
        self.version += 1

    def _part(self, *keys: Key) -> None:
        """Those that share a value with one of these keys keep it without it; these keys have none any more, or one of their own."""
        gone = dict.fromkeys(keys)
        for first in dict.fromkeys(self._first.get(key, key) for key in gone):
            if first in self._others:
                value, members = self._values[first], [first, *self._others.pop(first)]
                for key in members:
                    self._first.pop(key, None)
                if left := [key for key in members if key not in gone]:
                    self._share(left, value)

    def note_number(self, target: str, value: Hashable) -> None:
        """Say what a number of the optimizer's state is that has just been set."""
        self._numbers[Kind.STATE, target] = value

    def numbers(self) -> dict[str, Hashable]:
        """Target -> what is equal for numbers of the optimizer's state that are known to be equal."""
        found = {}
        for key, (_, item) in self._values.items():
            if _is_number(item):
                for each in (key, *self._others.get(key, [])):
                    found[each[1]] = ("set", self._numbers[each]) if each in self._numbers else ("kept", key[1])
        return found

    def find(self, kind: Kind, target: str) -> tuple[jax.Array, Item]:
        """A value and its layout as it is kept."""
        key = kind, target
        assert self.holds(kind, target), f"the state holds no {kind.value} {target!r}"
        return self._values[self._first.get(key, key)]

    def holds(self, kind: Kind, target: str) -> bool:
        return (kind, target) in self._values or (kind, target) in self._first

    def holds_all(self, keys: Collection[Key]) -> bool:
        return all(map(self._values.__contains__, keys)) or all(self.holds(*key) for key in keys)

    def layouts(self, keys: Iterable[Key]) -> list[Item | None]:
        """The layout in which each value is kept, as the same object as long as that is the same; None: there is no value, or the key shares that of another one."""
        return list(map(_ITEM, map(self._values.get, keys, itertools.repeat(_NOTHING))))

    def mesh_of(self, kind: Kind, target: str) -> Mesh:
        """Where a value lives."""
        return self._meshes.get((kind, target), self.mesh)

    def codes_of(self, kind: Kind, target: str) -> Codes | None:
        """The codes that a value is kept as; None: it is kept as it is."""
        return getattr(self.find(kind, target)[1], "codes", None)

    def discard(self, kind: Kind, *targets: str) -> None:
        """Forget values, if they are there; their memory is free when nothing else refers to it."""
        keys = [(kind, target) for target in targets]
        self._part(*keys)
        for key in keys:
            if key in self._values:
                self.version += _is_number(self._values[key][1])
            for held in (self._values, self._meshes, self._copies, self._numbers):
                held.pop(key, None)

    def keys(self) -> Iterator[Key]:
        return iter([*self._others, *self._first, *(key for key in self._values if key not in self._others)])  # numbers first, as in torch's own states

    def bytes_per_device(self, *kinds: Kind) -> int:
        """Bytes on one device, padding included, of the mesh that holds most; of all kinds if none is named."""
        totals: dict[Mesh, int] = collections.defaultdict(int)
        for key, (_, item) in self._values.items():
            size = math.prod(local_shape(item.shape, item.shards)) * dtype_of(item).itemsize
            for mesh in (self.mesh_of(*key), *self._copies.get(key, {})):
                totals[mesh] += size if not kinds or key[0] in kinds else 0
        return max(totals.values(), default=0)


def _are_same(one: list[Item | None], other: list[Item | None]) -> bool:
    return all(map(operator.is_, one, other))


def _is_number(item: Item) -> bool:
    return item.kind is Kind.STATE and not item.shape


def relayout(array: jax.Array, old: Item, new: Item, mesh: Mesh) -> jax.Array:
    """An item's array in another layout, moved between the devices; ranks' own sums of a gradient are added up for a layout without them, and made of a gradient on the first rank."""
    assert (summed(old).shape, old.dtype) == (summed(new).shape, new.dtype), f"{old} and {new} are different tensors"
    if process_index() not in processes_of(mesh.devices.flat):
        return without_data(new, mesh)
    if mesh.is_multi_process:
        settle()
    with x64():
        if old.num_terms == new.num_terms and stored_shape(old) == stored_shape(new) and not orders(old) and not orders(new):
            moved = jax.device_put(array, sharding(new, mesh))
        else:
            moved = _restore(_form(old), _form(new), sharding(new, mesh))(array)
    note_started([moved])
    return moved


def _form(item: Item) -> Item:
    """What tensors of one form have in common: one program moves all of them."""
    return Output(kind=item.kind, target="", shape=item.shape, dtype=item.dtype, shards=item.shards, num_terms=item.num_terms)


@functools.lru_cache(maxsize=256)
def _restore(old: Item, new: Item, layout: jax.sharding.NamedSharding):
    """From one stored form to another, by way of the tensor itself."""

    def restore(array: jax.Array) -> jax.Array:
        for dim, order in orders(old).items():
            places = np.flatnonzero(order >= 0)
            array = jnp.take(array, places[np.argsort(order[places])], axis=dim)
        array = array[tuple(slice(0, size) for size in old.shape)]
        if old.num_terms != new.num_terms:
            total = array.sum(tuple(range(old.num_terms)))
            array = _padded(total.reshape((1,) * new.num_terms + total.shape), new.shape)
        for dim, order in orders(new).items():
            array = jnp.take(array, np.where(order < 0, new.shape[dim], order), axis=dim, mode="fill", fill_value=0)
        return _padded(array, stored_shape(new))

    return jax.jit(restore, out_shardings=layout)


def _padded(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """With zeros behind the end of every dim; numbers have none."""
    return jnp.pad(array, [(0, big - small) for big, small in zip(shape, array.shape)]) if shape else array
