"""Order and addresses of a small problem together: one integer program, for what one after the other leaves.

The live bytes of an order can be lower than any arena for it (fragmentation), where another order of the same peak has an arena
without holes. So, with CP-SAT, for n operators:

- p[v] in 0..n-1, all different, p[u] < p[v] for every u that must run before v (`OrderGraph.preds`);
- a stored buffer is a rectangle: in time from its producer's place (an input: 0) to behind the last place of those that touch it
  (an output: n), in addresses from its offset to offset + size; a workspace is one of width 1. No two overlap (`add_no_overlap_2d`);
- minimise the height of the arena, between a bound and what is known; implied, and propagated well: the sum of live sizes is at most that.

This is what MODeL (arXiv 2210.12924) states with one binary for every tensor and step. It closes up to some dozens of operators.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointAnswer:
    """What the integer program says."""

    order: tuple[int, ...]  # empty where nothing lower than what was known is found
    offsets: tuple[int, ...]  # bytes: of every buffer of the problem, then of every workspace; what is not stored has 0
    lower_bound: int  # bytes; no order has a lower arena


def solve_jointly(
    problem: Problem,
    *,
    below: int,
    lower_bound: int,
    alignment: int,
    seconds: float,
    known: Sequence[int] = (),
    threads: int = 2,
) -> JointAnswer:
    """Look for an order and offsets whose arena is lower than `below`.

    Args:
        problem: its operators must come in a valid order.
        below: bytes; the height of an arena that is known.
        lower_bound: bytes; a height that no arena is below.
        alignment: every offset is a multiple of it.
        seconds: time.
        known: a valid order to begin from.
        threads: of CP-SAT.
    """
    from ortools.sat.python import cp_model  # it takes a second, and most problems need no integer program

    nothing = JointAnswer(order=(), offsets=(), lower_bound=lower_bound)
    begin = time.monotonic()
    model, graph, num = cp_model.CpModel(), compile_problem(problem), len(problem.operators)
    if below <= lower_bound:
        return nothing
    places = [model.new_int_var(0, num - 1, "") for _ in range(num)]
    model.add_all_different(places)
    for v, preds in enumerate(graph.preds):
        for u in preds:
            model.add(places[u] < places[v])
    for place, v in enumerate(known):
        model.add_hint(places[v], place)
    height = model.new_int_var(lower_bound, below - 1, "")
    rectangles = _Rectangles(model, height, below - 1, alignment)
    stored = _add_buffers(rectangles, problem, places)
    workspaces = [operator.workspace for operator in problem.operators]
    stored += [rectangles.add(places[v], places[v] + 1, size) for v, size in enumerate(workspaces) if size]
    if any(offset is False for offset in stored):
        return dataclasses.replace(nothing, lower_bound=below)  # one buffer alone is as high as what is known
    model.add_no_overlap_2d(rectangles.times, rectangles.ranges)
    model.add_cumulative(rectangles.times, rectangles.sizes, height)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = threads
    solver.parameters.max_time_in_seconds = max(seconds - (time.monotonic() - begin), 0.0)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return dataclasses.replace(nothing, lower_bound=below)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return nothing
    order = sorted(range(num), key=lambda v: solver.value(places[v]))
    offsets = tuple(0 if offset is None else solver.value(offset) * alignment for offset in stored)
    return JointAnswer(order=tuple(order), offsets=offsets, lower_bound=round(solver.best_objective_bound))


class _Rectangles:
    """Rectangles of time and addresses; offsets are counted in alignments."""

    def __init__(self, model: Any, height: Any, most: int, alignment: int):
        self.model, self._height, self._most, self._alignment = model, height, most, alignment
        self.times: list[Any] = []
        self.ranges: list[Any] = []
        self.sizes: list[int] = []

    def add(self, start: Any, end: Any, size: int) -> Any:
        """The variable of its offset; False where it is too large for every arena that is looked for."""
        model, alignment = self.model, self._alignment
        if size > self._most:
            return False
        offset = model.new_int_var(0, (self._most - size) // alignment, "")
        model.add(offset * alignment + size <= self._height)
        length = model.new_int_var(1, 1 << 30, "")
        self.times.append(model.new_interval_var(start, length, end, ""))
        self.ranges.append(model.new_fixed_size_interval_var(offset, -(-size // alignment), ""))
        self.sizes.append(size)
        return offset


def _add_buffers(rectangles: _Rectangles, problem: Problem, places: list[Any]) -> list[Any]:
    """For every buffer the variable of its offset, None where it is not stored."""
    model, num = rectangles.model, len(places)
    touching: list[list[int]] = [[] for _ in problem.buffers]
    for v, operator in enumerate(problem.operators):
        for buffer in {*operator.reads, *operator.writes}:
            touching[buffer].append(v)
    stored: list[Any] = []
    for buffer, users in zip(problem.buffers, touching, strict=True):
        always = buffer.is_input and buffer.is_output
        if not buffer.size or not (users or always):
            stored.append(None)
            continue
        start: Any = 0 if buffer.is_input else places[users[0]]  # the first to touch it in the program's order writes it
        end: Any = num
        if not buffer.is_output:
            end = model.new_int_var(1, num, "")
            model.add_max_equality(end, [places[v] + 1 for v in users])
        stored.append(rectangles.add(start, end, buffer.size))
    return stored
