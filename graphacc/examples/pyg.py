"""A graph convolution of torch_geometric, trained on the whole graph: ``python -m graphacc.examples.pyg``."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from graphacc.examples import run

Compile = Callable[[nn.Module], nn.Module]


def train(compile: Compile, steps: int = 4) -> tuple[nn.Module, list[float]]:
    """Label 64 nodes of a random graph, half of which have labels; returns the model and the losses."""
    from torch_geometric.nn import GCNConv

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GCNConv(16, 32), GCNConv(32, 4)

        def forward(self, x, edges):
            return self.second(self.first(x, edges).relu(), edges)

    torch.manual_seed(0)
    model = compile(Network())
    x, edges, labels = torch.randn(64, 16), torch.randint(64, (2, 256)), torch.randint(4, (64,))
    labelled = torch.arange(64) % 2 == 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x, edges)[labelled], labels[labelled])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


if __name__ == "__main__":
    run(train)
