"""Ranges of torch.profiler in a model's code and around an optimizer's step leave the program as it is."""

import copy

import torch
from tolerances import LOSS, assert_close
from torch import nn

import graphacc


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        with torch.profiler.record_function("the layer"):
            return self.layer(x)


def test_ranges_in_a_forward():
    torch.manual_seed(0)
    plain = Named()
    model = graphacc.compile(copy.deepcopy(plain), devices=1)
    losses = []
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            loss = one(torch.ones(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert_close(torch.tensor(losses[3:]), torch.tensor(losses[:3]), tolerance=LOSS)
    assert "runs by PyTorch" not in model.explain()
