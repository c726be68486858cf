"""What the model's code reads beside its arguments, and what changes between steps: the same as without GraphAcc."""

import abc
import array
import collections
import contextlib
import contextvars
import copy
import functools
import itertools
import random
import threading
import types
import typing

import pytest
import torch
from selection import each_once, with_matrix
from tolerances import LOSS, assert_close
from torch import nn

import graphacc

X = torch.linspace(-1, 1, 32).view(8, 4)
SCALE = torch.ones(1)
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)


class Setting:
    gain = 1.0

    @classmethod
    def read(cls):
        return cls.gain


def with_attribute():
    return with_attribute.gain


def train(model: nn.Module, steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal(run: typing.Callable, **options) -> None:
    """`run(compile)` gives numbers; `compile` is the identity, then `graphacc.compile`."""
    torch.manual_seed(0)
    expected = run(lambda model: model)
    torch.manual_seed(0)
    found = run(lambda model: graphacc.compile(model, **{"devices": 1, **options}))
    assert_close(torch.tensor(found), torch.tensor(expected), tolerance=LOSS)


def _optimizer():
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


def _stepped(scheduler):
    scheduler.optimizer.step()
    scheduler.step()


def _local():
    value = threading.local()
    value.gain = 1.0
    return value


def _module():
    module = types.ModuleType("settings_of_a_test")
    module.gain = 1.0
    return module


READ = {
    "a tensor in place": (lambda: torch.ones(1), lambda state: state, lambda state: state.fill_(3.0)),
    "the memory of a tensor in a list": (lambda: [torch.ones(1)], lambda state: state[0], lambda state: setattr(state[0], "data", torch.full((1,), 3.0))),
    "hasattr": (types.SimpleNamespace, lambda state: 3.0 if hasattr(state, "on") else 1.0, lambda state: setattr(state, "on", 1)),
    "hasattr of an object": (Setting, lambda state: 3.0 if hasattr(state, "on") else 1.0, lambda state: setattr(state, "on", 1)),
    "getattr with a default": (Setting, lambda state: getattr(state, "on", 1.0), lambda state: setattr(state, "on", 3.0)),
    "the rate of an optimizer": (_optimizer, lambda state: state.param_groups[0]["lr"], lambda state: state.param_groups[0].update(lr=3.0)),
    "the epoch of a scheduler": (lambda: torch.optim.lr_scheduler.LambdaLR(_optimizer(), lambda _: 1.0), lambda state: state.last_epoch + 1.0, _stepped),
    "a UserDict": (lambda: collections.UserDict(gain=1.0), lambda state: state["gain"], lambda state: state.update(gain=3.0)),
    "a UserList": (lambda: collections.UserList([1.0]), lambda state: state[0], lambda state: state.__setitem__(0, 3.0)),
    "a ChainMap": (lambda: collections.ChainMap({"gain": 1.0}), lambda state: state["gain"], lambda state: state.update(gain=3.0)),
    "a module of settings": (_module, lambda state: state.gain, lambda state: setattr(state, "gain", 3.0)),
    "a context variable": (lambda: CONTEXT, lambda state: state.get(), lambda state: state.set(3.0)),
    "a thread's own": (_local, lambda state: state.gain, lambda state: setattr(state, "gain", 3.0)),
    "an attribute of a function": (lambda: with_attribute, lambda state: state.gain, lambda state: setattr(state, "gain", 3.0)),
    "an attribute that a function reads of itself": (lambda: with_attribute, lambda state: state(), lambda state: setattr(state, "gain", 3.0)),
    "an array": (lambda: array.array("d", [1.0]), lambda state: state[0], lambda state: state.__setitem__(0, 3.0)),
    "bytes": (lambda: bytearray([1]), lambda state: float(state[0]), lambda state: state.__setitem__(0, 3)),
}


LAZY = pytest.mark.filterwarnings("ignore:the step is captured by lazy tensors")  # FX does not take tensors from outside


@LAZY
@pytest.mark.parametrize(("what", "where"), with_matrix(itertools.product(READ, ("closure", "attribute")), each_once(list(READ), ("closure", "attribute"))))
def test_what_the_forward_reads_may_change(what, where):
    make, read, change = READ[what]

    def run(compile):
        CONTEXT.set(1.0)
        with_attribute.gain = Setting.gain = 1.0
        state = make()

        class Model(nn.Linear):
            def forward(self, x):
                return super().forward(x) * read(state if where == "closure" else self.state)

        model = Model(4, 1)
        model.state = state
        model = compile(model)
        losses = train(model)
        change(state)
        return losses + train(model)

    assert_equal(run)
    Setting.gain = 1.0


@LAZY
@pytest.mark.parametrize("strategy", ["dp=1", "fsdp=8"])
def test_global_tensors_and_absent_attributes(strategy):
    class Model(nn.Linear):
        __slots__ = ("slot",)

        def forward(self, x):
            return super().forward(x) * SCALE * getattr(self, "gain", 1.0) * self.slot * Setting.read()

    def run(compile):
        global SCALE
        SCALE, Setting.gain = torch.ones(1), 1.0
        model = Model(4, 1)
        model.slot = 1.0
        model = compile(model)
        losses = train(model)
        SCALE.mul_(3)
        losses += train(model)
        SCALE = torch.full((1,), 0.5)
        losses += train(model)
        model.gain = 2.0
        losses += train(model)
        model.slot = 0.5
        losses += train(model)
        Setting.gain = 1.5
        return losses + train(model)

    assert_equal(run, devices=None, strategy=strategy)
    Setting.gain = 1.0


@LAZY
def test_a_global_tensor_that_changes_in_every_step_is_left_to_pytorch():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x) * SCALE

    def run(compile):
        global SCALE
        SCALE = torch.ones(1)
        model = compile(Model(4, 1))
        losses = []
        for _ in range(14):
            losses += train(model, 1)
            SCALE.mul_(0.9)
        if hasattr(model, "explain"):
            assert "SCALE" in model.explain() and "runs by PyTorch" in model.explain()
        return losses

    assert_equal(run)


# ---- code that a backward runs


class Reversed(torch.autograd.Function):
    strength = 1.0

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Reversed.strength * ctx.module.gain * SCALE, None


def test_what_the_backward_of_a_function_reads():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.gain = nn.Linear(4, 4), nn.Linear(4, 1), 1.0

        def forward(self, x):
            return self.second(Reversed.apply(self.first(x), self))

    def run(compile):
        global SCALE
        SCALE, Reversed.strength = torch.ones(1), 1.0
        model = compile(Model())
        losses = train(model)
        Reversed.strength = -0.5
        losses += train(model)
        model.gain = 3.0
        losses += train(model)
        SCALE.fill_(0.1)
        return losses + train(model)

    assert_equal(run)


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.module.calls += 1
        return gradient / ctx.module.calls, None


@pytest.mark.parametrize("by", ["function", "hook"])
def test_attributes_of_modules_that_a_backward_sets(by):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.calls, self.seen = nn.Linear(4, 4), nn.Linear(4, 1), 0, 0.0

        def forward(self, x):
            self.seen = 2.0  # the forward's own are results
            x = self.first(x)
            return self.second(Counted.apply(x, self) if by == "function" else x)

    def run(compile):
        model = compile(Model())

        def hook(gradient):
            model.calls += 1
            return gradient / model.calls

        if by == "hook":
            model.first.weight.register_hook(hook)
        return [*train(model, 4), float(model.calls), model.seen]

    assert_equal(run)


HOOKS: dict[str, typing.Callable] = {
    "counts": lambda seen, mask: lambda gradient: seen.append(1.0),
    "keeps norms": lambda seen, mask: lambda gradient: seen.append(gradient.norm()),
    "stops": lambda seen, mask: lambda gradient: seen.append(0.0) or (gradient * 0 if len(seen) > 2 else None),
    "masks": lambda seen, mask: lambda gradient: gradient * mask[0],
}


@pytest.mark.parametrize(("kind", "where"), with_matrix(itertools.product(HOOKS, ("parameter", "module")), each_once(list(HOOKS), ("parameter", "module"))))
def test_hooks_of_the_backward(kind, where):
    def run(compile):
        seen: list = []
        mask = [torch.ones(1)]
        model = compile(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
        hook = HOOKS[kind](seen, mask)
        if where == "parameter":
            model[0].weight.register_hook(hook)
        elif kind != "stops":
            model[1].register_full_backward_hook(lambda module, given, gradients: None if (found := hook(gradients[0])) is None else (found * given[0],))
        losses = train(model, 3)
        mask[0].mul_(0.5)
        losses += train(model)
        mask[0] = torch.zeros(1)
        return [*losses, *train(model), *(float(x) for x in seen)]

    assert_equal(run)


class Halves:
    """Called as a hook of a parameter, or of a module; halves what it is given every other time."""

    def __init__(self):
        self.count, self.seen = 0, []

    def __call__(self, *given):
        self.count += 1
        self.seen.append(1.0)
        return given[-1] * 0.5 if self.count % 2 else None


def keeps(seen, module, given, result):
    seen.append(result.detach().mean())


@pytest.mark.parametrize("where", ["parameter", "module", "partial"])
def test_hooks_that_are_no_functions(where):
    """An object with `__call__`, and `functools.partial`: what they change, they change in every step."""

    def run(compile):
        model, hook, seen = compile(nn.Linear(4, 1)), Halves(), []
        if where == "parameter":
            model.weight.register_hook(hook)
        else:
            model.register_forward_hook(hook if where == "module" else functools.partial(keeps, seen))
        return [*train(model, 4), hook.count, len(hook.seen), *map(float, seen)]

    assert_equal(run)


def test_a_constant_is_written_through_its_data():
    """`x.data` and NumPy arrays with its memory: no version of the tensor tells."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.tables = nn.Linear(4, 3), [nn.Parameter(torch.ones(3), requires_grad=False), torch.ones(3, 2).t(), torch.zeros(3)]

        def forward(self, x):
            return self.linear(x) * self.tables[0] + self.tables[1][0] + self.tables[2]

    def run(compile):
        model = compile(Model())
        losses = train(model)
        model.tables[0].data.mul_(2)
        losses += train(model)
        model.tables[1].data[0, 1] = 3.0
        losses += train(model)
        model.tables[2].numpy()[1] = 0.5
        return losses + train(model)

    assert_equal(run)


def by_argument(model, x, y):
    x.data.mul_(0.5)
    return y + x.sum(1, keepdim=True)


def by_attribute(model, x, y):
    model.held.data.mul_(0.9).add_(y.detach().mean())
    return y + model.held


def by_list(model, x, y):
    model.table[0].data.copy_(y.detach().mean())
    return y * (1 + model.table[0])


def by_slice(model, x, y):
    model.table[1][1:].add_(1)
    return y + model.table[1].sum()


def by_variable(model, x, y):
    SCALE.data.add_(1)
    return y * SCALE


@pytest.mark.parametrize("capture", ["fx", pytest.param("lazy", marks=pytest.mark.lazy)])
@pytest.mark.parametrize("write", [by_argument, by_attribute, by_list, by_slice, by_variable])
@pytest.mark.default_cases("by_argument-fx", "by_attribute-fx", "by_list-fx", "by_slice-fx", "by_variable-fx", "by_list-lazy")
def test_writes_past_the_version_counter(write, capture):
    """`.data` of what is no buffer, and views of it, are written in the forward: PyTorch runs that, or it is refused."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.held, self.table = nn.Linear(4, 1), torch.zeros(1), [torch.zeros(()), torch.zeros(3)]

        def forward(self, x):
            return write(self, x, self.linear(x))

    def run(compile):
        SCALE.fill_(1.0)
        model, given, losses = compile(Model()), X.clone(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = (model(given) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, given.sum().item(), model.held.item(), *(table.sum().item() for table in model.table)]

    refused = pytest.raises(graphacc.CaptureError, match="writes into") if capture == "lazy" and write is not by_argument else contextlib.nullcontext()
    with refused:
        assert_equal(run, capture="auto" if capture == "fx" else "lazy")
    SCALE.fill_(1.0)


def test_state_of_an_optimizer_is_written_through_its_data():
    def run(compile):
        model = compile(nn.Linear(4, 1))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
        for step in range(6):
            optimizer.zero_grad()
            loss = (model(X) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            for state in optimizer.state.values() if step in (1, 3) else ():
                if step == 1:
                    state["momentum_buffer"].data.mul_(0.1)
                else:
                    state["momentum_buffer"].numpy()[...] = 0
        return losses

    assert_equal(run)


def test_checkpoint_around_a_call_of_the_model():
    """Its hooks run the model again where somebody looks at what autograd keeps; the loop still holds the result at `step()`."""

    def run(compile):
        model = compile(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)))
        optimizer, losses, held = torch.optim.SGD(model.parameters(), lr=0.1), [], []
        for _ in range(3):
            held.append(torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False))
            loss = (held[-1] - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert_equal(run)


def test_a_hook_for_all_modules_that_is_an_object():
    class Grows:
        count = 0

        def __call__(self, module, given, result):
            self.count += 1
            return result * (1 + 0.01 * self.count) if isinstance(module, nn.Linear) else None

    def run(compile):
        hook = Grows()
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            return [*train(compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))), 3), hook.count]
        finally:
            handle.remove()

    assert_equal(run)


@pytest.mark.parametrize("returned", [lambda layer, x: lambda factor: layer(x) * factor, lambda layer, x: functools.partial(torch.mul, layer(x))], ids=["function", "partial"])
def test_a_function_that_a_model_returns(returned):
    class Model(nn.Linear):
        def forward(self, x):
            return returned(super().forward, x)

    def run(compile):
        model = compile(Model(4, 1))
        losses = []
        for factor in (1.0, 2.0):
            loss = model(X)(factor).square().mean()
            loss.backward()
            losses.append(loss.item())
        return [*losses, model.weight.grad.sum().item()]

    assert_equal(run)


def test_python_randomness_in_a_hook_is_drawn_in_every_step():
    def run(compile):
        random.seed(0)
        model = compile(nn.Linear(4, 1))
        model.weight.register_hook(lambda gradient: gradient * random.random())
        return [*train(model, 4), random.random()]

    assert_equal(run)


def test_a_forward_that_draws_and_reads_what_changes():
    """The state of Python's generator is put back when another capture is needed, too."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.p = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 0.9

        def forward(self, x):
            for layer in self.layers:
                if random.random() < self.p:
                    x = layer(x)
            return x.sum(1, keepdim=True)

    def run(compile):
        random.seed(0)
        model = compile(Model())
        losses = []
        for step in range(6):
            model.p = 0.9 - 0.1 * step
            losses += train(model, 1)
        return [*losses, random.random()]

    assert_equal(run)


# ---- classes of models, and what they return


class Abstract(abc.ABC, nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    @abc.abstractmethod
    def forward(self, x): ...


class OfAbstract(Abstract):
    def forward(self, x):
        return self.layer(x)


class OfGeneric(typing.Generic[typing.TypeVar("T")], nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


class Registered(nn.Linear):
    known: typing.ClassVar[dict] = {}

    def __init_subclass__(cls, tag, **options):
        assert tag not in Registered.known, f"{tag} is there already"
        Registered.known[tag] = cls
        super().__init_subclass__(**options)


class OfRegistered(Registered, tag="one"):
    pass


class Registry(type):
    known: typing.ClassVar[dict] = {}

    def __new__(cls, name, bases, attributes):
        made = super().__new__(cls, name, bases, attributes)
        Registry.known[name] = made
        return made


class OfMetaclass(nn.Linear, metaclass=Registry):
    pass


@pytest.mark.parametrize("make", [OfAbstract, OfGeneric, lambda: OfRegistered(4, 1), lambda: OfMetaclass(4, 1)], ids=["ABC", "Generic", "__init_subclass__", "metaclass"])
def test_classes_that_do_not_begin_with_a_module(make):
    assert_equal(lambda compile: train(compile(make()), 3))
    model = graphacc.compile(make(), devices=1)
    assert isinstance(model, type(make())) and model.__class__ is type(make())
    assert isinstance(copy.deepcopy(model), type(make()))
    assert Registered.known == {"one": OfRegistered} and Registry.known == {"OfMetaclass": OfMetaclass}


def test_a_model_that_returns_a_distribution():
    class Model(nn.Linear):
        def forward(self, x):
            return torch.distributions.Normal(super().forward(x), torch.ones(8, 1))

    def run(compile):
        model = compile(Model(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            found = model(X)
            loss = -found.log_prob(torch.ones(8, 1)).mean()
            if isinstance(found, torch.distributions.Distribution):
                loss = loss + 0.1 * found.mean.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert_equal(run)


# ---- random numbers


def test_a_restored_state_of_the_generator_draws_the_same_mask():
    """As GradCache and others rely on."""
    torch.manual_seed(0)
    model = graphacc.compile(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5)), devices=1)

    @torch.no_grad()
    def drawn() -> list:
        return model(X).tolist()

    drawn()
    state = torch.get_rng_state()
    first, second = drawn(), drawn()
    assert first != second
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        assert drawn() == first
        with torch.enable_grad():
            again = model(X)
            again.sum().backward()
        assert again.tolist() == second
    third = drawn()
    assert third not in (first, second)
    torch.manual_seed(5)
    seeded = drawn()
    torch.manual_seed(5)
    assert drawn() == seeded and drawn() != seeded


# ---- what interrupts or surrounds a call


@pytest.mark.parametrize(("failing", "behind"), with_matrix([({2}, "a layer"), ({2}, "nothing"), ({2, 3}, "a layer"), ({2, 3}, "nothing")], [({2, 3}, "a layer"), ({2}, "nothing")]))
def test_statistics_of_a_forward_that_fails(failing, behind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4) if behind == "a layer" else nn.Identity()
            self.norm, self.last, self.fails = nn.BatchNorm1d(4), nn.Linear(4, 1), False

        def forward(self, x):
            x = self.norm(self.first(x))
            if self.fails:
                raise ValueError("the batch is bad")
            return self.last(x)

    def run(compile):
        model = compile(Model())
        losses = []
        for step in range(5):
            model.fails = step in failing
            try:
                losses += train(model, 1)
            except ValueError:
                losses.append(0.0)
        return [*losses, *model.norm.running_mean.tolist(), *model.norm.running_var.tolist(), float(model.norm.num_batches_tracked)]

    assert_equal(run)


TRANSFORMS: dict[str, typing.Callable] = {
    "vmap": lambda model: torch.func.vmap(model)(X),
    "jacrev": lambda model: torch.func.jacrev(model)(X[0]),
    "vmap of jacrev": lambda model: torch.func.vmap(torch.func.jacrev(model))(X),
    "jacfwd": lambda model: torch.func.jacfwd(model)(X[0]),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "vjp": lambda model: torch.func.vjp(model, X)[1](torch.ones(8, 1))[0],
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).square().sum())(X[0]),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own functions
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.default_cases("grad", "hessian", "vmap", "vmap of jacrev")
def test_transforms_of_a_model_in_the_loss(kind):
    def run(compile):
        model = compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = (model(X) - 1).square().mean() + 0.1 * TRANSFORMS[kind](model).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert_equal(run)


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counting.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Doubling, Counting])
def test_modes_around_a_call(mode):
    """Around every second step."""

    def run(compile):
        Counting.products = 0
        model = compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
        losses = []
        for step in range(4):
            with mode() if step % 2 else contextlib.nullcontext():
                losses += train(model, 1)
        return [*losses, float(Counting.products)]

    assert_equal(run)


@pytest.mark.parametrize("strategy", ["dp=1", pytest.param("fsdp=8", marks=pytest.mark.matrix)])
def test_a_forward_that_asks_whether_gradients_are_on(strategy):
    """Also where its result is read before a backward, and where it is a region."""

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) * (2 if torch.is_grad_enabled() else 1)

    reference = Asks()
    model = graphacc.compile(copy.deepcopy(reference), strategy=strategy, cache_dir=None, fast_compile=True, devices=int(strategy[-1]))
    x = torch.randn(8, 8)
    for one in (reference, model):
        found = [one(x).sum().item()]
        with torch.no_grad():
            found.append(one(x).sum().item())
        loss = one(x).square().mean()
        found.append(loss.item())
        loss.backward()
        found.append(one.linear.weight.grad.sum().item())
        given = x.clone().requires_grad_()
        one(given).square().mean().backward()
        found.append(given.grad.sum().item())
        if one is reference:
            expected = found
    assert found == pytest.approx(expected, rel=1e-4)


features = torch.zeros(4)


class WithFeatures(nn.Linear):
    """Has an attribute of the name of a variable of this file."""

    def __init__(self):
        super().__init__(4, 4)
        self.features = 2.0

    def forward(self, x):
        return super().forward(x) * self.features


def test_a_variable_of_the_name_of_an_attribute_is_not_read():
    """A script's loop has ``loss`` and ``x`` as variables, and models have attributes of these names: each step was compiled anew."""
    global features
    model = graphacc.compile(WithFeatures(), devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        features = torch.full((4,), float(step))
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(model.programs) == 1, model.explain()


def test_a_part_that_is_moved_to_its_own_dtype():
    """``self.router = self.router.to(self.dtype)``, as transformers' mixtures of experts have it."""

    class Routed(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.router = nn.Linear(4, 4)

        def forward(self, x):
            self.router = self.router.to(torch.float32)
            return super().forward(self.router(x)).to(x.dtype)

    torch.manual_seed(0)
    expected = train(Routed(), 3)
    torch.manual_seed(0)
    model = graphacc.compile(Routed(), devices=1)
    assert_close(torch.tensor(train(model, 3)), torch.tensor(expected), tolerance=LOSS)
    assert not model._graphacc_engine.by_pytorch.counts and len(model.programs) == 1, model.explain()
