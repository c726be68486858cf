"""Python state that a forward reads in the ways of the language itself (classes, code, dicts, names), and that of the process around it: a change is seen in the next step."""

import array
import collections
import contextlib
import contextvars
import ctypes
import enum
import functools
import itertools
import logging
import os
import queue
import random
import threading
import types
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import assert_parity, compiled

import graphacc


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.Tanh()


def code_of_functions():
    def positional(x, factor=1.0):
        return x * factor

    def by_name(x, *, factor=1.0):
        return x * factor

    def replaced(x):
        return x.tanh()

    def other(x):
        return x.sin()

    @functools.singledispatch
    def dispatched(kind, x):
        return x

    class Model(Base):
        short = functools.partialmethod(lambda self, x, factor: x * factor, factor=1.0)

        def __init__(self):
            super().__init__()
            self.scale = lambda x, factor=1.0: x * factor

        def inner(self, x):
            return x.tanh()

        def outer(self, x):
            return x.sin()

        def forward(self, x, factor=1.0):
            x = self.scale(dispatched(3, replaced(by_name(positional(self.linear(x))))))
            return self.short(self.inner(x)) * factor

    return Model(), [
        lambda m: setattr(positional, "__defaults__", (2.0,)),
        lambda m: setattr(by_name, "__kwdefaults__", {"factor": 3.0}),
        lambda m: by_name.__kwdefaults__.update(factor=0.5),
        lambda m: setattr(replaced, "__code__", other.__code__),
        lambda m: dispatched.register(int, lambda kind, x: x.exp()),
        lambda m: setattr(m.scale, "__defaults__", (2.0,)),
        lambda m: setattr(Model.inner, "__code__", Model.outer.__code__),
        lambda m: setattr(Model, "short", functools.partialmethod(lambda self, x, factor: x * factor, factor=2.0)),
        lambda m: setattr(Model.forward, "__defaults__", (3.0,)),
    ]


def classes():
    class First:
        def apply(self, x):
            return x.tanh()

    class Second:
        def apply(self, x):
            return x.sin()

    class Third(First):
        pass

    class Meta(type):
        plain = 1.0

        @property
        def computed(cls):
            return cls._computed

        def asked(cls):
            return cls._asked

    class Made(metaclass=Meta):
        _computed = 1.0
        _asked = 1.0
        listed = 1.0
        table = {"factor": 1.0}

    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.factor = 1.0

    class Described:
        def __init__(self):
            self.value = 1.0

        def __get__(self, owner, cls):
            return self.value

        def __set__(self, owner, value):
            self.value = value

    class Opaque:
        described = Described()

        def __init__(self):
            self.table = {"factor": 1.0}

        def __getattribute__(self, name):
            table = object.__getattribute__(self, "table")
            return table[name] if name in table else object.__getattribute__(self, name)

    class Other(nn.Tanh):
        def forward(self, x):
            return x.sigmoid()

    class Model(Base):
        def __init__(self):
            super().__init__()
            self.first, self.third, self.opaque = First(), Third(), Opaque()

        def forward(self, x):
            x = self.third.apply(self.first.apply(self.linear(x)))
            x = x * (2.0 if isinstance(self.first, Second) else 1.0) * Made.computed * Made.asked() * Made.plain
            x = x * vars(Made)["listed"] * Made.__dict__["table"]["factor"] * getattr(Made, "li" + "sted") * Kind.ONE.factor
            return self.act(x * self.opaque.factor * self.opaque.described)

    def opaque(m):
        object.__getattribute__(m.opaque, "table")["factor"] = 2.0

    return Model(), [
        lambda m: setattr(m.first, "__class__", Second),
        lambda m: setattr(Third, "__bases__", (Second,)),
        lambda m: setattr(Made, "_computed", 2.0),
        lambda m: setattr(Made, "_asked", 2.0),
        lambda m: setattr(Meta, "plain", 0.5),
        lambda m: setattr(Made, "listed", 2.0),
        lambda m: Made.table.update(factor=2.0),
        lambda m: setattr(Kind.ONE, "factor", 0.5),
        opaque,
        lambda m: setattr(m.opaque, "described", 2.0),
        lambda m: setattr(m.act, "__class__", nn.Sigmoid),
        lambda m: setattr(m.act, "__class__", Other),
    ]


def names():
    space = types.ModuleType("space")
    space.HELD = 1.0
    code = "def count(x):\n    try:\n        return x * ABSENT * len([1, 2]) * globals()['HELD']\n    except NameError:\n        return x * len([1, 2]) * globals()['HELD']\n"
    exec(compile(code, __file__, "exec"), vars(space))
    count = space.count

    class Held:
        pass

    def own(x):
        return x * own.__dict__["factor"]

    own.factor = 1.0

    class Model(Base):
        def __init__(self):
            super().__init__()
            self.held = Held()

        def forward(self, x):
            x = count(own(self.linear(x)))
            x = x * (2.0 if "a" in vars(self.held) else 1.0) * (1.0 + len(vars(self.held))) * (0.5 if "b" in dir(self.held) else 1.0)
            return x.tanh() * (2.0 if "flag" in self.__dict__ else 1.0) * self.__dict__.get("gain", 1.0) * (3.0 if "named" in vars(self) else 1.0)

    return Model(), [
        lambda m: setattr(m.held, "a", 1),
        lambda m: setattr(m.held, "b", 1),
        lambda m: delattr(m.held, "a"),
        lambda m: setattr(m, "flag", 1),
        lambda m: setattr(m, "gain", 0.5),
        lambda m: setattr(m, "named", 0.5),
        lambda m: setattr(space, "ABSENT", 2.0),
        lambda m: setattr(space, "len", lambda items: 3),
        lambda m: setattr(space, "HELD", 0.5),
        lambda m: setattr(own, "factor", 2.0),
    ]


def modules_outside():
    class Own(nn.Module):
        factor = 1.0

        def __init__(self):
            super().__init__()
            self.shift = 0.0

        def forward(self, x):
            return x * self.factor + self.shift

    slope, dropout, listed, hooked, switch = nn.LeakyReLU(0.1), nn.Dropout(1.0), [Own()], nn.Identity(), nn.Identity()

    class Model(Base):
        def forward(self, x):
            x = hooked(slope(listed[0](self.linear(x))))
            return x + dropout(x) + (x if switch.training else 0.0)

    return Model(), [
        lambda m: setattr(slope, "negative_slope", 0.5),
        lambda m: setattr(slope, "negative_slope", 0.7),
        lambda m: dropout.eval(),
        lambda m: setattr(listed[0], "factor", 2.0),
        lambda m: setattr(listed[0], "shift", 0.3),
        lambda m: switch.eval(),
        lambda m: hooked.register_forward_hook(lambda module, args, result: result * 2) and None,
    ]


def the_process():
    event, lock, number, bytes_, log = threading.Event(), threading.Lock(), ctypes.c_double(1.0), bytearray(b"\1"), logging.getLogger("reflected")
    log.setLevel(logging.ERROR)
    seen = memoryview(bytes_)
    alive = [Thing(), Thing()]
    group = weakref.WeakSet(alive)

    class Model(Base):
        def forward(self, x):
            x = self.linear(x) * (1 + event.is_set()) * (1 + lock.locked()) * number.value * seen[0] * len(group)
            x = x * (2.0 if log.isEnabledFor(logging.DEBUG) else 1.0) * float(os.environ.get("GRAPHACC_TEST_FACTOR", "1"))
            x = x * (2.0 if torch.is_warn_always_enabled() else 1.0) * (0.5 if torch.are_deterministic_algorithms_enabled() else 1.0)
            return x.tanh() * (3.0 if torch.get_num_threads() == 1 else 1.0)

    return Model(), [
        lambda m: event.set(),
        lambda m: lock.acquire() and None,
        lambda m: setattr(number, "value", 0.1),
        lambda m: bytes_.__setitem__(0, 2),
        lambda m: group.discard(alive[0]),
        lambda m: log.setLevel(logging.DEBUG),
        lambda m: os.environ.__setitem__("GRAPHACC_TEST_FACTOR", "0.1"),
        lambda m: torch.set_warn_always(True),
        lambda m: torch.use_deterministic_algorithms(True),
    ]


class Thing:
    pass


def methods():
    """Of Python's own types, by which a forward reads what they belong to."""
    table, items, names, thing, partly = {"factor": 1.0}, [1.0], {"half"}, Thing(), {"factor": 1.0}
    thing.factor = 1.0
    get, item, has, attribute, later = table.get, items.__getitem__, names.__contains__, thing.__getattribute__, functools.partial(partly.get, "factor")

    class Model(Base):
        def __init__(self):
            super().__init__()
            self.own = {"factor": 1.0}
            self.read = [self.own.get]

        def forward(self, x):
            x = self.act(self.linear(x)) * get("factor") * item(0) * (0.5 if has("half") else 1.0)
            return x * attribute("factor") * later() * self.read[0]("factor")

    return Model(), [
        lambda m: table.update(factor=0.7),
        lambda m: items.__setitem__(0, 1.2),
        lambda m: names.clear(),
        lambda m: setattr(thing, "factor", 1.4),
        lambda m: partly.update(factor=1.6),
        lambda m: m.own.update(factor=0.3),
    ]


def functions_of_torch():
    class Model(Base):
        def forward(self, x):
            return torch.tanh(F.silu(self.act(self.linear(x))))

    return Model(), [
        lambda m: setattr(F, "silu", torch.sin),
        lambda m: setattr(torch, "tanh", torch.cos),
        lambda m: setattr(nn.Tanh, "forward", lambda self, x: x.sigmoid()),
    ]


@contextlib.contextmanager
def process_kept():
    patched = [(F, "silu"), (torch, "tanh"), (nn.Tanh, "forward")]
    before = [(owner, name, getattr(owner, name)) for owner, name in patched]
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        torch.set_warn_always(False)
        torch.use_deterministic_algorithms(False)
        os.environ.pop("GRAPHACC_TEST_FACTOR", None)


def trained(make, compile_it):
    torch.manual_seed(0)
    model, changes = make()
    model = compiled(model, None) if compile_it else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    with process_kept():
        for step in range(len(changes) + 1):
            if step:
                changes[step - 1](model)
            loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).sub(0.1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("make", [code_of_functions, classes, names, modules_outside, methods, the_process, functions_of_torch], ids=lambda make: make.__name__)
def test_every_change_is_seen(make):
    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses)
    assert len(set(expected)) == len(expected)


def test_an_unchanged_process_is_captured_once():
    torch.manual_seed(0)
    for make in (code_of_functions, classes, names, modules_outside, methods, the_process, functions_of_torch):
        model, _ = make()
        model = compiled(model, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _step in range(3):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(model.programs) == 1, make.__name__


def test_a_class_exchanged_before_backward_is_refused():
    torch.manual_seed(0)

    class Model(Base):
        def forward(self, x):
            return self.act(self.linear(x))

    model = compiled(Model(), None)
    loss = model(torch.randn(8, 4)).pow(2).mean()
    model.act.__class__ = nn.Sigmoid
    with pytest.raises(graphacc.GraphAccError, match="the class of a module"):
        loss.backward()


def by_open(path):
    with open(path) as file:
        return file.read()


@pytest.mark.parametrize("read", [lambda path: path.read_text(), by_open, lambda path: "2.0" if path.exists() else "1.0"], ids=["pathlib", "open", "exists"])
def test_files_are_read_in_every_step(tmp_path, read):
    path = tmp_path / "factor.txt"

    def make():
        path.write_text("1.0")
        if read(path) == "2.0":
            path.unlink()

        class Model(Base):
            def forward(self, x):
                return self.act(self.linear(x)) * float(read(path))

        return Model(), [lambda m: path.write_text("3.0") and None, lambda m: path.write_text("0.5") and None]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses, by_pytorch=True)
    assert any(str(path) in why for why in model._graphacc_engine.by_pytorch.counts)


def of_a_queue(kind):
    waiting = kind()
    for factor in (1.0, 0.5, 2.0):
        waiting.put(factor)
    return functools.partial(waiting.get, timeout=10)


CONSUMED = {
    "queue": lambda: of_a_queue(queue.Queue),
    "simple_queue": lambda: of_a_queue(queue.SimpleQueue),
    "count": lambda: itertools.count(1).__next__,
    "deque": lambda: collections.deque([1.0, 0.5, 2.0]).popleft,
    "random": lambda: random.Random(0).random,
    "numpy": lambda: numpy.random.default_rng(0).random,
}


@pytest.mark.parametrize("kind", CONSUMED)
@pytest.mark.default_cases("queue", "deque", "numpy")
def test_what_gives_something_else_is_asked_in_every_step(kind):
    def make():
        ask = CONSUMED[kind]()

        class Model(Base):
            def forward(self, x):
                return self.act(self.linear(x)) * ask()

        return Model(), [lambda m: None, lambda m: None]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses, by_pytorch=True)
    assert model._graphacc_engine.by_pytorch.counts


class Counter:
    """A number in an object whose type is Python's own; `get` and `set` are ways to it."""

    def __init__(self, kind: str):
        value: Any = {
            "bytearray": bytearray(1), "array": array.array("d", [0.0]), "memoryview": memoryview(bytearray(8)).cast("d"), "ctypes": (ctypes.c_float * 2)(),
            "contextvar": contextvars.ContextVar(kind), "local": threading.local(), "event": threading.Event(),
        }[kind]  # fmt: skip
        self.value = value
        if kind == "event":
            self.get, self.set = lambda: int(value.is_set()), lambda now: value.set() if now % 2 else value.clear()
        elif kind == "contextvar":
            self.get, self.set = value.get, value.set
        elif kind == "local":
            self.get, self.set = lambda: value.now, lambda now: setattr(value, "now", now)
        else:
            self.get, self.set = lambda: value[0], lambda now: value.__setitem__(0, now)
        self.set(0)


@pytest.mark.parametrize("kind", ["bytearray", "array", "memoryview", "ctypes", "contextvar", "local", "event"])
@pytest.mark.default_cases("bytearray", "contextvar", "event")
def test_a_forward_that_counts_is_run_by_pytorch(kind):
    def make():
        counter = Counter(kind)

        class Model(Base):
            def forward(self, x):
                counter.set(counter.get() + 1)
                return self.act(self.linear(x)) * (1.0 + counter.get())

        return Model(), [lambda m: None, lambda m: counter.set(5)]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses, by_pytorch=True)
    assert any("which a compiled program does not do again in every step" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_attributes_of_parameters_are_read():
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.linear.weight.factor = 2.0
            self.register_buffer("shift", torch.zeros(4))
            self.shift.table = {"factor": 1.0}

        def forward(self, x):
            return self.act(self.linear(x)) * getattr(self.linear.weight, "factor", 1.0) * self.shift.table["factor"] + self.shift

    def make():
        return Model(), [lambda m: setattr(m.linear.weight, "factor", 3.0), lambda m: m.shift.table.update(factor=0.5), lambda m: delattr(m.linear.weight, "factor")]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses)


def test_tensors_of_modules_outside_of_the_model():
    class Outside(nn.Module):
        def __init__(self, writes):
            super().__init__()
            self.factor, self.writes = torch.ones(4), writes

        def forward(self, x):
            if self.writes:
                self.factor = self.factor * 1.5
            return x * self.factor

    for writes in (False, True):

        def make(writes=writes):
            outside = [Outside(writes), Outside(writes)]

            class Model(Base):
                def forward(self, x):
                    return self.act(outside[1](outside[0](self.linear(x))))

            return Model(), [lambda m: setattr(outside[0], "factor", torch.full((4,), 2.0)), lambda m: setattr(outside[1], "factor", torch.full((4,), 0.5))]

        reference, expected = trained(make, False)
        model, losses = trained(make, True)
        assert_parity(reference, model, expected, losses, by_pytorch=writes)


def ema(teacher, model):
    with torch.no_grad():
        teacher[0].weight.lerp_(model.linear.weight, 0.5)


TEACHERS = {
    "ema": ema,
    "data": lambda teacher, model: teacher[0].weight.data.mul_(0.5),
    "loaded": lambda teacher, model: teacher.load_state_dict({name: value * 0.9 for name, value in teacher.state_dict().items() if value.is_floating_point()}, strict=False),
    "another": lambda teacher, model: setattr(teacher[0], "weight", nn.Parameter(teacher[0].weight * 2, requires_grad=False)),
}


@pytest.mark.parametrize("change", TEACHERS)
@pytest.mark.default_cases("ema", "data")
def test_weights_of_a_teacher_outside_of_the_model_are_inputs(change):
    def make():
        teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()

        class Model(Base):
            def __init__(self):
                super().__init__()
                self.teacher = [teacher]  # no part of the state_dict

            def forward(self, x):
                with torch.no_grad():
                    target = self.teacher[0](x)
                return self.act(self.linear(x)) - target

        return Model(), 2 * [functools.partial(TEACHERS[change], teacher)]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses)
    assert len(set(expected)) == len(expected)
    assert len(model.programs) == 1


@pytest.mark.parametrize("kind", ["trains", "lstm", "parameters"])
def test_teachers_that_pytorch_runs(kind):
    """One that changes its statistics, weights in a list, weights that are found by `parameters()`."""

    def make():
        teacher = (nn.LSTM(4, 4) if kind == "lstm" else nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).requires_grad_(False)

        class Model(Base):
            def forward(self, x):
                target = sum(p.mean() for p in teacher.parameters()) if kind == "parameters" else teacher(x)[0]
                return self.act(self.linear(x)) - target

        def change(model):
            for p in teacher.parameters():
                p.data.mul_(0.5)

        return Model(), [change, change]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses, by_pytorch=True)
    assert model._graphacc_engine.by_pytorch.counts and len(set(expected)) == len(expected)


def test_tensors_in_variables_are_constants_of_a_program():
    """Without lazy tensors; another value is another program, until there are too many."""

    def make():
        factor, shifts = torch.ones(4), [torch.zeros(4)]

        class Model(Base):
            def forward(self, x):
                return self.act(self.linear(x)) * factor + shifts[0]

        return Model(), [lambda m: factor.mul_(0.5), lambda m: shifts[0].add_(1.0), lambda m: shifts.__setitem__(0, torch.ones(4) * 2)] + 10 * [lambda m: shifts[0].add_(0.1)]

    reference, expected = trained(make, False)
    model, losses = trained(make, True)
    assert_parity(reference, model, expected, losses, by_pytorch=True)
    assert len(set(expected)) == len(expected)
    assert any("changes again and again" in why for why in model._graphacc_engine.by_pytorch.counts)
    model = compiled(make()[0], None, capture="fx")
    model(torch.randn(8, 4)).pow(2).mean().backward()
