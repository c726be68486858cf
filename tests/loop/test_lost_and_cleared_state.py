"""Optimizer state that training has made NaN, state that the loop changes or clears, and layers that are frozen between the backwards of a step."""

import collections
import copy

import pytest
import torch
from torch import nn
from training import compiled

import graphacc


def small():
    torch.manual_seed(0)
    return nn.Linear(16, 4)


def losses_with_a_nan_batch(model, optimizer, good, num_steps=6):
    """Batch 2 is NaN; behind it the loop puts the parameters back, and leaves the optimizer's state."""
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(num_steps):
        x = torch.randn(8, 16, generator=generator) * (float("nan") if step == 2 else 1.0)
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if step == 2:
            model.load_state_dict(good)
    return torch.tensor(found)


OPTIMIZERS = {
    "momentum and dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name, strategy", [("momentum and dampening", ""), ("momentum and dampening", "fsdp=2"), ("momentum and dampening", "pp=2,microbatches=2"), ("adamw", "")])
def test_state_that_is_nan_stays_nan(name, strategy):
    """It is not taken for state that is not yet there."""
    make = (lambda: nn.Sequential(small(), nn.Linear(4, 4))) if "pp" in strategy else small
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    good = copy.deepcopy(plain.state_dict())
    expected = losses_with_a_nan_batch(plain, OPTIMIZERS[name](plain.parameters()), good)
    compiled = graphacc.compile(model, strategy=strategy or None, devices=2 if strategy else 1, nan_loss="ignore", fast_compile=True)
    found = losses_with_a_nan_batch(compiled, OPTIMIZERS[name](compiled.parameters()), good)
    assert expected.isnan().tolist() == [False, False, True, False, True, True]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_verify_with_state_that_is_nan(name):
    model = small()
    good = copy.deepcopy(model.state_dict())
    compiled = graphacc.compile(model, devices=1, nan_loss="ignore", verify=6, fast_compile=True)
    assert losses_with_a_nan_batch(compiled, OPTIMIZERS[name](compiled.parameters()), good)[2:].isnan().any()


def losses_frozen_between_backwards(model):
    optimizer, generator, found = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1), []
    for _ in range(3):
        for part in range(2):
            model[0].requires_grad_(part == 0)
            loss = nn.functional.cross_entropy(model(torch.randn(8, 16, generator=generator)), torch.arange(8) % 4) / 2
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_verify_where_a_layer_is_frozen_between_the_backwards_of_a_step():
    plain = nn.Sequential(small(), nn.Tanh(), nn.Linear(4, 4))
    compiled = graphacc.compile(copy.deepcopy(plain), devices=1, verify=3, fast_compile=True)
    assert losses_frozen_between_backwards(compiled) == pytest.approx(losses_frozen_between_backwards(plain), rel=1e-5)


def losses_in_fp16(model):
    optimizer, generator, found = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5), torch.Generator().manual_seed(1), []
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 16, generator=generator)), torch.arange(8) % 4)
        (loss * 64).backward()
        for parameter in model.parameters():
            parameter.grad.div_(64)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_autocast_to_fp16_with_the_state_on_the_host():
    plain = small()
    compiled = graphacc.compile(copy.deepcopy(plain), strategy="fsdp=2,offload=optimizer", devices=2, fast_compile=True)
    assert losses_in_fp16(compiled) == pytest.approx(losses_in_fp16(plain), rel=2e-3)


def losses_with_a_larger_table(model):
    """In step 2 the table gets more rows, and the loop clears the state, which would not fit."""
    optimizer, generator, found = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5), torch.Generator().manual_seed(1), []
    for step in range(5):
        if step == 2:
            model[0].weight.data = torch.cat([model[0].weight.data, torch.ones(6, 8)])
            model[0].weight.grad, model[0].num_embeddings = None, 16
            optimizer.state.clear()
        tokens = torch.randint(10 if step < 2 else 16, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        del loss
    return found


def test_an_optimizer_whose_state_is_cleared_after_a_parameter_has_grown_is_compiled():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    compiled = graphacc.compile(copy.deepcopy(plain), devices=1, fast_compile=True)
    assert losses_with_a_larger_table(compiled) == pytest.approx(losses_with_a_larger_table(plain), rel=1e-5)
    assert "runs by PyTorch" not in str(compiled.explain())


def another_bias(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].bias = nn.Parameter(torch.full((3,), 0.1))


def another_bias_in_both(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    old = model[2].bias
    another_bias(model, optimizer)
    group = optimizer.param_groups[0]
    group["params"] = [*(p for p in group["params"] if p is not old), model[2].bias]


def another_dtype(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.double()


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def turn(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(-0.5)


def replace(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = collections.defaultdict(dict)


def delete(optimizer: torch.optim.Optimizer) -> None:
    """The first two, in the order in which PyTorch has them: what begins anew comes last."""
    for parameter in [*optimizer.state][:2]:
        del optimizer.state[parameter]


@pytest.mark.parametrize("strategy", [None, "fsdp=2", "fsdp=2,offload=optimizer"])
@pytest.mark.parametrize("change", [nothing, another_bias, another_bias_in_both, another_dtype], ids=lambda change: change.__name__)
@pytest.mark.parametrize("edit", [turn, replace, delete], ids=lambda edit: edit.__name__)
@pytest.mark.default_cases(
    "turn-another_bias-None", "turn-another_bias_in_both-fsdp=2,offload=optimizer", "turn-another_dtype-fsdp=2",
    "replace-another_bias-fsdp=2", "delete-nothing-fsdp=2,offload=optimizer",
)  # fmt: skip
def test_state_that_the_loop_has_changed_stays_when_the_model_changes(edit, change, strategy):
    """The model's change brings the state home, where it is already, and newer than on the devices."""
    plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = compiled(copy.deepcopy(plain), strategy)

    def train(model: nn.Module) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
        for step in range(6):
            torch.manual_seed(step)
            loss = model(torch.randn(8, 5).to(model[0].weight.dtype)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step in (1, 2):
                edit(optimizer)
                change(model, optimizer)
        return losses

    assert train(model) == pytest.approx(train(plain), rel=1e-5)
