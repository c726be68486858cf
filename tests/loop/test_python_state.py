"""What the forward reads or writes besides tensors: a change is seen in the next step, and what no program can do is run by PyTorch."""

import argparse
import collections
import copy
import dataclasses
import functools
import itertools
import random
import types
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import check_both, compiled

import graphacc

SETTINGS = argparse.Namespace(factor=1.0)
DEEP = {"a": {"b": {"c": {"d": [1.0]}}}}
GENERATOR = random.Random(0)


class Shared:
    """Read through its class, and through a reference."""

    factor = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 1.0


class FromShared:
    def __get__(self, owner, cls):
        return Shared.factor


def by_five_functions(x):
    return _second(x)


def _second(x):
    return _third(x)


def _third(x):
    return _fourth(x)


def _fourth(x):
    return _fifth(x)


def _fifth(x):
    return x * SETTINGS.factor


def by_default(x, factor=[1.0]):  # noqa: B006
    return x * factor[0]


@functools.lru_cache
def positions(n):
    return torch.arange(n) / n


@functools.lru_cache
def first_factor(layer, number):
    return SETTINGS.factor * number


class Base(nn.Module):
    """A layer, and a result that depends on Python's state."""

    described = FromShared()
    own = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.namespace = types.SimpleNamespace(inner=types.SimpleNamespace(factors=[1.0]))
        self.slots = Slots()
        self.array = numpy.ones(4, dtype=numpy.float32)
        self.partial = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.referred = [SHARED]
        self.random = numpy.random.default_rng(0)
        self.cycle = itertools.cycle([1.0, 2.0, 3.0])
        self.recent = collections.deque([1.0], maxlen=2)
        self.counts = collections.Counter()
        self.nested = {"a": {"n": 0}}
        self.clock = types.SimpleNamespace(ticks=0)
        self.gain = 1.0

    def exchanged(self, x):
        return x

    def by_own_class(self, x):
        return x * type(self).own


SHARED = Shared()
activation = torch.tanh

READS = {
    "namespace": (lambda m, x: x * m.namespace.inner.factors[0], lambda m, i: m.namespace.inner.factors.__setitem__(0, 1.0 + i)),
    "global namespace": (lambda m, x: x * SETTINGS.factor, lambda m, i: setattr(SETTINGS, "factor", 1.0 + i)),
    "slots": (lambda m, x: x * m.slots.factor, lambda m, i: setattr(m.slots, "factor", 1.0 + i)),
    "array": (lambda m, x: x * torch.from_numpy(m.array), lambda m, i: m.array.__setitem__(0, 1.0 + i)),
    "deep": (lambda m, x: x * DEEP["a"]["b"]["c"]["d"][0], lambda m, i: DEEP["a"]["b"]["c"]["d"].__setitem__(0, 1.0 + i)),
    "partial": (lambda m, x: m.partial(x), lambda m, i: m.partial.keywords.__setitem__("negative_slope", 0.1 * i)),
    "default": (lambda m, x: by_default(x), lambda m, i: by_default.__defaults__[0].__setitem__(0, 1.0 + i)),
    "class": (lambda m, x: x * Shared.factor, lambda m, i: setattr(Shared, "factor", 1.0 + i)),
    "own class": (lambda m, x: m.by_own_class(x), lambda m, i: setattr(Base, "own", 1.0 + i)),
    "method of the class": (lambda m, x: m.exchanged(x), lambda m, i: setattr(Base, "exchanged", lambda self, x: x * (1.0 + i))),
    "global function": (lambda m, x: activation(x), lambda m, i: globals().__setitem__("activation", (torch.tanh, torch.sigmoid, torch.relu)[i])),
    "descriptor": (lambda m, x: x * m.described, lambda m, i: setattr(Shared, "factor", 1.0 + i)),
    "dict": (lambda m, x: x * m.__dict__["gain"], lambda m, i: setattr(m, "gain", 1.0 + i)),
    "functions": (lambda m, x: by_five_functions(x), lambda m, i: setattr(SETTINGS, "factor", 1.0 + i)),
    "reference": (lambda m, x: x * REFERENCE().factor, lambda m, i: setattr(SHARED, "factor", 1.0 + i)),
    "lru_cache": (lambda m, x: x + positions(x.shape[1]), lambda m, i: None),
    "lru_cache that keeps what was": (lambda m, x: x * first_factor(m, 2) * SETTINGS.factor, lambda m, i: setattr(SETTINGS, "factor", 1.0 + i)),
}
REFERENCE = weakref.ref(SHARED)


def count(m, x):
    m.counts["calls"] += 1
    return x * m.counts["calls"]


def remember(m, x):
    m.recent.append(m.recent[-1] * 1.5)
    return x * m.recent[-1]


def count_nested(m, x):
    m.nested["a"]["n"] += 1
    return x * m.nested["a"]["n"]


def tick(m, x):
    m.clock.ticks += 1
    return x * m.clock.ticks


def fill(m, x):
    m.array[int(m.array.sum()) % 4] += 1
    return x * float(m.array.sum())


EFFECTS = {
    "generator": lambda m, x: x * float(m.random.uniform(0.5, 1.5)),
    "global generator": lambda m, x: x * GENERATOR.uniform(0.5, 1.5),
    "iterator": lambda m, x: x * next(m.cycle),
    "counter": count,
    "deque": remember,
    "nested": count_nested,
    "namespace": tick,
    "array": fill,
}


def trained(forward, change, by_pytorch):
    class Model(Base):
        def forward(self, x):
            return forward(self, self.linear(x))

    def loss_of(model, step):
        if step == 0:
            GENERATOR.seed(0)
            positions.cache_clear()
        change(model, step)
        return model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).pow(2).mean()

    torch.manual_seed(0)
    reference = Model()
    model = compiled(copy.deepcopy(reference), None)
    check_both(reference, model, loss_of, steps=3, by_pytorch=by_pytorch)
    return reference, model


@pytest.mark.parametrize("name", READS)
@pytest.mark.default_cases("namespace", "deep", "own class", "method of the class", "global function", "reference")
def test_what_the_forward_reads(name):
    forward, change = READS[name]
    trained(forward, change, by_pytorch=False)
    assert positions(3).sum().item() == 1.0  # no fake tensor stays in a cache


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.default_cases("generator", "deque")
def test_what_the_forward_changes(name):
    reference, model = trained(EFFECTS[name], lambda m, i: None, by_pytorch=True)
    assert model._graphacc_engine.by_pytorch.counts, "a program cannot do this in every step"
    assert model.counts == reference.counts
    assert list(model.recent) == list(reference.recent)
    assert model.nested == reference.nested
    assert model.clock.ticks == reference.clock.ticks
    assert (model.array == reference.array).all()


class Momentum(nn.Module):
    """A key encoder that follows the query encoder inside of the forward, as in MoCo."""

    def __init__(self, write):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.write = write

    def forward(self, x):
        query = self.query(x)
        with torch.no_grad():
            for one, other in zip(self.key.parameters(), self.query.parameters()):
                self.write(one, other)
            key = self.key(x)
        return (query * key).sum(-1) + query.pow(2).sum(-1)


def assigned(one, other):
    one.data = one.data * 0.5 + other.data * 0.5


def in_place(one, other):
    one.data.mul_(0.5).add_(other.data, alpha=0.5)


def copied(one, other):
    one.copy_(one * 0.5 + other * 0.5)


class Constrained(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


@pytest.mark.parametrize("strategy", [None, "fsdp=2"])
@pytest.mark.parametrize("write", [assigned, in_place, copied, None], ids=["assigned", "in_place", "copied", "constrained"])
@pytest.mark.default_cases("assigned-None", "copied-None")
def test_parameters_that_the_forward_writes(write, strategy):
    torch.manual_seed(0)
    reference = nn.Sequential(Constrained(4, 8), nn.Tanh(), Constrained(8, 1)) if write is None else Momentum(write)
    model = compiled(copy.deepcopy(reference), strategy)
    batch = torch.randn(8, 4)
    check_both(reference, model, lambda one, step: one(batch).mean(), steps=3, lr=0.1, by_pytorch=True)
    assert any("the forward writes into parameter(s)" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_hooks_of_an_optimizer_see_gradients_before_the_step_and_parameters_after_it():
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    model = compiled(copy.deepcopy(reference), None)
    losses = []
    for one in (reference, model):
        optimizer, found = torch.optim.SGD(one.parameters(), lr=0.5), []
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: [p.grad.mul_(0.5) for p in optimizer.param_groups[0]["params"]] and None)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: [p.data.clamp_(-0.2, 0.2) for p in optimizer.param_groups[0]["params"]] and None)
        for step in range(3):
            optimizer.zero_grad()
            loss = one(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).pow(2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_values_of_gradients_that_are_then_cleared():
    """Elastic weight consolidation: squared gradients of a backward without step."""
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    model = compiled(copy.deepcopy(reference), None)
    found = []
    for one in (reference, model):
        one(torch.ones(8, 4)).pow(2).mean().backward()
        squares = [p.grad.detach().clone().pow(2) for p in one.parameters()]
        one.zero_grad()
        found.append([square.sum().item() for square in squares])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_per_sample_gradients():
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    model = compiled(copy.deepcopy(reference), None)
    batch = torch.randn(8, 4)
    found = []
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            parameters = {name: p.detach() for name, p in one.named_parameters()}
            loss_of = lambda held, x: torch.func.functional_call(one, held, (x[None],)).pow(2).sum()  # noqa: E731
            grads = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, batch)
            for name, p in one.named_parameters():
                p.grad = grads[name].clamp(-1, 1).mean(0)
            optimizer.step()
        found.append(one.weight.detach().clone())
    torch.testing.assert_close(found[1], found[0])


def test_printing_in_the_forward_is_said(caplog, capsys):
    class Printing(nn.Linear):
        def forward(self, x):
            print("shape", tuple(x.shape))
            return super().forward(x)

    model = compiled(Printing(4, 4), None)
    for _ in range(2):
        model(torch.ones(2, 4)).mean().backward()
    assert "shape (2, 4)" in capsys.readouterr().out
    assert [record.getMessage().splitlines()[0] for record in caplog.records if "prints" in record.getMessage()] == [
        "graphacc: the forward prints only when it is captured, not in every step"
    ]


@pytest.mark.parametrize("strategy", [None, "fsdp=2,tp=2"])
def test_joining_with_an_empty_tensor(strategy):
    """Caches of keys and values start with one of one dim, which `torch.cat` takes beside tensors of any shape."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            hidden = torch.relu(self.up(x)).view(8, 2, 4).transpose(1, 2)
            return self.down(torch.cat([torch.tensor([]), hidden], dim=-2).transpose(1, 2).reshape(8, 8))

    torch.manual_seed(0)
    reference = Cached()
    model = compiled(copy.deepcopy(reference), strategy)
    check_both(reference, model, lambda one, step: one(torch.ones(8, 4) + step).pow(2).mean(), steps=2)
    assert strategy or "cat" not in str(model.programs[0].graph.graph)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_parts_in_torchscript_are_run_by_pytorch():
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))

    reference, model = made(), compiled(made(), None)
    check_both(reference, model, lambda one, step: one(torch.ones(8, 4) + step).pow(2).mean(), steps=2, by_pytorch=True)


def test_a_buffer_that_grows_is_run_by_pytorch():
    class Growing(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("bank", torch.zeros(0, 4))

        def forward(self, x):
            out = super().forward(x)
            self.bank = torch.cat([self.bank, out.detach().mean(0, keepdim=True)])[-2:]
            return out + self.bank.mean(0)

    torch.manual_seed(0)
    reference = Growing()
    model = compiled(copy.deepcopy(reference), None)
    check_both(reference, model, lambda one, step: one(torch.ones(8, 4) + step).pow(2).mean(), steps=4, by_pytorch=True)


def test_lazy_modules_need_their_shapes():
    with pytest.raises(graphacc.GraphAccError, match="'weight' has no shape yet: call the model once"):
        compiled(nn.LazyLinear(4), None)


def test_a_second_backward_of_a_loss_is_an_error_as_in_pytorch():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for model in (reference, compiled(copy.deepcopy(reference), None)):
        loss = model(torch.ones(8, 4)).pow(2).mean()
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
