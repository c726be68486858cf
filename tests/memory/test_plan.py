"""Order and addresses together."""

import dataclasses
import itertools
import random

from order_cases import layered_training_problem, random_problem

from graphacc.passes.memory import plan as plan_module
from graphacc.passes.memory.addresses import solve_addresses
from graphacc.passes.memory.joint import solve_jointly
from graphacc.passes.memory.order.graph import compile_problem, live_ranges
from graphacc.passes.memory.plan import plan, stored_buffers
from graphacc.passes.memory.problem import AddressPlan, AddressProblem, LiveBuffer, OrderPlan, Plan, Status
from graphacc.passes.memory.validate import check_addresses, check_order


def _check(problem, answer, alignment):
    """Everything that a plan says, from the validator and the problem alone."""
    assert check_order(problem, answer.order.order) == answer.order.peak
    assert answer.live_ranges == live_ranges(problem, answer.order.order)
    sizes = [buffer.size for buffer in problem.buffers]
    ranges = list(answer.live_ranges)
    for v, operator in enumerate(problem.operators):
        if operator.workspace:
            sizes.append(operator.workspace)
            place = answer.order.order.index(v)
            ranges.append((place, place + 1))
    assert len(answer.addresses.offsets) == len(sizes)
    stored = [i for i, (size, (low, high)) in enumerate(zip(sizes, ranges)) if size and low < high]
    arena = AddressProblem(
        buffers=tuple(LiveBuffer(name=str(i), lower=ranges[i][0], upper=ranges[i][1], size=sizes[i]) for i in stored),
        alignment=alignment,
    )
    assert check_addresses(arena, [answer.addresses.offsets[i] for i in stored]) == answer.addresses.height
    assert answer.addresses.height >= answer.order.peak >= answer.order.lower_bound
    assert answer.order.lower_bound <= answer.lower_bound <= answer.addresses.height


def test_plans_of_random_problems():
    for seed in range(40):
        problem = random_problem(seed, 3 + seed % 12)
        for alignment in (1, 4):
            _check(problem, plan(problem, seconds=1.0, threads=1, alignment=alignment), alignment)


def test_a_training_step_is_proved_optimal_in_order_and_addresses_together():
    problem = layered_training_problem(num_layers=6, rng=random.Random(2))
    answer = plan(problem, seconds=10.0, threads=1)
    _check(problem, answer, 1)
    assert answer.addresses.height == answer.order.lower_bound


def _least_height(problem):
    """The least arena of all orders, from the address solver alone."""
    best = None
    for order in itertools.permutations(range(len(problem.operators))):
        if compile_problem(problem).is_valid(order):
            buffers = [b for b in stored_buffers(problem, order, live_ranges(problem, order)) if b is not None]
            found = solve_addresses(AddressProblem(buffers=tuple(buffers)), seconds=10)
            assert found.status is Status.OPTIMAL
            best = found.height if best is None else min(best, found.height)
    return best


def test_order_and_addresses_together_are_the_best_of_all_orders():
    for seed in range(6):
        problem = random_problem(seed, 5)
        answer = plan(problem, seconds=10.0)
        least = _least_height(problem)
        assert answer.addresses.height == answer.lower_bound == least, seed
        joint = solve_jointly(problem, below=least + 1, lower_bound=0, alignment=1, seconds=20)
        assert joint.lower_bound == least and check_order(problem, joint.order) <= least
        assert solve_jointly(problem, below=least, lower_bound=0, alignment=1, seconds=20).order == ()


def test_a_plan_says_what_limits_it():
    order = OrderPlan(status=Status.FEASIBLE, order=(), peak=10, lower_bound=8, bound_source="", seconds=0.0)
    addresses = AddressPlan(status=Status.OPTIMAL, offsets=(), height=10, lower_bound=10, bound_source="", seconds=0.0)
    limited = Plan(order=order, addresses=addresses, live_ranges=(), lower_bound=8)
    assert limited.limit.startswith("the order: its peak is 2 bytes")
    assert dataclasses.replace(limited, addresses=dataclasses.replace(addresses, height=11)).limit.startswith("fragmentation: 1 bytes")
    assert dataclasses.replace(limited, lower_bound=10).limit.startswith("nothing")


def test_another_order_of_the_same_peak_has_an_arena_without_holes(monkeypatch):
    problem = random_problem(58, 8)
    answer = plan(problem, seconds=10.0, alignment=4)
    _check(problem, answer, 4)
    monkeypatch.setattr(plan_module, "JOINT_OPERATORS", 0)
    apart = plan(problem, seconds=10.0, alignment=4)
    assert answer.addresses.height == answer.order.peak == apart.order.peak == answer.order.lower_bound < apart.addresses.height
    assert (answer.limit[:8], apart.limit[:13]) == ("nothing:", "fragmentation")
