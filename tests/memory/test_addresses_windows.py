"""Windows hold in every solution, and spare the searches nodes without changing an answer."""

import random

import numpy as np
import pytest
from address_reference import cut_problem, filled_problem, is_valid, pinwheel_problem

from graphacc.passes.memory.addresses import native
from graphacc.passes.memory.addresses.native import Outcome, Rule, StopFlag
from graphacc.passes.memory.addresses.orders import perturbed, static_orders
from graphacc.passes.memory.addresses.packing import Packing, pack
from graphacc.passes.memory.addresses.windows import windows_of

MANY = 10**9


def _small(seed: int) -> tuple[Packing, int]:
    """A packing and a capacity (bytes): without room, with a little, or without a solution."""
    rng = random.Random(seed)
    problem = (
        filled_problem(rng),
        cut_problem(rng, num_buffers=40, time=60, height=64),
        pinwheel_problem(rng, num_buffers=50),
    )[seed % 3]  # fmt: skip
    packing = pack(problem)
    return packing, packing.bound + rng.choice((0, 0, 0, 1))


def _holds(packing: Packing, offsets: np.ndarray, windows) -> bool:
    low = np.minimum(offsets[windows.first], offsets[windows.second])
    high = np.maximum((offsets + packing.size)[windows.first], (offsets + packing.size)[windows.second])
    return bool((high - low <= windows.height).all())


def test_a_window_needs_two_items_that_fit_no_two_gaps():
    """K [0, 4) of 6 in a capacity of 10 leaves 4: u of 3 before and v of 2 after it lie in one gap, and w of 1 need not."""
    first, last, size = np.array([0, 0, 1, 1]), np.array([2, 1, 2, 2]), np.array([6, 3, 2, 1])
    packing = Packing(unit=1, first=first, last=last, size=size, padding=size * 0, fixed=size * 0 - 1, lifetime=last - first, num_sections=2)
    windows = windows_of(packing, np.array([10, 10]))
    assert [(int(i), int(j), int(h)) for i, j, h in zip(windows.first, windows.second, windows.height, strict=True)] == [(1, 2, 4)]
    assert len(windows_of(packing, np.array([10, 11]))) == 0  # 5 of two gaps hold both


@pytest.mark.parametrize("kind", range(3))
def test_windows_hold_in_every_solution(kind):
    """In those that searches find without them, under many orders."""
    num_windows = num_solutions = 0
    for seed in range(kind, 60, 3):
        packing, capacity = _small(seed)
        limits = packing.limits(capacity)
        windows = windows_of(packing, limits[1])
        num_windows += len(windows)
        for i in range(12):
            order = perturbed(static_orders(packing)[i % 6], 0.5, random.Random(i))
            _, offsets, _ = native.search(packing, order, limits, 20_000, StopFlag(), rule=list(Rule)[i % 4])
            if offsets is not None:
                num_solutions += 1
                assert _holds(packing, offsets, windows)
                assert _holds(packing, capacity // packing.unit - offsets - packing.size, windows)  # upside down
    assert num_windows > 100 and num_solutions > 50


@pytest.mark.parametrize("rule", list(Rule))
def test_searches_with_windows_decide_alike_in_fewer_nodes(rule):
    with_windows, without, outcomes = 0, 0, set()
    for seed in range(120):
        packing, capacity = _small(seed)
        limits = packing.limits(capacity)
        order = perturbed(static_orders(packing)[seed % 6], 0.5, random.Random(seed))
        expected, _, nodes = native.search(packing, order, limits, 300_000, StopFlag(), rule=rule)
        outcome, offsets, fewer = native.search(packing, order, limits, MANY, StopFlag(), rule=rule, windows=windows_of(packing, limits[1]))
        assert expected in (outcome, Outcome.STOPPED)
        if offsets is not None:
            assert is_valid(packing, offsets, limits[1])
        outcomes.add(outcome)
        with_windows, without = with_windows + fewer, without + nodes
    assert outcomes == {Outcome.FOUND, Outcome.IMPOSSIBLE}
    assert with_windows < 0.8 * without


def test_a_beam_with_windows_finds_what_fits():
    found = 0
    for seed in range(60):
        packing, capacity = _small(seed)
        limits = packing.limits(capacity)
        outcome, offsets, _ = native.beam(packing, static_orders(packing)[seed % 6], limits, 30, 0.01, StopFlag(), windows=windows_of(packing, limits[1]))
        if outcome is Outcome.FOUND:
            found += 1
            assert is_valid(packing, offsets, limits[1])
    assert found > 20
