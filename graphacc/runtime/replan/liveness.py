"""Which values hold bytes at which time, for any order of the thunks.

Time steps number the thunks in the order in which they stand; a thunk with nested sequences has a step before them, one
behind them, and a loop one more between its condition and its body. A value is *occupied* at a step when some byte of it
may have been written and may still be read, or when the thunk of the step touches it: exact, with holes (a loop-carried buffer
is free between its last read and its next write). Sets of values are bit sets in Python integers; what is kept of them are their changes
from step to step (`BitSets`), so that memory grows with the program's length and not with its square.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator
from typing import overload

from graphacc.runtime.replan.model import Control, Executable, Mode, Sequence, Thunk
from graphacc.runtime.replan.values import Value, Values

Orders = dict[int, tuple[int, ...]]  # sequence index -> order of its thunks (places in Sequence.thunks); absent: unchanged


def ordered(sequence: Sequence, orders: Orders) -> list[Thunk]:
    """The thunks of a sequence in their planned order."""
    order = orders.get(sequence.index)
    return sequence.thunks if order is None else [sequence.thunks[i] for i in order]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Time steps of every thunk (lists by thunk index); `middle` is the step at which its own accesses happen."""

    begin: list[int]
    middle: list[int]
    end: list[int]
    length: int


def make_timeline(executable: Executable, orders: Orders) -> Timeline:
    """Number the steps of a planned order."""
    begin, middle, end = ([0] * len(executable.thunks) for _ in range(3))
    now = 0

    def visit(sequence: Sequence) -> None:
        nonlocal now
        for thunk in ordered(sequence, orders):
            begin[thunk.index] = middle[thunk.index] = end[thunk.index] = now
            now += 1
            for number, nested in enumerate(thunk.nested):
                visit(nested)
                if thunk.control is Control.WHILE and number == 0:
                    middle[thunk.index] = now
                    now += 1
            if thunk.control is not Control.LEAF:
                end[thunk.index] = now
                now += 1

    visit(executable.root)
    return Timeline(begin=begin, middle=middle, end=end, length=now)


class BitSets:
    """A sequence of bit sets that change little from one to the next, kept as the bits that change. Looks like a list of integers."""

    _STRIDE = 256  # every so many sets one is kept whole

    def __init__(self, sets: Iterable[int]):
        self._changes: list[tuple[int, ...]] = []  # of each set: the bits in which it differs from the one before
        self._whole: list[int] = []
        before = 0
        for number, bits in enumerate(sets):
            self._changes.append(tuple(_members(bits ^ before)))
            before = bits
            if number % self._STRIDE == 0:
                self._whole.append(bits)

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[int]:
        return self._run(0, len(self))

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place):
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1, "steps are asked for as they follow each other"
            return list(self._run(start, stop))
        place = range(len(self))[place]
        return next(self._run(place, place + 1))

    def _run(self, start: int, stop: int) -> Iterator[int]:
        if start >= stop:
            return
        first = start - start % self._STRIDE
        bits = self._whole[first // self._STRIDE]
        for place in range(first, stop):
            if place > first:
                for member in self._changes[place]:
                    bits ^= 1 << member
            if place >= start:
                yield bits

    def changes(self) -> list[tuple[int, ...]]:
        """Of each set the bits in which it differs from the one before; of the first, from the empty set."""
        return self._changes

    def intervals(self, num_bits: int) -> list[list[tuple[int, int]]]:
        """For every bit the half-open intervals of places in whose sets it is, ascending."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(num_bits)]
        since: dict[int, int] = {}
        for place, changed in enumerate(self._changes):
            for member in changed:
                if member in since:
                    found[member].append((since.pop(member), place))
                else:
                    since[member] = place
        for member, place in since.items():
            found[member].append((place, len(self)))
        return found


def _members(bits: int) -> Iterator[int]:
    """The bits that are set, the highest first: so the integer gets shorter as it goes."""
    while bits:
        highest = bits.bit_length() - 1
        yield highest
        bits ^= 1 << highest


class Liveness:
    """Occupied values per time step, and between the thunks of every sequence."""

    def __init__(self, values: Values, orders: Orders):
        executable = values.executable
        self._orders = orders
        self.timeline = make_timeline(executable, orders)
        self._reads, self._writes, self._kills = _effects(values)
        self._needed = [0] * self.timeline.length
        self._written = [0] * self.timeline.length
        self._needed_between: list[list[int]] = [[] for _ in executable.sequences]
        self._written_between: list[list[int]] = [[] for _ in executable.sequences]
        self._backward(executable.root, 0)
        self._forward(executable.root, 0)
        touched = {self.timeline.middle[t.index]: self._reads[t.index] | self._writes[t.index] for t in executable.thunks}
        both = zip(self._needed, self._written, strict=True)
        self.occupied = BitSets(n & w | touched.get(step, 0) for step, (n, w) in enumerate(both))
        sequences = zip(self._needed_between, self._written_between, strict=True)
        self._between = [BitSets(n & w for n, w in zip(needed, written, strict=True)) for needed, written in sequences]
        del self._needed, self._written, self._needed_between, self._written_between, self._reads, self._writes, self._kills

    def between(self, sequence: Sequence) -> BitSets:
        """Values that hold bytes before place 0, 1, ... n of the ordered sequence (n + 1 bit sets)."""
        return self._between[sequence.index]

    # --- backward: values whose bytes may still be read ---

    def _backward(self, sequence: Sequence, needed: int) -> int:
        thunks = ordered(sequence, self._orders)
        between = self._needed_between[sequence.index] = [0] * (len(thunks) + 1)
        between[-1] = needed
        for place in range(len(thunks) - 1, -1, -1):
            between[place] = needed = self._backward_thunk(thunks[place], needed)
        return needed

    def _backward_thunk(self, thunk: Thunk, needed: int) -> int:
        i, time = thunk.index, self.timeline
        if thunk.control is Control.WHILE:
            return self._backward_loop(thunk, needed)
        self._needed[time.end[i]] = needed
        if thunk.control is Control.CONDITIONAL:
            branches = [self._backward(branch, needed) for branch in thunk.nested]
            before = self._reads[i]
            for branch in branches:
                before |= branch
        else:
            inside = self._backward(thunk.nested[0], needed) if thunk.nested else needed
            before = inside & ~self._kills[i] | self._reads[i]
        self._needed[time.begin[i]] = self._needed[time.begin[i]] | before if thunk.nested else before  # a leaf touches what else is needed behind it
        return before

    def _backward_loop(self, thunk: Thunk, needed: int) -> int:
        i, time = thunk.index, self.timeline
        condition, body = thunk.nested
        head = 0
        while True:
            middle = needed | self._backward(body, head) | self._reads[i]
            before = self._backward(condition, middle) | head
            if before == head:
                break
            head = before
        self._needed[time.middle[i]] = middle
        self._needed[time.end[i]] = needed | head
        self._needed[time.begin[i]] = head
        return head

    # --- forward: values of which some byte may have been written ---

    def _forward(self, sequence: Sequence, written: int) -> int:
        thunks = ordered(sequence, self._orders)
        between = self._written_between[sequence.index] = [written]
        for thunk in thunks:
            written = self._forward_thunk(thunk, written)
            between.append(written)
        return written

    def _forward_thunk(self, thunk: Thunk, written: int) -> int:
        i, time = thunk.index, self.timeline
        if thunk.control is Control.WHILE:
            return self._forward_loop(thunk, written)
        self._written[time.begin[i]] = written
        written |= self._reads[i] | self._writes[i]
        after = written
        for nested in thunk.nested:
            after |= self._forward(nested, written)
        self._written[time.end[i]] |= after
        return after

    def _forward_loop(self, thunk: Thunk, written: int) -> int:
        i, time = thunk.index, self.timeline
        condition, body = thunk.nested
        head = written
        while True:
            middle = self._forward(condition, head) | self._reads[i] | self._writes[i]
            after_body = self._forward(body, middle) | head
            if after_body == head:
                break
            head = after_body
        self._written[time.begin[i]] = head
        self._written[time.middle[i]] = middle
        self._written[time.end[i]] = middle | head
        return middle


def _effects(values: Values) -> tuple[list[int], list[int], list[int]]:
    """Per thunk: values that it reads, writes, and kills (overwrites whole, without reading them)."""
    reads, writes, kills = ([0] * len(values.executable.thunks) for _ in range(3))
    for thunk in values.executable.thunks:
        i = thunk.index
        overwritten: dict[int, list[tuple[int, int]]] = {}
        for access in thunk.accesses:
            value = values.of_access.get(access.index)
            if value is None:
                continue
            reads[i] |= access.mode.reads << value.index
            writes[i] |= access.mode.writes << value.index
            if access.mode is Mode.WRITE:
                overwritten.setdefault(value.index, []).append((access.offset, access.end))
        for index, ranges in overwritten.items():
            kills[i] |= _covers(ranges, values.all[index]) << index
        kills[i] &= ~reads[i]
    return reads, writes, kills


def _covers(ranges: list[tuple[int, int]], value: Value) -> bool:
    position = value.start
    for start, end in sorted(ranges):
        if start > position:
            return False
        position = max(position, end)
    return position >= value.end


def find_overlap(values: Values, liveness: Liveness) -> tuple[Value, Value] | None:
    """Two values that are occupied at one step and share a byte, or None.

    The occupied values are kept by address. As they share no byte, one that enters need only be compared with its neighbours.
    """
    present: list[tuple[int, int]] = []  # (start, value)
    inside: set[int] = set()
    for changed in liveness.occupied.changes():
        for index in inside.intersection(changed):
            del present[bisect.bisect_left(present, (values.all[index].start, index))]
        for index in set(changed) - inside:
            value = values.all[index]
            place = bisect.bisect_left(present, (value.start, index))
            for _, other in present[max(place - 1, 0) : place + 1]:
                if value.start < values.all[other].end and values.all[other].start < value.end:
                    return value, values.all[other]
            present.insert(place, (value.start, index))
        inside.symmetric_difference_update(changed)
    return None


def members(bits: int, values: Values) -> list[Value]:
    """The values in a bit set."""
    return [values.all[member] for member in _members(bits)][::-1]
