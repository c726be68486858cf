"""A deep model, of whose equal layers one is traced for all, trains as it does by PyTorch, and with the bits of one in which every layer is traced."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import adamw, check_both, compiled

from graphacc._compat.torch_ import patched
from graphacc.capture import model as capture_model

LAYERS = 7


class Layer(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def deep(p: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(Layer(p) for _ in range(LAYERS))), nn.Linear(16, 4))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))), torch.arange(8) % 4)


@pytest.fixture
def copied(monkeypatch):
    """The runs of layers that were copied."""
    runs, unrolled = [], capture_model.unrolled

    def observed(step, run, names):
        result = unrolled(step, run, names)
        runs.append(run)
        return result

    monkeypatch.setattr(capture_model, "unrolled", observed)
    return runs


@pytest.mark.parametrize("strategy", [None, "fsdp=4", "pp=2,microbatches=2"])
@pytest.mark.default_cases("None")
def test_parity(strategy, copied):
    reference = deep()
    check_both(reference, compiled(copy.deepcopy(reference), strategy), loss_of, steps=3)
    assert copied and copied[0].copied == ("1.3", "1.4", "1.5")


@pytest.mark.matrix
def test_equal_bits_with_dropout(copied):
    trained = []
    for candidates in (capture_model.candidates, lambda model: {}):
        with patched(capture_model, candidates=candidates):
            model = compiled(deep(0.2), None, seed=11)
            optimizer = adamw(model)
            losses = []
            for step in range(3):
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            trained.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert len(copied) == 1, "one of the two models is traced layer by layer"
    assert trained[0][0] == trained[1][0]
    assert all(map(torch.equal, trained[0][1], trained[1][1]))
