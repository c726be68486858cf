"""Losses with another form in every batch (numbers of boxes, of pairs, of terms): some whole programs, and then the model compiled and its loss by PyTorch."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from selection import with_matrix
from torch import nn
from training import compiled

from graphacc.loop import loss_forms

FORMS = 2


@pytest.fixture(autouse=True)
def few_forms(monkeypatch):
    monkeypatch.setattr(loss_forms, "MAX_LOSS_FORMS", FORMS)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.norm, self.dropout = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.25)
        self.kind, self.box = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x):
        h = self.dropout(torch.relu(self.norm(self.trunk(x))))
        return self.kind(h), self.box(h)


def targets(step):
    """Of a number of rows that differs from step to step: rows, kinds, boxes."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randperm(8, generator=generator)[: 1 + step % 6]
    return rows, torch.randint(0, 3, (len(rows),), generator=generator), torch.rand(len(rows), 4, generator=generator)


def picked(model, step, optimizer):
    kinds, boxes = model(batch(step))
    rows, kind, box = targets(step)
    return F.cross_entropy(kinds[rows], kind) + F.l1_loss(boxes[rows], box)


def terms(model, step, optimizer):
    """A term for each row, of a number that differs."""
    kinds, boxes = model(batch(step))
    return sum(F.cross_entropy(kinds[row], kind) + (boxes[row] - box).abs().mean() for row, kind, box in zip(*targets(step)))


def matched(model, step, optimizer):
    """The rows are chosen by what the model gives, which is read before backward."""
    kinds, boxes = model(batch(step))
    _, kind, box = targets(step)
    with torch.no_grad():
        rows = (torch.cdist(boxes, box) - kinds.softmax(-1)[:, kind]).numpy().argmin(0)
    loss = F.cross_entropy(kinds[torch.as_tensor(rows)], kind) + F.l1_loss(boxes[torch.as_tensor(rows)], box)
    loss.item()
    return loss


def batch(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + step))


def train(model, loss_of, steps, accumulate):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        loss = loss_of(model, step, optimizer)
        loss.backward()
        losses.append(loss.item())
        if step % accumulate == accumulate - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, optimizer


@pytest.mark.parametrize(
    ("loss_of", "accumulate", "strategy"), with_matrix(itertools.product([picked, terms, matched], [1, 2], [None, "fsdp=2,zero=3"]), [(matched, 2, None)])
)
def test_forms_are_bounded_and_equal_pytorch(loss_of, accumulate, strategy, caplog):
    torch.manual_seed(2)
    reference = Detector()
    reference.dropout.p = 0.0  # the masks of compiled calls are other ones
    model = compiled(copy.deepcopy(reference), strategy)
    expected, _ = train(reference, loss_of, 8, accumulate)
    losses, optimizer = train(model, loss_of, 8, accumulate)
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, got), (_, want) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    before = len(model._graphacc_engine.programs.compiled)
    for step in range(8, 12):
        loss_of(model, step, optimizer).backward()
    assert len(model._graphacc_engine.programs.compiled) == before, model.explain()
    assert sum("what the loop computes of the model's results runs by PyTorch" in text for text in caplog.messages) == 1
    assert "more than 2 forms" in model.explain() and "Detector runs compiled, as a function of PyTorch's autograd" in model.explain()


def test_dropout_is_that_of_the_step():
    """The masks of a region's backward are those of its forward: a model that runs by itself learns."""
    torch.manual_seed(2)
    model = compiled(Detector(), None)
    losses, _ = train(model, lambda model, step, optimizer: picked(model, step % 3, optimizer), 60, 1)
    assert sum(losses[-6:]) < 0.6 * sum(losses[:6])


@pytest.mark.parametrize("options", [{"strategy": "microbatches=2"}, {"capture": "fx"}], ids=str)
def test_where_the_user_wants_programs_or_a_region_cannot_be(options):
    """Every form is compiled, as before."""
    model = compiled(Detector(), **{"strategy": None} | options)
    model.dropout.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        kinds, boxes = model(batch(step))
        loss = kinds.mean() + (boxes[..., : 1 + step]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "function of PyTorch's autograd" not in model.explain() and len(model._graphacc_engine.programs.compiled) >= 4


def test_draws_behind_the_model_are_compiled():
    """Where the loop draws random numbers of a result, their place is the program's."""
    model = compiled(Detector(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        kinds, _ = model(batch(step))
        loss = F.dropout(kinds[:, :1].repeat(1, 1 + step), 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "function of PyTorch's autograd" not in model.explain() and len(model._graphacc_engine.programs.compiled) >= 4
