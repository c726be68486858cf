"""`solve_addresses`: right answers, proved answers, and the published instances."""

import dataclasses
import lzma
import pathlib
import random
import time
import types

import numpy as np
import pytest
from address_reference import cut_problem, filled_problem, optimal_height, random_problem

from graphacc.errors import PlanError
from graphacc.passes.memory.addresses import best_fit, native, portfolio, solve_addresses
from graphacc.passes.memory.addresses.orders import KEYS, static_orders
from graphacc.passes.memory.addresses.packing import pack
from graphacc.passes.memory.addresses.portfolio import luby
from graphacc.passes.memory.addresses.repair import reorder, repair
from graphacc.passes.memory.csvfile import read_problem
from graphacc.passes.memory.problem import AddressProblem, LiveBuffer, Status
from graphacc.passes.memory.validate import check_addresses

INSTANCES = pathlib.Path(__file__).parent / "instances"
CAPACITY = 1_048_576


def instance(name: str) -> AddressProblem:
    return read_problem(INSTANCES / name)


def problem(*ranges: tuple[int, int, int], **fields) -> AddressProblem:
    """(lower, upper, size) of each buffer."""
    return AddressProblem(
        buffers=tuple(LiveBuffer(name=f"b{i}", lower=a, upper=b, size=s) for i, (a, b, s) in enumerate(ranges)), **fields
    )


def test_buffers_that_do_not_live_together_share_an_address():
    plan = solve_addresses(problem((0, 2, 10), (2, 4, 7), (0, 4, 5)), seconds=1)
    assert (plan.status, plan.height, plan.lower_bound, plan.bound_source) == (Status.OPTIMAL, 15, 15, "max live")


def test_nothing_to_plan():
    plan = solve_addresses(problem(), seconds=1)
    assert (plan.status, plan.offsets, plan.height, plan.gap) == (Status.OPTIMAL, (), 0, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_small_problems_are_solved_optimally(seed):
    rng = random.Random(seed)
    p = random_problem(rng, num_buffers=rng.randint(1, 6), num_fixed=rng.choice((0, 0, 1)), alignment=rng.choice((1, 1, 4)))
    plan = solve_addresses(p, seconds=20)
    assert plan.status is Status.OPTIMAL
    assert plan.height == plan.lower_bound == optimal_height(p)


def test_a_bound_above_the_largest_live_set_is_proved_by_search():
    """The largest live set of this problem is 16, and it fits 17 but not 16."""
    p = filled_problem(random.Random(125))
    plan = solve_addresses(p, seconds=60)
    assert (plan.status, plan.height, plan.lower_bound, plan.bound_source) == (Status.OPTIMAL, 17, 17, "exhaustive search")
    refused = solve_addresses(dataclasses.replace(p, capacity=16), seconds=60)
    assert (refused.status, refused.offsets, refused.lower_bound) == (Status.INFEASIBLE, (), 17)


def test_a_capacity_below_the_largest_live_set_is_infeasible_at_once():
    plan = solve_addresses(problem((0, 2, 10), (0, 2, 10), capacity=19), seconds=0)
    assert (plan.status, plan.offsets, plan.lower_bound, plan.bound_source) == (Status.INFEASIBLE, (), 20, "max live")


def test_a_capacity_that_is_not_needed_whole_is_feasible_or_optimal():
    p = cut_problem(random.Random(3), num_buffers=60)
    loose = solve_addresses(dataclasses.replace(p, capacity=5000), seconds=10)
    assert loose.status in (Status.FEASIBLE, Status.OPTIMAL) and loose.height <= 5000
    assert solve_addresses(dataclasses.replace(p, capacity=1024), seconds=30).status is Status.OPTIMAL


@pytest.mark.parametrize("seed", [18, 29, 30, 35, 90])
def test_that_nothing_fits_the_bound_says_nothing_about_the_capacity(seed):
    """Searches that aim below the capacity prove nothing where they fail: these fit 17, not their largest live set, 16."""
    packing = pack(filled_problem(random.Random(seed)))
    for capacity, outcome in {16: native.Outcome.IMPOSSIBLE, 17: native.Outcome.FOUND, 18: native.Outcome.FOUND}.items():
        assert portfolio.decide(packing, capacity, deadline=time.monotonic() + 60, threads=2).outcome is outcome
    race = portfolio._Race(packing, 17, 0, time.monotonic() + 60, native.StopFlag())
    attempt = race._search(portfolio.static_orders(packing)[0], 10**9, native.Rule.FEWEST, is_tight=True)
    assert [attempt()[0], attempt()[0]] == [native.Outcome.STOPPED, native.Outcome.FOUND]  # from then on for the capacity


def test_room_above_the_largest_live_set_makes_a_problem_no_harder():
    """Cut without waste out of 0.9 % less than the capacity: 20,000 nodes are too few there, and 300 enough at the bound."""
    p = dataclasses.replace(cut_problem(random.Random(0), num_buffers=200, height=1015), capacity=1024)
    race = portfolio._Race(pack(p), 1024, 0, time.monotonic() + 60, native.StopFlag())
    order = portfolio.static_orders(race.packing)[0]
    outcomes = [race._search(order, 300 if is_tight else 20_000, native.Rule.FEWEST, is_tight)()[0] for is_tight in (False, True)]
    assert outcomes == [native.Outcome.STOPPED, native.Outcome.FOUND]
    plan = solve_addresses(p, seconds=60)
    assert plan.status in (Status.OPTIMAL, Status.FEASIBLE) and 1015 <= plan.height <= 1024


def test_out_of_time_is_neither_solved_nor_infeasible():
    p = dataclasses.replace(cut_problem(random.Random(5), num_buffers=700, height=1 << 20), capacity=1 << 20)
    start = time.monotonic()
    plan = solve_addresses(p, seconds=0.3)
    assert (plan.status, plan.offsets) == (Status.OUT_OF_TIME, ())
    assert time.monotonic() - start < 5
    minimised = solve_addresses(dataclasses.replace(p, capacity=None), seconds=0.3)
    assert minimised.status is Status.FEASIBLE and minimised.height > minimised.lower_bound == 1 << 20


def test_alignment_is_counted_before_the_bound_but_not_above_the_topmost_buffer():
    """Two buffers of 5 at multiples of 8: the upper one ends at 13."""
    assert solve_addresses(problem((0, 1, 5), (0, 1, 5), alignment=8), seconds=1).height == 13
    assert solve_addresses(problem((0, 1, 5), (0, 1, 5), alignment=8, capacity=13), seconds=1).status is Status.OPTIMAL
    assert solve_addresses(problem((0, 1, 5), (0, 1, 5), alignment=8, capacity=12), seconds=1).status is Status.INFEASIBLE


def test_the_right_buffer_is_put_on_top_where_alignment_makes_it_matter():
    """Sizes 1 and 8 at multiples of 8: 9 bytes with the 1 on top, 16 with the 8 on top."""
    plan = solve_addresses(problem((0, 1, 1), (0, 1, 8), alignment=8, capacity=9), seconds=1)
    assert plan.offsets == (8, 0)


def test_fixed_buffers_stay_and_the_gaps_around_them_are_used():
    buffers = (
        LiveBuffer(name="parameters", lower=0, upper=10, size=4, offset=4),
        LiveBuffer(name="fits below", lower=0, upper=3, size=4),
        LiveBuffer(name="too large", lower=0, upper=10, size=5),
    )
    plan = solve_addresses(AddressProblem(buffers=buffers), seconds=1)
    assert (plan.offsets, plan.status) == ((4, 0, 8), Status.OPTIMAL)


def test_parts_that_nothing_connects_are_solved_apart():
    parts = [cut_problem(random.Random(seed), num_buffers=40) for seed in range(8)]
    buffers = tuple(
        dataclasses.replace(b, name=f"{i}.{b.name}", lower=b.lower + 2000 * i, upper=b.upper + 2000 * i)
        for i, part in enumerate(parts)
        for b in part.buffers
    )
    assert len(pack(AddressProblem(buffers=buffers)).parts()) >= 8
    assert solve_addresses(AddressProblem(buffers=buffers), seconds=30).status is Status.OPTIMAL


@pytest.mark.parametrize("name", ["A", "B", "C", "E", "F", "H", "K"])
def test_a_published_instance_fits_its_capacity(name):
    p = dataclasses.replace(instance(f"{name}.{CAPACITY}.csv"), capacity=CAPACITY)
    plan = solve_addresses(p, seconds=30)
    assert plan.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert check_addresses(p, plan.offsets) <= CAPACITY


@pytest.mark.parametrize("name, height", [("C.1048576", 1_039_360), ("resnet50", 1_515_472_556), ("G_1", 3_030_937_746)])
def test_a_published_instance_is_solved_optimally(name, height):
    plan = solve_addresses(instance(f"{name}.csv"), seconds=30)
    assert (plan.status, plan.height, plan.lower_bound) == (Status.OPTIMAL, height, height)


def test_a_large_trace_is_lowered_by_reordering_and_then_by_repair(tmp_path):
    """18,692 buffers. The plain skyline is 0.76 % above the bound."""
    trace = tmp_path / "pangu_2.6B.csv"
    trace.write_bytes(lzma.decompress((INSTANCES / "pangu_2.6B.csv.xz").read_bytes()))
    packing = pack(read_problem(trace))
    order = static_orders(packing)[KEYS.index("ATW")]
    start = native.skyline(packing, order)
    target = packing.bound + packing.bound // 200
    reordered = reorder(packing, order, start, target=target, deadline=time.monotonic() + 60, threads=1, seed=1)
    assert packing.height(reordered) <= target < packing.height(start)
    target = packing.bound + packing.bound // 2000
    repaired = repair(packing, reordered, target=target, deadline=time.monotonic() + 60)
    assert packing.height(repaired) <= target


def test_many_small_items_do_not_keep_the_large_ones_high():
    """The temporaries of a Qwen3-MoE's training step in a planned order: a quarter of the items has less than 0.01 % of the bytes each."""
    p = read_problem(pathlib.Path(__file__).with_name("qwen3_moe_step.csv"))
    plan = solve_addresses(p, seconds=2, threads=1)
    assert plan.lower_bound == 123_664_448
    assert plan.gap <= 0.001


def test_the_smallest_items_are_those_that_are_nowhere_more_than_a_load():
    p = pack(problem((0, 4, 100), (0, 2, 1), (2, 4, 1), (0, 4, 2), (1, 3, 30)))
    assert [p.smallest(load).nonzero()[0].tolist() for load in (0, 1, 2, 3, 32, 33, 200)] == [
        [], [1, 2], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    fixed = dataclasses.replace(p, fixed=np.array([-1, 0, -1, -1, -1]))
    assert fixed.smallest(3).nonzero()[0].tolist() == [2, 3]


def test_repair_lowers_a_bad_packing_to_the_optimum():
    """The offsets to begin with stack all buffers on top of each other."""
    packing = pack(cut_problem(random.Random(2), num_buffers=12))
    stacked = np.cumsum(packing.size) - packing.size
    repaired = repair(packing, stacked, target=packing.bound, deadline=time.monotonic() + 20)
    assert packing.height(repaired) == packing.bound


def test_every_kind_of_attempt_gets_its_share_of_the_time(monkeypatch):
    """A beam that takes three times as long, by a clock of the test's own, is tried a third as often."""
    made, clock = [], [0.0]

    def attempt(kind, seconds):
        made.append(kind)
        clock[0] += seconds
        return native.Outcome.FOUND if clock[0] > 100 else native.Outcome.STOPPED, None, 0

    monkeypatch.setattr(portfolio, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(portfolio.native, "search", lambda *_, **__: attempt("search", 0.01))
    monkeypatch.setattr(portfolio.native, "beam", lambda *_, **__: attempt("beam", 0.03))
    monkeypatch.setattr(portfolio.cp_sat, "MAX_CELLS", 0)  # it has a clock of its own
    portfolio.decide(pack(cut_problem(random.Random(0), num_buffers=9)), 1024, deadline=time.monotonic() + 60, threads=1)
    assert made.count("search") / made.count("beam") == pytest.approx(3 * (portfolio.FEWEST_SHARE + 1), rel=0.05)


def test_luby():
    assert [luby(i) for i in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]


@pytest.mark.parametrize("seed", range(10))
def test_best_fit_is_valid_and_never_below_the_optimum(seed):
    rng = random.Random(seed)
    p = random_problem(rng, num_buffers=6, num_fixed=seed % 2, alignment=1 + 3 * (seed % 3))
    assert check_addresses(p, best_fit(p)) >= optimal_height(p)


def test_best_fit_takes_the_smallest_gap_that_holds_the_buffer():
    """Gaps of 6 and of 3 below and between what lives from 0 to 2."""
    p = AddressProblem(
        buffers=(
            LiveBuffer(name="low", lower=0, upper=2, size=9, offset=6),
            LiveBuffer(name="high", lower=0, upper=2, size=9, offset=18),
            LiveBuffer(name="new", lower=1, upper=3, size=2),
        )
    )
    assert best_fit(p) == (6, 18, 15)


def test_a_malformed_problem_is_refused_before_any_work():
    with pytest.raises(PlanError, match=r"live range: buffer 'b0' lives in \[2, 2\), which is empty"):
        solve_addresses(problem((2, 2, 1)), seconds=1)
