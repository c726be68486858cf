"""CP-SAT for orders: what it finds is an order below the target, and it finds what exists."""

import random
import sys

from order_cases import best_peak, layered_training_problem, random_problem

from graphacc.passes.memory.bounds import CutModel
from graphacc.passes.memory.order import cp_sat
from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.order.heuristics import program
from graphacc.passes.memory.order.solve import solve_order

ALWAYS = lambda: True  # noqa: E731


def worse_than_best(num_operators: int, count: int):
    """Graphs whose own order has more than the smallest peak, with that peak."""
    found = []
    for seed in range(1000):
        graph = compile_problem(random_problem(seed, num_operators))
        if graph.peak(program(graph)) > (least := best_peak(graph)):
            found.append((graph, least))
        if len(found) == count:
            return found
    raise AssertionError("too few such graphs")


def test_the_best_order_is_found_where_every_operator_may_join():
    found = 0
    graphs = worse_than_best(9, 40)
    for graph, least in graphs:
        order = cp_sat.order_below(graph, least, ALWAYS)
        assert cp_sat.order_below(graph, least - 1, ALWAYS) is None
        if order is not None:
            assert graph.is_valid(order) and graph.peak(order) <= least
            found += 1
    assert found >= 36


def test_with_all_operators_the_program_is_the_order_problem():
    """Then its downsets are the orders' own, and the least of its peaks is that of all orders."""
    for graph, least in worse_than_best(7, 15):
        everything = list(range(graph.num_operators))
        peak = graph.peak(everything)
        downsets = cp_sat.find_downsets(graph, CutModel(graph), everything, least, peak)
        assert downsets is not None
        order = sorted(everything, key=lambda v: len(downsets[v]))
        assert graph.is_valid(order) and graph.peak(order) == least
        assert all(downsets[v] == set(order[:place]) for place, v in enumerate(order))
        assert cp_sat.find_downsets(graph, CutModel(graph), everything, least - 1, peak) is None


def test_operators_beside_the_decided_ones_give_a_lower_bound():
    for graph, least in worse_than_best(8, 15):
        order = program(graph)
        profile = graph.profile(order)
        high = [v for v in order if profile[v] > least]
        assert cp_sat.find_downsets(graph, CutModel(graph), high, least, max(profile)) is not None


def test_a_window_is_lowered_and_all_around_it_stays(monkeypatch):
    monkeypatch.setattr(cp_sat, "SIZES", (30, 60, 1000))
    graph = compile_problem(layered_training_problem(num_layers=12, rng=random.Random(2)))
    order = program(graph)
    best = solve_order(layered_training_problem(num_layers=12, rng=random.Random(2)), seconds=5).peak
    peak = graph.peak(order)
    target = (peak + best) // 2
    assert best < target < peak
    lowered = cp_sat.lower_window(graph, order, target, ALWAYS)
    assert lowered is not None and graph.is_valid(lowered)
    first = next(i for i, memory in enumerate(graph.profile(order)) if memory > target)
    assert graph.profile(lowered)[first] <= target


def test_what_the_searches_prove_needs_no_integer_program(monkeypatch):
    """ortools takes long to import."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    problem = layered_training_problem(num_layers=6, rng=random.Random(2))
    plan = solve_order(problem, seconds=10)
    assert plan.peak == plan.lower_bound


def test_no_program_is_started_after_the_time():
    ((graph, least),) = worse_than_best(9, 1)
    assert cp_sat.order_below(graph, least, lambda: False) is None
