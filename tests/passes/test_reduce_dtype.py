"""`Strategy.reduce_dtype`: in what dtype gradients that are computed in bf16 travel, and that they stay gradients of the whole batch."""

import collections
import functools
from collections.abc import Collection

import pytest
import torch
from gpt2_steps import captured, gpt2, spread
from simulate import run_global, simulate
from tolerances import RELATIVE, relative_error
from zoo_steps import Case, partitioned, zoo_case

from graphacc.errors import StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.passes.accumulation import accumulating
from graphacc.passes.partition.plan import Role
from graphacc.strategy import Strategy

SIZES = dict(layers=2, width=192, length=16, vocabulary=512)


@functools.cache
def step():
    return captured(gpt2(**SIZES), SIZES["length"], precision="bf16")


@functools.cache
def case() -> tuple[Case, list[torch.Tensor]]:
    case = zoo_case("gpt2", precision="bf16")
    return case, case.inputs(case.joint)


def moved(strategy: str) -> dict[tuple[str, Role, torch.dtype], int]:
    """Bytes of what moves along `fsdp`, by collective, role and dtype."""
    found: dict[tuple[str, Role, torch.dtype], int] = {}
    for node in spread(step(), f"{strategy},precision=bf16").graph.nodes:
        if (move := node.meta.get("move")) is not None and move.axis == "fsdp":
            key = move.collective, move.role, node.meta["val"].dtype
            found[key] = found.get(key, 0) + move.size_bytes
    return found


def gradient_dtypes(step: StepGraph, but: Collection[str] = ()) -> collections.Counter[torch.dtype]:
    """Of the messages of gradients, `but` those over some axes."""
    moved = [node for node in step.graph.nodes if "move" in node.meta and node.meta["move"].role is Role.GRADIENT]
    return collections.Counter(node.meta["val"].dtype for node in moved if node.meta["move"].axis not in but)


@pytest.mark.parametrize("bucket", ["bucket_mb=0", "bucket_mb=1"])
@pytest.mark.default_cases("bucket_mb=1")
def test_three_times_the_model_travels(bucket):
    """Two gathers and a scatter of M = 2 bytes for each parameter (4 M with fp32 gradients); those of norms, summed in fp32, come on top."""
    model_bytes = sum(parameter.numel() for parameter in gpt2(**SIZES).parameters()) * 2
    narrow, wide = moved(f"fsdp=8,{bucket},reduce_dtype=bf16"), moved(f"fsdp=8,{bucket}")
    norms = narrow["reduce_scatter", Role.GRADIENT, torch.float32]
    assert norms == 4 * (2 * SIZES["layers"] + 1) * 2 * SIZES["width"]
    assert narrow["reduce_scatter", Role.GRADIENT, torch.bfloat16] == model_bytes - norms // 2
    assert 2.9 * model_bytes < sum(narrow.values()) <= 3 * model_bytes + norms
    assert wide["reduce_scatter", Role.GRADIENT, torch.float32] == 2 * model_bytes
    assert not any(kind == "all_gather" and dtype == torch.float32 for kind, _, dtype in narrow), "the backward of norms widens their weights behind the gather"
    assert not any(kind == "all_reduce" and role is Role.GRADIENT for kind, role, _ in (*narrow, *wide))


@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=2,zero=1", "dp=4", "dp=2,fsdp=2", "cp=2,fsdp=2"])
@pytest.mark.default_cases("fsdp=4", "dp=2,fsdp=2")
def test_gradients(strategy):
    """Within the resolution of bf16 of those of one device; with fp32 no further away than that."""
    joint, inputs = case()[0].joint, case()[1]
    expected = run_global(joint, inputs)
    for choice in ("fp32", "bf16"):
        program, _ = partitioned(joint.copy(), f"{strategy},precision=bf16,reduce_dtype={choice}")
        summed, _ = partitioned(accumulating(joint.copy()), f"{strategy},precision=bf16,reduce_dtype={choice}")
        late = Strategy.parse(strategy).late_axes
        assert (torch.bfloat16 in gradient_dtypes(program)) == (choice == "bf16") and gradient_dtypes(program, but=late) == gradient_dtypes(summed)
        for got, want, item in zip(simulate(program, Strategy.parse(strategy).mesh, inputs), expected, joint.outputs, strict=True):
            if item.kind is Kind.GRAD:
                assert relative_error(got, want) <= RELATIVE[torch.bfloat16], (choice, item.target)


def test_what_it_takes():
    with pytest.raises(StrategyError, match="reduce_dtype='bf16' is for gradients that are computed in bf16.*set precision='bf16'"):
        Strategy(fsdp=2, reduce_dtype="bf16")
    with pytest.raises(StrategyError, match="reduce_dtype='fp16' is unknown"):
        Strategy.parse("fsdp=2,reduce_dtype=fp16")
    assert str(Strategy.parse("fsdp=2,precision=bf16,reduce_dtype=bf16")) == "fsdp=2,precision=bf16,reduce_dtype=bf16"
