"""Optimizers that people write themselves train as they do without GraphAcc: their step is compiled, or PyTorch runs it."""

import collections
import copy

import numpy as np
import pytest
import torch
from selection import with_matrix
from tolerances import LOSS, assert_close
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphacc

STEPS = 5
calls = 0
factor = 1.0


class Own(torch.optim.Optimizer):
    """Gradient descent, divided by what `divisor` gives."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.prepare()

    def prepare(self):
        pass

    def each(self):
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            p.add_(p.grad, alpha=-group["lr"] / self.divisor(group, p))

    def divisor(self, group, p):
        return 1


# ---- state elsewhere than in the state of a parameter


class KeyOfItsOwn(Own):
    """As madgrad has it."""

    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
        k = self.state["k"].item()
        for group, p in self.each():
            p.data.add_(p.grad, alpha=-group["lr"] / (k + 1))
        self.state["k"] += 1


class TensorInPlace(Own):
    def prepare(self):
        self.k = torch.zeros(())

    def divisor(self, group, p):
        return self.k.add_(1).item()


class TensorReplaced(Own):
    def prepare(self):
        self.k = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.k = self.k + 1
        for group, p in self.each():
            p.sub_(group["lr"] * p.grad / self.k)


class TensorInGroup(Own):
    def prepare(self):
        for group in self.param_groups:
            group["k"] = torch.ones(())

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            p.sub_(group["lr"] * p.grad / group["k"])
            group["k"] = group["k"] + 1


class ListGrows(Own):
    def prepare(self):
        self.history = []

    def divisor(self, group, p):
        self.history.append(1)
        return len(self.history)


class ListOfGroupGrows(Own):
    def prepare(self):
        for group in self.param_groups:
            group["history"] = []

    def divisor(self, group, p):
        group["history"].append(1)
        return len(group["history"])


class LastGradients(Own):
    def prepare(self):
        self.last = collections.deque(maxlen=3)

    def divisor(self, group, p):
        self.last.append(p.grad.clone())
        return 1 + len(self.last)


class BuffersByParameter(Own):
    def prepare(self):
        self.buffers = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            if p not in self.buffers:
                self.buffers[p] = torch.zeros_like(p)
            p.sub_(group["lr"] * self.buffers[p].mul_(0.9).add_(p.grad))


class ListOfBuffers(Own):
    def prepare(self):
        self.buffers = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for (group, p), buffer in zip(self.each(), self.buffers, strict=True):
            p.sub_(group["lr"] * buffer.mul_(0.9).add_(p.grad))


class CounterOfClass(Own):
    steps = 0

    def divisor(self, group, p):
        type(self).steps += 1
        return type(self).steps


class GlobalCounter(Own):
    def divisor(self, group, p):
        global calls
        calls += 1
        return calls


class CounterOfObject(Own):
    class Box:
        count = 0

    def prepare(self):
        self.box = self.Box()

    def divisor(self, group, p):
        self.box.count += 1
        return self.box.count


class ArrayInPlace(Own):
    def prepare(self):
        self.count = np.zeros(2)

    def divisor(self, group, p):
        self.count[0] += 1
        return float(self.count[0])


class Counts(Own):
    def prepare(self):
        self.numbers = iter(range(1, 1000))

    def divisor(self, group, p):
        return next(self.numbers)


class Draws(Own):
    def prepare(self):
        self.generator = torch.Generator().manual_seed(1)

    def divisor(self, group, p):
        return 1 + torch.rand((), generator=self.generator).item()


class AttributeOfParameter(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            if not hasattr(p, "average"):
                p.average = torch.zeros_like(p)
            p.sub_(group["lr"] * p.average.mul_(0.9).add_(p.grad))


class HiddenAttributeOfOne(Own):
    """Of the first parameter alone; the others have a number of that name."""

    @torch.no_grad()
    def step(self, closure=None):
        for number, (group, p) in enumerate(self.each()):
            if not hasattr(p, "_average"):
                p._average = 1.0 if number else torch.zeros_like(p)
            p.sub_(group["lr"] * p.grad * p._average if number else group["lr"] * p._average.mul_(0.9).add_(p.grad))


class SettingOfParameter(Own):
    """The loop changes it."""

    def divisor(self, group, p):
        return getattr(p, "divisor", 1)


class GlobalSetting(Own):
    """The loop changes it."""

    def divisor(self, group, p):
        return factor


class OwnListOfParameters(Own):
    def prepare(self):
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            p.sub_(self.param_groups[0]["lr"] * p.grad)


class ByParameter(Own):
    def prepare(self):
        self.divisors = {p: i + 1 for group in self.param_groups for i, p in enumerate(group["params"])}

    def divisor(self, group, p):
        return self.divisors[p]


class ById(Own):
    def prepare(self):
        self.divisors = {id(p): i + 1 for group in self.param_groups for i, p in enumerate(group["params"])}

    def divisor(self, group, p):
        return self.divisors.get(id(p), 1)


class LooksThroughState(Own):
    def divisor(self, group, p):
        if not self.state[p]:
            self.state[p]["number"] = len(self.state)
        return self.state[p]["number"]


class ChangesRate(Own):
    def divisor(self, group, p):
        group["lr"] *= 0.9
        return 1


class FirstStepIsAnother(Own):
    def prepare(self):
        self.is_first = True

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            p.sub_((0 if self.is_first else group["lr"]) * p.grad)
        self.is_first = False


class CallsBack(Own):
    def prepare(self):
        self.callbacks = [self.told]
        self.times = 0

    def told(self):
        self.times += 1

    def divisor(self, group, p):
        for callback in self.callbacks:
            callback()
        return self.times


# ---- what a step does besides


class Returns(Own):
    def step(self, closure=None):
        super().step()
        return sum(p.grad.norm().item() for _, p in self.each())


class ClearsGradients(Own):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for _, p in self.each():
            p.grad = None


class NormOfAll(Own):
    """Its code fails without parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for _, p in self.each()]).norm()
        for group, p in self.each():
            p.sub_(group["lr"] / (norm + 1) * p.grad)


class ReplacesData(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            p.data = p.data - group["lr"] * p.grad


class ScalesGradients(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


class EverySecond(torch.optim.Adam):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count % 2:
            super().step(closure)


# ---- state whose first value is that behind the first step


class CountedFromOne(Own):
    def divisor(self, group, p):
        state = self.state[p]
        state["n"] = state.get("n", 0) + 1
        return state["n"]


class CountedInTensor(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            state["n"] = state.get("n", torch.zeros(())) + 1
            p.sub_(group["lr"] / state["n"] * p.grad)


class CountedByTheFirst(Own):
    @torch.no_grad()
    def step(self, closure=None):
        state = self.state[self.param_groups[0]["params"][0]]
        state["n"] = state.get("n", 0) + 1
        for group, p in self.each():
            p.sub_(group["lr"] / state["n"] * p.grad)


class Doubled(Own):
    def divisor(self, group, p):
        state = self.state[p]
        state["n"] = state["n"] * 2 if "n" in state else 1.0
        return state["n"]


class PullsToItsStart(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            if "start" not in state:
                state["start"], state["n"] = p.clone(), 1
            else:
                state["n"] += 1
            p.add_(p.grad, alpha=-group["lr"] / state["n"]).lerp_(state["start"], 0.1)


class AverageFromTheFirst(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            state["m"] = state.get("m", 0) * 0.9 + p.grad
            p.sub_(group["lr"] * state["m"])


class BranchesOnCount(Own):
    def divisor(self, group, p):
        state = self.state[p]
        state["n"] = state.get("n", 0) + 1
        return 2 if state["n"] > 3 else 1


COMPILED = {SettingOfParameter, GlobalSetting, NormOfAll, ReplacesData, ScalesGradients, CountedFromOne, CountedInTensor, Doubled, PullsToItsStart, AverageFromTheFirst}
"""The others are PyTorch's."""

OPTIMIZERS = [cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not Own]


def trained(model: nn.Module, optimizer_class: type) -> tuple[list, list[torch.Tensor]]:
    global calls, factor
    calls, factor, CounterOfClass.steps = 0, 1.0, 0
    optimizer = optimizer_class(model.parameters())
    shown: list = []
    for step in range(STEPS):
        loss = (model(torch.linspace(-1, 1, 32).view(8, 4)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        shown += [loss.item(), optimizer.step() or 0.0, optimizer.param_groups[0]["lr"]]
        if step == 2:
            factor = 2.0
            for number, p in enumerate(model.parameters()):
                p.divisor = number + 1
    return [*shown, calls, CounterOfClass.steps], [p.detach().clone() for p in model.parameters()]


VARIANTS = (
    *(CountedFromOne, CounterOfClass, CounterOfObject, ById, OwnListOfParameters, HiddenAttributeOfOne, ListOfBuffers, TensorReplaced, ListOfGroupGrows),
    *(CountedByTheFirst, GlobalCounter, ArrayInPlace, ListGrows, ByParameter, TensorInGroup, BuffersByParameter, SettingOfParameter, LooksThroughState),
    *(FirstStepIsAnother, Returns, ReplacesData, ScalesGradients, Doubled, PullsToItsStart, AverageFromTheFirst),
)
"""Others do the same in another way."""


@pytest.mark.parametrize("optimizer_class", with_matrix(OPTIMIZERS, [cls for cls in OPTIMIZERS if cls not in VARIANTS]), ids=lambda cls: cls.__name__)
def test_own_optimizers_train_as_they_do(optimizer_class, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    expected, parameters = trained(copy.deepcopy(model), optimizer_class)
    compiled = graphacc.compile(model, devices=1)
    found, others = trained(compiled, optimizer_class)
    assert_close(torch.tensor(found), torch.tensor(expected), tolerance=LOSS)
    for one, other in zip(others, parameters, strict=True):
        assert_close(one, other)
    assert (f"the step of {optimizer_class.__name__}" in compiled.explain()) == (optimizer_class not in COMPILED), compiled.explain()


@pytest.mark.parametrize("optimizer_class", [KeyOfItsOwn, CountedFromOne, NormOfAll, AverageFromTheFirst], ids=lambda cls: cls.__name__)
def test_own_optimizers_on_eight_devices(optimizer_class):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    expected, parameters = trained(copy.deepcopy(model), optimizer_class)
    found, others = trained(graphacc.compile(model, strategy="fsdp=8"), optimizer_class)
    assert_close(torch.tensor(found), torch.tensor(expected), tolerance=LOSS)
    for one, other in zip(others, parameters, strict=True):
        assert_close(one, other)


def test_an_exception_of_a_hook_leaves_the_step_as_it_was():
    """The class's own code is left out of a compiled step alone."""
    model = graphacc.compile(nn.Linear(4, 1), devices=1)
    optimizer = CountedFromOne(model.parameters())
    other = nn.Linear(4, 1)
    others = CountedFromOne(other.parameters())
    before = vars(CountedFromOne).get("step", Own.step)

    def fails(*_):
        raise RuntimeError("a hook's own error")

    def steps(model, optimizer):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps(model, optimizer)
    hook = register_optimizer_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="a hook's own error"):
        steps(model, optimizer)
    hook.remove()
    weight = other.weight.detach().clone()
    steps(other, others)
    assert not torch.equal(weight, other.weight) and vars(CountedFromOne).get("step", Own.step) is before
    optimizer.zero_grad()
    weight = model.weight.detach().clone()
    steps(model, optimizer)
    assert not torch.equal(weight, model.weight)


@pytest.mark.parametrize("name", with_matrix(["lamb", "adopt", "sgdw", "lion", "adafactorbv", "madgrad", "mars"], ["lamb", "adopt", "lion", "adafactorbv"]))
def test_optimizers_of_timm(name):
    """lamb counts in its groups; adopt's first step is another than the later ones."""
    optim = pytest.importorskip("timm.optim")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    losses = []
    for one in (copy.deepcopy(model), graphacc.compile(model, devices=1)):
        optimizer = optim.create_optimizer_v2(one, opt=name, lr=0.01)
        for _ in range(4):
            loss = (one(torch.linspace(-1, 1, 32).view(8, 4)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert_close(torch.tensor(losses[4:]), torch.tensor(losses[:4]), tolerance=LOSS)


class Kinds(torch.optim.Optimizer):
    """Keeps numbers of all kinds."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(count=0, whole=2.0, best=float("inf"), worst=float("nan"), tensor=torch.zeros((), dtype=torch.float64))
                state["count"] += 1
                state["whole"] += 1.0
                state["tensor"] += 1
                p.sub_(group["lr"] * p.grad * state["whole"])


def test_numbers_in_the_state_keep_their_types():
    """Infinity was an error, 3.0 became 3, and a tensor of no dims a number."""
    found = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        model = graphacc.compile(model, devices=1) if compile_it else model
        optimizer = Kinds(model.parameters())
        for _ in range(3):
            model(torch.ones(4, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"][0]
        found.append({key: (type(value), repr(value)) for key, value in state.items()})
    assert found[0] == found[1]


class MadeByTheConstructor(Own):
    def prepare(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(start=p.detach().clone(), count=0)

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            state["count"] += 1
            p.add_(p.grad + 0.1 * (p - state["start"]), alpha=-group["lr"] / state["count"])


class Collects(MadeByTheConstructor):
    """State of all kinds, some of which its constructor makes, and a key of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = [*self.state.get("steps", []), len(self.state)]
        for group, p in self.each():
            state = self.state[p]
            state["count"] += 1
            state["last"] = [*state.get("last", [])[-1:], (p.grad.clone(), None)]
            p.add_(p.grad + 0.1 * (p - state["start"]) + 0.1 * state["last"][0][0], alpha=-group["lr"] / state["count"])


@pytest.mark.parametrize("optimizer_class", [Collects, MadeByTheConstructor, Kinds, KeyOfItsOwn], ids=lambda cls: cls.__name__)
def test_a_checkpoint_holds_all_state_of_own_optimizers(optimizer_class, tmp_path):
    """What was no tensor was left out, and state that a constructor makes was missing in the next step."""

    def step(model, optimizer) -> float:
        loss = (model(torch.linspace(-1, 1, 32).view(8, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    start = nn.Linear(4, 3)
    model = graphacc.compile(copy.deepcopy(start), devices=1)
    optimizer = optimizer_class(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    graphacc.save_checkpoint(tmp_path, model, optimizer)
    new = graphacc.compile(copy.deepcopy(start), devices=1)
    other = optimizer_class(new.parameters())
    graphacc.load_checkpoint(tmp_path, new, other)
    for _ in range(2):
        assert step(new, other) == pytest.approx(step(model, optimizer), rel=1e-6)
    kinds = [[sorted((name, type(value)) for name, value in values.items()) if isinstance(values, dict) else values for values in one.state_dict()["state"].values()] for one in (optimizer, other)]
    assert str(kinds[0]) == str(kinds[1])


def test_state_that_no_checkpoint_can_hold(tmp_path):
    model = graphacc.compile(nn.Linear(4, 3), devices=1)
    optimizer = Own(model.parameters())
    optimizer.state[model.weight]["history"] = collections.deque([1])
    with pytest.raises(graphacc.CheckpointError, match=r"the state of Own holds a deque at .*\['weight'\]\['history'\].*torch.save"):
        graphacc.save_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize("looks", [False, True], ids=["", "looked at before"])
def test_state_of_parameters_taken_out_of_their_group(looks):
    found = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        model = graphacc.compile(model, devices=1) if compile_it else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(6):
            if step == 2:
                if looks:
                    assert optimizer.state[model[2].bias]
                taken = [optimizer.param_groups[0]["params"].pop() for _ in range(2)]
            if step == 4:
                with torch.no_grad():
                    optimizer.state[taken[0]]["exp_avg"].mul_(2)
                optimizer.add_param_group({"params": taken})
            model(torch.linspace(-1, 1, 32).view(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                assert all(optimizer.state[p]["step"] == 2 for p in taken)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()] + [optimizer.state[p]["exp_avg"].flatten() for p in taken]))
    assert_close(found[1], found[0])
