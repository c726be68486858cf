"""Training under a pipeline gives what plain PyTorch gives: of the whole batch, or for some models accumulating over the same microbatches.

A covering choice: every schedule, two and four stages, every model family, and pipelines combined with dp, fsdp and tp.
"""

import pytest
import torch
import zoo
from pipelines import APART, batches_of, check_pipeline, compiled, with_layers
from selection import with_matrix

from graphacc.graph import Kind

CASES = [
    ("gpt2", 2, "pp=2,microbatches=4,schedule=gpipe"),
    ("gpt2", 4, "pp=4,microbatches=4,schedule=zb-h1"),
    ("llama", 4, "pp=2,microbatches=4,schedule=interleaved,chunks=2"),
    ("qwen3_moe", 2, "pp=2,microbatches=4,schedule=zb-h1"),
    ("t5", 2, "pp=2,microbatches=4"),
    ("vit", 2, "pp=2,microbatches=4"),
    ("bert", 2, "pp=2,microbatches=4"),
    ("resnet", 2, "pp=2,microbatches=4"),
    ("tied_mlp", 2, "pp=2,microbatches=4,schedule=zb-h1"),
]
DEFAULT = [CASES[0], CASES[2], CASES[7], CASES[8]]
"""Every schedule, decoders, BatchNorm, and tied weights."""


@pytest.mark.parametrize(("name", "layers", "strategy"), with_matrix(CASES, DEFAULT), ids=[f"{name}-{strategy}" for name, _, strategy in CASES])
@pytest.mark.default_cases("tied_mlp-pp=2,microbatches=4,schedule=zb-h1", "llama-pp=2,microbatches=4,schedule=interleaved,chunks=2")
def test_parity(name, layers, strategy):
    check_pipeline(with_layers(name, layers), batches_of(name), strategy, apart=name in APART)


WITH_DATA_AXES = [("gpt2", "pp=2,fsdp=2,microbatches=4,schedule=zb-h1"), ("llama", "pp=2,dp=2,fsdp=2,microbatches=2")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(WITH_DATA_AXES, WITH_DATA_AXES[1:]))
@pytest.mark.matrix
def test_parity_with_data_axes_and_clipping(name, strategy):
    model = check_pipeline(with_layers(name, 2), batches_of(name, 3, 16), strategy, max_norm=0.5)
    grads = next(c for c in model._graphacc_engine.programs._by_key.values() if c.kind == "grad")
    activation = 16 // model.strategy.microbatches * zoo.SEQ * zoo.HIDDEN * 4
    assert grads.transfer_bytes == {(0, 1): activation, (1, 0): activation}, "no gathered parameter crosses"
    update = next(c for c in model._graphacc_engine.programs._by_key.values() if c.kind == "update")
    made = {item.target: (p.stage, item) for p in update.programs for item in p.program.outputs if item.kind is Kind.CROSS}
    read = {(item.target, p.stage) for p in update.programs for item in p.program.inputs if item.kind is Kind.CROSS}
    sent = [made[target][1] for target, stage in read if made[target][0] != stage]
    assert len(sent) == 2 and all(len(item.shape) == 1 for item in sent), "clipping sends one vector of norms, and the scale back"


def test_an_update_sends_nothing_between_stages():
    """Small gradients are summed in one message of each stage, and so are what ZeRO-1 scatters of them and gathers of the new weights."""
    model = check_pipeline(with_layers("llama", 2), batches_of("llama", 2, 16), "pp=2,dp=2,fsdp=2,zero=1,microbatches=2")
    update = next(c for c in model._graphacc_engine.programs._by_key.values() if c.kind == "update")
    assert update.transfer_bytes == {} and len(update.programs) == 2


@pytest.mark.matrix
def test_bf16_trains_close_to_one_device():
    strategy = "pp=2,microbatches=4"
    one = compiled(with_layers("tied_mlp", 2), "microbatches=4", precision="bf16")
    two = compiled(with_layers("tied_mlp", 2), strategy, precision="bf16")
    losses = []
    for model in (one, two):
        optimizer = zoo.adamw(model)
        for batch in batches_of("tied_mlp", 2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    assert torch.allclose(torch.stack(losses[:2]), torch.stack(losses[2:]), rtol=2e-3)
