"""Expert parallelism: parity with plain PyTorch, where experts lie, and what the compiled program communicates."""

import pytest
import torch
import zoo
from selection import with_matrix
from training import batches_of, check_parity, compiled, train

from graphacc import P
from graphacc.capture import functions
from graphacc.errors import StrategyError
from graphacc.report import communication

ROWS = 8 * zoo.SEQ * 2  # a batch of 8, 2 experts per token


CASES = [
    ("mixtral", "ep=4"),
    ("mixtral", "ep=2,fsdp=2"),
    ("qwen3_moe", "ep=2"),
    ("qwen3_moe", "ep=2,tp=2"),
    ("qwen3_moe", "ep=2,cp=2"),
]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(CASES, [CASES[0], CASES[3]]))
@pytest.mark.default_cases("mixtral-ep=4")
def test_training_equals_plain_pytorch(name, strategy):
    model = check_parity(name, strategy)
    ep, others = model.strategy.ep, model.strategy.cp * model.strategy.fsdp
    rows = ROWS * zoo.HIDDEN * 4 // others
    sizes = [size for item in communication(model).select("all-to-all", "ep").collectives for size in item.tensor_bytes]
    large = [size for size in sizes if size >= rows // 2]
    assert large == [rows] * 8, f"per layer two exchanges of rows forward and two backward, got {sizes}"
    decided = {tensor.name: tensor for tensor in model.strategy.tensors}
    experts = [tensor for tensor in decided.values() if ".experts." in tensor.name]
    assert len(experts) == 4 and all(tensor.spec.startswith("ep") and tensor.decided_by.startswith("policy") for tensor in experts)
    others = [tensor for tensor in decided.values() if tensor not in experts]
    assert all(("ep" in tensor.spec) == ("ZeRO" in tensor.reason) == (model.strategy.zero_stage == 3) for tensor in others)
    assert all(("ZeRO" in tensor.reason) == (model.strategy.fsdp > 1) for tensor in experts)
    assert all(tensor.shape[0] % ep == 0 and "one matrix per expert" in tensor.reason for tensor in experts)


@pytest.mark.matrix
def test_capacity_drops_rows():
    """The loss is near that of all rows, and training goes on."""
    name, batches = "mixtral", batches_of("mixtral", steps=3)
    torch.manual_seed(0)
    reference, _ = zoo.MODELS[name]()
    expected = train(reference, batches)
    model, _ = zoo.MODELS[name]()
    model = compiled(model, "ep=2,capacity_factor=1.0")
    losses = train(model, batches)
    assert all(0 < abs(got - want) < 0.2 * want for got, want in zip(losses, expected))


@pytest.mark.parametrize(("name", "spec"), [("*.gate_up_proj", P(None, "ep")), ("lm_head.weight", P("ep"))])
@pytest.mark.default_cases("lm_head.weight-spec1")
def test_annotations_that_ep_cannot_follow(name, spec):
    model, batch = zoo.MODELS["mixtral"]()
    model = compiled(model, "ep=2", annotations={name: spec})
    with pytest.raises(StrategyError, match="over ep, which splits dim 0 of the weights of experts and nothing else"):
        train(model, [batch])


def test_a_model_without_experts():
    model, batch = zoo.MODELS["gpt2"]()
    model = compiled(model, "ep=2")
    with pytest.raises(StrategyError, match="ep=2 spreads experts over devices, but no grouped product"):
        train(model, [batch])


def test_experts_of_an_older_transformers_are_captured(monkeypatch):
    """Whose grouped product has a backward that asks how many rows each expert has, and is no operator."""
    monkeypatch.setattr(functions, "_has_backward", lambda: False)
    model = check_parity("mixtral", "ep=4")
    assert not model._graphacc_engine.by_pytorch.counts
