"""Losses of classes in uint8, which PyTorch takes: in the model and in the loop, in both captures."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import compiled

CLASSES = torch.tensor([156, 255, 3, 0, 7, 254, 255, 156], dtype=torch.uint8)
"""156 is -100 in a byte."""


class InModel(nn.Module):
    def __init__(self, ignored):
        super().__init__()
        self.head, self.ignored = nn.Linear(8, 300), ignored

    def forward(self, x, classes):
        return F.cross_entropy(self.head(x), classes, ignore_index=self.ignored)


class InLoop(InModel):
    def forward(self, x, classes):
        return self.head(x)


@pytest.mark.parametrize("ignored", [-100, 255, 0])
@pytest.mark.parametrize("capture", ["fx", pytest.param("lazy", marks=pytest.mark.lazy)])
@pytest.mark.parametrize("model", [InModel, InLoop])
def test_the_loss_is_that_of_numbers(model, capture, ignored):
    torch.manual_seed(0)
    plain, x = model(ignored), torch.randn(8, 8)
    found = []
    for each in (plain, compiled(copy.deepcopy(plain), None, capture=capture)):
        loss = each(x, CLASSES)
        loss = loss if model is InModel else nn.NLLLoss(ignore_index=ignored)(loss.log_softmax(1), CLASSES)
        loss.backward()
        found.append((loss.item(), each.head.weight.grad.clone()))
    assert abs(found[1][0] - found[0][0]) <= 1e-6 * abs(found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-7)
