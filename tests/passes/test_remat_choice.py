"""remat="auto": the integer program against all choices, and budgets that are met by what is predicted."""

import functools
import itertools
import random
import re

import gpt2_steps
import pytest
import torch
from selection import with_matrix
from simulate import run_global
from zoo_steps import shared_case

from graphacc.costs.memory import predict_memory
from graphacc.errors import GraphError, StrategyError
from graphacc.graph import StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.remat.attach import RematReport
from graphacc.passes.remat.choose import RematProblem, Variant, peak_of, solve, validate
from graphacc.passes.runner import run_passes
from graphacc.strategy import Strategy


def random_problem(seed: int) -> RematProblem:
    draw = random.Random(seed)
    regions = tuple(
        tuple(Variant(name=str(v), kept_bytes=draw.randrange(50), inside_bytes=draw.randrange(50, 120), cost=float(draw.randrange(20))) for v in range(3))
        for _ in range(4)
    )
    return RematProblem(regions=regions, outside_bytes=draw.randrange(100), budget_bytes=draw.choice([None, 120, 150, 200, 250]))


@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_the_best_of_all(seed):
    problem = random_problem(seed)
    choices = list(itertools.product(range(3), repeat=4))
    costs = {chosen: sum(region[v].cost for region, v in zip(problem.regions, chosen)) for chosen in choices}
    peaks = {chosen: peak_of(problem, chosen) for chosen in choices}
    found = solve(problem)
    if problem.budget_bytes is None:
        assert found.peak_bytes == min(peaks.values())
        assert found.cost == min(costs[chosen] for chosen in choices if peaks[chosen] == found.peak_bytes)
        return
    fitting = [chosen for chosen in choices if peaks[chosen] <= problem.budget_bytes]
    if not fitting:
        assert found is None
        return
    assert found.chosen in fitting and found.cost == min(costs[chosen] for chosen in fitting)
    assert found.gap == pytest.approx(0, abs=1e-6)


def test_a_wrong_answer_is_found():
    problem = RematProblem(regions=random_problem(0).regions, outside_bytes=0, budget_bytes=None)
    found = solve(problem)
    with pytest.raises(GraphError, match="the answer has a peak of"):
        validate(RematProblem(regions=problem.regions, outside_bytes=0, budget_bytes=found.peak_bytes - 1), found)


@functools.cache
def captured() -> StepGraph:
    return gpt2_steps.captured(gpt2_steps.gpt2(layers=3, width=64, length=64, vocabulary=96), 64)


def predicted(strategy: str) -> tuple[int, RematReport | None]:
    step = captured()
    local, reports = run_passes(step.copy(), build_pipeline(step, Strategy.parse(strategy), batch_dims=default_batch_dims(step)))
    return predict_memory(local).peak_bytes, next((report.details for report in reports if isinstance(report.details, RematReport)), None)


@pytest.mark.matrix
def test_variants_keep_less_and_less():
    peaks = [predicted(f"remat=*:{keep}")[0] for keep in ("all", "cheap", "inputs")]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[0] == predicted("")[0] and peaks[2] == predicted("remat=blocks")[0]
    first_fits = predicted("remat=transformer.h.0:all;*.h.[01]:inputs")[1]
    assert 0 < first_fits.num_calls < predicted("remat=*.h.[01]:inputs")[1].num_calls


@pytest.mark.parametrize("axis", with_matrix(["", "fsdp=2,"], [""]))
def test_budgets_are_met_and_the_more_there_is_the_less_is_computed_again(axis):
    most, least = predicted(axis.strip(","))[0], predicted(f"{axis}remat=blocks")[0]
    peaks, costs = [], []
    for share in (0.0, 0.3, 1.0) if axis else (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        budget = least + share * (most - least)
        peak, report = predicted(f"{axis}remat=auto,memory_gb={budget / 1e9!r}")
        assert peak == report.choice.predicted_bytes <= budget + 1
        assert report.choice.least_bytes <= least
        peaks.append(peak)
        costs.append(report.choice.solution.cost)
    assert peaks == sorted(peaks) and costs == sorted(costs, reverse=True)
    assert costs[-1] == 0 and peaks[-1] == most
    assert len(set(costs)) == len(costs)


def test_a_budget_that_nothing_meets_names_the_least():
    """It is no more than everything computed again needs, and a budget that is met."""
    all_again = predicted("remat=blocks")[0]
    with pytest.raises(StrategyError, match="the least that this step needs on a device is") as refusal:
        predicted(f"remat=auto,memory_gb={0.9 * all_again / 1e9}")
    named = float(re.search(r"on a device is ([\d.]+) GB", str(refusal.value))[1])
    assert 0.9 * all_again < named * 1e9 <= all_again * 1.0005
    peak, report = predicted(f"remat=auto,memory_gb={named * 1.0005}")  # it is rounded
    assert peak == report.choice.predicted_bytes <= named * 1.0005e9


def test_the_same_bits_come_out():
    case, inputs, _ = shared_case("gpt2")
    step, dims = case.step, default_batch_dims(case.step)
    plain = run_passes(step.copy(), build_pipeline(step, Strategy(), batch_dims=dims))[0]
    budget = predict_memory(plain).peak_bytes * 0.8 / 1e9
    again, reports = run_passes(step.copy(), build_pipeline(step, Strategy(remat="auto", memory_gb=budget), batch_dims=dims))
    assert all(torch.equal(x, y) for x, y in zip(run_global(plain, inputs), run_global(again, inputs), strict=True))
    (report,) = [report for report in reports if report.name == "rematerialise"]
    assert report.rewrites > 0 and "GB predicted for memory_gb=" in str(report)


def test_strategy():
    text = "fsdp=2,remat=*.h.0:inputs;*:products"
    assert str(Strategy.parse(text)) == text
    assert Strategy.from_json(Strategy.parse(text).to_json()) == Strategy.parse(text) == Strategy(fsdp=2, remat={"*.h.0": "inputs", "*": "products"})
    for wrong, message in (
        (dict(remat="auto"), "set memory_gb to the memory of a device"),
        (dict(memory_gb=2.0), "is what remat='auto' chooses by"),
        (dict(remat="auto", memory_gb=0), "above 0"),
        (dict(remat="auto", memory_gb=1, pp=2), "predicts one program"),
        (dict(remat={"*": "some"}), "one of all, cheap, products, inputs"),
    ):
        with pytest.raises(StrategyError, match=message):
            Strategy(**wrong)
