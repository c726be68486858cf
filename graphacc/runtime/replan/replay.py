"""What every read sees: over all paths at once (reaching definitions), and along single paths (symbolic replay).

Both give tables that do not depend on addresses or order, so that two programs that compute the same have equal tables.
Accesses are named by `names`: the access of the original program that they stand for. This is the verifier's own account of the
data flow, apart from `values`, which the planner uses.
"""

import random
from collections.abc import Callable

from graphacc.runtime.replan.errors import VerificationError
from graphacc.runtime.replan.intervals import IntervalMap
from graphacc.runtime.replan.model import Access, AllocationKind, Control, Executable, Sequence, Thunk

Memory = dict[int, IntervalMap]  # by allocation
Run = tuple[int, int, frozenset]  # bytes [start, end) of a read, and the writes that they come from with their shifts
Table = dict[object, tuple[Run, ...]]

_INITIAL = -1  # what an allocation held before the program ran
_MAX_ITERATIONS = 50
_MAX_TRIPS = 3


def _empty_memory(executable: Executable) -> Memory:
    return {index: IntervalMap() for index in executable.allocations}


def _is_fixed(executable: Executable, allocation: int) -> bool:
    return executable.allocations[allocation].kind is not AllocationKind.TEMPORARY


def _append(runs: list[Run], start: int, end: int, sources: frozenset) -> None:
    if runs and runs[-1][1] == start and runs[-1][2] == sources:
        runs[-1] = (runs[-1][0], end, sources)
    else:
        runs.append((start, end, sources))


class ReachingDefinitions:
    """For every read, byte by byte, the writes that it may see; for every allocation that does not move, its final contents."""

    def __init__(self, executable: Executable, names: list[int]):
        self._executable = executable
        self._names = names
        self.reads: Table = {}
        memory = self._run(executable.root, _empty_memory(executable))
        fixed = [a for a in executable.allocations if _is_fixed(executable, a)]
        self.contents: Table = {a: self._runs(a, memory[a], 0, executable.allocations[a].size) for a in fixed}

    def _run(self, sequence: Sequence, memory: Memory) -> Memory:
        for thunk in sequence.thunks:
            memory = self._run_thunk(thunk, memory)
        return memory

    def _run_thunk(self, thunk: Thunk, memory: Memory) -> Memory:
        match thunk.control:
            case Control.LEAF:
                return self._access(thunk, memory)
            case Control.CALL:
                return self._run(thunk.nested[0], self._access(thunk, memory))
            case Control.CONDITIONAL:
                before = self._access(thunk, memory)
                ends = [self._run(branch, _copy(before)) for branch in thunk.nested]
                return _join_all(ends)
            case Control.WHILE:
                return self._run_loop(thunk, memory)

    def _run_loop(self, thunk: Thunk, memory: Memory) -> Memory:
        condition, body = thunk.nested
        head = memory
        for _ in range(_MAX_ITERATIONS):
            checked = self._access(thunk, self._run(condition, _copy(head)))
            following = _join_all([memory, self._run(body, _copy(checked))])
            if following == head:
                return checked
            head = following
        raise VerificationError(f"loop {thunk.name!r}: no fixed point after {_MAX_ITERATIONS} iterations")

    def _access(self, thunk: Thunk, memory: Memory) -> Memory:
        for access in thunk.accesses:
            if access.mode.reads:
                runs = self._runs(access.allocation, memory[access.allocation], access.offset, access.end)
                self.reads[self._names[access.index]] = runs
        for access in thunk.accesses:
            if access.mode.writes:
                memory[access.allocation].write(access.offset, access.end, frozenset({access.index}))
        return memory

    def _runs(self, allocation: int, memory: IntervalMap, start: int, end: int) -> tuple[Run, ...]:
        runs: list[Run] = []
        for low, high, definitions in memory.read(start, end):
            sources = frozenset(self._source(d, allocation, start) for d in definitions or (_INITIAL,))
            _append(runs, low - start, high - start, sources)
        return tuple(runs)

    def _source(self, definition: int, allocation: int, start: int) -> tuple[object, int]:
        """(which write, how far its bytes are shifted against the read's)."""
        if definition == _INITIAL:
            return ("initial", allocation), start if _is_fixed(self._executable, allocation) else 0
        return self._names[definition], start - self._executable.accesses[definition].offset


def _copy(memory: Memory) -> Memory:
    return {allocation: intervals.copy() for allocation, intervals in memory.items()}


def _join_all(memories: list[Memory]) -> Memory:
    joined = memories[0]
    for memory in memories[1:]:
        joined = {allocation: joined[allocation].join(memory[allocation], _merge) for allocation in joined}
    return joined


def _merge(a: frozenset | None, b: frozenset | None) -> frozenset:
    return (a or frozenset({_INITIAL})) | (b or frozenset({_INITIAL}))


Chooser = Callable[[object, int], int]
"""(which decision, number of choices) -> the choice; the same for both programs."""


def make_chooser(seed: int) -> Chooser:
    """Seeds 0, 1, 2: every loop runs so many times, where allowed. Later seeds: at random. Branches are random always."""

    def choose(decision: object, num_choices: int) -> int:
        if seed < 3 and decision[0] == "trips":
            return min(seed, num_choices - 1)
        return random.Random(repr((seed, decision))).randrange(num_choices)

    return choose


class Replay:
    """One path through the program, with symbols instead of bytes: a symbol is (which write, its how-manieth execution)."""

    def __init__(self, executable: Executable, names: list[int], thunk_names: list[int], choose: Chooser):
        self._executable = executable
        self._names = names
        self._thunk_names = thunk_names
        self._choose = choose
        self._memory = _empty_memory(executable)
        self._counts: dict[int, int] = {}
        self._depth = 0  # of nested loops: deep ones run fewer times, to bound the work
        self.reads: Table = {}
        self._run(executable.root)
        fixed = [a for a in executable.allocations if _is_fixed(executable, a)]
        self.contents: Table = {a: self._runs(a, 0, executable.allocations[a].size) for a in fixed}

    def _run(self, sequence: Sequence) -> None:
        for thunk in sequence.thunks:
            self._run_thunk(thunk)

    def _run_thunk(self, thunk: Thunk) -> None:
        if thunk.control is Control.WHILE:
            self._run_loop(thunk)
            return
        count = self._access(thunk)
        if thunk.control is Control.CALL:
            self._run(thunk.nested[0])
        elif thunk.control is Control.CONDITIONAL:
            decision = ("branch", self._thunk_names[thunk.index], count)
            self._run(thunk.nested[self._choose(decision, len(thunk.nested))])

    def _run_loop(self, thunk: Thunk) -> None:
        """A loop of known length never runs its condition: both ways are tried."""
        name = self._thunk_names[thunk.index]
        entered = self._counts[-1 - name] = self._counts.get(-1 - name, 0) + 1
        checks = not (thunk.has_trip_count and self._choose(("unchecked", name, entered), 2))
        num_choices = max(2, _MAX_TRIPS + 1 - self._depth)
        self._depth += 1
        for _ in range(self._choose(("trips", name, entered), num_choices)):
            self._check(thunk, checks)
            self._run(thunk.nested[1])
        self._depth -= 1
        self._check(thunk, checks)

    def _check(self, thunk: Thunk, checks: bool) -> None:
        if checks:
            self._run(thunk.nested[0])
            self._access(thunk)

    def _access(self, thunk: Thunk) -> int:
        name = self._thunk_names[thunk.index]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        for access in thunk.accesses:
            if access.mode.reads:
                self.reads[self._names[access.index], count] = self._runs(access.allocation, access.offset, access.end)
        for access in thunk.accesses:
            if access.mode.writes:
                self._write(access, count)
        return count

    def _write(self, access: Access, count: int) -> None:
        symbol = (self._names[access.index], count, access.offset)
        self._memory[access.allocation].write(access.offset, access.end, symbol)

    def _runs(self, allocation: int, start: int, end: int) -> tuple[Run, ...]:
        initial = ("initial", allocation, 0 if _is_fixed(self._executable, allocation) else start)
        runs: list[Run] = []
        for low, high, symbol in self._memory[allocation].read(start, end):
            write, count, offset = symbol or initial
            _append(runs, low - start, high - start, frozenset({(write, count, start - offset)}))
        return tuple(runs)
