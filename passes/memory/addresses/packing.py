"""An address problem in the form that the solvers work on: integers in units, and sections instead of times.

- Unit: sizes are rounded up to the alignment, and then everything is divided by the greatest common divisor of what is
  left. Some best solution has all offsets at sums of rounded sizes above 0 or above a fixed buffer, so nothing is lost.
- Sections: two buffers overlap in time exactly if some maximal set of buffers that live together holds both. These sets, in
  order of time, are the sections; a buffer lives in a contiguous range of them.
"""

import dataclasses
import functools
import math

import numpy as np

from graphacc.passes.memory.problem import AddressProblem


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Items to be packed; arrays are int64[n], one entry per item."""

    unit: int  # bytes
    first: np.ndarray  # section
    last: np.ndarray  # section, exclusive
    size: np.ndarray  # units, rounded up
    padding: np.ndarray  # bytes by which `size` was rounded up
    fixed: np.ndarray  # the offset that the item must get, in units, or -1
    lifetime: np.ndarray  # in the problem's time
    num_sections: int

    def __len__(self) -> int:
        return len(self.size)

    @functools.cached_property
    def load(self) -> np.ndarray:
        """Sum of the sizes of each section, in units."""
        change = np.zeros(self.num_sections + 1, np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.last, self.size)
        return np.cumsum(change[:-1])

    @functools.cached_property
    def bound(self) -> int:
        """Bytes that no arena undercuts: the largest live set, where only the topmost buffer is not rounded up."""
        live = self.load * self.unit - self.largest_per_section(self.padding)
        fixed_end = np.where(self.fixed >= 0, (self.fixed + self.size) * self.unit - self.padding, 0)
        return int(max(live.max(initial=0), fixed_end.max(initial=0)))

    def height(self, offsets: np.ndarray) -> int:
        """Bytes of the arena that offsets in units need."""
        return int(((offsets + self.size) * self.unit - self.padding).max(initial=0))

    def limits(self, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The largest offset of each item, and the largest end in each section, in units, for an arena of so many bytes."""
        top = (capacity - (self.size * self.unit - self.padding)) // self.unit
        if not self.padding.any():
            return top, np.full(self.num_sections, capacity // self.unit)
        return top, self.largest_per_section(top + self.size)

    def largest_per_section(self, values: np.ndarray) -> np.ndarray:
        """The largest value of the items of each section; at least 0."""
        largest = np.zeros(self.num_sections, np.int64)
        for first, last, value in zip(self.first.tolist(), self.last.tolist(), values.tolist(), strict=True):
            if value > 0:
                np.maximum(largest[first:last], value, out=largest[first:last])
        return largest

    def smallest(self, load: int) -> np.ndarray:
        """bool[n]: the items of the smallest sizes, as many sizes as have a load of at most `load` units everywhere; no fixed ones."""
        is_small = np.zeros(len(self), bool)
        for size in np.unique(self.size):
            wider = (self.size <= size) & (self.fixed < 0)
            if self.select(np.flatnonzero(wider)).load.max(initial=0) > load:
                break
            is_small = wider
        return is_small

    def parts(self) -> list[np.ndarray]:
        """The items of each part of the problem that no item connects in time with another part."""
        crossings = np.zeros(self.num_sections + 1, np.int64)
        np.add.at(crossings, self.first + 1, 1)
        np.subtract.at(crossings, self.last, 1)
        cuts = np.flatnonzero(np.cumsum(crossings)[:-1] == 0)
        part = np.searchsorted(cuts, self.first, side="right")
        return [np.flatnonzero(part == p) for p in np.unique(part)]

    def select(self, items: np.ndarray) -> "Packing":
        """The problem of some of the items, in the same units."""
        return pack_ranges(
            self.first[items],
            self.last[items],
            size=self.size[items],
            padding=self.padding[items],
            fixed=self.fixed[items],
            lifetime=self.lifetime[items],
            unit=self.unit,
        )


def pack(problem: AddressProblem) -> Packing:
    """The packing of a problem that `check_problem` accepts."""
    buffers, alignment = problem.buffers, problem.alignment
    rounded = [-(-b.size // alignment) for b in buffers]
    fixed = [b.offset // alignment if b.offset is not None else None for b in buffers]
    divisor = math.gcd(*rounded, *(f for f in fixed if f is not None)) or 1
    unit = alignment * divisor
    size = np.array(rounded, np.int64) // divisor
    lower, upper = np.array([b.lower for b in buffers], np.int64), np.array([b.upper for b in buffers], np.int64)
    return pack_ranges(
        lower,
        upper,
        size=size,
        padding=size * unit - np.array([b.size for b in buffers], np.int64),
        fixed=np.array([-1 if f is None else f // divisor for f in fixed], np.int64),
        lifetime=upper - lower,
        unit=unit,
    )


def pack_ranges(lower: np.ndarray, upper: np.ndarray, **fields) -> Packing:
    """A packing from half-open live ranges in any time; `fields` are the other fields of `Packing`."""
    starts, ends = np.unique(lower), np.sort(upper)
    next_end = ends[np.minimum(np.searchsorted(ends, starts, side="right"), len(ends) - 1)] if len(ends) else starts
    maximal = np.ones(len(starts), bool)
    maximal[:-1] = next_end[:-1] <= starts[1:]  # something ends before the set grows again
    times = starts[maximal]
    return Packing(
        first=np.searchsorted(times, lower), last=np.searchsorted(times, upper), num_sections=len(times), **fields
    )
