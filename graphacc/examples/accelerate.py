"""accelerate with a compiled model, clipping, accumulation and a scheduler: ``python -m graphacc.examples.accelerate``."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from graphacc.examples import run

Compile = Callable[[nn.Module], nn.Module]


def train(compile: Compile, epochs: int = 2) -> tuple[nn.Module, list[float]]:
    """Train on 32 rows of 16 each, two batches per step; returns the model and the losses of the batches."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = compile(nn.Sequential(nn.Embedding(16, 32), nn.GELU(), nn.Linear(32, 16)))
    tokens = torch.arange(64 * 8).view(64, 8) % 16
    loader = DataLoader(TensorDataset(tokens), batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(epochs):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


if __name__ == "__main__":
    run(train)
