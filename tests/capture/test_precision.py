"""precision="bf16": bf16 matrix products, fp32 masters, gradients, losses and buffers."""

import copy

import pytest
import torch
import zoo
from capturing import Session, batch_values, joint_of, key, model_values, run
from selection import with_matrix
from tolerances import assert_close, relative_error
from torch import nn

import graphacc
from graphacc.graph import Kind

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.graphacc.sdpa.default,
}


def total_error(grads, exact):
    assert set(grads) == set(exact)
    return sum((grads[name].double() - exact[name].double()).square().sum().item() for name in exact) ** 0.5


@pytest.mark.parametrize("name", with_matrix(["gpt2", "mixtral", "t5", "resnet", "clip", "nn_transformer", "lstm_lm"], ["gpt2", "resnet", "lstm_lm"]))
@pytest.mark.default_cases("gpt2")
def test_bf16_is_as_close_to_fp32_as_torchs_own(name):
    model, kwargs = zoo.MODELS[name]()
    step = joint_of(model, kwargs, precision="bf16")
    products = [node for node in step.graph.nodes if node.target in PRODUCTS and node.meta["phase"].value == "forward"]
    narrow = [node for node in products if node.args[0].meta["val"].dtype is torch.bfloat16]
    assert len(narrow) > 0.8 * len(products)
    assert all(item.dtype is not torch.bfloat16 for item in (*step.inputs, *step.outputs))

    reference, narrow_eager = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    loss = reference(**kwargs).loss
    loss.backward()
    narrow_eager(
        **{k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in kwargs.items()}
    ).loss.backward()
    got = run(step, model_values(model, step) | batch_values(kwargs) | key())
    assert got[Kind.LOSS, "loss"].dtype is torch.float32
    assert relative_error(got[Kind.LOSS, "loss"], loss) < 1e-2
    captured = {target: grad for (kind, target), grad in got.items() if kind is Kind.GRAD}
    eager = {target: p.grad for target, p in narrow_eager.named_parameters() if p.grad is not None}
    exact = {target: p.grad for target, p in reference.named_parameters() if p.grad is not None}
    assert total_error(captured, exact) < 1.3 * total_error(eager, exact)
    for target, buffer in reference.named_buffers():
        if (Kind.BUFFER, target) in got:
            assert_close(got[Kind.BUFFER, target], buffer, tolerance=2e-2, what=target)


class Positions(nn.Module):
    """An fp32 table meets a bf16 activation before a matrix product."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(4))
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x, target):
        return nn.functional.mse_loss(self.layer(self.norm(x + self.table)), target)


def test_buffers_stay_fp32_and_mix():
    model = Positions()
    kwargs = {"x": torch.randn(8, 4), "target": torch.randn(8, 4)}
    step = joint_of(model, kwargs, precision="bf16")
    got = run(step, model_values(model, step) | batch_values(kwargs) | key())
    assert relative_error(got[Kind.LOSS, "loss"], model(**kwargs)) < 2e-2


def test_training_in_bf16_keeps_small_updates():
    """Updates of 1e-4 of a weight vanish in bf16 weights; with fp32 masters they add up."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    wrapped = Wrapped(model)
    x = torch.ones(2, 4)
    joint = joint_of(wrapped, {"x": x}, precision="bf16")
    assert all(out.dtype is torch.float32 for out in joint.outputs)
    session = Session(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-4), {"x": x})
    for _ in range(10):
        session.run({"x": x})
    assert torch.allclose(session.values[Kind.PARAM, "model.weight"], torch.tensor(1 - 10 * 1e-4), atol=1e-6)


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).mean()


class Times(nn.Module):
    """Floats of the batch that are times and indices: rounded to bf16, 257 is 256 and 999 is 1000."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1001, 16)
        self.out = nn.Linear(16, 4)
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, 16))

    def forward(self, times, target):
        waves = torch.sin(times[:, None] * self.frequencies)
        return times.long(), nn.functional.mse_loss(self.out(self.table(times.long()) + waves).float(), target)


@pytest.mark.parametrize("strategy", ["", "fsdp=2"])
def test_the_batch_is_as_exact_as_under_autocast(strategy):
    torch.manual_seed(0)
    model, times, target = Times(), torch.tensor([1.0, 257.0, 513.0, 999.0]), torch.full((4, 4), 1.003)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = reference(times, target)
    expected.backward()
    compiled = graphacc.compile(model, devices=2 if strategy else 1, strategy=strategy or None, precision="bf16", fast_compile=True)
    found, loss = compiled(times, target)
    loss.backward()
    assert found.tolist() == [1, 257, 513, 999]
    assert relative_error(loss.detach(), expected.detach()) < 2e-3
    for (name, got), want in zip(compiled.named_parameters(), reference.parameters()):
        assert_close(got.grad, want.grad, tolerance=2e-2, what=name)


@pytest.mark.parametrize("mode", ["before backward", "after the step", "no_grad"])
def test_results_have_the_dtype_that_they_were_promised_with(mode):
    """A bank of features with the dtype of what it holds, and NumPy, which has no bf16."""
    torch.manual_seed(0)
    model = graphacc.compile(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), devices=1, precision="bf16", fast_compile=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.set_grad_enabled(mode != "no_grad"):
        found = model(torch.randn(4, 8))
    bank = torch.zeros(4, 4, dtype=found.dtype)
    if mode == "before backward":
        bank[:] = found.detach()
    elif mode == "after the step":
        found.pow(2).mean().backward()
        optimizer.step()
        bank.index_copy_(0, torch.arange(4), found.detach())
    else:
        bank[torch.arange(4)] = found
    assert found.dtype is bank.dtype is torch.float32 and (found.detach().numpy() == bank.numpy()).all()
