"""Write a plan back into an executable's messages: slices, the assignment's tables, the order of the thunks."""

from collections.abc import Callable

from graphacc.runtime.replan.addressing import Addresses
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.identity import Identity
from graphacc.runtime.replan.liveness import Orders
from graphacc.runtime.replan.model import Executable, Sequence
from graphacc.runtime.replan.values import Values

Reorder = Callable[[Sequence, tuple[int, ...]], None]


def rewrite(
    executable: Executable, values: Values, identity: Identity, orders: Orders, addresses: Addresses, reorder: Reorder
) -> None:
    """Change the messages of `executable` in place. The model around them is stale afterwards: read the bytes again."""
    _move_slices(executable, values, addresses)
    _move_logical_buffers(executable, identity, addresses)
    for sequence in reversed(executable.sequences):
        if sequence.index in orders:
            reorder(sequence, orders[sequence.index])


def _move_slices(executable: Executable, values: Values, addresses: Addresses) -> None:
    for access in executable.accesses:
        value = values.of_access.get(access.index)
        if value is not None:
            access.slice.offset = addresses.offsets[value.index] + access.offset - value.start
        elif executable.is_temporary(access):
            access.slice.offset = 0  # an empty range


def _move_logical_buffers(executable: Executable, identity: Identity, addresses: Addresses) -> None:
    """XLA uses this table for statistics only, but aborts the process where an entry leaves its allocation."""
    arena = executable.temporary.message
    arena.size = addresses.height
    for entry in arena.assigned:
        value = identity.value_of(entry.logical_buffer_id)
        if value is None:
            entry.offset = 0
        else:
            entry.offset = addresses.offsets[value.index] + identity.slots[entry.logical_buffer_id].offset - value.start
        if entry.size > addresses.height:
            raise NotUnderstood(f"logical buffer {entry.logical_buffer_id} of {entry.size} bytes is larger than the arena")
        entry.offset = max(0, min(entry.offset, addresses.height - entry.size))
