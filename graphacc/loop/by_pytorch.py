"""What PyTorch runs in the place of a compiled program, on current values of the parameters; it is said once, and counted."""

import contextlib
import logging
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc.capture.borrow import TensorsNow, borrowed, substitute
from graphacc.capture.randomness import keyed_randomness
from graphacc.capture.source import calling_line
from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.loop import regions
from graphacc.loop.fallback import NOT_COMPILED, explanation
from graphacc.loop.managed import Handle, handle_of
from graphacc.loop.model_call import ModelCall
from graphacc.loop.promise import Promise, to_values, without_way_back, written_too_early
from graphacc.loop.tape import Tape
from graphacc.runtime.progress import Elapsed

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine

log = logging.getLogger("graphacc")


class ByPyTorch:
    """Calls of one model, and recordings, that PyTorch runs."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self.counts: dict[str, int] = {}  # what PyTorch runs, and why -> how often
        self.seconds: dict[str, float] = {}  # the same -> time on the host, where it was measured
        self.differentiates_twice = False  # a gradient of a region's gradient was wanted

    def call(self, original: Callable, args: tuple, kwargs: dict, why: str, in_parts: bool = False):
        """Let PyTorch run a call of the model on the current values of its parameters; with `in_parts` compiled where that is possible."""
        given = self._promises_in_modules()
        with self.engine.structure.restored():  # what was recorded runs on the model's own tensors
            args, kwargs = self.differentiable_arguments(args, kwargs, why)
            (promised,), _ = self.differentiable_arguments(([promise for _, _, promise in given],), {}, why)
            if self.engine.tape is not None and self.engine.tape is not self.engine.gradients.pending and not self.engine.tape.live():
                self.engine.end_recording()
            self.engine.settle_buffers(are_written=True)
        values = _exchanged([(*place, value) for place, value in zip(given, promised)])
        parts = self.engine.islands.compiled_parts() if in_parts and regions.possible(self.engine) else contextlib.nullcontext()
        with self.noted(f"the model {type(self.engine.model).__name__}", why), self.on_host(), values, parts:
            return original(*args, **kwargs)

    def differentiable_arguments(self, args: tuple, kwargs: dict, why: str) -> tuple[tuple, dict]:
        """The arguments as tensors of PyTorch's autograd."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Promise) and leaf.requires_gradient and torch.is_grad_enabled():
                leaf.tape.engine.by_pytorch.make_differentiable(leaf.tape, why)
        return to_values(args, kwargs)

    def _promises_in_modules(self) -> "list[tuple[dict[str, Tensor | None], str, Promise]]":
        """Promises that the loop has put into the model for the time of a call, as `torch.func.functional_call` does: table, name, promise."""
        tables: list[dict] = [table for module in self.engine.model.modules() for table in (module._parameters, module._buffers)]
        return [(table, name, tensor) for table in tables for name, tensor in table.items() if isinstance(tensor, Promise)]

    @contextlib.contextmanager
    def noted(self, what: str, why: str) -> Iterator[None]:
        """PyTorch runs the block in the place of a compiled program; what compiled parts take in it is not its time."""
        text = self.note(what, why)
        before = sum(use.seconds for use in self.engine.regions.values())
        with self.timed() as found:
            yield
        compiled = sum(use.seconds for use in self.engine.regions.values()) - before
        self.seconds[text] = self.seconds.get(text, 0.0) + found.seconds - compiled

    @contextlib.contextmanager
    def timed(self) -> "Iterator[Elapsed]":
        """Measure the time of the block, without capturing and compiling."""
        found, start, building = Elapsed(), time.perf_counter(), self.engine.programs.build_seconds
        yield found
        found.seconds = time.perf_counter() - start - (self.engine.programs.build_seconds - building)

    @contextlib.contextmanager
    def on_host(self, ahead: Tape | None = None) -> Iterator[None]:
        """Parameters and buffers are ordinary tensors with their current values inside, and the model runs its own code.

        Args:
            ahead: a recording whose effect on buffers what runs inside has.
        """
        self.engine.settle_buffers(ahead, are_written=True)
        self.engine.deferred.note_read()
        for handle in self.engine.handles.values():
            handle.refresh()
        known = self.engine.structure.is_current()  # what the loop has replaced before is adopted at the next call, not amid a recording's end
        with self.engine.direct_calls(), torch._C.DisableTorchFunctionSubclass():
            try:
                yield
            finally:
                self.expect_writes()  # also of code that raised in the middle
        if known and not self.engine.structure.is_current() and not self.engine.swapped():
            self.engine.adopt_tensors()

    def expect_writes(self) -> None:
        """The model's own code has run by PyTorch: batch_norm writes without counting versions, and so does code on ``parameter.data``."""
        for handle in self.engine.handles.values():
            if handle.kind is Kind.BUFFER or handle.name in self.engine.written_by_forward:
                handle.exposed = True
                handle.watch_again()

    def note(self, what: str, why: str) -> str:
        """Say once what PyTorch runs in the place of a compiled program; returns what was said."""
        text = f"{what} runs by PyTorch, not compiled: {why}"
        if text not in self.counts:
            log.warning("graphacc: %s%s", text, f"\n  at {line}" if (line := calling_line()) else "")
        self.counts[text] = self.counts.get(text, 0) + 1
        return text

    def run_loss(self, tape: Tape, why: str) -> None:
        """Make the promises of a recording ordinary results of autograd: those of the model by a compiled region, and what the loop computes of them by PyTorch."""
        self.note("what the loop computes of the model's results", why)
        self.make_differentiable(tape, why, model_alone=True)

    def make_differentiable(self, tape: Tape, why: str, *, model_alone: bool = False) -> None:
        """Make the promises of a recording ordinary results of autograd: by a compiled region, or by PyTorch.

        Args:
            model_alone: see `regions.run`.

        Raises:
            LoopError: see `run`.
        """
        if tape.is_eager or not regions.possible(self.engine, tape):
            return self.run(tape, why)
        with self.engine.lock, torch.inference_mode(False):  # autograd is wanted, whatever the loop is doing where that turns out
            try:
                regions.run(self.engine, tape, model_alone=model_alone)
            except NOT_COMPILED as error:
                self.engine.refuse(tape, error)
            if not tape.is_eager:
                self.run(tape, why)
        return None

    def refuse_region(self, tape: Tape, error: Exception) -> None:
        """The backward of a region cannot be compiled: PyTorch runs it, and such calls from now on."""
        self.engine.refuse(tape, error)
        self.note("a backward", explanation(error))

    def note_differentiated_twice(self) -> None:
        """A backward is itself differentiated: PyTorch runs it, and such calls from now on."""
        self.differentiates_twice = True
        self.note("a backward", "it is differentiated itself (create_graph=True); calls whose gradient flows on are run by PyTorch from now on")

    def run(self, tape: Tape, why: str) -> None:
        """Let PyTorch run the calls of a recording again: its promises become ordinary results of autograd.

        Gradients that its backward gave are computed first, and stay as they are.

        Raises:
            LoopError: a parameter or an input was changed since, so the calls would compute something else.
        """
        if tape.is_eager:
            return
        self.note("a part of the loop", why)
        with self.engine.lock, torch.inference_mode(False):
            if tape is self.engine.gradients.pending and not tape.closed:
                self.engine.gradients.force(tape)
            if tape.updates != self.engine.execution.updates:
                raise LoopError(
                    f"{why}: this would run a model call again whose parameters an optimizer's step has changed since; call the model again after the step"
                )
            env = self.replay(tape)
            for value, tensor in env.items():
                freed = tensor.requires_grad and tape.backward_at is not None and self.engine.ways_back.is_open(tape, value) is False
                tape.fulfil(value, without_way_back(tape, value, tensor) if freed else tensor)
            tape.is_eager = True
            self.engine.ways_back.follow(tape)
            self.engine.close(tape)

    def finish(self, tape: Tape, why: str) -> None:
        """Give every promise of a recording its final value: the loop is about to write into one."""
        with self.engine.lock:
            if tape.backward_at is None:
                self.make_differentiable(tape, why)
            elif not tape.closed:
                self.engine.gradients.force(tape)

    def replay(self, tape: Tape, given: Mapping[int, Tensor] = MappingProxyType({}), stand_ins: Mapping[str, Tensor] = MappingProxyType({})) -> dict[int, Tensor]:
        """Every value of the forward part, and of what was computed from it since, as PyTorch computes it, with gradients.

        Args:
            given: externals in the place of those on the tape.
            stand_ins: tensors in the place of parameters and buffers, by name: of all buffers, or of none.
        """
        externals = {i: given.get(i, tape.whole_external(i)) for i in range(len(tape.externals))}
        self.check_parameters_unchanged(tape)
        env: dict[int, Tensor] = {}
        derived = set(tape.grad_values.values())
        kept = self._replaced(stand_ins) if stand_ins else self.buffers_kept(tape.has_run)
        with tape.as_recorded(), kept, self.on_host(tape), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            named = TensorsNow(self.engine.model)
            with keyed_randomness(tape.seed, tape.counter):
                tape.replay(tape.forward_calls, env, externals, named)
            for call in tape.gradient_calls:
                if derived.isdisjoint(tape.reads(call)):
                    tape.replay([call], env, externals, named)
                else:
                    derived.update(call.results)
        return env

    @contextlib.contextmanager
    def _replaced(self, stand_ins: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model's code find other tensors in the place of some parameters and buffers."""
        with borrowed(self.engine.model):
            substitute(self.engine.model, {id(self.engine.handles[name].tensor): tensor for name, tensor in stand_ins.items()})
            yield

    @contextlib.contextmanager
    def buffers_kept(self, kept: bool) -> Iterator[None]:
        """Restore the buffers afterwards, if a program has already changed them."""
        buffers = [handle for handle in self.engine.handles.values() if kept and handle.kind is Kind.BUFFER]
        for handle in buffers:
            handle.refresh()
        before = {handle.name: handle.host_value().clone() for handle in buffers}
        own = {id(handle.tensor): handle for handle in buffers}
        places = [(module._buffers, key, own[id(tensor)]) for module in self.engine.model.modules() for key, tensor in module._buffers.items() if id(tensor) in own]
        try:
            yield
        finally:
            for table, key, handle in places:
                if key in table and handle_of(table[key]) is None:  # assigned by the model's code, and nothing has followed it there
                    table[key] = handle.tensor
            for name, value in before.items():
                self.engine.handles[name].overwrite(value)

    def check_parameters_unchanged(self, tape: Tape) -> None:
        """Before a recording's calls run again.

        Raises:
            LoopError: a parameter of the model that is called, or of the submodule, was written since they were recorded.
        """
        for name, handle in self.engine.handles.items():
            if handle.kind is Kind.PARAM and self.written_since(handle, tape):
                raise written_too_early(name)

    def written_since(self, handle: Handle, tape: Tape) -> bool:
        """Whether a parameter or buffer that the recorded calls can read was written since they were recorded."""
        if handle.version == tape.parameter_versions.get(handle.name, handle.version):
            return False
        paths = {call.function.path for call in tape.forward_calls if isinstance(call.function, ModelCall)}
        if not paths or "" in paths:
            return True
        called = [self.engine.model.get_submodule(path) for path in paths]
        return any(tensor is handle.tensor for module in called for tensor in (*module.parameters(), *module.buffers()))


@contextlib.contextmanager
def _exchanged(places: "list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]") -> Iterator[None]:
    """Tables of modules hold other tensors inside: (table, name, the tensor that it holds, the other)."""
    for table, name, _, value in places:
        table[name] = value
    try:
        yield
    finally:
        for table, name, held, value in places:
            if table.get(name) is value:  # the model's code may have replaced it
                table[name] = held
