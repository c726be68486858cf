"""Bounds, exact searches and the whole order planner, against the smallest peak of all orders."""

import random

import pytest
from order_cases import best_peak, layered_training_problem, random_problem

from graphacc.passes.memory import bounds
from graphacc.passes.memory.bounds import CutModel, peak_bound
from graphacc.passes.memory.order.graph import compile_problem, make_graph
from graphacc.passes.memory.order.guided import cut_into_order
from graphacc.passes.memory.order.heuristics import HEURISTICS, program
from graphacc.passes.memory.order.native import Outcome, beam
from graphacc.passes.memory.order.precedence import prove, trunk
from graphacc.passes.memory.order.search import best_order
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.order.windows import improve_by_windows
from graphacc.passes.memory.problem import Buffer, Operator, Problem, Status
from graphacc.passes.memory.validate import check_order

ALWAYS = lambda: True  # noqa: E731


def _no_ceilings(graph):
    return [10**9] * graph.num_operators


def test_the_min_cut_bound_holds_and_is_mostly_tight():
    tight = 0
    for seed in range(600):
        graph = compile_problem(random_problem(seed, 4 + seed % 7))
        bound = peak_bound(CutModel(graph), _no_ceilings(graph), ALWAYS).value
        assert bound <= best_peak(graph)
        tight += bound == best_peak(graph)
    assert tight >= 540


def test_a_cut_is_the_memory_after_its_downset():
    for seed in range(100):
        graph = compile_problem(random_problem(seed, 10))
        model = CutModel(graph)
        for v in range(graph.num_operators):
            cut = model.cut(v)
            order = [*sorted(cut.before), v]
            assert graph.profile(order)[-1] == cut.value


def test_ceilings_only_save_cuts(monkeypatch):
    calls = []
    cut = bounds.CutModel.cut
    monkeypatch.setattr(bounds.CutModel, "cut", lambda self, v, **kwargs: calls.append(v) or cut(self, v, **kwargs))
    saved = 0
    for seed in range(200):
        graph = compile_problem(random_problem(seed, 12))
        ceilings = [memory for _, memory in sorted(zip(program(graph), graph.profile(program(graph))))]
        calls.clear()
        full = peak_bound(CutModel(graph), _no_ceilings(graph), ALWAYS)
        without = len(calls)
        calls.clear()
        assert peak_bound(CutModel(graph), ceilings, ALWAYS).value == full.value
        saved += without - len(calls)
    assert saved > 1000


@pytest.mark.parametrize("num_together", [0, 12])
def test_proved_precedences_hold_in_every_order_below_the_target(num_together):
    precedences = refuted = beyond_cuts = 0
    for seed in range(600):
        graph = compile_problem(random_problem(seed, 5 + seed % 7))
        best = best_peak(graph)
        single = peak_bound(CutModel(graph), _no_ceilings(graph), ALWAYS).value
        for target in (best - 1, best):
            model = CutModel(graph)
            operators = range(graph.num_operators)
            possible = prove(model, target, trunk(graph), operators, ALWAYS, num_together=num_together)
            assert possible or target < best
            refuted += not possible
            beyond_cuts += not possible and single <= target
            if target == best:
                precedences += len(model.required)
                assert best_peak(_constrained(graph, model.required)) == best
    assert precedences > 100
    assert refuted > 540
    assert beyond_cuts > 0


def test_updates_that_exclude_each_other_are_only_seen_together():
    """Two gradients of 10, each freed by an update that needs 12 more, must both be held at the end of a chain."""
    buffers = [Buffer(name="x", size=50), Buffer(name="g1", size=10), Buffer(name="g2", size=10), Buffer(name="end", size=25)]
    x, g1, g2, end = range(4)
    operators = (
        Operator(name="x", reads=(), writes=(x,)),
        Operator(name="backward1", reads=(x,), writes=(g1,)),
        Operator(name="backward2", reads=(x,), writes=(g2,), after=(1,)),
        Operator(name="end", reads=(x,), writes=(end,), after=(2,)),
        Operator(name="use", reads=(end,), writes=()),
        Operator(name="update1", reads=(g1,), writes=(), workspace=22, after=(2,)),
        Operator(name="update2", reads=(g2,), writes=(), workspace=22, after=(2,)),
    )
    graph = compile_problem(Problem(operators=operators, buffers=tuple(buffers)))
    best = best_peak(graph)
    for num_together, possible in ((0, True), (2, False)):
        arguments = (trunk(graph), [5, 6, 0, 1, 2, 3, 4], ALWAYS)
        assert prove(CutModel(graph), best - 1, *arguments, num_together=num_together) is possible
        assert prove(CutModel(graph), best, *arguments, num_together=num_together)


def _constrained(graph, required):
    """The graph with further precedences."""
    preds = [[*before, *(u for u, w in required if w == v)] for v, before in enumerate(graph.preds)]
    buffers = zip(graph.sizes, graph.producers, graph.lasting, graph.accesses)
    return make_graph(graph.base, buffers, preds, graph.workspace)


def test_best_order_is_best():
    for seed in range(600):
        graph = compile_problem(random_problem(seed, 4 + seed % 8))
        order = best_order(graph, 10**6)
        assert graph.is_valid(order)
        assert graph.peak(order) == best_peak(graph)


def test_best_order_says_when_it_gives_up():
    assert best_order(compile_problem(random_problem(3, 14)), 2) is None


def test_the_beam_decides_as_the_slow_search_does():
    for seed in range(600):
        graph = compile_problem(random_problem(seed, 4 + seed % 8))
        best = best_peak(graph)
        outcome, order = beam(graph, best, width=10**6, guide=program(graph), seconds=10)
        assert outcome is Outcome.FOUND
        assert graph.is_valid(order)
        assert graph.peak(order) == best
        assert beam(graph, best - 1, width=10**6, guide=program(graph), seconds=10) == (Outcome.IMPOSSIBLE, None)


def test_a_narrow_beam_never_claims_a_proof():
    lost = 0
    for seed in range(300):
        graph = compile_problem(random_problem(seed, 12))
        outcome, _ = beam(graph, best_peak(graph), width=1, guide=program(graph), seconds=10)
        assert outcome in (Outcome.FOUND, Outcome.LOST)
        lost += outcome is Outcome.LOST
    assert lost > 0


def test_the_beam_refuses_a_width_of_zero():
    graph = compile_problem(random_problem(0, 4))
    with pytest.raises(ValueError, match="width of the beam is 0"):
        beam(graph, 0, width=0, guide=program(graph), seconds=1)


@pytest.mark.parametrize("improver", ["guided", "windows"])
def test_improvers_give_valid_orders_and_earn_their_keep(improver):
    gained = 0
    for seed in range(150):
        graph = compile_problem(random_problem(seed, 25))
        start = HEURISTICS["BFS"](graph)
        bound = peak_bound(CutModel(graph), _no_ceilings(graph), ALWAYS).value
        if improver == "windows":
            order = improve_by_windows(graph, start, bound, ALWAYS)
            assert graph.peak(order) <= graph.peak(start)
        else:
            order = cut_into_order(graph, [start], bound, lambda v: 0, ALWAYS)
        assert graph.is_valid(order)
        gained += graph.peak(order) < graph.peak(start)
    assert gained > 50


@pytest.mark.matrix
def test_the_planner_on_random_problems():
    optimal = 0
    for seed in range(600):
        problem = random_problem(seed, 1 + seed % 12)
        plan = solve_order(problem, seconds=0.3)
        best = best_peak(compile_problem(problem))
        assert check_order(problem, plan.order) == plan.peak
        assert plan.lower_bound <= best <= plan.peak
        assert plan.bound_source
        assert (plan.status is Status.OPTIMAL) == (plan.peak == plan.lower_bound)
        optimal += plan.status is Status.OPTIMAL
    assert optimal >= 560


def test_no_operators():
    plan = solve_order(Problem(operators=(), buffers=()))
    assert (plan.order, plan.peak, plan.status) == ((), 0, Status.OPTIMAL)


def test_no_time_still_gives_an_order_and_a_bound():
    problem = layered_training_problem(num_layers=10, rng=random.Random(0))
    plan = solve_order(problem, seconds=0)
    assert check_order(problem, plan.order) == plan.peak >= plan.lower_bound > 0
    assert plan.bound_source.startswith("minimum cut")


@pytest.mark.matrix
def test_ten_thousand_operators():
    problem = layered_training_problem(num_layers=440, rng=random.Random(1))
    assert len(problem.operators) > 10_000
    graph = compile_problem(problem)
    plan = solve_order(problem, seconds=10)
    assert plan.seconds < 30
    assert plan.peak <= min(graph.peak(heuristic(graph)) for heuristic in HEURISTICS.values())
    assert plan.gap <= 1e-3
