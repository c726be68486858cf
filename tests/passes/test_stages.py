"""Stages: a graph that is cut computes what the whole one does, wherever it is cut; automatic cuts are balanced and narrow."""

import itertools
import random

import pytest
import torch
import zoo
from graphs import trace
from selection import with_matrix
from simulate import run_global
from tolerances import assert_close
from torch import nn
from zoo_steps import build

from graphacc.errors import StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.ops.flash_attention import flash_attention
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.runner import run_passes
from graphacc.passes.stages import MARK, Place, Segment, cut, mark_pass, marked_places, owner_of, update_places
from graphacc.passes.stages.assign import dealt, forward_chunks
from graphacc.passes.stages.units import FLOPS_PER_BYTE, Unit, block_of, cuts, forward_part, work
from graphacc.passes.stages.values import free_values
from graphacc.strategy import Strategy


def run_segments(segments: list[Segment], values: dict) -> dict:
    """Run segments in order; the values that they make, by kind and target."""
    found = {}
    for segment in segments:
        step = segment.step
        inputs = [
            found[key] if (key := (item.kind, item.target))[0] is Kind.CROSS else _value(values, item) for item in step.inputs
        ]
        found |= {(item.kind, item.target): value for item, value in zip(step.outputs, run_global(step, inputs))}
    return found


def _value(values: dict, item) -> torch.Tensor:
    return values[item.kind, owner_of(item.target) if item.kind is Kind.PARAM else item.target]


def run_whole(step: StepGraph, values: dict) -> dict:
    results = run_global(step, [values[item.kind, item.target] for item in step.inputs])
    return {(item.kind, item.target): value for item, value in zip(step.outputs, results)}


def marked(step: StepGraph, strategy: Strategy) -> StepGraph:
    return run_passes(step, [DEAD_CODE, COMMON_SUBEXPRESSIONS, mark_pass(strategy, {})])[0]


def assert_same(found: dict, expected: dict) -> None:
    """Equal to the bit, but for gradients that are summed over stages."""
    replicas = {owner_of(target) for kind, target in found if kind is Kind.GRAD and MARK in target}
    for (kind, target), want in expected.items():
        got = found[kind, target]
        if kind is Kind.GRAD and target in replicas:
            got = got + sum(
                value for (k, t), value in found.items() if k is Kind.GRAD and t != target and owner_of(t) == target
            )
            assert_close(got, want, what=target)
        else:
            assert torch.equal(got, want), f"{kind.value} {target}"


CUTS = [
    ("gpt2", Strategy(pp=4)),
    ("qwen3_moe", Strategy(pp=2)),
    ("t5", Strategy(pp=4)),
    ("resnet", Strategy(pp=2)),
    ("tied_mlp", Strategy(pp=3)),
    ("gpt2", Strategy(pp=2, schedule="interleaved", chunks=2)),
]


@pytest.mark.parametrize(
    ("name", "strategy"),
    with_matrix(CUTS, [CUTS[0], CUTS[3], CUTS[4], CUTS[5]]),
    ids=lambda value: str(value),
)
@pytest.mark.default_cases("resnet-pp=2", "tied_mlp-pp=3", "gpt2-pp=2,schedule=interleaved,chunks=2")
def test_a_cut_step_computes_the_same(name, strategy):
    case = build(*zoo.MODELS[name]())
    expected = run_whole(case.joint, case.values)
    step = marked(case.joint, strategy)
    num_chunks = strategy.pp * strategy.chunks
    for split in (False, True):
        segments = cut(step, marked_places(step, strategy.pp, num_chunks, split), {})
        assert_same(run_segments(segments, case.values), expected)
        assert {s.place.index for s in segments if s.place.part == "F"} == set(range(num_chunks))
        weights = [item.kind for s in segments if s.place.part == "W" for item in s.step.outputs]
        assert set(weights) == ({Kind.GRAD} if split else set()), "what W gives is gradients of weights alone"


@pytest.mark.parametrize("seed", with_matrix(range(6), [0, 1]))
def test_any_order_of_places_computes_the_same(seed):
    """Random places, never before those of what a call reads."""
    generator = random.Random(seed)
    case = build(*zoo.MODELS["tied_mlp" if seed % 2 else "resnet"]())
    step, free = case.joint, free_values(case.joint)
    results, places = set(step.results), {}
    for node in step.graph.nodes:
        if node.op != "call_function" or (node in free and node not in results):
            continue
        first = max((places[operand].order for operand in node.all_input_nodes if operand in places), default=0)
        order = (
            places[node.args[0]].order if "getitem" in node.name else generator.choice([first, first, first, min(first + 1, 7)])
        )
        places[node] = Place(order, order % 2, "U", order)
    segments = cut(step, places, {})
    assert len(segments) > 2
    assert_same(run_segments(segments, case.values), run_whole(case.joint, case.values))


def test_an_update_with_clipping_sends_numbers_alone():
    case = build(*zoo.MODELS["gpt2"](), transform=_clipped)
    targets = {item.target for item in case.update.inputs if item.kind is Kind.PARAM}
    homes = {name: int(".h.1." in name or "ln_f" in name) for name in targets}
    segments = cut(case.update, update_places(case.update, homes), {})
    assert_same(run_segments(segments, case.values), run_whole(case.update, case.values))
    for segment in segments:
        for item in segment.step.outputs:
            if item.kind is Kind.CROSS:
                assert len(item.shape) == 1 and item.shape[0] <= 28, "a norm per parameter"
        owners = {
            item.target.partition("/")[0] for item in segment.step.inputs if item.kind in (Kind.PARAM, Kind.GRAD, Kind.STATE)
        }
        assert {homes[name if name in homes else name.rpartition("/")[0]] for name in owners} <= {segment.place.stage}


def _clipped(grads: dict, extras) -> dict:
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()]))
    return {name: grad * torch.clamp(1.0 / (total + 1e-6), max=1.0) for name, grad in grads.items()}


def test_an_update_without_clipping_is_one_program_per_stage():
    case = build(*zoo.MODELS["gpt2"]())
    targets = {item.target for item in case.update.inputs if item.kind is Kind.PARAM}
    segments = cut(case.update, update_places(case.update, {name: int(".h.1." in name) for name in targets}), {})
    assert [(s.place.stage, s.place.index) for s in segments] == [(0, 0), (1, 0)]
    assert not any(item.kind is Kind.CROSS for s in segments for item in s.step.outputs)


class Stack(nn.Module):
    """Equal layers, whose count and width are chosen."""

    def __init__(self, widths: list[int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return zoo.Output(x.pow(2).mean(), x)


def chunks_of(widths: list[int], strategy: Strategy, homes=None) -> list[set[str]]:
    """Per chunk, the layers in it."""
    case = build(Stack(widths), {"x": torch.randn(4, 8)})
    found = forward_chunks(case.joint, strategy, homes or {})
    order = [chunk for node in case.joint.graph.nodes for chunk in [found.get(node)] if chunk is not None]
    assert order == sorted(order)
    layers = [set() for _ in range(strategy.pp * strategy.chunks)]
    for node, chunk in found.items():
        layers[chunk] |= {block_of(node).removeprefix("layers.")} - {""}
    return layers


def test_equal_blocks_are_dealt_out_evenly():
    assert chunks_of([32] * 8, Strategy(pp=4)) == [{"0", "1"}, {"2", "3"}, {"4", "5"}, {"6", "7"}]
    assert chunks_of([32] * 4, Strategy(pp=2, schedule="interleaved", chunks=2)) == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_dear_blocks_get_a_stage_of_their_own():
    assert chunks_of([16, 16, 16, 256], Strategy(pp=2)) == [{"0", "1", "2"}, {"3"}]
    assert chunks_of([256, 16, 16, 16], Strategy(pp=2)) == [{"0"}, {"1", "2", "3"}]


def _units(costs: list[float], blocks: list[str], wide: frozenset[int] = frozenset()) -> list[Unit]:
    return [Unit(nodes=(), cost=cost, crossing_bytes=2.0 if i in wide else 1.0, block=block, parameters={}) for i, (cost, block) in enumerate(zip(costs, blocks))]


def _stages(units: list[Unit], edges: list[int], num_stages: int) -> list[float]:
    chunks = [sum(unit.cost for unit in units[first:last]) for first, last in itertools.pairwise(edges)]
    return [sum(chunks[stage::num_stages]) for stage in range(num_stages)]


@pytest.mark.parametrize("seed", range(8))
def test_stages_of_several_chunks_cost_alike(seed):
    """Near the best of all deals of a few units, which equal chunks are not: stage 0 has chunks 0 and 2."""
    draw = random.Random(seed)
    units = _units([draw.choice([1e6, 2e6, 3e6, 7e6]) for _ in range(10)], [""] * 10)
    edges = dealt(units, 4, 2)
    best = min(max(_stages(units, [0, *inner, 10], 2)) for inner in itertools.combinations(range(1, 10), 3))
    assert edges[0] == 0 and edges[-1] == 10 and all(first < last for first, last in itertools.pairwise(edges))
    assert best <= max(_stages(units, edges, 2)) <= 1.12 * best


def test_a_dear_head_breaks_blocks_where_nothing_else_crosses():
    """24 layers of a third and two thirds, and a head as dear as three, on 4 stages of 2 chunks: whole layers would leave one stage a ninth dearer."""
    costs, blocks = [1e6, 2e6] * 24 + [9e6], [f"h.{i // 2}" for i in range(48)] + [""]
    narrow, wide = _units(costs, blocks), _units(costs, blocks, frozenset(range(1, 48, 2)))
    mean = sum(costs) / 4
    assert max(_stages(narrow, dealt(narrow, 8, 4), 4)) <= 1.04 * mean
    assert not set(dealt(wide, 8, 4)[1:-1]) & set(range(1, 48, 2)), "cuts that send more lie inside of blocks"


def test_cuts_lie_where_the_residual_stream_alone_crosses():
    case = build(*zoo.MODELS["gpt2"]())
    forward = forward_part(case.joint)
    widths = {forward.crossing_bytes[place] for place in cuts(forward)}
    assert widths == {8 * zoo.SEQ * zoo.HIDDEN * 4}


def test_parameters_stay_where_they_are():
    homes = {f"layers.{i}.{j}.{kind}": 0 if i < 3 else 1 for i in range(4) for j in (0, 2) for kind in ("weight", "bias")}
    assert chunks_of([32] * 4, Strategy(pp=2), homes) == [{"0", "1", "2"}, {"3"}]


@pytest.mark.parametrize("widths", [[32] * 4, [32] * 6 + [80], [80] + [32] * 9], ids=["equal", "dear end", "dear beginning"])
def test_later_programs_lie_where_the_first_one_does(widths):
    """Also where stages have several chunks, which are dealt out by more than the dearest one."""
    strategy = Strategy(pp=2, schedule="interleaved", chunks=2)
    chunks = chunks_of(widths, strategy)
    homes = {f"layers.{layer}.{j}.{kind}": chunk % 2 for chunk, layers in enumerate(chunks) for layer in layers for j in (0, 2) for kind in ("weight", "bias")}
    assert chunks_of(widths, strategy, homes) == chunks


def test_pins():
    assert chunks_of([32] * 4, Strategy(pp=2, stages={"layers.0": 0, "layers.1": 1})) == [{"0"}, {"1", "2", "3"}]
    assert chunks_of([32] * 4, Strategy(pp=2, stages={"layers.2": 0})) == [{"0", "1", "2"}, {"3"}]
    inside = chunks_of([32] * 2, Strategy(pp=2, stages={"layers.1.0": 0, "layers.1.2": 1}))
    assert inside == [{"0", "1"}, {"1"}], "a pin may cut where no narrow place is"


def test_a_buffer_that_two_chunks_share_and_one_writes_is_refused():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("level", torch.zeros(8))

        def forward(self, x):
            x = self.first(x + self.level)
            x = self.second(x)
            self.level = self.level + x.detach().mean(0)
            return zoo.Output(x.pow(2).mean(), x)

    case = build(Shared(), {"x": torch.randn(4, 8)})
    step = marked(case.joint, Strategy(pp=2, stages={"first": 0, "second": 1}))
    with pytest.raises(StrategyError, match="buffer 'level' is read by chunk 0 of the pipeline and written by chunk 1"):
        cut(step, marked_places(step, 2, 2, False), {})


def test_attached_attention_counts_as_work():
    """Both products, [T, D] x [D, S] and [T, S] x [S, E], in every head."""
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 12)
    step = trace(
        lambda q, k, v: (flash_attention(q, k, v),),
        [(Kind.BATCH, name, x) for name, x in (("q", q), ("k", k), ("v", v))],
        [(Kind.USER, "out")],
    )
    (node,) = [node for node in step.graph.nodes if node.target is torch.ops.graphacc.flash_attention.default]
    stored = FLOPS_PER_BYTE * 4 * (2 * 4 * 6 * 12 + 2 * 4 * 6)  # the output and the log-sum-exp
    assert work(node) == 2 * 4 * 2 * (6 * 8 * 10 + 6 * 10 * 12) + stored
