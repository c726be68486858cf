"""Indices and labels in the batch that are out of range raise before anything changes, where PyTorch raises; those that PyTorch takes are taken."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import compiled

import graphacc

ROWS, WORDS, CLASSES = 8, 10, 5


class Indexing(nn.Module):
    """Uses labels in different ways."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, CLASSES)
        self.register_buffer("shifted", torch.arange(1, WORDS + 1))

    def forward(self, x, y=None, way=None):
        scores = self.head(self.embedding(x))
        match way:
            case "shifted labels":
                return F.cross_entropy(scores[:-1], F.pad(y, (0, 1), value=-100)[1:-1].contiguous().view(-1))
            case "smoothed":
                return F.cross_entropy(scores, y, label_smoothing=0.1)
            case "gather":
                return scores.gather(1, (y * 2 - y)[:, None]).sum()
            case "index_select":
                return scores.index_select(1, y).sum()
            case "index":
                return scores[torch.arange(ROWS), y].sum()
            case "one_hot":
                return (scores * F.one_hot(y, CLASSES)).sum()
            case "scatter":
                return (scores * torch.zeros(ROWS, CLASSES).scatter_(1, y[:, None], 1.0)).sum()
        return scores


def labels(value=None):
    y = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    if value is not None:
        y[3] = value
    return y


def train(model, batches, way):
    """Losses; "raises" where a batch is refused."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, x = [], torch.arange(ROWS)
    for y in batches:
        optimizer.zero_grad()
        try:
            loss = F.cross_entropy(model(x), y) if way == "in the loop" else model(x, y, way)
        except (IndexError, RuntimeError):
            losses.append("raises")
            continue
        loss.backward()
        optimizer.step()
        losses.append(pytest.approx(loss.item(), rel=1e-5))
    return losses


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    reference = Indexing()
    return reference, compiled(copy.deepcopy(reference), None)


@pytest.mark.parametrize("way", ["in the loop", "shifted labels", "smoothed", "gather", "index_select", "index", "one_hot", "scatter"])
@pytest.mark.default_cases("in the loop", "index_select")
def test_what_pytorch_refuses_is_refused(pair, way):
    reference, model = pair
    model.load_state_dict(reference.state_dict())
    batches = [labels(), *(labels(value) for value in (CLASSES, -1, -CLASSES - 1, -100)), labels()]
    expected = train(reference, batches, way)
    assert "raises" in expected
    assert train(model, batches, way) == expected
    assert not model._graphacc_engine.by_pytorch.counts
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_the_error_says_line_value_and_bounds_and_nothing_has_changed(pair):
    _, model = pair
    model.zero_grad()
    model(torch.arange(ROWS)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    with pytest.raises(graphacc.BatchIndexError, match=r"(?s)embedding: the index 10 .* at least 0 and less than 10.*test_bounds.py.*self.embedding\(x\)") as found:
        model(torch.arange(ROWS) + 5)
    assert isinstance(found.value, IndexError)
    assert all(p.grad.equal(gradients[name]) for name, p in model.named_parameters())
    model.zero_grad()


def test_indices_without_the_batch_are_checked_when_they_are_recorded():
    class Positions(Indexing):
        def forward(self, x):
            return self.embedding(torch.arange(len(x))).sum() + self.embedding(self.shifted[:3]).sum()

    model = compiled(Positions(), None)
    model(torch.zeros(WORDS)).backward()
    with pytest.raises(graphacc.BatchIndexError, match="the index 10 in the batch"):
        model(torch.zeros(WORDS + 1))
    model.shifted.add_(WORDS - 3)
    with pytest.raises(graphacc.BatchIndexError, match="the index 10 in the batch"):
        model(torch.zeros(WORDS - 1))


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2,microbatches=2", "fsdp=2,microbatches=2"])
@pytest.mark.default_cases("fsdp=2,microbatches=2")
def test_under_strategies(strategy):
    model = compiled(Indexing(), strategy)
    losses = train(model, [labels(), labels(CLASSES), labels(-100), labels()], "shifted labels" if strategy == "dp=2" else "in the loop")
    assert [loss == "raises" for loss in losses] == [False, True, False, False]


def test_of_this_process_s_part_of_the_batch():
    """`batch="local"`: what the process gives is checked; operators on the way were noted for the whole batch, and must only move elements."""
    model = compiled(Indexing(), "dp=2", batch="local")
    losses = train(model, [labels(), labels(CLASSES), labels(-100), labels()], "shifted labels")
    assert [loss == "raises" for loss in losses] == [False, True, False, False]


@pytest.mark.parametrize("divide", [torch.remainder, torch.floor_divide, lambda a, b: torch.div(a, b, rounding_mode="trunc")])
def test_integers_of_the_batch_are_not_divided_by_zero(divide):
    class Dividing(torch.nn.Linear):
        def forward(self, x, a, b):
            return super().forward(x).sum(), divide(a, b)

    model, a, b = compiled(Dividing(2, 2), None), torch.tensor([5, 6]), torch.tensor([2, 1])
    with torch.no_grad():
        assert model(torch.ones(2, 2), a, b)[1].tolist() == divide(a, b).tolist()
        with pytest.raises(graphacc.BatchValueError, match="(?s)ZeroDivisionError.*remedy"):
            model(torch.ones(2, 2), a, b - 1)
        assert model(torch.ones(2, 2), a, -b)[1].tolist() == divide(a, -b).tolist()


class Scattering(nn.Module):
    """Puts values into the places of a mask that is repeated along the rows, as models of images and text do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, ids, values):
        mask = (ids == 3)[:, None].expand(ROWS, 4)
        return F.mse_loss(self.linear(x).masked_scatter(mask, values), x)


@pytest.mark.parametrize("strategy", [None, "fsdp=2"])
@pytest.mark.default_cases("None")
def test_a_mask_with_more_true_elements_than_values_is_refused(strategy):
    torch.manual_seed(0)
    reference = Scattering()
    model = compiled(copy.deepcopy(reference), strategy)
    x, ids, outcomes = torch.randn(ROWS, 4), torch.tensor([3, 0, 3, 1, 3, 3, 2, 0]), []
    for one in (reference, model):
        optimizer, found = torch.optim.SGD(one.parameters(), lr=0.1), []
        for given, number in ((ids, 4), (ids, 5), (ids, 3), (ids * 3, 4), (ids.clamp(0, 2), 4), (ids.clamp(0, 2), 0), (ids, 4)):
            optimizer.zero_grad()
            try:
                loss = one(x, given, torch.ones(number, 4))
            except RuntimeError as error:
                found.append(type(error))
                continue
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        outcomes.append(found)
    expected, found = outcomes
    assert expected.count(RuntimeError) == found.count(graphacc.BatchValueError) == 1
    assert found == [graphacc.BatchValueError if loss is RuntimeError else pytest.approx(loss, rel=1e-5) for loss in expected]
    assert not model._graphacc_engine.by_pytorch.counts
