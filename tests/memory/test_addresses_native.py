"""The C++ inner loops give what their plain Python forms give, and every rule of the search earns its keep."""

import dataclasses
import pathlib
import random
import time

import numpy as np
import pytest
from address_reference import RULES, Search, State, beam, cut_problem, filled_problem, is_valid, random_problem

from graphacc.passes.memory.addresses import native
from graphacc.passes.memory.addresses.native import Outcome, Rule, StopFlag
from graphacc.passes.memory.addresses.orders import perturbed, static_orders
from graphacc.passes.memory.addresses.packing import pack
from graphacc.passes.memory.csvfile import read_problem
from graphacc.passes.memory.validate import check_addresses

MANY = 10**9
INSTANCES = pathlib.Path(__file__).parent / "instances"


def _cases():
    """(packing, order, limits) of small problems: loose, tight and impossible, some with fixed buffers and alignment."""
    for seed in range(40):
        rng = random.Random(seed)
        kind = {"num_buffers": rng.randint(2, 12), "num_fixed": rng.choice((0, 0, 2)), "alignment": rng.choice((1, 1, 4))}
        packing = pack(random_problem(rng, **kind))
        yield packing, perturbed(static_orders(packing)[0], 0.5, rng), packing.limits(packing.bound + rng.randrange(3))
    for seed in range(12):
        rng = random.Random(seed)
        packing = pack(filled_problem(rng, time=8, height=10, max_size=4))
        yield packing, perturbed(static_orders(packing)[0], 1.0, rng), packing.limits(packing.bound)
    for seed in range(6):
        rng = random.Random(seed)
        packing = pack(cut_problem(rng, num_buffers=20, time=30, height=32))
        yield packing, static_orders(packing)[seed], packing.limits(packing.bound)


def _in_order(order, ranked):
    offsets = np.empty(len(order), np.int64)
    offsets[order] = ranked
    return offsets.tolist()


@pytest.mark.parametrize("rule", [Rule.LOWEST, Rule.RENEWED, Rule.FEWEST])
def test_the_search_is_that_of_the_reference(rule):
    outcomes = set()
    for packing, order, limits in _cases():
        reference = Search(rule=rule)
        expected = reference.run(State(packing, order, limits))
        outcome, offsets, nodes = native.search(packing, order, limits, MANY, StopFlag(), rule=rule)
        assert nodes == reference.nodes
        assert outcome is (Outcome.IMPOSSIBLE if expected is None else Outcome.FOUND)
        assert expected is None or offsets.tolist() == _in_order(order, expected)
        outcomes.add(outcome)
    assert outcomes == {Outcome.FOUND, Outcome.IMPOSSIBLE}


def test_every_rule_decides_alike():
    """Also the rule that counts failures: which of several sections fails first is the C++'s own, so the reference has no such rule."""
    decided = {}
    for rule in Rule:
        for i, (packing, order, limits) in enumerate(_cases()):
            outcome, offsets, _ = native.search(packing, order, limits, MANY, StopFlag(), rule=rule)
            assert decided.setdefault(i, outcome) is outcome
            if offsets is not None:
                is_free = packing.fixed < 0
                assert (offsets <= limits[0])[is_free].all() and (offsets == packing.fixed)[~is_free].all()
                assert is_valid(packing, offsets, limits[1])
    assert set(decided.values()) == {Outcome.FOUND, Outcome.IMPOSSIBLE}


def test_an_item_that_fixed_ones_push_up_ends_within_the_capacity():
    """Of items that are padded to the alignment each has an end of its own, below its section's."""
    pushed = 0
    for seed in range(500):
        rng = random.Random(seed)
        packing = pack(random_problem(rng, num_buffers=rng.randint(4, 10), num_fixed=3, alignment=4))
        limits = packing.limits(packing.bound)
        _, offsets, _ = native.search(packing, static_orders(packing)[seed % 6], limits, 2000, StopFlag(), rule=list(Rule)[seed % 4])
        is_free = packing.fixed < 0
        assert offsets is None or (offsets <= limits[0])[is_free].all()
        pushed += offsets is None
    assert pushed > 10


@pytest.mark.parametrize("name", "ABCE")
def test_where_few_fit_is_decided_first(name):
    """Four of MiniMalloc's instances: a thousand nodes are more than enough so, and too few from the lowest item on."""
    packing = pack(read_problem(INSTANCES / f"{name}.1048576.csv"))
    outcomes = [native.search(packing, static_orders(packing)[0], packing.limits(1048576), 1000, StopFlag(), rule=rule)[0] for rule in Rule]
    assert outcomes == [Outcome.STOPPED, Outcome.STOPPED, Outcome.FOUND, Outcome.FOUND]


@pytest.mark.parametrize("width, bias", [(1, 1.0), (3, 0.01), (20, 0.01)])
def test_the_beam_is_that_of_the_reference(width, bias):
    outcomes = set()
    for packing, order, limits in _cases():
        expected, expected_nodes = beam(State(packing, order, limits), width, bias)
        outcome, offsets, nodes = native.beam(packing, order, limits, width, bias, StopFlag())
        assert nodes == expected_nodes
        assert outcome is (Outcome.IMPOSSIBLE if expected is None else Outcome.FOUND)
        assert expected is None or offsets.tolist() == _in_order(order, expected)
        outcomes.add(outcome)
    assert outcomes == {Outcome.FOUND, Outcome.IMPOSSIBLE}


def _lowest(packing, item, placed, offsets):
    """The lowest offset above the placed items that the item meets, clear of the fixed ones."""
    def met(j):
        return packing.first[item] < packing.last[j] and packing.first[j] < packing.last[item]

    offset = max((offsets[j] + packing.size[j] for j in placed if met(j)), default=0)
    for j in sorted(np.flatnonzero(packing.fixed >= 0), key=lambda j: packing.fixed[j]):
        if met(j) and packing.fixed[j] < offset + packing.size[item] and offset < packing.fixed[j] + packing.size[j]:
            offset = packing.fixed[j] + packing.size[j]
    return int(offset)


def test_the_skyline_places_the_lowest_item_next():
    for packing, order, _ in _cases():
        offsets, placed = packing.fixed.tolist(), []
        waiting = [i for i in order.tolist() if packing.fixed[i] < 0]
        while waiting:
            item = min(waiting, key=lambda i: _lowest(packing, i, placed, offsets))  # min keeps the first of equals
            offsets[item] = _lowest(packing, item, placed, offsets)
            waiting.remove(item)
            placed.append(item)
        assert native.skyline(packing, order).tolist() == offsets


def test_settling_places_the_items_in_order_and_never_lifts_a_solution():
    for packing, order, _ in _cases():
        offsets, placed = packing.fixed.tolist(), []
        for item in (i for i in order.tolist() if packing.fixed[i] < 0):
            offsets[item] = _lowest(packing, item, placed, offsets)
            placed.append(item)
        settled = native.settle(packing, order)
        assert settled.tolist() == offsets
        assert (native.settle(packing, np.argsort(settled, kind="stable")) <= settled).all()


def _count(packing, order, rules, max_nodes):
    """Whether the search finds offsets at the bound (None: not decided), and the nodes that it took."""
    search = Search(max_nodes)
    try:
        return search.run(State(packing, order, packing.limits(packing.bound), rules)) is not None, search.nodes
    except TimeoutError:
        return None, search.nodes


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.default_cases("support")
def test_each_rule_saves_nodes_and_changes_no_answer(rule):
    with_rule = without_rule = 0
    for seed in range(60):
        rng = random.Random(seed)
        packing = pack(filled_problem(rng))
        order = perturbed(static_orders(packing)[0], 1.0, rng)
        _, _, nodes = native.search(packing, order, packing.limits(packing.bound), 2500, StopFlag())
        if not 50 < nodes < 2500:
            continue
        answer, nodes = _count(packing, order, RULES, 2500)
        other, other_nodes = _count(packing, order, RULES - {rule}, 3500)
        assert other in (answer, None)
        with_rule += nodes
        without_rule += other_nodes
    assert 0 < with_rule < without_rule


def test_a_search_stops_at_its_node_limit_and_at_the_flag():
    problem = cut_problem(random.Random(0), num_buffers=200)
    packing = pack(problem)
    order, limits = static_orders(packing)[0][::-1], packing.limits(packing.bound)
    outcome, offsets, nodes = native.search(packing, order, limits, 100, StopFlag())
    assert (outcome, offsets, nodes) == (Outcome.STOPPED, None, 101)
    stop = StopFlag()
    stop.set()
    assert native.search(packing, order, limits, MANY, stop) == (Outcome.STOPPED, None, 1)
    assert native.beam(packing, order, limits, 5, 1.0, stop)[0] is Outcome.STOPPED


def test_a_flag_is_set_at_its_deadline_and_at_the_end_of_its_block():
    began = time.monotonic()
    with native.stop_at(began + 0.05) as stop:
        while not stop.is_set() and time.monotonic() < began + 30:
            time.sleep(0.005)
        assert stop.is_set() and time.monotonic() >= began + 0.05
    with native.stop_at(time.monotonic() + 1000) as stop:
        pass
    assert stop.is_set()


def test_wrong_arguments_are_refused():
    packing = pack(cut_problem(random.Random(0), num_buffers=5))
    order, limits = static_orders(packing)[0], packing.limits(packing.bound)
    with pytest.raises(ValueError, match="width is 0, expected at least 1"):
        native.beam(packing, order, limits, 0, 1.0, StopFlag())
    empty = packing.select(np.array([], np.int64))
    for call in (native.skyline, native.settle):
        with pytest.raises(ValueError, match="num_items is 0"):
            call(empty, order[:0])


def test_large_sizes_do_not_overflow():
    problem = random_problem(random.Random(1), num_buffers=12)
    huge = dataclasses.replace(
        problem, buffers=tuple(dataclasses.replace(b, size=b.size * (1 << 50) + 1) for b in problem.buffers)
    )
    packing = pack(huge)
    offsets = native.skyline(packing, static_orders(packing)[0]) * packing.unit
    assert check_addresses(huge, offsets.tolist()) >= packing.bound > 1 << 50
