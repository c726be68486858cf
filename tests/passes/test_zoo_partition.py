"""Whole training steps of real models, partitioned, against the unpartitioned graph."""

import math

import pytest
import zoo
from selection import with_matrix
from simulate import run_global
from zoo_steps import check, forward_case, partitioned, shared_case

from graphacc.graph import Kind
from graphacc.passes.accumulation import accumulating
from graphacc.passes.partition import PartitionReport

# Models whose samples are independent up to the loss: nothing but parameters, gradients and scalars is communicated.
INDEPENDENT = ("gpt2", "llama", "qwen3", "bert", "t5", "vit", "nn_transformer", "lstm_lm", "tied_mlp")


def _check(name: str, strategy: str) -> list[PartitionReport]:
    case, inputs, expected = shared_case(name)
    return check(case.step, strategy, inputs, expected)


def _param_bytes(name: str, *, trained: bool) -> int:
    params = [item for item in shared_case(name)[0].joint.inputs if item.kind is Kind.PARAM]
    return sum(4 * math.prod(item.shape) for item in params if item.trainable or not trained)


@pytest.mark.parametrize("name", with_matrix(zoo.MODELS, ["gpt2", "mixtral", "resnet", "tied_mlp"]))
def test_zero_3_on_four_ranks(name):
    (report,) = _check(name, "fsdp=4,zero=3")
    if name in INDEPENDENT:
        _assert_volume(report, name, gathers=2)


@pytest.mark.parametrize("name", with_matrix(zoo.MODELS, ["gpt2", "tied_mlp"]))
def test_zero_2_with_replicas(name):
    fsdp, dp = _check(name, "dp=2,fsdp=2,zero=2")
    if name in INDEPENDENT:
        _assert_volume(fsdp, name, gathers=1)
        assert dp.count("all_gather") == 0
        assert dp.size_bytes("all_reduce") <= _param_bytes(name, trained=True) / 2 * 1.05 + 64  # gradients are reduced as shards


@pytest.mark.parametrize("name", with_matrix(zoo.MODELS, ["gpt2"]))
def test_zero_2_is_zero_1_where_a_step_is_one_microbatch(name):
    """Gradients never leave the step, so tests/api/test_parity.py trains under one of the two."""
    case = shared_case(name)[0]
    first, second = (partitioned(case.step, f"fsdp=8,zero={stage}")[0] for stage in (1, 2))
    assert str(first.graph) == str(second.graph)
    assert (first.inputs, first.outputs) == (second.inputs, second.outputs)


OTHERS = [(name, strategy) for strategy in ("dp=2", "fsdp=2,zero=1", "fsdp=8,zero=3") for name in ("gpt2", "resnet")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(OTHERS, [("resnet", "dp=2"), ("gpt2", "fsdp=2,zero=1"), ("resnet", "fsdp=8,zero=3")]))
def test_other_strategies(name, strategy):
    _check(name, strategy)


def _assert_volume(report: PartitionReport, name: str, *, gathers: int) -> None:
    """Parameters gathered so many times, every gradient scattered once, and scalars reduced; padding adds a little."""
    assert report.forced == []
    assert report.size_bytes("all_gather") <= gathers * _param_bytes(name, trained=gathers == 1) * 1.05
    trained = _param_bytes(name, trained=True)
    assert trained <= report.size_bytes("reduce_scatter") <= trained * 1.05
    assert report.size_bytes("all_reduce") <= 32


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_evaluation(name):
    model, batch = zoo.MODELS[name]()
    step, inputs = forward_case(model.eval(), batch)
    for strategy in ("fsdp=4,zero=3", "dp=2,fsdp=2,zero=1"):
        check(step, strategy, inputs, run_global(step, inputs))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_joint_and_update_graphs_agree_on_the_layout_of_gradients(stage):
    """Gradient accumulation runs the two apart: gradients are split from stage 2 on, in both in the same way; before, both have every rank's own sum."""
    case = shared_case("gpt2")[0]
    strategy = f"fsdp=4,zero={stage}"
    for step in (case.joint, case.update):
        inputs = case.inputs(step)
        check(step, strategy, inputs, run_global(step, inputs))
    joint, update = partitioned(accumulating(case.joint), strategy)[0], partitioned(case.update, strategy)[0]
    given = {item.target: (item.shape, item.shards, item.num_terms) for item in joint.outputs if item.kind is Kind.GRAD}
    taken = {item.target: (item.shape, item.shards, item.num_terms) for item in update.inputs if item.kind is Kind.GRAD}
    assert given == taken
    assert all(shards and num_terms == (stage < 2) for _, shards, num_terms in given.values())
    assert all(item.shards for item in update.inputs if item.kind is Kind.STATE and item.shape)
    assert all(bool(item.shards) == (stage == 3) for item in update.outputs if item.kind is Kind.PARAM)
