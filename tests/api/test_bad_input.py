"""Bad input is answered with what, where, the values, the rule and the remedy, and loses nothing."""

import copy

import pytest
import torch
import zoo
from torch import nn
from training import adamw, batches_of, compiled, train

import graphacc


def small() -> nn.Module:
    return zoo.MODELS["tied_mlp"]()[0]


def test_microbatches_that_do_not_divide():
    model = compiled(small(), "microbatches=3")
    with pytest.raises(graphacc.StrategyError, match="microbatches=3 does not divide the batch of 8"):
        train(model, batches_of("tied_mlp", 1))


def test_mesh_that_does_not_fit_the_devices():
    with pytest.raises(graphacc.StrategyError, match=r"needs 4 devices \(dp=4\), but there are 8: .* dp=2 fsdp=4"):
        graphacc.compile(small(), strategy="dp=4", devices=8)


def test_more_devices_than_there_are():
    """Virtual devices are made as they are wanted; a strategy does not make those that `devices` leaves out."""
    assert graphacc.compile(small(), devices=16).strategy.num_devices == 16
    with pytest.raises(graphacc.StrategyError, match=r"16.*8"):
        graphacc.compile(small(), strategy="dp=16", devices=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dq=2", "'dq=2' sets no known field; .* dp, fsdp, zero"),
        ("dp=two", "'dp=two' needs a whole number"),
        ("dp=0", "dp=0 must be a whole number of at least 1"),
        ("dp=2,dp=4", "dp is set twice"),
        ("fsdp=4,zero=4", "zero=4 is no ZeRO stage"),
        ("dp=4,zero=2", "zero=2 shards over the axes fsdp, cp and ep, which have size 1"),
        ("precision=fp8", "precision='fp8' is unknown"),
        ("sequence_parallel=true", "sequence_parallel splits activations over the tp axis, which has size 1"),
        ("cp=2,context=star", "context='star' is unknown: choose one of ulysses, ring"),
    ],
)
def test_strategies_that_make_no_sense(text, message):
    with pytest.raises(graphacc.StrategyError, match=message):
        graphacc.compile(small(), strategy=text)


def test_a_failed_compile_leaves_the_model_as_it_was():
    model = small()
    with pytest.raises(graphacc.StrategyError):
        graphacc.compile(model, strategy="dp=16", devices=8)
    assert type(model) is zoo.TiedMlp and all(type(p) is nn.Parameter for p in model.parameters())
    train(model, batches_of("tied_mlp", 1))


def test_unknown_choices():
    with pytest.raises(graphacc.GraphAccError, match="capture='eager' is unknown"):
        graphacc.compile(small(), capture="eager")
    with pytest.raises(graphacc.GraphAccError, match="nan_loss='ignored' is unknown"):
        graphacc.compile(small(), nan_loss="ignored")
    with pytest.raises(TypeError, match="takes a torch.nn.Module"):
        graphacc.compile(torch.zeros(2))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:  # the line that cannot be captured
            return y.mean()
        return y.std()


def test_an_uncapturable_model_is_answered_with_the_line():
    """By default PyTorch runs it, and the log has this message (tests/loop/test_ordinary_loops.py)."""
    model = compiled(Branches(), None, capture="fx")
    with pytest.raises(graphacc.CaptureError) as caught:
        model(torch.ones(2, 4))
    message = str(caught.value)
    assert __file__ in message and "if y.sum() > 0" in message and "torch.where" in message


def test_a_loss_that_is_no_scalar():
    model = compiled(nn.Linear(4, 4), None)
    with pytest.raises(graphacc.LoopError, match=r"scalar loss, got shape \[2, 4\]"):
        model(torch.ones(2, 4)).backward()


def test_a_loss_without_gradient():
    model = compiled(nn.Linear(4, 4), None)
    with pytest.raises(graphacc.LoopError, match="does not depend on any parameter"):
        model(torch.ones(2, 4)).detach().sum().backward()


class Shouting(nn.Module):
    """Uses an operator without a lowering."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.ops.graphacc_test.shout(self.linear(x)).sum()


@torch.library.custom_op("graphacc_test::shout", mutates_args=())
def shout(x: torch.Tensor) -> torch.Tensor:
    return x * 2


shout.register_fake(torch.empty_like)
shout.register_autograd(lambda ctx, grad: grad * 2)


def test_an_operator_without_a_rule_is_reported_with_its_line():
    model = compiled(Shouting(), None, capture="fx")
    with pytest.raises(graphacc.LoweringError) as caught:
        loss = model(torch.ones(2, 4))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    message = str(caught.value)
    assert "graphacc_test.shout" in message and "register" in message and "torch.ops.graphacc_test.shout(self.linear(x))" in message


def checkpoint_of(model: nn.Module, directory) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    for batch in batches_of("tied_mlp", 1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    graphacc.save_checkpoint(directory, model, optimizer)
    return optimizer


def test_checkpoint_of_another_model(tmp_path):
    checkpoint_of(compiled(small(), None), tmp_path / "c")
    model = compiled(zoo.MODELS["lstm_lm"]()[0], None)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(graphacc.CheckpointError, match=r"lstm.weight_ih_l0"):
        graphacc.load_checkpoint(tmp_path / "c", model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_checkpoint_that_is_missing(tmp_path):
    with pytest.raises(graphacc.CheckpointError, match="nowhere"):
        graphacc.load_checkpoint(tmp_path / "nowhere", compiled(small(), None))


def test_truncated_checkpoint(tmp_path):
    model = compiled(small(), "fsdp=2")
    optimizer = checkpoint_of(model, tmp_path)
    data = next(tmp_path.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-10])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(graphacc.CheckpointError, match="truncated|bytes"):
        graphacc.load_checkpoint(tmp_path, model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_damaged_checkpoint(tmp_path):
    model = compiled(small(), None)
    optimizer = checkpoint_of(model, tmp_path)
    data = next(tmp_path.glob("*.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-5] ^= 255
    data.write_bytes(raw)
    with pytest.raises(graphacc.CheckpointError, match="checksum"):
        graphacc.load_checkpoint(tmp_path, model, optimizer)


def test_checkpoint_without_the_optimizer(tmp_path):
    model = compiled(small(), None)
    checkpoint_of(model, tmp_path / "c")
    graphacc.save_checkpoint(tmp_path / "d", model)
    with pytest.raises(graphacc.CheckpointError, match="saved without an optimizer"):
        graphacc.load_checkpoint(tmp_path / "d", model, adamw(model))


def test_extra_that_is_no_json(tmp_path):
    with pytest.raises(graphacc.CheckpointError, match="JSON"):
        graphacc.save_checkpoint(tmp_path / "c", compiled(small(), None), extra={"lr": torch.zeros(1)})
