"""Update graphs against torch.optim: five steps with a schedule on parameters of 0, 1 and 2 dims."""

import copy
import math

import pytest
import torch
from capturing import run
from tolerances import PARAMETERS_AFTER_STEPS, relative_error
from torch import nn, optim

from graphacc.capture import capture_update, hyperparameters, init_optimizer_state
from graphacc.errors import CaptureError
from graphacc.graph import Input, Kind, Phase

NAMES = ["matrix", "vector", "tall", "scalar"]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 12))
        self.vector = nn.Parameter(torch.randn(12))
        self.tall = nn.Parameter(torch.randn(12, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(3))


class Lion(optim.Optimizer):
    """An optimizer as users write them: a Python step count and the math module."""

    def __init__(self, params, lr=0.01, beta=0.9, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, beta=beta, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                state["step"] += 1
                correction = math.sqrt(1 - group["beta"] ** state["step"])
                update = (state["momentum"] * group["beta"] + p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * correction)
                state["momentum"].mul_(0.99).add_(p.grad, alpha=0.01)


class FirstGradient(optim.Optimizer):
    """Its average starts at the first gradient, so zeros cannot stand for "not yet there"."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.grad.clone()
                else:
                    state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(group["lr"] * state["average"])


class Opaque(optim.AdamW):
    """A step that cannot be traced, with an equivalent that can."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data_ptr()
        return optim.AdamW.step(self)

    def functional_equivalent(self):
        return optim.AdamW


OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW amsgrad maximize": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adam L2": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.01),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.3),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, lr_decay=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01, t0=2),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01, weight_decay=0.1),
    "Muon": lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=0.01),
    "groups": lambda p: optim.AdamW(
        [dict(params=p[:2]), dict(params=p[2:], lr=0.1, betas=(0.5, 0.6), weight_decay=0.0)], lr=0.01
    ),
    "Lion": Lion,
    "FirstGradient": FirstGradient,
    "Opaque": Opaque,
}


class Trainer:
    """Update graph and optimizer state of a toy model."""

    def __init__(self, model, optimizer, **options):
        self.model, self.optimizer, self.dynamic = model, optimizer, options.get("dynamic", ())
        self.step = capture_update(model, optimizer, NAMES, **options)
        self.values = {(Kind.PARAM, name): p.detach().clone() for name, p in model.named_parameters()}
        for name, state in init_optimizer_state(model, optimizer, NAMES):
            self.values |= {(Kind.STATE, f"{name}/{key}"): value for key, value in state.items()}

    def run(self, grads, extras=None):
        numbers = hyperparameters(self.optimizer, self.dynamic)
        feeds = {(Kind.GRAD, name): grad for name, grad in grads.items()}
        feeds |= {(Kind.HYPER, name): torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}
        self.values |= run(self.step, self.values | feeds | (extras or {}))


def set_lr(optimizer, factor):
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", float(group["lr"]))
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(initial * factor)
        else:
            group["lr"] = initial * factor


def some_grads(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters() if name in NAMES}


def eager_step(model, optimizer, grads):
    for name, p in model.named_parameters():
        p.grad = grads[name].clone() if name in grads else None
    optimizer.step()


def assert_same(trainer, model, optimizer, tolerance=PARAMETERS_AFTER_STEPS):
    for name, p in model.named_parameters():
        assert relative_error(trainer.values[Kind.PARAM, name], p) < tolerance, name
        for key, value in optimizer.state[p].items() if name in NAMES else ():
            got = trainer.values[Kind.STATE, f"{name}/{key}"]
            if isinstance(value, torch.Tensor):
                assert (got.dtype, got.shape) == (value.dtype, value.shape), key
            assert relative_error(got, torch.as_tensor(value)) < tolerance, f"{name}/{key}"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.default_cases("AdamW", "AdamW tensor lr", "SGD dampening", "RAdam", "Rprop", "Lion")
def test_five_steps_equal_torch(name):
    model = Toy()
    reference = copy.deepcopy(model)
    optimizer, eager = (OPTIMIZERS[name](list(m.parameters())) for m in (model, reference))
    trainer = Trainer(model, optimizer)
    assert not any(p.grad is not None for p in model.parameters())
    if name != "Adagrad":  # it makes its state when it is built
        assert not optimizer.state, "capture leaves the optimizer as it was"
    for i in range(5):
        for o in (optimizer, eager):
            set_lr(o, 1.0 - 0.1 * i)
        grads = some_grads(model)
        trainer.run(grads)
        eager_step(reference, eager, grads)
        assert_same(trainer, reference, eager)


def test_form_of_the_update_graph():
    model = Toy()
    step = capture_update(model, optim.AdamW(model.parameters()), NAMES)
    assert [item.target for item in step.inputs if item.kind is Kind.HYPER] == ["0/lr"]
    assert {item.kind for item in step.inputs} == {Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.HYPER}
    assert {out.target for out in step.outputs if out.kind is Kind.PARAM} == set(NAMES)
    assert {node.meta["phase"] for node in step.graph.nodes if node.op == "call_function"} == {Phase.UPDATE}
    assert len(step.donations()) == len(step.outputs)
    counts = [item for item in step.inputs if item.target.endswith("/step")]
    assert len(counts) == 4 and all((item.shape, item.dtype) == ((), torch.float32) for item in counts)


def test_bias_correction_keeps_double_precision():
    """In single precision this beta2 is 1, and the correction 1 - beta2 ** step is zero."""
    model = Toy()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99999999), eps=1e-30)
    reference = copy.deepcopy(model)
    eager = optim.AdamW(reference.parameters(), lr=0.01, betas=(0.9, 0.99999999), eps=1e-30)
    trainer = Trainer(model, optimizer)
    grads = some_grads(model)
    trainer.run(grads)
    eager_step(reference, eager, grads)
    assert_same(trainer, reference, eager, tolerance=1e-6)


def test_resumed_state_is_kept():
    model = Toy()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        eager_step(model, optimizer, some_grads(model))
    reference = copy.deepcopy(model)
    eager = optim.AdamW(reference.parameters(), lr=0.01)
    eager.load_state_dict(optimizer.state_dict())
    trainer = Trainer(model, optimizer)
    assert trainer.values[Kind.STATE, "matrix/step"] == 2
    grads = some_grads(model)
    trainer.run(grads)
    eager_step(reference, eager, grads)
    assert_same(trainer, reference, eager)


def test_dynamic_numbers_change_without_capturing_again():
    model = Toy()
    reference = copy.deepcopy(model)
    optimizer, eager = (optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, reference))
    trainer = Trainer(model, optimizer, dynamic=frozenset({"0/betas.0", "0/weight_decay"}))
    for i in range(3):
        for o in (optimizer, eager):
            o.param_groups[0]["betas"] = (0.9 - 0.1 * i, 0.999)
            o.param_groups[0]["weight_decay"] = 0.1 + 0.2 * i
        grads = some_grads(model)
        trainer.run(grads)
        eager_step(reference, eager, grads)
    assert_same(trainer, reference, eager)


def test_gradient_code_with_extras():
    model = Toy()
    reference = copy.deepcopy(model)
    optimizer, eager = (optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))

    def clip(grads, extras):
        parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
        for parameter, grad in zip(parameters, grads.values()):
            parameter.grad = grad * extras[0]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return {name: parameter.grad for name, parameter in zip(grads, parameters)}

    scale = Input(name="", kind=Kind.USER, target="0", shape=(), dtype=torch.float32)
    trainer = Trainer(model, optimizer, transform=clip, extras=[scale])
    grads = some_grads(model)
    trainer.run(grads, {(Kind.USER, "0"): torch.tensor(2.0)})
    total = torch.sqrt(sum((2 * grad).square().sum() for grad in grads.values()))
    eager_step(reference, eager, {name: 2 * grad / (total + 1e-6) for name, grad in grads.items()})
    assert_same(trainer, reference, eager)


def test_random_gradient_code_takes_the_key():
    model = Toy()
    noisy = capture_update(
        model,
        optim.SGD(model.parameters()),
        NAMES,
        transform=lambda grads, _: {n: g + torch.randn_like(g) for n, g in grads.items()},
    )
    assert [item.kind for item in noisy.inputs].count(Kind.KEY) == 1


class Counting(optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step()


class Branching(FirstGradient):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.norm() > 1:
                    p.sub_(p.grad)


def counting(parameters):
    optimizer = Counting(parameters)
    optimizer.param_groups[0]["count"] = 0
    return optimizer


@pytest.mark.parametrize(
    "make, message",
    [
        (optim.LBFGS, "LBFGS.step\\(\\) needs a closure"),
        (optim.SparseAdam, "SparseAdam works on sparse gradients"),
        (counting, "changes self.param_groups\\[0\\]\\['count'\\]"),
        (Branching, r"(?s)test_optimizers.py.*if p.grad is not None and p.grad.norm\(\) > 1"),
        (
            lambda p: optim.SGD([*p, nn.Parameter(torch.ones(2))]),
            "parameter 5 of group 0 of SGD, of shape \\[2\\], is no parameter of Toy",
        ),
    ],
)
def test_optimizers_that_cannot_be_captured(make, message):
    model = Toy()
    with pytest.raises(CaptureError, match=message):
        capture_update(model, make(list(model.parameters())), NAMES)


def test_unknown_dynamic_number():
    with pytest.raises(CaptureError, match="'0/momentun' is no number"):
        hyperparameters(optim.SGD(Toy().parameters(), momentum=0.9), {"0/momentun"})
