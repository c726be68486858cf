"""Proof that a rewritten executable computes what the original computes; nothing is loaded without it.

Works on two executables that were read from their final bytes:

1. only offsets, the arena's size and the order of thunks differ (`_check_messages`, `_match_sequence`);
2. ordered resources (collectives, side effects) run in their old order (`_check_resources`);
3. offsets stay aligned, and two buffers of one thunk overlap exactly as before (`_check_offsets`, `_check_overlaps_within`);
4. every read may see exactly the writes that it saw before, byte by byte (`_check_reads`);
5. no two values that are live at one step share a byte (`_check_live_values`);
6. sampled executions, with loops run 0 to 3 times and branches at random, read the same (`_check_replays`).
"""

from google.protobuf import message

from graphacc.runtime.replan.errors import NotUnderstood, VerificationError
from graphacc.runtime.replan.liveness import Liveness, Orders, find_overlap
from graphacc.runtime.replan.model import (
    AllocationKind,
    Control,
    Executable,
    Sequence,
    Thunk,
    allocation_kind,
    copy_message,
    find_slices,
)
from graphacc.runtime.replan.replay import ReachingDefinitions, Replay, make_chooser
from graphacc.runtime.replan.values import Values

MIN_REPLAYS, MAX_REPLAYS = 3, 8
REPLAYED_THUNKS = 50_000  # replays of large programs are fewer


def verify(original: Executable, rewritten: Executable, orders: Orders, stop: frozenset[str]) -> None:
    """Prove that `rewritten` computes what `original` computes.

    Args:
        original: read from XLA's bytes.
        rewritten: read from ours.
        orders: the claimed order of every changed sequence of `original`.
        stop: message types that hold nested thunks.

    Raises:
        VerificationError: it does not, or it cannot be shown; the message names the thunk.
    """
    _check_messages(original, rewritten)
    thunk_names = [0] * len(rewritten.thunks)
    _match_sequence(original, rewritten, original.root, rewritten.root, orders, stop, thunk_names)
    access_names = _match_accesses(original, rewritten, thunk_names)
    _check_offsets(original, rewritten, access_names)
    for new, old in enumerate(thunk_names):
        _check_overlaps_within(original.thunks[old], rewritten.thunks[new])
    _check_reads(original, rewritten, access_names)
    _check_live_values(rewritten)
    _check_replays(original, rewritten, access_names, thunk_names)


# --- the same program, apart from order and offsets ---


def _check_messages(original: Executable, rewritten: Executable) -> None:
    if original.parts != rewritten.parts:
        raise VerificationError("the rewrite changed what the executable holds beside its message")
    for field in original.message.DESCRIPTOR.fields:
        if field.name not in original.planned_fields and getattr(original.message, field.name) != getattr(rewritten.message, field.name):
            raise VerificationError(f"the rewrite changed the executable's {field.name}")
    if _without_plan(original.assignment) != _without_plan(rewritten.assignment):
        raise VerificationError("the rewrite changed more of the buffer assignment than the arena's size and offsets")


def _without_plan(assignment: message.Message) -> message.Message:
    plain = copy_message(assignment)
    for allocation in plain.buffer_allocations:
        if allocation_kind(allocation) is AllocationKind.TEMPORARY:
            allocation.size = 0
            for entry in allocation.assigned:
                entry.offset = 0
    return plain


def _match_sequence(
    original: Executable,
    rewritten: Executable,
    old: Sequence,
    new: Sequence,
    orders: Orders,
    stop: frozenset[str],
    thunk_names: list[int],
) -> None:
    """Fill `thunk_names`: index of every thunk of `rewritten` -> of the thunk of `original` that it is."""
    order = orders.get(old.index, tuple(range(len(old.thunks))))
    if len(new.thunks) != len(old.thunks) or sorted(order) != list(range(len(old.thunks))):
        raise VerificationError(f"sequence {old.index}: the new order is not a permutation of {len(old.thunks)} thunks")
    for place, thunk in zip(order, new.thunks):
        was = old.thunks[place]
        if _canonical(was, original, stop) != _canonical(thunk, rewritten, stop) or len(was.nested) != len(thunk.nested):
            raise VerificationError(f"{was.kind} {was.name!r}: the rewrite changed more of it than its offsets")
        thunk_names[thunk.index] = was.index
        for old_nested, new_nested in zip(was.nested, thunk.nested):
            _match_sequence(original, rewritten, old_nested, new_nested, orders, stop, thunk_names)
    _check_resources(old, new, order)


def _canonical(thunk: Thunk, executable: Executable, stop: frozenset[str]) -> bytes:
    """A thunk's bytes without its offsets in the arena and without its nested sequences."""
    plain = copy_message(thunk.message)
    if thunk.nested:
        _clear_nested(plain, stop)
    for found in find_slices(plain, stop):
        if executable.temporary is not None and found.buffer_allocation_index == executable.temporary.index:
            found.offset = 0
    return plain.SerializeToString(deterministic=True)


def _clear_nested(root: message.Message, stop: frozenset[str]) -> None:
    """Nested sequences stand directly inside the message of a thunk's kind."""
    for _, content in root.ListFields():
        if isinstance(content, message.Message):
            for field, _ in content.ListFields():
                if field.type == field.TYPE_MESSAGE and field.message_type.full_name in stop:
                    content.ClearField(field.name)


def _check_resources(old: Sequence, new: Sequence, order: tuple[int, ...]) -> None:
    for name in sorted(set().union(*(t.ordered for t in old.thunks))):
        before = [place for place, thunk in enumerate(old.thunks) if name in thunk.ordered]
        after = [place for place, thunk in zip(order, new.thunks) if name in thunk.ordered]
        if before != after:
            raise VerificationError(f"sequence {old.index}: the rewrite changed the order of the {name} thunks")
    for number, (was, now) in enumerate(zip(old.resources, new.resources, strict=True)):
        if was != {order[i] for i in now}:
            raise VerificationError(f"sequence {old.index}: resource {number} names other thunks than before")


def _match_accesses(original: Executable, rewritten: Executable, thunk_names: list[int]) -> list[int]:
    """Access index of `rewritten` -> of `original`."""
    names = [0] * len(rewritten.accesses)
    for thunk in rewritten.thunks:
        was = original.thunks[thunk_names[thunk.index]]
        for new, old in zip(thunk.accesses, was.accesses, strict=True):
            names[new.index] = old.index
    return names


# --- offsets ---


def _check_offsets(original: Executable, rewritten: Executable, access_names: list[int]) -> None:
    for access, name in zip(rewritten.accesses, access_names):
        shift = access.offset - original.accesses[name].offset
        allowed = rewritten.is_temporary(access) and (shift % original.alignment == 0 or not access.size)
        if shift and not allowed:
            raise VerificationError(f"an access to allocation {access.allocation} moved by {shift} bytes")


def _check_overlaps_within(was: Thunk, now: Thunk) -> None:
    """Kernels are compiled for the aliases between their buffers: none may appear or vanish."""
    if _overlaps(was) != _overlaps(now):
        raise VerificationError(f"{was.kind} {was.name!r}: its buffers overlap otherwise than before")


def _overlaps(thunk: Thunk) -> dict[tuple[int, int], int]:
    """Pairs of the thunk's accesses that share a byte, and the distance between their starts."""
    accesses = sorted(enumerate(thunk.accesses), key=lambda entry: (entry[1].allocation, entry[1].offset))
    found = {}
    for place, (i, a) in enumerate(accesses):
        for j, b in accesses[place + 1 :]:
            if b.allocation != a.allocation or b.offset >= a.end:
                break
            if a.overlaps(b):
                found[min(i, j), max(i, j)] = a.offset - b.offset if i < j else b.offset - a.offset
    return found


# --- data flow ---


def _check_reads(original: Executable, rewritten: Executable, access_names: list[int]) -> None:
    before = ReachingDefinitions(original, list(range(len(original.accesses))))
    after = ReachingDefinitions(rewritten, access_names)
    _compare("reaching definitions", before, after, original)


def _compare(what: str, before, after, original: Executable) -> None:
    for key in before.reads.keys() | after.reads.keys():
        if before.reads.get(key) != after.reads.get(key):
            raise VerificationError(f"{what}: {_reader(original, key)} reads other values than before")
    for allocation, contents in before.contents.items():
        if contents != after.contents[allocation]:
            raise VerificationError(f"{what}: allocation {allocation} ends with other contents than before")


def _reader(original: Executable, key) -> str:
    access = original.accesses[key if isinstance(key, int) else key[0]]
    thunk = next(t for t in original.thunks if access in t.accesses)
    return f"{thunk.kind} {thunk.name!r}"


def _check_live_values(rewritten: Executable) -> None:
    try:
        values = Values(rewritten)
    except NotUnderstood as error:
        raise VerificationError(f"after the rewrite, {error}") from None
    overlap = find_overlap(values, Liveness(values, {}))
    if overlap is not None:
        a, b = (rewritten.thunks[value.thunks[0]].name for value in overlap)
        raise VerificationError(f"the values of {a!r} and {b!r} are live together and share bytes")


def _check_replays(original: Executable, rewritten: Executable, access_names: list[int], thunk_names: list[int]) -> None:
    """A program without loops and branches has one path, which the reaching definitions describe exactly."""
    if all(t.control in (Control.LEAF, Control.CALL) for t in original.thunks):
        return
    num_replays = min(MAX_REPLAYS, max(MIN_REPLAYS, REPLAYED_THUNKS // len(original.thunks)))
    for seed in range(num_replays):
        choose = make_chooser(seed)
        before = Replay(original, list(range(len(original.accesses))), list(range(len(original.thunks))), choose)
        after = Replay(rewritten, access_names, thunk_names, choose)
        _compare(f"replay {seed}", before, after, original)
