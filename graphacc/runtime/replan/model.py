"""What an executable does, without its backend: sequences of thunks that read and write ranges of allocations.

A *thunk* is one operation of XLA's runtime. Loops, conditionals and calls hold nested sequences. The protobuf messages stay
attached, so that a plan is written back where it came from.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator

from google.protobuf import descriptor, message

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.schema import Schema, child_messages

SLICE_MESSAGE = "xla.buffer_assignment.BufferAllocationSliceProto"


class Mode(enum.Enum):
    """What a thunk does with a range of bytes."""

    READ = "read"
    WRITE = "write"  # writes all of it, whatever it held
    UPDATE = "update"  # reads and writes it

    @property
    def reads(self) -> bool:
        return self is not Mode.WRITE

    @property
    def writes(self) -> bool:
        return self is not Mode.READ


class Control(enum.Enum):
    """How a thunk runs the sequences nested in it."""

    LEAF = "leaf"  # it has none
    CALL = "call"  # one, once
    CONDITIONAL = "conditional"  # exactly one of them
    WHILE = "while"  # (condition, body): condition, then while it holds body and condition again


class AllocationKind(enum.Enum):
    """Where an allocation's memory comes from."""

    TEMPORARY = "temporary"  # the one arena that a plan changes
    PARAMETER = "parameter"  # also donated ones, which outputs reuse
    CONSTANT = "constant"
    OUTPUT = "output"
    THREAD_LOCAL = "thread local"  # inside a kernel, never in a thunk


@dataclasses.dataclass(eq=False, slots=True)
class Access:
    """One range of bytes [offset, offset + size) of one allocation, in one thunk."""

    mode: Mode
    allocation: int
    offset: int
    size: int
    slice: message.Message  # the BufferAllocationSliceProto that says so
    index: int = -1  # in Executable.accesses

    @property
    def end(self) -> int:
        return self.offset + self.size

    def overlaps(self, other: "Access") -> bool:
        """Whether they share a byte."""
        return self.allocation == other.allocation and self.offset < other.end and other.offset < self.end


@dataclasses.dataclass(eq=False, slots=True)
class Thunk:
    """One operation of the runtime, with everything that it touches itself (not what its nested sequences touch)."""

    kind: str  # the field of ThunkProto that is set
    name: str  # of its HLO instruction
    message: message.Message
    accesses: tuple[Access, ...]
    control: Control = Control.LEAF
    nested: tuple["Sequence", ...] = ()
    has_trip_count: bool = False  # a loop of known length, whose condition the runtime never runs
    ordered: frozenset[str] = frozenset()  # thunks that share one of these names keep their order
    waits_for: int | None = None  # place, in its sequence, of the thunk whose work on another stream ends here; see `gpu`
    index: int = -1  # in Executable.thunks: a number for every thunk, nested ones behind their parent
    last: int = -1  # index of the last thunk nested in it, or its own


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """Thunks in the order in which they run."""

    thunks: list[Thunk]
    message: message.Message  # it has a repeated field `thunks`
    resources: tuple[frozenset[int], ...] = ()  # each the places of the thunks that it names
    index: int = -1  # in Executable.sequences, parents before children


@dataclasses.dataclass(eq=False, slots=True)
class Allocation:
    """One block of device memory."""

    index: int
    size: int
    kind: AllocationKind
    message: message.Message  # the BufferAllocationProto


@dataclasses.dataclass(eq=False)
class Executable:
    """A compiled program of one device."""

    root: Sequence
    allocations: dict[int, Allocation]
    alignment: int  # of every offset in the temporary arena
    assignment: message.Message  # BufferAssignmentProto
    instruction_names: dict[int, str]  # HLO instruction id -> name
    message: message.Message  # the backend's whole message
    planned_fields: tuple[str, ...]  # of it: they hold the thunks and the allocations
    parts: tuple[bytes, ...] = ()  # what the backend keeps beside its message; a plan never changes it
    thunks: list[Thunk] = dataclasses.field(default_factory=list)
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    accesses: list[Access] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self._number(self.root)
        for thunk in self.thunks:
            for access in thunk.accesses:
                self._check_bounds(thunk, access)

    def _number(self, sequence: Sequence) -> None:
        sequence.index = len(self.sequences)
        self.sequences.append(sequence)
        for thunk in sequence.thunks:
            thunk.index = len(self.thunks)
            self.thunks.append(thunk)
            for access in thunk.accesses:
                access.index = len(self.accesses)
                self.accesses.append(access)
            for nested in thunk.nested:
                self._number(nested)
            thunk.last = len(self.thunks) - 1

    def _check_bounds(self, thunk: Thunk, access: Access) -> None:
        allocation = self.allocations.get(access.allocation)
        where = f"{thunk.kind} {thunk.name!r}, allocation {access.allocation}"
        if allocation is None:
            raise NotUnderstood(f"{where}: no such allocation")
        if allocation.kind is AllocationKind.THREAD_LOCAL:
            raise NotUnderstood(f"{where}: a thunk touches a thread-local allocation")
        if access.offset < 0 or access.size < 0 or access.end > allocation.size:
            raise NotUnderstood(f"{where}: bytes [{access.offset}, {access.end}) of {allocation.size}")

    @functools.cached_property
    def temporary(self) -> Allocation | None:
        """The arena of temporaries, if the program has one."""
        return next((a for a in self.allocations.values() if a.kind is AllocationKind.TEMPORARY), None)

    def is_temporary(self, access: Access) -> bool:
        """Whether a plan may move it."""
        return self.temporary is not None and access.allocation == self.temporary.index

    def family(self, thunk: Thunk) -> list[Thunk]:
        """A thunk and all thunks nested in it."""
        return self.thunks[thunk.index : thunk.last + 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How the executables of one of XLA's backends are read and written."""

    read: Callable[[Schema, bytes], Executable]
    write: Callable[[Executable], bytes]  # as its messages now stand
    reorder: Callable[[Sequence, tuple[int, ...]], None]  # of one sequence's messages: places of its thunks, in the new order
    release_collectives: Callable[[Executable], None]  # the collectives of the outermost sequence need not keep their order
    thunk_sequences: frozenset[str]  # message types that hold nested thunks


def read_allocations(table) -> dict[int, Allocation]:
    """The allocations of a repeated field of `BufferAllocationProto`.

    Raises:
        NotUnderstood: they are not in order, or their temporaries lie in several arenas.
    """
    allocations = {}
    for i, allocation in enumerate(table):
        if allocation.index != i:
            raise NotUnderstood(f"allocation {allocation.index} stands at place {i}")
        allocations[i] = Allocation(index=i, size=allocation.size, kind=allocation_kind(allocation), message=allocation)
    temporaries = [a.index for a in allocations.values() if a.kind is AllocationKind.TEMPORARY]
    if len(temporaries) > 1:
        raise NotUnderstood(f"the executable has {len(temporaries)} arenas of temporaries {temporaries}, expected one")
    return allocations


def reorder_thunks(sequence: Sequence, order: tuple[int, ...]) -> None:
    """Put the thunk messages of one sequence into `order`."""
    thunks = sequence.message.thunks
    reordered = [copy_message(thunks[i]) for i in order]
    del thunks[:]
    thunks.extend(reordered)


def copy_message(original: message.Message) -> message.Message:
    """An independent copy."""
    duplicate = type(original)()
    duplicate.CopyFrom(original)
    return duplicate


def allocation_kind(allocation: message.Message) -> AllocationKind:
    """As `BufferAllocation::IsPreallocatedTempBuffer()` and its neighbours decide."""
    if allocation.is_thread_local:
        return AllocationKind.THREAD_LOCAL
    if allocation.is_entry_computation_parameter:
        return AllocationKind.PARAMETER
    if allocation.is_constant:
        return AllocationKind.CONSTANT
    return AllocationKind.OUTPUT if allocation.maybe_live_out else AllocationKind.TEMPORARY


def find_slices(root: message.Message, stop: frozenset[str]) -> Iterator[message.Message]:
    """All slice messages below `root`, not looking into messages of the types in `stop`."""
    for field in _fields_with_slices(root.DESCRIPTOR, stop):
        for child in _children(root, field.name):
            if field.message_type.full_name == SLICE_MESSAGE:
                yield child
            else:
                yield from find_slices(child, stop)


@functools.cache
def _fields_with_slices(kind: descriptor.Descriptor, stop: frozenset[str]) -> tuple[descriptor.FieldDescriptor, ...]:
    """The fields of a message type through which a slice can be reached."""
    fields = (f for f in kind.fields if f.type == f.TYPE_MESSAGE and f.message_type.full_name not in stop)
    return tuple(f for f in fields if _reaches_slice(f.message_type, stop, frozenset()))


def _reaches_slice(kind: descriptor.Descriptor, stop: frozenset[str], visited: frozenset[str]) -> bool:
    if kind.full_name == SLICE_MESSAGE:
        return True
    inner = [f.message_type for f in kind.fields if f.type == f.TYPE_MESSAGE]
    excluded = stop | visited | {kind.full_name}
    return any(_reaches_slice(k, stop, excluded) for k in inner if k.full_name not in excluded)


def follow(root: message.Message, path: str) -> list[message.Message]:
    """The messages at the end of a dotted field path; repeated fields fan out, unset ones give none.

    Raises:
        NotUnderstood: this XLA's schema has no such field.
    """
    reached = [root]
    for name in path.split("."):
        reached = [child for parent in reached for child in _children(parent, name)]
    return reached


def _children(parent: message.Message, name: str) -> list[message.Message]:
    field = parent.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        raise NotUnderstood(f"{parent.DESCRIPTOR.full_name} has no field {name} in this XLA")
    if field.is_repeated or parent.HasField(name):
        return child_messages(field, getattr(parent, name))
    return []
