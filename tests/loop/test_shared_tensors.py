"""What PyTorch shares, a compiled loop shares: arguments that come back, memory that is replaced, optimizer state that the loop holds.

Also what sees autograd's own graph, or a module's code, from outside of the model: hooks of several parameters, forward-mode
differentiation, hooks on saved tensors, cached parametrizations.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from tolerances import LOSS, relative_error
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from training import compiled

from graphacc.errors import LoopError

STRATEGIES = [None, "fsdp=8"]


def batches(steps=4):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)) for _ in range(steps)]


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def assert_same(run, make, strategy=None, eager=None):
    """``run(model)`` gives numbers; they, and parameters and buffers at the end, are PyTorch's.

    Args:
        eager: part of what is said about why PyTorch ran something; None: nothing was run by PyTorch.
    """
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    model = compiled(make(), strategy)
    expected, found = run(reference), run(model)
    assert len(found) == len(expected)
    for place, (got, want) in enumerate(zip(found, expected)):
        assert abs(got - want) <= 10 * LOSS * max(1.0, abs(want)), f"number {place}: {got}, plain PyTorch {want}"
    got, want = model.state_dict(), reference.state_dict()
    assert list(got) == list(want)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-4, name
    said = model._graphacc_engine.by_pytorch.counts
    assert not said if eager is None else any(eager in text for text in said), said


# ---- results that the model does not make


class GivesBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = small()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        return {"out": self.layers(x), "same": x, "flat": x.view(-1), "part": x[1:, ::2], "weight": self.layers[0].weight, "calls": self.calls}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_argument_that_comes_back_is_the_argument(strategy):
    def run(model):
        optimizer, numbers = sgd(model), []
        for x, y in batches():
            found = model(x)
            loss = F.cross_entropy(found["out"], y) + 0.1 * found["weight"].pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            same = found["same"] is x, found["flat"].data_ptr() == x.data_ptr(), found["weight"] is model.layers[0].weight
            numbers += [loss.item(), *map(float, same), found["calls"].sum().item(), found["part"].sum().item()]
        return numbers

    assert_same(run, GivesBack, strategy)


def test_writes_into_results_reach_the_argument():
    def run(model):
        optimizer, numbers = sgd(model), []
        for x, y in batches():
            with torch.no_grad():
                found = model(x)
                found["same"].add_(1.0)
                found["part"].zero_()
                found["flat"][:3] = 2.0
            loss = F.cross_entropy(model(x)["out"], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            numbers += [x.sum().item(), loss.item()]
        return numbers

    assert_same(run, GivesBack)


# ---- memory that is replaced


def test_parameters_whose_memory_is_set():
    """As a parametrization does when its weight is assigned."""

    def run(model):
        optimizer, numbers = sgd(model), []
        for i, (x, y) in enumerate(batches()):
            if i == 1:
                with torch.no_grad():
                    model[2].weight.set_(torch.full((4, 16), 0.1))
                    model[0].weight = torch.ones(16, 8)
            numbers.append(step(model, optimizer, x, y))
        return numbers

    def make():
        model = small()
        torch.nn.utils.parametrizations.weight_norm(model[0])
        return model

    assert_same(run, make)


def test_swapped_parameters_are_refused():
    model = compiled(small(), None)
    optimizer = sgd(model)
    x, y = batches(1)[0]
    step(model, optimizer, x, y)
    torch.utils.swap_tensors(model[2].bias, nn.Parameter(torch.ones(4)))
    with pytest.raises(LoopError, match="'2.bias' was exchanged by torch.utils.swap_tensors"):
        model(x)


# ---- optimizer state that the loop holds


def test_optimizer_state_that_the_loop_holds_is_in_step():
    def run(model):
        optimizer, numbers = torch.optim.Adam(model.parameters(), 1e-2), []
        held = state = None
        for i, (x, y) in enumerate(batches(7)):
            if i == 2:
                held = optimizer.state_dict()  # no copy: PyTorch's step writes into its tensors
            numbers.append(step(model, optimizer, x, y))
            if held is not None:
                numbers += [held["state"][0]["exp_avg"].norm().item(), float(held["state"][0]["step"])]
            if i == 4:
                optimizer.load_state_dict(held)
                held, state = None, optimizer.state[next(model.parameters())]["exp_avg"]
            if state is not None:
                numbers.append(state.norm().item())
            if i == 5:
                state.zero_()
        return numbers

    assert_same(run, small)


def test_state_that_nobody_holds_stays_on_the_devices():
    model = compiled(small(), None)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    given = batches(6)
    for x, y in given[:2]:
        step(model, optimizer, x, y)
    held = optimizer.state_dict()
    copy.deepcopy(held)
    (binding,) = model._graphacc_engine.bindings
    for x, y in given[2:4]:
        step(model, optimizer, x, y)
        assert binding.copies  # fetched after the step
    del held
    for x, y in given[4:]:
        step(model, optimizer, x, y)
        assert not binding.copies


def test_an_optimizer_that_was_given_the_state_of_another_shares_it():
    """As PyTorch's load_state_dict takes the tensors that it is given."""

    def run(model):
        optimizer, numbers = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
        for i, (x, y) in enumerate(batches(5)):
            if i == 2:
                other = small()
                other.load_state_dict(model.state_dict())
                theirs = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
                theirs.load_state_dict(optimizer.state_dict())
            numbers.append(step(model, optimizer, x, y))
            if i >= 2:
                numbers.append(step(other, theirs, 2 * x, y))
        return numbers

    assert_same(run, small)


# ---- what looks at autograd's own graph


def test_hooks_of_several_parameters():
    def run(model):
        optimizer, numbers = sgd(model), []
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda grads: numbers.append(sum(g.norm().item() for g in grads)))
        for x, y in batches(2):
            numbers.append(step(model, optimizer, x, y))
        return numbers

    assert_same(run, small, eager="register_multi_grad_hook")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch 2.13 loads its formulas by it
def test_forward_mode_differentiation():
    def run(model):
        optimizer, numbers = sgd(model), []
        for x, y in batches(2):
            with forward_ad.dual_level():
                numbers.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.norm().item())
            numbers.append(step(model, optimizer, x, y))
        return numbers

    assert_same(run, small, eager="forward-mode")


def test_hooks_on_saved_tensors():
    def run(model):
        optimizer, numbers = sgd(model), []
        for x, y in batches(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.5 if t.is_floating_point() else t, lambda t: t):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
        return numbers

    assert_same(run, small, eager="saved_tensors_hooks")


# ---- parametrizations


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def symmetric():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def spectral():
    model = small()
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


@pytest.mark.parametrize("make, eager", [(symmetric, None), (spectral, "parametrize.cached()")])
def test_cached_parametrizations(make, eager):
    def run(model):
        optimizer, numbers = sgd(model), []
        for x, y in batches(3):
            with parametrize.cached():
                loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
        return numbers

    assert_same(run, make, eager=eager)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_region_takes_no_gradient_to_what_only_another_part_reads():
    """The old weight_norm leaves its weight, with last step's freed graph, in an attribute of a part that PyTorch runs."""

    def run(model):
        optimizer = sgd(model)
        return [step(model, optimizer, x, y) for x, y in batches(3)]

    def make():
        model = small()
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.weight_norm(model[2])
        return model

    assert_same(run, make, eager="requires a gradient")
