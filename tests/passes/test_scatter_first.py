"""Gradients are scattered over fsdp before they are summed over another axis: bytes, messages, values, and what is left as it is."""

import collections

import pytest
import torch
from graphs import trace
from simulate import simulate
from zoo_steps import check, partitioned, shared_case

from graphacc.graph import Kind, Phase
from graphacc.passes.communication import SCATTER_FIRST
from graphacc.passes.communication.buckets import REDUCE, SCATTER
from graphacc.passes.partition.plan import Move, Role
from graphacc.passes.runner import Log
from graphacc.strategy import Strategy

collective = torch.ops._c10d_functional


def gradients(step) -> dict[str, list[Move]]:
    """Mesh axis and collective -> the messages of gradients, in order."""
    found = collections.defaultdict(list)
    for node in step.graph.nodes:
        if "move" in node.meta and node.meta["move"].role is Role.GRADIENT:
            found[f"{node.meta['move'].axis} {node.meta['move'].collective}"].append(node.meta["move"])
    return found


def size(moves: list[Move]) -> int:
    return sum(move.size_bytes for move in moves)


@pytest.mark.parametrize(
    ("name", "strategy", "axis"),
    [("llama", "fsdp=4,tp=2,sequence_parallel=true", "tp"), ("gpt2", "dp=2,fsdp=2,tp=2,sequence_parallel=true", "tp"), ("mixtral", "fsdp=2,tp=2,sequence_parallel=true,ep=2", "tp"), ("llama", "fsdp=2,tp=2,sequence_parallel=true,remat=blocks", "tp")],
)
@pytest.mark.default_cases("llama-fsdp=4,tp=2,sequence_parallel=true-tp", "mixtral-fsdp=2,tp=2,sequence_parallel=true,ep=2-tp")
def test_a_part_is_summed(name, strategy, axis):
    """The model's axis sums 1 / (fsdp * ep) of what it sums without ZeRO, and values stay those of one device."""
    case, inputs, expected = shared_case(name)
    chosen = Strategy.parse(strategy)
    whole, _ = partitioned(case.step, str(chosen.replace(fsdp=1, zero=None, dp=chosen.dp * chosen.fsdp)))
    parts, _ = partitioned(case.step, strategy)
    before, after = gradients(whole)[f"{axis} all_reduce"], gradients(parts)[f"{axis} all_reduce"]
    assert size(before) > 0
    assert size(after) == pytest.approx(size(before) / (chosen.fsdp * chosen.ep), rel=0.03)  # what fsdp pads is summed as well
    assert not any(node.target is REDUCE and user.users and all(reader.target is SCATTER for reader in user.users) for node in parts.graph.nodes for user in node.users)
    check(case.step, strategy, inputs, expected)


@pytest.mark.parametrize("strategy", ["fsdp=2,tp=2,sequence_parallel=true", "dp=2,fsdp=2", "dp=2,fsdp=2,cp=2"])
def test_a_bucket_is_summed_as_one(strategy):
    """No more sums than scatters, of as many bytes as without buckets; results keep their bits."""
    case, inputs, _ = shared_case("gpt2")
    alone, _ = partitioned(case.step, f"{strategy},bucket_mb=0")
    joined, _ = partitioned(case.step, f"{strategy},bucket_mb=0.02")
    found = gradients(joined)
    scatters = found["fsdp reduce_scatter"]
    assert len(scatters) < sum(move.tensors for move in scatters) / 2
    for axis in {"dp"} & set(Strategy.parse(strategy).mesh):
        sums = found[f"{axis} all_reduce"]
        assert len(sums) <= len(scatters) and sum(move.tensors for move in sums) == sum(move.tensors for move in scatters)
        assert size(sums) == size(gradients(alone)[f"{axis} all_reduce"])
    mesh = Strategy.parse(strategy).mesh
    for x, y in zip(simulate(alone, mesh, inputs), simulate(joined, mesh, inputs), strict=True):
        assert torch.equal(x, y)


def written(between, op: str = "sum", reads_sum: bool = False):
    """A gradient that is summed over cp, passed through `between`, and scattered over fsdp=2."""

    def step(x):
        summed = collective.wait_tensor(collective.all_reduce(x * 1, op, "cp"))
        part = collective.wait_tensor(collective.reduce_scatter_tensor(between(summed), "sum", 2, "fsdp"))
        return (part, summed) if reads_sum else (part,)

    outputs = [(Kind.GRAD, "w"), (Kind.USER, "whole")][: 1 + reads_sum]
    made = trace(step, [(Kind.BATCH, "x", torch.ones(6, 4, dtype=torch.bfloat16))], outputs, phase=Phase.BACKWARD)
    for node in made.graph.nodes:
        if node.target in (REDUCE, SCATTER):
            axis, kind = (node.args[-1], node.target._schema.name.partition("::")[2].removesuffix("_tensor"))
            node.meta["move"] = Move(value="g", axis=axis, collective=kind, source=None, target=None, size_bytes=48, role=Role.GRADIENT, phase=Phase.BACKWARD, layer="", reader="")
    return made


@pytest.mark.parametrize(
    ("between", "moves"),
    [
        (lambda x: x.float(), True),
        (lambda x: x.t().contiguous(), True),
        (lambda x: torch.nn.functional.pad(x, (0, 0, 0, 2)), True),
        (lambda x: torch.nn.functional.pad(x, (0, 0, 0, 2), value=1.0), False),
        (lambda x: x.float().half(), False),
        (lambda x: x.abs(), False),
    ],
    ids=["wider", "transposed", "padded", "padded with ones", "narrower", "not linear"],
)
def test_what_stands_between_is_linear(between, moves):
    step, log = written(between), Log()
    SCATTER_FIRST.run(step, log)
    step.verify()
    order = [node.target for node in step.graph.nodes if node.target in (REDUCE, SCATTER)]
    assert order == ([SCATTER, REDUCE] if moves else [REDUCE, SCATTER])
    assert log.rewrites == moves
    if moves:
        (sums,) = [node for node in step.graph.nodes if node.target is REDUCE]
        value = sums.meta["val"]
        assert sums.meta["move"].size_bytes == value.numel() * value.dtype.itemsize == sums.all_input_nodes[0].meta["val"].numel() * value.dtype.itemsize


@pytest.mark.parametrize("options", [{"op": "max"}, {"reads_sum": True}], ids=["maximum", "read whole"])
def test_what_cannot_be_parts_stays(options):
    step, log = written(lambda x: x, **options), Log()
    SCATTER_FIRST.run(step, log)
    assert [node.target for node in step.graph.nodes if node.target in (REDUCE, SCATTER)] == [REDUCE, SCATTER] and not log.rewrites
