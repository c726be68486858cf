"""Updates on the host that begin while the program still sends gradients: the same results, said where they cannot, errors in their middle."""

import copy

import jax
import pytest
import torch
from loop.test_offload import (
    STEPS,
    Net,
    adamw,
    assert_equal,
    batches,
    check,
    clip,
    grouped,
    loss_of,
    train,
    write_a_gradient,
)
from torch import nn
from training import compiled

import graphacc
from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.loop.offload import HalfUpdated
from graphacc.runtime.gradient_stream import GradientStream


def updates(model: nn.Module) -> dict[str | None, int]:
    return dict(model._graphacc_engine.programs.offload.num_updates)


@pytest.mark.parametrize("strategy", ["", "fsdp=4,zero=1,", "dp=2,fsdp=4,", "tp=2,fsdp=2,", "fsdp=4,remat=blocks,"])
@pytest.mark.default_cases("", "tp=2,fsdp=2,")
def test_updates_begin_before_their_program_has_ended(strategy):
    model = check(f"{strategy}offload=optimizer", adamw if "dp" in strategy else grouped, **({} if strategy else {"devices": 1}))
    assert updates(model) == {None: STEPS}
    assert f"{STEPS} update(s) on the host began while their program was sending gradients" in model.explain()
    (program,) = model.programs
    assert program.kind == "grad to host" and not [item for item in program.graph.outputs if item.kind is Kind.GRAD]
    assert program.program.memory.output_bytes < 200 < model.host_bytes()[Kind.GRAD], "what leaves is not kept on the device"


def test_the_timeline_of_an_update(tmp_path):
    """The first gradients of a deep model arrive, and are used, long before its program has ended."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(12)]
    model = compiled(nn.Sequential(*layers), "fsdp=2,offload=optimizer")
    with pytest.raises(LoopError, match="no update on the host is done yet"):
        graphacc.report.timeline(model)
    optimizer = adamw(model)
    for _ in range(20):  # the thread may have to wait for a core
        model(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = graphacc.report.timeline(model, tmp_path / "update.png")
        (program,) = (bar for bar in found.bars if bar.part == "program")
        arrivals = [bar for bar in found.bars if bar.part == "gradients"]
        work = [bar for bar in found.bars if bar.part == "update"]
        assert sum(bar.size_bytes for bar in arrivals) == 4 * sum(p.numel() for p in model.parameters())
        assert min(bar.start for bar in arrivals) < work[0].start < work[-1].end
        assert found.update_seconds == pytest.approx(sum(bar.end - bar.start for bar in work)) and found.tail_seconds >= 0
        if work[0].end < program.end:
            break
    assert work[0].end < program.end and 0 <= found.hidden_share <= 1, "an update began and ended before the program had"
    assert (tmp_path / "update.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "between", "why"),
    [
        ({}, clip, "code on gradients, such as clipping, comes between backward and the step"),
        ({"max_grad_norm": 1e9}, lambda model, step: None, "code on gradients, such as clipping"),
        ({"keep_gradients": True}, lambda model, step: None, "the loop keeps gradients"),
        ({}, write_a_gradient, "gradients are added to those of an earlier backward, or to ones that the loop wrote"),
        ({}, lambda model, step: model.scale.grad.item(), "gradients were read or written before the step"),
    ],
)
@pytest.mark.default_cases("options0-clip-code on gradients, such as clipping, comes between backward and the step", "options3-write_a_gradient-gradients are added to those of an earlier backward, or to ones that the loop wrote")
def test_what_needs_all_gradients_is_said(options, between, why):
    model = check("fsdp=2,offload=optimizer", adamw, between, **options)
    assert sum(updates(model).values()) == STEPS and None not in updates(model)
    assert f"{STEPS} update(s) on the host began when their program had ended: {why}" in model.explain()


def test_microbatches_and_other_optimizers_are_updated_behind_the_program():
    model = check("fsdp=2,microbatches=2,offload=optimizer")
    assert updates(model) == {"gradients of several microbatches are added up": STEPS}
    model = check("fsdp=2,offload=optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=1e-2))
    assert updates(model) == {"SGD on these parameters runs by its own code": STEPS}


def test_two_models_and_programs_from_the_cache(tmp_path):
    """An executable holds no address: another model runs it, in turn with the one that compiled it."""
    reference = Net()
    models = [compiled(copy.deepcopy(reference), "fsdp=4,offload=optimizer", cache_dir=str(tmp_path)) for _ in range(2)]
    pairs = [(model, adamw(model)) for model in models]
    losses = [[], []]
    for x in batches():
        for (model, optimizer), found in zip(pairs, losses):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    expected, optimizer = [], adamw(reference)
    for x in batches():
        loss = loss_of(reference, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses[0] == losses[1]
    for model, found in zip(models, losses):
        assert_equal(model, reference, found, expected)
        assert updates(model) == {None: STEPS}
    assert [model.programs[0].program.from_cache for model in models] == [False, True]


def fail_after(count: int, monkeypatch) -> None:
    """The thread that updates fails behind `count` blocks."""
    real = GradientStream.arrivals

    def arrivals(self):
        for number, each in enumerate(one for found in real(self) for one in found):
            if number == count:
                raise RuntimeError("the host's memory is broken")
            yield [each]

    monkeypatch.setattr(GradientStream, "arrivals", arrivals)


@pytest.mark.parametrize("delay", ["", ",delay=1,delay_after=1"])
def test_an_update_that_fails_in_its_middle_is_never_silent(delay, monkeypatch):
    model, other = (compiled(Net(), f"fsdp=4,offload=optimizer{delay}") for _ in range(2))
    optimizer = adamw(model)
    train(model, optimizer, batches(2))
    model.state_dict()
    with monkeypatch.context() as patched:
        fail_after(3, patched)
        with pytest.raises(HalfUpdated, match=r"when 3 of \d+ blocks of parameters on the host were new \(RuntimeError: the host's memory is broken\)"):
            train(model, optimizer, batches(2))
    for use in (lambda: model.scale.item(), model.state_dict, lambda: optimizer.state[model.few]["exp_avg"], lambda: train(model, optimizer, batches(1))):
        with pytest.raises(HalfUpdated, match="load the last checkpoint"):
            use()
    with torch.no_grad(), pytest.raises(HalfUpdated):
        model(batches(1)[0])
    assert len(train(other, adamw(other), batches(2))) == 2, "other models go on"


def test_an_update_that_fails_at_once_changes_nothing(monkeypatch):
    model = compiled(Net(), "fsdp=4,offload=optimizer")
    optimizer = adamw(model)
    train(model, optimizer, batches(2))
    before = copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patched:
        fail_after(0, patched)
        with pytest.raises(RuntimeError, match="the host's memory is broken"):
            train(model, optimizer, batches(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    assert len(train(model, optimizer, batches(2))) == 2


def test_a_program_that_fails_is_an_error_of_the_step(monkeypatch):
    """Its devices send no more, which the waiting thread notices."""
    model = compiled(Net(), "offload=optimizer", devices=1)  # of several, some would wait for the others in a collective
    optimizer = adamw(model)
    train(model, optimizer, batches(1))
    monkeypatch.setattr(GradientStream, "ticket", property(lambda self: self.rows + torch.tensor([0, 100]), lambda self, rows: setattr(self, "rows", rows)), raising=False)
    with pytest.raises((HalfUpdated, jax.errors.JaxRuntimeError), match="the stream has 1 and"):
        train(model, optimizer, batches(1))


def test_an_interrupt_of_the_wait_loses_no_update(monkeypatch):
    """Ctrl-C in the middle of a step: the thread completes it, and what comes next has its parameters."""
    reference = Net()
    model = compiled(copy.deepcopy(reference), "fsdp=4,offload=optimizer")
    optimizer, plain = adamw(model), adamw(reference)
    with monkeypatch.context() as patched:
        patched.setattr(GradientStream, "end_of_program", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, batches(1))
    train(reference, plain, batches(1))
    optimizer.zero_grad()
    for its in (plain, optimizer):
        its.param_groups[0]["lr"] = 1e-2
    assert_equal(model, reference, train(model, optimizer, batches(2)), train(reference, plain, batches(2)))
