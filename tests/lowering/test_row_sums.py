"""The largest element and the sum of exponentials of rows: the kernel against PyTorch in fp64, and the cross-entropies that use it."""

import copy
import math
import re

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, RELATIVE, relative_error
from torch import nn
from training import compiled

from graphacc.lowering import row_sums
from graphacc.runtime.exchange import numpy_view

TOKENS, VOCABULARY = 96, 1000


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both results of the one call, and the sum that the second of two calls gives."""
    array = jnp.asarray(numpy_view(x))
    found, total = row_sums._sums_on_cpu(array)
    alone = row_sums._largest_on_cpu(array)
    assert (alone == found).all() or jnp.isnan(found).any()
    return tuple(torch.tensor(value.tolist()) for value in (found, total, row_sums._exponentials_on_cpu(array, found)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 15, 64, 1000, 1024, 1025, 5003])
def test_sums_of_rows(dtype: torch.dtype, columns: int):
    x = (20 * torch.randn(131, columns, generator=torch.Generator().manual_seed(columns))).to(dtype)
    x[3, 1:] = -math.inf
    x[4] = x[4] - 150  # all small
    found, total, again = run(x)
    wide = x.double()
    assert torch.equal(found.double(), wide.amax(1))
    expected = (wide - wide.amax(1, keepdim=True)).exp().sum(1)
    assert ((total.double() - expected) / expected).abs().max() <= 1e-6
    assert torch.equal(total, again)


@pytest.mark.parametrize("place", [0, 17, 999])
def test_what_is_not_finite_comes_through(place: int):
    x = torch.randn(4, 1000)
    x[0, place], x[1, place], x[2] = math.nan, math.inf, -math.inf
    found, total, again = run(x)
    assert relative_error(found, x.amax(1)) == 0.0
    assert relative_error(total, (x - x.amax(1, keepdim=True)).exp().sum(1)) <= 1e-6
    assert relative_error(again, total) == 0.0


class Classifier(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.options = options

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        logits = self.head(x + self.down(F.gelu(self.up(x)))) * 8
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **self.options)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCABULARY, (8, TOKENS // 8), generator=generator)
    labels[:, -1] = -100
    return {"ids": torch.randint(50, labels.shape, generator=generator), "labels": labels}


def calls(model: nn.Module) -> list[str]:
    return sorted(set(re.findall(r"gacc_row_\w+", model.programs[-1].program.hlo_text())))


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
@pytest.mark.default_cases("{}", "{'ignore_index': 3}")
def test_a_cross_entropy_reads_its_logits_once_for_both(options: dict):
    plain = Classifier(**options)
    if "reduction" in options:
        plain.head.weight.data.div_(8)
    model = compiled(copy.deepcopy(plain), None)
    given = batch()
    if "ignore_index" in options:
        given["labels"] = given["labels"].clamp(min=0)
    for step in range(3):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            loss = each(**given)
            loss.backward()
            losses.append(loss.item())
            gradients = [parameter.grad.clone() for parameter in each.parameters()]
            if each is plain:
                expected = gradients
        assert abs(losses[1] - losses[0]) <= LOSS * max(1.0, abs(losses[0])), step
        for (name, _), got, want in zip(plain.named_parameters(), gradients, expected):
            assert relative_error(got, want) <= RELATIVE[torch.float32], name
    assert calls(model) == ["gacc_row_sums"]


@pytest.mark.parametrize("strategy, devices, expected", [("dp=2", 2, ["gacc_row_sums"]), ("tp=2", 2, ["gacc_row_exponentials", "gacc_row_largest"])])
def test_under_strategies(strategy: str, devices: int, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_sums, "LEAST_ELEMENTS", TOKENS * VOCABULARY // 4)  # a device has half of the logits
    plain = Classifier()
    model = compiled(copy.deepcopy(plain), strategy, devices=devices)
    losses, want = train(model), train(plain)
    assert max(abs(a - b) for a, b in zip(losses, want)) <= LOSS * max(want)
    for (name, got), wanted in zip(model.named_parameters(), plain.parameters()):
        assert relative_error(got.detach(), wanted.detach()) <= PARAMETERS_AFTER_STEPS, name
    assert calls(model) == expected


def test_logits_of_half_precision_are_read_as_they_are():
    model = compiled(Classifier(), None, precision="bf16")
    losses, want = train(model), train(Classifier())
    assert abs(losses[0] - want[0]) <= RELATIVE[torch.bfloat16] * want[0]
    assert re.search(rf"gacc_row_sums.*operand_layout_constraints={{bf16\[{TOKENS},{VOCABULARY}\]", model.programs[-1].program.hlo_text())


class Others(nn.Module):
    """Reductions that look like it: the exponentials are read by more than the sum, or another dim is summed up, or another value is subtracted."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(TOKENS, VOCABULARY))

    def forward(self) -> torch.Tensor:
        x = self.weight
        softmax = x.softmax(1)
        columns = (x - x.amax(0, keepdim=True)).exp().sum(0, keepdim=True).log()
        shifted = (x - x.amax(1, keepdim=True) - 1.0).exp().sum(1, keepdim=True).log()
        other = (x - x.square().amax(1, keepdim=True)).exp().sum(1, keepdim=True).log()
        return softmax.square().sum() + columns.sum() + shifted.sum() + other.sum()


def test_other_reductions_are_left_alone():
    plain = Others()
    model = compiled(copy.deepcopy(plain), None)
    for each in (plain, model):
        each().backward()
    assert relative_error(model.weight.grad, plain.weight.grad) <= RELATIVE[torch.float32]
    assert calls(model) == []
