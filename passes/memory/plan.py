"""Order and addresses together: first an order of small peak, then live ranges, then an arena for them.

The peak of the order bounds every arena for it, and the bound of the order bounds every arena for any order: where the arena's
height meets that, order and addresses are proved optimal together. Where it does not and the problem is small, both are chosen
together (`joint`). `Plan.limit` says what is left: fragmentation, or the order.
"""

import dataclasses
import time

from graphacc.passes.memory.addresses import solve_addresses
from graphacc.passes.memory.joint import solve_jointly
from graphacc.passes.memory.order.graph import live_ranges
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.problem import AddressPlan, AddressProblem, LiveBuffer, OrderPlan, Plan, Problem, Status
from graphacc.passes.memory.validate import check_address_plan, check_order

ORDER_SHARE = 0.6
"""Part of the time that the order may take."""
JOINT_OPERATORS = 40
"""Operators up to which order and addresses are chosen together."""


def plan(problem: Problem, *, seconds: float = 10.0, threads: int = 2, alignment: int = 1) -> Plan:
    """Plan an order and addresses.

    Args:
        problem: its operators must come in a valid order.
        seconds: time for both; what the order leaves goes to the addresses.
        threads: of the address solver.
        alignment: every offset is a multiple of it.

    Returns:
        A plan whose addresses have one offset per buffer of the problem, then one per operator with a workspace. What is never
        stored (no bytes, or no operator that touches it) has offset 0.

    Raises:
        PlanError: the problem is not well formed.
    """
    begin = time.monotonic()
    order = solve_order(problem, seconds=seconds * ORDER_SHARE)
    ranges = live_ranges(problem, order.order)
    stored = stored_buffers(problem, order.order, ranges)
    left = max(seconds - (time.monotonic() - begin), 1.0)
    arena = AddressProblem(buffers=tuple(buffer for buffer in stored if buffer is not None), alignment=alignment)
    addresses = solve_addresses(arena, seconds=left, threads=threads)
    offsets = iter(addresses.offsets)
    spread = tuple(next(offsets) if buffer is not None else 0 for buffer in stored)
    addresses = dataclasses.replace(addresses, offsets=spread)
    answer = Plan(order=order, addresses=addresses, live_ranges=ranges, lower_bound=order.lower_bound)
    left = max(seconds - (time.monotonic() - begin), 1.0)
    if addresses.height > answer.lower_bound and len(problem.operators) <= JOINT_OPERATORS:
        answer = _improve_jointly(problem, answer, alignment=alignment, seconds=left, threads=threads)
    return answer


def _improve_jointly(problem: Problem, known: Plan, *, alignment: int, seconds: float, threads: int) -> Plan:
    """The plan with the lowest arena of all orders, if it is found, or else the known one with a better bound; checked."""
    begin = time.monotonic()
    joint = solve_jointly(
        problem,
        below=known.addresses.height,
        lower_bound=known.lower_bound,
        alignment=alignment,
        seconds=seconds,
        known=known.order.order,
        threads=threads,
    )
    if not joint.order:
        return dataclasses.replace(known, lower_bound=joint.lower_bound)
    peak = check_order(problem, joint.order)
    order = OrderPlan(
        status=Status.OPTIMAL if peak == known.order.lower_bound else Status.FEASIBLE,
        order=joint.order,
        peak=peak,
        lower_bound=known.order.lower_bound,
        bound_source=known.order.bound_source,
        seconds=known.order.seconds,
    )
    ranges = live_ranges(problem, joint.order)
    stored = stored_buffers(problem, joint.order, ranges)
    arena = AddressProblem(buffers=tuple(buffer for buffer in stored if buffer is not None), alignment=alignment)
    offsets = tuple(offset for buffer, offset in zip(stored, joint.offsets, strict=True) if buffer is not None)
    height = max(buffer.size + offset for buffer, offset in zip(arena.buffers, offsets, strict=True))
    addresses = AddressPlan(
        status=Status.OPTIMAL if height == peak else Status.FEASIBLE,
        offsets=offsets,
        height=height,
        lower_bound=peak,
        bound_source="max live",
        seconds=known.addresses.seconds + time.monotonic() - begin,
    )
    check_address_plan(arena, addresses)
    addresses = dataclasses.replace(addresses, offsets=joint.offsets)
    return Plan(order=order, addresses=addresses, live_ranges=ranges, lower_bound=joint.lower_bound)


def stored_buffers(problem: Problem, order: tuple[int, ...], ranges: tuple[tuple[int, int], ...]) -> list[LiveBuffer | None]:
    """What needs an address: one entry per buffer, then one per operator with a workspace; None for what needs none."""
    stored: list[LiveBuffer | None] = []
    for buffer, (lower, upper) in zip(problem.buffers, ranges):
        needed = buffer.size > 0 and lower < upper
        stored.append(LiveBuffer(name=buffer.name, lower=lower, upper=upper, size=buffer.size) if needed else None)
    position = {v: i for i, v in enumerate(order)}
    for v, operator in enumerate(problem.operators):
        if operator.workspace:
            lower = position[v]
            stored.append(LiveBuffer(name=f"{operator.name}.workspace", lower=lower, upper=lower + 1, size=operator.workspace))
    return stored
