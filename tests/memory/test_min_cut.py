"""Minimum cuts in C++ against OR-Tools' maximum flow."""

import random

import numpy as np
import pytest
from ortools.graph.python import max_flow

from graphacc.passes.memory.order.native import FlowNetwork

SOURCE, SINK = 0, 1
NO_LIMIT = 2**62


def _random_network(rng: random.Random) -> tuple[int, int, np.ndarray]:
    """Nodes, operators among them, and arcs [3, A], some of capacity zero, some parallel, some from a node to itself."""
    num_operators = rng.randrange(1, 30)
    num_nodes = 2 + num_operators + rng.randrange(10)
    arcs = [
        (rng.randrange(num_nodes), rng.randrange(num_nodes), rng.choice([0, 1, rng.randrange(100), 10**12]))
        for _ in range(rng.randrange(1, 120))
    ]
    return num_nodes, num_operators, np.array(arcs, dtype=np.int64).T


def _random_sets(rng: random.Random, num_operators: int) -> tuple[int, int]:
    kinds = [rng.choice("fffio") for _ in range(num_operators)]
    return tuple(sum(1 << v for v, kind in enumerate(kinds) if kind == letter) for letter in "io")


def _reference(num_operators: int, arcs: np.ndarray, inside: int, outside: int) -> tuple[int, int]:
    """OR-Tools' minimum cut, and the free operators on its source's side."""

    def merged(node: int) -> int:
        v = node - 2
        return SOURCE if v >= 0 and inside >> v & 1 else SINK if v >= 0 and outside >> v & 1 else node

    flow = max_flow.SimpleMaxFlow()
    for tail, head, size in arcs.T.tolist():
        if merged(tail) != merged(head):
            flow.add_arc_with_capacity(merged(tail), merged(head), size)
    if flow.num_arcs() == 0:
        return 0, 0
    flow.add_arc_with_capacity(SOURCE, SINK, 0)  # both nodes exist
    assert flow.solve(SOURCE, SINK) == flow.OPTIMAL
    side = [v - 2 for v in flow.get_source_side_min_cut() if 2 <= v < num_operators + 2]
    return flow.optimal_flow(), sum(1 << v for v in side)


@pytest.mark.parametrize("seed", range(10))
def test_cuts_equal_the_reference(seed):
    rng = random.Random(seed)
    for _ in range(100):
        num_nodes, num_operators, arcs = _random_network(rng)
        network = FlowNetwork(num_nodes, num_operators, arcs)
        inside, outside = _random_sets(rng, num_operators)
        value, side = _reference(num_operators, arcs, inside, outside)
        assert network.min_cut(inside, outside, NO_LIMIT) == (value, side)
        assert network.min_cut(inside, outside, value) == (value, side)
        if value:
            assert network.min_cut(inside, outside, rng.randrange(value))[0] >= 1
            assert network.min_cut(inside, outside, value - 1)[0] > value - 1


def test_a_limit_ends_the_search_early():
    arcs = np.array([(SOURCE, v + 2, 1) for v in range(1000)] + [(v + 2, SINK, 1) for v in range(1000)]).T
    assert FlowNetwork(1002, 1000, arcs).min_cut(0, 0, 10)[0] == 11


def test_no_arcs():
    assert FlowNetwork(5, 3, np.zeros((3, 0), np.int64)).min_cut(1, 4, NO_LIMIT) == (0, 0)


def test_a_network_with_too_few_nodes_is_an_error():
    with pytest.raises(ValueError, match="the network has 4 nodes"):
        FlowNetwork(4, 3, np.zeros((3, 0), np.int64)).min_cut(0, 0, 0)
