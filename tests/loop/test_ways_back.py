"""Several losses of one call with a step between them, detached trunks, and what the loop sees of autograd's graph: as in PyTorch."""

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from selection import with_matrix
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, relative_error
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import compiled

from graphacc.errors import LoopError
from graphacc.loop.ways_back import MAX_UNUSED

CHANGED_IN_PLACE = "modified by an inplace operation|after an optimizer's step"
SECOND_TIME = "Trying to backward through the graph a second time"


class ActorCritic(nn.Module):
    """The critic does not train the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.policy, self.value, self.linear = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x).tanh()
        return self.policy(hidden), self.value(hidden.detach()), self.linear(x)


def of_actor(policy: Tensor) -> Tensor:
    return policy.log_softmax(1)[:, 0].mean()


def of_critic(value: Tensor) -> Tensor:
    return value.pow(2).mean()


def step_between(model, x, actor, critic):
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    a.backward(), actor.step(), b.backward(), critic.step()
    return a, b


def loss_after_step(model, x, actor, critic):
    policy, value, _ = model(x)
    a = of_actor(policy)
    a.backward(), actor.step()
    b = of_critic(value)
    b.backward(), critic.step()
    return a, b


def joins_a_later_call(model, x, actor, critic):
    policy, value, _ = model(x)
    a = of_actor(policy)
    a.backward(), actor.step()
    b = of_critic(value) + of_critic(model(2 * x)[2])
    b.backward(), critic.step()
    return a, b


def loss_after_backward(model, x, actor, critic):
    policy, value, _ = model(x)
    a = of_actor(policy)
    a.backward()
    b = of_critic(value)
    actor.step(), b.backward(), critic.step()
    return a, b


def three_losses(model, x, actor, critic):
    policy, value, linear = model(x)
    a, b, c = of_actor(policy), of_critic(value), of_critic(linear)
    a.backward(), actor.step(), b.backward(), critic.step()
    critic.zero_grad(), c.backward(), critic.step()
    return a, b, c


def retained(model, x, actor, critic):
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    a.backward(retain_graph=True), actor.step(), b.backward(), critic.step()
    return a, b


def gradient_read(model, x, actor, critic):
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    a.backward()
    norm = torch.tensor(model.policy.weight.grad.norm().item())
    b.backward(), actor.step(), critic.step()
    return a, b, norm


def loss_read(model, x, actor, critic):
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    a.backward(), a.item(), b.backward(), actor.step(), critic.step()
    return a, b


def joins_outside(model, x, actor, critic):
    scale = torch.ones(1, requires_grad=True)
    policy, value, _ = model(x)
    a = of_actor(policy)
    a.backward()
    b = of_critic(value * scale)
    b.backward(), actor.step(), critic.step()
    return a, b, scale.grad


def zeros_for_gradients(model, x, actor, critic):
    """The step changes the critic, of which nothing is saved: its input takes no gradient."""
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    critic.zero_grad(set_to_none=False)
    a.backward(), actor.step(), critic.step(), b.backward(), critic.step()
    return a, b


def call_before_the_step(model, x, actor, critic):
    policy, _, _ = model(x)
    a = of_actor(policy)
    a.backward()
    b = of_critic(model(2 * x)[1])
    actor.step(), b.backward(), critic.step()
    return a, b


def value_over_the_step(model, x, actor, critic):
    a = of_actor(model(x)[0])
    a.backward()
    policy = model(2 * x)[0]
    actor.step()
    return a, policy.detach().sum()


def by_grad(model, x, actor, critic):
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    a.backward(), actor.step()
    gradients = torch.autograd.grad(b, list(model.value.parameters()))
    return a, b, gradients[0].sum()


def by_backward_of_torch(model, x, actor, critic):
    policy, value, _ = model(x)
    a, b = of_actor(policy), of_critic(value)
    a.backward(), actor.step(), torch.autograd.backward([b]), critic.step()
    return a, b


RUNS = (
    step_between, loss_after_step, joins_a_later_call, loss_after_backward, three_losses, retained, gradient_read, loss_read, joins_outside,
    zeros_for_gradients, call_before_the_step, value_over_the_step, by_grad, by_backward_of_torch,
)  # fmt: skip
DIFFERENT = (step_between, loss_after_step, joins_a_later_call, three_losses, retained, gradient_read, by_grad)
"""The others go ways that these go, too."""


def graph_retained_then_changed(model, x, actor, critic):
    policy, _, _ = model(x)
    a, b = of_actor(policy), policy.pow(2).mean()
    a.backward(retain_graph=True), actor.step(), b.backward()


def call_before_the_step_then_changed(model, x, actor, critic):
    of_actor(model(x)[0]).backward()
    b = of_actor(model(2 * x)[0])
    actor.step(), b.backward()


def shared(model, x, actor, critic):
    policy, _, _ = model(x)
    a, b = of_actor(policy), policy.pow(2).mean()
    a.backward(), b.backward()


def shared_over_a_step(model, x, actor, critic):
    policy, _, _ = model(x)
    a, b = of_actor(policy), policy.pow(2).mean()
    a.backward(), actor.step(), b.backward()


def twice(model, x, actor, critic):
    a = of_actor(model(x)[0])
    a.backward(), actor.step(), a.backward()


def shared_and_read(model, x, actor, critic):
    policy, _, _ = model(x)
    a, b = of_actor(policy), policy.pow(2).mean()
    a.backward(), a.item(), b.backward()


RAISES = {
    graph_retained_then_changed: CHANGED_IN_PLACE, call_before_the_step_then_changed: CHANGED_IN_PLACE,
    shared: SECOND_TIME, shared_over_a_step: SECOND_TIME, twice: SECOND_TIME, shared_and_read: SECOND_TIME,
}  # fmt: skip


def optimizers(model: nn.Module, one: bool) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    if one:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return optimizer, optimizer
    actor = torch.optim.SGD([*model.encoder.parameters(), *model.policy.parameters()], 0.1, momentum=0.9)
    return actor, torch.optim.AdamW([*model.value.parameters(), *model.linear.parameters()], 0.01)


def train(run: Callable, compile_it: Callable, one: bool, steps: int = 3) -> tuple[list[float], list[Tensor], nn.Module]:
    torch.manual_seed(0)
    model = compile_it(ActorCritic())
    both, losses = optimizers(model, one), []
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for optimizer in both:
            optimizer.zero_grad()
        losses += [loss.item() for loss in run(model, x, *both)]
    return losses, [parameter.detach().clone() for parameter in model.parameters()], model


def assert_same(run: Callable, strategy: str | None, one: bool) -> nn.Module:
    expected, wanted, _ = train(run, lambda model: model, one)
    losses, parameters, model = train(run, lambda model: compiled(model, strategy), one)
    assert losses == pytest.approx(expected, rel=LOSS, abs=LOSS)
    assert max(map(relative_error, parameters, wanted)) <= PARAMETERS_AFTER_STEPS
    return model


@pytest.mark.parametrize(
    ("run", "strategy", "one"),
    with_matrix(itertools.product(RUNS, (None, "fsdp=8"), (False, True)), default=[*((run, None, number % 2 == 1) for number, run in enumerate(RUNS) if run in DIFFERENT), (step_between, "fsdp=8", True)]),
)
def test_losses_of_one_call_with_graphs_of_their_own(run, strategy, one):
    assert_same(run, strategy, one)


@pytest.mark.parametrize("run", [step_between, call_before_the_step, value_over_the_step])
def test_a_call_that_changes_buffers(run):
    found = []
    for compile_it in (lambda model: model, lambda model: compiled(model, None)):
        torch.manual_seed(0)
        model = ActorCritic()
        model.encoder = nn.Sequential(model.encoder, nn.BatchNorm1d(8))
        losses, _, model = train(run, lambda _: compile_it(model), one=False)
        found.append((losses, model.state_dict()))
    (expected, wanted), (losses, state) = found
    assert losses == pytest.approx(expected, rel=LOSS, abs=LOSS)
    assert max(relative_error(state[name], wanted[name]) for name in wanted) <= PARAMETERS_AFTER_STEPS


@pytest.mark.parametrize("run", RAISES)
def test_what_pytorch_refuses(run):
    for compile_it in (lambda model: model, lambda model: compiled(model, None)):
        with pytest.raises((RuntimeError, LoopError), match=RAISES[run]):
            train(run, compile_it, one=False)


def test_results_that_are_only_looked_at():
    """They are kept for some steps, and then no more; a backward() through them is refused from then on, also where it joins another."""
    critics, held = [], []

    def run(model, x, actor, critic):
        policy, value, _ = model(x)
        a = of_actor(policy)
        a.backward(), actor.step()
        held.append(value)
        return a, value.sum()

    model = train(run, lambda model: compiled(model, None), one=False, steps=MAX_UNUSED + 2)[2]
    assert list(model._graphacc_engine.by_pytorch.counts.values()) == [MAX_UNUSED]
    assert_same(run, None, one=False)
    held.clear()
    train(run, lambda model: (critics.append(model), compiled(model, None))[1], one=False, steps=MAX_UNUSED + 1)
    for late in (lambda value: of_critic(value), lambda value: of_critic(value) + critics[-1](torch.ones(8, 4))[1].mean()):
        with pytest.raises(LoopError, match="after an optimizer's step, which has run"):
            late(held[-1]).backward()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x).tanh()


def chunks(hidden, head):
    leaf, total = hidden.detach().requires_grad_(), 0
    for chunk in leaf.chunk(2):
        loss = head(chunk).pow(2).mean() / 2
        loss.backward()
        total += loss.item()
    hidden.backward(leaf.grad)
    return total


def tasks(hidden, head):
    leaf, gradients = hidden.detach().clone().requires_grad_(True), []
    for task in range(2):
        leaf.grad = None
        loss = head(leaf)[:, task].pow(2).mean()
        loss.backward()
        gradients.append(leaf.grad.clone())
    hidden.backward(0.3 * gradients[0] + 0.7 * gradients[1])
    return loss.item()


def flag(hidden, head):
    leaf = hidden.detach()
    leaf.requires_grad = True
    loss = head(leaf).pow(2).mean()
    loss.backward()
    hidden.backward(leaf.grad)
    return leaf.grad.sum().item()


def no_leaf(hidden, head):
    loss = head(hidden.requires_grad_()).pow(2).mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("outside", [False, True], ids=["head inside", "head outside"])
@pytest.mark.parametrize(
    ("code", "strategy"), with_matrix(itertools.product((chunks, tasks, flag, no_leaf), (None, "fsdp=8")), default=[(chunks, "fsdp=8"), (tasks, None), (flag, None), (no_leaf, None)])
)
@pytest.mark.parametrize("submodule", [False, True], ids=["model", "submodule"])
def test_a_detached_trunk(code, strategy, outside, submodule):
    found = []
    for compile_it in (lambda model: model, lambda model: compiled(model, strategy)):
        torch.manual_seed(0)
        model, other = compile_it(Trunk()), nn.Linear(8, 3)
        optimizer, values = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1), []
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            values.append(code(model.trunk(x).tanh() if submodule else model(x), other if outside else model.head))
            optimizer.step()
        found.append((values, [parameter.detach().clone() for parameter in (*model.parameters(), *other.parameters())]))
    (expected, wanted), (losses, parameters) = found
    assert losses == pytest.approx(expected, rel=LOSS, abs=LOSS)
    assert max(map(relative_error, parameters, wanted)) <= PARAMETERS_AFTER_STEPS


def test_what_the_loop_sees_of_autograds_graph():
    def looks(model) -> list:
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
        y = model(torch.ones(2, 4))
        loss = y.pow(2).mean()

        def look():
            seen.extend([loss.requires_grad, y.requires_grad, loss.is_leaf, loss.grad_fn is None, y.detach().requires_grad, (2 * y.detach()).requires_grad])
            with torch.no_grad():
                seen.extend([loss.requires_grad, (y * 2).requires_grad])
            for to_array in (np.asarray, Tensor.numpy):
                with pytest.raises(RuntimeError, match="requires grad"):
                    to_array(y)
            seen.append(round(float(np.asarray(y.detach()).sum()), 4))

        look()
        loss.backward()
        look()
        optimizer.step()
        look()
        with pytest.raises(RuntimeError, match=SECOND_TIME):
            loss.backward()
        y.add_(1)
        seen.append(round(y.detach().sum().item(), 4))
        return seen

    found = []
    for compile_it in (lambda model: model, lambda model: compiled(model, None)):
        torch.manual_seed(0)
        found.append(looks(compile_it(nn.Linear(4, 4))))
    assert found[1] == found[0]


def test_backward_of_torch_is_said_to_begin_at_a_result():
    """Where PyTorch runs it: torch 2.15 gives the gradients to a compiled region."""
    model = compiled(nn.Linear(4, 4), None)
    a, b = model(torch.ones(2, 4)).mean(), model(torch.ones(2, 4)).sum()
    torch.autograd.backward([a, b], [torch.tensor(1.0), torch.tensor(0.5)])
    torch.testing.assert_close((model.weight.grad.clone(), model.bias.grad.clone()), (torch.full((4, 4), 1.25), torch.full((4,), 1.25)))
    said = list(model._graphacc_engine.by_pytorch.counts)
    assert all(why.endswith("torch.autograd.backward() begins at a result of the model") for why in said) and bool(said) != bool(model._graphacc_engine.regions)


def test_pre_hooks_of_all_optimizers_come_before_the_step():
    """Also where the first compiled model came before the hook: the second optimizer of a class has no state before its first step, and the gradient may still change."""

    def run(compile_it) -> tuple[list[int], float]:
        sizes = []

        def hook(optimizer, args, kwargs):
            sizes.append(len(optimizer.state))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)

        torch.manual_seed(0)
        model = compile_it(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        handle = register_optimizer_step_pre_hook(hook)
        try:
            for _ in range(3):
                model(torch.ones(2, 4)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            handle.remove()
        return sizes, model.weight.sum().item()

    expected = run(lambda model: model)
    for _ in range(2):
        sizes, weight = run(lambda model: compiled(model, None))
        assert sizes == expected[0] and weight == pytest.approx(expected[1], rel=LOSS)


def one_cycle(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9).step


def cyclic(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2).step


def radam(model):
    return torch.optim.RAdam(model.parameters(), lr=0.1), lambda: None


def asgd(model):
    return torch.optim.ASGD(model.parameters(), lr=0.1), lambda: None


def groups(model):
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    changes = iter([lambda: optimizer.add_param_group({"params": list(model[1].parameters()), "weight_decay": 0.3}), lambda: None])

    def change():
        next(changes, lambda: optimizer.param_groups[1].update(weight_decay=optimizer.param_groups[1]["weight_decay"] / 2))()

    return optimizer, change


class Rounded(torch.optim.SGD):
    """Its step follows values of the parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and float(parameter.grad.sum()) > 0:
                    parameter.data.sub_(group["lr"] * parameter.grad)


def follows_values(model):
    return Rounded(model.parameters(), lr=0.1), lambda: None


@pytest.mark.lazy
@pytest.mark.parametrize(
    ("make", "strategy"),
    with_matrix(itertools.product((one_cycle, cyclic, radam, asgd, groups, follows_values), (None, "fsdp=8")), default=[(one_cycle, None), (radam, "fsdp=8"), (groups, None), (follows_values, None)]),
)
def test_optimizers_that_lazy_tensors_cannot_follow(make, strategy):
    found = []
    for compile_it in (lambda model: model, lambda model: compiled(model, strategy, capture="lazy")):
        torch.manual_seed(0)
        model = compile_it(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        (optimizer, after), losses = make(model), []
        for step in range(6):
            loss = model(torch.ones(8, 8)).pow(2).mean()
            loss.backward()
            if step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of schedulers
                after()
        found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4, abs=LOSS)
    assert max(map(relative_error, found[1][1], found[0][1])) <= PARAMETERS_AFTER_STEPS
    assert bool(model._graphacc_engine.by_pytorch.counts) == (make is follows_values)


@pytest.mark.parametrize("several", [False, True])
def test_inputs_of_autograds_own_backward(several):
    """Where it calls no torch function (before torch 2.15) it is refused: all parameters had gradients (of one loss), or none (of several)."""
    model = compiled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(torch.randn(8, 4))
    losses = [out.mean(), out.std()] if several else out.std()
    try:
        torch.autograd.backward(losses, inputs=list(model[2].parameters()))
    except LoopError as refusal:
        assert "inputs=...) over a result of a compiled model" in str(refusal)
        (sum(losses) if several else losses).backward(inputs=list(model[2].parameters()))
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
    optimizer.step()
