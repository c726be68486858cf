"""Code on gradients, such as clipping, between backward and the steps of two optimizers, each of which has a part of the parameters."""

import itertools
from collections.abc import Callable

import pytest
import torch
from selection import each_once, with_matrix
from torch import Tensor, nn

import graphacc

Parameters = list[nn.Parameter]


def each(change: Callable[[Tensor], object]) -> Callable[[Parameters], None]:
    def run(parameters: Parameters) -> None:
        for p in parameters:
            assert p.grad is not None
            change(p.grad)

    return run


def weight_decay(parameters: Parameters) -> None:
    for p in parameters:
        p.grad.add_(p.detach(), alpha=0.1)


def assigned(parameters: Parameters) -> None:
    for p in parameters:
        p.grad = p.grad * 3


CODE: dict[str, Callable[[Parameters], object]] = {
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01),
    "clip_grad_norm_ one by one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, foreach=False),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    "add_": each(lambda gradient: gradient.add_(0.5)),
    "element": each(lambda gradient: gradient.view(-1)[:1].zero_()),
    "weight decay": weight_decay,
    "assigned": assigned,
    "the last alone": lambda parameters: parameters[-1].grad.mul_(3),
}


def train(code: Callable[[Parameters], object], accumulate: int, **options) -> tuple[list[float], Parameters]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    if options:
        model = graphacc.compile(model, **options)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.05), torch.optim.SGD(parameters[2:], lr=0.05)]  # Adam would divide a lost factor out again
    losses = []
    for step in range(3):
        for micro in range(accumulate):
            batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step * accumulate + micro))
            loss = model(batch).square().mean()
            loss.backward()
        code(parameters)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in parameters]


FACTORS = list(CODE), (1, 2), ("dp=1", "fsdp=8")


@pytest.mark.parametrize(("code", "accumulate", "strategy"), with_matrix(itertools.product(*FACTORS), each_once(*FACTORS)))
def test_both_steps_use_what_the_code_gives(code: str, accumulate: int, strategy: str):
    options = {"strategy": strategy, "devices": int(strategy[-1])}
    expected, found = train(CODE[code], accumulate), train(CODE[code], accumulate, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
