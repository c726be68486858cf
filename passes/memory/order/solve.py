"""One order problem from start to end; see the package's docstring for the parts."""

import dataclasses
import functools
import math
import sys
import time

from graphacc.passes.memory.bounds import CutModel, peak_bound
from graphacc.passes.memory.order.cones import merge_cones
from graphacc.passes.memory.order.contract import Contraction, contract
from graphacc.passes.memory.order.cp_sat import lower_window
from graphacc.passes.memory.order.graph import OrderGraph, compile_problem
from graphacc.passes.memory.order.guided import cut_into_order
from graphacc.passes.memory.order.heuristics import HEURISTICS, Order, under_cap
from graphacc.passes.memory.order.precedence import prove, trunk
from graphacc.passes.memory.order.windows import improve_by_windows
from graphacc.passes.memory.problem import OrderPlan, Problem, Status

TOLERANCE_SHIFT = 20
"""Groups of operators may lack one part in 2 ** 20 of the peak to be merged without loss."""
STEP = 2e-4
"""The relative gap at which improving ends, and by which peaks and bounds are told apart."""
COARSE = 20
"""As many steps may lie between what single operators prove and do not prove, before several are looked at together."""
MAX_KEPT = 8
NUM_GUIDES = 3
FEW_PLACED = 200
TOGETHER = 60
MAX_EXACT_CUTS = 64
PROGRAM_GAP = 5e-3
"""The relative gap from which on a target without success is followed by better bounds and then by integer programs, not by more targets."""
PROGRAM_TARGETS = (0.0, 0.5)
"""Their targets, as shares of the way from the bound to the peak."""
PROGRAM_STEP = 0.8 * STEP
"""How far the lowest of them lies above the bound."""
PROGRAM_SHARE = 0.5
"""Of the time that is left, for the integer programs of one target."""
MIN_CUTS = 16
"""Single cuts that are made however little time there is: the first one, or one of the next, mostly is the bound."""


def solve_order(problem: Problem, *, seconds: float = 10.0, bound_wanted: float = math.inf) -> OrderPlan:
    """An order of small peak, and a bound.

    Args:
        problem: its operators must come in a valid order.
        seconds: time for improving; the first orders and the first bound are made in any case.
        bound_wanted: bytes; a bound as high as this ends the search, as no order is worth more time.

    Raises:
        PlanError: the problem is not well formed.
    """
    if not problem.operators:
        return OrderPlan(status=Status.OPTIMAL, order=(), peak=0, lower_bound=0, bound_source="no operators", seconds=0.0)
    search = _Search(problem, seconds, bound_wanted)
    search.start()
    while not search.is_finished():
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
    tolerance = graph.peak(range(graph.num_operators)) >> TOLERANCE_SHIFT
    second, loss = merge_cones(first.graph, CutModel(first.graph).ancestors, tolerance)
    return _Reduction(steps=(first, second, contract(second.graph)), loss=loss)


class _Search:
    """The best order and the best bound so far. Peaks and bounds of the reduced graph have "reduced" in their names."""

    def __init__(self, problem: Problem, seconds: float, bound_wanted: float):
        self.begin = time.monotonic()
        self.seconds, self.bound_wanted = seconds, bound_wanted
        self.names = [operator.name for operator in problem.operators]
        self.full = compile_problem(problem)
        self.reduction = reduce(self.full)
        self.graph = self.reduction.graph
        self.model = CutModel(self.graph)
        self.path = trunk(self.graph)
        self.best: Order = ()
        self.peak = self.bound = 0
        self.source = "no size is negative"
        self.reduced_orders: dict[Order, int] = {}  # with their peaks, the lowest first
        self.reduced_bound = 0
        self.unproved = sys.maxsize  # the least target that is not disproved although that was tried
        self.refused = 0  # the largest target that is not disproved and at which no order was found
        self.attempts = 0
        self.failures = 0  # targets one after the other at which nothing was gained
        self.exhausted = False
        self.num_placed = FEW_PLACED
        self.num_together = 0

    def keep_going(self) -> bool:
        return self._is_before(self.seconds)

    def is_finished(self) -> bool:
        close = self.peak == self.bound or (self.attempts > 0 and self.gap() <= STEP)
        return close or self.exhausted or self.bound >= self.bound_wanted or not self.keep_going()

    def gap(self) -> float:
        return (self.peak - self.bound) / max(self.bound, 1)

    def plan(self) -> OrderPlan:
        """The answer, checked."""
        assert self.full.is_valid(self.best) and self.full.peak(self.best) == self.peak >= self.bound, "the planner is wrong"
        return OrderPlan(
            status=Status.OPTIMAL if self.peak == self.bound else Status.FEASIBLE,
            order=self.best,
            peak=self.peak,
            lower_bound=self.bound,
            bound_source=self.source,
            seconds=time.monotonic() - self.begin,
        )

    def start(self) -> None:
        """The heuristics and the bound by single cuts."""
        for name, heuristic in HEURISTICS.items():
            if name != "LPMF":
                self._consider(heuristic(self.full))
            self._consider_reduced(heuristic(self.graph))
        self._bound_by_cuts()
        if self.bound >= self.bound_wanted:
            return
        if self.peak > self.bound:
            self._consider(HEURISTICS["LPMF"](self.full))
        if self.gap() > STEP:
            self._polish()

    def improve(self) -> None:
        """One attempt: at the bound itself; then to raise the bound, roughly; then to close in from both sides."""
        peak = self._reduced_peak()
        low, refused = self.reduced_bound, max(self.reduced_bound, self.refused)
        step = max(int(STEP * low) - self.reduction.loss, 1)  # what is proved or found at it closes the gap of the whole graph, too
        if self.attempts == 0:
            self._attempt(low)
        elif min(peak, self.unproved) - low > COARSE * step and not self.num_together:
            self._prove(self.model.copy(), (low + min(peak, self.unproved)) // 2)
        elif peak - refused > step and not (self.failures and self.gap() <= PROGRAM_GAP):
            self.num_together = self.num_together or TOGETHER
            self._attempt((refused + peak) // 2)
        elif min(peak, self.unproved) - low > step:
            self._prove(self.model.copy(), max(low, peak - step) if self.unproved > peak else (low + self.unproved) // 2)
        else:
            self._look_further()
        self.attempts += 1

    def _look_further(self) -> None:
        """Everything was tried: integer programs, then more operators in the proofs, as long as there are more."""
        if self.num_together > TOGETHER and self.gap() <= PROGRAM_GAP and self._decide_by_programs():
            return
        self.exhausted = self.num_placed >= self.graph.num_operators
        self.num_placed, self.num_together = 4 * self.num_placed, 4 * self.num_together
        self.unproved = sys.maxsize

    def _prove(self, model: CutModel, target: int) -> bool:
        """Add to `model` what holds in every order of the reduced graph that stays at `target`; False where there is none."""
        need = [new + workspace for new, workspace in zip(self.graph.new, self.graph.workspace)]
        placed = sorted(range(self.graph.num_operators), key=lambda v: -need[v])[: self.num_placed]
        possible = prove(model, target, self.path, placed, self.keep_going, num_together=self.num_together)
        if possible:
            self.unproved = min(self.unproved, target)
        else:
            self.reduced_bound = target + 1
            self._raise_bound(self.reduced_bound - self.reduction.loss, "precedences proved by minimum cuts")
        return possible

    def _attempt(self, target: int) -> None:
        """Look for an order of the reduced graph whose peak is at most `target`."""
        model = self.model.copy()
        if self._prove(model, target):
            before = self._reduced_peak()
            self._search(model, target)
            self.failures = 0 if self._reduced_peak() < before else self.failures + 1
            if self._reduced_peak() > target:
                self.refused = max(self.refused, target)

    def _search(self, model: CutModel, target: int) -> None:
        """Look for an order of the reduced graph below `target` among those that keep the precedences of `model`."""
        graph = _with_precedences(self.graph, model)
        guides = list(self.reduced_orders)[:NUM_GUIDES]
        for guide in guides:
            self._consider_reduced(under_cap(graph, guide, target))
        if self._reduced_peak() <= target:
            return
        difficulty = functools.cache(lambda v: model.cut(v).value)
        self._consider_reduced(cut_into_order(graph, guides, target, difficulty, self.keep_going))
        if self._reduced_peak() > target:
            self._polish()

    def _decide_by_programs(self) -> bool:
        """Bring the best order down window by window, to the bound or halfway there. Whether it came down."""
        begin = self._reduced_peak()
        for share in PROGRAM_TARGETS:
            target = int(self.reduced_bound * (1 + PROGRAM_STEP) + share * (begin - self.reduced_bound))
            now = time.monotonic() - self.begin
            until = now + PROGRAM_SHARE * (self.seconds - now)
            keep_going = functools.partial(self._is_before, until)
            order: Order | None = next(iter(self.reduced_orders))
            while order is not None and self.graph.peak(order) > target and keep_going():
                order = lower_window(self.graph, order, target, keep_going)
                if order is not None:
                    self._consider_reduced(order)
        return self._reduced_peak() < begin

    def _is_before(self, seconds: float) -> bool:
        return time.monotonic() - self.begin < seconds

    def _polish(self) -> None:
        """Improve the best order locally."""
        best = next(iter(self.reduced_orders))
        self._consider_reduced(improve_by_windows(self.graph, best, self.reduced_bound, self.keep_going))

    def _bound_by_cuts(self) -> None:
        ceilings = [min(memories) for memories in zip(*map(self._memory_of_each, self.reduced_orders))]
        assured = iter(range(MIN_CUTS))
        found = peak_bound(self.model, ceilings, lambda: next(assured, None) is not None or self.keep_going())
        self.reduced_bound = found.value
        name = "" if found.operator is None else self._name(found.operator)
        self._raise_bound(found.value - self.reduction.loss, f"minimum cut at {name}" if name else "live at the start or the end")
        if self.bound < self.peak <= self.bound + self.reduction.loss:
            self._bound_exactly()

    def _bound_exactly(self) -> None:
        """Single cuts of the graph that nothing was lost in, for the few operators that could close the gap."""
        first = self.reduction.steps[0]
        order = first.shrink(self.best)
        ceilings = [memory for _, memory in sorted(zip(order, first.graph.profile(order)))]
        budget = iter(range(MAX_EXACT_CUTS))
        found = peak_bound(CutModel(first.graph), ceilings, lambda: next(budget, None) is not None)
        if found.operator is not None:
            self._raise_bound(found.value, f"minimum cut at {self.names[first.members[found.operator][-1]]}")

    def _raise_bound(self, bound: int, source: str) -> None:
        if bound > self.bound:
            self.bound, self.source = bound, source

    def _consider(self, order: Order) -> None:
        peak = self.full.peak(order)
        if not self.best or peak < self.peak:
            self.best, self.peak = order, peak
        self._keep(self.reduction.shrink(order))

    def _consider_reduced(self, order: Order) -> None:
        full = self.reduction.expand(order)
        peak = self.full.peak(full)
        if not self.best or peak < self.peak:
            self.best, self.peak = full, peak
        self._keep(order)

    def _keep(self, order: Order) -> None:
        self.reduced_orders[order] = self.graph.peak(order)
        self.reduced_orders = dict(sorted(self.reduced_orders.items(), key=lambda item: item[1])[:MAX_KEPT])

    def _reduced_peak(self) -> int:
        return min(self.reduced_orders.values())

    def _memory_of_each(self, order: Order) -> list[int]:
        return [memory for _, memory in sorted(zip(order, self.graph.profile(order)))]

    def _name(self, reduced: int) -> str:
        """The operator behind one of the reduced graph (the last of those that it was merged from)."""
        return self.names[self.reduction.expand((reduced,))[-1]]


def _with_precedences(graph: OrderGraph, model: CutModel) -> OrderGraph:
    """The graph with the precedences that `model` has been required to keep."""
    preds = [list(before) for before in graph.preds]
    succs = [list(after) for after in graph.succs]
    for u, v in model.required:
        preds[v].append(u)
        succs[u].append(v)
    return dataclasses.replace(graph, preds=tuple(map(tuple, preds)), succs=tuple(map(tuple, succs)))
