"""Buckets: fewer, larger messages with the same results, bit for bit; what is joined, what stays alone, and where."""

import collections
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import training
import zoo
from graphs import trace
from simulate import simulate
from zoo_steps import partitioned, shared_case

import graphacc
from graphacc.errors import StrategyError
from graphacc.graph import Kind
from graphacc.passes.communication.buckets import GATHER, REDUCE, SCATTER, SMALL_BYTES
from graphacc.strategy import Strategy

BUCKET = 20_000  # bytes; the zoo's models are small


def collectives(step) -> dict:
    found = collections.defaultdict(list)
    for node in step.graph.nodes:
        if "move" in node.meta:
            found[node.target].append(node.meta["move"])
    return found


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("gpt2", "fsdp=4"),
        ("gpt2", "fsdp=4,zero=1"),
        ("gpt2", "dp=4"),
        ("gpt2", "dp=2,fsdp=2"),
        ("gpt2", "tp=2,fsdp=2"),
        ("resnet", "fsdp=4"),
        ("tied_mlp", "fsdp=4"),
        ("mixtral", "ep=2,fsdp=2"),
    ],
)
@pytest.mark.default_cases("gpt2-fsdp=4", "gpt2-fsdp=4,zero=1", "gpt2-dp=4", "gpt2-tp=2,fsdp=2", "tied_mlp-fsdp=4")
def test_results_keep_their_bits(name, strategy):
    """All ranks in lockstep, summed in one order: every output is the same, with fewer collectives."""
    case, inputs, _ = shared_case(name)
    alone, _ = partitioned(case.step, f"{strategy},bucket_mb=0")
    joined, _ = partitioned(case.step, f"{strategy},bucket_mb={BUCKET / 1e6}")
    before, after = collectives(alone), collectives(joined)
    assert sum(map(len, after.values())) < sum(map(len, before.values()))
    for target, moves in before.items():
        assert sum(move.size_bytes for move in moves) == sum(move.size_bytes for move in after[target])
        assert len(moves) == sum(move.tensors for move in after[target])
    mesh = Strategy.parse(strategy).mesh
    for x, y in zip(simulate(alone, mesh, inputs), simulate(joined, mesh, inputs), strict=True):
        assert torch.equal(x, y)


def test_sizes():
    """No message is larger than a bucket unless it is one tensor, large tensors stay alone, and all-reduces are joined only if they are small."""
    joined, _ = partitioned(shared_case("gpt2")[0].step, f"fsdp=4,bucket_mb={BUCKET / 1e6}")
    found = collectives(joined)
    for move in [*found[GATHER], *found[SCATTER]]:
        assert move.size_bytes <= BUCKET or move.tensors == 1
    assert any(move.tensors > 1 for move in found[GATHER]) and any(move.tensors > 1 for move in found[SCATTER])
    replicated, _ = partitioned(shared_case("gpt2")[0].step, "dp=4,bucket_mb=1")
    assert all(move.size_bytes / move.tensors <= SMALL_BYTES for move in collectives(replicated)[REDUCE] if move.tensors > 1)


def test_what_is_read_before_the_bucket_stays_where_it_is():
    """A cast of a weight is gathered in front of the bucket that takes in what is made of the cast."""

    def step(x, w, v):
        half = w.bfloat16()
        return ((x.bfloat16() @ half).float() + (x.half() @ v).float() + (x.half() @ half.half()).float()).sum()

    tensors = [torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8).half()]
    kinds = [(Kind.BATCH, "x"), (Kind.PARAM, "w"), (Kind.PARAM, "v")]
    captured = trace(step, [(kind, name, x) for (kind, name), x in zip(kinds, tensors)], [(Kind.LOSS, "loss")])
    alone, _ = partitioned(captured.copy(), "fsdp=2,bucket_mb=0")
    joined, _ = partitioned(captured.copy(), "fsdp=2,bucket_mb=1")
    assert [move.tensors for move in collectives(joined)[GATHER]] == [1, 2]
    for x, y in zip(simulate(alone, {"fsdp": 2}, tensors), simulate(joined, {"fsdp": 2}, tensors), strict=True):
        assert torch.equal(x, y)


def test_a_backward_gather_waits_for_the_gradient_of_its_first_member():
    joined, _ = partitioned(shared_case("gpt2")[0].step, f"fsdp=4,bucket_mb={BUCKET / 1e6}")
    order = {node: i for i, node in enumerate(joined.graph.nodes)}
    waits = [node for node in joined.graph.nodes if node.target is torch.ops.graphacc.after.default]
    assert waits and all(order[node.args[1]] < order[node] for node in waits)


@pytest.mark.parametrize("strategy", ["fsdp=8", "fsdp=4,tp=2", "dp=2,fsdp=4,zero=2"])
@pytest.mark.default_cases("fsdp=8")
def test_training_keeps_its_bits(strategy):
    """Compiled for eight devices: losses and parameters after three steps."""
    results = []
    for bucket in (0, BUCKET / 1e6):
        model, _ = zoo.MODELS["gpt2"]()
        training.compiled(model, f"{strategy},bucket_mb={bucket}")
        losses = training.train(model, training.batches_of("gpt2", steps=3), scheduled=False)
        results.append((losses, {name: x.clone() for name, x in model.state_dict().items()}))
        assert ("buckets: " in model.explain(passes=True)) == bool(bucket)
    (losses, state), (others, other_state) = results
    assert losses == others
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())


@pytest.mark.matrix
def test_without_fused_multiply_add_xlas_own_options_keep_the_bits_too():
    """With dropout: else XLA contracts a product and a sum in one of the programs and not in the other."""
    benchmark = pathlib.Path(__file__).parents[2] / "benchmarks" / "communication.py"
    arguments = "time --layers 2 --width 64 --length 64 --vocabulary 512 --rounds 2".split()
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"}
    result = subprocess.run([sys.executable, benchmark, *arguments], capture_output=True, text=True, timeout=300, env=environment)
    assert result.stdout.count("the same bits") == 2, result.stdout + result.stderr


@pytest.mark.parametrize("value", ["-1", "inf", "nan", "large"])
def test_bad_sizes(value):
    with pytest.raises(StrategyError, match="bucket_mb|needs a number"):
        graphacc.Strategy.parse(f"fsdp=2,bucket_mb={value}")
