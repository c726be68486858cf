"""Numbers that change from call to call: arguments of the model, what is computed of them, numbers in dicts and namespaces, numbers in the loss."""

import argparse
import math
import types

import numpy
import pytest
import torch
from torch import nn
from training import compiled, relative_error

X = torch.linspace(-1, 1, 32).view(8, 4)
ARGS = argparse.Namespace(beta=0.1, deep={"weights": [0.5, {"tau": 1.0}]})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(4, 4), nn.Embedding(16, 4)
        self.last, self.step = 0, 0
        self.config = {"beta": 0.3, "count": 2, "inner": types.SimpleNamespace(weight=0.1)}


def with_forward(forward) -> type[Model]:
    return type(forward.__name__, (Model,), {"forward": forward})


def trained(cls, compile_it, call, between=lambda model, step: None, loss_of=lambda y, step: y.pow(2).mean(), steps=6, **options):
    torch.manual_seed(0)
    model = cls()
    model = compiled(model, options.pop("strategy", None), **options) if compile_it else model
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        args, kwargs = call(step)
        y = model(X + 0.01 * step, *args, **kwargs)
        rest, y = (list(y[1:]), y[0]) if isinstance(y, tuple) else ([], y)
        loss = loss_of(y, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), model.last, *rest, *(float(x) for x in (*args, *kwargs.values()) if isinstance(x, list) for x in x)])
        between(model, step)
    return model, found


def assert_equal(forward, call=lambda step: ((), {}), programs=None, by_pytorch=False, **options):
    """Losses, results and parameters are plain PyTorch's; `programs`: at most so many are compiled."""
    cls = with_forward(forward)
    plain, expected = trained(cls, False, call, **{key: value for key, value in options.items() if key in ("between", "loss_of", "steps")})
    model, found = trained(cls, True, call, **options)
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6) and [type(x) for x in got] == [type(x) for x in want]
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(got, want) < 1e-4
    assert bool(model._graphacc_engine.by_pytorch.counts) == by_pytorch, model._graphacc_engine.by_pytorch.counts
    assert programs is None or len(model.programs) <= programs, model.explain()
    return model


# ---- arguments of the model


def times(self, x, step):
    return self.linear(x) * (1 + step / 100) + step


def branches(self, x, step):
    y = self.linear(x) * min(1.0, step / 4)
    return y * 2 if step % 3 == 0 else y


def stored(self, x, step):
    self.last = step + 1
    return self.linear(x * step)


def annealed(self, x, step):
    return self.linear(x) * max(0.5, math.exp(-0.3 * step)) + 0.5 * (1 + math.cos(math.pi * step / 10)) + float(numpy.pi)


def by_numpy(self, x, step):
    return self.linear(x) * numpy.maximum(numpy.exp(-0.3 * step), 0.2)


def as_tensors(self, x, step):
    return self.linear(x + self.embedding(torch.tensor([step]))) * torch.full((4,), 0.5 * step) + torch.tensor([[1.0, 0.1 * step]]).sum()


def rounded(self, x, step):
    return self.linear(x) * round(step / 3, 1) + math.floor(step / 2)


def far(self, x, step):
    """The angle is computed in double precision, as Python does."""
    return self.linear(x) * math.cos(1e5 * step + 0.1)


INTS, FLOATS = lambda step: ((step,), {}), lambda step: ((), {"step": 0.25 * step})


@pytest.mark.parametrize("forward", [times, branches, stored, annealed, by_numpy, as_tensors, rounded, far], ids=lambda forward: forward.__name__)
def test_an_int_that_changes(forward):
    assert_equal(forward, INTS, programs=6)


@pytest.mark.parametrize("strategy, forward", [("dp=2", branches), ("fsdp=2,microbatches=2", annealed)], ids=["dp", "microbatches"])
def test_numbers_under_strategies(strategy, forward):
    assert_equal(forward, FLOATS, programs=8, strategy=strategy)


@pytest.mark.lazy
@pytest.mark.parametrize("forward", [branches, annealed], ids=lambda forward: forward.__name__)
def test_numbers_under_lazy_tensors(forward):
    assert_equal(forward, FLOATS, programs=8, capture="lazy")


def test_a_float64_of_numpy():
    assert_equal(times, lambda step: ((numpy.float64(0.3 * step),), {}), programs=2)


def test_numbers_in_dicts_and_lists_of_arguments():
    def forward(self, x, config):
        return self.linear(x) * config["deep"][0] + config["beta"]

    assert_equal(forward, lambda step: (({"beta": 0.1 * step, "deep": [step, "text"]},), {}), programs=2)


def test_numbers_beside_a_list_that_is_filled():
    def forward(self, x, step, filled):
        filled.append(step)
        filled.append(x.sum())
        return self.linear(x) * step

    assert_equal(forward, lambda step: ((step, []), {}), programs=3)


def test_a_number_that_is_returned():
    def forward(self, x, step):
        return self.linear(x) * step, step, step + 1

    assert_equal(forward, INTS)


def test_a_number_whose_value_is_needed():
    """Each value has a program, and after sixteen of them PyTorch runs the model; where the batch's shape changes with it, it is compiled."""

    def forward(self, x, step):
        return self.linear(x)[: 1 + step % 7] * (1 + 0.01 * float(str(step)))  # more would diverge, and rounding with it

    model = assert_equal(forward, INTS, steps=22, by_pytorch=True)
    assert any("argument 1 has another value at every call" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_values_that_come_again_are_compiled():
    def forward(self, x, step):
        return self.linear(x)[: 1 + step]

    assert_equal(forward, lambda step: ((step % 3,), {}), steps=22, programs=4)


def test_code_that_asks_for_the_type():
    def forward(self, x, step):
        return self.linear(x) * (2.0 if type(step) is int else 1.0) * step

    assert_equal(forward, INTS, steps=4)


def test_the_type_of_self_is_no_question():
    def forward(self, x, step):
        return self.linear(x) * len(type(self).__name__) * step

    assert_equal(forward, INTS, programs=2)


def test_a_caught_need():
    def forward(self, x, step):
        try:
            count = int(step)
        except Exception:
            count = 5
        return self.linear(x) * count

    assert_equal(forward, INTS, steps=4)


def test_half_precision_and_small_ints_round_as_in_pytorch():
    def forward(self, x, step):
        return self.linear(x) + (x.double() * step).float() + (x.argmax().int() + step) / 3 + torch.ones(4, dtype=torch.uint8) * step

    assert_equal(forward, INTS, steps=4)


def test_in_a_part_of_a_model_that_pytorch_runs():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 4))

        def forward(self, x, step):
            return self.layers(x) * step

    def forward(self, x, step):
        y = self.inner(x, step)
        return y if self.linear.weight.sum().item() > -1e9 else -y

    class Outer(with_forward(forward)):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

    _, expected = trained(Outer, False, INTS)
    model, found = trained(Outer, True, INTS)
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=1e-5)
    assert "inner" in model._graphacc_engine.given_numbers._last


# ---- numbers in dicts and namespaces


def of_variables(self, x):
    return self.linear(x) * ARGS.beta + ARGS.deep["weights"][1]["tau"]


def of_attributes(self, x):
    y = self.linear(x) * self.config["beta"] * self.config["inner"].weight
    return y * 2 if self.config["count"] > 4 else y


def all_of_them(self, x):
    return self.linear(x) * sum(value for value in self.config.values() if isinstance(value, (int, float)))


def spread(self, x):
    def scaled(y, beta, count, inner):
        return y * beta + count * inner.weight

    return scaled(self.linear(x), **self.config)


def change(model, step):
    ARGS.beta = 0.1 * step
    ARGS.deep["weights"][1]["tau"] *= 0.9
    model.config["beta"] += 0.01
    model.config["count"] = 2 + step
    model.config["inner"].weight *= 1.1


@pytest.mark.parametrize("forward", [of_variables, of_attributes, all_of_them, spread], ids=lambda forward: forward.__name__)
def test_numbers_in_containers_are_inputs(forward):
    def begun_anew(model, step):
        if step == 5:
            ARGS.beta, ARGS.deep["weights"][1]["tau"] = 0.1, 1.0
        else:
            change(model, step)

    assert_equal(forward, between=begun_anew, programs=4)


def test_another_container_takes_the_place_of_one():
    """Its numbers are read; those of the first one were."""

    def exchange(model, step):
        model.config = {**model.config, "beta": 0.3 + 0.1 * step}
        if step == 3:
            model.config = dict(reversed(model.config.items()))

    assert_equal(of_attributes, between=exchange, steps=7)


def test_a_container_in_two_places_is_parted():
    def forward(self, x):
        return self.linear(x) * self.config["beta"] * self.other["beta"]

    class Both(with_forward(forward)):
        def __init__(self):
            super().__init__()
            self.other = self.config

    def part(model, step):
        model.config["beta"] += 0.1
        if step == 3:
            model.other = dict(model.config)

    _, expected = trained(Both, False, lambda step: ((), {}), part, steps=8)
    _, found = trained(Both, True, lambda step: ((), {}), part, steps=8)
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=1e-5)


def test_long_lists_of_numbers():
    def forward(self, x, words):
        return self.linear(x) + self.embedding(torch.tensor(words)).mean(0)

    model = assert_equal(forward, lambda step: ((torch.randint(16, (70,), generator=torch.Generator().manual_seed(step)).tolist(),), {}), steps=20, by_pytorch=True)
    assert any("one of many" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_numbers_in_containers_whose_values_are_needed():
    def forward(self, x):
        return self.linear(x)[: self.config["count"]]

    assert_equal(forward, between=change, steps=5)


def test_numbers_in_containers_that_the_forward_writes():
    def forward(self, x):
        self.config["beta"] = self.config["beta"] * 0.9
        return self.linear(x) * self.config["beta"]

    assert_equal(forward, by_pytorch=True, steps=4)


# ---- numbers in the loss


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda y, step: y.pow(2).mean() * (1 + step),
        lambda y, step: (y / (1 + step)).pow(2).mean() / (2 + step) - step,
        lambda y, step: y.pow(2).mean() * numpy.float64(0.1 * step),
    ],
)
def test_numbers_in_the_loss_are_inputs(loss_of):
    assert_equal(lambda self, x: self.linear(x), loss_of=loss_of, programs=2)


def test_a_number_in_the_loss_whose_value_is_needed():
    """After eight forms of the loss PyTorch runs it; the model stays compiled."""
    model = assert_equal(lambda self, x: self.linear(x), loss_of=lambda y, step: nn.functional.huber_loss(y, X, delta=0.5 + 0.01 * step), steps=22, by_pytorch=True)
    uses = model._graphacc_engine.regions
    assert len(model.programs) < 22 and any(use.forwards for use in uses.values())


# ---- numbers that a backward reads


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


def by_a_function(self, x, step):
    return self.linear(Scaled.apply(self.linear(x), 1 + 0.1 * step))


def by_a_hook(self, x, step):
    hidden = self.linear(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * (1 + 0.1 * step))
    return self.linear(hidden)


@pytest.mark.parametrize("forward", [by_a_function, by_a_hook], ids=lambda forward: forward.__name__)
def test_a_backward_that_reads_an_argument(forward):
    """It runs behind the call: the first value was a constant of its program."""
    _, expected = trained(with_forward(forward), False, INTS)
    _, found = trained(with_forward(forward), True, INTS)
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=1e-5)
