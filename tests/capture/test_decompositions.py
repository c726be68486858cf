"""Operators that are broken up while tracing, trained beside plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from training import check_both, compiled


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.scale = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        return self.scores(x).softmax(-1), nn.functional.softplus(self.scale(x))


@pytest.mark.parametrize("strategy", [None, "dp=8"])
def test_distributions_check_their_arguments(strategy):
    """They ask `_is_all_true` of probabilities, scales and values, which nothing reads in a program."""
    reference = Policy()
    model = compiled(copy.deepcopy(reference), strategy, capture="fx")
    batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(3)]

    def loss(one, step):
        x, action = batches[step]
        probs, scale = one(x)
        return -(torch.distributions.Categorical(probs).log_prob(action) + torch.distributions.Normal(probs[:, :1], scale).log_prob(x).sum(-1)).mean()

    check_both(reference, model, loss, steps=3)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * torch._is_all_true(y.abs() < 100) + y.square() * torch._is_any_true(x > 1)


@pytest.mark.parametrize("strategy", [None, "fsdp=8"])
def test_all_and_any_of_a_whole_tensor(strategy):
    reference = Switched()
    model = compiled(copy.deepcopy(reference), strategy, capture="fx")
    batches = [torch.randn(8, 4), torch.rand(8, 4)]
    check_both(reference, model, lambda one, step: one(batches[step]).mean(), steps=2)
