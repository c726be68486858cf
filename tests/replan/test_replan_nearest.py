"""The order near the program's."""

import random

import pytest
from memory.order_cases import layered_training_problem, random_problem

from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.order.heuristics import HEURISTICS
from graphacc.passes.memory.problem import Buffer, Operator, Problem
from graphacc.runtime.replan.nearest import nearest_order


@pytest.mark.parametrize("seed", range(60))
def test_it_is_valid_and_no_higher_than_what_was_planned(seed):
    graph = compile_problem(random_problem(seed, 12) if seed % 2 else layered_training_problem(3, random.Random(seed)))
    for heuristic in HEURISTICS.values():
        planned = heuristic(graph)
        order = nearest_order(graph, planned)
        assert graph.is_valid(order)
        assert graph.peak(order) <= graph.peak(planned)
        if graph.peak(range(graph.num_operators)) <= graph.peak(planned):
            assert order == tuple(range(graph.num_operators))


def diamonds(*sizes: int) -> Problem:
    """One after the other: a and b are made, a is used up, b is used up. Making b later needs less."""
    operators, buffers = [], []
    for i, size in enumerate(sizes):
        a, b, before = 2 * i, 2 * i + 1, (4 * i - 1,) if i else ()
        buffers += [Buffer(name="a", size=size), Buffer(name="b", size=size)]
        operators += [
            Operator(name="make a", reads=(), writes=(a,), after=before),
            Operator(name="make b", reads=(), writes=(b,), after=before),
            Operator(name="use a", reads=(a,), writes=()),
            Operator(name="use b", reads=(b,), writes=(), after=(4 * i + 2,)),
        ]
    return Problem(operators=tuple(operators), buffers=tuple(buffers))


def test_only_what_is_too_high_moves():
    graph = compile_problem(diamonds(4, 10, 4))
    planned = tuple(v for i in range(0, 12, 4) for v in (i, i + 2, i + 1, i + 3))
    assert graph.peak(planned) == 10
    assert nearest_order(graph, planned) == (0, 1, 2, 3, 4, 6, 5, 7, 8, 9, 10, 11)
