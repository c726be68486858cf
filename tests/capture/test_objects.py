"""Objects that a model returns, or is given: the loop gets objects of the same class with the same attributes."""

import copy
import dataclasses
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import assert_parity, compiled


@dataclasses.dataclass
class Out:
    loss: torch.Tensor
    logits: torch.Tensor
    extra: dict | None = None
    name: str = "out"


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    logits: torch.Tensor


class Pair(typing.NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Plain:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Slotted:
    __slots__ = ("logits", "loss")

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second, self.make = nn.Linear(6, 8), nn.Linear(8, 3), make

    def forward(self, batch, y=None):
        x, y = (batch.x, batch.y) if isinstance(batch, Batch) else (batch, y)
        logits = self.second(torch.tanh(self.first(x)))
        return self.make(F.cross_entropy(logits, y), logits)


def nested(loss, logits):
    return {"inner": [Out(loss, logits, {"twice": [Plain(loss * 2, logits * 2)]})]}


def generator(loss, logits):
    return (value for value in (loss, logits))


def zipped(loss, logits):
    return zip((loss,), (logits,), strict=True)


def unpacked(out):
    """(loss, logits) of anything that a model here returns."""
    if isinstance(out, dict):
        out = out["inner"][0]
        assert type(out) is Out and type(out.extra["twice"][0]) is Plain
        return out.extra["twice"][0].loss * 0.5, out.logits
    if hasattr(out, "loss"):
        return out.loss, out.logits
    found = list(out)
    return found if len(found) == 2 else found[0]


def train(model, batch_of=lambda x, y: (x, y), requires_grad=False, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)
        with torch.no_grad():
            losses.append(unpacked(model(*batch_of(x, y)))[1].sum().item())
        loss, logits = unpacked(model(*batch_of(x.requires_grad_(requires_grad), y)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), logits.detach().sum().item()]
    return losses


@pytest.mark.parametrize("make", [Out, Frozen, Pair, Plain, Slotted, nested, generator, zipped])
@pytest.mark.default_cases("Out", "Slotted")
def test_returned_objects(make):
    torch.manual_seed(0)
    reference = Returning(make)
    model = compiled(copy.deepcopy(reference), None)
    assert_parity(reference, model, train(reference), train(model), by_pytorch=make in (generator, zipped))
    if make not in (generator, zipped, nested):
        assert type(model(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))) is make


def test_returned_objects_of_a_call_with_a_gradient_of_its_input():
    torch.manual_seed(0)
    reference = Returning(Out)
    model = compiled(copy.deepcopy(reference), None)
    assert_parity(reference, model, train(reference, requires_grad=True), train(model, requires_grad=True))


def test_objects_that_are_given_are_run_by_pytorch():
    torch.manual_seed(0)
    reference = Returning(Out)
    model = compiled(copy.deepcopy(reference), None)
    losses = [train(m, lambda x, y: (Batch(x, y),)) for m in (reference, model)]
    assert_parity(reference, model, *losses, by_pytorch=True)
    assert "is a Batch, which a compiled program cannot see into" in model.explain()


@pytest.mark.lazy
def test_returned_objects_with_lazy_tensors():
    torch.manual_seed(0)
    reference = Returning(Out)
    model = compiled(copy.deepcopy(reference), None, capture="lazy")
    assert_parity(reference, model, train(reference), train(model))
