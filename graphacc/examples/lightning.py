"""Lightning with a compiled module, by automatic and by manual optimisation: ``python -m graphacc.examples.lightning``."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from graphacc.examples import run

Compile = Callable[[nn.Module], nn.Module]


def data(rows: int = 40, batch: int = 16) -> DataLoader:
    """Rows of 8 numbers and what a fixed layer makes of them; the last batch is smaller."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x @ torch.randn(8, 4, generator=generator)).tanh()), batch_size=batch)


def train(compile: Compile, manual: bool = False, epochs: int = 2) -> tuple[nn.Module, list[float]]:
    """Fit; returns the model and the losses.

    Args:
        manual: the module itself calls backward and step, with clipping.
    """
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = compile(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)))
            self.automatic_optimization = not manual
            self.losses = []

        def training_step(self, batch, number):
            x, y = batch
            loss = F.mse_loss(self.model(x), y)
            self.losses.append(loss.detach())
            if manual:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    quiet: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        module = Regression()
        clip: dict[str, Any] = {} if manual else {"gradient_clip_val": 0.5}
        lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **clip, **quiet).fit(module, data())
    return module.model, [loss.item() for loss in module.losses]


if __name__ == "__main__":
    run(train)
