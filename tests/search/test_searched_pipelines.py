"""Pipelines in the search: chunks of a profile are those of the whole model, a schedule's time and memory are what playing it gives, and the choice trains."""

import copy
import functools
import itertools
import math

import pytest
import torch
from gpt2_steps import gpt2
from training import assert_parity, compiled, train
from zoo_steps import build

import graphacc
from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.passes.stages.assign import forward_chunks
from graphacc.passes.stages.units import block_of
from graphacc.search import Request, Search
from graphacc.search.pipeline import ChunkCost, Depth, chunks_of_profile, estimate_of
from graphacc.search.space import Limits, Refusals, candidates
from graphacc.strategy import Strategy
from graphacc.strategy.schedules import Part

GPUS = Hardware.parse("8xH100")
LAYERS = 8


@functools.cache
def search() -> Search:
    """One of four microbatches."""
    ids = torch.zeros(8, 128, dtype=torch.long)
    case = build(gpt2(layers=LAYERS, width=256, length=128, vocabulary=2048), {"input_ids": ids, "labels": ids})
    return Search(case.joint, case.update, Hardware.parse("cpu:8"), microbatches=4)


@functools.cache
def depth() -> Depth:
    return Depth(search().reduced)


@pytest.mark.parametrize("num_chunks", [2, 3, 8])
def test_layers_lie_where_the_passes_put_them(num_chunks):
    chunks = forward_chunks(search().joint, Strategy(pp=num_chunks, microbatches=num_chunks), {})
    real: dict[int, set[str]] = {}
    for node, chunk in chunks.items():
        if "h." in block_of(node):
            real.setdefault(chunk, set()).add(block_of(node))
    blocks = [len({path for path in found}) for _, found in sorted(real.items())]
    edges = depth().edges(num_chunks, num_chunks)
    dealt = [depth()._order[first:last] for first, last in itertools.pairwise(edges)]
    own = {i for i, unit in enumerate(depth()._units) if "h." in unit.block}
    per_layer = sum(i in own for i in depth()._order) / LAYERS
    found = [math.ceil(sum(i in own for i in units) / per_layer) for units in dealt]
    assert len(found) == num_chunks and all(abs(mine - theirs) <= 1 for mine, theirs in zip(found, blocks, strict=True))


@pytest.mark.parametrize("num_chunks", [2, 5])
def test_chunks_are_parts_of_the_whole(num_chunks):
    strategy = Strategy(dp=4, tp=2, microbatches=4)
    profile = search().profile_of(strategy)
    parts = depth().parts(profile, num_chunks, num_chunks)
    for phase, seconds in profile.cost.seconds.items():
        assert sum(part.cost.seconds[phase] for part in parts) == pytest.approx(seconds)
    for i, item in enumerate(profile.cost.moved):
        assert sum(part.cost.moved[i].number for part in parts) == pytest.approx(item.number)
        assert sum(part.cost.moved[i].size_bytes for part in parts) == pytest.approx(item.size_bytes)
    held = sum(item.size_bytes * item.count for item in profile.cost.held)
    assert sum(part.cost.saved_bytes for part in parts) == pytest.approx(held, abs=num_chunks)
    once = {weight.name: weight.count for weight in profile.cost.weights}
    for name, count in once.items():
        number = sum(weight.count for part in parts for weight in part.cost.weights if weight.name == name)
        assert number == count + (name == "transformer.wte.weight"), "the tied embedding has a replica where the head is"


PIPELINES = ["pp=2,dp=4", "pp=4,dp=2", "pp=2,fsdp=4", "pp=2,tp=2,fsdp=2", "pp=4,fsdp=2,zero=1,schedule=zb-h1", "pp=2,dp=4,schedule=interleaved,chunks=2"]


@pytest.mark.parametrize("text", PIPELINES)
@pytest.mark.default_cases("pp=2,fsdp=4", "pp=2,tp=2,fsdp=2")
def test_estimates_are_those_of_the_programs(text):
    """Arithmetic against the cut programs, whose values cannot be fused across their edges."""
    strategy = Strategy.parse(text).replace(microbatches=4)
    composed, exact = search().estimate(strategy), search().evaluate(strategy)
    assert composed.seconds == pytest.approx(exact.seconds, rel=0.06)
    assert composed.bytes_per_device == pytest.approx(exact.bytes_per_device, rel=0.05)
    assert composed.temporary_bytes == pytest.approx(exact.temporary_bytes, rel=0.06)
    assert (composed.parameter_bytes, composed.other_bytes) == pytest.approx((exact.parameter_bytes, exact.other_bytes), rel=0.002)
    assert composed.state_bytes == pytest.approx(exact.state_bytes, rel=0.001)


def chunk(forward: float, backward: float, weights: float = 0.0, **fields) -> ChunkCost:
    zeros = dict.fromkeys(("parameter_bytes", "state_bytes", "gradient_bytes", "other_bytes", "host_bytes", "held_bytes", "held_for_weights_bytes", "handed_on_bytes", "working_bytes"), 0)
    seconds = {Part.FORWARD: forward, Part.BACKWARD: backward, Part.WEIGHTS: weights}
    return ChunkCost(**{**zeros, "seconds": seconds, "exposed": {}, "hidden": 0.0, "update_seconds": 0.0, "update_exposed": {}, "sent_bytes": 0.0, **fields})


@pytest.mark.parametrize("plays", [False, True])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 4)])
def test_bubbles_of_equal_stages(stages, count, plays):
    """(p - 1)(F + B) of 1F1B, the same over v for interleaved chunks, and (p - 1)(F + B - W) of ZB-H1 (figure 3 of arXiv 2401.10241)."""
    of = functools.partial(estimate_of, hardware=GPUS, plays=plays)
    plain = of([chunk(1.0, 2.0)] * stages, Strategy(pp=stages, microbatches=count))
    assert plain.compute_seconds == pytest.approx(3 * count) and plain.bubble_seconds == pytest.approx(3 * (stages - 1))
    parts = of([chunk(0.5, 1.0)] * 2 * stages, Strategy(pp=stages, microbatches=count, schedule="interleaved", chunks=2))
    assert parts.compute_seconds == pytest.approx(3 * count) and parts.bubble_seconds == pytest.approx(1.5 * (stages - 1))
    zero = of([chunk(1.0, 1.0, 1.0)] * stages, Strategy(pp=stages, microbatches=count, schedule="zb-h1"))
    assert zero.compute_seconds == pytest.approx(3 * count) and zero.bubble_seconds == pytest.approx(stages - 1)


def test_the_dearest_stage_decides():
    found = estimate_of([chunk(1.0, 2.0), chunk(1.0, 2.0), chunk(2.0, 4.0)], Strategy(pp=3, microbatches=6), GPUS, plays=True)
    assert found.compute_seconds == 36.0 and 0 < found.bubble_seconds <= 6.0
    cores = estimate_of([chunk(1.0, 2.0), chunk(1.0, 2.0), chunk(2.0, 4.0)], Strategy(pp=3, microbatches=6), Hardware.parse("cpu:3"), plays=True)
    assert cores.seconds == pytest.approx(24.0), "stages that wait leave their cores to the others"


@pytest.mark.parametrize(("schedule", "live"), [("gpipe", 8), ("1f1b", 4), ("zb-h1", 4)])
def test_memory_of_microbatches_in_flight(schedule, live):
    """All of them, or as many as there are stages (table 1 of arXiv 2401.10241)."""
    found = estimate_of([chunk(1.0, 2.0, held_bytes=100, working_bytes=7)] * 4, Strategy(pp=4, microbatches=8, schedule=schedule), GPUS, plays=False)
    assert found.temporary_bytes == 100 * live + 7


def test_pipelines_are_chosen_where_there_are_microbatches():
    refusals = Refusals()
    none = list(candidates(Request.parse("auto", 8), Limits(batch_size=64), refusals))
    given = list(candidates(Request.parse("auto,microbatches=4", 8), Limits(batch_size=64), refusals))
    free = list(candidates(Request.parse("auto,microbatches=auto", 8), Limits(batch_size=64), refusals))
    assert {strategy.pp for strategy in none} == {1} and {strategy.microbatches for strategy in none} == {1}
    assert {strategy.pp for strategy in given} == {1, 2, 4} and {strategy.microbatches for strategy in given} == {4}
    assert any("pp=8 needs at least as many microbatches" in reason for reason in refusals.counts)
    assert {strategy.pp for strategy in free} == {1, 2, 4, 8} and {strategy.microbatches for strategy in free} == {1, 2, 4, 8, 16, 32, 64}
    assert all(64 % (strategy.data_ranks * strategy.microbatches) == 0 and strategy.microbatches >= strategy.pp for strategy in free)
    assert {strategy.schedule for strategy in given if strategy.pp > 1} == {"1f1b", "zb-h1", "interleaved"}
    pinned = list(candidates(Request.parse("auto,microbatches=8,schedule=gpipe", 8), Limits(batch_size=64), Refusals()))
    assert {strategy.schedule for strategy in pinned} == {"gpipe"} and all(strategy.pp > 1 for strategy in pinned)
    assert Request.parse("auto,tp=2,microbatches=auto", 8).text == "auto,tp=2,microbatches=auto"


def test_too_few_blocks():
    with pytest.raises(StrategyError, match="a pipeline of 64 chunks needs as many blocks between narrow cuts"):
        depth().parts(search().profile_of(Strategy(dp=8, microbatches=4)), 64, 64)


def test_more_microbatches_need_less_memory():
    chunks = functools.partial(chunks_of_profile, depth=depth(), hardware=GPUS, batch_share=1.0)
    profiles = Search(search().joint, search().update, GPUS, microbatches=4)
    one, other = (Strategy(pp=4, dp=2, microbatches=count) for count in (4, 16))
    few, many = (estimate_of(chunks(profiles.profile_of(strategy), strategy=strategy), strategy, GPUS, plays=False) for strategy in (one, other))
    assert many.temporary_bytes < 0.5 * few.temporary_bytes and many.bubble_seconds < few.bubble_seconds


def test_chunks_wait_for_late_ranks_where_they_send():
    """Every strategy with a pipeline of devices that share cores, and chunks among them that send nothing of what others do. Sums of gradients that the update takes are in no chunk."""
    devices = Hardware.parse("cpu:8").replace(shared_cores=2)
    usual, late = (Search(search().joint, search().update, devices.replace(lateness=lateness), microbatches=4) for lateness in (0.0, 0.2))
    strategies = [strategy for strategy in candidates(Request.parse("auto,microbatches=4,remat=none", 8), late.limits(), Refusals()) if strategy.pp > 1]
    assert {strategy.cp for strategy in strategies} > {1, 2} and any(strategy.chunks > 1 for strategy in strategies)
    for strategy in strategies:
        found, without = late.estimate(strategy), usual.estimate(strategy)
        assert found.compute_seconds == pytest.approx(without.compute_seconds) and all(math.isfinite(seconds) for seconds in found.exposed_seconds.values())
        waits = [axis for axis in found.exposed_seconds if found.exposed_seconds[axis] > without.exposed_seconds.get(axis, 0.0)]
        assert set(waits) == {axis for axis in found.exposed_seconds if axis not in ("pp", *strategy.late_axes) and getattr(strategy, axis) > 2}, strategy


@pytest.mark.parametrize("request_text", ["auto,microbatches=4,pp=2", "auto,microbatches=4"])
@pytest.mark.default_cases("auto,microbatches=4")
def test_the_choice_trains(request_text):
    """Also where the programs of a pipeline take the place of others."""
    reference = gpt2(layers=4, width=64, length=32, vocabulary=64)
    model = compiled(copy.deepcopy(reference), request_text, devices=8)
    ids = [torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    batches = [{"input_ids": x, "labels": x} for x in ids]
    expected, losses = train(reference, batches), train(model, batches)
    assert_parity(reference, model, expected, losses)
    assert model.strategy.pp > 1 and model.plan.strategy == model.strategy.plain


def test_a_loop_is_told_its_microbatches():
    with pytest.raises(StrategyError, match="leave microbatches=auto out, .*graphacc.plan"):
        graphacc.compile(torch.nn.Linear(2, 2), strategy="auto,microbatches=auto", devices=8)
