"""Forwards that ask for more than a tensor's values, seed generators, or keep what they return: as in plain PyTorch, by PyTorch where a program cannot."""

import collections
import copy
import gc
import logging
import os
import re
import threading
import types
import weakref

import pytest
import torch
from selection import with_matrix
from torch import Tensor, nn
from training import compiled

from graphacc.errors import LoopError

KNOWN = torch.ones(8, 4)
VALUES = {KNOWN: 3.0}
SETTINGS = types.ModuleType("settings")
OWN = types.ModuleType("own")
OWN.gain = 2.0


class Plain(Tensor):
    pass


class Doubling(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


class AttrDict(dict):
    __getattr__ = dict.__getitem__


class Asking(nn.Module):
    """A linear layer, and code that is given the module, its result, and the argument."""

    def __init__(self, code):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.code = code
        self.known, self.kept, self.table = [KNOWN], [], {}

    def forward(self, x):
        return self.code(self, self.linear(x), x)


def counted(h):
    counted.calls = getattr(counted, "calls", 0) + 1
    return h * counted.calls


def module_counts(m, h, x):
    SETTINGS.calls = getattr(SETTINGS, "calls", 0) + 1
    return h * SETTINGS.calls


def environment_counts(m, h, x):
    os.environ["ASKED"] = str(int(os.environ.get("ASKED", "0")) + 1)
    return h * int(os.environ["ASKED"])


def updates_its_dict(m, h, x):
    vars(m).update(seen=x.shape[0])
    return h * m.seen


def is_plain(x):
    return type(x) is Tensor


def asks_by_default(m, h, x, ask=is_plain):
    return h * 2 if ask(h) else h


def metaclass_inside(m, h, x):
    class Meta(type):
        def __call__(cls, *args):
            return super().__call__(*args)

    class Made(metaclass=Meta):
        gain = 3.0

    return h * Made().gain if type(h) is Tensor else h


def imports_and_warns(m, h, x):
    """Both leave names in files: those that Python itself puts there are no state of the code."""
    OWN.__dict__.setdefault("__warningregistry__", {})
    OWN.late = OWN.__dict__.get("late") or types.ModuleType("late")
    return h * OWN.gain


TEACHERS = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)]


def new_module(m, h, x):
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer(h)


def seeds(m, h, x):
    torch.manual_seed(3)
    return h + torch.randn(4)


def forks(m, h, x):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return h + torch.randn(4)


def sets_its_state(m, h, x):
    state = torch.get_rng_state()
    first = torch.randn(4)
    torch.set_rng_state(state)
    return h + first - torch.randn(4)


def with_gradient(x):
    x.grad = torch.ones_like(x)
    return x


def doubled_if(found):
    return lambda m, h, x: h * 2 if found(m, h, x) else h


def third(change):
    return lambda x, step: change(x) if step == 2 else x


def kept_list(result):
    result[1].append(1)
    return result[0]


def kept_dict(result):
    result[1]["n"] = result[1].get("n", 0) + 1
    return result[0]


SAME = lambda x, step: x  # noqa: E731
CASES = {
    "requires_grad": (doubled_if(lambda m, h, x: x.requires_grad), third(lambda x: x.requires_grad_())),
    "is_leaf": (doubled_if(lambda m, h, x: x.is_leaf), third(lambda x: x.requires_grad_() * 1)),
    "a view": (doubled_if(lambda m, h, x: x._base is None), third(lambda x: x.view(8, 4))),
    "grad": (doubled_if(lambda m, h, x: x.grad is None), third(with_gradient)),
    "shared memory": (doubled_if(lambda m, h, x: x.is_shared()), third(lambda x: x.share_memory_())),
    "memory": (lambda m, h, x: h * x.untyped_storage().size() / 128, third(lambda x: torch.cat([x, x])[:8])),
    "a parameter as argument": (doubled_if(lambda m, h, x: isinstance(x, nn.Parameter)), third(lambda x: nn.Parameter(x, requires_grad=False))),
    "the class": (doubled_if(lambda m, h, x: type(x) is Plain), third(lambda x: x.as_subclass(Plain))),
    "a global tensor": (doubled_if(lambda m, h, x: x is KNOWN), lambda x, step: KNOWN if step % 2 else x),
    "a tensor in a list": (doubled_if(lambda m, h, x: any(x is known for known in m.known)), lambda x, step: KNOWN if step % 2 else x),
    "a key": (lambda m, h, x: h + VALUES.get(x, 0.0), lambda x, step: KNOWN if step % 2 else x),
    "parameters": (doubled_if(lambda m, h, x: isinstance(m.linear.weight, nn.Parameter) and type(m.linear.bias) is nn.Parameter), SAME),
    "type": (doubled_if(lambda m, h, x: type(h) == Tensor and type(x) in (Tensor, list)), SAME),  # noqa: E721
    "type, by a table": (lambda m, h, x: {Tensor: lambda y: y * 3}.get(type(h), lambda y: y)(h), SAME),
    "type, in a default": (asks_by_default, SAME),
    "type, otherwise": (lambda m, h, x: type("Made", (), {"gain": 3.0})().gain * h if isinstance(type(h), type) and not isinstance(h, type) else h, SAME),
    "type, for a metaclass": (metaclass_inside, SAME),
    "names that Python leaves in a file": (imports_and_warns, SAME),
    "a copy of a module": (lambda m, h, x: copy.copy(m.linear)(h), SAME),
    "a deep copy of a module": (lambda m, h, x: copy.deepcopy(m.linear)(h), SAME),
    "a new module": (new_module, SAME),
    "an attribute of a function": (lambda m, h, x: counted(h), SAME),
    "an attribute of a file": (module_counts, SAME),
    "the environment": (environment_counts, SAME),
    "its own dict": (updates_its_dict, SAME),
    "manual_seed": (seeds, SAME),
    "fork_rng": (forks, SAME),
    "rng_state": (sets_its_state, SAME),
    "a generator": (lambda m, h, x: h + torch.randn(4, generator=torch.Generator().manual_seed(0)), SAME),
}
RETURNED = {
    "a list of its own": (lambda m, h, x: (h * (1 + len(m.kept)), m.kept), kept_list),
    "a dict of its own": (lambda m, h, x: (h * (1 + m.table.get("n", 0)), m.table), kept_dict),
    "a namespace": (lambda m, h, x: types.SimpleNamespace(a=h, b=x), lambda result: result.a),
    "a UserDict": (lambda m, h, x: collections.UserDict(a=h), lambda result: result["a"]),
    "a dict with attributes": (lambda m, h, x: AttrDict(a=h), lambda result: result.a),
    "a set": (lambda m, h, x: {h}, lambda result: next(iter(result))),
    "values": (lambda m, h, x: {"a": h}.values(), lambda result: next(iter(result))),
    "what becomes a subclass": (lambda m, h, x: h, lambda result: result.as_subclass(Plain)),
}
DEFAULT = ("requires_grad", "the class", "a key", "parameters", "type", "a copy of a module", "an attribute of a function", "fork_rng", "a generator")


def losses(code, given, taken, *, by_graphacc):
    torch.manual_seed(0)
    for owner in (counted, SETTINGS):
        vars(owner).pop("calls", None)
    os.environ.pop("ASKED", None)
    model = Asking(code)
    if by_graphacc:
        model = compiled(model, None)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = taken(model(given(x, step))).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), torch.rand(()).item()]  # what the loop draws itself
    return found


def check(code, given, taken):
    expected = losses(code, given, taken, by_graphacc=False)
    assert losses(code, given, taken, by_graphacc=True) == pytest.approx(expected, rel=1e-5)


LAZY = pytest.mark.filterwarnings("ignore:the step is captured by lazy tensors")


@LAZY
@pytest.mark.parametrize("name", with_matrix(CASES, DEFAULT))
def test_what_a_forward_asks(name):
    check(*CASES[name], lambda result: result)


@pytest.mark.parametrize("name", with_matrix(RETURNED, ("a list of its own", "a namespace", "a set")))
def test_what_a_forward_returns(name):
    code, taken = RETURNED[name]
    check(code, SAME, taken)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(8, 4), nn.Embedding(4, 4), nn.LayerNorm(4)

    def forward(self, ids):
        return self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1]).expand_as(ids)))


class MakesLayers(nn.Module):
    """A tutorial's BERT: its layers make further ones in every forward."""

    def __init__(self):
        super().__init__()
        self.embedded, self.layers, self.head = Embedded(), nn.ModuleList(Asking(new_module) for _ in range(2)), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedded.words.weight

    def forward(self, ids):
        x = self.embedded(ids)
        for layer in self.layers:
            x = layer(x) + x
        return self.head(x)


def test_layers_that_are_made_in_a_forward_leave_its_other_parts_compiled():
    ids, found = torch.arange(16).view(4, 4) % 8, []
    for by_graphacc in (False, True):
        torch.manual_seed(0)
        model = MakesLayers()
        if by_graphacc:
            model = compiled(model, None)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert any("makes a Linear" in why for why in model._graphacc_engine.by_pytorch.counts) and "embedded" in str(model.explain())


def gradient_norm(m, h, x):
    gradient = m.linear.weight.grad
    return h if gradient is None else h / (1 + gradient.norm())


ASKED_OF_PARAMETERS = {
    "an attribute": doubled_if(lambda m, h, x: getattr(m.linear.weight, "tag", None) == "a"),
    "whether there is an attribute": lambda m, h, x: h * m.linear.bias.scale if hasattr(m.linear.bias, "scale") else h,
    "a gradient": gradient_norm,
    "inference mode": doubled_if(lambda m, h, x: torch.is_inference_mode_enabled()),
    "a tensor of inference mode": doubled_if(lambda m, h, x: x.is_inference()),
}


def asked_of_parameters(code, **options):
    """What a loop reads that accumulates two gradients, tags parameters in between, and evaluates in inference mode."""
    torch.manual_seed(0)
    model = Asking(code)
    if options:
        model = compiled(model, None, **options)
    linear, optimizer, found = model.linear, torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(8):
        if step in (2, 4):
            linear.weight.tag, linear.bias.scale = "ab"[step // 4], step / 2
        if step == 6:
            del linear.weight.tag, linear.bias.scale
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).pow(2).mean()
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            found += [loss.item(), model(torch.ones(8, 4)).sum().item()]
    return found


@pytest.mark.parametrize("capture", ["fx", pytest.param("lazy", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", ASKED_OF_PARAMETERS)
def test_what_a_forward_asks_of_parameters(name, capture):
    if capture == "lazy":
        pytest.importorskip("torch_xla")
    expected = asked_of_parameters(ASKED_OF_PARAMETERS[name])
    assert asked_of_parameters(ASKED_OF_PARAMETERS[name], capture="auto" if capture == "fx" else "lazy") == pytest.approx(expected, rel=1e-5)


def test_operators_of_a_subclass_are_refused():
    """The model's parameters have operators of their own, which do not ask an argument for its."""
    model = compiled(Asking(lambda m, h, x: h), None)
    with pytest.raises(LoopError, match=r"is a Doubling, whose __torch_function__ .* pass its .as_subclass\(torch.Tensor\)"):
        model(torch.randn(8, 4).as_subclass(Doubling))


def test_gradients_that_the_forward_keeps():
    """As in Grad-CAM: the forward calls retain_grad(), and the loop looks at an attribute."""

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.activation = self.linear(x).tanh()
            self.activation.retain_grad()
            return self.activation * 2

    torch.manual_seed(0)
    reference = Kept()
    model = compiled(copy.deepcopy(reference), None)
    for one in (reference, model):
        torch.manual_seed(1)
        one(torch.randn(8, 4)).pow(2).mean().backward()
    assert torch.allclose(model.activation.grad, reference.activation.grad)


def test_teachers_that_take_turns():
    """Each is found in a run of its own, by which neither is one that the forward makes."""
    torch.manual_seed(0)
    reference = Asking(lambda m, h, x: h - TEACHERS[len(x) % 2](x))
    model = compiled(copy.deepcopy(reference), None)
    for rows in (4, 5, 4, 5):
        x = torch.randn(rows, 4)
        assert torch.allclose(model(x).detach(), reference(x).detach(), atol=1e-6)
    assert not model._graphacc_engine.by_pytorch.counts


@LAZY
def test_other_threads_seed_as_they_like():
    """Seeding is refused in the code that is captured, and in no other thread."""
    torch.manual_seed(0)
    model, started, ended, errors = None, threading.Event(), threading.Event(), []

    def work():
        while not ended.is_set():
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
            except Exception as error:
                errors.append(error)
            started.set()

    def waits(m, h, x):
        started.clear()
        assert started.wait(10)
        return h

    thread = threading.Thread(target=work)
    thread.start()
    try:
        model = compiled(Asking(waits), None)
        model(torch.randn(8, 4)).pow(2).mean().backward()
    finally:
        ended.set()
        thread.join()
    assert not errors


def test_optimizers_are_let_go_and_share_programs():
    """A new one for every client, task or fold: as many programs as one has, and none stays alive with its state."""
    model = compiled(nn.Linear(4, 4), None)
    known = []
    for _ in range(4):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        known.append(weakref.ref(optimizer))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
        state = optimizer.state
        del optimizer
    assert sum(reference() is not None for reference in known) == 0
    assert len(re.findall("^step ", model.explain(), re.MULTILINE)) == 1
    with pytest.raises(LoopError, match="keep the optimizer, or its state_dict"):
        list(state.items())
    gc.collect()


def test_optimizers_whose_groups_are_cut_elsewhere():
    """The same parameters in the same order, and the same settings but for the rates of the groups: which parameter has which rate is no secret of the program."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = compiled(copy.deepcopy(reference), None)
    for one in (reference, model):
        torch.manual_seed(1)
        parameters = list(one.parameters())
        for cut in (1, 3, 2):
            optimizer = torch.optim.SGD([{"params": parameters[:cut], "lr": 0.1}, {"params": parameters[cut:], "lr": 0.01}])
            one(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, expected in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_a_number_by_position_in_one_call_and_by_name_in_the_other(caplog):
    """As gradient reversal is often written."""

    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x, alpha):
            return self.linear(x) * alpha

    torch.manual_seed(0)
    reference = Reversed()
    model = compiled(copy.deepcopy(reference), None)
    found = []
    with caplog.at_level(logging.WARNING, "graphacc"):
        for one in (reference, model):
            torch.manual_seed(1)
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                loss = (one(torch.randn(8, 4), step / 7) - one(torch.randn(8, 4), alpha=step / 7)).pow(2).mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
    assert found[6:] == pytest.approx(found[:6], rel=1e-5)
    assert len(re.findall("^step ", model.explain(), re.MULTILINE)) <= 3
