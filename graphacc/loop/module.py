"""CompiledModule: the user's model, in place, with its calls recorded."""

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import nn

from graphacc._compat.torch_ import untraced
from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.hlo import HloStep
from graphacc.loop.engine import Engine
from graphacc.loop.mixed import Mixin, mix_in, own_class
from graphacc.loop.on_torch_xla import OnTorchXla
from graphacc.passes.loss_chunks import ChunkReport
from graphacc.passes.remat import RematReport
from graphacc.loop.programs import MAX_PROGRAMS, STATE_KINDS, Compiled
from graphacc.search import Plan
from graphacc.strategy.in_force import StrategyInForce
from graphacc.costs.memory import predict_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device for the program that needs most."""

    predicted_bytes: int | None  # from the graph, before compiling; None where lazy tensors gave HLO and no graph
    measured_bytes: int  # what the compiled program reserves: arguments, temporaries and new outputs
    argument_bytes: int  # parameters, optimizer state and batch, in the compiled program
    temporary_bytes: int  # temporaries, in the compiled program
    host_bytes: int = 0  # exact parameters, optimizer state and arriving gradients on this process's host, for all its devices (`Strategy.offload`)


class CompiledModule(Mixin):
    """Mixed into a model's class by `graphacc.compile`: the model stays the object that it was, with all its attributes.

    ``state_dict()``, ``parameters()`` and the like are the model's own; reading a parameter brings its value from the
    devices.
    """

    _graphacc_engine: Engine

    def __new__(cls, *args, **kwargs):
        """An ordinary module of the model's own class: what `type(model)(...)`, its class methods and slices of a Sequential make."""
        return own_class(cls, CompiledModule)(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        return untraced(_call)(self._graphacc_engine, super().__call__, args, kwargs)

    __call__._torchdynamo_disable = True  # a torch.compile around the model leaves its calls to the engine

    def to_empty(self, *args, **kwargs):
        """The model's own. One of the meta device stays without values: whoever writes them gives them memory, one after the other."""
        return self if self._graphacc_engine.deferred.missing else super().to_empty(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        """The model's own; another thread than the loop's waits while a step is captured or runs."""
        with self._graphacc_engine.lock:
            return super().state_dict(*args, **kwargs)

    def named_parameters(self, *args, **kwargs):
        """The model's own; waits as `state_dict`."""
        with self._graphacc_engine.lock:
            return iter(list(super().named_parameters(*args, **kwargs)))

    def named_buffers(self, *args, **kwargs):
        """The model's own; waits as `state_dict`."""
        with self._graphacc_engine.lock:
            return iter(list(super().named_buffers(*args, **kwargs)))

    @property
    def strategy(self) -> StrategyInForce:
        """The strategy in force; printed, it shows for every parameter how it is split and who decided that, and the plan, if it was searched."""
        programs, plan = self._graphacc_engine.programs, self.plan
        return StrategyInForce.of(programs.strategy, programs.decisions(), "" if plan is None else str(plan))

    @property
    def plan(self) -> Plan | None:
        """What the search for the strategy found; None before it, and where nothing was searched."""
        choice = self._graphacc_engine.choice
        return None if choice is None else choice.plan

    @property
    def programs(self) -> tuple[Compiled, ...]:
        """Every program compiled so far, in order: what, why, and how long it took."""
        return tuple(self._graphacc_engine.programs.compiled)

    def explain(self, *, passes: bool = False) -> str:
        """A table of the programs that were compiled and why, a line for each memory plan, and one for what was verified, as text.

        Args:
            passes: what every pass did to every program too: time, rewrites, what moves between devices, what was gathered and why.
        """
        header = ("program", "why", "nodes", "capture s", "passes s", "compile s", "cached", "MB/device")
        rows = [header, *(_row(compiled) for compiled in self.programs)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        plans = [f"{c.kind}: {c.program.plan.summary()}" for c in self.programs if c.program.plan is not None]
        eager = [f"{' '.join(line.strip() for line in text.splitlines()[:2])} ({count} times{self._host_time(text, count)})" for text, count in self._graphacc_engine.by_pytorch.counts.items()]
        eager += [str(use) for use in self._graphacc_engine.regions.values()]
        gone = self._graphacc_engine.programs.num_let_go
        kept = [f"{gone} program(s) were let go: at most {MAX_PROGRAMS} are kept"] if gone else []
        reports = [f"{c.kind}, {report}" for c in self.programs for part in c.parts for report in part.passes] if passes else []
        again = [report for c in self.programs for part in c.parts for report in part.passes if isinstance(report.details, RematReport)]
        kept += [] if passes else list(dict.fromkeys(f"computed again in backward:\n{report.details}" for report in again))
        heads = [] if passes else [line for c in self.programs for part in c.parts for report in part.passes if isinstance(report.details, ChunkReport) for line in report.details.lines]
        kept += list(dict.fromkeys(f"computed chunk by chunk: {line}" for line in heads))
        choice = self._graphacc_engine.choice
        kept += [] if choice is None or choice.plan is None else [choice.plan.line]
        offload = self._graphacc_engine.programs.offload
        kept += [] if offload is None else offload.lines()
        return "\n".join(lines + plans + kept + eager + self._graphacc_engine.verifier.report.lines() + reports)

    def _host_time(self, text: str, count: int) -> str:
        seconds = self._graphacc_engine.by_pytorch.seconds.get(text)
        return "" if seconds is None else f", {1e3 * seconds / count:.1f} ms on the host each"

    def memory(self) -> "Memory":
        """Predicted and measured memory of the largest program so far.

        Raises:
            LoopError: nothing has run yet.
        """
        if not self.programs:
            raise LoopError("no program has been compiled yet: run a training step first")
        largest = max(self.programs, key=lambda compiled: compiled.program.memory.peak_bytes)
        measured, predicted = largest.program.memory, None
        if not isinstance(largest.graph, HloStep):
            is_cpu = largest.program.mesh.devices.flat[0].platform == "cpu"
            predicted = predict_memory(largest.graph, cpu=is_cpu, planned=largest.program.plan is not None).peak_bytes
        return Memory(
            predicted_bytes=predicted,
            measured_bytes=measured.peak_bytes,
            argument_bytes=measured.argument_bytes,
            temporary_bytes=measured.temp_bytes,
            host_bytes=sum(self.host_bytes().values()),
        )

    def bytes_per_device(self) -> dict[Kind, int]:
        """Bytes of parameters, buffers, optimizer state and gradients that one device holds now."""
        state = self._graphacc_engine.programs.state
        return {kind: state.bytes_per_device(kind) for kind in STATE_KINDS}

    def host_bytes(self) -> dict[Kind, int]:
        """Bytes of exact parameters, optimizer state and arriving gradients that this process's host holds in the place of the devices (`Strategy.offload`)."""
        offload = self._graphacc_engine.programs.offload
        return {Kind.PARAM: 0, Kind.STATE: 0, Kind.GRAD: 0} if offload is None else offload.host_bytes

    def _uncompiled(self) -> tuple[nn.Module, dict[str, object]]:
        """A module of the model's own class without attributes, and the attributes that it would have."""
        original = own_class(type(self), CompiledModule)
        return original.__new__(original), {name: value for name, value in self.__dict__.items() if name != "_graphacc_engine"}

    def __deepcopy__(self, memo):
        """An ordinary, uncompiled copy with the current values."""
        copied, attributes = self._uncompiled()
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(attributes, memo))
        return copied

    def __reduce_ex__(self, protocol):
        """What the model's own class gives: an ordinary, uncompiled module of the same memory, so that a state_dict that is saved beside it takes no space."""
        plain, attributes = self._uncompiled()
        plain.__dict__.update(attributes)
        return plain.__reduce_ex__(protocol)


def _call(engine: Engine, original: Callable, args: tuple, kwargs: dict):
    return engine.call(original, args, kwargs)


def _by_pytorch(generate: Callable) -> Callable:
    @functools.wraps(generate)
    def run(self: CompiledModule, *args, **kwargs):
        return self._graphacc_engine.generate(functools.partial(generate, self), args, kwargs)

    return run


def attach(model: nn.Module, engine: Engine) -> None:
    """Turn `model` into a compiled module in place."""
    mix_in(model, CompiledModule, _generating)
    object.__setattr__(model, "_graphacc_engine", engine)


def _generating(original: type) -> dict[str, Callable]:
    generate = getattr(original, "generate", None)
    return {"generate": _by_pytorch(generate)} if callable(generate) else {}


def _row(compiled: Compiled) -> tuple[str, ...]:
    memory = compiled.program.memory
    return (
        compiled.kind,
        compiled.reason,
        str(compiled.num_operators),
        f"{compiled.capture_seconds:.2f}",
        f"{compiled.pass_seconds:.2f}",
        f"{compiled.compile_seconds:.2f}",
        "yes" if compiled.program.from_cache else "no",
        f"{memory.peak_bytes / 1e6:.1f}",
    )


def is_compiled(model: object) -> bool:
    return isinstance(model, CompiledModule)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a compiled model.

    Raises:
        TypeError: the model was not compiled.
        LoopError: it was given to torch_xla's own runtime.
    """
    if isinstance(model, OnTorchXla):
        raise LoopError(
            f'{type(model).__name__} runs on torch_xla\'s own runtime (capture="torch_xla"), which has no part in this: save and load it with '
            "torch.save and its state_dict()"
        )
    if not isinstance(model, CompiledModule):
        raise TypeError(f"{type(model).__name__} is no compiled model: call graphacc.compile(model) first")
    return model._graphacc_engine


def seed_of_torch() -> int:
    """The first word of the random keys where the user gives none: torch's own seed."""
    return torch.initial_seed() & 0xFFFFFFFF
