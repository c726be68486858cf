"""What the loop passes to the model besides tensors: containers that the code fills, functions, and what tensors have besides their values."""

import collections
import itertools
import logging

import pytest
import torch
from test_reflected_state import Base
from torch import nn
from training import assert_parity, compiled

X = torch.linspace(-1, 1, 32).view(8, 4)


def trained(forward, arguments, seen, compile_it, steps=4):
    """Losses, and what `seen` finds in the arguments after every call."""
    torch.manual_seed(0)
    model = type("Model", (Base,), {"forward": forward})()
    model = compiled(model, None) if compile_it else model
    optimizer, losses, found = torch.optim.SGD(model.parameters(), lr=0.05), [], []
    given = arguments()
    for step in range(steps):
        args = given(step)
        loss = model(*args).pow(2).mean()
        found.append(seen(*args))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, [[value.item() if isinstance(value, torch.Tensor) else float(value) for value in each] for each in found]


def assert_equal(forward, arguments, seen=lambda *args: [], by_pytorch=False):
    reference, expected, values = trained(forward, arguments, seen, False)
    model, losses, found = trained(forward, arguments, seen, True)
    assert_parity(reference, model, expected, losses, by_pytorch=by_pytorch)
    assert found == [pytest.approx(each, rel=1e-5) for each in values]
    assert bool(model._graphacc_engine.by_pytorch.counts) == by_pytorch
    return model


def anew(*make):
    return lambda: lambda step: (X, *(each() if callable(each) else each for each in make))


def appends(self, x, found):
    found.append(self.linear(x))
    found.insert(0, len(found))
    return found[-1].tanh()


def sets(self, x, found):
    h = self.linear(x)
    found["hidden"], found["inner"]["scale"] = h.detach(), 2
    found["x"] = x
    return h * found.pop("factor")


def fills_a_queue(self, x, found):
    found.append(self.linear(x))
    return found.popleft() * found[-1]


def test_lists_that_the_forward_fills():
    assert_equal(appends, anew(list), lambda x, found: [len(found), found[0], found[1].sum()])


def test_dicts_that_the_forward_fills_and_empties():
    def seen(x, found):
        return [list(found) == ["inner", "hidden", "x"], found["x"] is x, found["hidden"].sum(), found["inner"]["scale"]]

    assert_equal(sets, anew(lambda: {"factor": 0.5, "inner": {"scale": 1}}), seen)


def test_deques_that_the_forward_fills():
    assert_equal(fills_a_queue, anew(lambda: collections.deque([torch.ones(8, 1)])), lambda x, found: [len(found), found[0].sum()])


def test_a_container_that_the_loop_keeps():
    """Of several steps; the nested one stays the same object."""

    def forward(self, x, found):
        found["inner"].append(self.linear(x).mean().detach())  # else the loop holds what PyTorch could still call backward() on after the step
        return self.linear(x) * len(found["inner"])

    def arguments():
        found = {"inner": (inner := [])}

        def of(step):
            assert found["inner"] is inner and len(inner) == step
            inner[:] = [value.detach() for value in inner]
            return X, found

        return of

    assert_equal(forward, arguments, lambda x, found: [value.detach() for value in found["inner"]])


@pytest.mark.lazy
def test_lists_that_a_lazily_captured_forward_fills():
    torch.manual_seed(0)
    model = compiled(type("Model", (Base,), {"forward": appends})(), None, capture="lazy")
    model(X, found := []).pow(2).mean().backward()
    assert found[0] == 1 and torch.allclose(found[1], nn.functional.linear(X, model.linear.weight, model.linear.bias))


def test_filled_without_gradients():
    torch.manual_seed(0)
    model = compiled(type("Model", (Base,), {"forward": appends})(), None)
    with torch.no_grad():
        model(X, found := [])
        assert found[0] == 1 and torch.allclose(found[1], nn.functional.linear(X, model.linear.weight, model.linear.bias))


def test_a_container_in_the_place_of_another():
    def forward(self, x, found):
        found["inner"] = [self.linear(x).detach()]
        return self.linear(x)

    def arguments():
        old = []

        def of(step):
            assert not old
            return X, {"inner": old}

        return of

    assert_equal(forward, arguments, lambda x, found: [len(found["inner"])], by_pytorch=True)


@pytest.mark.parametrize("where", ["twice", "model"])
def test_a_container_in_two_places(where):
    """The same list as two arguments, or as one and an attribute of the model; at first they are two."""

    def forward(self, x, found, other):
        found.append(self.linear(x).mean())
        return self.linear(x) * (1 + len(other if where == "twice" else LOG))

    def arguments():
        LOG.clear()

        def of(step):
            LOG.clear()
            found = [] if step < 2 else LOG
            return X, found, LOG if where == "twice" else None

        return of

    assert_equal(forward, arguments, lambda x, found, other: [len(found)], by_pytorch=True)


LOG: list = []


class Scale:
    def __init__(self):
        self.factor, self.calls = 1.0, 0

    def apply(self, y):
        return y * self.factor

    def count(self, y):
        self.calls += 1
        return y * self.calls


def bound(scale):
    def of(step):
        scale.factor = step + 1.0
        return X, scale.apply

    return of


def closed(step_of):
    def act(y):
        return y * step_of[0]

    def of(step):
        step_of[0] = step + 1.0
        return X, act

    return of


@pytest.mark.parametrize("arguments", [lambda: bound(Scale()), lambda: closed([0.0])], ids=["bound", "closed"])
def test_functions_whose_state_changes(arguments):
    assert_equal(lambda self, x, act: act(self.linear(x)), arguments)


@pytest.mark.parametrize("kind", ["append", "count", "next", "anew"])
@pytest.mark.default_cases("append", "anew")
def test_functions_that_count(kind):
    def arguments():
        found, scale, numbers = [], Scale(), itertools.count(1)
        if kind == "append":
            return lambda step: (X, lambda y, add=found.append: add(1) or y * len(found))
        if kind == "next":
            return lambda step: (X, numbers.__next__)
        return lambda step: (X, scale.count if kind == "count" else lambda y: y * (step + 1.0))

    def forward(self, x, act):
        y = self.linear(x)
        return y * act() if kind == "next" else act(y)

    if kind != "anew":
        assert_equal(forward, arguments, by_pytorch=True)
        return
    reference, expected, _ = trained(forward, arguments, lambda *args: [], False, steps=12)
    model, losses, _ = trained(forward, arguments, lambda *args: [], True, steps=12)
    assert_parity(reference, model, expected, losses, by_pytorch=True)
    assert len(model.programs) < 12 and any("the loop passes another function" in why for why in model._graphacc_engine.by_pytorch.counts)


def with_attribute(step):
    x = X.clone()
    if step >= 2:
        x.factor = float(step)
    return (x,)


def transposed(step):
    return (X if step % 2 else X.t().contiguous().t(),)


def moved(step):
    return (torch.cat([X, X])[step : step + 8],)


def ragged(step):
    return (torch.nested.nested_tensor([X[:2], X[: 3 + step]]),)


@pytest.mark.parametrize(
    ("forward", "given"),
    [
        (lambda self, x: self.linear(x) * getattr(x, "factor", 1.0), with_attribute),
        (lambda self, x: self.linear(x) * (2 if x.is_contiguous() else 1), transposed),
        (lambda self, x: self.linear(x) * x.stride(0), transposed),
        (lambda self, x: self.linear(x.as_strided((8, 4), (4, 1))), transposed),
        (lambda self, x: self.linear(x) * (1 + x.storage_offset()), moved),
        (lambda self, x: self.linear(x).to_padded_tensor(0.0), ragged),
    ],
    ids=["attribute", "contiguous", "stride", "as_strided", "offset", "nested"],
)
@pytest.mark.default_cases("attribute", "stride", "offset", "nested")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_a_tensor_has_besides_its_values(forward, given):
    assert_equal(forward, lambda: given, by_pytorch=True)


def test_what_autograd_keeps_of_a_tensor():
    def forward(self, x):
        return self.linear(x) * (2.0 if x.requires_grad else 1.0) + x._version

    def evaluated(compile_it):
        model, results = type("Model", (Base,), {"forward": forward})(), []
        model = compiled(model, None) if compile_it else model
        for step in range(6):
            x = X.clone().requires_grad_(step % 2 == 0)
            if step >= 2:
                x.detach().add_(0.0)
            with torch.no_grad():
                results += [model(x).sum().item(), model(x.detach()).sum().item()]
        return results

    torch.manual_seed(0)
    expected = evaluated(False)
    torch.manual_seed(0)
    assert evaluated(True) == pytest.approx(expected, rel=1e-5)


def test_the_loops_tensors_stay_as_they_are():
    x = X.clone()
    trained(lambda self, x: self.linear(x), lambda: lambda step: (x,), lambda *args: [], True)
    assert x.resize_(2, 4).shape == (2, 4)


def test_a_forward_that_logs_is_said(caplog):
    log = logging.getLogger("of_a_user")

    def forward(self, x):
        log.warning("called")
        return self.linear(x)

    assert_equal(forward, anew())
    assert any("prints only when it is captured" in record.message for record in caplog.records)
