"""Compiled order problems: dependencies, live bytes, subproblems and merges, against the validator and exhaustive search."""

import pytest
from order_cases import best_peak, random_problem

from graphacc.errors import PlanError
from graphacc.passes.memory.bounds import CutModel
from graphacc.passes.memory.order.cones import merge_cones
from graphacc.passes.memory.order.contract import contract
from graphacc.passes.memory.order.graph import compile_problem, live_ranges
from graphacc.passes.memory.order.heuristics import HEURISTICS, under_cap
from graphacc.passes.memory.problem import Buffer, Operator, Problem
from graphacc.passes.memory.validate import check_order

SEEDS = range(300)


@pytest.mark.parametrize("name", HEURISTICS)
def test_every_heuristic_gives_an_order_whose_peak_the_validator_confirms(name):
    for seed in SEEDS:
        problem = random_problem(seed, 3 + seed % 20)
        graph = compile_problem(problem)
        order = HEURISTICS[name](graph)
        assert graph.is_valid(order)
        assert graph.peak(order) == check_order(problem, order)


def test_under_cap_gives_a_valid_order_for_any_cap():
    for seed in SEEDS:
        graph = compile_problem(random_problem(seed, 3 + seed % 20))
        for cap in (0, graph.peak(range(graph.num_operators)), 10**6):
            assert graph.is_valid(under_cap(graph, tuple(range(graph.num_operators)), cap))


def test_live_ranges_add_up_to_the_peak():
    for seed in SEEDS:
        problem = random_problem(seed, 3 + seed % 20)
        order = HEURISTICS["LPMF"](compile_problem(problem))
        live = [problem.operators[v].workspace for v in order]
        for buffer, (low, high) in zip(problem.buffers, live_ranges(problem, order)):
            for position in range(low, high):
                live[position] += buffer.size
        assert live == compile_problem(problem).profile(order)


def test_a_stretch_of_an_order_alone_has_the_same_memory():
    for seed in SEEDS:
        graph = compile_problem(random_problem(seed, 12))
        order = HEURISTICS["BFS"](graph)
        part = graph.restrict(order[3:9], set(order[:3]))
        assert part.profile(range(6)) == graph.profile(order)[3:9]


def test_contraction_loses_nothing():
    merged = 0
    for seed in SEEDS:
        graph = compile_problem(random_problem(seed, 4 + seed % 8))
        contraction = contract(graph)
        merged += graph.num_operators - contraction.graph.num_operators
        assert best_peak(contraction.graph) == best_peak(graph)
        for heuristic in HEURISTICS.values():
            order = heuristic(graph)
            small = contraction.shrink(order)
            assert contraction.graph.is_valid(small)
            assert contraction.graph.peak(small) <= graph.peak(order)
            assert graph.is_valid(contraction.expand(small))
            assert graph.peak(contraction.expand(small)) <= contraction.graph.peak(small)
    assert merged > 100


@pytest.mark.parametrize("tolerance", [0, 1, 2])
@pytest.mark.default_cases("2")
def test_cones_lose_no_more_than_they_say(tolerance):
    merged = losses = 0
    for seed in range(500):
        graph = contract(compile_problem(random_problem(seed, 4 + seed % 8))).graph
        contraction, loss = merge_cones(graph, CutModel(graph).ancestors, tolerance)
        merged += graph.num_operators - contraction.graph.num_operators
        losses += loss > 0
        best = best_peak(graph)
        assert best <= best_peak(contraction.graph) <= best + loss
    assert merged > 100
    assert (losses > 0) == (tolerance > 0)


def test_an_adam_update_becomes_few_operators():
    """m and v each in one go, then the parameter: the pieces that ROAM calls weight updates."""
    names = ["param", "m", "v"]
    buffers = [Buffer(name=name, size=100, is_input=True, is_output=True) for name in names]
    buffers += [Buffer(name="grad", size=100)] + [Buffer(name=f"t{i}", size=100) for i in range(9)]
    param, m, v, grad, *temps = range(len(buffers))
    steps = [
        ((param,), grad),  # stands for the backward
        ((m, grad), temps[0]), ((temps[0],), temps[1]), ((m, grad), temps[8]), ((temps[1], temps[8]), m),  # lerp
        ((v,), temps[2]), ((grad,), temps[3]), ((temps[3], grad), temps[4]), ((temps[2], temps[4]), v),
        ((v,), temps[5]), ((m,), temps[6]), ((temps[6], temps[5]), temps[7]), ((param, temps[7]), param),
    ]  # fmt: skip
    operators = tuple(Operator(name=f"op{i}", reads=reads, writes=(writes,)) for i, (reads, writes) in enumerate(steps))
    graph = contract(compile_problem(Problem(operators=operators, buffers=tuple(buffers)))).graph
    contraction, loss = merge_cones(graph, CutModel(graph).ancestors, tolerance=0)
    assert loss == 0
    assert contraction.graph.num_operators == 4
    assert best_peak(contraction.graph) == best_peak(graph) == 600


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([Operator(name="a", reads=(0,), writes=())], "reads buffer 0 .'x'., which nothing before it writes"),
        ([Operator(name="a", reads=(), writes=(3,))], "names buffer 3, but there are 2"),
        ([Operator(name="a", reads=(), writes=(0,), after=(0,))], "must run after operator 0"),
        ([Operator(name="a", reads=(), writes=(0,))], "buffer 1 .'y'. is an output that no operator writes"),
    ],
)
def test_malformed_problems_are_refused(operators, message):
    buffers = (Buffer(name="x", size=1), Buffer(name="y", size=1, is_output=True))
    with pytest.raises(PlanError, match=message):
        compile_problem(Problem(operators=tuple(operators), buffers=buffers))
