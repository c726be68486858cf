"""The search: estimates are what the real passes give, the choice is the fastest that fits, and what is said about it is true."""

import contextlib
import dataclasses
import functools
import math
import re
import types

import pytest
import torch
from gpt2_steps import gpt2
from torch import nn
from zoo_steps import build, shared_case

from graphacc.costs.hardware import Hardware
from graphacc.costs.work import kernels
from graphacc.errors import StrategyError
from graphacc.graph import Phase
from graphacc.passes.partition.plan import Role
from graphacc.search import Plan, Request, Search
from graphacc.search.cost import cost_of
from graphacc.search.estimate import SLOWED, WAITING, Timed, timed
from graphacc.search.model import search_of
from graphacc.search.space import REMATS, Refusals, candidates
from graphacc.strategy import Strategy

CPU = Hardware.parse("cpu:8")


@functools.cache
def search(name: str) -> Search:
    case, _, _ = shared_case(name)
    return Search(case.joint, case.update, CPU)


@functools.cache
def plan(name: str, request: str = "auto") -> Plan:
    return search(name).run(Request.parse(request, 8))


def strategies_of(search: Search, request: Request) -> list[Strategy]:
    """The candidates that the passes do not refuse."""
    found = []
    for strategy in candidates(request, search.limits(), Refusals()):
        with contextlib.suppress(StrategyError):
            search.estimate(strategy)
            found.append(strategy)
    return found


STRATEGIES = ["dp=8", "fsdp=8", "fsdp=8,zero=1", "dp=2,fsdp=4", "dp=4,tp=2", "fsdp=4,tp=2,sequence_parallel=True", "dp=4,cp=2", "fsdp=4,cp=2", "fsdp=2,cp=4", "dp=2,cp=4,zero=1", "fsdp=2,tp=2,cp=2,context=ring"]


@functools.cache
def large() -> Search:
    """GPT-2 of a size at which messages are no mere latency."""
    ids = torch.zeros(16, 128, dtype=torch.long)
    case = build(gpt2(layers=2, width=256, length=128, vocabulary=2048), {"input_ids": ids, "labels": ids})
    return Search(case.joint, case.update, CPU)


@functools.cache
def deep() -> Search:
    """GPT-2 with layers enough that what they keep decides the peak."""
    ids = torch.zeros(16, 128, dtype=torch.long)
    case = build(gpt2(layers=6, width=128, length=128, vocabulary=512), {"input_ids": ids, "labels": ids})
    return Search(case.joint, case.update, CPU)


@pytest.mark.parametrize("strategy", ["fsdp=8,remat=blocks", "dp=4,tp=2,remat=*:products", "fsdp=8,remat=*:cheap"])
@pytest.mark.matrix
def test_estimates_know_what_is_computed_again(strategy):
    composed, exact = (evaluate(Strategy.parse(strategy)) for evaluate in (deep().estimate, deep().evaluate))
    without = deep().estimate(Strategy.parse(strategy).replace(remat="none"))
    assert composed.seconds == pytest.approx(exact.seconds, rel=0.02) and composed.seconds > 1.02 * without.seconds
    assert composed.temporary_bytes == pytest.approx(exact.temporary_bytes, rel=0.1) and composed.temporary_bytes < 0.9 * without.temporary_bytes


@pytest.mark.parametrize("strategy", ["dp=4,tp=2", "dp=4,tp=2,sequence_parallel=True"])
@pytest.mark.default_cases("dp=4,tp=2,sequence_parallel=True")
def test_what_is_exchanged_around_the_layers_counts_once(strategy):
    """The head gathers what the last layer gives, which stands for all layers that were left out."""
    composed, exact = (evaluate(Strategy.parse(strategy)) for evaluate in (deep().estimate, deep().evaluate))
    assert composed.exposed_seconds["tp"] == pytest.approx(exact.exposed_seconds["tp"], rel=0.01)
    assert composed.compute_seconds == pytest.approx(exact.compute_seconds, rel=0.02)


@pytest.mark.matrix
def test_sums_of_gradients_over_cp_count_for_every_layer():
    """Under bf16 they stand behind casts outside of all modules."""
    ids = torch.zeros(4, 32, dtype=torch.long)
    case = build(gpt2(layers=6, width=128, length=32, vocabulary=64), {"input_ids": ids, "labels": ids}, precision="bf16")
    found, strategy = Search(case.joint, case.update, CPU), Strategy.parse("dp=4,cp=2,precision=bf16")
    composed, exact = (evaluate(strategy).exposed_seconds["cp"] for evaluate in (found.estimate, found.evaluate))
    assert composed == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.default_cases("dp=4,tp=2")
def test_estimates_are_those_of_the_real_passes(strategy):
    """Composed by arithmetic against read from the whole program."""
    composed, exact = (evaluate(Strategy.parse(strategy)) for evaluate in (large().estimate, large().evaluate))
    assert composed.seconds == pytest.approx(exact.seconds, rel=0.02)
    for name in ("parameter_bytes", "state_bytes", "other_bytes"):
        assert getattr(composed, name) == pytest.approx(getattr(exact, name), rel=0.001)
    assert composed.temporary_bytes == pytest.approx(exact.temporary_bytes, rel=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.default_cases("llama-dp=8", "llama-fsdp=8", "llama-fsdp=8,zero=1", "llama-dp=2,fsdp=4", "llama-dp=4,tp=2", "llama-fsdp=4,tp=2,sequence_parallel=True", "llama-dp=4,cp=2")
def test_parts_of_estimates_of_other_models(name, strategy):
    """Of models so small that a message more or less is a tenth of a step: what is exact, is exact."""
    chosen = Strategy.parse(strategy)
    composed, exact = (evaluate(chosen) for evaluate in (search(name).estimate, search(name).evaluate))
    assert composed.parameter_bytes == exact.parameter_bytes and composed.other_bytes == pytest.approx(exact.other_bytes, abs=64)
    assert composed.state_bytes == pytest.approx(exact.state_bytes, rel=0.01) and composed.update_seconds == exact.update_seconds
    messages = 2.5e-4 if chosen.cp > 1 and chosen.zero_stage else 0.0  # ZeRO over cp: one gather more in each phase
    for axis in ("tp", "cp"):
        assert composed.exposed_seconds.get(axis, 0.0) == pytest.approx(exact.exposed_seconds.get(axis, 0.0), rel=0.01, abs=messages)
    assert composed.temporary_bytes == pytest.approx(exact.temporary_bytes, rel=0.25)


@pytest.mark.parametrize("strategy", ["dp=4,ep=2", "fsdp=4,ep=2", "fsdp=4,ep=2,zero=1", "dp=2,ep=4,zero=3", "ep=4,tp=2,zero=1", "fsdp=2,ep=2,cp=2", "fsdp=2,ep=2,cp=2,zero=1"])
@pytest.mark.parametrize(("name", "hardware"), [("mixtral", "8xH100"), ("qwen3_moe", "8xH100"), ("mixtral", "cpu:8")])
@pytest.mark.default_cases("mixtral-8xH100-fsdp=2,ep=2,cp=2,zero=1", "qwen3_moe-8xH100-dp=2,ep=4,zero=3")
def test_estimates_of_mixtures(name, hardware, strategy):
    """What is no expert's is split over ep as well, and moves over it."""
    case, _, _ = shared_case(name)
    every = search(name) if hardware == "cpu:8" else Search(case.joint, case.update, Hardware.parse(hardware))
    composed, exact = (evaluate(Strategy.parse(strategy)) for evaluate in (every.estimate, every.evaluate))
    assert composed.parameter_bytes == exact.parameter_bytes and composed.state_bytes == pytest.approx(exact.state_bytes, rel=0.01)
    assert composed.update_seconds == exact.update_seconds
    messages = 4e-4 if hardware == "cpu:8" else 2e-5  # of models so small that these are all that there is: one more or less in each phase
    for axis in ("ep", "cp", "tp"):
        assert composed.exposed_seconds.get(axis, 0.0) == pytest.approx(exact.exposed_seconds.get(axis, 0.0), rel=0.01, abs=messages)


def test_messages_of_more_ranks_than_cores_wait_for_the_last():
    """A tenth of what is computed between two of them, for each rank beyond the cores; groups of as many as there are cores do not wait."""
    late = Search(large().joint, large().update, CPU.replace(shared_cores=2, lateness=0.1))
    without = Search(large().joint, large().update, CPU.replace(shared_cores=2))
    for text, axis, ranks in (("fsdp=8", "fsdp", 8), ("fsdp=4,tp=2", "fsdp", 4), ("dp=4,tp=2", "tp", 2)):
        strategy = Strategy.parse(text)
        found, usual = late.evaluate(strategy), without.evaluate(strategy)
        more = {name: found.exposed_seconds[name] - usual.exposed_seconds[name] for name in usual.exposed_seconds}
        assert found.compute_seconds == usual.compute_seconds
        if ranks == 2:
            assert more[axis] == 0.0
        elif len(more) == 1:  # every message is one of these
            assert more[axis] == pytest.approx(0.1 * (ranks - 2) * usual.compute_seconds)
        else:
            assert 0 < more[axis] < 0.1 * (ranks - 2) * usual.compute_seconds


@pytest.mark.matrix
def test_the_choice_is_the_fastest_that_fits():
    chosen = plan("gpt2")
    everything = [search("gpt2").estimate(strategy) for strategy in strategies_of(search("gpt2"), Request.parse("auto", 8))]
    assert chosen.estimate.seconds <= 1.1 * min(estimate.seconds for estimate in everything)
    refusals = Refusals()
    enumerated = len(list(candidates(Request.parse("auto", 8), search("gpt2").limits(), refusals))) + refusals.total
    assert chosen.num_evaluated + chosen.num_slower + sum(chosen.refusals.values()) == enumerated and chosen.num_over_memory == 0


@pytest.mark.parametrize(
    ("name", "hardware"),
    [("llama", "8xH100"), ("llama", "late"), ("gpt2", "late"), *((name, hardware) for name in ("gpt2", "llama", "qwen3_moe", "t5", "bert", "vit") for hardware in ("cpu:8", "2x4xH100"))],
)
@pytest.mark.matrix
def test_what_is_left_out_is_slower(name, hardware):
    """Bounds against estimates of every candidate, with all the memory and where few strategies fit; "late": ranks that share cores come late."""
    case, _, _ = shared_case(name)
    devices = CPU.replace(shared_cores=2, lateness=0.2) if hardware == "late" else Hardware.parse(hardware)
    every = search(name) if hardware == "cpu:8" else Search(case.joint, case.update, devices)
    request = dataclasses.replace(Request.parse("auto,remat=none", 8), exact_microbatches=hardware not in ("cpu:8", "late"))
    everything, _, none = every._ranked(request, Refusals(), math.inf)
    assert none == 0
    needs = sorted(every.needed(estimate) for _, estimate in everything)
    for memory in (needs[-1], needs[len(needs) // 2], needs[2]):
        bounded = search_with(every, memory)
        found, limit, num_slower = bounded._ranked(request, Refusals())
        left_out = [estimate.seconds for strategy, estimate in everything if strategy not in dict(found)]
        assert dict(found).items() <= dict(everything).items() and len(left_out) == len(everything) - len(found) <= num_slower
        assert all(seconds > limit for seconds in left_out) and limit < math.inf


@pytest.mark.matrix
def test_bounds_spare_most_profiles():
    bounded, request = Search(large().joint, large().update, CPU), Request.parse("auto", 8)
    bounded._ranked(request, Refusals())
    everything = {bounded.profile_key(strategy) for strategy in candidates(request, bounded.limits(), Refusals())}
    assert len(bounded._profiles) <= len(everything) / 2 and len(everything) == 22


def test_estimates_that_the_real_passes_do_not_confirm():
    """What was left out because of them is estimated after all."""

    class Surprised(Search):
        surprising: frozenset[Strategy] = frozenset()

        def evaluate(self, strategy):
            found = super().evaluate(strategy)
            return dataclasses.replace(found, compute_seconds=found.compute_seconds * (100 if strategy in self.surprising else 1))

    case, _, _ = shared_case("gpt2")
    surprised, request = Surprised(case.joint, case.update, CPU), Request.parse("auto", 8)
    surprised._profiles = search("gpt2")._profiles
    ranked, _, num_slower = surprised._ranked(request, Refusals())
    surprised.surprising = frozenset(dict(ranked))
    assert num_slower > 0 and surprised.run(request).num_slower == 0


def test_weights_that_are_split_along_another_dim_are_copied():
    """Three matrices in one parameter, as of experts: eight ranks do not divide the first dim, and their blocks of another one are interleaved when gathered."""

    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 256, 512))

        def forward(self, x):
            return types.SimpleNamespace(loss=(x @ self.weight.transpose(1, 2)).square().mean())

    case = build(Bank(), {"x": torch.randn(3, 64, 512)})
    found = Search(case.joint, case.update, CPU, batch_dims={"x": 1})
    for strategy in (Strategy(fsdp=8), Strategy(fsdp=8, zero=1), Strategy(dp=2, fsdp=4)):
        composed, exact = found.estimate(strategy), found.evaluate(strategy)
        assert composed.compute_seconds == pytest.approx(exact.compute_seconds, rel=0.02), strategy


@pytest.mark.matrix
def test_memory_is_a_hard_bound():
    """Halfway between the least that any strategy needs and what the free choice needs."""
    free = search("gpt2")
    request = Request.parse("auto", 8)
    needs = sorted(free.needed(free.estimate(strategy)) for strategy in strategies_of(free, request))
    limit = (needs[0] + free.needed(plan("gpt2").estimate)) // 2
    bound = search_with(free, limit)
    chosen = bound.run(request)
    assert bound.needed(chosen.estimate) <= limit < free.needed(plan("gpt2").estimate) and chosen.num_over_memory > 0
    assert any("needs" in rival.reason for rival in chosen.rivals)
    with pytest.raises(StrategyError, match=r"no strategy of 8 devices fits into .* per device. It would fit with\n  .* per device"):
        search_with(free, needs[0] // 2).run(request)


def search_with(other: Search, memory_bytes: int) -> Search:
    """The same search, with its profiles, under another limit."""
    found = Search(other.joint, other.update, other.hardware, memory_bytes=memory_bytes)
    found._profiles, found._exact, found._splits = other._profiles, other._exact, other._splits
    return found


@pytest.mark.matrix
def test_what_does_not_fit_is_computed_again():
    """The least rematerialisation that lets a strategy fit; less memory never takes less of it, nor less time."""
    free = deep()
    most, least = (free.needed(free.evaluate(Strategy.parse(text))) for text in ("fsdp=8", "fsdp=8,remat=blocks"))
    request = Request.parse("auto,fsdp=8", 8)
    found = [search_with(free, round(least + share * (most - least))).run(request) for share in (1.01, 0.9, 0.5, 0.02)]
    chosen = [plan.strategy.remat for plan in found]
    order = ["none", *REMATS]
    assert chosen[0] == "none" and chosen[1] != "none" and chosen[-1] == "blocks" and sorted(chosen, key=order.index) == chosen
    assert [plan.estimate.seconds for plan in found] == sorted(plan.estimate.seconds for plan in found)
    cheap = free.needed(free.estimate(Strategy.parse("fsdp=8,remat=*:cheap")))
    assert least < cheap < most
    with pytest.raises(StrategyError, match=r"with remat=none fits[\s\S]*  remat=\*:cheap in the place of remat=none"):
        search_with(free, (most + cheap) // 2).run(Request.parse("auto,fsdp=8,remat=none", 8))


def test_conflicting_pins_are_named_with_what_would_do():
    """Memory that ZeRO-3 alone meets: the pin to ZeRO-1 conflicts, the pin of tp does not."""
    free = search("gpt2")
    three, one = (min(free.needed(free.estimate(s)) for s in strategies_of(free, Request.parse(f"auto,tp=1,cp=1,{pin}", 8))) for pin in ("fsdp=8", "fsdp=1"))
    bound = search_with(free, (three + one) // 2)
    with pytest.raises(StrategyError, match=r"with fsdp=1 and cp=1 and tp=1 fits into[\s\S]*  fsdp=\d in the place of fsdp=1 .*\n  cp=\d in the place of cp=1 .*\n  tp=\d in the place of tp=1 "):
        bound.run(Request.parse("auto,fsdp=1,cp=1,tp=1", 8))


@pytest.mark.matrix
def test_what_a_pin_costs():
    pinned, free = large().run(Request.parse("auto,cp=4,precision=fp32", 8)), large().run(Request.parse("auto", 8))
    assert list(pinned.pin_costs) == ["cp=4"] and pinned.strategy.cp == 4
    assert pinned.pin_costs["cp=4"] == pytest.approx(pinned.estimate.seconds / free.estimate.seconds - 1, abs=0.05) and pinned.pin_costs["cp=4"] > 0


def test_the_plan_says_why():
    text = str(plan("gpt2"))
    for part in ("time:   compute", "memory: parameters", "evaluated", "optimal within the model of costs", "rival: "):
        assert part in text
    assert re.search(r"searched in .*finalists \d", text)  # profiles may be those of an earlier search
    assert plan("gpt2").line.startswith(f"strategy {plan('gpt2').strategy}: ") and "the best of" in plan("gpt2").line
    assert sum(plan("gpt2").refusals.values()) > 0 and plan("gpt2").tokens == 8 * 16


def test_what_a_pass_refuses_is_said():
    """Of the whole graph, where the profile's was taken: another strategy is chosen, and the plan says why."""
    free = search("gpt2")
    found = search_with(free, free.memory_bytes)
    found._exact = {plan("gpt2").strategy: "pass 'prefetch' broke the graph"}
    other = found.run(Request.parse("auto", 8))
    assert other.strategy != plan("gpt2").strategy and f"note: {plan('gpt2').strategy} was left out, as the passes refuse it: pass 'prefetch' broke the graph" in str(other)


@pytest.mark.matrix
def test_plans_do_not_flip():
    case, _, _ = shared_case("gpt2")
    again = Search(case.joint, case.update, CPU).run(Request.parse("auto", 8))
    assert again.strategy == plan("gpt2").strategy and again.estimate == plan("gpt2").estimate and again.digest == plan("gpt2").digest
    assert [rival.strategy for rival in again.rivals] == [rival.strategy for rival in plan("gpt2").rivals]


@pytest.mark.matrix
def test_experts_are_searched():
    chosen, strategies = plan("qwen3_moe"), list(strategies_of(search("qwen3_moe"), Request.parse("auto", 8)))
    assert any(strategy.ep > 1 for strategy in strategies) and chosen.strategy.num_devices == 8


def test_experts_compute_the_rows_that_there_are():
    """Over ep every rank has room for the rows of all, and as many rows as before where experts get equally many."""
    programs = {text: search("qwen3_moe").program_of(Strategy.parse(text)) for text in ("dp=8", "dp=2,ep=4", "dp=4,ep=2,capacity_factor=2.0")}
    flops = {text: sum(work.flops for node, work in kernels(step).items() if "grouped_mm" in str(node.target)) for text, step in programs.items()}
    assert flops["dp=8"] > 0 and all(found == pytest.approx(flops["dp=8"], rel=1e-6) for found in flops.values())


def test_without_an_optimizer_its_state_is_assumed():
    case, _, _ = shared_case("gpt2")
    accumulating = Search(case.joint, None, CPU, accumulates=True)
    found, known = accumulating.evaluate(Strategy(dp=8)), search("gpt2").evaluate(Strategy(dp=8))
    trained = sum(item.dtype.itemsize * torch.Size(item.shape).numel() for item in case.joint.inputs if item.trainable)
    assert found.state_bytes == pytest.approx(known.state_bytes, rel=0.02) and found.other_bytes == pytest.approx(known.other_bytes + trained, abs=64)
    assert "AdamW's state is assumed" in str(accumulating.plan_of(Strategy(dp=8)))


@pytest.mark.matrix
def test_microbatches_repeat_all_but_the_update():
    case, _, _ = shared_case("gpt2")
    accumulating = Search(case.joint, case.update, CPU, microbatches=4)
    one = Search(case.joint, case.update, CPU, accumulates=True).evaluate(Strategy(fsdp=8))
    four = accumulating.evaluate(Strategy(fsdp=8, microbatches=4))
    assert four.compute_seconds == pytest.approx(4 * one.compute_seconds) and four.update_seconds == one.update_seconds
    batch_and_results = accumulating.profile_of(Strategy(fsdp=8, microbatches=4)).cost
    more = 3 * (batch_and_results.batch_bytes + batch_and_results.returned_bytes)  # every microbatch has its own
    assert four.exposed_seconds["fsdp"] == pytest.approx(4 * one.exposed_seconds["fsdp"]) and four.bytes_per_device == one.bytes_per_device + more
    chosen = accumulating.run(Request.parse("auto,microbatches=4,pp=1", 8))
    assert chosen.strategy.microbatches == 4 and list(chosen.pin_costs) == ["pp=1"]


def test_microbatches_are_a_way_out_of_too_little_memory():
    """Halfway between what the least strategy needs of the whole batch, and of parts of it."""
    whole = deep()
    one, four = (whole.needed(whole.estimate(Strategy(fsdp=8, remat="none", microbatches=count))) for count in (1, 2))
    with pytest.raises(StrategyError, match=r"with remat=none fits[\s\S]*\n  microbatches=2 \(fsdp=8,microbatches=2\)$"):
        search_with(whole, (one + four) // 2).run(Request.parse("auto,fsdp=8,remat=none", 8))
    apart = search_with(whole, (one + four) // 2)
    apart.microbatches_apart = "a reason"
    with pytest.raises(StrategyError, match=r"microbatches=2 \(fsdp=8,microbatches=2\), whose loss is the mean of theirs: a reason$"):
        apart.run(Request.parse("auto,fsdp=8,remat=none", 8))


@pytest.mark.matrix
def test_microbatches_are_chosen_where_they_give_what_the_batch_gives():
    """Halfway between what the least strategies need with the whole batch at once, and with parts of it; on CPU devices, which share their memory, they are not."""
    free, request = Search(deep().joint, deep().update, Hardware.parse("8xH100")), Request.parse("auto,fsdp=8,remat=none,offload=none", 8)
    one, two = (free.needed(free.evaluate(Strategy(fsdp=8, remat="none", microbatches=count))) for count in (1, 2))
    tight = search_with(free, (one + two) // 2)
    chosen = tight.run(request)
    assert (chosen.strategy.fsdp, chosen.strategy.microbatches) == (8, 2) and chosen.request == request.text and not free.microbatches_apart
    assert free.run(request).strategy.microbatches == 1
    with pytest.raises(StrategyError, match="fits into"):
        tight.run(Request.parse(f"{request.text},microbatches=1", 8))
    with pytest.raises(StrategyError, match="fits into"):
        search_with(deep(), deep().needed(deep().evaluate(Strategy(fsdp=8, remat="none"))) - 1).run(request)
    everything = free._ranked(dataclasses.replace(Request.parse("auto", 8), exact_microbatches=True), Refusals(), math.inf)[0]
    assert {strategy.pp for strategy, _ in everything} == {1, 2, 4, 8} and free.run(Request.parse("auto", 8)).estimate.seconds <= 1.1 * everything[0][1].seconds


def test_a_pipeline_that_is_asked_for_gets_microbatches_where_they_give_what_the_batch_gives():
    assert search("gpt2").run(Request.parse("auto,pp=2", 8)).strategy.microbatches > 1
    with pytest.raises(StrategyError, match="auto with pp=2: .*each would stand for itself.*modeling_resnet.py.*add microbatches=8, or microbatches=auto"):
        search("resnet").run(Request.parse("auto,pp=2", 8))


@pytest.mark.parametrize("strategy", ["dp=8", "fsdp=8", "fsdp=8,zero=1"])
def test_offload_moves_the_state_to_the_host(strategy):
    """Devices keep parameters and gradients; the host has the state and exact parameters in their place."""
    here, there = Strategy.parse(strategy), Strategy.parse(f"{strategy},offload=optimizer")
    composed, exact, before = large().estimate(there), large().evaluate(there), large().evaluate(here)
    assert exact.state_bytes == composed.state_bytes == 0 and exact.parameter_bytes == composed.parameter_bytes == before.parameter_bytes
    trained = sum(item.dtype.itemsize * torch.Size(item.shape).numel() for item in large().joint.inputs if item.trainable)
    assert exact.host_bytes == composed.host_bytes == pytest.approx(3 * trained / here.fsdp, rel=0.01), "moments and exact parameters"
    plan = large().plan_of(there)
    assert "on the host, for each device" in str(plan) and Plan.from_json(plan.to_json()).estimate == plan.estimate


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_seconds_of_an_update_on_the_host(precision):
    """The slowest of what comes, the update and what goes, beside the next step where updates are delayed; not known of TPUs."""
    trained = sum(torch.Size(item.shape).numel() for item in large().joint.inputs if item.trainable)
    strategy = Strategy.parse(f"fsdp=8,precision={precision},offload=optimizer")
    for link, stream, expected in [(1e6, 1e12, 4 * trained / 8 / 1e6), (1e12, 1e6, 28 * trained / 8 / 1e6)]:
        hardware = Hardware.parse("8xH100").replace(host_link=link, host_stream=stream)
        found = Search(large().joint, large().update, hardware)
        assert found.evaluate(strategy).update_seconds == found.estimate(strategy).update_seconds == pytest.approx(expected, rel=0.01)
        delayed = found.estimate(strategy.replace(delay=1))
        assert 0 < found.estimate(strategy).update_seconds - delayed.update_seconds == pytest.approx(delayed.compute_seconds, rel=0.1)
    tpu = Search(large().joint, large().update, Hardware.parse("8xTPUv5e")).plan_of(strategy)
    assert tpu.estimate.update_seconds == 0 and "what the update on the host takes is not known of TPUv5e" in str(tpu)
    cpu = large()
    assert cpu.estimate(strategy).update_seconds > cpu.estimate(strategy.replace(offload=None)).update_seconds > 0, "on the same cores, and sent there and back"


def gpus(memory_bytes: int, other: Search | None = None, **options) -> Search:
    """`large` on eight GPUs with so much memory."""
    found = Search(large().joint, large().update, Hardware.parse("8xH100"), memory_bytes=memory_bytes, **options)
    if other is not None:
        found._profiles, found._exact, found._splits = other._profiles, other._exact, other._splits
    return found


@pytest.mark.matrix
def test_the_host_has_the_state_where_nothing_else_fits():
    """Halfway between what the least strategies need with the optimizer's state on the devices, and on the host."""
    request = Request.parse("auto,dp=8,remat=none,microbatches=1", 8)
    free = gpus(2**40)
    (here,) = {free.needed(free.evaluate(strategy)) for strategy in strategies_of(free, request)}
    there = free.needed(free.evaluate(Strategy(dp=8, offload="optimizer")))
    assert there < 0.9 * here and free.run(request).strategy.offload is None
    limit = (here + there) // 2
    plan = gpus(limit, free).run(request)
    assert str(plan.strategy) == "dp=8,offload=optimizer" and plan.estimate.update_seconds > 0 and plan.num_over_memory == 0
    assert re.search(r"note: offload: none of 1 strategies with the optimizer's state on the devices fits, the least is .* of .* \(dp=8\)", str(plan))
    assert plan.pin_costs["dp=8"] > 0, "without this pin the state stays"
    assert plan.pin_costs["remat=none"] == 0, "the gradients are whole at the end of the backward, whatever is computed again"
    asked = gpus(limit, free).run(Request.parse("auto,dp=8,remat=none,microbatches=1,offload=optimizer", 8))
    assert asked.strategy == plan.strategy and not any("offload" in note for note in asked.notes)
    with pytest.raises(StrategyError, match=r"with [\s\S]*offload=none fits into[\s\S]*\n  offload=optimizer in the place of offload=none \(dp=8,offload=optimizer\)"):
        gpus(limit, free).run(Request.parse("auto,dp=8,remat=none,microbatches=1,offload=none", 8))
    with pytest.raises(StrategyError, match="fits into"):
        gpus(limit, free, offloads=False).run(request)
    with pytest.raises(StrategyError, match=r"It would fit with\n  .* per device \(dp=8,offload=optimizer\)"):
        gpus(there // 2, free).run(request)


def test_plans_know_whether_the_host_can_update():
    ids = torch.zeros(16, 128, dtype=torch.long)
    for optimizer, can in [(torch.optim.AdamW, True), (torch.optim.Adafactor, False)]:
        model = gpt2(layers=1, width=64, length=128, vocabulary=2048)
        assert search_of(model, {"input_ids": ids, "labels": ids}, optimizer, Hardware.parse("8xH100")).offloads == can


# ---- plans in files


def test_plans_are_kept_in_files(tmp_path):
    plan("gpt2").save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert (read.strategy, read.estimate, read.hardware, read.model, read.digest) == tuple(getattr(plan("gpt2"), name) for name in ("strategy", "estimate", "hardware", "model", "digest"))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 7}', '{"format": 1, "strategy": {"dpp": 2}}', '{"format": 1, "strategy": {"dp": 2}, "estimate": {}}'])
def test_what_is_no_plan_is_refused(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(StrategyError, match="plan.json is no plan .*write one with `graphacc plan --output`"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_is_for_one_model_and_hardware():
    chosen = plan("gpt2")
    chosen.check(chosen.model, 8, "cpu")
    name = next(iter(chosen.model))
    for model, devices, chip, message in [
        ({**chosen.model, name: "[1, 2] float32"}, 8, "cpu", rf"its parameter '{name}' is .* this model's \[1, 2\] float32"),
        ({**chosen.model, "new": "[1] float32"}, 8, "cpu", r"this model's parameter 'new' \[1\] float32 is not in it"),
        ({}, 8, "cpu", "is not in this model"),
        (chosen.model, 4, "cpu", "for 8 devices, and there are 4"),
        (chosen.model, 8, "H100", "for cpu, and this is H100"),
    ]:
        with pytest.raises(StrategyError, match=message):
            chosen.check(model, devices, chip)


def test_a_gpu_hides_communication():
    """The data axes' collectives run beside computation, those of tp do not."""
    case, _, _ = shared_case("gpt2")
    gpus = Search(case.joint, case.update, Hardware.parse("8xH100"))
    hidden = gpus.estimate(Strategy(fsdp=8))
    assert hidden.hidden_seconds > 0 and gpus.estimate(Strategy(tp=2, dp=4)).exposed_seconds["tp"] > 0
    slow = dataclasses.replace(gpus.hardware, levels=(dataclasses.replace(gpus.hardware.levels[0], bandwidth=1e6),))
    exposed = Search(case.joint, case.update, slow).estimate(Strategy(fsdp=8))
    assert exposed.exposed_seconds["fsdp"] > 100 * hidden.exposed_seconds.get("fsdp", 0.0) and exposed.hidden_seconds <= exposed.compute_seconds


def test_keys_that_go_around_a_ring_hide_behind_attention():
    """But behind nothing else; on virtual devices, which share cores, they do not. A pipeline's stages have their shares of both."""
    case, _, _ = shared_case("gpt2")
    gpus, strategy = Search(case.joint, case.update, Hardware.parse("8xH100")), Strategy(cp=4, dp=2, context="ring")
    cost = cost_of(gpus.program_of(strategy), gpus.hardware)
    keys = [item for item in cost.moved if item.role is Role.KEYS]
    assert {item.phase: item.number for item in keys} == {Phase.FORWARD: 2 * 3, Phase.BACKWARD: 2 * (3 + 3)}  # two layers; the last gradients' way home is waited for
    attention = {item.phase: sum(k.count * s for k, s in zip(cost.kernels, cost.kernel_seconds) if (k.phase, k.path.rpartition(".")[2]) == (item.phase, "attn")) for item in keys}
    assert {item.phase: item.beside_seconds for item in keys} == pytest.approx(attention) and min(attention.values()) > 0

    def exposed(bandwidth: float, hardware: Hardware = gpus.hardware) -> Timed:
        level = dataclasses.replace(hardware.levels[0], bandwidth=bandwidth, latency_seconds=0.0)
        return timed(cost.seconds, keys, strategy, dataclasses.replace(hardware, levels=(level,)), are_all=False)

    fast, slow = exposed(1e15), exposed(1e6)
    assert fast.exposed_by_axis() == {"cp": 0.0} and 0 < fast.hidden < sum(attention.values())
    assert slow.hidden == pytest.approx(sum(attention.values())) and slow.exposed_by_axis()["cp"] > slow.hidden
    assert sum(slow.compute.values()) == pytest.approx(cost.seconds[Phase.FORWARD] + cost.seconds[Phase.BACKWARD] + (SLOWED - 1) * slow.hidden)
    assert exposed(1e6, CPU).hidden == 0.0 < exposed(1e6, CPU).exposed_by_axis()["cp"]
    pipeline = Search(case.joint, case.update, Hardware.parse("8xH100"), microbatches=2)
    assert pipeline.plan_of(Strategy(pp=2, cp=4, context="ring", microbatches=2)).estimate.hidden_seconds > 0


def test_hosts_wait_for_the_slowest():
    """Every doubling of the hosts adds a share of the step, to plain programs and to pipelines; one host, and virtual devices, wait for nobody."""
    case, _, _ = shared_case("gpt2")
    parts = {}
    for hardware in ("8xH100", "4x8xH100", "cpu:8"):
        found = Search(case.joint, case.update, Hardware.parse(hardware), microbatches=4)
        for strategy in (f"dp={found.hardware.num_devices},microbatches=4", f"dp={found.hardware.num_devices // 2},pp=2,microbatches=4"):
            estimate = found.plan_of(Strategy.parse(strategy)).estimate
            rest = estimate.seconds - estimate.waiting_seconds
            assert estimate.waiting_seconds == pytest.approx(WAITING * math.log2(found.hardware.num_hosts) * rest)
            assert sum(estimate.parts().values()) == pytest.approx(estimate.seconds)
            parts[hardware] = estimate.parts()
    assert ["slowest host" in found for found in parts.values()] == [False, True, False]


def test_gathers_of_backward_stay_within_a_host_where_links_between_hosts_are_slow():
    """ZeRO++'s hpZ keeps the results' bits, so that the search may choose it."""
    fast = Hardware.parse("2x4xH100")
    host, network = fast.levels
    slow = fast.replace(levels=(host, dataclasses.replace(network, bandwidth=network.bandwidth / 100)))
    request = "auto,dp=1,tp=1,cp=1,zero=3,microbatches=1"
    for hardware, expected in ((slow, 4), (Hardware.parse("8xH100"), 1)):
        found = Search(large().joint, large().update, hardware)
        assert {strategy.hpz for strategy in candidates(Request.parse(request, 8), found.limits(), Refusals())} == {1, expected}
        plan = found.run(Request.parse(request, 8))
        assert plan.strategy == Strategy(fsdp=8, zero=3, hpz=expected)
    found = Search(large().joint, large().update, slow)
    for strategy in (Strategy(fsdp=8), Strategy(fsdp=8, hpz=4), Strategy(fsdp=4, tp=2, hpz=2)):
        composed, exact = found.estimate(strategy), found.evaluate(strategy)
        moved = [sum(each.exposed_seconds.values()) + each.hidden_seconds for each in (composed, exact)]
        assert moved[0] == pytest.approx(moved[1], rel=0.03) and composed.temporary_bytes == pytest.approx(exact.temporary_bytes, rel=0.12)


@pytest.mark.parametrize("strategy", ["dp=8", "fsdp=8", "fsdp=8,zero=1", "dp=2,fsdp=4", "fsdp=4,tp=2"])
def test_copies_of_parts_of_messages_share_kernels_on_gpus(strategy):
    """A kernel's launch for each of them made ZeRO-3's programs a tenth dearer than their estimates, and than XLA's have kernels."""
    case, _, _ = shared_case("gpt2")
    chip = Hardware.parse("8xH100").chip
    gpus = Hardware.parse("8xH100").replace(chip=dataclasses.replace(chip, fp32_flops=1e18, memory_bandwidth=1e18, launch_seconds=1e-3))  # launches are all there is
    found = Search(case.joint, case.update, gpus)
    composed, exact = (evaluate(Strategy.parse(strategy)).compute_seconds for evaluate in (found.estimate, found.evaluate))
    assert composed == pytest.approx(exact, rel=0.1)
