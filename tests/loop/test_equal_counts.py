"""Counts of steps that parameters have in common: one number of the program, as long as they are equal, and always PyTorch's in the optimizer's state."""

import copy

import pytest
import torch
from torch import nn, optim
from training import compiled

import graphacc
from graphacc.graph import Kind


class Branches(nn.Module):
    """Uses a part of its parameters, as told."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, which):
        for name in which:
            x = getattr(self, name)(x).tanh()
        return x.square().mean()


ALL = ("first", "second", "third")
OPTIMIZERS = {"AdamW": lambda p: optim.AdamW(p, lr=1e-2), "NAdam": lambda p: optim.NAdam(p, lr=1e-2), "ASGD": lambda p: optim.ASGD(p, lr=1e-2), "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2)}


def both(make_optimizer, strategy=None):
    torch.manual_seed(0)
    plain = Branches()
    models = [plain, compiled(copy.deepcopy(plain), strategy)]
    return [(model, make_optimizer(model.parameters())) for model in models]


def step(pairs, which):
    x = torch.randn(8, 6)
    losses = []
    for model, optimizer in pairs:
        loss = model(x, which)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def check(pairs):
    (plain, reference), (model, optimizer) = pairs
    for (name, want), got in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-6, msg=name)
        wanted, held = reference.state.get(want, {}), optimizer.state.get(got, {})
        assert wanted.keys() == held.keys(), name
        for key, value in wanted.items():
            torch.testing.assert_close(held[key], value, rtol=1e-4, atol=1e-6, msg=f"{name}/{key}")


def counts(model) -> list[int]:
    """How many numbers of the optimizer's state each program of the model reads."""
    return [sum(item.kind is Kind.STATE and not item.shape for item in each.graph.inputs) for each in model._graphacc_engine.programs.compiled]


@pytest.mark.parametrize("strategy", [None, "fsdp=4", "tp=2,dp=2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.default_cases("AdamW-fsdp=4", "NAdam-None", "ASGD-None")
def test_parameters_that_miss_steps_count_their_own(name, strategy):
    pairs = both(OPTIMIZERS[name], strategy)
    for which in (ALL, ALL, ALL[:1], ALL[1:], ALL[:1], ALL, ALL[:2], ALL):
        step(pairs, which)
    check(pairs)
    model = pairs[1][0]
    assert counts(model)[0] * 6 == sum(item.kind is Kind.STATE and not item.shape for item in model._graphacc_engine.programs.compiled[-1].graph.inputs) * 2 or counts(model)[0] < 6


def test_one_count_for_all():
    pairs = both(OPTIMIZERS["AdamW"])
    for _ in range(3):
        step(pairs, ALL)
    check(pairs)
    assert counts(pairs[1][0]) == [1]


def test_a_count_that_the_loop_writes():
    pairs = both(OPTIMIZERS["AdamW"])
    step(pairs, ALL)
    for model, optimizer in pairs:
        optimizer.state[model.second.bias]["step"].fill_(40)
    step(pairs, ALL)
    step(pairs, ALL)
    check(pairs)
    for model, optimizer in pairs:
        del optimizer.state[model.first.weight]
    step(pairs, ALL)
    check(pairs)
    for _, optimizer in pairs:
        for entry in optimizer.state.values():
            entry["step"].fill_(7)
    step(pairs, ALL)
    check(pairs)
    assert counts(pairs[1][0]) == [1, 2, 3], "the last one is the first program"


def test_state_that_is_loaded():
    pairs = both(OPTIMIZERS["AdamW"])
    for which in (ALL, ALL[:2], ALL):
        step(pairs, which)
    saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pairs]
    step(pairs, ALL)
    for (_, optimizer), state in zip(pairs, saved):
        optimizer.load_state_dict(state)
    step(pairs, ALL)
    check(pairs)


def test_a_checkpoint_goes_on_with_the_same_program(tmp_path):
    pairs = both(OPTIMIZERS["AdamW"])
    step(pairs, ALL)
    model, optimizer = pairs[1]
    graphacc.save_checkpoint(tmp_path / "at", model, optimizer)
    before = [copy.deepcopy(pairs[0][0].state_dict()), copy.deepcopy(pairs[0][1].state_dict())]
    step(pairs, ALL)
    graphacc.load_checkpoint(tmp_path / "at", model, optimizer)
    pairs[0][0].load_state_dict(before[0])
    pairs[0][1].load_state_dict(before[1])
    step(pairs, ALL)
    step(pairs, ALL)
    check(pairs)
    assert counts(model) == [1]


def test_a_group_that_is_added_later_counts_for_itself():
    torch.manual_seed(0)
    plain = Branches()
    pairs = [(model, optim.AdamW([*model.first.parameters(), *model.second.parameters()], lr=1e-2)) for model in (plain, compiled(copy.deepcopy(plain), None))]
    step(pairs, ALL)
    for model, optimizer in pairs:
        optimizer.add_param_group({"params": list(model.third.parameters()), "lr": 1e-3})
    for _ in range(3):
        step(pairs, ALL)
    check(pairs)


def test_accumulation_and_clipping():
    pairs = both(OPTIMIZERS["AdamW"], "fsdp=2")
    for number in range(6):
        x = torch.randn(8, 6)
        for model, optimizer in pairs:
            model(x, ALL).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    check(pairs)
    assert set(counts(pairs[1][0])) == {0, 1}


def test_a_parameter_without_dims_has_its_own():
    """All of its state has no dims, and changes with its gradient."""
    torch.manual_seed(0)

    class Scaled(Branches):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x, which):
            return super().forward(x * self.scale, which)

    plain = Scaled()
    pairs = [(model, OPTIMIZERS["AdamW"](model.parameters())) for model in (plain, compiled(copy.deepcopy(plain), None))]
    for _ in range(3):
        step(pairs, ALL)
    check(pairs)
    assert counts(pairs[1][0]) == [4], "the scale's three, and one"


@pytest.mark.parametrize("strategy", [None, "fsdp=2"])
@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.NAdam, optim.Adafactor])
def test_parameter_groups_have_one_program(optimizer, strategy):
    """A number for each group (with Adafactor for each shape), which are equal at first and not known to be so later."""
    torch.manual_seed(0)
    plain = Branches()
    pairs = []
    for model in (plain, compiled(copy.deepcopy(plain), strategy)):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        pairs.append((model, optimizer([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2)))
    for _ in range(3):
        step(pairs, ALL)
    check(pairs)
    step(pairs, ALL)
    programs = pairs[1][0]._graphacc_engine.programs
    assert len(programs.compiled) == 1, pairs[1][0].explain()
    assert len(set(programs.state.numbers().values())) == (2 if optimizer is not optim.NAdam else 4)
