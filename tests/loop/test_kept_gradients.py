"""Gradients that a loop holds beyond ``zero_grad(set_to_none=False)`` or the next backward, to which PyTorch adds in place."""

import itertools
from collections.abc import Callable

import pytest
import torch
from selection import each_once, with_matrix
from torch import Tensor, nn

import graphacc
from graphacc.loop.execution import Execution

STEPS = 4


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def flat(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Every gradient becomes a part of one tensor."""
    whole, at = torch.zeros(sum(p.numel() for p in parameters)), 0
    for p in parameters:
        part = whole[at : at + p.numel()].view(p.shape)
        p.grad, at = part.copy_(p.grad), at + p.numel()
    return [whole]


KEPT: dict[str, Callable[[list[nn.Parameter]], list]] = {
    "themselves": gradients,
    "detached": lambda parameters: [g.detach() for g in gradients(parameters)],
    "data": lambda parameters: [g.data for g in gradients(parameters)],
    "views": lambda parameters: [g.view(-1)[:1] for g in gradients(parameters)],
    "numpy": lambda parameters: [g.numpy() for g in gradients(parameters)],
    "one of them": lambda parameters: gradients(parameters)[1:2],
    "flat": flat,
}


def train(kept: str, *, accumulate: int, writes: bool, compiled: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    if compiled:
        model = graphacc.compile(model, strategy="dp=1", devices=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    held, found = None, []
    for step in range(STEPS):
        for micro in range(accumulate):
            draws = torch.Generator().manual_seed(step * accumulate + micro)
            loss = model(torch.randn(16, 8, generator=draws)).square().mean()
            loss.backward()
            held = held or KEPT[kept](parameters)
        if writes:
            for gradient in held:
                gradient *= 0.5
        found += [float(abs(gradient).sum()) for gradient in held]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found += [float(abs(gradient).sum()) for gradient in held]
        found.append(loss.item())
    return found, [p.detach().clone() for p in parameters]


FACTORS = list(KEPT), (1, 2), (False, True)


@pytest.mark.parametrize(("kept", "accumulate", "writes"), with_matrix(itertools.product(*FACTORS), each_once(*FACTORS)))
def test_kept_gradients_are_those_of_every_backward(kept: str, accumulate: int, writes: bool):
    expected, found = (train(kept, accumulate=accumulate, writes=writes, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_that_nobody_holds_any_more_cost_nothing(monkeypatch):
    """Before and after the only read of a gradient the steps are whole programs."""
    model = graphacc.compile(nn.Linear(4, 1), strategy="dp=1", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_step, whole = Execution.run_step, []
    monkeypatch.setattr(Execution, "run_step", lambda *args: (whole.append(step), run_step(*args)))
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if step == 1:
            assert model.weight.grad.sum().item() == 8.0
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert whole == [0, 2, 3]


def test_clearing_some_gradients_that_a_step_consumed_and_some_that_are_ordinary():
    model = graphacc.compile(nn.Linear(4, 1), strategy="dp=1", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = None
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        held = held if held is not None else model.bias.grad
        optimizer.step()
        torch._foreach_zero_([p.grad for p in model.parameters()])
        assert held.item() == 0.0
    torch.testing.assert_close(model.weight.grad, torch.zeros(1, 4))
