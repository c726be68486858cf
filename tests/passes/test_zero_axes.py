"""ZeRO over the ranks of cp and ep: what a rank keeps, what travels over which axis and in how many messages, and values."""

import collections
import math

import pytest
import torch
from gpt2_steps import captured, gpt2, spread
from simulate import simulate
from zoo_steps import check, partitioned, shared_case, zoo_case

from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase, local_shape
from graphacc.passes.communication.buckets import (
    GATHER,
    REDUCE,
    SCATTER,
    SMALL_BYTES,
    goes_further,
    is_small,
    last_gather,
)
from graphacc.passes.communication.prefetch import sequences
from graphacc.passes.partition.plan import Role
from graphacc.strategy import Strategy

KINDS = {1: (Kind.STATE,), 2: (Kind.STATE,), 3: (Kind.STATE, Kind.PARAM)}  # of a whole step, which has no gradients between programs


def kept(step, kind: Kind) -> int:
    """Elements of a kind that a rank keeps, tensors of one dim and more."""
    return sum(math.prod(local_shape(item.shape, item.shards)) for item in step.inputs if item.kind is kind and item.shape)


def moved(step) -> dict[tuple[str, str, str], int]:
    """(phase, axis, collective) -> bytes of weights and gradients."""
    found = collections.Counter()
    for node in step.graph.nodes:
        move = node.meta.get("move")
        if move is not None and move.role in (Role.WEIGHT, Role.GRADIENT, Role.STATE):
            found[move.phase.value, move.axis, move.collective] += move.size_bytes
    return found


def messages(step) -> dict[tuple[str, Phase, str], int]:
    """Mesh axis, phase and collective -> messages of weights and gradients."""
    moves = [node.meta["move"] for node in step.graph.nodes if node.target in (GATHER, SCATTER) and node.meta["move"].role is not Role.ACTIVATION]
    return collections.Counter((move.axis, move.phase, move.collective) for move in moves)


@pytest.mark.parametrize("strategy", ["cp=2,zero=3", "cp=2,zero=1", "fsdp=2,cp=2", "fsdp=2,cp=2,zero=1", "fsdp=2,cp=2,zero=2", "fsdp=2,cp=4", "dp=2,fsdp=2,cp=2", "fsdp=2,tp=2,cp=2"])
@pytest.mark.default_cases("cp=2,zero=3", "fsdp=2,cp=2", "fsdp=2,cp=2,zero=1")
def test_a_rank_keeps_its_part(strategy):
    """The state, and the parameters of ZeRO-3, divided by fsdp * cp; values are those of one device."""
    chosen = Strategy.parse(strategy)
    case, inputs, expected = shared_case("llama")
    whole, _ = partitioned(case.step, str(chosen.replace(fsdp=1, zero=None, dp=chosen.dp * chosen.fsdp)))
    parts, _ = partitioned(case.step, strategy)
    for kind in (Kind.STATE, Kind.PARAM):
        ranks = chosen.fsdp * chosen.cp if kind in KINDS[chosen.zero_stage] else 1
        assert kept(parts, kind) == pytest.approx(kept(whole, kind) / ranks, rel=0.01)
    check(case.step, strategy, inputs, expected)


def test_each_axis_moves_what_the_other_leaves():
    """Gathers over fsdp, then cp; scatters over cp, then fsdp: together the bytes of one message over both."""
    case, _, _ = shared_case("llama")
    one, both = moved(partitioned(case.step, "fsdp=8")[0]), moved(partitioned(case.step, "fsdp=4,cp=2")[0])
    for phase, collective in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        size = both[phase, "cp", collective]
        assert size == pytest.approx(one[phase, "fsdp", collective], rel=0.03)
        assert both[phase, "fsdp", collective] == pytest.approx(size / 2, rel=0.03)
        received = size / 2 + both[phase, "fsdp", collective] * 3 / 4
        assert received == pytest.approx(one[phase, "fsdp", collective] * 7 / 8, rel=0.03)
    assert not any(collective == "all_reduce" for _, axis, collective in both if axis == "cp")


@pytest.mark.parametrize("strategy", ["fsdp=4,cp=2,zero=1", "fsdp=2,cp=2,zero=2"])
@pytest.mark.default_cases("fsdp=4,cp=2,zero=1")
def test_an_updated_weight_is_gathered_over_fsdp_first(strategy):
    case, _, _ = shared_case("llama")
    found = moved(partitioned(case.step, strategy)[0])
    assert found["update", "fsdp", "all_gather"] == pytest.approx(found["update", "cp", "all_gather"] / 2, rel=0.03)
    assert found["backward", "fsdp", "reduce_scatter"] == pytest.approx(found["backward", "cp", "reduce_scatter"] / 2, rel=0.03)
    assert not any(collective == "all_reduce" and phase != "update" for phase, _, collective in found)


@pytest.mark.parametrize("strategy", ["fsdp=2,cp=2", "fsdp=2,cp=2,zero=1", "cp=2,zero=3", "dp=2,fsdp=2,cp=2"])
@pytest.mark.default_cases("fsdp=2,cp=2", "fsdp=2,cp=2,zero=1")
def test_both_steps_have_buckets(strategy):
    """No more messages along each axis than one over both would be; results keep their bits."""
    case, inputs, _ = shared_case("gpt2")
    chosen = Strategy.parse(strategy)
    alone, _ = partitioned(case.step, f"{strategy},bucket_mb=0")
    joined, _ = partitioned(case.step, f"{strategy},bucket_mb=0.02")
    scatters = [node for node in joined.graph.nodes if node.target is SCATTER]
    assert all(goes_further(node) == (node.args[-1] == "cp" and chosen.fsdp > 1) for node in scatters)
    counts = messages(joined), messages(partitioned(case.step, f"{chosen.replace(fsdp=chosen.fsdp * chosen.cp, cp=1)},bucket_mb=0.02")[0])
    assert len(counts[0]) >= 2 and all(count <= counts[1]["fsdp", *key[1:]] for key, count in counts[0].items()), counts
    mesh = Strategy.parse(strategy).mesh
    for x, y in zip(simulate(alone, mesh, inputs), simulate(joined, mesh, inputs), strict=True):
        assert torch.equal(x, y)


def test_a_gather_counts_as_what_the_last_one_makes_of_it():
    """A weight of 128 x 384 in fp32 is no small one, and waits for the readers of others (`prefetch`), although fsdp gathers a quarter of it."""
    program = spread(captured(gpt2(layers=2, width=128, length=16, vocabulary=512), 16), "fsdp=2,cp=4,bucket_mb=0")
    gathers = [node for node in program.graph.nodes if node.target is GATHER and node.meta["move"].role is Role.WEIGHT]
    firsts = [node for node in gathers if goes_further(node)]
    assert 2 * len(firsts) == len(gathers) and all(node.meta["move"].axis == "fsdp" and last_gather(node).meta["move"].axis == "cp" for node in firsts)
    few = [node for node in firsts if node.meta["move"].size_bytes <= SMALL_BYTES < last_gather(node).meta["move"].size_bytes]
    assert len(few) >= 4 and not any(map(is_small, few))  # forward and backward of two layers
    joined = spread(captured(gpt2(layers=2, width=128, length=16, vocabulary=512), 16), "fsdp=2,cp=4")
    assert sum(node.meta["move"].tensors for sequence in sequences(joined) for node in sequence) >= len(few)


def size(step, kind: Kind, rank: int | None = None) -> int:
    """Elements of a kind, of tensors of `rank` dims: in a mixture those of three are experts'."""
    return sum(math.prod(item.shape) for item in step.inputs if item.kind is kind and item.shape and rank in (None, len(item.shape)))


MIXTURE = ["fsdp=2,ep=2", "fsdp=2,ep=2,zero=1", "ep=2,zero=3", "ep=2,zero=1", "ep=2,zero=2,cp=2", "fsdp=2,ep=2,cp=2", "fsdp=2,ep=2,cp=2,zero=1", "dp=2,fsdp=2,ep=2", "tp=2,ep=2,zero=3", "fsdp=2,tp=2,sequence_parallel=true,ep=2,zero=2"]


@pytest.mark.parametrize("strategy", MIXTURE)
@pytest.mark.default_cases("fsdp=2,ep=2,cp=2,zero=1", "ep=2,zero=3")
def test_a_rank_of_a_mixture_keeps_its_part(strategy):
    """Experts divided by ep * fsdp * cp, what is no expert's by as many: ep splits the first by their dim of experts, the others as ZeRO says."""
    chosen = Strategy.parse(strategy)
    case, inputs, expected = shared_case("mixtral")
    step, _ = partitioned(case.step, strategy)
    for kind in (Kind.STATE, Kind.PARAM):
        split = kind in KINDS[chosen.zero_stage]
        experts = size(step, kind, rank=3)
        others = size(step, kind) - experts
        ranks = chosen.fsdp * chosen.cp if split else 1
        left = [item for item in step.inputs if item.kind is kind and len(item.shape) == 3]
        assert left and all({shard.axis: shard.dim for shard in item.shards}["ep"] == 0 for item in left)
        if split and chosen.cp > 1:
            assert all({shard.axis: shard.dim for shard in item.shards}["cp"] > 0 for item in left)
        whole = experts / (chosen.ep * ranks) + others / (ranks * (chosen.ep if split else 1))
        assert kept(step, kind) == pytest.approx(whole / chosen.tp, rel=0.05)  # norms and the router are whole along tp
    check(case.step, strategy, inputs, expected)


def test_each_axis_moves_what_the_others_leave_of_a_mixture():
    """Bytes of gathers and scatters over cp, ep and fsdp, of experts and of others."""
    case, _, _ = shared_case("mixtral")
    step, _ = partitioned(case.step, "fsdp=2,ep=2,cp=2,zero=1")
    experts = 4 * size(step, Kind.PARAM, rank=3)
    others = 4 * size(step, Kind.PARAM) - experts
    found = moved(step)
    sent = {"cp": experts / 2 + others, "ep": others / 2, "fsdp": experts / 4 + others / 4}
    for phase, collective in (("update", "all_gather"), ("backward", "reduce_scatter")):
        for axis, bytes_ in sent.items():
            assert found[phase, axis, collective] == pytest.approx(bytes_, rel=0.02), (phase, axis)
    assert not any(collective == "all_reduce" and phase != "update" for phase, _, collective in found)


@pytest.mark.parametrize("strategy", ["fsdp=2,ep=2,cp=2", "fsdp=2,ep=2,cp=2,zero=1", "fsdp=4,ep=2", "ep=2,cp=2,zero=3"])
@pytest.mark.default_cases("fsdp=2,ep=2,cp=2,zero=1", "fsdp=4,ep=2")
def test_every_step_has_buckets(strategy):
    """Over one, two or three axes, each with fewer messages than tensors; results keep their bits."""
    case, inputs, _ = shared_case("mixtral")
    alone, _ = partitioned(case.step, f"{strategy},bucket_mb=0")
    joined, _ = partitioned(case.step, f"{strategy},bucket_mb=0.02")
    before, after = messages(alone), messages(joined)
    assert before.keys() == after.keys() and all(after[key] < 0.8 * before[key] for key in before), (before, after)
    mesh = Strategy.parse(strategy).mesh
    for node in joined.graph.nodes:
        if node.target is SCATTER and node.meta["move"].role is Role.GRADIENT:
            further = [axis for axis in ("cp", "ep", "fsdp") if axis in mesh]
            behind = len(further) - 1 - further.index(node.args[-1])
            assert goes_further(node) in (behind, max(behind - 1, 0))  # experts are not scattered over ep
    for x, y in zip(simulate(alone, mesh, inputs), simulate(joined, mesh, inputs), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("strategy", "waits"), [("ep=2,zero=3", False), ("ep=2,fsdp=2", True)])
def test_experts_that_are_not_gathered_are_read_where_they_are(strategy, waits):
    """ZeRO-3's second read of a parameter (`graphacc::after`) is for what is gathered."""
    case, _, _ = shared_case("mixtral")
    step, _ = partitioned(case.step, strategy)
    kinds = {node: item for node, item in zip(step.placeholders, step.inputs)}
    read = {len(kinds[node.args[0]].shape) for node in step.graph.nodes if node.target is torch.ops.graphacc.after.default and node.args[0] in kinds}
    assert (3 in read) == waits and 2 in read


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("gpt2", "cp=2,zero=3"), ("gpt2", "fsdp=2,cp=2"), ("gpt2", "fsdp=2,cp=2,zero=1"), ("mixtral", "ep=2,zero=3"), ("mixtral", "fsdp=2,ep=2,zero=1"), ("mixtral", "fsdp=2,ep=2,cp=2")],
)
@pytest.mark.parametrize("name", ["adafactor", "muon", "sgd"])
@pytest.mark.default_cases("adafactor-gpt2-fsdp=2,cp=2", "sgd-gpt2-fsdp=2,cp=2,zero=1", "muon-mixtral-fsdp=2,ep=2,zero=1")
def test_optimizers_that_see_whole_tensors_or_have_no_state(name, model, strategy):
    case = zoo_case(model, OPTIMIZERS[name])
    inputs = case.inputs(case.step)
    check(case.step, strategy, inputs, simulate(case.step, {}, inputs), tolerance=2e-4 if name == "muon" else 2e-5)  # its iteration is in bf16: 9e-5 under dp=2 as well


def _muon(model):
    return torch.optim.Muon([x for x in model.parameters() if x.dim() == 2], lr=1e-2)


OPTIMIZERS = {
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "muon": _muon,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1),
}


def test_a_sum_over_another_axis_is_made_behind_both_scatters():
    """tp sums 1 / (fsdp * cp) of what it sums without ZeRO."""
    case, inputs, expected = shared_case("llama")
    strategy = "fsdp=2,cp=2,tp=2,sequence_parallel=true"
    sizes = []
    for text in ("dp=2,cp=2,tp=2,sequence_parallel=true", strategy):
        step, _ = partitioned(case.step, text)
        sizes.append(sum(node.meta["move"].size_bytes for node in step.graph.nodes if node.target is REDUCE and node.meta.get("phase") is Phase.BACKWARD and node.meta["move"].axis == "tp" and node.meta["move"].role is Role.GRADIENT))
    assert sizes[1] == pytest.approx(sizes[0] / 4, rel=0.05) and sizes[1] > 0
    check(case.step, strategy, inputs, expected)


def test_what_zero_needs():
    assert Strategy(cp=2).zero_stage == 0 and Strategy(cp=2).zero_ranks == 1
    assert Strategy(cp=2, zero=3).zero_ranks == 2 and Strategy(cp=2, fsdp=4).zero_ranks == 8
    assert Strategy(ep=2).zero_stage == 0 and Strategy(ep=2, zero=1).zero_ranks == 2 and Strategy(ep=2, zero=1).zero_ranks_of_experts == 1
    assert Strategy(fsdp=2, cp=2, ep=2).zero_ranks == 8 and Strategy(fsdp=2, cp=2, ep=2).zero_ranks_of_experts == 4
    with pytest.raises(StrategyError, match="shards over the axes fsdp, cp and ep, which have size 1"):
        Strategy(dp=2, zero=1)
    with pytest.raises(StrategyError, match="quantized_weights=True is about the weights that ZeRO-3 gathers"):
        Strategy(cp=2, zero=3, quantized_weights=True)
    with pytest.raises(StrategyError, match="hpz=2 is about the second gather of ZeRO-3"):
        Strategy(cp=2, zero=3, hpz=2)


