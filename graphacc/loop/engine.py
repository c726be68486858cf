"""The engine of one compiled model: decides which program to run at each point of the loop, and runs it.

A loop of forward, backward and ``optimizer.step()`` runs one "step" program. A loop that accumulates gradients runs a
"grad" program per backward and an "update" program per step. Evaluation, and values that are read before backward,
run a "forward" program. All programs share one state on the devices.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc.capture import FX, objects, hyperparameters, init_optimizer_state
from graphacc.capture.borrow import borrowed
from graphacc.capture.guards import no_python_randomness
from graphacc.capture.randomness import keyed_randomness
from graphacc.capture.source import calling_line
from graphacc.errors import CaptureError, GraphAccError, LoopError, LoweringError, ParameterWritten
from graphacc.graph import Kind
from graphacc.loop import build, collector, regions
from graphacc.loop.choice import Choice
from graphacc.loop.decisions import Answers, Read, Recorder
from graphacc.loop.fakes import Fakes
from graphacc.loop.fallback import Fallback
from graphacc.loop.guards import Guards, NewInput, Structure, Written, attributes_written, plain_attributes_written
from graphacc.loop.islands import Islands
from graphacc.loop.losses import LossWatch
from graphacc.loop.managed import SPENT, ZERO, Handle, SpentGradient, manage
from graphacc.loop.optimizers import Binding, bind, parameter_names
from graphacc.loop.programs import Compiled, Programs
from graphacc.loop.promise import NotRecorded, Promise, to_values, written_too_early
from graphacc.loop.tape import Opaque, Tape, Template, Variant, autocast_dtype
from graphacc.loop.verify import Verifier
from graphacc.runtime import ranges
from graphacc.runtime.progress import Elapsed

if TYPE_CHECKING:
    from graphacc.loop.step_logger import StepLogger

log = logging.getLogger("graphacc")

NOT_COMPILED = (CaptureError, LoweringError)
"""Errors of code that cannot be compiled: PyTorch runs it instead. A GraphError is a defect of a pass, and is not hidden by that."""

MAX_TEMPLATES = 8
"""Finished recordings that a new one is compared with."""

MAX_READS = 2
"""Programs that read values of one recording before its backward, each of which computes it from its beginning again; then it goes on by PyTorch's autograd,
with further calls compiled one by one (the steps of an adaptive solver)."""

MAX_JOINTS = 16
"""Captured graphs of forward and backward that are kept for further programs of them."""

_GOLDEN = 0x9E3779B9
"""Multiplied with a microbatch's number, spreads it over 32 bits (the golden ratio), so that its random key is its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for besides the strategy."""

    seed: int  # first word of every random key
    max_grad_norm: float | None = None  # clip the total norm of the gradients that an optimizer's step uses
    nan_loss: str = "warn"  # "warn", "stop" or "ignore" when a loss is not finite
    keep_gradients: bool = False  # gradients stay after a step, as PyTorch's do, at the cost of their memory
    capture: str = "auto"  # "fx", "lazy", or "auto": lazy tensors where torch.fx refuses


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """The model as a recorded function; equal where the same code would run."""

    engine: "Engine" = dataclasses.field(compare=False, repr=False)
    mode: tuple  # every module and whether it trains, and of every parameter requires_grad and hooks
    state: int  # of the Python state that earlier captures have read
    inputs: tuple[str, ...]  # attributes of modules that are inputs: tensors, and numbers that change
    answers: tuple = ()  # that its code got to questions for values of the batch
    path: str = ""  # of the submodule that is called; the model itself
    form: int = 0  # `Engine.form`

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mode, self.state, self.inputs, self.answers, self.path, self.form))

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, inputs: dict[str, Tensor], args: tuple, kwargs: dict):
        """Call the model in the mode in which the loop called it, which may be another by now.

        Returns:
            What it returns, and the tensors that it left in attributes of its modules.
        """
        engine = self.engine
        modules = [module for module, _ in self.mode[0]]
        now = [module.training for module in modules]
        try:
            _set_training(modules, [training for _, training in self.mode[0]])
            written = engine.written.get(self, Written())
            given = engine.guards.given(written.before | inputs, (*written.tensors, *written.others))
            with engine.direct_calls(), engine.guards.caches_kept(), engine.guards.as_held(written.held), given:
                result = engine.model.get_submodule(self.path)(*args, **kwargs)
                return result, engine.guards.read(written.tensors)
        finally:
            _set_training(modules, now)


class Engine:
    """Everything behind one compiled model."""

    def __init__(self, model: nn.Module, programs: Programs, options: Options, choice: Choice | None = None):
        self.model = model
        self.choice = choice  # of the strategy, where the user leaves it to a search
        self.programs = programs
        programs.frozen = self._frozen
        self.options = options
        self._loop_thread = threading.get_ident()
        self._capturing: int | None = None  # the thread in which the model's own code runs
        self.handles = manage(self, model)
        self.fakes = Fakes(model, self.handles)
        self.tape: Tape | None = None  # the recording that a call of the model would add to
        self.template: Tape | None = None  # the last finished recording: numbers are compared with those in it
        self.recent: list[Template] = []  # finished recordings, to recognise the next one quickly
        self.regions: dict[str, regions.Use] = {}  # what runs as a function of autograd with a compiled forward and backward
        self.buffers_read: dict[tuple, frozenset[str]] = {}  # recorded code -> the buffers that its backward reads
        self.differentiates_twice = False  # a gradient of a region's gradient was wanted
        self.pending: Tape | None = None  # had its backward, not yet run
        self.accumulated: set[str] = set()  # parameters whose gradient so far lies on the devices
        self.bindings: dict[int, Binding] = {}
        self.seed = options.seed  # first word of the random key
        self.counter = 0  # of model calls; second word of the random key
        self.steps = 0
        self.form = 0  # how often a parameter or buffer has got another dtype or shape: programs from before do not fit
        self.updates = 0  # programs so far that changed parameters
        self.lock = threading.RLock()  # held while the state on the devices changes, or is read
        self.tracing = False  # a graph is captured
        self.torch_steps = False  # an optimizer's own step runs: gradients have to be ordinary tensors
        self.eager: dict[str, int] = {}  # what PyTorch runs, and why -> how often
        self.eager_seconds: dict[str, float] = {}  # the same -> time on the host, where it was measured
        self.host_grads: dict[str, Tensor] = {}  # gradients that the loop wrote, to be uploaded before they are added to
        self.losses = LossWatch(options.nan_loss)
        self.fallback = Fallback(options.capture, programs.strategy)
        self._persistent = set(model.state_dict(keep_vars=True))
        self._structure = Structure(model)
        self._joints: dict[tuple, build.Step] = {}
        self.guards = Guards(model)
        self.varying_numbers: set[tuple] = set()  # (place on the tape, function, leaf) of numbers that were seen to change
        self.fixed_numbers: set[tuple] = set()  # those of them that Python's own code needs
        self.written: dict[ModelCall, Written] = {}
        self.verifier = Verifier(self)
        self.observers: "list[StepLogger]" = []  # they measure steps
        self.islands = Islands(self)
        self.variants: dict[tuple, list[Variant]] = {}  # recordings of a call by the answers that its code got
        self._refused: dict[ModelCall, str] = {}  # calls of the model that cannot be compiled, and why
        self.written_by_forward: set[str] = set()  # parameters that the model's own code writes

    # ---- calls of the model

    @property
    def capturing(self) -> bool:
        """The model's own code runs in this thread: on fake tensors, or by PyTorch."""
        return self._capturing == threading.get_ident()

    @property
    def in_loop_thread(self) -> bool:
        """Whether the caller is in the thread that calls the model; others see the state as it is, and record nothing."""
        return self._loop_thread == threading.get_ident()

    @contextlib.contextmanager
    def direct_calls(self) -> Iterator[None]:
        """Calls of the model inside run its own code instead of being recorded."""
        before, self._capturing = self._capturing, threading.get_ident()
        try:
            yield
        finally:
            self._capturing = before

    def call(self, original: Callable, args: tuple, kwargs: dict):
        """A call of the model by the user's loop."""
        if self.capturing:
            return original(*args, **kwargs)
        with self.lock:
            self._loop_thread = threading.get_ident()
            if swapped := self._swapped():
                return self._call_eagerly(original, args, kwargs, swapped)
            function = self._function()
            why, wanted = self._refused.get(function), self._needs_autograd(args, kwargs)
            in_parts = why is not None  # what is refused may have parts that are not
            if why is None and wanted is not None:
                why = None if regions.possible(self) else wanted
            if why is None:
                try:
                    if wanted is not None:
                        args, kwargs = self._differentiable_arguments(args, kwargs, wanted)
                    return self._record(function, args, kwargs, as_region=wanted is not None)
                except NotRecorded as reason:
                    why = str(reason)
                except NOT_COMPILED as error:
                    if self.options.capture != "auto":
                        raise
                    why = self._refused[function] = _explanation(error)
                in_parts = True
            return self._call_eagerly(original, args, kwargs, why, in_parts)

    def call_part(self, path: str, args: tuple, kwargs: dict):
        """A call of a submodule by the model's own code, which PyTorch runs: as a compiled region.

        Raises:
            NotRecorded: PyTorch has to run it.
            CaptureError, LoweringError: it cannot be compiled.
        """
        function = self._function(path)
        if function in self._refused:
            raise NotRecorded(self._refused[function])
        with self._outside_of_code(), self.timed() as found:
            try:
                result = self._record(function, args, kwargs, as_region=True)
            except NOT_COMPILED as error:
                self._refused[function] = _explanation(error)
                raise
        use = self.regions.setdefault(name := self.name_of(path), regions.Use(name))
        use.forwards += 1
        use.seconds += found.seconds
        return result

    @contextlib.contextmanager
    def _outside_of_code(self) -> Iterator[None]:
        """As between calls of the model, although its code is running; it finds buffers as they are then."""
        before, self._capturing = self._capturing, None
        self._expect_writes()
        try:
            yield
            for handle in self.handles.values():
                if handle.kind is Kind.BUFFER:
                    handle.refresh()
        finally:
            self._capturing = before

    def _function(self, path: str = "") -> "ModelCall":
        """The model, or a submodule, as it is now."""
        state, changed = self.guards.token()
        if changed:
            log.info("graphacc: the model's Python state changed: %s", "; ".join(changed))
        return ModelCall(self, self._mode(), state, (*self.guards.tensors, *self.guards.numbers), path=path, form=self.form)

    def _differentiable_arguments(self, args: tuple, kwargs: dict, why: str) -> tuple[tuple, dict]:
        """The arguments as tensors of PyTorch's autograd."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Promise) and leaf.requires_gradient and torch.is_grad_enabled():
                leaf.tape.engine.make_differentiable(leaf.tape, why)
        return to_values(args, kwargs)

    def _record(self, function: "ModelCall", args: tuple, kwargs: dict, as_region: bool = False):
        trains = torch.is_grad_enabled() and (as_region or any(h.tensor.requires_grad for h in self.handles.values()))
        if not trains:
            self.settle_buffers()
        tape = self._recording() if trains and not as_region else self._new_tape()
        tape.takes_gradients = as_region
        inputs = self.guards.inputs()
        try:
            result, tensors = tape.record(function, (inputs, args, kwargs), {})
        except NewInput:
            return self._record(self._function(function.path), args, kwargs, as_region)
        except NOT_COMPILED:
            if not self.guards.numbers:
                raise
            for label in list(self.guards.numbers):  # one of them is needed as a number of Python
                self.guards.fix(label)
            return self._record(self._function(function.path), args, kwargs, as_region)
        if function.path and any(isinstance(leaf, Opaque) for leaf in tape.calls[-1].result_leaves):
            raise NotRecorded("it returns an object that a program cannot return")
        self.guards.write(self.written[tape.calls[-1].function].others)
        if not trains:
            self._run_forward(tape, tape.live(), keep_buffers=True)
            tape.closed = True
            self._remember(tape)
            result, tensors = objects.map_only(Promise, lambda promise: tape.value(promise.index), (result, tensors))
        elif as_region:
            self.make_differentiable(tape, "an argument requires a gradient")
            if function.path or tape.region is None or tape.region.num_differentiable <= 1:
                result, tensors = objects.map_only(Promise, lambda promise: tape.value(promise.index), (result, tensors))
        self.guards.write(tensors)
        return result

    def _needs_autograd(self, args: tuple, kwargs: dict) -> str | None:
        """Why a call has to be run by PyTorch's autograd: an argument whose gradient is wanted."""
        if not torch.is_grad_enabled():
            return None
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Promise):
                wanted = (leaf.requires_gradient and leaf.tape.engine is not self) or (leaf.tape.is_eager and leaf.tape.value(leaf.index).requires_grad)
            else:
                wanted = isinstance(leaf, Tensor) and leaf.requires_grad
            if wanted:
                return f"an argument of shape {list(leaf.shape)} requires a gradient"
        return None

    def _call_eagerly(self, original: Callable, args: tuple, kwargs: dict, why: str, in_parts: bool = False):
        """Let PyTorch run a call of the model on the current values of its parameters; with `in_parts` compiled where that is possible."""
        args, kwargs = self._differentiable_arguments(args, kwargs, why)
        if self.tape is not None and self.tape is not self.pending and not self.tape.live():
            self._end_recording()
        parts = self.islands.compiled_parts() if in_parts and regions.possible(self) else contextlib.nullcontext()
        with self.noted_eager(f"the model {type(self.model).__name__}", why), self.on_host(), parts:
            return original(*args, **kwargs)

    @contextlib.contextmanager
    def noted_eager(self, what: str, why: str) -> Iterator[None]:
        """PyTorch runs the block in the place of a compiled program; what compiled parts take in it is not its time."""
        text = self._note_eager(what, why)
        before = sum(use.seconds for use in self.regions.values())
        with self.timed() as found:
            yield
        compiled = sum(use.seconds for use in self.regions.values()) - before
        self.eager_seconds[text] = self.eager_seconds.get(text, 0.0) + found.seconds - compiled

    @contextlib.contextmanager
    def timed(self) -> "Iterator[Elapsed]":
        """Measure the time of the block, without capturing and compiling."""
        found, start, building = Elapsed(), time.perf_counter(), self.programs.build_seconds
        yield found
        found.seconds = time.perf_counter() - start - (self.programs.build_seconds - building)

    @contextlib.contextmanager
    def on_host(self, ahead: Tape | None = None) -> Iterator[None]:
        """Parameters and buffers are ordinary tensors with their current values inside, and the model runs its own code.

        Args:
            ahead: a recording whose effect on buffers what runs inside has.
        """
        self.settle_buffers(ahead)
        for handle in self.handles.values():
            handle.refresh()
        known = self._structure.is_current()  # what the loop has replaced before is adopted at the next call, not amid a recording's end
        with self.direct_calls(), torch._C.DisableTorchFunctionSubclass():
            yield
        self._expect_writes()
        if known and not self._structure.is_current() and not self._swapped():
            self._adopt_tensors()

    def _expect_writes(self) -> None:
        """The model's own code has run by PyTorch: batch_norm writes without counting versions, and so does code on ``parameter.data``."""
        for handle in self.handles.values():
            handle.exposed = handle.exposed or handle.kind is Kind.BUFFER or handle.name in self.written_by_forward

    def settle_buffers(self, ahead: Tape | None = None) -> None:
        """What was recorded has its effect on the buffers now.

        Args:
            ahead: a recording that is about to run itself; later ones have their effect after it.
        """
        if not self.in_loop_thread:
            return
        pending, tape = (None if x is not None and ahead is not None and x.serial >= ahead.serial else x for x in (self.pending, self.tape))
        if pending is not None and not pending.has_run and self._writes_buffers(pending):
            self._run_grad(pending)
        if tape is not None and tape.backward_at is None and not tape.closed and self._writes_buffers(tape):
            self.make_differentiable(tape, "a buffer that a call of the model has changed is read before backward()")

    def _writes_buffers(self, tape: Tape) -> bool:
        return any(isinstance(call.function, ModelCall) and self.written[call.function].buffers for call in tape.forward_calls)

    def _note_eager(self, what: str, why: str) -> str:
        """Say once what PyTorch runs in the place of a compiled program; returns what was said."""
        text = f"{what} runs by PyTorch, not compiled: {why}"
        if text not in self.eager:
            log.warning("graphacc: %s%s", text, f"\n  at {line}" if (line := calling_line()) else "")
        self.eager[text] = self.eager.get(text, 0) + 1
        return text

    def make_differentiable(self, tape: Tape, why: str) -> None:
        """Make the promises of a recording ordinary results of autograd: by a compiled region, or by PyTorch.

        Raises:
            LoopError: see `run_eagerly`.
        """
        if tape.is_eager or not regions.possible(self, tape):
            return self.run_eagerly(tape, why)
        with self.lock:
            try:
                regions.run(self, tape)
            except NOT_COMPILED as error:
                self._refuse(tape, error)
            if not tape.is_eager:
                self.run_eagerly(tape, why)
        return None

    def name_of(self, path: str) -> str:
        return f"the submodule {path} ({type(self.model.get_submodule(path)).__name__})" if path else f"the model {type(self.model).__name__}"

    def refuse_region(self, tape: Tape, error: Exception) -> None:
        """The backward of a region cannot be compiled: PyTorch runs it, and such calls from now on."""
        self._refuse(tape, error)
        self._note_eager("a backward", _explanation(error))

    def note_differentiated_twice(self) -> None:
        """A backward is itself differentiated: PyTorch runs it, and such calls from now on."""
        self.differentiates_twice = True
        self._note_eager("a backward", "it is differentiated itself (create_graph=True); calls whose gradient flows on are run by PyTorch from now on")

    def run_eagerly(self, tape: Tape, why: str) -> None:
        """Let PyTorch run the calls of a recording again: its promises become ordinary results of autograd.

        Gradients that its backward gave are computed first, and stay as they are.

        Raises:
            LoopError: a parameter or an input was changed since, so the calls would compute something else.
        """
        if tape.is_eager:
            return
        self._note_eager("a part of the loop", why)
        with self.lock:
            if tape is self.pending and not tape.closed:
                self._force(tape)
            if tape.updates != self.updates:
                raise LoopError(
                    f"{why}: this would run a model call again whose parameters an optimizer's step has changed since; call the model again after the step"
                )
            env = self._replay_on_host(tape)
            for value, tensor in env.items():
                tape.fulfil(value, tensor)
            tape.is_eager = True
            self._close(tape)

    def finish(self, tape: Tape, why: str) -> None:
        """Give every promise of a recording its final value: the loop is about to write into one."""
        with self.lock:
            if tape.backward_at is None:
                self.make_differentiable(tape, why)
            elif not tape.closed:
                self._force(tape)

    def _replay_on_host(self, tape: Tape, given: Mapping[int, Tensor] = MappingProxyType({}), buffers: Mapping[str, Tensor] = MappingProxyType({})) -> dict[int, Tensor]:
        """Every value of the forward part, and of what was computed from it since, as PyTorch computes it, with gradients.

        Args:
            given: externals in the place of those on the tape.
            buffers: values that buffers have meanwhile, by name.
        """
        externals = {i: given.get(i, self._whole_external(tape, i)) for i in range(len(tape.externals))}
        self.check_parameters_unchanged(tape)
        env: dict[int, Tensor] = {}
        derived = set(tape.grad_values.values())
        with self._buffers_kept(tape.has_run, buffers), self.on_host(tape), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            named = {name: handle.tensor for name, handle in self.handles.items()}
            with keyed_randomness(self.seed, tape.counter):
                tape.replay(tape.forward_calls, env, externals, named)
            for call in tape.gradient_calls:
                if derived.isdisjoint(tape.reads(call)):
                    tape.replay([call], env, externals, named)
                else:
                    derived.update(call.results)
        return env

    @contextlib.contextmanager
    def _buffers_kept(self, kept: bool, meanwhile: Mapping[str, Tensor]) -> Iterator[None]:
        """Restore the buffers afterwards, if a program has already changed them; inside some have other values."""
        buffers = [handle for handle in self.handles.values() if kept and handle.kind is Kind.BUFFER]
        for handle in buffers:
            handle.refresh()
        before = {handle.name: handle.host_value().clone() for handle in buffers}
        for name, value in meanwhile.items():
            self.handles[name].overwrite(value)
        yield
        for name, value in before.items():
            self.handles[name].overwrite(value)

    def check_parameters_unchanged(self, tape: Tape) -> None:
        """Before a recording's calls run again.

        Raises:
            LoopError: a parameter of the model that is called, or of the submodule, was written since they were recorded.
        """
        for name, handle in self.handles.items():
            if handle.kind is Kind.PARAM and self._written_since(handle, tape):
                raise written_too_early(name)

    def _written_since(self, handle: Handle, tape: Tape) -> bool:
        """Whether a parameter or buffer that the recorded calls can read was written since they were recorded."""
        if handle.version == tape.parameter_versions.get(handle.name, handle.version):
            return False
        paths = {call.function.path for call in tape.forward_calls if isinstance(call.function, ModelCall)}
        if not paths or "" in paths:
            return True
        called = [self.model.get_submodule(path) for path in paths]
        return any(tensor is handle.tensor for module in called for tensor in (*module.parameters(), *module.buffers()))

    def is_model(self, function: Callable) -> bool:
        return isinstance(function, ModelCall)

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
        """The torch.autocast around a recorded call, for the device on which the call runs now."""
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.fallback.backend.device_type if self.tracing else "cpu", dtype=dtype, cache_enabled=False)

    def host_tensor(self, handle: Handle) -> Tensor:
        """A parameter as an ordinary tensor of PyTorch."""
        handle.refresh()
        return handle.host_value().requires_grad_(handle.tensor.requires_grad)

    def before_write(self, handle: Handle) -> None:
        """The loop is about to write a parameter or buffer: a backward that was recorded with its present value runs now."""
        tape = self.pending
        if tape is not None and not tape.has_run:
            self._run_grad(tape)
        tape = self.tape
        if tape is not None and tape.backward_at is None and not tape.closed:
            if held := tape.live():
                self._run_forward(tape, held, keep_buffers=True)
            else:
                self._discard(tape)
            tape.overwritten, tape.closed, self.tape = handle.name, True, None

    def before_another_form(self, handle: Handle) -> None:
        """The loop is about to give a parameter another dtype or shape (``model.double()``); optimizers keep the state that they have."""
        with self.lock:
            self.before_write(handle)
            if isinstance(handle.grad, Tape):
                self.settle_grad(handle)
            for binding in self.bindings.values():
                self.fetch_optimizer_state(binding)
                binding.state_on_device = False
                if dict.get(binding.optimizer.state, handle.tensor):
                    binding.by_torch = f"{handle.name!r} has got another dtype or shape than the optimizer's state for it: make the optimizer after that"
            self.form += 1

    def _mode(self) -> tuple:
        if not self._structure.is_current():
            self._follow_replacements()
        with torch._C.DisableTorchFunctionSubclass():
            grads = tuple(_grad_mode(handle.tensor) for handle in self.handles.values())
        return tuple((module, module.training) for module in self._structure.modules), grads

    def _swapped(self) -> str | None:
        """Why the tensors that the modules hold now cannot be moved to the devices, if they cannot."""
        if self._structure.is_current():
            return None
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensor in self.model.named_parameters():
                if not isinstance(tensor, nn.Parameter) or not tensor.is_leaf:
                    return f"{name!r} is no parameter but another tensor for the time of this call (torch.func)"
        return None

    def _follow_replacements(self) -> None:
        """The loop replaced, added or removed modules, parameters or buffers of the model."""
        if self.tape is not None and not self.tape.closed and self.tape.live():
            raise LoopError(
                "a module, parameter or buffer of the model was replaced between a call of the model and its backward(): replace it before the call or after the step"
            )
        if self.pending is not None and not self.pending.closed:
            self._force(self.pending)
        self._adopt_tensors()

    def _adopt_tensors(self) -> None:
        for handle in self.handles.values():
            handle.refresh()
        before = self.handles
        self.handles = self.fakes.handles = manage(self, self.model, before)
        self.form += _forms(before) != _forms(self.handles)
        current = {id(handle) for handle in self.handles.values()}
        for handle in before.values():
            if id(handle) not in current:
                handle.tensor._graphacc_handle = None  # an ordinary tensor again
        self._structure = Structure(self.model)
        with torch._C.DisableTorchFunctionSubclass():
            self._persistent = set(self.model.state_dict(keep_vars=True))

    def _recording(self) -> Tape:
        """The tape that a model call is added to: the open one while the loop still holds results of it."""
        tape = self.tape
        if tape is None or tape.closed or tape.backward_at is not None or not tape.live():
            self._end_recording()
            tape = self.tape = self._new_tape()
        return tape

    def _end_recording(self) -> None:
        tape, self.tape = self.tape, None
        if tape is not None and not tape.closed and tape.backward_at is None:
            self._discard(tape)

    def _new_tape(self) -> Tape:
        self.counter += 1
        tape = Tape(self, self.counter)
        tape.parameter_versions = {name: handle.version for name, handle in self.handles.items()}
        return tape

    def _discard(self, tape: Tape) -> None:
        """A recording without backward ends: its only effect is on the buffers."""
        if self._writes_buffers(tape):
            self._run_forward(tape, [], keep_buffers=True)
        tape.closed = True

    def records_parameters(self) -> bool:
        """Whether a function of a parameter belongs on the tape: between a model call and its backward."""
        tape = self.tape
        return not self.capturing and self.in_loop_thread and tape is not None and not tape.closed and tape.backward_at is None and bool(tape.calls)

    def fake(self, value) -> Tensor:
        return self.fakes.of(value)

    @property
    def answers_reads(self) -> bool:
        """Whether code that asks for values of the batch can be answered: the values that a program gets are those that the loop gave, all at once."""
        return self.fallback.backend is FX and self.programs.strategy.microbatches == 1 and not self.programs.local_batch

    def answers(self, reads: Sequence[Read], inputs: Mapping) -> contextlib.AbstractContextManager:
        """While a graph is captured, recorded code gets the answers that it got when it was recorded; PyTorch reads values itself."""
        return Answers(reads, inputs) if reads and self.tracing else contextlib.nullcontext()

    def answered(self, function: Callable, answers: tuple) -> Callable:
        """The function that is recorded where `function` got these answers."""
        if not isinstance(function, ModelCall) or not answers:
            return function
        found = dataclasses.replace(function, answers=answers)
        self.written[found] = self.written[function]
        return found

    def number_inputs(self, args: tuple) -> set[int]:
        """Identities of the inputs that are numbers of modules, which code reads as numbers if it has to (see `Guards.fix`)."""
        inputs = args[0] if args and isinstance(args[0], dict) else {}
        return {id(inputs[label]) for label in self.guards.numbers if label in inputs}

    def buffer_now(self, name: str, tape: Tape) -> Tensor:
        """The present value of a buffer, for a call that is recorded on `tape`."""
        self.settle_buffers(ahead=tape)
        self.handles[name].refresh()
        return self.handles[name].host_value()

    def run_fake(self, function: Callable, args: tuple, kwargs: dict, recorder: Recorder | None):
        """What a call gives on fake tensors.

        Raises:
            NotRecorded: a torch function needs values, or fails; PyTorch will say how.
            CaptureError: the model cannot be captured.
        """
        with self.autocast(autocast_dtype()):
            if isinstance(function, ModelCall):
                inputs, given, named = args
                with self.direct_calls():
                    if function.path:  # PyTorch runs what torch.fx cannot follow
                        return self._infer_answered(function, inputs, given, named, recorder)
                    return self.fallback.attempt(lambda: self._infer_answered(function, inputs, given, named, recorder))
            try:
                return self.fakes.run(function, args, kwargs, recorder)
            except GraphAccError:
                raise
            except Exception as error:
                raise NotRecorded(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error

    def _infer_answered(self, function: ModelCall, inputs: dict[str, Tensor], args: tuple, kwargs: dict, recorder: Recorder | None):
        """`_infer_model`; what fails after an answer may not fail with another one.

        Raises:
            NotRecorded: it failed after an answer, so lazy tensors, which give no answers, are no help.
        """
        try:
            return self._infer_model(function, inputs, args, kwargs, recorder)
        except ParameterWritten as error:
            self.written_by_forward |= error.names
            raise
        except CaptureError as error:
            if recorder is not None and recorder.reads:
                raise NotRecorded(str(error)) from error
            raise

    def _infer_model(self, function: ModelCall, inputs: dict[str, Tensor], args: tuple, kwargs: dict, recorder: Recorder | None):
        """Call the model on fake tensors; what it writes to its modules is noted, and taken back."""
        call = self.fakes.call_model if self.fallback.backend is FX else self.fakes.call_model_lazily
        num_hooks, flags = self.guards.num_hooks(), {}
        try:
            with borrowed(self.model), self.guards.noting(), no_python_randomness():
                before = {path: dict(vars(module)) for path, module in self.model.named_modules()}
                self.guards.write(inputs)
                buffers = self.fakes.buffers()
                try:
                    result = call(function.path, args, kwargs, recorder)
                finally:
                    if self.guards.num_hooks() != num_hooks:  # some models install theirs in a first forward, and note that in an attribute
                        flags = plain_attributes_written(self.model, before)
                written = attributes_written(self.model, before, inputs)
                writes_buffers = self.fallback.backend is not FX or self.fakes.buffers() != buffers
        finally:
            self.guards.write(flags)
        if flags:
            raise NewInput("the forward installed hooks")
        tensors = {label: value for label, value in written.items() if isinstance(value, Tensor)}
        others = {label: value for label, value in written.items() if label not in tensors}
        self.written[function] = Written(
            buffers=writes_buffers and bool(buffers),
            tensors=tuple(tensors),
            others=others,
            before=self.guards.present(written.keys() - inputs.keys()),
            held=self.guards.held(),
        )
        return result, tensors

    # ---- gradients

    def backward(self, tape: Tape) -> None:
        """``loss.backward()`` was recorded on `tape`."""
        with self.lock:
            self._settle_pending()
            tape.outputs = tape.live()
            try:
                joint = self.fallback.attempt(lambda: self._joint(tape))
            except NOT_COMPILED as error:
                self._refuse(tape, error)
                loss, tape.loss, tape.backward_at = tape.loss, None, None
                self.run_eagerly(tape, str(error))
                tape.value(loss).backward()
                return
            self.pending = tape
            for output in joint.outputs:
                if output.kind is not Kind.GRAD:
                    continue
                handle = self.handles[output.target]
                tape.grad_values[handle.name] = index = tape.add_value(self.fakes.gradient_of(handle))
                if handle.grad is SPENT:
                    continue  # what this adds to is not known; the loop may clear it before it is used, as that of two optimizers in turn does
                if (own := handle.host_grad) is not None:
                    self.host_grads[handle.name] = self._with_accumulated(handle.name, own)
                    self.accumulated.add(handle.name)
                    handle.host_grad = None
                tape.grad_bindings[handle.name] = index
                handle.grad = tape
            if self.torch_steps:
                self._force(tape)
            elif any(handle.kind is Kind.PARAM and handle.is_shared for handle in self.handles.values()):
                self._run_grad(tape)  # a tensor that shares a parameter's memory may be written at any time

    def _refuse(self, tape: Tape, error: Exception) -> None:
        """The calls of `tape` cannot be compiled: from now on PyTorch runs them, unless the user wants an error."""
        if self.options.capture != "auto":
            raise error
        for call in tape.forward_calls:
            if isinstance(call.asked, ModelCall):
                self._refused[call.asked] = _explanation(error)

    def _settle_pending(self) -> None:
        """Before another backward: the gradients of the last one go to the accumulators."""
        tape, self.pending = self.pending, None
        if tape is None or tape.closed:
            return
        if tape.gradient_calls or tape.grad_bindings != tape.grad_values:
            self._force(tape)
            return
        if not tape.has_run:
            self._run_grad(tape)
        self._close(tape)

    def read_grad(self, handle: Handle) -> Tensor | None:
        """``parameter.grad``."""
        if handle.grad is SPENT:
            return SpentGradient(handle)
        if handle.grad is ZERO or handle.host_grad is not None or (isinstance(handle.grad, Tape) and handle.grad.closed):
            self.settle_grad(handle)
        if isinstance(handle.grad, Tape):
            return handle.grad.promise(handle.grad.grad_bindings[handle.name])
        return handle.host_grad

    def settle_grad(self, handle: Handle) -> None:
        """Make ``parameter.grad`` the ordinary tensor that PyTorch would have there."""
        if handle.grad is SPENT:
            raise _used_again(handle, "reading it")
        if handle.grad is ZERO:
            handle.host_grad = handle.zeros() if handle.host_grad is None else handle.host_grad
            handle.grad = None
        if isinstance(handle.grad, Tape) and not handle.grad.closed:
            self._force(handle.grad)
        elif isinstance(handle.grad, Tape):  # it lies in the accumulators
            total = self._gradient_after_code(handle.grad, handle.name)
            handle.host_grad = total if handle.host_grad is None else handle.host_grad + total
            handle.grad = None
            self.accumulated.discard(handle.name)

    def _gradient_after_code(self, tape: Tape, name: str) -> Tensor:
        """A gradient of a backward whose program has run, after the gradient code that followed it."""
        if tape.grad_bindings[name] == tape.grad_values[name]:
            return self.programs.fetch(Kind.GRAD, name)
        grads = {other: self.programs.fetch(Kind.GRAD, other) for other in tape.grad_values}
        return self._replay_gradient_code(tape, grads)[tape.grad_bindings[name]]

    def _replay_gradient_code(self, tape: Tape, grads: dict[str, Tensor]) -> dict[int, Tensor]:
        """Let PyTorch run the code on gradients; returns every value of it."""
        code = build.GradientCode(tape=tape, names=tuple(tape.grad_bindings), max_norm=None)
        externals = [self._whole_external(tape, i) for i in code.external_indices]
        values = [tape.value(i) for i in code.forward_values]
        with self.on_host(tape), torch.no_grad():
            return code.replay(grads, [*externals, *values, *(handle.host_value() for handle in code.handles)])

    def write_grad(self, handle: Handle, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        name = handle.name
        if isinstance(value, Promise):
            if value.tape is self.pending and not value.tape.closed:
                value.tape.grad_bindings[name] = value.index
                handle.host_grad, handle.grad = None, value.tape
                return
            value = value.tape.value(value.index)
        tape, handle.grad = handle.grad, None
        handle.host_grad = value
        self.accumulated.discard(name)
        self.host_grads.pop(name, None)
        if isinstance(tape, Tape):
            tape.grad_bindings.pop(name, None)
            if tape is self.pending and not tape.grad_bindings:
                self._drop_pending()

    def zero_grad(self, handle: Handle) -> None:
        """``parameter.grad.zero_()``, where no tensor holds the gradient."""
        self.write_grad(handle, None)
        handle.grad = ZERO

    def _drop_pending(self) -> None:
        """All gradients of the pending backward were cleared: what remains is its effect on buffers, and the values that the loop holds."""
        tape, self.pending = self.pending, None
        derived = {*tape.grad_values.values(), *(index for call in tape.gradient_calls for index in call.results)}
        if not derived.isdisjoint(tape.live()):
            self._force(tape)
            return
        if not tape.has_run:
            self._run_forward(tape, sorted({*tape.outputs, tape.loss}), keep_buffers=True)
        self._close(tape)

    # ---- values

    def fetch(self, handle: Handle) -> Tensor:
        """The current value of a parameter or buffer, from the devices."""
        return self.programs.fetch(handle.kind, handle.name)

    def materialize(self, tape: Tape, index: int) -> None:
        """Run what is needed for `tape` to have the value `index`."""
        with self.lock:
            if tape.closed and tape.updates == self.updates and not tape.is_eager:
                self.run_eagerly(tape, "a result of an earlier model call, which the loop had let go of, is read")
            if tape.closed:
                if tape.has_value(index):
                    return
                raise LoopError(
                    "a result of an earlier model call was not held by the loop when its step ran, so it was not computed: keep the model's output "
                    "alive until optimizer.step() to have it returned by the step"
                )
            if tape.backward_at is None:
                tape.num_reads += 1
                if tape.num_reads > MAX_READS and tape.updates == self.updates:
                    self.make_differentiable(tape, f"values are read more than {MAX_READS} times before backward(), each after further calls")
                else:
                    self._run_forward(tape, sorted({index, *tape.live()}), keep_buffers=False)
                return
            log.info("graphacc: a gradient or result is read between backward() and step(), so this step runs in parts")
            self._force(tape)

    def _force(self, tape: Tape) -> None:
        """Compute everything on the tape now; the gradients become ordinary host tensors."""
        grads = self._gradients(tape)
        env = self._replay_gradient_code(tape, grads)
        for value, tensor in env.items():
            if not tape.has_value(value):
                tape.fulfil(value, tensor)
        for name, value in tape.grad_bindings.items():
            handle = self.handles[name]
            handle.host_grad = env[value] if handle.host_grad is None else handle.host_grad + env[value]
            handle.grad = None
        self.accumulated -= set(tape.grad_values)
        if self.pending is tape:
            self.pending = None
        self._close(tape)

    def _gradients(self, tape: Tape) -> dict[str, Tensor]:
        """The gradients that its backward gave, with what was accumulated before, on the host."""
        if not tape.has_run:
            try:
                self._run_grad(tape)
            except NOT_COMPILED as error:
                self._refuse(tape, error)
                return self._gradients_by_pytorch(tape, str(error))
        read = {index for call in tape.gradient_calls for index in tape.reads(call)} | set(tape.live())  # also of what the loop has replaced since
        return {name: self.programs.fetch(Kind.GRAD, name) for name, index in tape.grad_values.items() if name in self.accumulated or index in read}

    def _gradients_by_pytorch(self, tape: Tape, why: str) -> dict[str, Tensor]:
        self._note_eager("a step's forward and backward", why)
        env = self._replay_on_host(tape)
        wanted = {name: self.handles[name].tensor for name in tape.grad_bindings}
        with torch._C.DisableTorchFunctionSubclass():
            found = dict(zip(wanted, torch.autograd.grad(env[tape.loss], list(wanted.values()), allow_unused=True)))
        for index in (tape.loss, *tape.outputs):
            tape.fulfil(index, env[index].detach())
        tape.has_run = True
        return {name: self._with_accumulated(name, grad) for name, grad in found.items() if grad is not None}

    def _with_accumulated(self, name: str, grad: Tensor) -> Tensor:
        before = self.host_grads.pop(name, None)
        if name in self.accumulated and before is None:
            before = self.programs.fetch(Kind.GRAD, name)
        self.accumulated.discard(name)
        return grad if before is None else before + grad

    def _whole_external(self, tape: Tape, index: int) -> Tensor:
        if tape.externals[index] is not tape.sources[index]:
            raise LoopError(
                f"{tape.external_paths[index]} is this process's part of the batch, and code on gradients that is run outside of the step "
                'reads it: use batch="global", or leave the gradients unread until optimizer.step()'
            )
        return tape.externals[index]

    def _close(self, tape: Tape) -> None:
        tape.closed = True
        self.template = tape
        self._remember(tape)
        if self.tape is tape:
            self.tape = None

    def _remember(self, tape: Tape) -> None:
        """Keep a finished recording to recognise later ones, which follow the first of those that are kept."""
        found = tape.as_template()
        others = [template for template in self.recent if not template.is_like(found)]
        self.recent = [found, *others][:MAX_TEMPLATES]

    # ---- running

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer.step()``: one program where the loop is plain, parts of it where it is not.

        Returns:
            Whether it is done; if not, PyTorch's own step has to run, for which everything is on the host.
        """
        with self.lock, ranges.named("graphacc.step", self.steps + 1):
            binding = self.binding_of(optimizer)
            if binding.by_torch is not None:
                self.prepare_torch_step(binding)
                return False
            for handle in (self.handles[name] for name in binding.names):
                if handle.grad is SPENT:
                    raise _used_again(handle, f"{type(optimizer).__name__}.step()")
                if handle.grad is ZERO or (handle.grad is not None and handle.host_grad is not None):
                    self.settle_grad(handle)
            names = tuple(name for name in binding.names if self.handles[name].has_grad)
            if not names:
                return True
            if changed := binding.note_changes():
                log.info("graphacc: %s changed between steps and became an input of the program", ", ".join(changed))
            self.losses.check()
            tape = self.pending
            try:
                self._step(binding, names)
            except NOT_COMPILED as error:
                if not self._step_in_parts(binding, names, tape, error):
                    return False
            for name in names:
                if isinstance(self.handles[name].grad, Tape) and not self.options.keep_gradients:
                    self.handles[name].grad = SPENT
                    self.accumulated.discard(name)
            self.steps += 1
            if tape is not None and tape.loss is not None:
                self.losses.watch(self.steps, tape)
            return True

    def _step(self, binding: Binding, names: tuple[str, ...]) -> None:
        tape = self.pending
        if self.options.keep_gradients and tape is not None and not tape.closed and tape.gradient_calls:
            self._force(tape)
            tape = None
        whole = tape is not None and not tape.has_run and not self.accumulated and self.programs.runs_whole_steps and not self.options.keep_gradients
        if whole and set(names) == set(tape.grad_bindings):
            self._run_step(tape, binding, names)
        else:
            self._run_update(tape, binding, names)

    def _step_in_parts(self, binding: Binding, names: tuple[str, ...], tape: Tape | None, error: Exception) -> bool:
        """After `error`: find out whether the model's gradients or the optimizer's update cannot be compiled, and do the other."""
        if self.options.capture != "auto":
            raise error
        try:
            if tape is not None and not tape.closed:
                self._force(tape)
            self._run_update(None, binding, names)
            return True
        except NOT_COMPILED as second:
            binding.by_torch = str(second)
            self.prepare_torch_step(binding)
            return False

    def prepare_torch_step(self, binding: Binding) -> None:
        """Bring to the host what the optimizer's own step reads: gradients and its state. Parameters come when they are read."""
        self._note_eager(f"the step of {type(binding.optimizer).__name__}", binding.by_torch or "")
        self.steps += 1
        for name in binding.names:
            handle = self.handles[name]
            self.settle_grad(handle)
            if isinstance(binding.optimizer, torch.optim.SparseAdam) and handle.host_grad is not None and not handle.host_grad.is_sparse:
                handle.host_grad = handle.host_grad.to_sparse(1)  # compiled programs give dense gradients, with zeros written out
        self._clip_on_host([self.handles[name] for name in binding.names])
        self.fetch_optimizer_state(binding)
        binding.state_on_device = False
        self.torch_steps = True

    def _clip_on_host(self, handles: Sequence[Handle]) -> None:
        """``max_grad_norm``, for a step that PyTorch runs."""
        if self.options.max_grad_norm is None:
            return
        grads = {handle.name: handle.host_grad for handle in handles if handle.host_grad is not None}
        if grads:
            for name, grad in build.clip_total_norm(grads, self.options.max_grad_norm).items():
                self.handles[name].host_grad = grad

    def binding_of(self, optimizer: torch.optim.Optimizer) -> Binding:
        """What ties an optimizer to this model; made at first use."""
        if id(optimizer) not in self.bindings:
            self.bindings[id(optimizer)] = bind(self, optimizer)
        binding = self.bindings[id(optimizer)]
        binding.names, strangers = parameter_names(self, optimizer)  # groups can be added
        if strangers and binding.by_torch is None:
            binding.by_torch = f"it holds {strangers} parameter(s) that do not belong to the compiled model"
        binding.adopt_state()
        return binding

    def _joint(self, tape: Tape) -> build.Step:
        key = (self.fallback.backend.name, tape.key(tape.forward_calls), tape.loss, tuple(tape.outputs))
        if key not in self._joints:
            strategy = self.programs.strategy
            self._joints[key] = self._capture(build.joint_graph, tape, tape.outputs, strategy.precision, strategy.microbatches)
            while len(self._joints) > MAX_JOINTS:
                self._joints.pop(next(iter(self._joints)))
        return self._joints[key]

    def _choose(self, tape: Tape, update: Callable[[], build.Step] | None = None) -> None:
        """Search the strategy, if that is still to be done; captures are kept for the program."""
        if self.choice is not None:
            self.choice.settle(self, lambda: self.fallback.attempt(lambda: self._joint(tape)), update)

    def bring_home(self) -> None:
        """Everything that the devices hold comes to the host, to be uploaded again in another layout."""
        with self.lock:
            for handle in self.handles.values():
                handle.refresh()
            for binding in self.bindings.values():
                self.fetch_optimizer_state(binding)
                binding.state_on_device = False

    def _run_forward(self, tape: Tape, outputs: Sequence[int], *, keep_buffers: bool) -> None:
        """Compute values of the forward part."""
        self.settle_buffers(ahead=tape)
        wanted = [index for index in outputs if not tape.has_value(index)]
        compiled = self._program(
            "forward",
            {**self._forward_aspects(tape), "results": tuple(wanted), "buffers kept": keep_buffers},
            lambda: self._capture(build.forward_graph, tape, wanted, self.programs.strategy.precision, keep_buffers),
        )
        with self.verifier.watching(compiled, tape, outputs=wanted, keep_buffers=keep_buffers):
            self._fulfil(tape, self._run(compiled, tape))

    def _run_grad(self, tape: Tape) -> None:
        """Forward and backward; adds to the gradients on the devices."""
        self._choose(tape)
        count = self.programs.strategy.microbatches
        compiled = self._program(
            "grad",
            {**self._forward_aspects(tape), "results": tuple(tape.outputs)},
            lambda: build.accumulating(self._joint(tape)),
        )
        for name in tape.grad_values:
            self._prepare_accumulator(compiled, name)
        self._upload(compiled, tape)
        feeds = [self._feeds(compiled, tape, microbatch=i) for i in range(count)]
        with self.verifier.watching(compiled, tape):
            parts = self.programs.run_microbatches(compiled, feeds)
            self.note_run(compiled, count)
            self._mark_stale(compiled)
            tape.fulfil(tape.loss, lambda: torch.stack([part[Kind.LOSS, "loss"]() for part in parts]).sum())
            for index in tape.outputs:
                tape.fulfil(index, build.from_microbatches([part[Kind.USER, str(index)] for part in parts], tape.values[index]))
            self.accumulated |= set(tape.grad_bindings)
            tape.has_run = True

    def _prepare_accumulator(self, compiled: Compiled, name: str) -> None:
        """The gradient so far, on the devices: kept if it is there, uploaded if the loop wrote it, zero otherwise."""
        if name in self.accumulated and name not in self.host_grads:
            return
        value = self.host_grads.pop(name, None)
        zeros = torch.zeros(()).expand(self.fakes.gradient_of(self.handles[name]).shape)
        self.programs.put(compiled, Kind.GRAD, name, zeros if value is None else value)

    def _run_step(self, tape: Tape, binding: Binding, names: tuple[str, ...]) -> None:
        """The whole step in one program."""
        code = self._gradient_code(tape, names)
        captured = functools.cache(lambda backend: self._capture(build.update_graph, binding.optimizer, code, binding.dynamic))
        update = lambda: captured(self.fallback.backend.name)  # noqa: E731
        self._choose(tape, update)
        compiled = self._program(
            "step",
            {**self._forward_aspects(tape), "results": tuple(tape.outputs), **_update_aspects(binding, code)},
            lambda: build.step_graph(self._joint(tape), update()),
        )
        self._upload_optimizer_state(compiled, binding)
        with self.verifier.watching(compiled, tape, binding=binding, code=code):
            self._fulfil(tape, self._run(compiled, tape, binding=binding))
        binding.copies = {}
        self.pending = None
        self._close(tape)

    def _run_update(self, tape: Tape | None, binding: Binding, names: tuple[str, ...]) -> None:
        """The update alone, from gradients on the devices (and from the host, where the loop wrote them)."""
        if tape is not None and not tape.has_run:
            self._run_grad(tape)
        if tape is not None and any(name in tape.grad_values and name not in tape.grad_bindings for name in names):
            self._force(tape)  # code on gradients reads one that the loop has meanwhile replaced
            tape = None
        if tape is None:
            tape = Tape(self, self.counter)
        for name in names:
            if name not in tape.grad_bindings:
                tape.grad_values[name] = tape.grad_bindings[name] = tape.add_value(self.fakes.gradient_of(self.handles[name]))
        code = self._gradient_code(tape, names)
        compiled = self._program(
            "update",
            _update_aspects(binding, code),
            lambda: self._capture(build.update_graph, binding.optimizer, code, binding.dynamic),
        )
        for name in names:
            if (own := self.handles[name].host_grad) is not None:
                self.programs.put(compiled, Kind.GRAD, name, own)
        self._upload_optimizer_state(compiled, binding)
        with self.verifier.watching(compiled, tape, binding=binding, code=code):
            self._fulfil(tape, self._run(compiled, tape, binding=binding))
        binding.copies = {}
        if self.pending is tape:
            self.pending = None  # the next step may have gradients that PyTorch computed
        self._close(tape)

    def _gradient_code(self, tape: Tape, names: tuple[str, ...]) -> build.GradientCode:
        made = {*tape.grad_values.values(), *(index for call in tape.gradient_calls for index in call.results)}
        results = tuple(index for index in tape.live() if index in made and not tape.has_value(index))
        return build.GradientCode(tape=tape, names=names, max_norm=self.options.max_grad_norm, results=results)

    def _capture(self, build_graph: Callable[..., build.Step], *args) -> build.Step:
        with self.direct_calls(), self._traced(), collector.paused(), torch.autocast("cpu", enabled=False):
            return build_graph(self.fallback.backend, self.model, *args)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        before, self.tracing = self.tracing, True
        try:
            yield
        finally:
            self.tracing = before

    def _program(self, kind: str, aspects: dict[str, object], capture: Callable[[], build.Step]) -> Compiled:
        self.verifier.note_capture(capture)
        return self.fallback.attempt(lambda: self.programs.get(kind, aspects, capture))

    def _forward_aspects(self, tape: Tape) -> dict[str, object]:
        code, batch = tape.key(tape.forward_calls)
        return {"batch shapes": batch, "recorded code or module modes": (code, tape.loss)}

    def _run(
        self, compiled: Compiled, tape: Tape, *, binding: Binding | None = None
    ) -> dict[tuple[Kind, str], Callable[[], Tensor]]:
        """Bring the host's news to the devices, run, and mark what the program changed."""
        self._upload(compiled, tape)
        fetched = self.programs.run(compiled, self._feeds(compiled, tape, binding=binding))
        self.note_run(compiled)
        self._mark_stale(compiled)
        return fetched

    def note_run(self, compiled: Compiled, times: int = 1) -> None:
        """Tell those who measure steps that a program has been started."""
        for observer in self.observers:
            observer.ran(compiled, times)

    def _feeds(
        self, compiled: Compiled, tape: Tape, *, binding: Binding | None = None, microbatch: int | None = None
    ) -> dict[tuple[Kind, str], object]:
        """The inputs of a program that are no state."""
        feeds: dict[tuple[Kind, str], object] = {(Kind.KEY, "key"): [self.microbatch_seed(microbatch or 0), tape.counter & 0xFFFFFFFF]}
        for index, path in enumerate(tape.external_paths):
            tensor = tape.external(index)
            if microbatch is not None:
                tensor = build.microbatch(tensor, tape, self.programs.strategy.microbatches, microbatch)
            feeds[Kind.BATCH, path] = tensor
        if binding is not None:
            feeds |= {(Kind.HYPER, name): value for name, value in hyperparameters(binding.optimizer, binding.dynamic).items()}
        for item in compiled.graph.inputs:
            if item.kind in (Kind.LOSS, Kind.USER):
                feeds[item.kind, item.target] = tape.value(tape.loss if item.kind is Kind.LOSS else int(item.target))
        return feeds

    def microbatch_seed(self, microbatch: int) -> int:
        """First word of the random key of one microbatch."""
        return self.seed ^ (microbatch * _GOLDEN & 0xFFFFFFFF)

    def _mark_stale(self, compiled: Compiled) -> None:
        for item in compiled.graph.outputs:
            if item.kind in (Kind.PARAM, Kind.BUFFER):
                self.handles[item.target].mark_stale()
        self.updates += any(item.kind is Kind.PARAM for item in compiled.graph.outputs)

    def _frozen(self) -> frozenset[str]:
        """Parameters that nothing trains."""
        return frozenset(handle.name for handle in self.handles.values() if handle.kind is Kind.PARAM and not handle.trains)

    def _upload(self, compiled: Compiled, tape: Tape) -> None:
        """Parameters and buffers that are not on the devices yet, or were written on the host."""
        for item in compiled.graph.inputs:
            if item.kind not in (Kind.PARAM, Kind.BUFFER):
                continue
            handle = self.handles.get(item.target)
            if handle is not None and (handle.host_is_newer or not self.programs.holds_for(item)):
                handle.refresh()  # as the devices have it in another form
                if compiled.kind != "update" and self._written_since(handle, tape):
                    raise written_too_early(handle.name)
                self.programs.put(compiled, item.kind, item.target, handle.host_value())
                handle.mark_uploaded()

    def _upload_optimizer_state(self, compiled: Compiled, binding: Binding) -> None:
        wanted = [item for item in compiled.graph.inputs if item.kind is Kind.STATE]
        missing = [item for item in wanted if not binding.state_on_device or not self.programs.holds(item.kind, item.target)]
        if missing:
            state = init_optimizer_state(self.model, binding.optimizer, sorted({item.target.rpartition("/")[0] for item in missing}))
            for item in missing:
                name, _, key = item.target.rpartition("/")
                self.programs.put(compiled, item.kind, item.target, state[name][key])
        binding.state_on_device = True

    def fetch_optimizer_state(self, binding: Binding) -> None:
        """Bring the optimizer's state to the host, into ``optimizer.state``."""
        if not binding.state_on_device:
            return
        with self.lock:
            for name in binding.names:
                if tensors := self.programs.optimizer_state(name):
                    binding.hold(self.handles[name].tensor, tensors)

    # ---- saving and restoring

    def is_saved(self, handle: Handle) -> bool:
        """Whether a tensor belongs in a checkpoint: all but the buffers that are not persistent."""
        return handle.kind is Kind.PARAM or handle.name in self._persistent

    def aliases(self) -> dict[str, str]:
        """Other name -> first name, of every tied tensor."""
        named = (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False))
        return {name: first for name, tensor in named if (first := tensor._graphacc_handle.name) != name}

    def current(self, handle: Handle) -> "Tensor | tuple":
        """The value of a parameter or buffer where it is newest: on the host, or on the devices with its layout."""
        self.settle_buffers()
        if handle.host_is_newer or not self.programs.holds(handle.kind, handle.name):
            return handle.host_value()
        return self.programs.state.find(handle.kind, handle.name)

    def current_optimizer_state(self, binding: Binding) -> "dict[str, Tensor | tuple]":
        """"<parameter>/<state>" -> the optimizer's state where it is newest."""
        if binding.state_on_device:
            targets = [target for name in binding.names for target in self.programs.state_targets(name)]
            return {target: self.programs.state.find(Kind.STATE, target) for target in targets}
        state = binding.optimizer.state
        found = {name: state[self.handles[name].tensor] for name in binding.names if self.handles[name].tensor in state}
        return {f"{name}/{key}": value for name, values in found.items() for key, value in values.items() if isinstance(value, Tensor)}

    def restart(self, *, seed: int, counter: int, steps: int) -> None:
        """Forget what was recorded, and continue the random numbers and the count of steps from a checkpoint."""
        if self.tape is not None:
            self._close(self.tape)
        self.tape = self.template = self.pending = None
        self.recent.clear()
        self.accumulated.clear()
        self.host_grads.clear()
        for handle in self.handles.values():
            handle.grad = handle.host_grad = None
        self.seed, self.counter, self.steps = seed, counter, steps

    def _fulfil(self, tape: Tape, fetched: dict[tuple[Kind, str], Callable[[], Tensor]]) -> None:
        for (kind, target), fetch in fetched.items():
            tape.fulfil(tape.loss if kind is Kind.LOSS else int(target), fetch)


def _grad_mode(tensor: Tensor) -> object:
    """Whether a parameter takes a gradient, and its hooks."""
    hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return (tensor.requires_grad, *(tuple((held or {}).values()) for held in hooks)) if any(hooks) else tensor.requires_grad


def _forms(handles: Mapping[str, Handle]) -> dict[str, tuple]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: (handle.tensor.dtype, handle.tensor.shape) for name, handle in handles.items()}


def _used_again(handle: Handle, what: str) -> LoopError:
    return LoopError(
        f"{what} would use the gradient of {handle.name!r} again, which an earlier compiled step consumed, and to which PyTorch would have added those of later "
        "backwards: call zero_grad() after every step, and backward() before the next, or keep gradients with graphacc.compile(..., keep_gradients=True), "
        "which takes their memory and runs every step in two programs"
    )


def _explanation(error: Exception) -> str:
    return "\n  ".join([str(error), *getattr(error, "__notes__", ())])


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag


def _update_aspects(binding: Binding, code: build.GradientCode) -> dict[str, object]:
    return {"optimizer settings": binding.key(), "gradient code": code.key(), "dtypes and shapes": code.tape.engine.form}
