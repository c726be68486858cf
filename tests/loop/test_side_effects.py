"""What a forward leaves behind besides its result: counters, attributes of objects, classes and tensors, what the model is made of, the memory of parameters."""

import copy
import types
import warnings

import pytest
import torch
from torch import nn
from training import compiled

from graphacc.errors import CaptureError

X = torch.linspace(-1, 1, 16).view(4, 4)
LAZY = pytest.param("lazy", marks=pytest.mark.lazy)


class Holder:
    def __init__(self):
        self.last, self.count = None, 0


HELD = Holder()


class Model(nn.Module):
    held: object = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.table = torch.ones(4)
        self.holder = Holder()
        self.count, self.scale, self.offset, self.flag, self.kind, self.last, self.cache = 0, 2.0, 1, True, "plain", None, None


def of(forward, seen=lambda model: []) -> type[Model]:
    return type(forward.__name__, (Model,), {"forward": forward, "seen": seen})


def trained(cls, compile_it, arguments=lambda step: (X + 0.1 * step,), between=lambda model, step: None, steps=6, **options):
    """Losses, and what the model and the loop have after every step."""
    torch.manual_seed(0)
    HELD.__init__()
    cls.held = None
    model = cls()
    model = compiled(model, options.pop("strategy", None), **options) if compile_it else model
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        args = arguments(step)
        loss = model(*args).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), *map(plain, model.seen()), *(x.sum().item() for x in args if isinstance(x, torch.Tensor))])
        between(model, step)
    tensors = [*model.state_dict().items()]
    found += [[name for name, _ in tensors], [tensor.sum().item() for _, tensor in tensors], [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]]
    return model, found


def plain(value):
    return value.item() if isinstance(value, torch.Tensor) else value


def assert_equal(cls, by_pytorch: bool | None = False, **options):
    _, expected = trained(cls, False, **{name: value for name, value in options.items() if name in ("arguments", "between", "steps")})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step is captured by lazy tensors")
        model, found = trained(cls, True, **options)
    for got, want in zip(found, expected, strict=True):
        assert got == [pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value for value in want]
        assert list(map(type, got)) == list(map(type, want))
    assert by_pytorch is None or bool(model._graphacc_engine.by_pytorch.counts) == by_pytorch
    return model


# ---- numbers that a forward writes


def counts_and_reads_another(self, x):
    self.count += 1
    return self.linear(x) * self.scale + self.offset * self.count


def counts_before_all(self, x):
    self.count = self.count + 1
    return self.linear(x) * self.scale if self.flag else x


def counts_by_another(self, x):
    y = self.linear(x) * self.scale
    self.count += self.offset
    return y + self.count


def toggles(self, x):
    self.flag = not self.flag
    self.count += 1
    return self.linear(x) * (self.scale if self.flag else self.offset)


def anneals(self, x):
    self.scale = self.scale * 0.9 + 0.1 * self.offset
    self.count += 1
    return self.linear(x) * self.scale


def anneals_in_place(self, x):
    self.scale *= 0.9
    return self.linear(x) * self.scale


def counts_and_replaces_a_buffer(self, x):
    y = self.linear(x)
    self.count += 1
    self.mean = 0.9 * self.mean + y.detach().mean(0)
    return y + self.mean


def warms_up(self, x):
    y = self.linear(x)
    self.count += 1
    momentum = self.offset / self.count if self.count < 4 else 0.5
    self.mean = (1 - momentum) * self.mean + momentum * y.detach().mean(0)
    return y - self.mean


NUMBERS = [counts_and_reads_another, counts_before_all, counts_by_another, toggles, anneals, anneals_in_place, counts_and_replaces_a_buffer, warms_up]


def set_back(model, step):
    if step % 2:
        model.count = 0
    if step == 3:
        model.offset = 3


@pytest.mark.parametrize("capture", ["fx", LAZY])
@pytest.mark.parametrize("forward", NUMBERS, ids=lambda forward: forward.__name__)
@pytest.mark.default_cases("counts_and_reads_another-fx", "toggles-fx", "anneals-fx", "counts_and_replaces_a_buffer-fx", "counts_and_reads_another-lazy", "anneals-lazy")
def test_numbers(forward, capture):
    cls = of(forward, lambda model: [model.count, model.scale, model.flag])
    assert_equal(cls, capture=capture)
    assert_equal(cls, capture=capture, between=set_back)


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.matrix)])
def test_a_counter_is_compiled_once(devices):
    def forward(self, x):
        self.count += 1
        self.offset = 2 * self.count + self.offset
        return self.linear(x) * self.scale

    model = assert_equal(of(forward, lambda model: [model.count, model.offset]), arguments=lambda step: (X.repeat(2, 1) + 0.1 * step,), steps=12, devices=devices, strategy=f"fsdp={devices}")
    assert len(model.programs) <= 2


def every_third(self, x):
    self.count += 1
    return self.linear(x) * (1.0 if self.count % 3 else 2.0)


def warm_up(self, x):
    self.count += 1
    return self.linear(x) * min(1.0, self.count / 4)


def cools(self, x):
    self.scale = max(1.0, self.scale * 0.8)
    return torch.softmax(self.linear(x) / self.scale, -1)


def branches(self, x):
    self.count += 1
    if self.count < 3:
        return self.linear(x) * self.count
    self.scale *= 0.9
    return self.linear(x).tanh() if self.scale > 1.7 else self.linear(x)


@pytest.mark.parametrize("forward", [every_third, warm_up, cools, branches], ids=lambda forward: forward.__name__)
def test_what_numbers_decide_is_decided_again(forward):
    model = assert_equal(of(forward, lambda model: [model.count, model.scale]), steps=9)
    assert len(model.programs) <= 4


def needs_the_value(self, x):
    self.count += 1
    return self.linear(x) + torch.arange(self.count).sum()


def asks_for_the_type(self, x):
    self.count += 1
    return self.linear(x) * (2.0 if type(self.count) is int else 1.0)


def as_text(self, x):
    self.count += 1
    self.kind = f"step {self.count}"
    return self.linear(x)


def in_a_container(self, x):
    self.count += 1
    return self.linear(x) * (2.0 if self.count in {2, 4} else 1.0), self.count


@pytest.mark.parametrize("forward", [needs_the_value, asks_for_the_type, as_text], ids=lambda forward: forward.__name__)
@pytest.mark.default_cases("asks_for_the_type")
def test_numbers_whose_values_are_needed(forward):
    """Each value has a program of its own, and after some of them PyTorch runs the model."""
    cls = of(forward, lambda model: [model.count, model.kind])
    assert_equal(cls, steps=4)
    model = assert_equal(cls, steps=14, by_pytorch=True)
    assert len(model.programs) < 14 and any("the number model.count in every call" in why for why in model._graphacc_engine.by_pytorch.counts)


def test_numbers_that_are_returned_or_looked_up():
    class Both(of(in_a_container)):
        def forward(self, x):
            y, count = super().forward(x)
            return y + count

    assert_equal(Both)


def test_numbers_depend_on_the_arguments():
    """Found by a loop over a number of repetitions: what the last capture had left was written for all."""

    def forward(self, x, times):
        for _ in range(times):
            self.count += 1
            x = self.linear(x)
        self.kind = "even" if times % 2 == 0 else "odd"
        return x

    def reset(model, step):
        model.count, model.kind = 0, "plain"

    assert_equal(of(forward, lambda model: [model.count, model.kind]), arguments=lambda step: (X, (2, 3, 2, 2, 3, 1)[step]), between=reset)


def test_a_number_becomes_something_else():
    def forward(self, x):
        return self.linear(x) * self.scale if self.scale is not None else self.linear(x)

    values = [2.5, 3.0, None, torch.tensor(4.0), 5, 6.0]
    assert_equal(of(forward), between=lambda model, step: setattr(model, "scale", values[step]))


def test_a_number_in_the_loss_is_compiled_once_where_the_loss_is_read_early():
    torch.manual_seed(0)
    model = compiled(nn.Linear(4, 3), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        y = model(X)
        loss = y.pow(2).mean() + (step / 8) * y.abs().mean()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
    assert len([program for program in model.programs if program.kind == "grad"]) <= 2


FACTOR = 1.0


def of_an_object(self, x):
    return self.linear(x) * self.holder.count + HELD.count


def of_a_variable(self, x):
    return self.linear(x) * FACTOR


def decided_by_an_object(self, x):
    return self.linear(x) * (1.0 if HELD.count < 3 else self.holder.count)


def written_to_an_object(self, x):
    self.holder.count += 1
    return self.linear(x) * self.holder.count + HELD.count


def change_outside(model, step):
    global FACTOR
    FACTOR = 1.0 + 0.1 * (step % 7)
    HELD.count, model.holder.count = step, step + 2


@pytest.mark.parametrize("forward", [of_an_object, of_a_variable, decided_by_an_object, written_to_an_object], ids=lambda forward: forward.__name__)
def test_numbers_of_objects_and_variables(forward):
    """Two objects of one class have different ones."""
    cls = of(forward, lambda model: [model.holder.count, HELD.count, FACTOR])
    model = assert_equal(cls, between=change_outside, steps=8, by_pytorch=forward is written_to_an_object)
    assert len(model.programs) <= 4


def test_a_constant_that_changes_at_every_call_is_left_to_pytorch():
    """One that goes to and fro is not."""
    settings = types.SimpleNamespace(factor="1.0")

    def forward(self, x):
        return self.linear(x) * float(settings.factor)

    def schedule(model, step):
        settings.factor = "1.0" if step == STEPS - 1 else str(1.0 + 0.01 * step)

    model = assert_equal(of(forward), between=schedule, steps=STEPS, by_pytorch=True)
    assert len(model.programs) < STEPS and any("another value at every call" in why for why in model._graphacc_engine.by_pytorch.counts)
    settings.factor = "1.0"
    assert len(assert_equal(of(forward), between=lambda model, step: setattr(settings, "factor", str(1.0 + (step + 1) % 2)), steps=STEPS).programs) < 5


STEPS = 22


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.model.scale, None


def in_its_backward(self, x):
    return Scaled.apply(self.linear(x), self) * self.scale


def in_a_hook(self, x):
    y = self.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * self.count)
    self.count += 1
    return y.tanh()


@pytest.mark.parametrize("forward", [in_its_backward, in_a_hook], ids=lambda forward: forward.__name__)
def test_numbers_that_a_backward_reads(forward):
    """They are no inputs of it."""
    assert_equal(of(forward, lambda model: [model.count]), between=lambda model, step: setattr(model, "scale", 1.0 + step), by_pytorch=True)


def test_a_checkpointed_part_that_counts_counts_twice():
    """As in PyTorch, whose second run finds the number as the first has left it."""

    def part(self, x):
        self.count += 1
        return self.linear(x) * (1 + self.count / 10)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(part, self, x, use_reentrant=False)

    assert_equal(of(forward, lambda model: [model.count]), by_pytorch=True)

    class Child(Model):
        def forward(self, x):
            return part(self, x)

    class Parent(Model):
        def __init__(self):
            super().__init__()
            self.child = Child()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.child, x, use_reentrant=False)

        def seen(self):
            return [self.child.count]

    assert_equal(Parent, by_pytorch=True)


# ---- objects, classes and tensors


def object_of_the_model(self, x):
    y = self.linear(x)
    self.holder.last = y.detach().mean()
    return y


def object_in_a_variable(self, x):
    y = self.linear(x)
    HELD.last = y.detach().mean()
    HELD.count += 1
    return y


def class_attribute(self, x):
    y = self.linear(x)
    type(self).held = y.detach().mean()
    return y


def module_of_torch(self, x):
    y = self.linear(x)
    self.linear.last = y.detach().mean()
    return y


def tuple_in_an_attribute(self, x):
    y = self.linear(x)
    y = y if self.cache is None else y + self.cache[1]
    self.cache = (y.detach().mean(), y.detach() * 0.5)
    return y


def tag_of_a_weight(self, x):
    self.linear.weight.tag = float(x.shape[0])
    return self.linear(x)


def made_here(self, x):
    made = Holder()
    made.last = self.linear(x)
    made.count += 1
    return made.last * made.count


OBJECTS = {
    object_of_the_model: lambda model: [model.holder.last],
    object_in_a_variable: lambda model: [HELD.last, HELD.count],
    class_attribute: lambda model: [type(model).held],
    module_of_torch: lambda model: [model.linear.last],
    tuple_in_an_attribute: lambda model: [model.cache[0]],
    tag_of_a_weight: lambda model: [model.linear.weight.tag],
}


@pytest.mark.parametrize("forward", OBJECTS, ids=lambda forward: forward.__name__)
def test_objects(forward):
    assert_equal(of(forward, OBJECTS[forward]), by_pytorch=forward is not module_of_torch)


def test_an_object_that_the_forward_makes_is_its_own():
    assert_equal(of(made_here))


@pytest.mark.parametrize("which", ["argument", "result"])
def test_attributes_of_tensors(which):
    def forward(self, x):
        y = self.linear(x)
        (x if which == "argument" else y).tag = 1.0
        return y

    model = compiled(of(forward)(), None)
    x = X.clone()
    assert (model(x) if which == "result" else (model(x), x)[1]).tag == 1.0
    assert any("sets the attribute 'tag'" in why for why in model._graphacc_engine.by_pytorch.counts)


# ---- what the model is made of


def new_buffer(self, x):
    self.register_buffer("first", x.detach().mean(0))
    return self.linear(x) * self.first


def new_module(self, x):
    if not hasattr(self, "head"):
        self.head = nn.Linear(4, 4)
    return self.head(self.linear(x))


def frozen_here(self, x):
    self.linear.weight.requires_grad_(False)
    return self.linear(x)


def stops_training(self, x):
    self.linear.eval()
    return self.linear(x) * (1 if self.linear.training else 2)


def back_in_training(self, x):
    self.eval()
    y = self.linear(x)
    self.train()
    return y


def deletes(self, x):
    if hasattr(self, "last"):
        del self.last
    return self.linear(x)


def memory_of_a_buffer(self, x):
    y = self.linear(x)
    self.mean.data = 0.5 * self.mean + y.detach().mean(0)
    return y + self.mean


STRUCTURE = [new_buffer, new_module, frozen_here, stops_training, back_in_training, deletes, memory_of_a_buffer]


@pytest.mark.parametrize("forward", STRUCTURE, ids=lambda forward: forward.__name__)
def test_what_the_model_is_made_of(forward):
    assert_equal(of(forward, lambda model: [hasattr(model, "last")]), by_pytorch=None)


@pytest.mark.lazy
@pytest.mark.parametrize("forward", [*OBJECTS, *STRUCTURE], ids=lambda forward: forward.__name__)
@pytest.mark.default_cases("object_of_the_model", "tuple_in_an_attribute", "new_buffer", "frozen_here", "memory_of_a_buffer")
def test_lazily_too(forward):
    """Equal, or refused."""
    try:
        assert_equal(of(forward, OBJECTS.get(forward, lambda model: [])), capture="lazy", by_pytorch=None)
    except CaptureError as error:
        assert "the forward" in str(error)


def aux(self, x):
    y = self.linear(x) * torch.linspace(1.0, 0.5, 2).tolist()[0]
    self.last = y.pow(2).mean()
    return y


def writes_into_its_argument(self, x):
    x.mul_(2.0)
    return self.linear(x)


@pytest.mark.lazy
@pytest.mark.parametrize("forward", [aux, writes_into_its_argument], ids=lambda forward: forward.__name__)
def test_lazy_tensors_find_what_is_written(forward):
    given = torch.ones(4, 4)
    cls = of(forward, lambda model: [model.last])
    assert_equal(cls, by_pytorch=forward is writes_into_its_argument, arguments=lambda step: (given.fill_(1.0 + step),), capture="lazy")


# ---- views of parameters and buffers that a model returns


def test_views_that_a_model_returns_are_the_memory_of_its_parameters():
    class Returns(Model):
        def forward(self, x):
            self.mean.add_(1)
            self.row = self.linear.weight[1]
            return self.linear(x), self.linear.weight[0], self.linear.bias.data, self.mean[:2], self.linear.weight.t()

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        y, row, bias, mean, transposed = model(X)
        y.pow(2).mean().backward()
        optimizer.step()
        found = [tensor.sum().item() for tensor in (row, bias, mean, transposed, model.row)]
        with torch.no_grad():
            row.zero_(), bias.fill_(7.0), mean.fill_(9.0), transposed[2].fill_(5.0), model.row.fill_(3.0)
            found += [model(X)[0].sum().item(), *(tensor.sum().item() for tensor in model.state_dict().values())]
        return found

    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = Returns()
        results.append(run(compiled(model, None) if compile_it else model))
    assert results[1] == pytest.approx(results[0], rel=1e-5)


# ---- models of one class, and their hooks


def test_an_ensemble_of_compiled_models():
    """Models of one class stay of one type, and can be stacked."""

    def run(compile_it):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh()) for _ in range(3)]
        models = [compiled(model, None) for model in models] if compile_it else models
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(X).pow(2).mean().backward()
            optimizer.step()
        parameters, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")
        return torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (X,)))(parameters, buffers)

    torch.testing.assert_close(run(True), run(False))


def test_to_compile_runs_no_state_dict_hooks():
    model, ran = nn.Sequential(nn.BatchNorm1d(4)), []
    model[0].register_buffer("own", torch.ones(()), persistent=False)
    model[0].register_state_dict_pre_hook(lambda *args: ran.append("before"))
    model._register_state_dict_hook(lambda *args: ran.append("after"))
    compiled(model, None)
    assert not ran
    assert "0.own" not in model.state_dict() and ran == ["before", "after"]


class OnceForAll:
    """What a loss puts in the place of a model's forward (sentence-transformers' MatryoshkaLoss): the second call gives the first one's result, narrower."""

    def __init__(self, forward):
        self.forward, self.results, self.first, self.width, self.number = forward, [], None, 0, 0

    def __call__(self, x):
        if self.first in (None, self.width):
            self.results.append(self.forward(x))
            self.first = self.width
        result = self.results[self.number]
        self.number += 1
        return result[:, : self.width]


def test_a_capture_that_fails_leaves_the_numbers_of_other_objects():
    def losses(compile_it):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model = compiled(model, None, capture="auto") if compile_it else model
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            forward = model.forward
            model.forward = decorated = OnceForAll(forward)
            loss = torch.zeros(())
            for decorated.width in (4, 2):
                decorated.number = 0
                loss = loss + (model(X) - model(X.flip(0))).square().mean()
            model.forward = forward
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


@pytest.mark.parametrize("use", [lambda model, x: model[0](x), lambda model, x: model.forward(x)], ids=["submodule", "forward"])
def test_a_model_that_is_never_called_is_said(use, caplog):
    model = compiled(nn.Sequential(nn.Linear(4, 4)), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        use(model, X).square().mean().backward()
        optimizer.step()
    (said,) = (record.getMessage() for record in caplog.records if "the forward of Sequential runs by PyTorch" in record.getMessage())
    assert "compile the submodule that it calls" in said
    assert said.partition("\n")[0].removeprefix("graphacc: ") in model.explain()
