"""Calls that a recording knows from the one before (`Tape.follow`): the same numbers as PyTorch's where steps are alike, and where they stop being so."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from tolerances import PARAMETERS_AFTER_STEPS, relative_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import compiled

STEPS = 7


def clipped(step: int, model: nn.Module, loss: Tensor) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05 if step in (3, 4) else 0.5)


def in_turn(step: int, model: nn.Module, loss: Tensor) -> object:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
        if step % 2:
            parameter.grad.add_(parameter.detach(), alpha=0.1)
    return sum(parameter.grad.sum() for parameter in model.parameters())


def by_form(step: int, model: nn.Module, loss: Tensor) -> object:
    said = []
    for parameter in model.parameters():
        grad = parameter.grad
        turned = grad.t() if grad.dim() == 2 else grad
        said.append((turned.shape, turned.stride(), turned.is_contiguous(), turned.numel(), turned.device.type, turned.dtype, len(turned), turned.size(-1), grad.stride(0)))
        turned.mul_(1 + 1 / turned.shape[0])
    return said


def of_other_types(step: int, model: nn.Module, loss: Tensor) -> object:
    factor = [1, 1.0, True, 2, 1, 1.0, True][step]
    results = []
    for parameter in model.parameters():
        counted = (parameter.grad > 0).sum().clamp(min=factor)
        results.append((counted, counted.dtype))
    return results


def with_gradients_on(step: int, model: nn.Module, loss: Tensor) -> object:
    with torch.set_grad_enabled(step % 3 != 0):
        norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
        return norms.max(), norms.requires_grad


def under_a_mode(step: int, model: nn.Module, loss: Tensor) -> object:
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, first = [], model[0].weight.grad.abs().sum()
    with Counts() if step == 4 else contextlib.nullcontext():
        total = sum(parameter.grad.square().sum() for parameter in model.parameters())
    return first, total, sum("pow" in str(func) for func in seen)


def replaced(step: int, model: nn.Module, loss: Tensor) -> object:
    if step == 3:
        model[0].weight.grad = model[0].weight.grad.clone().zero_()
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.01, 0.01)
    if step == 5:
        model[2].bias.grad = None
    return loss.detach() * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2.0

    @staticmethod
    def backward(context, grad):
        return grad * 3.0


def plain_loss(step: int, output: Tensor) -> Tensor:
    return output.square().mean()


def applied_loss(step: int, output: Tensor) -> Tensor:
    halved = output * 0.5
    return (Doubled.apply(halved) if step % 3 != 1 else halved * 2.0).square().mean()


def looked_at_loss(step: int, output: Tensor) -> Tensor:
    """What one step computes beside its loss is the forward of a function in the next."""
    if step % 2:
        return Doubled.apply(output).square().mean()
    with torch.no_grad():
        doubled = output * 2.0
    return (output.square() * doubled).mean()


def written_loss(step: int, output: Tensor) -> Tensor:
    """Read, written, and read again."""
    noted = output.detach() * 1.0
    before = noted.tolist()[0][0]
    noted.add_(1.0)
    return output.square().mean() * (1.0 + abs(noted.tolist()[0][0] - before)) + noted.sum() * 0.0


def chained_loss(step: int, output: Tensor) -> Tensor:
    parts = output.reshape(-1).split(6)
    scaled = [part.tanh() * (0.5 if step < 4 else 0.25) for part in parts]
    return torch.cat(scaled).sum() / output.shape[0] + (output.mean() if step == 2 else 0.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def plain(said: object) -> object:
    """Results as numbers."""
    if isinstance(said, Tensor):
        return said.detach().double().tolist()
    return [plain(part) for part in said] if isinstance(said, (list, tuple)) and not isinstance(said, torch.Size) else said


def train(model: nn.Module, loss_of: Callable, on_gradients: Callable) -> list:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    for step in range(STEPS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        loss = loss_of(step, model(x))
        loss.backward()
        result = on_gradients(step, model, loss)
        optimizer.step()
        optimizer.zero_grad()
        said.append([plain(loss), plain(result)])
    return said


def close(got: object, want: object) -> bool:
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(close, got, want))
    if isinstance(want, float):
        return abs(got - want) <= 1e-5 * max(1.0, abs(want))
    return type(got) is type(want) and got == want


@pytest.mark.parametrize("loss_of", [plain_loss, applied_loss, chained_loss, looked_at_loss, written_loss])
@pytest.mark.parametrize("on_gradients", [clipped, in_turn, by_form, of_other_types, with_gradients_on, under_a_mode, replaced])
def test_steps_that_are_alike_and_those_that_are_not(loss_of: Callable, on_gradients: Callable):
    eager = net()
    model = compiled(copy.deepcopy(eager), None)
    want, got = (train(each, loss_of, on_gradients) for each in (eager, model))
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert close(ours, theirs), (step, ours, theirs)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert relative_error(ours.detach(), theirs.detach()) <= PARAMETERS_AFTER_STEPS, name
