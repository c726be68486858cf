"""Training under a pipeline, compared with plain PyTorch: on the whole batch, or accumulating over the same microbatches where these cannot but stand for themselves."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
import zoo
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, relative_error
from torch import nn
from training import compiled as compiled_for_tests
from zoo import adamw

import graphacc

STEPS = 5
MICROBATCHES = 4


class Blocks(nn.Module):
    """Four blocks with BatchNorm and, if asked for, dropout; the first ones can be frozen."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return zoo.Output(F.cross_entropy(logits, y), logits)


def data(steps: int, batch: int = 16) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(batch, 16, generator=generator), "y": torch.randint(4, (batch,), generator=generator)}
        for _ in range(steps)
    ]


def with_layers(name: str, num_layers: int) -> nn.Module:
    """A zoo model with another number of layers."""
    before, zoo.LAYERS = zoo.LAYERS, num_layers
    decoder, encoder = zoo._DECODER, zoo._ENCODER
    zoo._DECODER = {**decoder, "num_hidden_layers": num_layers}
    zoo._ENCODER = {**encoder, "num_hidden_layers": num_layers}
    try:
        return zoo.MODELS[name]()[0]
    finally:
        zoo.LAYERS, zoo._DECODER, zoo._ENCODER = before, decoder, encoder


def compiled(model: nn.Module, strategy: str | graphacc.Strategy, **options) -> nn.Module:
    """Compiled quickly: XLA's own memory plan."""
    return compiled_for_tests(model, strategy, **{"memory_plan": "xla"} | options)


def split(batch: dict, count: int) -> list[dict]:
    chunks = {name: value.chunk(count) if isinstance(value, torch.Tensor) else [value] * count for name, value in batch.items()}
    return [{name: parts[i] for name, parts in chunks.items()} for i in range(count)]


APART = {"mixtral", "qwen3_moe", "resnet", "clip"}
"""Models of the zoo whose loss needs of the whole batch what parameters decide: how evenly tokens go to experts, statistics of BatchNorm, pairs of examples."""


def accumulate(
    model: nn.Module, batches: list[dict], make_optimizer: Callable, count: int = 1, max_norm: float | None = None
) -> list[float]:
    """Plain PyTorch: the mean of the losses of `count` microbatches."""
    optimizer, losses = make_optimizer(model), []
    for batch in batches:
        parts = [model(**part).loss / count for part in split(batch, count)]
        for part in parts:
            part.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


def train(model: nn.Module, batches: list[dict], make_optimizer: Callable) -> list[float]:
    """The compiled model's loop; it says nothing of microbatches."""
    optimizer, losses = make_optimizer(model), []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return [loss.item() for loss in losses]


def check_pipeline(
    reference: nn.Module,
    batches: list[dict],
    strategy: str,
    *,
    make_optimizer: Callable = adamw,
    max_norm: float | None = None,
    apart: bool = False,
    **options,
) -> nn.Module:
    """Train both ways, compare losses and every parameter and buffer; returns the compiled model.

    Args:
        apart: plain PyTorch accumulates over the microbatches; otherwise it takes the whole batch at once.
    """
    model = compiled(copy.deepcopy(reference), strategy, max_grad_norm=max_norm, **options)
    count = model.strategy.microbatches if apart else 1
    expected = accumulate(reference, batches, make_optimizer, count, max_norm)
    losses = train(model, batches, make_optimizer)
    for step, (got, want) in enumerate(zip(losses, expected, strict=True)):
        assert abs(got - want) <= LOSS * max(1.0, abs(want)), f"loss of step {step}: {got}, plain PyTorch {want}"
    got, want = model.state_dict(), reference.state_dict()
    errors = {name: relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= PARAMETERS_AFTER_STEPS, f"{worst}: relative error {errors[worst]:.3g} after {len(losses)} steps"
    return model


def batches_of(name: str, steps: int = STEPS, batch_size: int = 8) -> list[dict]:
    return [zoo.batch(name, seed, batch_size) for seed in range(steps)]
