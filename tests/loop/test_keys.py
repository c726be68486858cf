"""Random numbers of compiled programs follow `torch.manual_seed`, as eager ones do: the same where eager's are the same, others where these are others."""

import pytest
import torch
from torch import nn

import graphacc

X = torch.linspace(-1, 1, 64).view(8, 8)


def dropping(devices: int | None, **options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    return model if devices is None else graphacc.compile(model, devices=devices, fast_compile=True, memory_plan="xla", **options)


def trained(model: nn.Module, steps: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.0), []
    for _ in range(steps):
        loss = model(X).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seeded_again(model):
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found += trained(model, 2)
    return found


def without_gradients(model):
    with torch.no_grad():
        found = []
        for seed in (3, 3, None, 3):
            if seed is not None:
                torch.manual_seed(seed)
            found.append(model(X).pow(2).mean().item())
    return found


def forked(model):
    torch.manual_seed(4)
    found = trained(model, 2)
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            found += trained(model, 1)
    torch.manual_seed(4)
    return found + trained(model, 3)


def goes_on_after_a_fork(model):
    """The third step under a seed, with and without other numbers between."""
    torch.manual_seed(6)
    found = trained(model, 3)
    torch.manual_seed(6)
    found += trained(model, 2)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        found += trained(model, 2)
    return found + trained(model, 1)


def set_back(model):
    """Several calls of one backward, of which some begin where others did; another backward's, too."""
    torch.manual_seed(8)
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.0), torch.get_rng_state()
    found = trained(model, 1)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results = [model(X)]
        torch.manual_seed(seed)
        results.append(model(X))
        middle = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            results += [model(X), nn.functional.dropout(model(X))]
        for state in (middle, before, start):
            torch.set_rng_state(state)
            results.append(model(X))
        sum(result.pow(2).mean() for result in results).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [result.pow(2).mean().item() for result in results]
    torch.set_rng_state(start)
    return found + trained(model, 2)


def equalities(values: list[float]) -> list[list[bool]]:
    return [[abs(a - b) < 1e-6 for b in values] for a in values]


@pytest.mark.parametrize("run", [set_back, seeded_again, without_gradients, forked, goes_on_after_a_fork], ids=lambda run: run.__name__)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.default_cases("1-seeded_again", "8-seeded_again", "1-set_back")
def test_numbers_repeat_where_eager_ones_do(run, devices):
    expected = equalities(run(dropping(None)))
    assert equalities(run(dropping(devices))) == expected
    assert 2 < sum(map(sum, expected)) < len(expected) ** 2


def test_a_seed_of_its_own_stays():
    model = dropping(8, seed=9)
    found = seeded_again(model)
    assert sum(map(sum, equalities(found))) == len(found)


def test_a_model_that_draws_nothing_takes_nothing_from_the_generator():
    model = graphacc.compile(nn.Linear(8, 4), devices=8, fast_compile=True)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    trained(model, 2)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_goes_on(tmp_path):
    """Also where the generator was seeded just before loading."""
    model = dropping(8)
    torch.manual_seed(1)
    trained(model, 2)
    graphacc.save_checkpoint(tmp_path / "step2", model)
    expected = trained(model, 2)
    other = dropping(8)
    trained(other, 1)
    torch.manual_seed(1)
    graphacc.load_checkpoint(tmp_path / "step2", other)
    assert trained(other, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("restored", ["generator", "checkpoint", "both", "both, generator first"])
def test_a_run_that_goes_on_elsewhere(restored, tmp_path):
    """New objects, as another process makes them, do not draw the numbers of the first steps again where the generator's state is set; with a checkpoint of ours they draw those that follow."""
    model = dropping(1)
    first = trained(model, 3)
    graphacc.save_checkpoint(tmp_path / "step3", model)
    state = torch.get_rng_state()
    expected = trained(model, 3)
    torch.manual_seed(5)
    other = dropping(1)
    torch.manual_seed(7)
    if restored == "both, generator first":
        torch.set_rng_state(state)
    if restored != "generator":
        graphacc.load_checkpoint(tmp_path / "step3", other)
    if restored in ("generator", "both"):
        torch.set_rng_state(state)
    found = trained(other, 3)
    if restored != "generator":
        assert found == pytest.approx(expected, rel=1e-6)
    assert not any(abs(one - before) < 1e-6 for one in found for before in first)
    if restored == "generator":
        torch.manual_seed(5)
        torch.set_rng_state(state)
        assert trained(other, 3) == pytest.approx(found, rel=1e-6)


@pytest.mark.lazy
def test_lazily_captured_calls_repeat_too():
    expected = equalities(set_back(dropping(None)))
    assert equalities(set_back(dropping(1, capture="lazy"))) == expected


@pytest.mark.parametrize("reads", ["gradient", "norm", "by PyTorch"])
def test_a_step_in_parts_takes_nothing_from_the_generator(reads):
    """Found by loops that draw their batches: an update program without a key was taken for one that draws."""

    class Decides(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if reads != "by PyTorch" or float(y.sum()) > 1e9 else y * 1

    model = graphacc.compile(Decides(8, 4), devices=1, fast_compile=True, cache_dir=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.get_rng_state()
    for _ in range(2):
        model(X).square().mean().backward()
        if reads == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        elif reads == "gradient":
            model.weight.grad.sum().item()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(torch.get_rng_state(), state)


class Coder(nn.Module):
    """An autoencoder whose loop draws the noise, between its two calls."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x, decode: bool):
        return self.decoder(x) if decode else self.encoder(x)


DRAWN = {
    "randn_like": torch.randn_like,
    "rand_like": lambda mean: torch.rand_like(mean, dtype=torch.float32) - 0.5,
    "rand_like by name": lambda mean: torch.rand_like(input=mean),
    "randint_like": lambda mean: torch.randint_like(mean, 3),
}


@pytest.mark.parametrize("strategy", [None, "dp=2", "microbatches=2"])
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.default_cases("randn_like-None", "randint_like-dp=2", "rand_like-microbatches=2")
def test_numbers_that_the_loop_draws_in_the_shape_of_a_result_are_pytorchs(drawn, strategy):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Coder()
        if compiled:
            model = graphacc.compile(model, strategy=strategy, devices=2 if strategy == "dp=2" else 1, fast_compile=True, memory_plan="xla", cache_dir=None)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        torch.manual_seed(7)
        for _ in range(3):
            mean, deviation = model(X, False).chunk(2, 1)
            noise = DRAWN[drawn](mean)
            loss = (model(mean + noise * deviation.exp(), True) - X).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, torch.get_rng_state()))
    (expected, state), (losses, ours) = found
    assert losses == pytest.approx(expected, rel=1e-5) and torch.equal(state, ours)
