"""Time, tokens per second, MFU and memory of the loop's steps, for TensorBoard, W&B, Lightning's loggers or a function.

A step is a call of an optimizer's ``step()``. Steps run on while the loop goes on, so nothing here waits for a device. What is measured is the
host's time from the end of one ``step()`` to the end of another: of the loop's own work too (loading data, evaluation, saving), and without
capturing and compiling. Devices are behind by what the loop lets them: with the default ``nan_loss="warn"``, which looks at each loss one step late,
or where the loop reads its losses, by one step; the mean over `every` steps is then that of the devices.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from graphacc.costs.hardware import Hardware
from graphacc.errors import LoopError, StrategyError
from graphacc.graph import Kind
from graphacc.loop.module import engine_of
from graphacc.loop.pipelined import Pipelined
from graphacc.loop.programs import Compiled
from graphacc.runtime.program import RemoteProgram

log = logging.getLogger("graphacc")

_PREFIX = "graphacc/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Means over the steps since the last ones; None: not known."""

    step: int  # number of the last step, from 1; continued from a checkpoint
    step_seconds: float
    tokens_per_second: float | None
    mfu: float | None  # operations of the model's products over what the devices could have done at their peak; 1 is all
    memory_bytes: int  # that the largest program reserves on one device: arguments, temporaries and new outputs

    def scalars(self) -> dict[str, float]:
        """Name, with the prefix "graphacc/" -> value, of what is known."""
        values = dataclasses.asdict(self)
        del values["step"]
        return {f"{_PREFIX}{name}": value for name, value in values.items() if value is not None}


class StepLogger:
    """Writes the metrics of a compiled model's steps; nothing has to be called in the loop.

    MFU is as PaLM defines it (Chowdhery et al. 2022, appendix B): operations of forward and backward as the model is written, without what rematerialisation or a
    partition computes again; forwards without a backward count as time alone. It is None where the peak of the devices is not known, for models captured by
    lazy tensors, and for steps of which PyTorch runs a part.

    Args:
        model: a compiled model.
        writer: what takes the values: torch.utils.tensorboard.SummaryWriter (anything with ``add_scalar``), a Lightning logger (``log_metrics``), a W&B
            run or the module wandb (``log``), or a function ``(scalars, step)``, such as ``lambda scalars, step: trainer.log(scalars)`` for
            a Trainer of transformers. Give it in one process. None: `last` has the values.
        tokens: number of tokens in a step of all processes together, or the path of the batch tensor whose elements they are, such as
            "model.kwargs['input_ids']" (of all calls with a gradient since the last step). None: tokens per second are not known.
        every: values are means over so many steps. The first step starts the clock.
        hardware: whose peak MFU is relative to, as a `Hardware` or as text ("8xH100"). Default: the devices that are here, if
            `graphacc calibrate` has measured them or their makers say.

    Raises:
        TypeError: the model is not compiled, or the writer is none of these.
        ValueError: `every` or `tokens` is no positive number.
    """

    def __init__(self, model: nn.Module, writer: Any = None, *, tokens: int | str | None = None, every: int = 1, hardware: Hardware | str | None = None):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a number of steps, at least 1")
        if tokens is not None and not isinstance(tokens, str) and (isinstance(tokens, bool) or not tokens > 0):
            raise ValueError(f"tokens={tokens!r} must be a positive number, or the path of a tensor of the batch")
        self.last: StepMetrics | None = None
        self._engine = engine_of(model)
        self._write = _function_of(writer)
        self._tokens, self._every = tokens, every
        self._hardware = Hardware.parse(hardware) if isinstance(hardware, str) else hardware
        self._peaks: dict[str, float] | None = None  # dtype of products -> operations per second of all devices; {}: not known
        self._begin()
        self._start: float | None = None  # of the steps that are measured; the first one starts the clock
        self._engine.execution.observers.append(self)

    def close(self) -> None:
        """Measure no further steps. The writer is left open."""
        if self in self._engine.execution.observers:
            self._engine.execution.observers.remove(self)

    def ran(self, compiled: Compiled | Pipelined, times: int) -> None:
        """The engine has started a program, for `times` microbatches."""
        kept, count = self._programs.get(id(compiled), (compiled, 0))
        self._programs[id(compiled)] = kept, count + times

    def stepped(self) -> None:
        """An optimizer's step is done: its programs are started, or PyTorch has run it."""
        self._count += 1
        if self._start is None:
            self._begin()
        elif self._count >= self._every:
            self.last = self._measured()
            self._begin()
            self._write(self.last.scalars(), self.last.step)

    def _begin(self) -> None:
        self._start = time.perf_counter()
        self._built, self._by_torch = self._engine.programs.build_seconds, sum(self._engine.by_pytorch.counts.values())
        self._programs: dict[int, tuple[Compiled | Pipelined, int]] = {}  # that ran since, and how often
        self._count = 0

    def _measured(self) -> StepMetrics:
        assert self._start is not None
        engine = self._engine
        seconds = time.perf_counter() - self._start - (engine.programs.build_seconds - self._built)
        trained = [(compiled, times) for compiled, times in self._programs.values() if compiled.kind != "forward"]
        local = [part.program for compiled, _ in self._programs.values() for part in compiled.parts if not isinstance(part.program, RemoteProgram)]
        tokens = self._num_tokens(trained)
        return StepMetrics(
            step=engine.steps,
            step_seconds=seconds / self._count,
            tokens_per_second=None if tokens is None else tokens / seconds,
            mfu=self._mfu(trained, seconds),
            memory_bytes=max((program.memory.peak_bytes for program in local), default=0),
        )

    def _num_tokens(self, trained: list[tuple[Compiled | Pipelined, int]]) -> float | None:
        if self._tokens is None or not isinstance(self._tokens, str):
            return None if self._tokens is None else self._tokens * self._count
        batch = [(item, times) for compiled, times in trained for item in compiled.graph.inputs if item.kind is Kind.BATCH]
        found = [math.prod(item.shape) * times for item, times in batch if item.target == self._tokens]
        if batch and not found:
            known = ", ".join(sorted({item.target for item, _ in batch}))
            raise LoopError(f"tokens={self._tokens!r}: the step has no such tensor of the batch; it has {known}")
        return sum(found) if found else None  # PyTorch ran the steps

    def _mfu(self, trained: list[tuple[Compiled | Pipelined, int]], seconds: float) -> float | None:
        if self._peaks is None:
            self._peaks = self._known_peaks()
        flops = [(compiled.flops, times) for compiled, times in trained]
        if not self._peaks or not flops or any(one is None for one, _ in flops) or sum(self._engine.by_pytorch.counts.values()) != self._by_torch:
            return None
        at_peak = sum(count * times / self._peaks[dtype] for one, times in flops for dtype, count in (one or {}).items())
        return at_peak / seconds

    def _known_peaks(self) -> dict[str, float]:
        count, hardware = self._engine.programs.strategy.num_devices, self._hardware
        try:
            hardware = Hardware.present(count) if hardware is None else hardware
        except StrategyError as error:
            log.warning("graphacc: MFU is not logged: %s", error)
            return {}
        if not hardware.has_known_peak:
            log.warning("graphacc: MFU is not logged: the peak of a CPU is not known before it is measured; run `graphacc calibrate --devices %d` once, or give hardware=", count)
            return {}
        return {"fp32": count * hardware.chip.fp32_flops, "bf16": count * hardware.chip.bf16_flops}


def _function_of(writer: Any) -> Callable[[Mapping[str, float], int], object]:
    """(scalars, step) -> nothing, for one of the known writers."""
    if writer is None:
        return lambda scalars, step: None
    if hasattr(writer, "add_scalar"):
        return lambda scalars, step: [writer.add_scalar(name, value, step) for name, value in scalars.items()]
    if hasattr(writer, "log_metrics"):
        return lambda scalars, step: writer.log_metrics(scalars, step)
    if callable(writer):
        return writer
    if hasattr(writer, "log"):
        return lambda scalars, step: writer.log(scalars, step=step)
    raise TypeError(
        f"writer is a {type(writer).__name__}: give a SummaryWriter (add_scalar), a Lightning logger (log_metrics), a W&B run (log), or a function (scalars, step)"
    )
