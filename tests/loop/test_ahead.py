"""Programs of an earlier run that are loaded while a loop's first step is captured."""

import copy

import pytest
import torch
from torch import nn
from training import compiled

from graphacc.runtime import lowered_cache


def trained(model: nn.Module, tmp_path, steps: int = 2, strategy: str | None = None) -> list[float]:
    model = compiled(copy.deepcopy(model), strategy, cache_dir=str(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(torch.full((4, 8), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_second_run_finds_its_program_loaded(tmp_path, monkeypatch):
    taken = []
    take = lowered_cache.Ahead.take
    monkeypatch.setattr(lowered_cache.Ahead, "take", lambda self, key: taken.append(take(self, key)) or taken[-1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    first = trained(model, tmp_path)
    assert taken == [None]
    assert trained(model, tmp_path) == first and taken[1] is not None
    other = copy.deepcopy(model)
    other[1] = nn.Sigmoid()  # it looks the same from outside
    plain = nn.Sequential(*copy.deepcopy(other))
    expected = plain(torch.full((4, 8), 1.0)).square().mean().item()
    assert abs(trained(other, tmp_path)[0] - expected) < 1e-6 and taken[2] is None


@pytest.mark.parametrize(
    "strategy",
    ["dp=2", "fsdp=4,hpz=2", "tp=2", "fsdp=2,tp=2,microbatches=2", "pp=2,microbatches=2", "pp=2,dp=2,microbatches=2", "pp=2,chunks=2,schedule=interleaved,microbatches=2", "dp=2,offload=optimizer", "pp=2,microbatches=2,offload=optimizer"],
)
@pytest.mark.default_cases("dp=2", "pp=2,dp=2,microbatches=2")
def test_programs_are_loaded_on_their_own_devices(strategy, tmp_path, monkeypatch):
    """Those of a pipeline's stages run on some of the run's devices."""
    taken = []
    take = lowered_cache.Ahead.take
    monkeypatch.setattr(lowered_cache.Ahead, "take", lambda self, key: taken.append(take(self, key)) or taken[-1])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 1))
    first = trained(model, tmp_path, strategy=strategy)
    num_first = len(taken)
    assert taken == [None] * num_first
    assert trained(model, tmp_path, strategy=strategy) == first
    assert all(taken[num_first : num_first + lowered_cache.MAX_AHEAD])
