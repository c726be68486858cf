"""Gradients that are sent in fp32 come so from their products; where nothing is sent they stay narrow."""

import copy
import functools

import pytest
import torch
import zoo
from gpt2_steps import captured, llama, spread
from training import batches_of, compiled, train

import graphacc.passes.pipeline as pipeline
from graphacc.graph import Phase, StepGraph
from graphacc.passes.communication.buckets import SCATTER
from graphacc.passes.communication.release import _Gradient
from graphacc.passes.runner import Pass

aten = torch.ops.aten
LAYERS = 2
WIDE = torch.ops.graphacc.wide_mm.default


@functools.cache
def step() -> StepGraph:
    return captured(llama(layers=LAYERS, width=256, length=16, vocabulary=512), 16, "bf16")


def in_backward(program, *targets) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target in targets and node.meta["phase"] is Phase.BACKWARD]


@pytest.mark.parametrize("strategy", ["fsdp=8", "fsdp=8,remat=blocks", "tp=2,fsdp=4", "fsdp=8,zero=1", "dp=8"])
@pytest.mark.default_cases("fsdp=8,remat=blocks", "dp=8")
def test_gradients_that_are_sent_are_not_cast(strategy):
    program = spread(step(), f"{strategy},precision=bf16,bucket_mb=0.05")
    products = in_backward(program, WIDE)
    assert len(products) == 7 * LAYERS + 1 and all(node.meta["val"].dtype is torch.float32 for node in products)  # of the layers and the head
    (table,) = in_backward(program, aten.embedding_dense_backward.default)
    assert table.meta["val"].dtype is torch.float32
    for scatter in in_backward(program, SCATTER):
        gradient = _Gradient.scattered_by(scatter)
        casts = [node for node in gradient.way if node.target is aten._to_copy.default]
        assert not casts or scatter.meta["move"].tensors > 1, "norms' small gradients are cast, and share a message"


@pytest.mark.parametrize("strategy", ["", "tp=2", "fsdp=8,reduce_dtype=bf16"])
def test_gradients_that_are_not_sent_in_fp32_stay_narrow(strategy):
    program = spread(step(), f"{strategy},precision=bf16".lstrip(","))
    assert not in_backward(program, WIDE)
    (table,) = in_backward(program, aten.embedding_dense_backward.default)
    assert table.meta["val"].dtype is torch.bfloat16


def test_on_cpu_the_bits_stay(monkeypatch):
    """But for those of tables, which are not rounded: a model without one."""
    losses = []
    for run in (pipeline.WIDEN_GRADIENTS, Pass(name="nothing", exact=True, run=lambda step, log: step)):
        monkeypatch.setattr(pipeline, "WIDEN_GRADIENTS", run)
        model = compiled(zoo.MODELS["vit"]()[0], "fsdp=8,precision=bf16")
        losses.append(train(model, batches_of("vit", 3)))
        found = {node.target for program in model.programs for node in program.graph.graph.nodes}
        assert (WIDE in found) == (len(losses) == 1)
    assert losses[0] == losses[1]


def test_the_operator():
    x, y = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    assert torch.equal(WIDE(x, y), (x @ y).float())
    torch.library.opcheck(WIDE, (x, copy.deepcopy(y)), test_utils=("test_schema", "test_faketensor"))
