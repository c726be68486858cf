"""Metrics of steps: what they count, and who takes them."""

import logging
import time

import pytest
import torch
from torch import nn
from training import compiled

import graphacc
from graphacc.loop import step_logger

ROWS, WIDTH = 8, 16
FORWARD = 2 * ROWS * WIDTH * WIDTH  # of one layer; its backward has two such products
H100 = graphacc.Hardware.parse("H100").chip.fp32_flops


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, steps: int, accumulate: int = 1, evaluate: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(accumulate):
            model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                model(torch.ones(3 * ROWS, WIDTH))


def logged(model: nn.Module, steps: int, tokens: int | str | None = "model.args[0]", every: int = 1, **loop) -> list[graphacc.StepMetrics]:
    """The metrics of every step that has some."""
    found: list = []
    logger = graphacc.StepLogger(model, lambda scalars, step: found.append(logger.last), tokens=tokens, every=every, hardware="H100")
    train(model, steps, **loop)
    logger.close()
    train(model, 1, **loop)  # is not seen any more
    return found


def operations(metrics: graphacc.StepMetrics, devices: int = 1) -> float:
    """Of one step."""
    return metrics.mfu * metrics.step_seconds * devices * H100


@pytest.mark.parametrize(
    ("strategy", "accumulate", "evaluate"),
    [(None, 1, True), ("fsdp=2", 2, False), ("dp=2,microbatches=2", 1, False), ("pp=2,microbatches=2", 1, False)],
)
@pytest.mark.default_cases("None-1-True", "pp=2,microbatches=2-1-False")
def test_operations_and_tokens_are_those_of_the_whole_batch(strategy, accumulate, evaluate):
    model = compiled(mlp(), strategy)
    found = logged(model, 4, accumulate=accumulate, evaluate=evaluate)
    assert [item.step for item in found] == [2, 3, 4]
    devices = 2 if strategy else 1
    for item in found:
        # the first layer's input has no gradient
        assert operations(item, devices) == pytest.approx(accumulate * (3 + 2) * FORWARD)
        assert item.tokens_per_second * item.step_seconds == pytest.approx(accumulate * ROWS * WIDTH)
        assert item.memory_bytes == max(program.program.memory.peak_bytes for program in model.programs) > 0


def test_remat_adds_no_operations_of_the_model():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(mlp() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    plain, again = (logged(compiled(Blocks(), strategy), 3)[-1] for strategy in ("dp=2", "dp=2,remat=blocks"))
    assert operations(again, 2) == pytest.approx(operations(plain, 2)) == pytest.approx((4 * 3 - 1) * FORWARD)


def test_bf16_is_relative_to_its_own_peak():
    found = logged(compiled(mlp(), None, precision="bf16"), 3)[-1]
    peaks = graphacc.Hardware.parse("H100").chip
    assert operations(found) == pytest.approx(5 * FORWARD * peaks.fp32_flops / peaks.bf16_flops)


def test_seconds_are_means_of_the_loop_without_compiling(monkeypatch):
    clock = [0.0]
    model = compiled(mlp(), None)
    found: list[tuple[dict, int]] = []
    logger = graphacc.StepLogger(model, lambda scalars, step: found.append((scalars, step)), tokens=100, every=2, hardware="H100")
    monkeypatch.setattr(step_logger.time, "perf_counter", lambda: clock[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        clock[0] += 10.0 if step == 0 else 0.5 * step  # the first step starts the clock
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [(step, scalars["graphacc/step_seconds"], scalars["graphacc/tokens_per_second"]) for scalars, step in found] == [
        (3, pytest.approx(0.75), pytest.approx(200 / 1.5)),
        (5, pytest.approx(1.75), pytest.approx(200 / 3.5)),
    ]
    monkeypatch.undo()
    logger.close()
    logger = graphacc.StepLogger(model)
    train(model, 1)
    start, built = time.perf_counter(), model._graphacc_engine.programs.build_seconds
    loss = model(torch.ones(2 * ROWS, WIDTH)).square().mean()  # another shape: it compiles
    loss.backward()
    optimizer.step()
    compiling = model._graphacc_engine.programs.build_seconds - built
    assert compiling > 0 and logger.last.step_seconds <= time.perf_counter() - start - compiling + 0.01


def test_what_is_not_known_is_none(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing has been calibrated here
    model = compiled(mlp(), None)
    logger = graphacc.StepLogger(model)
    train(model, 3)
    assert logger.last.mfu is None and logger.last.tokens_per_second is None
    assert set(logger.last.scalars()) == {"graphacc/step_seconds", "graphacc/memory_bytes"}
    (said,) = [record.getMessage() for record in caplog.records if "MFU" in record.getMessage()]
    assert "graphacc calibrate --devices 1" in said and record_level(caplog, said) == logging.WARNING


def record_level(caplog, text: str) -> int:
    return next(record.levelno for record in caplog.records if record.getMessage() == text)


def test_what_pytorch_runs_has_no_mfu():
    """The optimizer's step is PyTorch's own: steps count on, and no share of the peak is made up."""
    model = compiled(mlp(), None)
    logger = graphacc.StepLogger(model, hardware="H100")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert logger.last.step == 3 and logger.last.mfu is None and logger.last.step_seconds > 0


def test_writers(tmp_path):
    class Lightning:
        def log_metrics(self, metrics, step):
            seen["lightning"] = metrics, step

    class WandB:
        def log(self, data, step):
            seen["wandb"] = data, step

    seen: dict[str, tuple] = {}
    model = compiled(mlp(), None)
    loggers = [graphacc.StepLogger(model, writer, tokens=ROWS, hardware="H100") for writer in (Lightning(), WandB())]
    train(model, 2)
    assert [seen["lightning"], seen["wandb"]] == [(logger.last.scalars(), 2) for logger in loggers]
    for wrong, kind, text in (
        (dict(writer=3), TypeError, "writer is a int: give a SummaryWriter"),
        (dict(every=0), ValueError, "every=0 must be a number of steps"),
        (dict(tokens=0), ValueError, "tokens=0 must be a positive number"),
    ):
        with pytest.raises(kind, match=text):
            graphacc.StepLogger(model, **wrong)
    with pytest.raises(TypeError, match="no compiled model"):
        graphacc.StepLogger(mlp())


def test_tokens_of_a_tensor_that_is_not_there():
    model = compiled(mlp(), None)
    graphacc.StepLogger(model, tokens="model.kwargs['input_ids']")
    with pytest.raises(graphacc.LoopError, match=r"has no such tensor of the batch; it has model.args\[0\]"):
        train(model, 2)


def test_tensorboard_has_the_tags(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    model = compiled(mlp(), None)
    with SummaryWriter(str(tmp_path)) as writer:
        logger = graphacc.StepLogger(model, writer, tokens="model.args[0]", hardware="H100")
        train(model, 4)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"graphacc/{name}" for name in ("step_seconds", "tokens_per_second", "mfu", "memory_bytes")}
    for name, value in logger.last.scalars().items():
        assert [event.step for event in events.Scalars(name)] == [2, 3, 4]
        assert events.Scalars(name)[-1].value == pytest.approx(value)


@pytest.mark.lazy
def test_captured_hlo_has_tokens_and_no_mfu():
    found = logged(compiled(mlp(), None, capture="lazy"), 3)[-1]
    assert found.mfu is None and found.tokens_per_second * found.step_seconds == pytest.approx(ROWS * WIDTH)
