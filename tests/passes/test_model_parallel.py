"""Partitions along tp and cp, alone and with data axes, against the unpartitioned graph: every output of a whole step."""

import pytest
from selection import with_matrix
from simulate import run_global
from zoo_steps import check, shared_case, zoo_case

from graphacc.passes.partition.placement import Replicate, Shard
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel


def run(name: str, strategy: str):
    case, inputs, expected = shared_case(name)
    reports = check(case.step, strategy, inputs, expected)
    return {report.axis: report for report in reports if hasattr(report, "collectives")}


STRATEGIES = [
    "tp=4",
    "dp=2,fsdp=2,tp=2,sequence_parallel=true",
    "fsdp=2,tp=2,zero=1",
    "cp=2,fsdp=2",
    "cp=2,context=ring,fsdp=2,tp=2",
    "cp=4,context=ring",
    "cp=2,tp=2,dp=2,sequence_parallel=true",
]
CASES = [(name, strategy) for strategy in STRATEGIES for name in ("gpt2", "llama")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(CASES, [("llama", STRATEGIES[0]), ("gpt2", STRATEGIES[2]), ("gpt2", STRATEGIES[4]), ("llama", STRATEGIES[6])]))
@pytest.mark.default_cases("llama-tp=4", "llama-cp=2,tp=2,dp=2,sequence_parallel=true")
def test_a_whole_step(name, strategy):
    run(name, strategy)


OTHERS = [(name, strategy) for name in ("qwen3_moe", "t5", "bert", "nn_transformer") for strategy in ("tp=2,fsdp=2", "tp=2,cp=2,sequence_parallel=true")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(OTHERS, [OTHERS[0], OTHERS[3]]))
@pytest.mark.default_cases("qwen3_moe-tp=2,fsdp=2")
def test_other_models(name, strategy):
    run(name, strategy)


@pytest.mark.parametrize("name", with_matrix(["vit", "clip", "lstm_lm", "resnet", "mixtral", "tied_mlp"], ["clip", "resnet", "tied_mlp"]))
@pytest.mark.default_cases("resnet", "tied_mlp")
def test_tensor_parallelism_of(name):
    run(name, "tp=2,sequence_parallel=true")


def test_gradients_of_post_norm_blocks_are_summed_once():
    """BERT adds the residual's gradient between the products': regrouped, a layer still has two sums backward."""
    report = run("bert", "tp=2")["tp"]
    large = [item for item in report.collectives if item.kind == "all_reduce" and item.size_bytes >= 16384]
    assert len(large) == 2 * (2 * 2 + 1)


def roles(name: str, ranks: int = 2, pinned=None):
    return find_tensor_parallel(shared_case(name)[0].step, ranks, pinned or {})


def test_columns_and_rows():
    found = roles("gpt2").splits
    layer = {name.removeprefix("transformer.h.0."): split for name, split in found.items() if ".h.0." in name}
    assert layer == {
        "attn.c_attn.weight": Shard(1, outer=3),  # query, key and value by heads each
        "attn.c_attn.bias": Shard(0, outer=3),
        "attn.c_proj.weight": Shard(0),
        "mlp.c_fc.weight": Shard(1),
        "mlp.c_fc.bias": Shard(0),
        "mlp.c_proj.weight": Shard(0),
    }
    assert found["transformer.wte.weight"] == Shard(0)
    assert "transformer.wpe.weight" not in found


def test_what_stays_whole_says_why():
    found = roles("bert")
    assert "needs its outputs whole" in found.reasons["cls.predictions.transform.dense.weight"]
    assert found.splits["cls.predictions.bias"] == Shard(0)
    assert roles("vit").reasons["classifier.weight"] == "whole: no row-parallel product follows it"


def test_pins_come_first():
    name = "model.layers.0.self_attn.o_proj.weight"
    found = roles("llama", pinned={name: Replicate(), "model.norm.weight": Shard(0)})
    assert name not in found.splits and found.splits["model.norm.weight"] == Shard(0)
    assert found.reasons["model.norm.weight"] == "annotation"


@pytest.mark.parametrize("strategy", ["tp=2", "tp=4,fsdp=2,sequence_parallel=true"])
@pytest.mark.default_cases("tp=2")
def test_a_vocabulary_that_does_not_divide_is_padded(monkeypatch, strategy):
    """97 tokens, as GPT-2's 50257: table and head are split with padding, which no sum, maximum or lookup sees."""
    monkeypatch.setattr("zoo.VOCAB", 97)
    case = zoo_case("gpt2")
    inputs = case.inputs(case.step)
    reports = check(case.step, strategy, inputs, run_global(case.step, inputs))
    (report,) = [report for report in reports if getattr(report, "axis", "") == "tp"]
    assert all(item.size_bytes < 8 * 16 * 97 * 4 for item in report.collectives), "the logits were gathered"
    embedding = next(item for item in case.step.inputs if item.target == "transformer.wte.weight")
    assert embedding.shape == (97, 32)
