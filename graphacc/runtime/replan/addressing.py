"""Addresses for the values of an executable, given the order of its thunks.

The planner core packs buffers with one live interval each, but values of loops and branches have holes in theirs. So the core is
asked twice: once with the hull of every value, and once with the values that have holes fixed (placed first, by plain first
fit), each of their intervals a buffer of its own. All answers are compacted against the exact occupancy. Placing values by
ascending offset, each at its lowest free place, never raises one of them: every value below it can only have moved down.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from graphacc.passes.memory.problem import AddressProblem, LiveBuffer
from graphacc.runtime.replan.liveness import Liveness
from graphacc.runtime.replan.ordering import aligned
from graphacc.runtime.replan.values import Values

HEURISTICS_SHARE = 0.25  # of the time: after it no further order is tried by first fit

AddressSolver = Callable[[AddressProblem, float], tuple[int, ...]]
"""(problem, seconds) -> an offset per buffer, or () where it found none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addresses:
    """Offsets of all values in one arena."""

    offsets: tuple[int, ...]  # by value index
    height: int  # bytes of the arena
    max_live: int  # largest sum of the values that are occupied at one step: no arena is lower for this order


class Occupancy:
    """The exact occupancy of values as arrays over [V] values. Nothing is kept for pairs of values, or for values and steps."""

    def __init__(self, values: Values, liveness: Liveness):
        alignment = values.executable.alignment
        self.sizes = np.array([aligned(v.size, alignment) for v in values.all], dtype=np.int64)  # [V]
        self.intervals = liveness.occupied.intervals(len(values.all))  # [V] lists of half-open intervals of steps
        self.has_holes = np.array([len(intervals) > 1 for intervals in self.intervals])  # [V]
        self.first = np.array([intervals[0][0] for intervals in self.intervals])  # [V]
        self.duration = np.array([sum(high - low for low, high in intervals) for intervals in self.intervals])  # [V]
        change = np.zeros(len(liveness.occupied) + 1, dtype=np.int64)
        self._owner = np.repeat(np.arange(len(values.all)), [len(intervals) for intervals in self.intervals])  # [I] of all intervals
        self._lower, self._upper = np.array([run for intervals in self.intervals for run in intervals]).T  # [I]
        np.add.at(change, self._lower, self.sizes[self._owner])
        np.subtract.at(change, self._upper, self.sizes[self._owner])
        self.live = np.cumsum(change[:-1])  # [T]
        pressure = [self.live[low:high].max() for low, high in zip(self._lower.tolist(), self._upper.tolist())]
        self.pressure = np.zeros(len(values.all), dtype=np.int64)  # [V]
        np.maximum.at(self.pressure, self._owner, pressure)

    def conflicting(self, value: int) -> np.ndarray:
        """The values, itself among them, that are occupied at a step at which `value` is; one with holes may occur several times."""
        met = np.zeros(len(self._owner), dtype=bool)
        for low, high in self.intervals[value]:
            met |= (self._lower < high) & (self._upper > low)
        return self._owner[met]

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
    alignment = values.executable.alignment
    everything = np.ones(len(values.all), dtype=bool)
    begin = time.monotonic()
    deadline = begin + seconds
    orders = _priority_orders(occupancy, everything)
    best = _place(occupancy, next(orders))
    for order in orders:
        if best.height == occupancy.max_live or time.monotonic() > begin + HEURISTICS_SHARE * seconds:
            break
        best = min(best, _place(occupancy, order), key=_height)
    problems = list(_problems(occupancy, alignment))
    for number, problem in enumerate(problems, 1):
        left = deadline - time.monotonic()
        if best.height == occupancy.max_live or left <= 0:
            break
        offsets = solve(problem.addresses, left if number == len(problems) else left / 2)
        if offsets:
            lowest = [min(offsets[b] for b in buffers) for buffers in problem.buffers_of]
            best = min(best, _place(occupancy, np.argsort(lowest, kind="stable")), key=_height)
    return best


def address_map(values: Values, liveness: Liveness, offsets: Sequence[int]) -> AddressProblem:
    """A plan to look at: every interval of every value as a buffer with its offset, named after the thunk that writes it first.

    Args:
        values: of the executable.
        liveness: of the plan's order.
        offsets: of the values, by index.
    """
    occupancy = Occupancy(values, liveness)
    thunks = values.executable.thunks
    buffers = tuple(
        LiveBuffer(name=thunks[v.thunks[0]].name, lower=lower, upper=upper, size=v.size, offset=int(offset))
        for v, offset, intervals in zip(values.all, offsets, occupancy.intervals, strict=True)
        for lower, upper in intervals
    )
    return AddressProblem(buffers=buffers)


def _height(addresses: Addresses) -> int:
    return addresses.height


@dataclasses.dataclass(frozen=True)
class _CoreProblem:
    """A problem for the core, and the buffers of it that stand for each value."""

    addresses: AddressProblem
    buffers_of: list[list[int]]  # [V]


def _problems(occupancy: Occupancy, alignment: int) -> Iterator[_CoreProblem]:
    """Hulls first; then, where there are holes, exact intervals with the values that have holes placed beforehand."""
    hulls = [[(intervals[0][0], intervals[-1][1])] for intervals in occupancy.intervals]
    yield _core_problem(occupancy, alignment, hulls, {})
    if occupancy.has_holes.any():
        for order in _priority_orders(occupancy, occupancy.has_holes):
            placed = _place(occupancy, order).offsets
            yield _core_problem(occupancy, alignment, occupancy.intervals, {v: placed[v] for v in order})


def _core_problem(
    occupancy: Occupancy, alignment: int, intervals: list[list[tuple[int, int]]], fixed: dict[int, int]
) -> _CoreProblem:
    buffers: list[LiveBuffer] = []
    buffers_of: list[list[int]] = []
    for v, runs in enumerate(intervals):
        buffers_of.append(list(range(len(buffers), len(buffers) + len(runs))))
        size = int(occupancy.sizes[v])
        buffers += [
            LiveBuffer(name=f"value {v}, run {i}", lower=lower, upper=upper, size=size, offset=fixed.get(v))
            for i, (lower, upper) in enumerate(runs)
        ]
    return _CoreProblem(AddressProblem(buffers=tuple(buffers), alignment=alignment), buffers_of)


def _priority_orders(occupancy: Occupancy, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Orders for first fit of the chosen values: by size, by size and time, and the values of the fullest steps first."""
    size, duration, pressure = -occupancy.sizes, -occupancy.duration, -occupancy.pressure
    for keys in (
        (duration, size),
        (size, size * occupancy.duration),
        (size, occupancy.first),
        (duration, size, pressure),
        (size, duration, pressure),
    ):
        order = np.lexsort(keys)
        yield order[chosen[order]]


def _place(occupancy: Occupancy, order: Iterable[int]) -> Addresses:
    """First fit: each value of `order` at the lowest offset where it overlaps none of its conflicting predecessors."""
    sizes = occupancy.sizes
    offsets = np.zeros(len(sizes), dtype=np.int64)
    placed = np.zeros(len(sizes), dtype=bool)
    for value in order:
        neighbours = occupancy.conflicting(value)
        neighbours = neighbours[placed[neighbours]]
        neighbours = neighbours[np.argsort(offsets[neighbours], kind="stable")]
        offsets[value] = _lowest_gap(offsets[neighbours], sizes[neighbours], int(sizes[value]))
        placed[value] = True
    height = int((offsets + sizes).max())
    return Addresses(offsets=tuple(offsets.tolist()), height=height, max_live=occupancy.max_live)


def _lowest_gap(starts: np.ndarray, sizes: np.ndarray, size: int) -> int:
    """The lowest offset where `size` bytes fit between blocks that are sorted by their starts."""
    tops = np.concatenate(([0], np.maximum.accumulate(starts + sizes)))
    fits = np.flatnonzero(starts - tops[:-1] >= size)
    return int(tops[fits[0]] if len(fits) else tops[-1])
