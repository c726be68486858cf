"""Agreement between our values and XLA's own buffer assignment: a precondition of every rewrite.

XLA's logical buffers, joined through `buffer_aliases`, are HloBuffers: each has one slot. Every write to the arena must be the
definition of exactly one HloBuffer at the instruction that the thunk names, inside that buffer's slot, and one HloBuffer must
lie in one value. Then the values found in the bytes are the values that the compiler meant.
"""

import dataclasses

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.model import Access, Control, Executable, Thunk
from graphacc.runtime.replan.values import Value, Values


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where XLA put a logical buffer."""

    allocation: int
    offset: int
    size: int

    def overlaps(self, access: Access) -> bool:
        return self.allocation == access.allocation and self.offset < access.end and access.offset < self.offset + self.size

    def contains(self, access: Access) -> bool:
        return self.allocation == access.allocation and self.offset <= access.offset and access.end <= self.offset + self.size


class Identity:
    """Logical buffers of the arena, and the value that each belongs to."""

    def __init__(self, values: Values):
        self._executable = values.executable
        assignment = self._executable.assignment
        defined = definitions(assignment)
        self.slots = read_slots(assignment, set(defined.values()))
        self._hlo_buffer = _join_aliases(assignment, defined)
        self._check_one_slot_each()
        self._by_instruction = self._index_by_instruction(assignment)
        self._value_of: dict[int, Value] = {}
        for thunk in self._executable.thunks:
            for access in _definitions_of(thunk):
                if access.index in values.of_access:
                    self._match(thunk, access, values.of_access[access.index])
        self._check_every_value_defined(values)

    def value_of(self, logical_buffer: int) -> Value | None:
        """The value that a logical buffer is part of; None if no thunk writes it (a tuple's table, an unused buffer)."""
        return self._value_of.get(self._hlo_buffer[logical_buffer])

    def _index_by_instruction(self, assignment) -> dict[str, list[int]]:
        names = self._executable.instruction_names
        index: dict[str, list[int]] = {}
        for buffer in assignment.logical_buffers:
            instruction = buffer.defined_at.instruction_id
            name = names.get(instruction)
            if name is None:
                raise NotUnderstood(f"logical buffer {buffer.id} is defined by an unknown instruction {instruction}")
            index.setdefault(name, []).append(buffer.id)
        return index

    def _check_one_slot_each(self) -> None:
        places: dict[int, Slot] = {}
        for buffer, slot in self.slots.items():
            known = places.setdefault(self._hlo_buffer[buffer], slot)
            if (known.allocation, known.offset) != (slot.allocation, slot.offset):
                raise NotUnderstood(f"aliased logical buffers stand in two places: {known} and {slot}")

    def _match(self, thunk: Thunk, access: Access, value: Value) -> None:
        candidates = self._by_instruction.get(thunk.name, ())
        buffers = {self._hlo_buffer[b] for b in candidates if b in self.slots and self.slots[b].contains(access)}
        if len(buffers) != 1:
            found = f"a write matches {len(buffers)} buffers of XLA's assignment, expected 1"
            raise NotUnderstood(f"{thunk.kind} {thunk.name!r}: {found}")
        if self._value_of.setdefault(buffers.pop(), value) is not value:
            raise NotUnderstood(f"{thunk.kind} {thunk.name!r}: one buffer of XLA's assignment would be split over two values")

    def _check_every_value_defined(self, values: Values) -> None:
        defined = {value.index for value in self._value_of.values()}
        for value in values.all:
            if value.index not in defined:
                name = self._executable.thunks[value.thunks[0]].name
                raise NotUnderstood(f"a value that {name!r} touches has no buffer in XLA's assignment")


def _definitions_of(thunk: Thunk) -> list[Access]:
    """The thunk's writes. A loop only reads the predicate that its condition computed (it is UPDATE because XLA lists it so), and
    a thunk that waits for others names their writes."""
    return [a for a in thunk.accesses if a.mode.writes and thunk.control is Control.LEAF and thunk.waits_for is None]


def definitions(assignment) -> dict[tuple[int, tuple[int, ...]], int]:
    """(instruction id, shape index) -> logical buffer."""
    defined = {(b.defined_at.instruction_id, tuple(b.defined_at.shape_index)): b.id for b in assignment.logical_buffers}
    num_buffers = len(assignment.logical_buffers)
    if len(defined) != num_buffers or len(set(defined.values())) != num_buffers:
        raise NotUnderstood(f"{num_buffers} logical buffers have {len(defined)} places and {len(set(defined.values()))} ids")
    return defined


def read_slots(assignment, buffers: set[int]) -> dict[int, Slot]:
    """Logical buffer -> its slot."""
    slots: dict[int, Slot] = {}
    for allocation in assignment.buffer_allocations:
        for entry in allocation.assigned:
            buffer = entry.logical_buffer_id
            if buffer not in buffers or buffer in slots:
                raise NotUnderstood(f"allocation {allocation.index} names logical buffer {buffer}: unknown, or named twice")
            slots[buffer] = Slot(allocation.index, entry.offset, entry.size)
    return slots


def _join_aliases(assignment, defined: dict[tuple[int, tuple[int, ...]], int]) -> dict[int, int]:
    """Logical buffer -> the representative of its HloBuffer."""
    parent = {buffer: buffer for buffer in defined.values()}

    def find(buffer: int) -> int:
        while parent[buffer] != buffer:
            buffer = parent[buffer]
        return buffer

    for alias in assignment.buffer_aliases:
        place = (alias.location.instruction_id, tuple(alias.location.shape_index))
        if place not in defined or alias.source_buffer_id not in parent:
            raise NotUnderstood(f"an alias names an unknown logical buffer at instruction {place[0]}, shape index {place[1]}")
        parent[find(alias.source_buffer_id)] = find(defined[place])
    return {buffer: find(buffer) for buffer in parent}


def check_executable(executable: Executable) -> None:
    """The facts about the assignment's tables that a rewrite relies on, whatever the values are."""
    for allocation in executable.allocations.values():
        for entry in allocation.message.assigned:
            if entry.offset < 0 or entry.offset + entry.size > allocation.size:
                raise NotUnderstood(f"logical buffer {entry.logical_buffer_id} lies outside allocation {allocation.index}")
