"""A timm model, compiled: ``python -m graphacc.examples.timm``."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from graphacc.examples import run

Compile = Callable[[nn.Module], nn.Module]


def train(compile: Compile, name: str = "test_vit", steps: int = 3, size: int = 64, **options) -> tuple[nn.Module, list[float]]:
    """Train a model of timm's by name on random images with labels from 0 to 9; returns the model and the losses.

    Args:
        options: further arguments of ``timm.create_model``.
    """
    import timm

    torch.manual_seed(0)
    model = compile(timm.create_model(name, num_classes=10, **options).train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        images = torch.randn(8, 3, size, size, generator=generator)
        loss = F.cross_entropy(model(images), torch.randint(10, (8,), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


if __name__ == "__main__":
    run(train)
