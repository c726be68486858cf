"""Threads that train beside each other: compiled models, and plain ones, which a capture in another thread does not touch."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import compiled

STEPS = 4


class Attending(nn.Module):
    """Reads what a capture exchanges for a while: attributes, attention, checkpoints, absent attributes of tensors."""

    def __init__(self, width=8):
        super().__init__()
        self.project, self.norm, self.head = nn.Linear(width, 3 * width), nn.LayerNorm(width), nn.Linear(width, 3)
        self.gain, self.calls = 0.5, 0

    def attend(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]

    def forward(self, x):
        self.calls += 1
        scale = getattr(self.head.weight, "scale", 1.0)
        return self.head(self.norm(x + self.gain * checkpoint(self.attend, x, use_reentrant=False))).mean(1) * scale


def trained(model, rate):
    """The losses of a few steps."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=rate), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        loss = F.cross_entropy(model(torch.randn(4, 6, 8, generator=generator)), torch.randint(3, (4,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def made(seed, **options):
    torch.manual_seed(seed)
    model = Attending()
    return compiled(model, None, **options) if options else model


def in_threads(*jobs):
    """What the jobs give; raises the first error of one."""
    results, start = [None] * len(jobs), threading.Barrier(len(jobs))

    def run(place, job):
        start.wait()
        try:
            results[place] = job()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_threads_train_two_models():
    expected = [trained(made(seed), 0.01 * (1 + seed)) for seed in range(2)]
    models = [made(seed, capture="fx") for seed in range(2)]
    found = in_threads(*(lambda seed=seed: trained(models[seed], 0.01 * (1 + seed)) for seed in range(2)))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_plain_model_beside_captures():
    """It trains again and again for as long as another thread compiles, each time to the same losses; oneDNN, which rounds otherwise, is off in captures."""
    first, models = made(0), [made(0, capture="fx") for _ in range(2)]
    expected, done, rounds = trained(copy.deepcopy(first), 0.01), threading.Event(), []

    def plain():
        while not done.is_set() or not rounds:
            rounds.append(trained(copy.deepcopy(first), 0.01))
            assert rounds[-1] == pytest.approx(expected, rel=1e-6)

    def compiling():
        try:
            return [trained(model, 0.01) for model in models]
        finally:
            done.set()

    _, found = in_threads(plain, compiling)
    assert len(rounds) > 1
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_the_process_is_as_before():
    owners = (nn.Module, torch.Tensor, torch.compiler, torch.random, F)
    before = [dict(vars(owner)) for owner in owners]
    models = [made(seed, capture="fx") for seed in range(2)]
    in_threads(*(lambda model=model: trained(model, 0.01) for model in models))
    assert [dict(vars(owner)) for owner in owners] == before and not torch.compiler.is_compiling()
