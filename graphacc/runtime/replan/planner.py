"""From the bytes of an executable to the bytes of a planned one: read, understand, plan, write back, prove."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable

from graphacc.passes.memory.problem import AddressProblem
from graphacc.runtime.replan import cpu, gpu, riegeli
from graphacc.runtime.replan.addressing import Addresses, AddressSolver, Occupancy, address_map, find_addresses
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.identity import Identity, check_executable
from graphacc.runtime.replan.liveness import Liveness, Orders, find_overlap
from graphacc.runtime.replan.model import Backend, Executable
from graphacc.runtime.replan.ordering import Ordering, OrderSolver, find_orders
from graphacc.runtime.replan.rewrite import rewrite
from graphacc.runtime.replan.schema import Schema, read_schema
from graphacc.runtime.replan.values import Values
from graphacc.runtime.replan.verify import verify

ORDER_SHARE = 0.6  # of the time budget; addresses get what the orders leave


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solvers:
    """The planner core, as this adapter calls it."""

    order: OrderSolver
    addresses: AddressSolver


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedBytes:
    """What planning a serialised executable gave."""

    serialized: bytes | None  # the planned executable; None: XLA's plan is as good
    temporary_before: int  # bytes of the arena
    temporary_after: int
    lower_bound: int  # bytes; no plan that keeps these thunks' dependencies and in-place updates needs less
    num_thunks: int
    num_values: int
    seconds: float
    map_before: AddressProblem  # every value with its steps and its offset, under XLA's plan
    map_after: AddressProblem | None  # under ours; None where XLA's is kept


def plan_bytes(
    serialized: bytes, *, library: os.PathLike, solvers: Solvers, seconds: float, tolerance: float = 0.0, free_collectives: bool = False
) -> PlannedBytes:
    """Plan the memory of a serialised executable again. Nothing is run: one for CUDA needs no GPU.

    Args:
        serialized: ``LoadedExecutable.serialize()``, of XLA:CPU or XLA:CUDA.
        library: the shared library of XLA that wrote it, for its schema: jaxlib's own, or that of the CUDA plugin.
        solvers: the planner core.
        seconds: the solvers' budget; reading and proving come on top.
        tolerance: XLA's plan is kept where it is above the lower bound by at most this share of it.
        free_collectives: the plan chooses the order of collectives, too: all devices run this executable, none another one. On CUDA they keep it.

    Raises:
        NotUnderstood: something in the executable is unknown, or contradicts our model.
        VerificationError: our rewrite is wrong.
    """
    start = time.monotonic()
    schema = read_schema(library)
    envelope = open_envelope(serialized)
    backend = find_backend(envelope.executable)
    read = functools.partial(_read, schema, backend, free_collectives)
    executable = read(envelope.executable)
    values, identity, liveness = understand(executable)
    before = executable.temporary.size
    solving = time.monotonic()
    ordering = find_orders(values, solvers.order, ORDER_SHARE * seconds, bound_wanted=before / (1 + tolerance))
    left = max(0.0, seconds - (time.monotonic() - solving))
    planned, after, map_after = None, before, None
    if before > (1 + tolerance) * ordering.lower_bound:
        orders, addresses = _choose(values, liveness, ordering, solvers.addresses, left)
        if addresses.height < before:
            map_after = address_map(values, Liveness(values, orders), addresses.offsets)
            rewrite(executable, values, identity, orders, addresses, backend.reorder)
            planned, after = backend.write(executable), addresses.height
            prove(read, backend, envelope.executable, planned, orders)
    return PlannedBytes(
        serialized=None if planned is None else envelope.with_executable(planned),
        temporary_before=before,
        temporary_after=after,
        lower_bound=min(after, ordering.lower_bound),
        num_thunks=len(executable.thunks),
        num_values=len(values.all),
        seconds=time.monotonic() - start,
        map_before=address_map(values, liveness, [value.start for value in values.all]),
        map_after=map_after,
    )


def understand(executable: Executable) -> tuple[Values, Identity, Liveness]:
    """Values, their identity and their liveness, after checking that they explain XLA's own plan.

    Raises:
        NotUnderstood: there is nothing to plan, or the model contradicts the executable.
    """
    if executable.temporary is None:
        raise NotUnderstood("the program has no temporaries")
    check_executable(executable)
    values = Values(executable)
    if not values.all:
        raise NotUnderstood("no thunk touches the program's temporaries")
    liveness = Liveness(values, {})
    overlap = find_overlap(values, liveness)
    if overlap is not None:
        a, b = (executable.thunks[value.thunks[0]].name for value in overlap)
        raise NotUnderstood(f"our model contradicts XLA's plan: the values of {a!r} and {b!r} are live together and share bytes")
    return values, Identity(values), liveness


def find_backend(executable: bytes) -> Backend:
    """Which of XLA's backends wrote an executable: XLA:CUDA writes record files, XLA:CPU a bare message."""
    return gpu.BACKEND if riegeli.is_record_file(executable) else cpu.BACKEND


def prove(read: Callable[[bytes], Executable], backend: Backend, original: bytes, planned: bytes, orders: Orders) -> None:
    """Read both executables from their final bytes and verify the second against the first."""
    verify(read(original), read(planned), orders, backend.thunk_sequences)


def _read(schema: Schema, backend: Backend, free_collectives: bool, data: bytes) -> Executable:
    executable = backend.read(schema, data)
    if free_collectives:
        backend.release_collectives(executable)
    return executable


def _choose(
    values: Values, liveness: Liveness, ordering: Ordering, solve: AddressSolver, seconds: float
) -> tuple[Orders, Addresses]:
    """The lowest arena: with the new orders, or with XLA's where addresses alone do better."""
    planned = find_addresses(values, Liveness(values, ordering.orders), solve, seconds / 2)
    if not ordering.orders or planned.height <= Occupancy(values, liveness).max_live:
        return ordering.orders, planned
    unchanged = find_addresses(values, liveness, solve, seconds / 2)
    return (ordering.orders, planned) if planned.height < unchanged.height else ({}, unchanged)
