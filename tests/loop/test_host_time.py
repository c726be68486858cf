"""What a step that is like the one before does again on the host, and what it leaves."""

import collections
import copy
import gc
import itertools
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from tolerances import PARAMETERS_AFTER_STEPS, relative_error
from torch import nn
from torch.profiler import ProfilerActivity, profile
from training import compiled

from graphacc.loop.losses import MAX_BEHIND


def net(*, dropout: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5) if dropout else nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, max_norm: float | None = None) -> None:
    for seed in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def uploads(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> float:
    """Uploads per step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(model, optimizer, steps)
    return {event.key: event.count for event in found.key_averages()}.get("graphacc.upload", 0) / steps


def test_what_did_not_change_is_not_uploaded():
    model = compiled(net(), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    assert uploads(model, optimizer) == 1  # the batch; nothing is drawn, and the learning rate is there
    optimizer.param_groups[0]["lr"] = 1e-3
    assert uploads(model, optimizer) == 1.25  # and once the learning rate
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert uploads(model, optimizer) == 1.25  # and once a parameter
    drawing = compiled(net(dropout=True), None)
    optimizer = torch.optim.AdamW(drawing.parameters(), lr=1e-2)
    train(drawing, optimizer, 1)
    assert uploads(drawing, optimizer) == 2  # and in every step the key of its random numbers


def lines_of_a_step(depth: int, max_norm: float | None = None) -> tuple[int, int]:
    """Calls of Python functions, and instructions, of one step of a model with twice as many parameters as it is deep."""
    torch.manual_seed(0)
    model = compiled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 5, max_norm)
    found = collections.Counter()

    def count(frame, event: str, argument: object):
        found[event] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    outer = sys.gettrace()
    gc.collect()
    gc.disable()  # what others have left has finalizers
    sys.settrace(count)
    try:
        train(model, optimizer, 4, max_norm)
    finally:
        sys.settrace(outer)
        gc.enable()
    return found["call"] // 4, found["opcode"] // 4


@pytest.fixture(scope="module")
def work() -> dict[str, list[int]]:
    """`lines_of_a_step` of models of 2 and 22 layers, as they are and with clipping, in a process of its own: what other tests have done to torch adds calls."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(ran.stdout.splitlines()[-1])


def test_work_of_a_step_on_the_host(work):
    """Most of it is of the step; what is of each parameter is what ``zero_grad()`` does, and some marks. Counts are the same on every machine."""
    (few_calls, few), (calls, instructions) = work["2"], work["22"]
    assert few_calls <= 600 and few <= 14_000, (few_calls, few)
    assert (calls - few_calls) / 40 <= 4 and (instructions - few) / 40 <= 150, (calls, instructions)


def test_work_of_clipping_on_the_host(work):
    """Three functions of every gradient, which is read four times."""
    (few_calls, few), (calls, instructions) = work["2 clipped"], work["22 clipped"]
    assert (calls - few_calls) / 40 <= 110 and (instructions - few) / 40 <= 3000, (calls, few_calls, instructions, few)


def test_settings_that_change_in_between_take_effect():
    """As objects of other values, in place, to and fro, in one of two groups, and as numbers of another type."""
    changes = [
        {},
        {"weight_decay": 0.5},
        {"weight_decay": 0.0},
        {"betas": (0.5, 0.9)},
        {"betas": [0.5, 0.99]},
        {},
        {"lr": 0.1},
        {"lr": 0.02, "eps": 1e-3},
        {"maximize": True},
        {"maximize": False, "weight_decay": 1},
        {"amsgrad": False},
    ]
    plain = net()
    models = plain, compiled(copy.deepcopy(plain), None)
    optimizers = []
    for model in models:
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-3}]
        optimizers.append(optimizer := torch.optim.AdamW(groups, lr=1e-2))
        for change, group in zip(changes, itertools.cycle(optimizer.param_groups)):
            group.update(change)
            if isinstance(group["betas"], list):
                group["betas"][0] = 0.8
            train(model, optimizer, 2)
    for (name, got), want in zip(models[1].named_parameters(), plain.parameters()):
        assert relative_error(got.detach(), want.detach()) <= PARAMETERS_AFTER_STEPS, name


def test_losses_that_are_not_finite_are_named_in_time_and_once_for_those_that_follow():
    model = compiled(net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bad = {3, 4, 7}
    said = {}
    for step in range(1, 12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            offset = torch.tensor(float("nan") if step in bad else 0.0)
            (model(torch.ones(4, 8)).mean() + offset).backward()  # the gradients are finite
            optimizer.step()
            optimizer.zero_grad()
        said |= {str(warning.message).partition(" is ")[0]: step for warning in caught if "loss of step" in str(warning.message)}
    first = [3, 7]  # 4 follows 3
    assert list(said) == [f"the loss of step {step}" for step in first], said
    assert all(step < said[f"the loss of step {step}"] <= step + MAX_BEHIND for step in first), said


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_spent_gradient_is_one_object_until_it_is_cleared(kind: type[torch.optim.Optimizer]):
    model = compiled(net(), None)
    optimizer = kind(model.parameters(), lr=1e-2)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    weight = model[0].weight
    assert weight.grad is weight.grad and weight.grad is not model[2].weight.grad
    optimizer.zero_grad()
    assert weight.grad is None


if __name__ == "__main__":
    print(json.dumps({f"{depth}{said}": lines_of_a_step(depth, norm) for norm, said in ((None, ""), (1.0, " clipped")) for depth in (2, 22)}))
