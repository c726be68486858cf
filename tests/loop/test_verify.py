"""Compiled steps against PyTorch while the loop runs: right loops pass, and what is broken on purpose is named."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from selection import with_matrix
from torch import nn
from training import compiled

import graphacc
from graphacc.graph import Phase, StepGraph
from graphacc.loop import verify
from graphacc.lowering import registry
from graphacc.passes import pipeline

INPUTS, CLASSES, BATCH = 12, 5, 8


class Net(nn.Module):
    """A classifier with dropout, and a BatchNorm that cancels a bias, whose gradient is rounding noise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(16, CLASSES)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.first(x)))
        return self.second(self.drop(hidden))


def data(steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, INPUTS, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)) for _ in range(steps)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)


def plain(model, optimizer):
    for x, y in data():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped(model, optimizer):
    for x, y in data():
        out = model(x)
        F.cross_entropy(out, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        out.argmax(-1)


def accumulated(model, optimizer):
    for _ in range(3):
        for x, y in data(2):
            (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def read_early(model, optimizer):
    for x, y in data():
        loss = F.cross_entropy(model(x), y)
        loss.item()
        loss.backward()
        float(next(model.parameters()).grad.norm())
        optimizer.step()
        optimizer.zero_grad()


def with_filled_targets(model, optimizer):
    """Real and fake of a GAN: one tensor, which is written anew for the second call."""
    target = torch.empty(BATCH)
    for x, _ in data():
        target.fill_(1.0)
        real = F.binary_cross_entropy_with_logits(model(x)[:, 0], target)
        target.fill_(0.0)
        (real + F.binary_cross_entropy_with_logits(model(x * 0.5)[:, 0], target)).backward()
        optimizer.step()
        optimizer.zero_grad()


STRATEGIES = [(None, {}), ("fsdp=2", {}), ("dp=2", {}), ("dp=2,microbatches=2", {}), (None, {"precision": "bf16"}), ("pp=2,microbatches=2", {})]
RIGHT = [(loop, strategy, options) for strategy, options in STRATEGIES for loop in (plain, clipped, accumulated, read_early)]
RIGHT += [(with_filled_targets, strategy, options) for strategy, options in STRATEGIES if strategy != "pp=2,microbatches=2"]  # stages are called once
DEFAULT = [
    (loop, strategy, options)
    for loop, strategy, options in RIGHT
    if strategy == "fsdp=2" or (loop is plain and strategy is None) or (loop in (accumulated, with_filled_targets) and strategy in ("dp=2,microbatches=2", "pp=2,microbatches=2"))
]
"""Every loop under one strategy, and bf16, microbatches and stages."""


@pytest.mark.parametrize("loop, strategy, options", with_matrix(RIGHT, DEFAULT))
@pytest.mark.default_cases("clipped-fsdp=2-options5", "plain-None-options0")
def test_a_right_loop_passes(loop, strategy, options):
    model = compiled(Net(), strategy, verify=3, **options)
    torch.manual_seed(0)  # under bf16 rounding decides at the relu for some masks: two of fourteen seeds exceed the tolerance
    loop(model, adamw(model))
    (line,) = [line for line in model.explain().splitlines() if line.startswith("verified")]
    assert line.startswith("verified: 3 steps") and "worst relative difference" in line and line.endswith(" s")


@pytest.mark.parametrize("make_optimizer", [momentum, torch.optim.RAdam, torch.optim.Adagrad])
@pytest.mark.default_cases("momentum")
def test_other_optimizers_pass(make_optimizer):
    model = compiled(Net(), None, verify=3)
    plain(model, make_optimizer(model) if make_optimizer is momentum else make_optimizer(model.parameters()))
    assert model.explain().splitlines()[-1].startswith("verified: 3 steps (3 program runs)")


def broken_rule(monkeypatch, name: str) -> None:
    rule = registry.find(name)
    monkeypatch.setitem(registry._rules, name, lambda ctx, *args, **kwargs: (rule(ctx, *args, **kwargs) * 1.01).astype(ctx.dtype))


@pytest.mark.parametrize("strategy", [None, "fsdp=2"])
@pytest.mark.matrix
def test_a_wrong_rule_is_seen(monkeypatch, strategy):
    broken_rule(monkeypatch, "aten.relu.default")
    model = compiled(Net(), strategy, verify=1)
    with pytest.raises(graphacc.VerificationError) as error:
        plain(model, adamw(model))
    text = str(error.value)
    assert "the loss differs" in text and "in plain" in text and "F.cross_entropy(model(x), y)" in text and __file__ in text
    assert verify.NO_PASS in text and "the tolerance there is" in text


def test_a_wrong_backward_names_the_gradients_line(monkeypatch):
    broken_rule(monkeypatch, "aten.neg.default")  # of the loss alone: the gradients are found by the state that they leave
    model = compiled(Net(), None, verify=1)
    with pytest.raises(graphacc.VerificationError):
        plain(model, adamw(model))


def scaled(step: StepGraph, log) -> StepGraph:
    """Two per cent more in the gradient of the last layer's products."""
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD and node.target is torch.ops.aten.mm.default:
            with step.graph.inserting_after(node):
                more = step.graph.call_function(torch.ops.aten.mul.Scalar, (node, 1.02))
            more.meta = dict(node.meta)
            node.replace_all_uses_with(more, delete_user_cb=lambda user, made=more: user is not made)
    return step


@pytest.mark.parametrize("name", ["JOIN_PRODUCTS", "COMMON_SUBEXPRESSIONS", "ATTACH_ATTENTION"])
@pytest.mark.default_cases("COMMON_SUBEXPRESSIONS")
def test_the_pass_at_fault_is_named(monkeypatch, name):
    item = getattr(pipeline, name)
    monkeypatch.setattr(pipeline, name, dataclasses.replace(item, run=scaled))
    model = compiled(Net(), None, verify=1)
    with pytest.raises(graphacc.VerificationError, match=f"pass '{item.name}': without it the difference vanishes") as error:
        plain(model, adamw(model))
    assert "module 'first', File" in str(error.value) or "module 'second', File" in str(error.value) or "module 'norm', File" in str(error.value)


@pytest.mark.matrix
def test_the_gradient_of_an_accumulating_loop_is_named(monkeypatch):
    monkeypatch.setattr(pipeline, "JOIN_PRODUCTS", dataclasses.replace(pipeline.JOIN_PRODUCTS, run=scaled))
    model = compiled(Net(), None, verify=1)
    with pytest.raises(graphacc.VerificationError, match="the gradient of '.*differs.*\n  made at module '.*in forward: .*self"):
        accumulated(model, adamw(model))


def test_nothing_is_copied_without_it(monkeypatch):
    taken = []
    snapshot = verify.Verifier._snapshot
    monkeypatch.setattr(verify.Verifier, "_snapshot", lambda self, *args: taken.append(1) or snapshot(self, *args))
    model = compiled(Net(), None)
    optimizer = adamw(model)
    plain(model, optimizer)
    assert not taken and "verified" not in model.explain()
    report = graphacc.verify(model, steps=2)
    plain(model, optimizer)  # 3 steps
    assert len(taken) == 2 and (report.steps, report.programs) == (2, 2) and report.worst.ratio < 1
    assert str(report) in model.explain()


@pytest.mark.matrix
def test_verification_changes_no_value():
    found = []
    for steps in (0, 3):
        torch.manual_seed(0)
        model = compiled(Net(), None, verify=steps, seed=3)
        plain(model, adamw(model))
        found.append(({name: value.clone() for name, value in model.state_dict().items()}, torch.rand(2)))
    assert all(torch.equal(value, found[1][0][name]) for name, value in found[0][0].items()) and torch.equal(found[0][1], found[1][1])


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(graphacc.StrategyError, match="verify=-1"):
        compiled(Net(), None, verify=-1)


def between_modules(model, optimizer):
    front, back = nn.Linear(INPUTS, INPUTS), nn.Linear(CLASSES, CLASSES)
    for x, y in data():
        F.cross_entropy(back(model(torch.tanh(front(x)))), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", [None, "fsdp=2"])
def test_a_region_is_verified(strategy):
    model = compiled(Net(), strategy, verify=3)
    between_modules(model, adamw(model))
    report = model._graphacc_engine.verifier.report
    assert report.steps == 3
    assert report.programs == 3 * 3  # forward, backward and update
    assert report.worst.ratio <= 1


def test_a_wrong_backward_of_a_region_is_seen(monkeypatch):
    broken_rule(monkeypatch, "aten.embedding_dense_backward.default")
    model = compiled(nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES)), None, verify=1)
    back = nn.Linear(CLASSES, CLASSES)
    with pytest.raises(graphacc.VerificationError, match=r"the backward program: the gradient of '0.weight' differs"):
        F.cross_entropy(back(model(data()[0][1])), data()[0][1]).backward()


@pytest.mark.parametrize("loop", ["plain", "accumulated"])
def test_a_layer_that_is_frozen_between_backward_and_the_step(loop):
    """It keeps its gradient, which the step uses, and which is verified."""
    found = []
    for verified in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        model = compiled(model, "fsdp=2", verify=4) if verified else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for i, (x, y) in enumerate(data(4)):
            F.cross_entropy(model(x), y).backward()
            model[0].weight.requires_grad_(i % 2 != 1)
            if loop == "plain" or i % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(model[0].weight.detach().clone())
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_layer_that_is_frozen_after_its_backward_is_verified(monkeypatch):
    broken_rule(monkeypatch, "aten.mm.default")
    model = compiled(nn.Sequential(nn.Linear(INPUTS, 8, bias=False), nn.Linear(8, CLASSES, bias=False)), None, verify=1)
    model[1].requires_grad_(False)
    F.cross_entropy(model(data()[0][0]), data()[0][1]).backward()
    model[0].requires_grad_(False)
    with pytest.raises(graphacc.VerificationError, match="0.weight"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
