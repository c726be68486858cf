"""Loops whose optimizer runs on the host: what they may do between steps, delayed updates, checkpoints, refusals."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from tolerances import assert_close
from torch import nn
from training import compiled

import graphacc
from graphacc import Strategy, StrategyError
from graphacc.costs.hardware import Hardware
from graphacc.graph import Kind

STEPS = 6
ROUNDING = 2e-6
"""Sums over ranks, and fused multiplications in the kernel, round otherwise than PyTorch does."""


class Net(nn.Module):
    """A tied weight, a parameter with fewer elements than ranks, a scalar, a frozen one, and one without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(12, 10)
        self.outer = nn.Linear(10, 12, bias=False)
        self.outer.weight = nn.Parameter(torch.randn(12, 10) / 4)
        self.again = self.outer
        self.few = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x)) * self.scale
        return self.again(torch.sin(self.outer(hidden)) @ self.outer.weight) + self.frozen + torch.cat([self.few] * 4)


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 12, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    inner = [*model.inner.parameters()]
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not other for other in inner)]
    return torch.optim.Adam([{"params": inner, "lr": 2e-2, "weight_decay": 0.1}, {"params": rest, "betas": (0.8, 0.9), "amsgrad": True}], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], between: Callable = lambda model, step: None) -> list[float]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for step, x in enumerate(data):
        loss = loss_of(model, x)
        loss.backward()
        between(model, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def assert_equal(model: nn.Module, reference: nn.Module, losses: list[float], expected: list[float]) -> None:
    assert_close(torch.tensor(losses), torch.tensor(expected), tolerance=ROUNDING, what="losses")
    for name, want in reference.state_dict().items():
        assert_close(model.state_dict()[name], want, tolerance=20 * ROUNDING, what=name)
    assert not model._graphacc_engine.by_pytorch.counts


def check(strategy: str, make_optimizer: Callable = adamw, between: Callable = lambda model, step: None, **options) -> nn.Module:
    """Train plainly and compiled."""
    reference = Net()
    model = compiled(copy.deepcopy(reference), strategy, **options)
    expected = train(reference, make_optimizer(reference), batches(), between)
    assert_equal(model, reference, train(model, make_optimizer(model), batches(), between), expected)
    return model


def clip(model: nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def accumulate(model: nn.Module, step: int) -> None:
    if step % 2:
        loss_of(model, batches()[0]).backward()


def write_a_gradient(model: nn.Module, step: int) -> None:
    model.few.grad = torch.full((3,), 0.1 * step)


def write_a_parameter(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        model.few.mul_(0.9)


@pytest.mark.parametrize("strategy", ["fsdp=4,offload=optimizer", "fsdp=2,zero=1,dp=2,offload=optimizer"])
@pytest.mark.parametrize(("make_optimizer", "between"), [(grouped, clip), (adamw, accumulate), (adamw, write_a_gradient), (adamw, write_a_parameter)])
@pytest.mark.default_cases("grouped-clip-fsdp=4,offload=optimizer", "adamw-write_a_gradient-fsdp=4,offload=optimizer")
def test_loops(strategy, make_optimizer, between):
    check(strategy, make_optimizer, between)


OTHERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.default_cases("sgd", "rmsprop")
def test_other_optimizers_update_blocks_by_their_own_code(name):
    check("fsdp=2,offload=optimizer", OTHERS[name])


@pytest.fixture
def four_small_gpus(monkeypatch):
    """The search takes the devices for GPUs with 400 kB, on which the state of `searched_model` does not fit beside its parameters."""
    gpus = Hardware.parse("4xH100")
    small = gpus.replace(chip=dataclasses.replace(gpus.chip, memory_bytes=400_000), reserve_bytes=0)
    monkeypatch.setattr(Hardware, "present", staticmethod(lambda *given: small))


def with_epsilon(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that does not make steps of rounding."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def searched_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 1300), nn.Tanh(), nn.Linear(1300, 12))


def read_the_norm(model: nn.Module, step: int) -> None:
    """As loops do that skip steps with infinite gradients: before an optimizer is known."""
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).isfinite()


@pytest.mark.parametrize("between", [lambda model, step: None, clip, read_the_norm], ids=["plain", "clip", "read the norm"])
@pytest.mark.parametrize("make_optimizer", [with_epsilon, OTHERS["sgd"]], ids=["adamw", "sgd"])
@pytest.mark.default_cases("adamw-plain", "sgd-read the norm")
def test_a_search_lets_the_host_update_where_nothing_else_fits(four_small_gpus, caplog, make_optimizer, between):
    reference = searched_model()
    model = compiled(copy.deepcopy(reference), "auto,dp=4,remat=none,microbatches=1", devices=4)
    expected = train(reference, make_optimizer(reference), batches(), between)
    assert_equal(model, reference, train(model, make_optimizer(model), batches(), between), expected)
    assert model._graphacc_engine.programs.strategy == Strategy(dp=4, offload="optimizer")
    assert "offload: none of 1 strategies with the optimizer's state on the devices fits" in caplog.text


def test_auto_searches_on_one_device_that_is_no_cpu(monkeypatch):
    """Here a CPU that is taken for a GPU of 400 kB."""
    gpu = Hardware.parse("H100")
    monkeypatch.setattr(Hardware, "present", staticmethod(lambda *given: gpu.replace(chip=dataclasses.replace(gpu.chip, memory_bytes=400_000), reserve_bytes=0)))
    assert compiled(searched_model(), "auto", devices=1)._graphacc_engine.choice is None
    monkeypatch.setattr(graphacc.api, "default_platform", lambda: "gpu")
    reference = searched_model()
    model = compiled(copy.deepcopy(reference), "auto", devices=1)
    expected = train(reference, with_epsilon(reference), batches())
    assert_equal(model, reference, train(model, with_epsilon(model), batches()), expected)
    assert model._graphacc_engine.programs.strategy.offload == "optimizer"


@pytest.mark.parametrize("name", ["whole tensors", "verified", "pinned"])
def test_a_search_leaves_the_update_where_the_host_cannot_do_it(four_small_gpus, name):
    options = {"verify": 2} if name == "verified" else {}
    model = compiled(searched_model(), f"auto,dp=4,remat=none{',offload=none' if name == 'pinned' else ''}", devices=4, **options)
    optimizer = WholeTensors(model.parameters()) if name == "whole tensors" else adamw(model)
    with pytest.raises(StrategyError, match="no strategy of 4 devices with .* fits into"):
        train(model, optimizer, batches())


class WholeTensors(torch.optim.Optimizer):
    """Steps as long as the parameters, with a state like SGD's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.add_(momentum * parameter.norm(), alpha=-group["lr"])


@pytest.mark.parametrize("strategy", ["fsdp=2,offload=optimizer", "pp=2,microbatches=2,offload=optimizer"])
@pytest.mark.default_cases("fsdp=2,offload=optimizer")
def test_a_model_that_becomes_double_between_backward_and_step(strategy):
    """The devices get the new parameters in the new dtype."""

    def widen(model: nn.Module, step: int) -> None:
        if step == 2:
            model.double()

    reference = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 12))
    model, data = compiled(copy.deepcopy(reference), strategy), [x.to(torch.float64 if step > 2 else torch.float32) for step, x in enumerate(batches())]
    expected, found = (train(each, torch.optim.SGD(each.parameters(), lr=0.1), data, widen) for each in (reference, model))
    assert_equal(model, reference, found, expected)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.default_cases("False-adamw", "True-sgd")
def test_a_state_dict_that_was_loaded_sees_the_updates(is_copy, name):
    """load_state_dict takes the tensors themselves where dtype and device are right, and PyTorch's steps write into them."""

    def seen(model: nn.Module) -> list[float]:
        optimizer, found = {"adamw": with_epsilon, "sgd": OTHERS["sgd"]}[name](model), []
        for step, x in enumerate(batches(7)):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                kept = copy.deepcopy(optimizer.state_dict()) if is_copy else optimizer.state_dict()
            if step == 4:
                optimizer.load_state_dict(kept)
            if step in (3, 5):
                found += [value.double().sum().item() for state in kept["state"].values() for value in state.values() if value is not None]
                found += [len(state) for state in optimizer.state.values()]
        return found

    reference = searched_model()
    model = compiled(copy.deepcopy(reference), "fsdp=2,offload=optimizer")
    assert seen(model) == pytest.approx(seen(reference), rel=1e-4, abs=1e-5)


def test_options_of_compile():
    for options in ({"keep_gradients": True}, {"max_grad_norm": 0.1}):
        reference = Net()
        model = compiled(copy.deepcopy(reference), "fsdp=2,offload=optimizer", **options)
        expected = train(reference, adamw(reference), batches(3), clip if "max_grad_norm" in options else lambda model, step: None)
        assert_equal(model, reference, train(model, adamw(model), batches(3)), expected)


def test_the_state_is_the_optimizers_own():
    """It is read and changed in the loop, and loaded from a state_dict."""
    reference = Net()
    model = compiled(copy.deepcopy(reference), "fsdp=4,offload=optimizer")
    found = []
    for one in (reference, model):
        optimizer = adamw(one)
        losses = train(one, optimizer, batches(2))
        optimizer.state[one.few]["exp_avg"].mul_(0.5)
        losses += train(one, optimizer, batches(2))
        second = adamw(one)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        losses += train(one, second, batches(2))
        assert optimizer.state[one.scale]["step"] == 4 and second.state[one.scale]["step"] == 6
        found.append((losses, {name: second.state[p] for name, p in one.named_parameters()}))
    assert_equal(model, reference, found[1][0], found[0][0])
    for name, state in found[0][1].items():
        assert state.keys() == found[1][1][name].keys()
        for key, value in state.items():
            assert_close(found[1][1][name][key], value, tolerance=1e-4, what=f"{name} {key}")


def plainly_delayed(model: nn.Module, data: list[torch.Tensor], after: int, drained: tuple[int, ...] = ()) -> list[float]:
    """PyTorch's own loop: from step `after` on an update uses the gradients, and the learning rate, of the step before."""
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    waiting, losses = None, []

    def apply(gradients: list, lr: float) -> None:
        now = optimizer.param_groups[0]["lr"]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.param_groups[0]["lr"] = now

    for step, x in enumerate(data):
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        given = [parameter.grad for parameter in model.parameters()], optimizer.param_groups[0]["lr"]
        if waiting is not None:
            apply(*waiting)
        waiting = given
        if step < after or step in drained:
            apply(*waiting)
            waiting = None
        scheduler.step()
        losses.append(loss.item())
    if waiting is not None:
        apply(*waiting)
    return losses


@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=2,zero=1", "pp=2,microbatches=2"])
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.default_cases("1-fsdp=4", "1-fsdp=2,zero=1", "1-pp=2,microbatches=2")
def test_a_delayed_update_uses_the_gradient_before(strategy, after):
    reference = Net()
    plain = copy.deepcopy(reference)
    model = compiled(copy.deepcopy(reference), f"{strategy},offload=optimizer,delay=1,delay_after={after}")
    expected = plainly_delayed(reference, batches(8), after)
    assert_equal(model, reference, train(model, adamw(model), batches(8)), expected)
    assert max(abs(a - b) for a, b in zip(expected, train(plain, adamw(plain), batches(8)))) > 1e-4, "the delay makes a difference"


@pytest.mark.parametrize("read", ["parameter", "state", "evaluation", "checkpoint"])
@pytest.mark.default_cases("parameter", "checkpoint")
def test_reads_finish_the_update_that_waits(read, tmp_path):
    reference = Net()
    model = compiled(copy.deepcopy(reference), "fsdp=4,offload=optimizer,delay=1,delay_after=1")
    expected = plainly_delayed(reference, batches(), 1, drained=(3,))
    at_the_read = Net()
    plainly_delayed(at_the_read, batches(4), 1)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for step, x in enumerate(batches()):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step != 3:
            continue
        if read == "parameter":
            assert_close(model.inner.weight.detach().clone(), at_the_read.inner.weight.detach(), tolerance=1e-5)
        elif read == "state":
            assert optimizer.state[model.few]["step"] == 4
        elif read == "evaluation":
            with torch.no_grad():
                assert_close(loss_of(model, x), loss_of(at_the_read, x).detach(), tolerance=1e-5)
        else:
            graphacc.save_checkpoint(tmp_path / "c", model, optimizer)
            fresh = compiled(Net(), None)
            graphacc.load_checkpoint(tmp_path / "c", fresh, adamw(fresh))
            assert_close(fresh.inner.weight.detach().clone(), at_the_read.inner.weight.detach(), tolerance=1e-5)
    assert_equal(model, reference, losses, expected)


@pytest.mark.parametrize("delay", ["", ",delay=1,delay_after=1"])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(delay, tmp_path):
    strategy = f"fsdp=4,offload=optimizer{delay}"
    whole = compiled(Net(), strategy, seed=3)
    optimizer = adamw(whole)
    expected = train(whole, optimizer, batches(3))
    graphacc.save_checkpoint(tmp_path / "c", whole, optimizer)
    expected += train(whole, optimizer, batches(3))
    second = compiled(Net(), strategy, seed=4)
    optimizer = adamw(second)
    graphacc.load_checkpoint(tmp_path / "c", second, optimizer)
    assert train(second, optimizer, batches(3)) == expected[3:]
    for name, want in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], want), name


def test_a_checkpoint_loads_under_another_strategy_and_back(tmp_path):
    reference = Net()
    expected = train(reference, adamw_of := adamw(reference), batches(2))
    for part, strategy in enumerate(("fsdp=4,offload=optimizer", "fsdp=2", "tp=2,fsdp=2,offload=optimizer")):
        model = compiled(Net(), strategy)
        optimizer = adamw(model)
        if part == 0:
            losses = train(model, optimizer, batches(2))
        else:
            graphacc.load_checkpoint(tmp_path / "c", model, optimizer)
            expected += train(reference, adamw_of, batches(2))
            losses += train(model, optimizer, batches(2))
        graphacc.save_checkpoint(tmp_path / "c", model, optimizer)
    assert_equal(model, reference, losses, expected)


def test_bf16_parameters_are_on_the_devices_and_exact_ones_on_the_host():
    losses = []
    for strategy in ("fsdp=4,precision=bf16", "fsdp=4,precision=bf16,offload=optimizer"):
        model = compiled(Net(), strategy)
        losses.append(train(model, adamw(model), batches()))
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), tolerance=1e-4)
    (grad,) = model.programs
    assert {item.dtype for item in grad.graph.inputs if item.kind is Kind.PARAM and item.target != "unused"} == {torch.bfloat16}
    assert model.inner.weight.dtype == torch.float32
    assert not torch.equal(model.inner.weight, model.inner.weight.bfloat16().float())
    saved = model.state_dict()["frozen"]
    assert torch.equal(saved, Net().frozen), "what is not trained keeps its exact value"


def test_memory_says_what_the_host_has():
    model = compiled(Net(), "fsdp=2,offload=optimizer")
    train(model, adamw(model), batches(1))
    assert model.memory().host_bytes == sum(model.host_bytes().values()) > 0
    plain = compiled(Net(), "fsdp=2")
    train(plain, adamw(plain), batches(1))
    assert plain.memory().host_bytes == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload": "everything"}, "offload='everything' is unknown: set offload='optimizer'"),
        ({"delay": 1}, "delay=1 is about updates that the host does.*set offload='optimizer'"),
        ({"offload": "optimizer", "delay": 2}, "delay=2: an update may use the gradients of the step before at the most"),
        ({"offload": "optimizer", "delay_after": 3}, "delay_after=3 counts the steps before updates are delayed, and delay is 0"),
        ({"offload": "optimizer", "delay": 1, "delay_after": -1}, "delay_after=-1 must be a whole number of at least 0"),
    ],
)
def test_strategies_that_are_refused(fields, message):
    with pytest.raises(StrategyError, match=message):
        Strategy(**fields)


def test_the_strategys_text():
    strategy = Strategy.parse("fsdp=8,offload=optimizer,delay=1,delay_after=20")
    assert (strategy.offload, strategy.delay, strategy.delay_after) == ("optimizer", 1, 20)
    assert str(strategy) == "fsdp=8,offload=optimizer,delay=1,delay_after=20"
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.changes_numerics == ("changes numerics: delay: after 20 steps an update uses the gradients of the step before its own",)
    assert not Strategy(offload="optimizer").changes_numerics


def test_an_optimizer_that_looks_at_whole_parameters_is_refused():
    model = compiled(Net(), "fsdp=2,offload=optimizer")
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(StrategyError, match="Adafactor is not known to update elements without looking at others: use one of torch.optim's Adam, AdamW"):
        train(model, optimizer, batches(1))


def test_lazy_capture_is_refused():
    with pytest.raises(StrategyError, match="offload takes gradients and parameters of a graph of operators"):
        compiled(Net(), "fsdp=2,offload=optimizer", capture="lazy")


def test_verification_is_refused():
    with pytest.raises(StrategyError, match="verify=2 with offload='optimizer': programs are compared, and the host's update is none: verify without offload"):
        compiled(Net(), "fsdp=2,offload=optimizer", verify=2)
