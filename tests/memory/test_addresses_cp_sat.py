"""CP-SAT for addresses: right answers and proofs, and instances that the searches alone do not decide."""

import dataclasses
import random
import sys
import threading
import time

import numpy as np
import pytest
from address_reference import cut_problem, optimal_height, random_problem

from graphacc.passes.memory.addresses import cp_sat, portfolio, solve_addresses
from graphacc.passes.memory.addresses.native import Outcome
from graphacc.passes.memory.addresses.orders import static_orders
from graphacc.passes.memory.addresses.packing import pack
from graphacc.passes.memory.addresses.windows import windows_of
from graphacc.passes.memory.validate import check_addresses

FOREVER = 1 << 40


def _attempts(packing, capacity):
    top, ends = packing.limits(capacity)
    return cp_sat.Attempts(packing, top, windows_of(packing, ends))


@pytest.mark.parametrize("seed", range(12))
def test_a_capacity_is_decided_as_by_exhaustive_search(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, num_buffers=rng.randint(2, 6), num_fixed=rng.choice((0, 0, 1)), alignment=rng.choice((1, 1, 4)))
    packing, height = pack(problem), optimal_height(problem)
    for capacity, expected in ((height, Outcome.FOUND), (height - 1, Outcome.IMPOSSIBLE)):
        attempts = _attempts(packing, capacity)
        outcome, offsets = attempts.run(static_orders(packing)[0], FOREVER, time.monotonic() + 20)
        assert outcome is expected
        if offsets is not None:
            found = (offsets * packing.unit).tolist()
            assert check_addresses(dataclasses.replace(problem, capacity=capacity), found) == height


def hard(seed: int):
    packing = pack(cut_problem(random.Random(seed), num_buffers=700, height=1 << 20))
    return packing, _attempts(packing, 1 << 20)


def test_an_attempt_can_be_stopped_before_and_while_it_runs():
    packing, attempts = hard(0)
    threading.Timer(0.3, attempts.stop).start()
    start = time.monotonic()
    outcome, _ = attempts.run(np.arange(len(packing)), FOREVER, start + 60)
    assert outcome is Outcome.STOPPED and time.monotonic() - start < 20
    assert attempts.run(np.arange(len(packing)), FOREVER, time.monotonic() + 60) == (Outcome.STOPPED, None)


def test_an_attempt_gives_up_after_its_failures_and_at_its_deadline():
    packing, attempts = hard(0)
    assert attempts.run(np.arange(len(packing)), 1, time.monotonic() + 60)[0] is Outcome.STOPPED
    assert attempts.run(np.arange(len(packing)), FOREVER, time.monotonic() - 1)[0] is Outcome.STOPPED


def test_the_portfolio_takes_what_cp_sat_finds(monkeypatch):
    """With searches and beams that find nothing."""

    def nothing(packing, order, limits, *limit_and_stop, **options):
        time.sleep(0.001)
        return Outcome.STOPPED, None, 0

    monkeypatch.setattr(portfolio.native, "search", nothing)
    monkeypatch.setattr(portfolio.native, "beam", nothing)
    problem = dataclasses.replace(cut_problem(random.Random(1), num_buffers=60), capacity=1024)
    plan = solve_addresses(problem, seconds=60)
    assert check_addresses(problem, plan.offsets) == 1024


def test_what_the_searches_decide_needs_no_integer_program(monkeypatch):
    """ortools takes long to import."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    problem = dataclasses.replace(cut_problem(random.Random(1), num_buffers=40), capacity=1024)
    assert solve_addresses(problem, seconds=10).offsets
