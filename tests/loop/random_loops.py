"""Random training loops: each is a list of actions drawn from a seed, run on a plain model and on a compiled one.

    python tests/loop/random_loops.py COUNT FIRST_SEED [STRATEGY]

runs many, on one device where there is no strategy and on eight under "auto", and prints those that differ, or raise what plain PyTorch does not raise and is no GraphAccError; it fails if there is one.
Every fifth runs twice more with a cache of programs, the second time with what the first one left there.

Every seventh is verified, too: each program against PyTorch's run of the same recording. Under "precision=bf16", where plain PyTorch is no reference, all are.
"""

import copy
import dataclasses
import math
import pickle
import random
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import graphacc

ROWS, WIDTH, CLASSES = 8, 5, 3


class Notes:
    """An object of the user's that a forward writes to."""

    last: torch.Tensor | None = None


class Block(nn.Module):
    """A small network with attributes, a buffer and (sometimes) BatchNorm and a tied weight."""

    def __init__(self, norm: bool, tied: bool):
        super().__init__()
        self.first = nn.Linear(WIDTH, 6, bias=not norm)  # BatchNorm cancels a bias: its gradient would be rounding noise
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.second = nn.Linear(6, WIDTH if tied else CLASSES)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("calls", torch.zeros(()))
        self.extra = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.scale, self.twice, self.kept, self.tied, self.decides = 1.0, False, None, tied, False
        self.count, self.heat, self.warms, self.cools, self.notes, self.noted = 0, 2.0, False, False, Notes(), False
        self.config = {"gain": 1.0, "inner": {"on": False}}

    def forward(self, x, y=None, step=None):
        self.count += 1
        if y is not None:
            if y.max() >= CLASSES:
                raise ValueError("a label is too large")
            if x[:, 0].mean() > 0:
                x = x * 1.1
        if self.training:
            self.calls = self.calls * 0.5 + x.detach().mean()
        hidden = self.drop(torch.tanh(self.norm(self.first(x)) * self.scale))
        if self.twice:
            hidden = hidden * 2
        if self.warms:
            hidden = hidden * min(1.0, self.count / 6)
        if self.cools:
            self.heat = max(1.0, self.heat * 0.9)
            hidden = hidden / self.heat
        if self.config["inner"]["on"]:
            hidden = hidden * self.config["gain"]
        if step is not None:
            hidden = hidden * (1 + step / 20) * math.exp(-0.05 * step) + (0.1 if step % 3 == 0 else 0.0)
        if self.noted:
            self.notes.last = hidden.detach().mean()
            self.second.last = hidden.detach().sum()
        if self.decides:
            hidden = hidden + self.extra(hidden)
            if hidden.sum() > 0:
                hidden = hidden * 0.9
            hidden = hidden - self.extra(hidden) * 0.5
        self.kept = hidden.pow(2).mean()
        out = self.second(hidden)
        return F.linear(out, self.first.weight)[:, :CLASSES] if self.tied else out

    def encode(self, x):
        return torch.tanh(self.first(x))


@dataclasses.dataclass
class Run:
    """One loop as it runs on one model."""

    model: nn.Module
    other: nn.Module
    optimizer: torch.optim.Optimizer
    choose: random.Random
    total: object = 0.0
    loss: torch.Tensor | None = None
    out: torch.Tensor | None = None
    seen: list = dataclasses.field(default_factory=list)
    memory: dict = dataclasses.field(default_factory=dict)
    step: int = 0
    draws: bool = False  # its batches from torch's own generator


def batch(run: Run, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = None if run.draws else torch.Generator().manual_seed(run.step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


# ---- ways to compute a loss


def by_call(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y)


def by_forward(run, x, y):
    run.out = run.model.forward(x)
    return F.cross_entropy(run.out, y)


def with_submodule(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + run.model.encode(x).pow(2).mean()


def with_attribute(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + 0.1 * run.model.kept


def with_penalty(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + 0.01 * sum(p.pow(2).sum() for p in run.model.parameters())


def called_twice(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + F.mse_loss(run.model(x * 0.5), run.out.detach())


def with_other_model(run, x, y):
    with torch.no_grad():
        target = run.other(x)
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + F.mse_loss(run.out, target)


def through_other_model(run, x, y):
    run.out = run.model(run.other(x)[:, :1].expand(-1, WIDTH) + x)
    return F.cross_entropy(run.out, y)


def checked_labels(run, x, y):
    run.out = run.model(x, y)
    return F.cross_entropy(run.out, y)


def by_masked_call(run, x, y):
    run.out = run.model(x, y)
    return F.cross_entropy(run.out[y > 0], y[y > 0])


def through_plain_module(run, x, y):
    run.out = run.model(torch.tanh(plain(run, WIDTH)(x)))
    return F.cross_entropy(run.out, y)


def into_plain_module(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(plain(run, CLASSES)(run.out), y)


def between_plain_modules(run, x, y):
    run.out = run.model(torch.tanh(plain(run, WIDTH)(x)), y)
    return F.cross_entropy(plain(run, CLASSES)(run.out), y) + run.model(x).pow(2).mean()


def deciding(run, x, y):
    run.model.decides = True
    run.out = run.model(x)
    return F.cross_entropy(run.out, y)


def plain(run, width):
    """A module that is not compiled; it trains, too."""
    if width not in run.memory:
        with torch.random.fork_rng():
            torch.manual_seed(width)
            run.memory[width] = nn.Linear(width, width)
    elif run.memory[width].weight.grad is not None:
        with torch.no_grad():
            for p in run.memory[width].parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return run.memory[width]


def scheduled_weight(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) * (1.0 + 0.1 * run.step)


def with_a_step(run, x, y):
    run.out = run.model(x, step=run.step)
    return F.cross_entropy(run.out, y) * (1 + run.step) / 3


def selected_rows(run, x, y):
    run.out = run.model(x)
    keep = x[:, 0] > -1.0
    return F.cross_entropy(run.out[keep], y[keep])


def with_input_penalty(run, x, y):
    x.requires_grad_()
    run.out = run.model(x)
    (slope,) = torch.autograd.grad(run.out.sum(), x, create_graph=True)
    return F.cross_entropy(run.out, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()


def with_input_penalty_of_another_call(run, x, y):
    """DRAGAN's and WGAN-GP's: of points beside the batch, whose call comes last."""
    run.out = run.model(x)
    beside = (x * 0.5).requires_grad_()
    scores = run.model(beside)
    (slope,) = torch.autograd.grad(scores, beside, torch.ones_like(scores), create_graph=True, retain_graph=True)
    return F.cross_entropy(run.out, y) + 0.1 * slope.pow(2).mean()


def with_gradient_penalty(run, x, y):
    run.out = run.model(x)
    loss = F.cross_entropy(run.out, y)
    gradients = torch.autograd.grad(loss, [p for p in run.model.parameters() if p.requires_grad], create_graph=True, allow_unused=True)
    return loss + 0.01 * sum(g.pow(2).sum() for g in gradients if g is not None)


def on_adversarial_rows(run, x, y):
    x.requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(run.model(x), y), x)
    run.out = run.model((x + 0.1 * slope.tanh()).detach())
    return F.cross_entropy(run.out, y)


def by_functional_call(run, x, y):
    run.out = torch.func.functional_call(run.model, {name: p * 0.9 for name, p in run.model.named_parameters()}, (x,))
    return F.cross_entropy(run.out, y)


def with_a_weight(run, x, y):
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + F.linear(x, run.model.first.weight).tanh().pow(2).mean()


def in_parts(run, x, y):
    run.out = torch.cat([run.model(part) for part in x.split(3)])
    return F.cross_entropy(run.out, y)


def checkpointed(run, x, y):
    hidden = torch.utils.checkpoint.checkpoint(run.model.encode, x, use_reentrant=False)
    run.out = run.model(x)
    return F.cross_entropy(run.out, y) + hidden.pow(2).mean()


def with_rows_written_in_place(run, x, y):
    """What the loop writes into tensors that it gave, before anything has run."""
    target = torch.ones(len(x), CLASSES)
    run.out = run.model(x + 0.5)
    first = (run.out - target).abs().mean()
    target.fill_(-1.0)
    second = (run.model(x * 0.5) - target).pow(2).mean()
    x.zero_()
    return F.cross_entropy(run.out, y) + first + second


LOSSES = [by_call] * 6 + [
    by_forward, with_submodule, with_attribute, with_penalty, called_twice, with_other_model, through_other_model, scheduled_weight, with_a_step, selected_rows,
    checked_labels, by_masked_call, through_plain_module, into_plain_module, between_plain_modules, deciding, with_input_penalty,
    with_input_penalty_of_another_call, with_gradient_penalty, on_adversarial_rows, by_functional_call, with_a_weight, in_parts, checkpointed, with_rows_written_in_place,
]  # fmt: skip


# ---- actions by the place in the loop where they stand


def read_loss(run):
    run.seen.append(run.loss.item())


def read_output(run):
    run.seen.append(run.out.detach().sum().item())


def running_total(run):
    run.total = run.total + run.loss.detach()


def running_total_in_place(run):
    run.total += run.loss.detach()


def metric(run):
    run.seen.append((run.out.argmax(1) == 0).float().mean())


def hook_on_loss(run):
    run.loss.register_hook(lambda g: g * 0.5)


def hook_on_output(run):
    if run.out.requires_grad:
        run.out.retain_grad()
        run.memory["retained"] = run.out


def doubled_loss(run):
    run.loss = run.loss * 2


def nothing(run):
    pass


def set_scale(run):
    run.model.scale = 1.0 + 0.1 * run.step


def set_flag(run):
    run.model.twice = not run.model.twice


def set_numbers(run):
    name = ("warms", "cools", "noted")[run.step % 3]
    setattr(run.model, name, not getattr(run.model, name))


def exchange_function(run):
    if isinstance(run.model.drop, nn.Sequential) and len(run.model.drop) > 1:
        del run.model.drop[-1]  # the same function stays before it
    else:
        function = nn.Softsign() if run.step % 2 else nn.SiLU()
        run.model.drop = nn.Sequential(function, function)


def exchange_module(run):
    run.model.drop = nn.Dropout(0.0) if run.model.drop is run.model.norm else run.model.norm


def exchange_parameter(run):
    layer = run.model.second
    layer.bias = None if run.step % 3 == 2 else nn.Parameter(torch.full((layer.out_features,), 0.1 * run.step))


def set_config(run):
    config = run.model.config
    config["inner"]["on"], config["gain"] = True, 1.0 + 0.05 * run.step
    if run.step % 2:
        run.model.config = {**config, "gain": config["gain"] * 1.1}


def look_at_numbers(run):
    run.seen += [run.model.count, run.model.heat, *(x.item() for x in (run.model.notes.last, getattr(run.model.second, "last", None)) if x is not None)]


def set_count(run):
    run.model.count = run.step


def freeze(run):
    run.model.first.requires_grad_(not run.model.first.weight.requires_grad)


def eval_mode(run):
    run.model.train(not run.model.training)


def evaluate(run):
    training = run.model.training
    run.model.eval()
    with torch.no_grad():
        run.seen.append(run.model(batch(run, 4)[0]).sum().item())
    run.model.train(training)


def add_hook(run):
    if "hook" in run.memory:
        run.memory.pop("hook").remove()
    else:
        run.memory["hook"] = run.model.first.register_forward_hook(lambda module, args, out: out * 0.9)


def add_parameter_hook(run):
    if "parameter hook" in run.memory:
        run.memory.pop("parameter hook").remove()
    elif run.model.second.weight.requires_grad:
        run.memory["parameter hook"] = run.model.second.weight.register_hook(lambda g: g * 0.5)


def keeping_hook(run):
    if "kept" not in run.memory:
        kept = run.memory["kept"] = []
        run.model.second.register_forward_hook(lambda module, args, out: kept.append(out.detach().mean()))
    elif run.memory["kept"]:
        run.seen += [float(len(run.memory["kept"])), run.memory["kept"][-1].item()]


def shrink(run):
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.99)


def clamp_data(run):
    for p in run.model.parameters():
        p.data.clamp_(-0.5, 0.5)


def alias(run):
    if "alias" not in run.memory:
        run.memory["alias"] = run.model.second.weight.data
    else:
        run.memory["alias"].mul_(0.98)
        run.seen.append(run.memory["alias"].sum().item())


def take_alias(run):
    """It is written later, by `alias`."""
    run.memory.setdefault("alias", run.model.second.weight.detach() if run.step % 2 else run.model.second.weight.data)


def take_view(run):
    """A view of a parameter, and of a buffer, that lives longer than the step."""
    run.memory.setdefault("view", run.model.first.weight.view(-1))
    run.memory.setdefault("buffer", run.model.calls.view(1))


def use_view(run):
    if "view" in run.memory:
        run.seen += [run.memory["view"].sum().item(), run.memory["buffer"].sum().item()]
        with torch.no_grad():
            run.memory["view"].mul_(0.95)


def look_at_state(run):
    run.seen.append(sum(value.sum().item() for value in run.model.state_dict().values()))


def average(run):
    held = run.memory.setdefault("average", {name: value.clone() for name, value in run.model.state_dict().items()})
    with torch.no_grad():
        for name, value in run.model.state_dict().items():
            held[name].lerp_(value, 0.5)
    run.seen.append(sum(value.sum().item() for value in held.values()))


def learning_rate(run):
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.9


def weight_decay(run):
    for group in run.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * (1 + run.step)


def reload_model(run):
    run.model.load_state_dict({name: value * 1.01 if value.is_floating_point() else value for name, value in run.model.state_dict().items()})


def reload_optimizer(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def edit_state(run):
    for state in run.optimizer.state.values():
        for key, value in state.items():
            if key in ("exp_avg", "momentum_buffer") and value is not None:
                value.mul_(0.5)


def clip(run):
    run.seen.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))


def clip_values(run):
    nn.utils.clip_grad_value_(run.model.parameters(), 0.05)


def read_gradients(run):
    run.seen.append(sum(p.grad.abs().sum().item() for p in run.model.parameters() if p.grad is not None))


def scale_gradients(run):
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def drop_gradient(run):
    if run.model.second.bias is not None:
        run.model.second.bias.grad = None


def assign_gradient(run):
    if run.model.second.bias is not None:
        run.model.second.bias.grad = torch.full_like(run.model.second.bias, 0.01)


def noise_gradient(run):
    p = run.model.second.weight
    if p.grad is not None:
        p.grad = p.grad + 0.01


def manual_update(run):
    with torch.no_grad():
        for p in run.model.parameters():
            if p.grad is not None:
                p -= 0.05 * p.grad


def manual_data(run):
    for p in run.model.parameters():
        if p.grad is not None:
            p.data = p.data - 0.05 * p.grad


def second_backward(run):
    run.model.encode(batch(run)[0]).pow(2).sum().mul(0.01).backward()


def another_call(run):
    F.cross_entropy(run.model(batch(run)[0] * 0.3), batch(run)[1]).backward()


def save(run):
    loaded = pickle.loads(pickle.dumps(run.model))
    with torch.no_grad():
        run.seen.append(loaded.eval()(batch(run)[0]).sum().item())


def group(run):
    """Half of the learning rate for what is in the optimizer, and a new module in it."""
    if run.memory.get("group") is None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            run.memory["group"] = nn.Parameter(torch.randn(4))
        run.optimizer.add_param_group({"params": [run.memory["group"]], "lr": 0.01})


def call_and_read(run):
    """A call whose only effects are a value and the buffers."""
    run.seen.append(run.model(batch(run)[0] * 0.2).sum().item())


def statistics(run):
    with torch.no_grad():
        run.model(batch(run)[0] + 1.0)


def read_buffers(run):
    run.seen += [buffer.clone().sum().item() for buffer in run.model.buffers()]


BEFORE = [nothing] * 4 + [set_scale, set_flag, set_numbers, set_config, set_numbers, look_at_numbers, set_count, freeze, eval_mode, evaluate, add_hook, add_parameter_hook, keeping_hook, shrink, clamp_data, alias, average, call_and_read, statistics, exchange_function, exchange_module, exchange_parameter]
AFTER_FORWARD = [nothing] * 4 + [read_loss, read_output, running_total, running_total_in_place, metric, hook_on_loss, hook_on_output, doubled_loss, evaluate, take_alias, take_view, look_at_state, freeze, exchange_function, exchange_module, exchange_parameter]
AFTER_BACKWARD = [nothing] * 4 + [
    read_loss, read_output, running_total, running_total_in_place, metric, clip, clip_values, read_gradients, scale_gradients, drop_gradient,
    assign_gradient, noise_gradient, manual_update, manual_data, second_backward, another_call, clamp_data, evaluate,
    call_and_read, statistics, read_buffers, eval_mode, take_alias, take_view, look_at_state, average, freeze, exchange_function, exchange_parameter,
]  # fmt: skip
AFTER_STEP = [nothing] * 4 + [
    read_loss, read_output, running_total, running_total_in_place, metric, shrink, clamp_data, alias, average, learning_rate, weight_decay,
    reload_model, reload_optimizer, edit_state, evaluate, save, group, read_buffers, use_view, use_view, look_at_numbers, set_numbers, exchange_parameter, edit_state,
]  # fmt: skip

OPTIMIZERS: list[Callable] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, lr=0.02),
    lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.05),
]


def train(model: nn.Module, other: nn.Module, seed: int) -> list[float]:
    """The loop of a seed; returns what it looked at."""
    choose = random.Random(seed)
    make = choose.choice(OPTIMIZERS)
    run = Run(model, other, make(model.parameters()), choose, draws=choose.random() < 0.5)
    torch.manual_seed(seed)
    accumulate = choose.choice([1, 1, 1, 2])
    zero_first, to_none = choose.random() < 0.5, choose.random() < 0.8
    rows = [choose.choice([ROWS, ROWS, ROWS, 6]) for _ in range(2)]
    phases = [(actions, [choose.choice(actions) for _ in range(choose.choice([0, 1, 1, 2]))]) for actions in (BEFORE, AFTER_FORWARD, AFTER_BACKWARD, AFTER_STEP)]
    loss_of = choose.choice(LOSSES)
    steps = 4
    for run.step in range(steps):
        if choose.random() < 0.2:  # the loop is not the same in every step
            phases = [(actions, [choose.choice(actions) if choose.random() < 0.3 else action for action in chosen]) for actions, chosen in phases]
        for action in phases[0][1]:
            action(run)
        if zero_first and run.step % accumulate == 0:
            run.optimizer.zero_grad(set_to_none=to_none)
        run.loss = loss_of(run, *batch(run, rows[run.step == steps - 1])) / accumulate
        for action in phases[1][1]:
            action(run)
        run.loss.backward()
        if run.memory.get("retained") is not None and run.memory["retained"].grad is not None:
            run.seen.append(run.memory.pop("retained").grad.sum().item())
        for action in phases[2][1]:
            action(run)
        if run.step % accumulate == accumulate - 1:
            run.optimizer.step()
            for action in phases[3][1]:
                action(run)
            if not zero_first:
                run.optimizer.zero_grad(set_to_none=to_none)
        run.seen.append(run.loss.item())
    return [float(value) for value in [*run.seen, run.total, model.count, model.heat]]


def build(seed: int) -> tuple[nn.Module, nn.Module]:
    choose = random.Random(seed + 1_000_000)
    torch.manual_seed(seed)
    return Block(choose.random() < 0.3, choose.random() < 0.3), nn.Sequential(nn.Linear(WIDTH, CLASSES))


def compare(seed: int, strategy: str | None = None, cache_dir: str | None = None) -> str:
    """Run the loop of a seed both ways.

    Returns:
        "equal", "refused: ..." where GraphAcc raised its own error, "invalid" where plain PyTorch raises, or "WRONG: ...".
    """
    model, other = build(seed)
    rounded = "bf16" in (strategy or "")
    verified = (rounded or seed % 7 == 0) and "offload" not in (strategy or "")  # the host's update is no program
    devices = {"devices": 1} if strategy in (None, "precision=bf16") else {"devices": 8} if strategy == "auto" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copies = [copy.deepcopy(m) for m in (model, other)]
        try:
            expected = train(model, other, seed)
        except (RuntimeError, AttributeError, pickle.PicklingError):
            return "invalid"
        ours = [
            graphacc.compile(m, strategy=strategy or graphacc.Strategy(), fast_compile=True, memory_plan="xla", cache_dir=cache_dir, verify=1000 * verified, **devices) for m in copies
        ]
        try:
            got = train(*ours, seed)
        except graphacc.VerificationError as error:
            return f"WRONG: {str(error)[:300]}"
        except graphacc.GraphAccError as error:
            return f"refused: {type(error).__name__}: {str(error)[:160]}"
        except Exception as error:  # what it is, is the finding
            return f"WRONG: {type(error).__name__}: {str(error)[:300]}"
    if rounded:
        return "equal"
    if len(got) != len(expected):
        return f"WRONG: {len(got)} values seen, PyTorch {len(expected)}"
    for a, b in zip(got, expected, strict=True):
        if not abs(a - b) <= 2e-4 * max(1.0, abs(b)) and not (a != a and b != b):
            return f"WRONG: {got} is not {expected}"
    state = ours[0].state_dict()
    for name, value in model.state_dict().items():
        error = (state[name].double() - value.double()).abs().max()
        if not error <= 5e-4 * max(1.0, value.abs().max().item()):
            return f"WRONG: {name} differs by {error:.3g}"
    return "equal"


def main(count: int, first: int, strategy: str | None = None) -> None:
    kinds: dict[str, int] = {}
    for seed in range(first, first + count):
        result = compare(seed, strategy)
        if seed % 5 == 0 and result == "equal":
            with tempfile.TemporaryDirectory() as cache:
                results = [compare(seed, strategy, cache) for _ in range(2)]
            result = next((f"{found} (run {number} with a cache)" for number, found in enumerate(results, 1) if found != "equal"), "equal")
        kind = result.partition(":")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
        if kind in ("WRONG", "refused"):
            print(seed, result, flush=True)
    print(kinds)
    if "WRONG" in kinds:
        sys.exit(1)


if __name__ == "__main__":
    import logging

    logging.getLogger("graphacc").setLevel(logging.ERROR)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
