"""Values: the sets of accesses of the temporary arena that must keep their places relative to each other.

Two accesses belong to one value when one may read what the other wrote (reaching definitions, byte by byte, joined over
branches and iterated over loops to a fixed point), or when one thunk updates one in the bytes of the other. A value is what gets
a new address; offsets inside a value never change.
"""

import dataclasses

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.intervals import IntervalMap
from graphacc.runtime.replan.model import Access, Control, Executable, Sequence, Thunk

_UNDEFINED = -1  # the definition of bytes that no thunk has written on some path
_MAX_ITERATIONS = 50

Definitions = frozenset[int]  # indices of accesses that may have written a byte last


@dataclasses.dataclass(eq=False)
class Value:
    """Accesses that move together, in bytes [start, end) of the arena as XLA laid it out."""

    index: int
    start: int
    end: int
    accesses: list[Access]
    thunks: tuple[int, ...] = ()  # indices of the thunks that touch it, ascending

    @property
    def size(self) -> int:
        return self.end - self.start


class Values:
    """All values of an executable's temporary arena."""

    def __init__(self, executable: Executable):
        self.executable = executable
        self._parent = list(range(len(executable.accesses)))
        self._undefined: set[int] = set()
        self._run(executable.root, IntervalMap())
        self._owner = _owners(executable)
        self.all = self._collect()
        self.of_access: dict[int, Value] = {a.index: value for value in self.all for a in value.accesses}

    # --- reaching definitions ---

    def _run(self, sequence: Sequence, memory: IntervalMap) -> IntervalMap:
        """Memory after a sequence; `memory` is taken over and changed."""
        for thunk in sequence.thunks:
            memory = self._run_thunk(thunk, memory)
        return memory

    def _run_thunk(self, thunk: Thunk, memory: IntervalMap) -> IntervalMap:
        if thunk.control is Control.WHILE:
            return self._run_loop(thunk, memory)
        memory = self._access(thunk, memory)
        if thunk.control is Control.CALL:
            return self._run(thunk.nested[0], memory)
        if thunk.control is Control.CONDITIONAL:
            ends = [self._run(branch, memory.copy()) for branch in thunk.nested]
            memory = ends[0]
            for end in ends[1:]:
                memory = memory.join(end, _merge)
        return memory

    def _run_loop(self, thunk: Thunk, memory: IntervalMap) -> IntervalMap:
        condition, body = thunk.nested
        head = memory
        for _ in range(_MAX_ITERATIONS):
            after_condition = self._access(thunk, self._run(condition, head.copy()))
            after_body = self._run(body, after_condition.copy())
            joined = memory.join(after_body, _merge)
            if joined == head:
                return after_condition
            head = joined
        raise NotUnderstood(f"loop {thunk.name!r}: no fixed point after {_MAX_ITERATIONS} iterations")

    def _access(self, thunk: Thunk, memory: IntervalMap) -> IntervalMap:
        """The thunk's own reads, then its own writes."""
        touched = [a for a in thunk.accesses if a.size and self.executable.is_temporary(a)]
        for access in touched:
            if access.mode.reads:
                self._read(access, memory)
        written = [a for a in touched if a.mode.writes]
        for access in written:
            for other in touched:
                if other is not access and access.overlaps(other):
                    self._tie(access.index, other.index)
        for access in written:
            memory.write(access.offset, access.end, frozenset({access.index}))
        return memory

    def _read(self, access: Access, memory: IntervalMap) -> None:
        for _, _, definitions in memory.read(access.offset, access.end):
            for definition in definitions or (_UNDEFINED,):
                if definition == _UNDEFINED:
                    self._undefined.add(access.index)
                else:
                    self._tie(definition, access.index)

    # --- union-find over accesses ---

    def _tie(self, a: int, b: int) -> None:
        self._parent[self._find(a)] = self._find(b)

    def _find(self, a: int) -> int:
        while self._parent[a] != a:
            self._parent[a] = self._parent[self._parent[a]]
            a = self._parent[a]
        return a

    def _collect(self) -> list[Value]:
        if self._undefined:
            thunk = self.executable.thunks[self._owner[min(self._undefined)]]
            raise NotUnderstood(f"{thunk.kind} {thunk.name!r} reads bytes of the arena that nothing has written")
        groups: dict[int, list[Access]] = {}
        for access in self.executable.accesses:
            if access.size and self.executable.is_temporary(access):
                groups.setdefault(self._find(access.index), []).append(access)
        return [self._value(i, accesses) for i, accesses in enumerate(groups.values())]

    def _value(self, index: int, accesses: list[Access]) -> Value:
        return Value(
            index=index,
            start=min(a.offset for a in accesses),
            end=max(a.end for a in accesses),
            accesses=accesses,
            thunks=tuple(sorted({self._owner[a.index] for a in accesses})),
        )


def _owners(executable: Executable) -> list[int]:
    """Access index -> thunk index."""
    return [thunk.index for thunk in executable.thunks for _ in thunk.accesses]


def _merge(a: Definitions | None, b: Definitions | None) -> Definitions:
    return (a or frozenset({_UNDEFINED})) | (b or frozenset({_UNDEFINED}))
