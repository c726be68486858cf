"""One order problem from start to end; see the package's docstring for the parts."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from graphacc.passes.memory.bounds import CutModel, peak_bound
from graphacc.passes.memory.order.cones import merge_cones
from graphacc.passes.memory.order.contract import Contraction, contract
from graphacc.passes.memory.order.graph import OrderGraph, compile_problem
from graphacc.passes.memory.order.guided import cut_into_order
from graphacc.passes.memory.order.heuristics import HEURISTICS, Order, lpmf, under_cap
from graphacc.passes.memory.order.precedence import prove, trunk
from graphacc.passes.memory.problem import OrderPlan, Problem, Status

MAX_PLACED = 600
ENOUGH = 2e-5
"""The relative gap at which improving ends."""


def solve_order(problem: Problem, *, seconds: float = 10.0) -> OrderPlan:
    """An order of small peak, and a bound.

    Args:
        problem: its operators must come in a valid order.
        seconds: time for improving; the first orders and the first bound are made in any case.

    Raises:
        ValueError: the problem is not well formed.
    """
    search = _Search(problem, seconds)
    search.start()
    while search.keep_going() and search.gap() > ENOUGH:
        search.improve()
    return search.plan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reduction:
    """A chain of merges, from the problem's own graph to the one that is searched."""

    steps: tuple[Contraction, ...]
    loss: int  # bytes by which the best peak may have risen

    @property
    def graph(self) -> OrderGraph:
        return self.steps[-1].graph

    def expand(self, order: Order) -> Order:
        for step in reversed(self.steps):
            order = step.expand(order)
        return order

    def shrink(self, order: Order) -> Order:
        for step in self.steps:
            order = step.shrink(order)
        return order


def reduce(graph: OrderGraph) -> _Reduction:
    """Merge all that can be merged without loss, or nearly so."""
    first = contract(graph)
    second, loss = merge_cones(first.graph, CutModel(first.graph).ancestors, bold=False)
    return _Reduction(steps=(first, second, contract(second.graph)), loss=loss)


class _Search:
    """The best order and the best bound so far."""

    def __init__(self, problem: Problem, seconds: float):
        self.begin = time.monotonic()
        self.seconds = seconds
        self.full = compile_problem(problem)
        self.reduction = reduce(self.full)
        self.graph = self.reduction.graph
        self.orders: list[Order] = []  # of the reduced graph, the lowest peak first
        self.best: Order = tuple(range(self.full.num_operators))  # of the full graph
        self.peak = self.full.peak(self.best)
        self.bound, self.source = 0, ""
        self.refused = 0  # no order was found at this target, which is not proved to be too low

    def keep_going(self) -> bool:
        return time.monotonic() - self.begin < self.seconds

    def gap(self) -> float:
        return (self.peak - self.bound) / max(self.bound, 1)
