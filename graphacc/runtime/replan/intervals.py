"""A map from the bytes of one allocation to what they hold, kept as maximal runs of equal values."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator


class IntervalMap:
    """Half-open byte ranges [start, end) with values; bytes that were never set hold None."""

    __slots__ = ("_ends", "_starts", "_values")

    def __init__(self):
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._values: list = []

    def copy(self) -> "IntervalMap":
        """An independent copy."""
        duplicate = IntervalMap()
        duplicate._starts = self._starts.copy()
        duplicate._ends = self._ends.copy()
        duplicate._values = self._values.copy()
        return duplicate

    def __eq__(self, other) -> bool:
        return self._starts == other._starts and self._ends == other._ends and self._values == other._values

    __hash__ = None

    def __iter__(self) -> Iterator[tuple[int, int, object]]:
        return iter(zip(self._starts, self._ends, self._values))

    def read(self, start: int, end: int) -> list[tuple[int, int, object]]:
        """(start, end, value or None) covering [start, end) without holes."""
        found = []
        position = start
        i = max(0, bisect_right(self._starts, start) - 1)
        while i < len(self._starts) and self._starts[i] < end:
            low, high = max(self._starts[i], start), min(self._ends[i], end)
            if low < high:
                if low > position:
                    found.append((position, low, None))
                found.append((low, high, self._values[i]))
                position = high
            i += 1
        if position < end:
            found.append((position, end, None))
        return found

    def write(self, start: int, end: int, value) -> None:
        """Set [start, end) to `value`, which is not None."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = first
        keep = []
        while last < len(self._starts) and self._starts[last] < end:
            low, high, old = self._starts[last], self._ends[last], self._values[last]
            if low < start:
                keep.append((low, start, old))
            if high > end:
                keep.append((end, high, old))
            last += 1
        runs = sorted([*keep, (start, end, value)], key=lambda run: run[0])
        self._replace(first, last, runs)

    def _replace(self, first: int, last: int, runs: list[tuple[int, int, object]]) -> None:
        self._starts[first:last] = [run[0] for run in runs]
        self._ends[first:last] = [run[1] for run in runs]
        self._values[first:last] = [run[2] for run in runs]

    def join(self, other: "IntervalMap", merge: Callable) -> "IntervalMap":
        """The map that holds ``merge(value here, value there)`` (either may be None, not both) at every byte."""
        joined = IntervalMap()
        cuts = sorted({*self._starts, *self._ends, *other._starts, *other._ends})
        for start, end in itertools.pairwise(cuts):
            here, there = self._at(start), other._at(start)
            if here is not None or there is not None:
                joined._append(start, end, merge(here, there))
        return joined

    def _at(self, position: int):
        i = bisect_right(self._starts, position) - 1
        return self._values[i] if i >= 0 and self._ends[i] > position else None

    def _append(self, start: int, end: int, value) -> None:
        if self._ends and self._ends[-1] == start and self._values[-1] == value:
            self._ends[-1] = end
        else:
            self._replace(len(self._starts), len(self._starts), [(start, end, value)])
