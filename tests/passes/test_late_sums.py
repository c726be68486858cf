"""Gradients that add up over several runs of a program are summed over the ranks once, by the program that reads them."""

import functools

import jax
import numpy as np
import pytest
import torch
import zoo
from simulate import run_global, simulate
from zoo_steps import Case, build, check, partitioned, shared_case

from graphacc.graph import Input, Kind, MeshShard, Phase
from graphacc.passes.accumulation import accumulating
from graphacc.passes.partition.plan import Role
from graphacc.runtime import make_mesh, to_device, to_torch
from graphacc.runtime.layout import summed
from graphacc.runtime.state import relayout
from graphacc.strategy import Strategy

STRATEGIES = ["dp=4", "fsdp=2,dp=2,zero=1", "fsdp=4,zero=1", "fsdp=2,dp=2", "tp=2,dp=2", "cp=2,dp=2,zero=1"]


@functools.cache
def bf16_case() -> Case:
    """Gradients are rounded to bf16 before they are widened and added."""
    model, batch = zoo.MODELS["gpt2"]()
    return build(model, batch, precision="bf16")


def gradient_moves(step):
    return [node.meta["move"] for node in step.graph.nodes if "move" in node.meta and node.meta["move"].role is Role.GRADIENT]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.default_cases("dp=4-gpt2", "fsdp=2,dp=2,zero=1-gpt2", "fsdp=2,dp=2-gpt2")
def test_several_runs(name, strategy):
    """Gradients so far plus those of one run, and an update from the ranks' own sums: as on one device."""
    case = shared_case(name)[0]
    step = accumulating(case.joint)
    inputs = case.inputs(step)
    check(step, strategy, inputs, run_global(step, inputs))
    inputs = case.inputs(case.update)
    check(case.update, strategy, inputs, run_global(case.update, inputs))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.default_cases("dp=4-bf16", "fsdp=2,dp=2,zero=1-fp32", "fsdp=2,dp=2-fp32")
def test_no_sum_before_the_update(strategy, precision):
    """Over late axes a run moves nothing but numbers; the update sums every gradient once, over fsdp in parts, and over dp what that leaves."""
    case, late = bf16_case() if precision == "bf16" else shared_case("gpt2")[0], Strategy.parse(strategy).late_axes
    run, _ = partitioned(accumulating(case.joint), f"{strategy},bucket_mb=0,precision={precision}")
    assert all(node.meta["val"].numel() == 1 for node in run.graph.nodes if "move" in node.meta and node.meta["move"].axis in late)
    update, _ = partitioned(case.update, f"{strategy},bucket_mb=0,precision={precision}")
    axes = [axis for axis in late if getattr(Strategy.parse(strategy), axis) > 1]
    moves = gradient_moves(update)
    trained = sum(item.kind is Kind.GRAD for item in update.inputs)
    for axis in axes:
        kinds = [move.collective for move in moves if move.axis == axis]
        assert len(kinds) == trained and set(kinds) <= ({"reduce_scatter"} if axis == "fsdp" else {"all_reduce"})
    assert all(move.phase is Phase.BACKWARD for move in moves)


@pytest.mark.parametrize("strategy", ["dp=16", "fsdp=16,zero=1"])
def test_a_batch_that_is_not_split(strategy):
    """All ranks compute the same gradient, which one of them adds: nothing moves before the update."""
    case = shared_case("tied_mlp")[0]
    step = accumulating(case.joint)
    inputs = case.inputs(step)
    check(step, strategy, inputs, run_global(step, inputs))
    run, _ = partitioned(step, strategy)
    assert not any("move" in node.meta for node in run.graph.nodes)


def test_where_ranks_keep_parts_each_run_scatters():
    """From ZeRO-2 on a rank keeps its part of a gradient alone."""
    case = shared_case("gpt2")[0]
    run, _ = partitioned(accumulating(case.joint), "fsdp=4,bucket_mb=0")
    assert {move.collective for move in gradient_moves(run)} == {"reduce_scatter"}
    assert all(item.num_terms == 0 for item in (*run.inputs, *run.outputs))
    update, _ = partitioned(case.update, "fsdp=4,bucket_mb=0")
    assert not gradient_moves(update)


def test_the_signature_says_so():
    """[ranks of dp, ranks of fsdp, *shape], of which a rank has one block; gradients replace those so far."""
    run, _ = partitioned(accumulating(shared_case("gpt2")[0].joint), "fsdp=2,dp=2,zero=1")
    given = {item.target: item for item in run.inputs if item.kind is Kind.GRAD}
    shapes = {item.target: item.shape for item in run.inputs if item.kind is Kind.PARAM}
    assert given and all(item.shape == (2, 2, *shapes[name]) and item.num_terms == 2 for name, item in given.items())
    assert all([(shard.axis, shard.dim) for shard in item.shards] == [("dp", 0), ("fsdp", 1)] for item in given.values())
    made = {run.outputs[i].target for i, j in run.donations().items() if run.inputs[j].kind is Kind.GRAD}
    assert made == set(given)


def test_offload_sums_each_run():
    """Gradients that leave for the host are summed before."""
    run, _ = partitioned(accumulating(shared_case("gpt2")[0].joint), "dp=2,fsdp=2,offload=optimizer")
    assert all(item.num_terms == 0 for item in (*run.inputs, *run.outputs))


def test_sums_are_told_from_their_terms():
    """The simulation would notice a term that is lost: ranks hold a half, a quarter, ... of a gradient."""
    case = shared_case("gpt2")[0]
    update, _ = partitioned(case.update, "dp=4")
    for node in update.graph.nodes:
        if "move" in node.meta:
            (waited,) = node.users
            waited.replace_all_uses_with(node.all_input_nodes[0])
    inputs = case.inputs(case.update)
    with pytest.raises(AssertionError, match="ranks disagree"):
        simulate(update, {"dp": 4}, inputs)


def test_the_gradient_of_a_number():
    """Found by a loop that reads the gradient of a learned scale: JAX pads no number."""
    mesh = make_mesh(Strategy(dp=8), jax.devices()[:8])
    terms = Input(name="", kind=Kind.GRAD, target="scale", shape=(8,), dtype=torch.float32, shards=(MeshShard(axis="dp", size=8, dim=0),), num_terms=1)
    whole, value = summed(terms), torch.tensor(1.5)
    spread = relayout(to_device(value, whole, mesh), whole, terms, mesh)
    assert np.asarray(spread).tolist() == [1.5, *[0.0] * 7]
    assert torch.equal(to_torch(relayout(spread, terms, whole, mesh), whole), value)


@pytest.mark.parametrize("split", [(), (MeshShard(axis="fsdp", size=2, dim=1),)])
def test_from_one_layout_to_the_other(split):
    """A gradient that the loop wrote lies on the first rank; read back it is the sum over all."""
    mesh = make_mesh(Strategy(dp=4, fsdp=2), jax.devices()[:8])
    shards = (MeshShard(axis="dp", size=4, dim=0), *(MeshShard(axis=shard.axis, size=shard.size, dim=shard.dim + 1) for shard in split))
    terms = Input(name="", kind=Kind.GRAD, target="w", shape=(4, 3, 5), dtype=torch.float32, shards=shards, num_terms=1)
    whole, value = summed(terms), torch.randn(3, 5)
    assert (whole.shape, whole.shards, whole.num_terms) == ((3, 5), split, 0)
    spread = relayout(to_device(value, whole, mesh), whole, terms, mesh)
    stored = np.asarray(spread)
    assert stored.shape[0] == 4 and np.array_equal(stored[0, :, :5], value.numpy()) and not stored[1:].any()
    assert torch.equal(to_torch(relayout(spread, terms, whole, mesh), whole), value)
    added = jax.device_put(np.arange(stored.size, dtype=np.float32).reshape(stored.shape), spread.sharding)
    assert torch.equal(to_torch(relayout(added, terms, whole, mesh), whole), torch.from_numpy(np.asarray(added).sum(0)[:, :5]))
