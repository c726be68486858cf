"""Order and addresses together."""

import random

from order_cases import layered_training_problem, random_problem

from graphacc.passes.memory.order.graph import live_ranges
from graphacc.passes.memory.plan import plan
from graphacc.passes.memory.problem import AddressProblem, LiveBuffer
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
