"""Checkpoints continue exactly, under any strategy and device count."""

import copy
import pathlib
import threading

import pytest
import torch
import zoo
from selection import with_matrix
from tolerances import relative_error
from training import adamw, batches_of, captured_once, compiled

import graphacc
from graphacc.runtime import checkpoint_files


def run(model, optimizer, batches) -> list[float]:
    losses = []
    dropout = sum(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    with captured_once("checkpoints", type(model), dropout, str(optimizer)):
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("after", with_matrix([None, "fsdp=8,zero=3", "dp=2,fsdp=2,zero=1"], [None, "dp=2,fsdp=2,zero=1"]), ids=lambda text: text or "one device")
@pytest.mark.default_cases("one device")
def test_training_continues_under_another_strategy(after, tmp_path):
    start, _ = zoo.MODELS["gpt2"]()
    batches = batches_of("gpt2", 4)
    whole = compiled(copy.deepcopy(start), None, seed=3)
    expected = run(whole, adamw(whole), batches)

    first = compiled(copy.deepcopy(start), "fsdp=4", seed=3)
    optimizer = adamw(first)
    losses = run(first, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", first, optimizer, extra={"epoch": 1})

    second = compiled(zoo.MODELS["gpt2"](8, 9)[0], after)
    optimizer = adamw(second)
    assert graphacc.load_checkpoint(tmp_path / "c", second, optimizer) == {"epoch": 1}
    assert second.lm_head.weight is second.transformer.wte.weight
    losses += run(second, optimizer, batches[2:])
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5


@pytest.mark.matrix
def test_the_same_strategy_continues_bit_for_bit_with_dropout(tmp_path):
    def build():
        torch.manual_seed(0)
        model = zoo.MODELS["gpt2"]()[0]
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return compiled(model, "fsdp=2")

    batches = batches_of("gpt2", 4)
    whole = build()
    expected = run(whole, adamw(whole), batches)
    first = build()
    optimizer = adamw(first)
    losses = run(first, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", first, optimizer)
    second = build()
    optimizer = adamw(second)
    graphacc.load_checkpoint(tmp_path / "c", second, optimizer)
    assert losses + run(second, optimizer, batches[2:]) == expected


def test_saving_before_the_first_step(tmp_path):
    model = compiled(zoo.MODELS["tied_mlp"]()[0], None)
    graphacc.save_checkpoint(tmp_path / "c", model, adamw(model))
    other = compiled(zoo.MODELS["tied_mlp"](8, 5)[0], "fsdp=2")
    graphacc.load_checkpoint(tmp_path / "c", other, adamw(other))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_loading_into_a_model_that_has_trained(tmp_path):
    model = compiled(zoo.MODELS["tied_mlp"]()[0], "fsdp=2")
    optimizer = adamw(model)
    batches = batches_of("tied_mlp", 4)
    run(model, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", model, optimizer)
    expected = run(model, optimizer, batches[2:])
    graphacc.load_checkpoint(tmp_path / "c", model, optimizer)
    assert run(model, optimizer, batches[2:]) == expected


def _two_groups(model, order=(0, 1)) -> torch.optim.SGD:
    """Biases and norms without weight decay and with another momentum, in either order."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [dict(params=decayed, lr=0.1, weight_decay=0.1), dict(params=others, lr=0.02, weight_decay=0.0)]
    return torch.optim.SGD([groups[i] for i in order], lr=1.0, momentum=0.9)


def test_groups_that_change_places_keep_their_settings(tmp_path):
    start, _ = zoo.MODELS["tied_mlp"]()
    batches = batches_of("tied_mlp", 4)
    whole = compiled(copy.deepcopy(start), None)
    expected = run(whole, _two_groups(whole), batches)
    first = compiled(copy.deepcopy(start), None)
    optimizer = _two_groups(first)
    losses = run(first, optimizer, batches[:2])
    graphacc.save_checkpoint(tmp_path / "c", first, optimizer)

    second = compiled(zoo.MODELS["tied_mlp"](8, 9)[0], None)
    optimizer = _two_groups(second, order=(1, 0))
    graphacc.load_checkpoint(tmp_path / "c", second, optimizer)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.0), (0.1, 0.1)]
    losses += run(second, optimizer, batches[2:])
    assert relative_error(torch.tensor(losses), torch.tensor(expected)) < 1e-5


def test_parameters_that_are_grouped_otherwise(tmp_path):
    model = compiled(zoo.MODELS["tied_mlp"]()[0], None)
    optimizer = _two_groups(model)
    run(model, optimizer, batches_of("tied_mlp", 1))
    graphacc.save_checkpoint(tmp_path / "c", model, optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    other = torch.optim.SGD([dict(params=trained[:1]), dict(params=trained[1:])], lr=1.0, momentum=0.9)
    with pytest.raises(graphacc.CheckpointError, match=r"holds just the parameters of group 0 of this one \(unused\): make the groups as"):
        graphacc.load_checkpoint(tmp_path / "c", model, other)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    release, original = threading.Event(), checkpoint_files.flush
    monkeypatch.setattr(checkpoint_files, "flush", lambda file: (release.wait(60), original(file)))
    model = compiled(zoo.MODELS["tied_mlp"]()[0], "fsdp=2")
    optimizer = adamw(model)
    batches = batches_of("tied_mlp", 4)
    run(model, optimizer, batches[:2])
    saving = graphacc.save_checkpoint(tmp_path / "c", model, optimizer, asynchronous=True, staging_mb=0.01)
    expected = run(model, optimizer, batches[2:])
    assert not saving.done
    release.set()
    other = compiled(zoo.MODELS["tied_mlp"](8, 5)[0], None)
    optimizer = adamw(other)
    graphacc.load_checkpoint(tmp_path / "c", other, optimizer)
    assert saving.done
    assert relative_error(torch.tensor(run(other, optimizer, batches[2:])), torch.tensor(expected)) < 1e-5


def test_a_checkpoint_of_an_earlier_version_loads():
    """Written by commit ea58666: two steps of AdamW on a Linear(3, 5) that was made under seed 0, with `fsdp=2`."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 5)
    model = compiled(copy.deepcopy(plain), "fsdp=4")
    model.weight.data.zero_()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(2):
        plain(torch.ones(4, 3)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert graphacc.load_checkpoint(pathlib.Path(__file__).parent / "checkpoint_of_0_1", model, optimizers[1]) == {"epoch": 2}
    for one, optimizer in zip((plain, model), optimizers):
        one(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    assert relative_error(model.weight, plain.weight) < 1e-5
    assert relative_error(optimizers[1].state[model.bias]["exp_avg_sq"], optimizers[0].state[plain.bias]["exp_avg_sq"]) < 1e-5
