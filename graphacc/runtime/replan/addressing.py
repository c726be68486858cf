"""Addresses for the values of an executable, given the order of its thunks.

The planner core packs buffers with one live interval each. Values of loops and branches have holes in theirs, so two steps are
added here: the core gets each value's hull, and its answer (as well as some plain priority orders) is compacted against the exact
occupancy. Placing values by ascending offset, each at its lowest free place, never raises one of them: every value below it can
only have moved down.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from graphacc.passes.memory.problem import AddressProblem, LiveBuffer
from graphacc.runtime.replan.liveness import Liveness
from graphacc.runtime.replan.ordering import aligned
from graphacc.runtime.replan.values import Values

AddressSolver = Callable[[AddressProblem, float], tuple[int, ...]]
"""(problem, seconds) -> an offset per buffer, or () where it found none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addresses:
    """Offsets of all values in one arena."""

    offsets: tuple[int, ...]  # by value index
    height: int  # bytes of the arena
    max_live: int  # largest sum of the values that are occupied at one step: no arena is lower for this order


class Occupancy:
    """The exact occupancy of values as arrays over [V] values."""

    def __init__(self, values: Values, liveness: Liveness):
        alignment = values.executable.alignment
        self.sizes = np.array([aligned(v.size, alignment) for v in values.all], dtype=np.int64)  # [V]
        bits = _unpack(liveness.occupied, len(values.all))  # [T, V]
        self.live = bits @ self.sizes  # [T]
        self.first = bits.argmax(axis=0)  # [V]
        self.last = len(bits) - 1 - bits[::-1].argmax(axis=0)  # [V]
        self.duration = bits.sum(axis=0)  # [V]
        self.pressure = np.array([self.live[column].max() for column in bits.T], dtype=np.int64)  # [V]
        self.conflicts = _conflicts(bits)  # [V, V]

    @property
    def max_live(self) -> int:
        return int(self.live.max())


def find_addresses(values: Values, liveness: Liveness, solve: AddressSolver, seconds: float) -> Addresses:
    """Offsets with the lowest arena that was found.

    Args:
        values: of the executable; there is at least one.
        liveness: of the planned order.
        solve: the planner core.
        seconds: its budget.
    """
    occupancy = Occupancy(values, liveness)
    best = min((_place(occupancy, order) for order in _priority_orders(occupancy)), key=lambda a: a.height)
    if best.height == occupancy.max_live:
        return best
    offsets = solve(_hull_problem(values, occupancy), seconds)
    if offsets:
        best = min(best, _place(occupancy, np.argsort(offsets, kind="stable")), key=lambda a: a.height)
    return best


def _unpack(bit_sets: list[int], num_values: int) -> np.ndarray:
    """Bit sets as a boolean array [T, V]."""
    num_bytes = (num_values + 7) // 8
    raw = b"".join(bits.to_bytes(num_bytes, "little") for bits in bit_sets)
    packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(bit_sets), num_bytes)
    return np.unpackbits(packed, axis=1, bitorder="little", count=num_values).astype(bool)


def _conflicts(bits: np.ndarray) -> np.ndarray:
    """[V, V]: whether two values are occupied at one step. Every pair is seen when its later one enters."""
    conflicts = np.zeros((bits.shape[1], bits.shape[1]), dtype=bool)
    previous = np.zeros(bits.shape[1], dtype=bool)
    for row in bits:
        entering = np.flatnonzero(row & ~previous)
        conflicts[entering] |= row
        previous = row
    conflicts |= conflicts.T
    np.fill_diagonal(conflicts, False)
    return conflicts


def _priority_orders(occupancy: Occupancy) -> Iterable[np.ndarray]:
    """Orders for first fit: by size, by size and time, and the values of the fullest steps first."""
    size, duration = -occupancy.sizes, -occupancy.duration
    yield np.lexsort((duration, size))
    yield np.lexsort((size, size * occupancy.duration))
    yield np.lexsort((size, occupancy.first))
    yield np.lexsort((duration, size, -occupancy.pressure))
    yield np.lexsort((size, duration, -occupancy.pressure))


def _place(occupancy: Occupancy, order: Iterable[int]) -> Addresses:
    """First fit: each value of `order` at the lowest offset where it overlaps none of its conflicting predecessors."""
    sizes = occupancy.sizes
    offsets = np.zeros(len(sizes), dtype=np.int64)
    placed = np.zeros(len(sizes), dtype=bool)
    for value in order:
        neighbours = np.flatnonzero(occupancy.conflicts[value] & placed)
        neighbours = neighbours[np.argsort(offsets[neighbours], kind="stable")]
        offsets[value] = _lowest_gap(offsets[neighbours].tolist(), sizes[neighbours].tolist(), int(sizes[value]))
        placed[value] = True
    height = int((offsets + sizes).max())
    return Addresses(offsets=tuple(offsets.tolist()), height=height, max_live=occupancy.max_live)


def _lowest_gap(starts: list[int], sizes: list[int], size: int) -> int:
    """The lowest offset where `size` bytes fit between blocks that are sorted by their starts."""
    offset = 0
    for start, length in zip(starts, sizes):
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset


def _hull_problem(values: Values, occupancy: Occupancy) -> AddressProblem:
    buffers = tuple(
        LiveBuffer(name=f"value {v}", lower=int(first), upper=int(last) + 1, size=int(size))
        for v, (first, last, size) in enumerate(zip(occupancy.first, occupancy.last, occupancy.sizes))
    )
    return AddressProblem(buffers=buffers, alignment=values.executable.alignment)
