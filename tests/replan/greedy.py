"""A small planner for tests: greedy orders, first-fit addresses. Quick and deterministic, nothing proved."""

from graphacc.passes.memory.problem import AddressProblem, LiveBuffer, Problem
from graphacc.runtime.replan.ordering import SequenceOrder
from graphacc.runtime.replan.planner import Solvers


def solve_order(problem: Problem, seconds: float, bound_wanted: float) -> SequenceOrder:
    """The best of the program order and two greedy ones."""
    program = tuple(range(len(problem.operators)))
    best = min((program, _greedy(problem, 0), _greedy(problem, 1)), key=lambda order: peak(problem, order))
    return SequenceOrder(order=best, peak=peak(problem, best), lower_bound=_largest_operator(problem))


def peak(problem: Problem, order: tuple[int, ...]) -> int:
    """Largest sum of live bytes while an operator runs."""
    left = _uses(problem)
    live = {i for i, buffer in enumerate(problem.buffers) if buffer.is_input}
    highest = 0
    for operator in (problem.operators[i] for i in order):
        touched = set(operator.reads + operator.writes)
        live |= touched
        highest = max(highest, operator.workspace + sum(problem.buffers[b].size for b in live))
        for buffer in touched:
            left[buffer] -= 1
        live -= {b for b in touched if not left[b] and not problem.buffers[b].is_output}
    return highest


def _greedy(problem: Problem, rule: int) -> tuple[int, ...]:
    """Of the ready operators, the one that allocates least beyond what it frees."""
    after = _dependencies(problem)
    left = _uses(problem)
    live = {i for i, buffer in enumerate(problem.buffers) if buffer.is_input}
    order: list[int] = []
    waiting = set(range(len(problem.operators)))
    while waiting:
        ready = [i for i in sorted(waiting) if not after[i] & waiting]
        chosen = min(ready, key=lambda i: _cost(problem, i, live, left, rule))
        operator = problem.operators[chosen]
        for buffer in {*operator.reads, *operator.writes}:
            left[buffer] -= 1
            live.add(buffer)
            if not left[buffer] and not problem.buffers[buffer].is_output:
                live.discard(buffer)
        waiting.discard(chosen)
        order.append(chosen)
    return tuple(order)


def _cost(problem: Problem, i: int, live: set[int], left: list[int], rule: int) -> tuple[int, ...]:
    operator = problem.operators[i]
    touched = {*operator.reads, *operator.writes}
    new = sum(problem.buffers[b].size for b in touched - live)
    freed = sum(problem.buffers[b].size for b in touched if left[b] == 1 and not problem.buffers[b].is_output)
    return (new - freed, new + operator.workspace, i) if rule == 0 else (new + operator.workspace, -freed, i)


def _uses(problem: Problem) -> list[int]:
    uses = [0] * len(problem.buffers)
    for operator in problem.operators:
        for buffer in {*operator.reads, *operator.writes}:
            uses[buffer] += 1
    return uses


def _dependencies(problem: Problem) -> list[set[int]]:
    """Explicit ones, and reads after the writes before them."""
    after = [set(operator.after) for operator in problem.operators]
    writer: dict[int, int] = {}
    for i, operator in enumerate(problem.operators):
        after[i] |= {writer[b] for b in {*operator.reads, *operator.writes} if b in writer}
        writer |= {b: i for b in operator.writes}
    return after


def _largest_operator(problem: Problem) -> int:
    """No order holds less than what one operator touches."""
    return max(
        operator.workspace + sum(problem.buffers[b].size for b in {*operator.reads, *operator.writes})
        for operator in problem.operators
    )


def solve_addresses(problem: AddressProblem, seconds: float) -> tuple[int, ...]:
    """First fit, largest first."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, lower, upper
    offsets = [buffer.offset or 0 for buffer in problem.buffers]
    first_fixed = sorted(range(len(offsets)), key=lambda i: (problem.buffers[i].offset is None, -problem.buffers[i].size))
    for i in first_fixed:
        buffer = problem.buffers[i]
        if buffer.offset is None:
            offsets[i] = _lowest(buffer, placed)
        placed.append((offsets[i], offsets[i] + buffer.size, buffer.lower, buffer.upper))
    return tuple(offsets)


def _lowest(buffer: LiveBuffer, placed: list[tuple[int, int, int, int]]) -> int:
    offset = 0
    for low, high, lower, upper in sorted(placed):
        if lower < buffer.upper and buffer.lower < upper:
            if offset + buffer.size <= low:
                break
            offset = max(offset, high)
    return offset


SOLVERS = Solvers(order=solve_order, addresses=solve_addresses)
