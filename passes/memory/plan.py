"""Order and addresses together: first an order of small peak, then live ranges, then an arena for them.

The peak of the order bounds every arena for it, and the bound of the order bounds every arena for any order: where the arena's
height meets that, order and addresses are proved optimal together.
"""

import dataclasses
import time

from graphacc.passes.memory.addresses import solve_addresses
from graphacc.passes.memory.order.graph import live_ranges
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.problem import AddressProblem, LiveBuffer, Plan, Problem

ORDER_SHARE = 0.6
"""Part of the time that the order may take."""


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
    stored = _stored(problem, order.order, ranges)
    left = max(seconds - (time.monotonic() - begin), 1.0)
    arena = AddressProblem(buffers=tuple(buffer for buffer in stored if buffer is not None), alignment=alignment)
    addresses = solve_addresses(arena, seconds=left, threads=threads)
    offsets = iter(addresses.offsets)
    spread = tuple(next(offsets) if buffer is not None else 0 for buffer in stored)
    return Plan(order=order, addresses=dataclasses.replace(addresses, offsets=spread), live_ranges=ranges)


def _stored(problem: Problem, order: tuple[int, ...], ranges: tuple[tuple[int, int], ...]) -> list[LiveBuffer | None]:
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
