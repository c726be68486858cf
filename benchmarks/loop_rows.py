"""Claim: ordinary training loops give PyTorch's numbers with `model = graphacc.compile(model)` added, or a refusal that names the line and the remedy.

    python benchmarks/loop_rows.py [--rows B_ E_SAM ...] [--json FILE] [--reproductions FOLDER]

Every row is a short loop that once gave other numbers, crashed or was refused, or is of a kind that people write. It runs on a plain model and on a compiled one, with the
same seeds, on eight virtual CPU devices. Printed for each row: the largest relative difference of the numbers that the loop reads, the largest absolute difference of the
parameters and buffers at the end (relative to the largest value of a tensor where that is above 1), the compiled programs as kind:count (PyTorch:count is how often PyTorch
ran something that is not compiled), and the seconds of both runs; or the beginning of the refusal. Exits 1 if a row differs by more than its tolerance, crashes, or is refused
where that is not expected.

The beginning of a name says what the row is about: A ways to use a model and to update it, A8 optimizers of the package pytorch_optimizer, B hooks, scalers, state of Python
and of optimizers, C transformers' Trainer, D other libraries, E features of torch, F model families, R the scripts of `--reproductions`. Rows whose library is not installed are
left out, which is said. Rows of D and R and some others have processes of their own. Dropout is off: the random numbers that a compiled model draws are other ones.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import io
import itertools
import json
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable

os.environ.setdefault("USE_TORCH_XLA", "0")  # transformers and accelerate would otherwise train on torch_xla's devices where it is installed
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from graphacc.examples import tiny_llama

STEPS = 4
TOLERANCE = 1e-5
BF16 = (5e-3, "bf16 has 8 bits, and XLA rounds to it at other places than PyTorch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One loop."""

    run: Callable  # takes `compile`, gives the numbers that the loop has read
    tolerance: float = TOLERANCE  # of these numbers, relative
    parameters: float = TOLERANCE  # of parameters and buffers at the end, absolute, or relative to a tensor's largest value where that is above 1
    why: str = ""  # reason for another tolerance
    refusal: str | None = None  # pattern of a refusal that is expected: what the message says
    alone: bool = False  # in a process of its own
    needs: tuple[str, ...] = ()  # libraries
    options: dict = dataclasses.field(default_factory=dict)  # of graphacc.compile


ROWS: dict[str, Row] = {}


def row(name: str, **options) -> Callable:
    def register(run):
        if name in ROWS:
            raise ValueError(f"two rows are named {name}")
        ROWS[name] = Row(run=run, **options)
        return run

    return register


def step(name: str, *, make=None, optimizer=None, steps=STEPS, rows=16, **options) -> Callable:
    """A row from the body of its loop: ``body(model, optimizer, x, y, i)`` gives what the loop reads."""

    def register(body):
        row(name, **options)(functools.partial(loop, body=body, make=make or net, optimizer=optimizer or sgd, steps=steps, rows=rows))
        return body

    return register


def loop(compile, body, make, optimizer, steps=STEPS, rows=16):
    model = compile(make())
    chosen = optimizer(model)
    return [body(model, chosen, x, y, i) for i, (x, y) in enumerate(batches(steps, rows))]


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batches(steps: int = STEPS, rows: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """x [rows, 16] and labels [rows]."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)) for _ in range(steps)]


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


# ---- A: ways to use a model, and to update it


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.second(self.encode(x))

    def encode(self, x):
        return torch.tanh(self.first(x))

    def training_step(self, x, y):
        return F.cross_entropy(self.second(self.encode(x)), y)


@step("A_plain")
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y))


@step("A_submodule_forward_method")
def _(m, o, x, y, i):
    return trained(o, F.cross_entropy(m[2].forward(m[1](m[0].forward(x))), y))


@step("A_forward_method")
def _(m, o, x, y, i):
    return trained(o, F.cross_entropy(m.forward(x), y))


@step("A_another_method", make=Methods)
def _(m, o, x, y, i):
    return trained(o, m.training_step(x, y))


@step("A_functional_use")
def _(m, o, x, y, i):
    return trained(o, F.cross_entropy(F.linear(F.gelu(x @ m[0].weight.T + m[0].bias), m[2].weight, m[2].bias), y))


@step("A_model_and_submodule", make=Methods)
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y) + m.encode(x).pow(2).mean())


@step("A_penalty_on_parameters")
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y) + 1e-3 * sum(p.abs().sum() for p in m.parameters()) + 1e-2 * m[0].weight.pow(2).sum())


def updated_by_hand(name, update, read_first=False):
    @step(f"A_update_{name}")
    def body(m, o, x, y, i):
        m.zero_grad()
        loss = loss_of(m, x, y)
        if read_first:
            loss.item()
        loss.backward()
        for p in m.parameters():
            update(p)
        return loss


def assign(p):
    p.data = p.data - 0.1 * p.grad


def subtract_data(p):
    p.data -= 0.1 * p.grad


def subtract(p):
    with torch.no_grad():
        p -= 0.1 * p.grad


def copied(p):
    with torch.no_grad():
        p.copy_(p - 0.1 * p.grad)


updated_by_hand("data_add", lambda p: p.data.add_(-0.1 * p.grad))
updated_by_hand("data_add_after_item", lambda p: p.data.add_(-0.1 * p.grad), read_first=True)
updated_by_hand("alpha", lambda p: p.data.add_(p.grad, alpha=-0.1))
updated_by_hand("data_assigned", assign)
updated_by_hand("data_subtract", subtract_data)
updated_by_hand("no_grad_subtract", subtract)
updated_by_hand("copy", copied)


@row("A_validation_losses_kept")
def _(compile):
    """Validation with gradients enabled, whose losses are kept."""
    model = compile(net())
    optimizer, seen = sgd(model), []
    for _ in range(2):
        seen += [trained(optimizer, loss_of(model, x, y)).item() for x, y in batches(2)]
        kept = [loss_of(model, x, y).detach() for x, y in batches(6)]
        seen += [torch.stack(kept).mean().item()]
    return seen


@row("A_two_models_in_a_row")
def _(compile):
    first, second = compile(nn.Linear(16, 16)), compile(nn.Linear(16, 1))
    optimizers = [sgd(first, 0.1), sgd(second, 0.1)]
    seen = []
    for x, _ in batches():
        hidden = first(x)
        seen.append(trained(optimizers[0], hidden.pow(2).mean()))
        seen.append(trained(optimizers[1], second(hidden.detach()).pow(2).mean()))
    return seen


@row("A_teacher_and_student")
def _(compile):
    teacher, student = compile(net()), compile(net())
    optimizer, seen = sgd(student), []
    for x, _ in batches():
        with torch.no_grad():
            target = teacher(x)
        seen.append(trained(optimizer, F.mse_loss(student(x), target)))
    return seen


def totals(name, add):
    @row(f"A_running_total_{name}")
    def run(compile):
        model = compile(net())
        optimizer, total = sgd(model), torch.zeros(()) if name == "tensor" else 0.0
        for x, y in batches():
            out = model(x)
            loss = F.cross_entropy(out, y)
            if name == "metric_before_backward":
                total += (out > 0).float().mean()
            optimizer.zero_grad()
            loss.backward()
            if name in ("before_step", "tensor"):
                total += loss.detach()
            optimizer.step()
            if name == "after_step":
                total += loss.detach()
        return [float(total)]


for when in ("metric_before_backward", "before_step", "tensor", "after_step"):
    totals(when, None)


@step("A_squeeze_batch_of_eight", make=lambda: nn.Linear(16, 1), rows=8)
def _(m, o, x, y, i):
    return trained(o, (m(x).squeeze() - y).pow(2).mean())


class CachedMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(4, 4), None

    def forward(self, x):
        if self.mask is None or self.mask.size(0) != x.size(1):
            self.mask = torch.log(torch.tril(torch.ones(x.size(1), x.size(1))))
        return torch.softmax(self.layer(x) @ x.mT + self.mask, -1)


@step("A_mask_cached_in_forward", make=CachedMask)
def _(m, o, x, y, i):
    loss = trained(o, m(x.view(16, 4, 4)).pow(2).mean())
    return [loss, m.mask.isinf().sum()]


class FillsGradients(torch.optim.Optimizer):
    """Gives parameters without a gradient one of zeros, as Muon's repository does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 0.1)
                p.add_(state["momentum"], alpha=-group["lr"])


@step("A_optimizer_fills_gradients", optimizer=lambda m: FillsGradients(m.parameters()))
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y))


class SparseGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4))

    def forward(self, x, adjacency):
        return torch.spmm(adjacency, x @ self.weight)


@step("A_sparse_input", make=SparseGraph)
def _(m, o, x, y, i):
    return trained(o, F.cross_entropy(m(x, (torch.eye(16) + torch.eye(16).roll(1, 0)).to_sparse()), y))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(16, 32, 2)

    def forward(self, x, hidden):
        return self.layers(x, hidden)


@row("A_lstm_sequence_first", options={"batch_dims": {"model.args[0]": 1}})
def _(compile):
    """Hidden states go from step to step, as in word_language_model."""
    model = compile(Recurrent())
    optimizer, seen, hidden = sgd(model), [], (torch.zeros(2, 8, 32), torch.zeros(2, 8, 32))
    for i in range(STEPS):
        x = torch.randn(7, 8, 16, generator=torch.Generator().manual_seed(i))
        y, hidden = model(x, tuple(h.detach() for h in hidden))
        seen.append(trained(optimizer, y.pow(2).mean()))
    return seen


@step("A_top_k_metric")
def _(m, o, x, y, i):
    """As imagenet/main.py's accuracy(), before backward."""
    out = m(x)
    loss = F.cross_entropy(out, y)
    with torch.no_grad():
        correct = out.topk(2, 1, True, True)[1].t().eq(y.view(1, -1))
        accuracy = correct[:1].reshape(-1).float().sum(0, keepdim=True).mul_(100 / 16)
    seen = [loss.item(), accuracy[0]]
    trained(o, loss)
    return [*seen, loss]


@step("A_loss_accumulated_over_micro_steps")
def _(m, o, x, y, i):
    total = 0.0
    for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = loss_of(m, part, labels) / 2
        total += loss.detach()
        loss.backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    o.step()
    o.zero_grad()
    return [total, norm]


@step("A_batch_scaled_in_place_after_the_call")
def _(m, o, x, y, i):
    out = m(x + 0.0)  # as fast_neural_style, whose first layer saves a padded copy
    return trained(o, F.cross_entropy(out, y) + (out - x.div_(2.0)[:, :4]).pow(2).mean())


@row("A_layers_in_a_list")
def _(compile):
    """Layers that are trained one by one, by losses of their own (mnist_forward_forward)."""
    layers = [compile(nn.Linear(16, 16)) for _ in range(2)]
    optimizers, seen = [adam(layer) for layer in layers], []
    for x, _ in batches(2):
        positive, negative = x, x.roll(1, 1)
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for _ in range(2):
                good, bad = torch.relu(layer.forward(positive)).pow(2).mean(1), torch.relu(layer.forward(negative)).pow(2).mean(1)
                seen.append(trained(optimizer, F.softplus(torch.cat([1 - good, bad - 1])).mean()).item())
            positive, negative = layer(positive).relu().detach(), layer(negative).relu().detach()
    return seen


@row("A_policy_gradient")
def _(compile):
    """Episodes of different lengths, each action chosen from the model's probabilities, as in reinforcement_learning/reinforce.py."""
    policy = compile(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4), nn.Softmax(-1)))
    optimizer, seen, draw = adam(policy), [], torch.Generator().manual_seed(3)
    for episode in range(3):
        logs = []
        for _ in range(3 + episode):
            choices = torch.distributions.Categorical(policy(torch.randn(1, 16, generator=draw)))
            action = (choices.probs.cumsum(-1) < torch.rand(1, 1, generator=draw)).sum(-1)
            logs.append(choices.log_prob(action))
        loss = torch.cat([-log * 0.9**k for k, log in enumerate(logs)]).sum()
        seen.append(trained(optimizer, loss).item())
    return seen


@row("A_one_more_token_in_every_call")
def _(compile):
    """Generation without a cache."""
    model = compile(gpt2())
    tokens = torch.randint(2, 32, (1, 4), generator=torch.Generator().manual_seed(0))
    model.eval()
    with torch.no_grad():
        for _ in range(6):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return [float(token) for token in tokens[0]]


# ---- A8: optimizers of the package pytorch_optimizer


def of_package(name, **options):
    arguments = {"Prodigy": dict(lr=1.0), "Lion": dict(lr=1e-3), "CAME": dict(lr=1e-3)}.get(name, dict(lr=1e-2))

    def make(model):
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(model.parameters(), **arguments)

    @row(f"A8_{name}", needs=("pytorch_optimizer",), **options)
    def run(compile):
        model = compile(net())
        optimizer = make(model)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return [trained(optimizer, loss_of(model, x, y)) for x, y in batches(6)]


for name in ("AdaBelief", "ADOPT", "Adan", "AdEMAMix", "StableAdamW", "Lamb", "Prodigy", "ScheduleFreeAdamW", "Lion", "CAME"):
    of_package(name)
of_package("SOAP", tolerance=3e-2, parameters=1e-1, why="eigenvectors of singular matrices; in float64 an input that changes by 1e-15 moves plain PyTorch's losses by 1e-2")


@row("A8_SOAP_of_full_rank", needs=("pytorch_optimizer",))
def _(compile):
    """In float64, of matrices without equal eigenvalues."""
    import pytorch_optimizer

    model = compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double())
    optimizer = pytorch_optimizer.SOAP(model.parameters(), lr=1e-2, eps=1e-4)
    data = [torch.randn(2, 64, 8, generator=draws(i), dtype=torch.float64) for i in range(6)]
    return [trained(optimizer, F.mse_loss(model(x), y)) for x, y in data]


# ---- B: scalers, hooks, state of Python and of optimizers


def scaled(model, optimizer, scaler, loss, unscale=False):
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def with_scaler(name, unscale=False, infinite=False, optimizer=sgd):
    @row(f"B_{name}")
    def run(compile):
        model, scaler, seen = compile(net()), torch.amp.GradScaler("cpu", init_scale=256.0), []
        chosen = optimizer(model)
        for i, (x, y) in enumerate(batches()):
            loss = loss_of(model, x, y) * (float("inf") if infinite and i == 1 else 1.0)
            scaled(model, chosen, scaler, loss, unscale)
            seen += [loss, scaler.get_scale()]
        return seen


with_scaler("GradScaler")
with_scaler("GradScaler_AdamW", optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
with_scaler("GradScaler_unscale_and_clip", unscale=True)
with_scaler("GradScaler_inf_loss", infinite=True)


@step("B_foreach_unscale")
def _(m, o, x, y, i):
    o.zero_grad()
    loss = loss_of(m, x, y)
    loss.backward()
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in m.parameters()], found, torch.tensor([0.5]))
    o.step()
    return [loss, found]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.scale = nn.Linear(16, 4), nn.Dropout(0.0), 1.0

    def forward(self, x):
        return self.drop(self.layer(x)) * self.scale


@step("B_attribute", make=Scaled)
def _(m, o, x, y, i):
    m.scale = 1.0 + i
    return trained(o, loss_of(m, x, y))


@step("B_Dropout_p", make=Scaled)
def _(m, o, x, y, i):
    m.drop.p = 1.0 if i >= 2 else 0.0
    return trained(o, loss_of(m, x, y))


@step("B_late_forward_hook")
def _(m, o, x, y, i):
    if i == 2:
        m[0].register_forward_hook(lambda module, args, out: out * 0.5)
    return trained(o, loss_of(m, x, y))


@step("B_late_parameter_hook")
def _(m, o, x, y, i):
    if i == 2:
        m[0].weight.register_hook(lambda g: g * 0.0)
    return trained(o, loss_of(m, x, y))


@step("B_hook_removed")
def _(m, o, x, y, i):
    if i == 0:
        m.__dict__["handle"] = m[0].register_forward_hook(lambda module, args, out: out * 0.5)
    if i == 2:
        m.__dict__.pop("handle").remove()
    return trained(o, loss_of(m, x, y))


@step("B_full_backward_hook")
def _(m, o, x, y, i):
    if i == 1:
        m[0].register_full_backward_hook(lambda module, inputs, outputs: None)
        m[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return trained(o, loss_of(m, x, y))


@step("B_loss_hook")
def _(m, o, x, y, i):
    loss = loss_of(m, x, y)
    loss.register_hook(lambda g: g * 0.5)
    return trained(o, loss)


@step("B_output_hook")
def _(m, o, x, y, i):
    out = m(x)
    out.register_hook(lambda g: g * 0.5)
    return trained(o, F.cross_entropy(out, y))


@step("B_retain_grad")
def _(m, o, x, y, i):
    out = m(x)
    out.retain_grad()
    loss = trained(o, F.cross_entropy(out, y))
    return [loss, out.grad.norm()]


class CountsInGroup(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / (1 - 0.9 ** group["step"]))


@step("B_optimizer_group_step", optimizer=lambda m: CountsInGroup(m.parameters()))
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y))


@step("B_optimizer_state_zeroed", optimizer=adam)
def _(m, o, x, y, i):
    loss = trained(o, loss_of(m, x, y))
    if i == 1:
        for state in o.state.values():
            state["exp_avg"].zero_()
    return loss


@step("B_optimizer_state_replaced", optimizer=adam)
def _(m, o, x, y, i):
    loss = trained(o, loss_of(m, x, y))
    if i == 1:
        o.state = collections.defaultdict(dict)
    return loss


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant=False):
        super().__init__()
        self.blocks, self.use_reentrant = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)), use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def checkpointed(name, use_reentrant):
    @row(f"B_{name}")
    def run(compile):
        model = compile(Checkpointed(use_reentrant))
        optimizer = sgd(model, 0.05)
        seen = [trained(optimizer, model(x.requires_grad_(use_reentrant)).pow(2).mean()) for x, _ in batches()]
        if hasattr(model, "explain") and "computed again in backward:" not in model.explain():
            raise AssertionError("torch.utils.checkpoint has no effect")
        return seen


checkpointed("checkpoint", False)
checkpointed("checkpoint_reentrant", True)


@step("B_running_total")
def _(m, o, x, y, i):
    loss = loss_of(m, x, y)
    loss.backward()
    m.__dict__["total"] = m.__dict__.get("total", 0.0) + loss.detach()
    o.step()
    o.zero_grad()
    return m.__dict__["total"]


def adversarial(generator, critic):
    optimizers, seen = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (generator, critic)], []
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    for x, _ in batches():
        fake = generator(x)
        real_loss = F.binary_cross_entropy_with_logits(critic(x * 2), ones)
        fake_loss = F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        trained(optimizers[1], (real_loss + fake_loss) / 2)
        loss = trained(optimizers[0], F.binary_cross_entropy_with_logits(critic(fake), ones))
        seen += [real_loss.item(), fake_loss.item(), loss.item()]
    return seen


def generator_and_critic():
    return nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


@row("B_gan")
def _(compile):
    return adversarial(*map(compile, generator_and_critic()))


@row("B_gan_one_module")
def _(compile):
    both = compile(nn.ModuleDict(dict(zip(("generator", "critic"), generator_and_critic(), strict=True))))
    return adversarial(both["generator"], both["critic"])


@row("B_gan_critic_alone")
def _(compile):
    generator, critic = generator_and_critic()
    return adversarial(generator, compile(critic))


@step("B_two_masks")
def _(m, o, x, y, i):
    out = m(x)
    seen = out.detach()
    means = [seen[y == 0].mean(), seen[y == 1].mean()]
    return [trained(o, F.cross_entropy(out, y)), *means]


class PipLion(torch.optim.Optimizer):
    """Lion, as its package has it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.99)))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                a, b = group["betas"]
                p.add_(state["exp_avg"].clone().mul_(a).add(p.grad, alpha=1 - a).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(b).add_(p.grad, alpha=1 - b)


@step("B_load_state_dict_of_pip_optimizer", optimizer=lambda m: PipLion(m.parameters()))
def _(m, o, x, y, i):
    if i in (0, 2):
        o.load_state_dict(o.state_dict())
    return trained(o, loss_of(m, x, y))


@step("B_grad_assigned")
def _(m, o, x, y, i):
    loss = loss_of(m, x, y)
    for p, g in zip(m.parameters(), torch.autograd.grad(loss, list(m.parameters())), strict=True):
        p.grad = g
    o.step()
    return loss


def orthogonal():
    model = net()
    nn.utils.parametrizations.orthogonal(model[0])
    return model


@step("B_orthogonal", make=orthogonal)
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y))


@step("B_hook_that_keeps")
def _(m, o, x, y, i):
    kept = m.__dict__.setdefault("kept", [])
    if i == 0:
        m[0].register_forward_hook(lambda module, args, out: kept.append(out.norm()))
        m[2].register_full_backward_hook(lambda module, inputs, outputs: kept.append(outputs[0].norm()))
        m[2].weight.register_hook(lambda g: kept.append(g.norm()))
    loss = trained(o, loss_of(m, x, y))
    return [loss, len(kept), *kept[-3:]]


@step("B_torch_save")
def _(m, o, x, y, i):
    loss = trained(o, loss_of(m, x, y))
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [loss, *(p.sum() for p in loaded.parameters())]


@row("B_torch_compile_after")
def _(compile):
    model = compile(net())
    outer, optimizer = torch.compile(model, backend="eager"), sgd(model)
    return [trained(optimizer, loss_of(outer, x, y)) for x, y in batches()]


@row("B_torch_compile_before")
def _(compile):
    model = compile(torch.compile(net(), backend="eager"))
    optimizer = sgd(model)
    return [trained(optimizer, loss_of(model, x, y)) for x, y in batches()]


@step("B_functional_call")
def _(m, o, x, y, i):
    return trained(o, F.cross_entropy(torch.func.functional_call(m, dict(m.named_parameters()), (x,)), y))


@step("B_functional_call_of_other_weights")
def _(m, o, x, y, i):
    inner = F.cross_entropy(torch.func.functional_call(m, dict(m.named_parameters()), (x,)), y)
    gradients = torch.autograd.grad(inner, list(m.parameters()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(m.named_parameters(), gradients, strict=True)}
    return trained(o, F.cross_entropy(torch.func.functional_call(m, moved, (x,)), y))


# ---- E: features of torch in the loop


@row("E_dataloader_partial_batch")
def _(compile):
    model = compile(net())
    optimizer = adam(model)
    data = torch.utils.data.TensorDataset(torch.randn(44, 16), torch.randint(4, (44,)))
    seen = []
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):  # the last one has 12
            seen.append(trained(optimizer, loss_of(model, x, y)))
    return seen


@row("E_fewer_rows_than_devices")
def _(compile):
    return loop(compile, lambda m, o, x, y, i: trained(o, loss_of(m, x, y)), net, sgd, rows=3)


@row("E_EMA")
def _(compile):
    model = compile(net())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer, seen = sgd(model), []
    for x, y in batches():
        seen.append(trained(optimizer, loss_of(model, x, y)))
        average.update_parameters(model)
    return [*seen, *(p.sum() for p in average.parameters()), average(batches(1)[0][0]).sum()]


def weight_norm():
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def spectral_norm():
    model = net()
    nn.utils.parametrizations.spectral_norm(model[2])
    return model


for name, made in (("weight_norm", weight_norm), ("spectral_norm", spectral_norm)):
    step(f"E_{name}", make=made)(lambda m, o, x, y, i: trained(o, loss_of(m, x, y)))


@step("E_freeze_unfreeze", optimizer=momentum)
def _(m, o, x, y, i):
    m[0].requires_grad_(i not in (1, 2))
    return trained(o, loss_of(m, x, y))


@row("E_add_param_group")
def _(compile):
    model = compile(net())
    optimizer, seen = torch.optim.Adam(model[2].parameters(), lr=0.01), []
    for i, (x, y) in enumerate(batches(6)):
        if i == 2:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.002})
        seen.append(trained(optimizer, loss_of(model, x, y)))
        model.zero_grad()
    return seen


@row("E_onecycle_plateau")
def _(compile):
    model = compile(net())
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in batches(6):
        loss = trained(optimizer, loss_of(model, x, y))
        cycle.step()
        plateau.step(loss)
        seen += [loss, optimizer.param_groups[0]["lr"]]
    return seen


@step("E_autocast_around", tolerance=BF16[0], parameters=BF16[0], why=BF16[1])
def _(m, o, x, y, i):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(m, x, y)
    return trained(o, loss)


def with_closure(m, o, x, y, i):
    def closure():
        o.zero_grad()
        loss = loss_of(m, x.to(m[0].weight.dtype), y)
        loss.backward()
        return loss

    return o.step(closure)


step("E_closure", optimizer=adam)(with_closure)
# In float64: its line search amplifies rounding. In float32 an input that changes by 1e-7 moves plain PyTorch's losses by 6e-6.
step("E_LBFGS", make=lambda: net().double(), optimizer=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4))(with_closure)


@step("E_retain_graph")
def _(m, o, x, y, i):
    out = m(x)
    loss = F.cross_entropy(out, y)
    o.zero_grad()
    loss.backward(retain_graph=True)
    out.pow(2).mean().backward()
    o.step()
    return loss


@step("E_input_gradient")
def _(m, o, x, y, i):
    x.requires_grad_()
    loss = trained(o, loss_of(m, x, y))
    return [loss, x.grad.norm()]


@step("E_gradient_penalty")
def _(m, o, x, y, i):
    x.requires_grad_()
    out = m(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return trained(o, F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).pow(2).mean())


@row("E_loss_with_parameters")
def _(compile):
    model, head = compile(net()), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.5)
    return [trained(optimizer, F.cross_entropy(head(model(x)), y)) for x, y in batches()] + list(head.parameters())


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, x):
        return self.table((x[:, :3] * 3).long() % 20).mean(1)


@step("E_SparseAdam", make=Bags, optimizer=lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.05))
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y))


@row("E_layer_replaced")
def _(compile):
    model = compile(net())
    optimizer, seen = sgd(model), []
    for i, (x, y) in enumerate(batches()):
        if i == 2:
            torch.manual_seed(5)
            model[2] = nn.Linear(32, 4)
            optimizer = sgd(model)
        seen.append(trained(optimizer, loss_of(model, x, y)))
    return seen


@step("E_manual_update")
def _(m, o, x, y, i):
    loss = loss_of(m, x, y)
    loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            p -= 0.5 * p.grad
            p.grad = None
    return loss


@step("E_hook_numpy")
def _(m, o, x, y, i):
    seen = m.__dict__.setdefault("seen", [])
    if i == 0:
        for p in m.parameters():
            p.register_hook(lambda g: seen.append(float(numpy.abs(g.detach().cpu().numpy()).sum())))
    return [trained(o, loss_of(m, x, y)), sum(seen[-4:]), len(seen)]


@step("E_hook_item")
def _(m, o, x, y, i):
    seen = m.__dict__.setdefault("seen", [])
    if i == 0:
        m[1].register_forward_hook(lambda module, args, out: seen.append(out.abs().max().item()))
    return [trained(o, loss_of(m, x, y)), seen[-1], len(seen)]


def on_meta(name, fill):
    @row(f"E_{name}")
    def run(compile):
        source = net()
        with torch.device("meta"):
            model = net()
        model = compile(model)
        fill(model, source.state_dict())
        optimizer = adam(model)
        return [trained(optimizer, loss_of(model, x, y)) for x, y in batches()]


def emptied(model, state):
    model.to_empty(device="cpu")
    model.load_state_dict(state)


on_meta("meta_device", emptied)
on_meta("meta_device_assigned", lambda model, state: model.load_state_dict(state, assign=True))


@row("E_DataParallel")
def _(compile):
    model = nn.DataParallel(compile(net()))
    optimizer = sgd(model)
    return [trained(optimizer, loss_of(model, x, y)) for x, y in batches()]


@row("E_DataParallel_compiled")
def _(compile):
    model = compile(nn.DataParallel(net()))
    optimizer = sgd(model)
    return [trained(optimizer, loss_of(model, x, y)) for x, y in batches()]


@row("E_DistributedDataParallel", alone=True)
def _(compile):
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(compile(net()))
        optimizer = adam(model)
        seen = [trained(optimizer, loss_of(model, x, y)).item() for x, y in batches()]
        torch.distributed.destroy_process_group()
    return seen


@step("E_SAM")
def _(m, o, x, y, i):
    loss = loss_of(m, x, y)
    o.zero_grad()
    loss.backward()
    norm = torch.norm(torch.stack([p.grad.norm() for p in m.parameters()]))
    with torch.no_grad():
        moves = [p.grad * (0.05 / (norm + 1e-12)) for p in m.parameters()]
        for p, move in zip(m.parameters(), moves, strict=True):
            p.add_(move)
    o.zero_grad()
    loss_of(m, x, y).backward()
    with torch.no_grad():
        for p, move in zip(m.parameters(), moves, strict=True):
            p.sub_(move)
    o.step()
    return [loss, norm]


@row("E_to_bf16_after_compile", tolerance=2e-2, parameters=2e-2, why=BF16[1])
def _(compile):
    model = compile(net())
    model.to(torch.bfloat16)
    optimizer = sgd(model, 0.1)
    return [trained(optimizer, loss_of(model, x.bfloat16(), y).float()) for x, y in batches()]


@step("E_to_float64_after_two_steps", optimizer=momentum)
def _(m, o, x, y, i):
    if i == 2:
        m.double()
    return trained(o, loss_of(m, x.to(m[0].weight.dtype), y))


@row("E_deepcopy_state_dict")
def _(compile):
    model = compile(net())
    optimizer, seen = adam(model), []
    for i, (x, y) in enumerate(batches(6)):
        if i == 2:
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if i == 4:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        seen.append(trained(optimizer, loss_of(model, x, y)))
    copied_model = copy.deepcopy(model)
    return [*seen, *(p.sum() for p in copied_model.parameters())]


@step("E_gradient_after_step", refusal=r"grad was read after .*step.*keep_gradients")
def _(m, o, x, y, i):
    trained(o, loss_of(m, x, y))
    return m[0].weight.grad.norm().item()


@step("E_gradient_after_step_kept", options={"keep_gradients": True})
def _(m, o, x, y, i):
    trained(o, loss_of(m, x, y))
    return m[0].weight.grad.norm().item()


def halve(parameter):
    parameter.grad.mul_(0.5)


@step("E_post_accumulate_hook")
def _(m, o, x, y, i):
    if i == 1:
        m[0].weight.register_post_accumulate_grad_hook(halve)
    return trained(o, loss_of(m, x, y))


@step("E_not_finite_is_skipped")
def _(m, o, x, y, i):
    loss = loss_of(m, x, y) * (float("nan") if i == 1 else 1.0)
    if not torch.isfinite(loss):
        return -1.0
    return trained(o, loss)


@step("E_gradient_norms_logged", optimizer=adam)
def _(m, o, x, y, i):
    o.zero_grad()
    loss = loss_of(m, x, y)
    loss.backward()
    norms = [p.grad.norm().item() for p in m.parameters()]
    histogram = torch.histc(m[0].weight.grad, bins=4)
    o.step()
    return [loss, *norms, histogram]


@step("E_two_calls_two_backwards")
def _(m, o, x, y, i):
    o.zero_grad()
    losses = [loss_of(m, x, y), loss_of(m, x * 0.5, y)]
    for loss in losses:
        loss.backward()
    o.step()
    return losses


@row("E_two_optimizers_in_turn")
def _(compile):
    model = compile(net())
    optimizers, seen = [sgd(model[0], 0.1), adam(model[2])], []
    for i, (x, y) in enumerate(batches(6)):
        seen.append(trained(optimizers[i % 2], loss_of(model, x, y)))
    return seen


@row("E_evaluation_of_any_size")
def _(compile):
    model = compile(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer, seen = sgd(model, 0.1), []
    for x, y in batches(3):
        seen.append(trained(optimizer, loss_of(model, x, y)))
        model.eval()
        with torch.inference_mode():
            seen += [model(x[:rows]).argmax(1).eq(y[:rows]).sum().item() + model(x[:rows]).sum().item() for rows in (16, 5, 1)]
        model.train()
    return seen


@row("E_distributed_checkpoint")
def _(compile):
    import torch.distributed.checkpoint as dcp

    model = compile(net())
    optimizer, seen = sgd(model), []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, (x, y) in enumerate(batches()):
            if i == 1:
                dcp.save(model.state_dict(), checkpoint_id=folder)
            if i == 3:
                state = model.state_dict()
                dcp.load(state, checkpoint_id=folder)
                model.load_state_dict(state)
            seen.append(trained(optimizer, loss_of(model, x, y)))
    return seen


@row("E_SWA")
def _(compile):
    """SWA: an averaged model with its own learning rate schedule and new statistics of BatchNorm."""
    model = compile(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = sgd(model, 0.1)
    average, schedule = torch.optim.swa_utils.AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    seen = []
    for x, y in batches():
        seen.append(trained(optimizer, loss_of(model, x, y)))
        average.update_parameters(model)
        schedule.step()
    torch.optim.swa_utils.update_bn([x for x, _ in batches()], average)
    average.eval()
    return [*seen, average(batches(1)[0][0])]


@row("E_workers_and_pinned_memory", alone=True)
def _(compile):
    model = compile(net())
    optimizer = sgd(model)
    data = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(4, (48,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=2, pin_memory=torch.cuda.is_available())
    return [trained(optimizer, loss_of(model, x, y)) for _ in range(2) for x, y in loader]


@step("E_optimizer_step_hooks", optimizer=adam)
def _(m, o, x, y, i):
    seen = m.__dict__.setdefault("seen", [])
    if i == 1:
        o.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(float(m[0].weight.grad.norm())))
        o.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(float(m[0].weight.norm())))
    return [trained(o, loss_of(m, x, y)), sum(seen), len(seen)]


@step("E_hyperparameters_change", optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), steps=6)
def _(m, o, x, y, i):
    group = o.param_groups[0]
    group["lr"], group["betas"], group["weight_decay"] = 0.01 / (i + 1), (0.9 - 0.01 * i, 0.999), 0.1 * i
    return trained(o, loss_of(m, x, y))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(16, 16), nn.Linear(16, 16)
        self.above.weight = self.below.weight

    def forward(self, x):
        return self.above(torch.tanh(self.below(x)))[:, :4]


@step("E_tied", make=Tied, optimizer=adam)
def _(m, o, x, y, i):
    return trained(o, loss_of(m, x, y))


@row("E_untied_in_the_middle")
def _(compile):
    model = compile(Tied())
    optimizer, seen = sgd(model, 0.1), []
    for i, (x, y) in enumerate(batches()):
        if i == 2:
            model.above.weight = nn.Parameter(model.above.weight.detach().clone())
            optimizer = sgd(model, 0.1)
        seen.append(trained(optimizer, loss_of(model, x, y)))
    return seen


@row("E_torchmetrics", needs=("torchmetrics",))
def _(compile):
    import torchmetrics

    model = compile(net())
    optimizer, accuracy, mean = sgd(model), torchmetrics.Accuracy("multiclass", num_classes=4), torchmetrics.MeanMetric()
    for x, y in batches():
        out = model(x)
        loss = F.cross_entropy(out, y)
        accuracy.update(out.detach(), y)
        mean.update(loss.detach())
        trained(optimizer, loss)
    return [accuracy.compute(), mean.compute()]


@step("E_multi_grad_hook")
def _(m, o, x, y, i):
    seen = []
    with torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda gradients: seen.append(sum(g.norm().item() for g in gradients))):
        loss = trained(o, loss_of(m, x, y))
    return [loss, *seen]


@step("E_saved_tensors_hooks")
def _(m, o, x, y, i):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(), torch.from_numpy):
        loss = loss_of(m, x, y)
    return trained(o, loss)


def of_torch(name, **options):
    tolerances = {key: options.pop(key) for key in ("tolerance", "parameters", "why") if key in options}

    @row(f"E_torch_{name}", **tolerances)
    def run(compile):
        model = compile(nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 4, bias=False)))
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        return [trained(optimizer, loss_of(model, x, y)) for x, y in batches()]


for name in ("Adadelta", "Adagrad", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
    of_torch(name, lr=0.01)
BY_ROUNDING = "its iterations are in bf16, by which PyTorch's own parameters are 1.2e-3 from those of iterations in float32; with these both agree to 2e-7"
of_torch("Muon", lr=0.01, tolerance=1e-3, parameters=5e-3, why=BY_ROUNDING)


# ---- C: transformers' Trainer, without a subclass


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options))


def sentences(count: int, seed: int = 0, varying: bool = False) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(5, 17, (), generator=draw)) if varying else 12 for _ in range(count)]
    rows = [torch.randint(2, 32, (length,), generator=draw) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    ids = [row["input_ids"] for row in rows]
    return {"input_ids": pad(ids), "labels": pad(ids, padding_value=-100), "attention_mask": pad([torch.ones_like(i) for i in ids])}


def logged(trainer) -> list[float]:
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [entry[name] for entry in trainer.state.log_history for name in wanted if name in entry]


def trainer_of(compile, folder, make=gpt2, after=False, given=None, data=None, **options):
    """A Trainer of four steps of 8 rows, of 40; `after`: the model is compiled when the Trainer has it."""
    from transformers import Trainer, TrainingArguments

    model = make()
    if not after:
        model = compile(model)
    defaults = dict(
        per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=4, learning_rate=1e-2, adam_epsilon=1e-4, logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    arguments = TrainingArguments(folder, **defaults | options)
    trainer = Trainer(model, arguments, train_dataset=sentences(40) if data is None else data, **given or {})
    if after:
        compile(trainer.model)
    return trainer


def trainer_row(name, tolerance=TOLERANCE, parameters=TOLERANCE, why="", refusal=None, **options):
    @row(f"C_{name}", tolerance=tolerance, parameters=parameters, why=why, refusal=refusal, needs=("transformers", "accelerate"))
    def run(compile):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(compile, folder, **{key: value() if callable(value) and key == "given" else value for key, value in options.items()})
            trainer.train()
            return logged(trainer)


def reads_gradients():
    from transformers import TrainerCallback

    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **others):
            state.log_history.append({"loss": sum(float(p.grad.norm()) for p in model.parameters())})

    return {"callbacks": [Reads()]}


def own_loss():
    def compute(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return {"compute_loss_func": compute}


def evaluated():
    def accuracy(predicted):
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    return {"eval_dataset": sentences(20, seed=1), "compute_metrics": accuracy}


trainer_row("plain")
trainer_row("cosine_warmup", lr_scheduler_type="cosine", warmup_steps=2)
trainer_row("no_clipping", max_grad_norm=0.0)
trainer_row("accumulation", gradient_accumulation_steps=4, per_device_train_batch_size=2)
trainer_row("label_smoothing", label_smoothing_factor=0.1)
trainer_row("callback_reads_grad", given=reads_gradients)
trainer_row("compute_loss_func", given=own_loss)
trainer_row("compile_after", after=True)
trainer_row("bf16", bf16=True, tolerance=BF16[0], parameters=2e-2, why=BF16[1] + "; AdamW's first steps have its learning rate's size")
trainer_row("last_partial_batch", data=sentences(20))
trainer_row("four_rows_on_eight_devices", per_device_train_batch_size=4)
trainer_row("evaluation", given=evaluated, eval_strategy="steps", eval_steps=2)
trainer_row("gradient_checkpointing", gradient_checkpointing=True)
trainer_row("adafactor", make=tiny_llama, optim="adafactor")  # without biases of keys, whose gradients are rounding noise that Adafactor divides by its size
trainer_row("varying_lengths", given=lambda: {"data_collator": padded}, data=sentences(40, varying=True))
trainer_row("no_nan_filter", logging_nan_inf_filter=False)
trainer_row("torch_compile", torch_compile=True)


@row("C_TensorBoard", needs=("transformers", "accelerate", "tensorboard"))
def _(compile):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TENSORBOARD_LOGGING_DIR"] = folder
        trainer = trainer_of(compile, folder, report_to="tensorboard")
        trainer.train()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(next(pathlib.Path(folder).rglob("events.out*")).parent)).Reload()
        return [*logged(trainer), *(event.value for event in events.Scalars("train/loss"))]


@row("C_save_and_resume", needs=("transformers", "accelerate"))
def _(compile):
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(compile, folder, save_strategy="steps", save_steps=2).train()
        again = trainer_of(compile, folder, save_strategy="steps", save_steps=2)
        again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        return logged(again)


@row("C_load_best_model_at_end", needs=("transformers", "accelerate"))
def _(compile):
    with tempfile.TemporaryDirectory() as folder:
        options = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)  # the first
        trainer = trainer_of(compile, folder, given=evaluated(), **options)
        trainer.train()
        return [*logged(trainer), trainer.state.best_metric, trainer.evaluate()["eval_loss"]]


@row("C_peft_LoRA", needs=("transformers", "accelerate", "peft"))
def _(compile):
    from peft import LoraConfig, get_peft_model

    def adapted():
        return get_peft_model(gpt2(), LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(compile, folder, make=adapted, save_strategy="steps", save_steps=4)
        trainer.train()
        return [*logged(trainer), os.path.exists(os.path.join(folder, "checkpoint-4", "adapter_model.safetensors"))]


@row("C_T5_predict_with_generate", needs=("transformers", "accelerate"))
def _(compile):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0)
    model = compile(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)))
    with tempfile.TemporaryDirectory() as folder:
        options = dict(predict_with_generate=True, generation_max_length=8, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)
        arguments = Seq2SeqTrainingArguments(folder, per_device_train_batch_size=8, max_steps=4, learning_rate=1e-2, adam_epsilon=1e-4, **options)
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=sentences(20), eval_dataset=sentences(8, seed=1))
        trainer.train()
        predicted = trainer.predict(sentences(8, seed=1))
        return [*logged(trainer), predicted.metrics["test_loss"], predicted.predictions]


# ---- D: other libraries; the scripts are those of graphacc.examples


def example(title, module, tolerance=TOLERANCE, parameters=TOLERANCE, why="", **options):
    library = {"pyg": "torch_geometric", "trainer": "accelerate"}.get(module, module)

    @row(f"D_{title}", alone=True, needs=(library,), tolerance=tolerance, parameters=parameters, why=why)
    def run(compile):
        if module == "lightning":  # it looks for TPUs where torch_xla was imported before, and fails without one
            from lightning.fabric.accelerators.xla import XLAAccelerator

            XLAAccelerator.is_available = staticmethod(lambda: False)
        return importlib.import_module(f"graphacc.examples.{module}").train(compile, **options)[1]


ADAM_NOISE = "AdamW divides gradients that are rounding noise (biases of keys) by their size"
example("peft", "peft")
example("accelerate", "accelerate")
example("TRL_SFT", "trl")
example("TRL_DPO", "trl", method="dpo")
example("Lightning_automatic", "lightning")
example("Lightning_manual", "lightning", manual=True)
example("diffusers", "diffusers", parameters=1e-3, why=ADAM_NOISE)
example("timm_vit", "timm")
example("timm_resnet", "timm", name="test_resnet", parameters=1e-4, why="gradients that are small sums of large terms, in front of BatchNorm; in float64 all agree to 1e-13")
example("timm_efficientnet", "timm", name="test_efficientnet")
example("PyG_GCN", "pyg")
example("integration_Trainer", "trainer")


@row("D_Lightning_module_compiled", alone=True, needs=("lightning",))
def _(compile):
    """The LightningModule itself is compiled."""
    import lightning
    from lightning.fabric.accelerators.xla import XLAAccelerator

    XLAAccelerator.is_available = staticmethod(lambda: False)
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            seen.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return adam(self)

    module = compile(Module())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 16), torch.randint(4, (40,))), batch_size=16)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet).fit(module, data)
    return seen


@row("D_accelerate_bf16_accumulate", alone=True, needs=("accelerate",), tolerance=BF16[0], parameters=2e-2, why=BF16[1])
def _(compile):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = compile(net())
    optimizer = adam(model)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=16))
    seen = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


@row("D_accelerate_compile_after_prepare", alone=True, needs=("accelerate",))
def _(compile):
    """The model is compiled when accelerate has it; its state is saved, and loaded again in the middle."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = adam(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    compile(model)
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (x, y) in enumerate(batches(6)):
            if i == 2:
                accelerator.save_state(folder)
            if i == 4:
                accelerator.load_state(folder)
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
    return seen


@row("D_peft_after_compile", alone=True, needs=("peft", "transformers"), refusal="compile.*(last|first|again|behind)|get_peft_model")
def _(compile):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(compile(gpt2()), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = adam(model)
    ids = torch.randint(2, 32, (8, 12), generator=torch.Generator().manual_seed(0))
    return [trained(optimizer, model(input_ids=ids, labels=ids).loss) for _ in range(3)]


@row("D_peft_merged", alone=True, needs=("peft", "transformers"))
def _(compile):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = gpt2()
    model = compile(get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)))
    optimizer = adam(model)
    ids = torch.randint(2, 32, (8, 12), generator=torch.Generator().manual_seed(0))
    seen = [trained(optimizer, model(input_ids=ids, labels=ids).loss) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(base, folder)
        return [*seen, again(input_ids=ids, labels=ids).loss, again.merge_and_unload()(input_ids=ids, labels=ids).loss]


# ---- F: model families, tiny, with random weights. AdamW's eps is 1e-4: gradients that are rounding noise (biases of keys) are not made as large as others.


def family(name, needs=("transformers",), lr=1e-3, steps=3, **options):
    """A row from a function that gives a model and ``batch(i)``, whose result has a `loss` or is one."""

    def register(make):
        @row(f"F_{name}", needs=needs, **options)
        def run(compile):
            model, batch = make()
            model = compile(model.train())
            optimizer, seen = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4), []
            for i in range(steps):
                out = model(**batch(i))
                seen.append(trained(optimizer, out if isinstance(out, torch.Tensor) else out.loss))
            return seen

        return make

    return register


def draws(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(i)


def words(i: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 96, (8, 16), generator=draws(i))
    return {"input_ids": ids, "labels": ids}


DECODER = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=1, use_cache=False,
)  # fmt: skip
EXPERTS = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=16)
DECODERS = {
    "deepseek_v3": ("DeepseekV3", EXPERTS | dict(num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)),
    "gpt_oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8)),
    "llama4": ("Llama4", dict(head_dim=8, intermediate_size_mlp=64, num_local_experts=4, interleave_moe_layer_step=1, attention_chunk_size=8)),
    "glm4_moe": ("Glm4Moe", EXPERTS | dict(head_dim=8)),
    "mamba2": ("Mamba2", dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8, expand=2)),
    "gemma3": ("Gemma3", dict(head_dim=8, sliding_window=8, query_pre_attn_scalar=8)),
    "falcon_h1": ("FalconH1", dict(head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)),
    "jamba": ("Jamba", dict(use_mamba_kernels=False, num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4)),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
    "granitemoe": ("GraniteMoe", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_next": ("Qwen3Next", dict(
        head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )),
    "gemma3n": ("Gemma3n", dict(
        head_dim=8, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, laurel_rank=8, altup_num_inputs=2, num_kv_shared_layers=0, sliding_window=8, intermediate_size=[64, 64],
        activation_sparsity_pattern=[0.0, 0.0], layer_types=["sliding_attention", "full_attention"],
    )),
    "modernbert": ("ModernBert", dict(global_attn_every_n_layers=2, local_attention=8, attention_dropout=0.0, sep_token_id=1, cls_token_id=1)),
}  # fmt: skip
"""Name -> prefix of transformers' classes, and what its configuration says besides `DECODER`."""
TEXT_CONFIGS = ("Llama4", "Gemma3", "Gemma3n")


def decoder(prefix, extra):
    import transformers

    config = getattr(transformers, f"{prefix}TextConfig" if prefix in TEXT_CONFIGS else f"{prefix}Config")
    kind = "ForMaskedLM" if prefix == "ModernBert" else "ForCausalLM"
    return getattr(transformers, prefix + kind)(config(**DECODER | extra)), words


for name, (prefix, extra) in DECODERS.items():
    family(name)(functools.partial(decoder, prefix, extra))


VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)


def pictures(i: int, size: int) -> torch.Tensor:
    return torch.randn(8, 3, size, size, generator=draws(i))


@family("clip")
def _():
    from transformers import CLIPConfig, CLIPModel

    text = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, eos_token_id=1)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16))
    return model, lambda i: {"input_ids": words(i)["input_ids"], "pixel_values": pictures(i, 16), "return_loss": True}


@family("siglip2")
def _():
    """Images of different sizes, whose patches are padded."""
    from transformers import Siglip2Config, Siglip2Model

    text = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, projection_size=32)
    model = Siglip2Model(Siglip2Config(text_config=text, vision_config=dict(VISION, patch_size=4, num_patches=16)))
    shapes = torch.tensor([[4, 4], [2, 6]] * 4)
    mask = (torch.arange(16) < shapes.prod(1, keepdim=True)).long()
    return model, lambda i: {
        "input_ids": words(i)["input_ids"], "pixel_values": torch.randn(8, 16, 48, generator=draws(i)), "pixel_attention_mask": mask, "spatial_shapes": shapes, "return_loss": True,
    }  # fmt: skip


@family("llava_with_images")
def _():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**DECODER), image_token_index=95))

    def batch(i):
        ids = torch.randint(2, 95, (8, 20), generator=draws(i))
        ids[:, 2:6] = 95
        return {"input_ids": ids, "pixel_values": pictures(i, 16), "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == 95, -100)}

    return model, batch


@family("qwen2_5_vl_with_images")
def _():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, patch_size=4, spatial_merge_size=2, window_size=16, fullatt_block_indexes=[1])
    text = DECODER | dict(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0})
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=95, vision_start_token_id=94, video_token_id=93))

    def batch(i):
        ids = torch.randint(2, 92, (8, 16), generator=draws(i))
        ids[:, 1], ids[:, 2:6] = 94, 95  # four patches of 2 x 2 in each image
        kinds = (ids == 95).int()
        return {
            "input_ids": ids, "pixel_values": torch.randn(8 * 16, 96, generator=draws(i)), "image_grid_thw": torch.tensor([[1, 4, 4]] * 8), "mm_token_type_ids": kinds,
            "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids > 92, -100),
        }  # fmt: skip

    return model, batch


@family("wav2vec2_CTC")
def _():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = dict(vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(5, 4))
    sizes |= dict(num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, ctc_zero_infinity=True)
    rates = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0)

    def batch(i):
        labels = torch.randint(1, 12, (8, 4), generator=draws(i))
        labels[i % 8, 3:] = -100
        kept = torch.arange(400) < torch.tensor([400] * 4 + [300] * 4)[:, None]
        return {"input_values": torch.randn(8, 400, generator=draws(i)), "labels": labels, "attention_mask": kept.long()}

    return Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **rates)), batch


@family("moonshine")
def _():
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1, encoder_num_attention_heads=4)
    sizes |= dict(decoder_num_attention_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4, pad_token_id=0, decoder_start_token_id=1, use_cache=False)
    model = MoonshineForConditionalGeneration(MoonshineConfig(**sizes))
    return model, lambda i: {"input_values": torch.randn(8, 3200, generator=draws(i)), "labels": words(i)["labels"]}


@family("whisper")
def _():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = dict(vocab_size=96, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48)
    sizes |= dict(decoder_ffn_dim=48, max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1, use_cache=False)
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, dropout=0.0))
    return model, lambda i: {"input_features": torch.randn(8, 8, 40, generator=draws(i)), "labels": words(i)["labels"]}


@family("timesfm")
def _():
    from transformers import TimesFmConfig, TimesFmModelForPrediction

    sizes = dict(patch_length=8, context_length=32, horizon_length=8, num_hidden_layers=2, hidden_size=32, intermediate_size=32, head_dim=8, num_attention_heads=4)
    model = TimesFmModelForPrediction(TimesFmConfig(**sizes, attention_dropout=0.0))

    def batch(i):
        series = torch.randn(8, 40, generator=draws(i))
        return {"past_values": list(series[:, :32]), "freq": [0] * 8, "future_values": series[:, 32:]}

    return model, batch


@family("patchtst")
def _():
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    sizes = dict(num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, prediction_length=8, d_model=32, num_attention_heads=4, num_hidden_layers=2, ffn_dim=48)
    rates = dict.fromkeys(("attention_dropout", "positional_dropout", "path_dropout", "ff_dropout", "head_dropout"), 0.0)

    def batch(i):
        series = torch.randn(8, 40, 2, generator=draws(i))
        return {"past_values": series[:, :32], "future_values": series[:, 32:]}

    return PatchTSTForPrediction(PatchTSTConfig(**sizes, **rates)), batch


class Contrastive(nn.Module):
    """Sentences and their paraphrases; the others of the batch are negatives, over all devices."""

    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertModel

        rates = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.net = BertModel(BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, max_position_embeddings=16, **rates))

    def embed(self, ids):
        return F.normalize(self.net(ids).last_hidden_state.mean(1), dim=-1)

    def forward(self, ids, others):
        return F.cross_entropy(self.embed(ids) @ self.embed(others).T * 20, torch.arange(len(ids)))


@family("sentence_contrastive")
def _():
    return Contrastive(), lambda i: {"ids": words(i)["input_ids"], "others": words(i + 10)["input_ids"]}


class WithLoss(nn.Module):
    """Adds a cross entropy to a classifier."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs, labels):
        return F.cross_entropy(self.inner(*inputs), labels)


class Recommender(nn.Module):
    """Bags of sparse features, given by offsets or as rows of equal lengths (DLRM)."""

    def __init__(self, offsets: bool):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.below, self.above, self.offsets = nn.Linear(4, 8), nn.Linear(8 + 6, 2), offsets

    def forward(self, dense, *sparse):
        found = [self.below(dense), *(bag(*ids) if self.offsets else bag(ids) for bag, ids in zip(self.bags, sparse, strict=True))]
        stacked = torch.stack(found, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = torch.tril_indices(4, 4, -1)
        return self.above(torch.cat([found[0], products[:, pairs[0], pairs[1]]], 1))


def recommender(offsets):
    def batch(i):
        draw = draws(i)
        ids = [torch.randint(20, (8, 4), generator=draw) for _ in range(3)]
        sparse = [(one.flatten(), torch.arange(0, 32, 4)) for one in ids] if offsets else ids
        return {"inputs": (torch.randn(8, 4, generator=draw), *sparse), "labels": torch.randint(2, (8,), generator=draw)}

    return WithLoss(Recommender(offsets)), batch


family("dlrm_bags", needs=())(functools.partial(recommender, True))
family("dlrm_bags2d", needs=())(functools.partial(recommender, False))


def of_timm(name, size, **options):
    import timm

    model = timm.create_model(name, num_classes=10, **options)
    return WithLoss(model), lambda i: {"inputs": (pictures(i, size),), "labels": torch.randint(10, (8,), generator=draws(i))}


VISION_MODELS = {
    "convnext_atto": (64, dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))), "vit_tiny_patch16_224": (32, dict(img_size=32, depth=2)),
    "swin_tiny_patch4_window7_224": (64, dict(img_size=64, window_size=4, depths=(2, 2), embed_dim=24, num_heads=(2, 4), drop_path_rate=0.0)),
    "beit_base_patch16_224": (32, dict(img_size=32, depth=2, embed_dim=32, num_heads=4)),
}  # fmt: skip
for name, (size, options) in VISION_MODELS.items():
    family(f"timm_{name}", needs=("timm",))(functools.partial(of_timm, name, size, **options))
for name in ("efficientnet", "resnet", "convnext", "nfnet", "byobnet", "mambaout"):
    family(f"timm_test_{name}", needs=("timm",))(functools.partial(of_timm, f"test_{name}", 64))


@family("pyg_self_loops", needs=("torch_geometric",))
def _():
    """GCNConv and GATConv add loops to the edges where the graph has none."""
    from torch_geometric.nn import GATConv, GCNConv

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GCNConv(16, 32), GATConv(32, 4)

        def forward(self, x, edges):
            return self.second(self.first(x, edges).relu(), edges)

    x, edges = torch.randn(64, 16, generator=draws(0)), torch.randint(64, (2, 256), generator=draws(1))
    return WithLoss(Network()), lambda i: {"inputs": (x, edges), "labels": torch.arange(64) % 4}


class Denoiser(nn.Module):
    """A conditional U-Net; `inside`: the noise is added within the forward."""

    def __init__(self, inside):
        super().__init__()
        from diffusers import DDPMScheduler, UNet2DConditionModel

        blocks = dict(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(8, 16), layers_per_block=1)
        self.net = UNet2DConditionModel(sample_size=8, norm_num_groups=4, attention_head_dim=4, cross_attention_dim=8, **blocks)
        self.noising, self.inside = DDPMScheduler(num_train_timesteps=100), inside

    def forward(self, clean, noise, times, states):
        noisy = self.noising.add_noise(clean, noise, times) if self.inside else clean
        return F.mse_loss(self.net(noisy, times, states).sample, noise)


def denoiser(inside):
    model = Denoiser(inside)

    def batch(i):
        draw = draws(i)
        clean, noise = torch.randn(2, 8, 4, 8, 8, generator=draw)
        times = torch.randint(100, (8,), generator=draw)
        if not inside:
            clean = model.noising.add_noise(clean, noise, times)
        return {"clean": clean, "noise": noise, "times": times, "states": torch.randn(8, 4, 8, generator=draw)}

    return model, batch


family("unet2dcondition_noise_inside", needs=("diffusers",))(functools.partial(denoiser, True))
family("unet2dcondition_noise_outside", needs=("diffusers",))(functools.partial(denoiser, False))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

        sizes = dict(min_size=64, max_size=64, rpn_pre_nms_top_n_train=40, rpn_post_nms_top_n_train=20, rpn_batch_size_per_image=10**6, box_batch_size_per_image=10**6)
        self.net = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3, **sizes)

    def forward(self, images, boxes, labels):
        targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
        return sum(self.net(list(images), targets).values())


FEW_VALUES = "BatchNorm over few values: parameters that change by 3e-7 move plain PyTorch's second loss by 1.3e-4, and parameters after it by 1.4e-3"


@family("torchvision_fasterrcnn", needs=("torchvision",), steps=2, tolerance=1e-3, parameters=1e-2, why=FEW_VALUES)
def _():
    """Every anchor and every box is kept, as samples would be drawn with other random numbers."""

    def batch(i):
        corners = torch.rand(8, 2, 2, generator=draws(i)) * 30
        return {"images": pictures(i, 64), "boxes": torch.cat([corners, corners + 20], -1), "labels": torch.randint(1, 3, (8, 2), generator=draws(i))}

    return Detector(), batch


# ---- running rows


@dataclasses.dataclass
class Outcome:
    """What one run of a row has given."""

    numbers: list[float] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    programs: str = ""
    error: str = ""  # its first line
    refused: bool = False  # the error is one of GraphAcc's
    seconds: float = 0.0


def flat(values) -> list[float]:
    if isinstance(values, (list, tuple)):
        return list(itertools.chain.from_iterable(map(flat, values)))
    if isinstance(values, (torch.Tensor, numpy.ndarray)):
        return torch.as_tensor(values).detach().double().flatten().tolist()
    return [float(values)]


def run_once(chosen: Row, options: dict | None, seconds: int) -> Outcome:
    """`options`: of graphacc.compile, or None for plain PyTorch."""
    import graphacc

    models, outcome, start = [], Outcome(), time.perf_counter()

    def compile(model):
        models.append(model if options is None else graphacc.compile(model, **{**options, **chosen.options}))
        return models[-1]

    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    try:
        with time_limit(seconds), quiet():
            outcome.numbers = flat(chosen.run(compile))
            outcome.tensors = [value.detach().double().clone() for model in models for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    except (Exception, TimeLimitError) as error:
        outcome.refused = isinstance(error, graphacc.GraphAccError)
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        outcome.error = f"{type(error).__name__}: {' '.join(lines) if outcome.refused else lines[0]}"
        logging.getLogger("loop_rows").info("%s", traceback.format_exc())
    outcome.programs = " ".join(f"{kind}:{count}" for kind, count in sorted(programs(models).items()))
    outcome.seconds = time.perf_counter() - start
    return outcome


@contextlib.contextmanager
def quiet():
    """Without what the libraries print; what they log is for `--verbose`."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            yield
        finally:
            logging.getLogger("loop_rows").info("%s", said.getvalue())


class TimeLimitError(BaseException):
    """A row ran for too long; no `except Exception` on the way hides it."""


@contextlib.contextmanager
def time_limit(seconds: int):
    def stop(*_):
        raise TimeLimitError(f"stopped after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def programs(models) -> dict[str, int]:
    found = collections.Counter()
    for model in models:
        engine = getattr(model, "_graphacc_engine", None)
        if engine is not None:
            found.update(program.kind for program in model.programs)
            found.update({"PyTorch": sum(engine.by_pytorch.counts.values())} if engine.by_pytorch.counts else {})
    return found


def compare(chosen: Row, plain: Outcome, ours: Outcome) -> dict:
    """The row's figures; `verdict` is ok, differs, crash, refused, or broken where plain PyTorch itself fails."""
    numbers = max(map(relative, plain.numbers, ours.numbers), default=0.0)
    tensors = max(map(distance, plain.tensors, ours.tensors), default=0.0)
    if plain.error:
        verdict = "broken"
    elif ours.error and ours.refused:
        verdict = "ok" if chosen.refusal is not None and re.search(chosen.refusal, ours.error) else "refused"
    elif ours.error:
        verdict = "crash"
    else:
        same = len(plain.numbers) == len(ours.numbers) and len(plain.tensors) == len(ours.tensors)
        verdict = "ok" if same and numbers <= chosen.tolerance and tensors <= chosen.parameters else "differs"
    return {
        "verdict": verdict, "numbers": len(plain.numbers), "number_difference": numbers, "tensors": len(plain.tensors), "parameter_difference": tensors, "programs": ours.programs,
        "error": plain.error or ours.error, "tolerance": chosen.tolerance, "parameter_tolerance": chosen.parameters, "why": chosen.why,
        "plain_seconds": round(plain.seconds, 1), "seconds": round(ours.seconds, 1),
    }  # fmt: skip


def relative(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b), 1e-3) if a - b == a - b else float("inf")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    equal = (a == b) | (a.isnan() & b.isnan())
    size = max(1.0, a[a.isfinite()].abs().max().item()) if a.isfinite().any() else 1.0
    return (a - b).abs().masked_fill(equal, 0.0).nan_to_num(float("inf")).max().item() / size if a.numel() else 0.0


def told(name: str, found: dict) -> str:
    if found["error"]:
        text = f"{found['error'][:300]}"
    else:
        text = f"{found['number_difference']:.1e} of {found['numbers']} numbers, {found['parameter_difference']:.1e} of {found['tensors']} tensors, {found['programs']}"
    text += f", {found['plain_seconds']} -> {found['seconds']} s"
    limit = f" (allowed {found['tolerance']:.0e}, {found['parameter_tolerance']:.0e}: {found['why']})" if found["why"] else ""
    return f"{name:40} {found['verdict']:8} {text}{limit}"


# ---- R: scripts with two lines, which print what they find


SCRIPT_ARGUMENTS = {
    "repro_cached_mask": [[], ["read"]], "repro_lstm_seqfirst": [["8", "dict(devices=8, batch_dims={'model.args[0]': 1})"], ["16", "dict(devices=1)"]],
    "repro_running_sum": [["early"], ["late"], ["tensor"], ["after"], ["early_item"]], "repro_topk_view": [["1"], ["8"]],
}  # fmt: skip
PRELUDE = """
import runpy, sys, types
if {plain}:
    module = types.ModuleType("graphacc")
    module.compile = lambda model, **options: model
    sys.modules["graphacc"] = module
else:
    import graphacc
import torch
torch.manual_seed(0)
sys.argv = {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(path: pathlib.Path, arguments: list[str], seconds: int) -> dict:
    outcomes = []
    for plain in (True, False):
        start = time.perf_counter()
        code = PRELUDE.format(plain=plain, argv=[str(path), *arguments])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False)
        values = [float(value) for value in re.findall(r"(?<![\w.])-?(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf)(?![\w])", done.stdout)]
        error = (done.stderr.strip() or "nothing").splitlines()[-1] if done.returncode or "DIFFERENT" in done.stdout else ""
        outcomes.append(Outcome(numbers=values, error=error, refused="graphacc.errors" in error, seconds=time.perf_counter() - start))
    return compare(Row(run=lambda compile: []), *outcomes)


def run_row(name: str, args: argparse.Namespace) -> dict:
    options = dict(devices=8, strategy=args.strategy or None, fast_compile=True, memory_plan="xla", cache_dir=None)
    plain = run_once(ROWS[name], None, args.seconds)
    return compare(ROWS[name], plain, Outcome() if plain.error else run_once(ROWS[name], options, args.seconds))


def run_alone(name: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "row.json")
        command = [sys.executable, __file__, "--here", "--rows", name, "--json", file, "--strategy", args.strategy, "--seconds", str(args.seconds)] + ["--verbose"] * args.verbose
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * args.seconds + 60, check=False)
        if args.verbose:
            print(done.stdout + done.stderr)
        if os.path.exists(file):
            with open(file) as opened:
                return json.load(opened)[name]
    last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
    return compare(ROWS[name], Outcome(), Outcome(error=f"the process ended with {done.returncode}: {last}"))


def jobs(args: argparse.Namespace) -> dict[str, Callable[[], dict]]:
    found = {}
    for name in ROWS:
        found[name] = functools.partial(run_alone if ROWS[name].alone and not args.here else run_row, name, args)
    for path in sorted(pathlib.Path(args.reproductions).glob("repro_*.py")) if args.reproductions else []:
        for number, arguments in enumerate(SCRIPT_ARGUMENTS.get(path.stem, [[]])):
            name = f"R_{path.stem.removeprefix('repro_')}{f'_{number + 1}' if number else ''}"
            found[name] = functools.partial(run_script, path, arguments, args.seconds)
    return {name: job for name, job in found.items() if not args.rows or name in args.rows or any(name.startswith(part) for part in args.rows if part not in found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", help="names, or the beginnings of names; all without")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--reproductions", help="folder with scripts repro_*.py, which print numbers")
    parser.add_argument("--strategy", default="fsdp=8", help="empty: the one that is searched")
    parser.add_argument("--seconds", type=int, default=300, help="at most, for one run of a row")
    parser.add_argument("--verbose", action="store_true", help="tracebacks, and what GraphAcc logs")
    parser.add_argument("--here", action="store_true", help="rows that would have a process of their own run in this one")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR)
    warnings.simplefilter("ignore")
    if not args.verbose:
        logging.getLogger("graphacc").setLevel(logging.ERROR)
    found, failed = {}, []
    for name, job in jobs(args).items():
        missing = [library for library in ROWS[name].needs if importlib.util.find_spec(library) is None] if name in ROWS else []
        if missing:
            print(f"{name:40} left out: {', '.join(missing)} is not installed", flush=True)
            continue
        found[name] = job()
        print(told(name, found[name]), flush=True)
        failed += [name] * (found[name]["verdict"] != "ok")
        if args.json:
            with open(args.json, "w") as file:
                json.dump(found, file, indent=1)
    print(f"{len(found) - len(failed)} of {len(found)} rows are as expected" + (f"; not these: {' '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
