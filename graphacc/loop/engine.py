"""The engine of one compiled model: decides which program to run at each point of the loop.

A loop of forward, backward and ``optimizer.step()`` runs one "step" program. A loop that accumulates gradients runs a
"grad" program per backward and an "update" program per step. Evaluation, and values that are read before backward,
run a "forward" program. All programs share one state on the devices. `Execution` runs them, `Gradients` follows the
gradients, and `ByPyTorch` runs what no program can.
"""

import contextlib
import dataclasses
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from graphacc._compat.torch_ import PATCHING, caches_parametrizations, is_multi_grad_hook
from graphacc.capture import FX, objects
from graphacc.capture.borrow import borrowed
from graphacc.capture.guards import RunsTwice, no_python_randomness
from graphacc.capture.numbers import NeedsNumber, Number, function_of, is_of_call, refuse_in
from graphacc.capture.optimizer import is_separable, kinds_of_state, note_kinds_of_state
from graphacc.capture.recurrent import check_unpacked
from graphacc.errors import CaptureError, GraphAccError, LoopError, ParameterWritten
from graphacc.graph import Kind
from graphacc.loop import columns, regions, trees
from graphacc.loop.buckets import Buckets, why_not_under
from graphacc.loop.arguments import Containers, refill
from graphacc.loop.by_pytorch import ByPyTorch
from graphacc.loop.choice import Choice
from graphacc.loop.deferred import Deferred
from graphacc.loop.decisions import Answers, Read, Recorder
from graphacc.loop.fakes import Fakes
from graphacc.loop.execution import Execution
from graphacc.loop.given_numbers import GivenNumbers, Streaks, as_numbers, given_back
from graphacc.loop.fallback import NOT_COMPILED, Fallback, explanation
from graphacc.loop.gradients import Gradients
from graphacc.loop.guards import Guards, NewInput
from graphacc.loop.islands import Islands
from graphacc.loop.keys import RandomKeys
from graphacc.loop.loss_forms import LossForms
from graphacc.loop.losses import LossWatch
from graphacc.loop.managed import Handle, Versions, handle_of, manage
from graphacc.loop.model_call import ModelCall
from graphacc.loop.optimizers import Binding, OtherState, bind, inner_optimizers, parameter_names, python_number
from graphacc.loop.programs import Programs
from graphacc.loop.promise import NotRecorded, Promise, written_too_early
from graphacc.loop.tape import Opaque, Tape, Template, Variant, autocast_dtype
from graphacc.loop.verify import Verifier
from graphacc.loop.ways_back import WaysBack
from graphacc.loop.structure import Structure, code_of, persistent_buffers
from graphacc.loop.written import Written, attributes_written, plain_attributes_written
from graphacc.runtime import ranges
from graphacc.runtime.exchange import needed, torch_view
from graphacc.runtime.layout import Index, whole

if TYPE_CHECKING:
    pass

log = logging.getLogger("graphacc")

MAX_TEMPLATES = 8
"""Finished recordings that a new one is compared with."""

MAX_BUCKETED_TEMPLATES = 64
"""The same where every length makes another one, which programs share."""

MAX_FORMS = 8
"""Shapes of calls without gradients for which programs are compiled; with further ones PyTorch runs them on the host."""

MAX_READS = 2
"""Programs that read values of one recording before its backward, each of which computes it from its beginning again; then it goes on by PyTorch's autograd,
with further calls compiled one by one (the steps of an adaptive solver)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for besides the strategy."""

    seed: int  # first word of the random keys
    follows_torch: bool = False  # it is torch's, and `torch.manual_seed` sets it anew
    seed_is_chosen: bool = True  # by the user
    max_grad_norm: float | None = None  # clip the total norm of the gradients that an optimizer's step uses
    nan_loss: str = "warn"  # "warn", "stop" or "ignore" when a loss is not finite
    keep_gradients: bool = False  # gradients stay after a step, as PyTorch's do, at the cost of their memory
    capture: str = "auto"  # "fx", "lazy", or "auto": lazy tensors where torch.fx refuses
    bucket_lengths: tuple[int, ...] = ()  # lengths that batches are padded to, ascending
    length_dims: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # path of a batch tensor -> its dims that are lengths


_NAME, _TENSOR, _IS_TRAINING, _IS_DIFFERENTIATED = map(operator.attrgetter, ("name", "tensor", "training", "differentiated"))


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
        self.deferred = Deferred(self)
        self.handles = manage(self, model)
        self.fakes = Fakes(model, self.handles, lambda tensor: self.guards.knows(tensor))
        self.execution = Execution(self)
        self.buckets = Buckets(self, options.bucket_lengths, options.length_dims) if options.bucket_lengths else None
        programs.can_pad = self.buckets is None and why_not_under(programs.strategy) is None and not programs.local_batch
        self.gradients = Gradients(self)
        self.ways_back = WaysBack(self)
        self.by_pytorch = ByPyTorch(self)
        self.loss_forms = LossForms(self)
        self.tape: Tape | None = None  # the recording that a call of the model would add to
        self.grad_modes = 0  # how often the loop has set requires_grad of a parameter
        self.watched: set[Handle] = set()  # what may be written uncounted
        self.template: Tape | None = None  # the last finished recording: numbers are compared with those in it
        self.described: dict[tuple, object] = {}  # what functions say of values, by the form of these
        self.recent: list[Template] = []  # finished recordings, to recognise the next one quickly
        self.regions: dict[str, regions.Use] = {}  # what runs as a function of autograd with a compiled forward and backward
        self.buffers_read: dict[tuple, frozenset[str]] = {}  # recorded code -> the buffers that its backward reads
        self._bindings: weakref.WeakKeyDictionary[torch.optim.Optimizer, Binding] = weakref.WeakKeyDictionary()  # of the optimizers that have stepped
        self.keys = RandomKeys(options.seed, follows=options.follows_torch, chosen=options.seed_is_chosen)
        self.steps = 0
        self.form = 0  # how often a parameter or buffer has got another dtype or shape: programs from before do not fit
        self.lock = PATCHING  # held while the state on the devices changes, or is read
        self.torch_steps: set[int] = set()  # ids of the optimizers whose own step runs: gradients have to be ordinary tensors
        self.losses = LossWatch(options.nan_loss)
        self.fallback = Fallback(options.capture, programs.strategy)
        self._persistent = persistent_buffers(model)
        self.structure = Structure(model)
        self.guards = Guards(model)
        self.given_numbers = GivenNumbers(self.guards.asked)
        self.varying_numbers: set[tuple] = set()  # (place on the tape, function, leaf) of numbers that were seen to change
        self.fixed_numbers: set[tuple] = set()  # those of them that Python's own code needs
        self.cut: dict[tuple, frozenset[int]] = {}  # forward code -> tensors from outside besides the model's arguments that are cut into microbatches
        self.parts_given: set[tuple] = set()  # (place on the tape, function) where the loop gives this process's part of a tensor; elsewhere it gives a whole one
        self.number_streaks = Streaks()  # of those
        self._whole: set[ModelCall] = set()  # refused, and no part of them is compiled either
        self.written = Written()  # by the call of the model that has run on fake tensors last
        self.verifier = Verifier(self)
        self.islands = Islands(self)
        self.variants: dict[tuple, list[Variant]] = {}  # recordings of a call by the answers that its code got
        self._last_function: ModelCall | None = None
        self._refused: dict[ModelCall, str] = {}  # calls of the model that cannot be compiled, and why
        self._forms: dict[str, set[tuple]] = {}  # path of a module that is called without gradients -> shapes and dtypes of its tensors, but for those that share a bucket
        self.written_by_forward: set[str] = set()  # parameters that the model's own code writes
        self.replaced: set[str] = set()  # buffers in whose place it has put another tensor

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
            if (why := self.swapped() or self._exchanged()) is not None:
                return self.by_pytorch.call(original, args, kwargs, why)
            function = self._function("", args, kwargs)
            why, wanted = self._changes_too_often("") or self._refused.get(function), self._needs_autograd(args, kwargs)
            in_parts = why is not None and function not in self._whole  # what is refused may have parts that are not
            if why is None and not torch.is_grad_enabled() and (why := self._too_many_forms(function, args, kwargs)):
                return self.by_pytorch.call(original, args, kwargs, why)
            if why is None and wanted is not None:
                why = None if regions.possible(self) else wanted
            if why is None:
                try:
                    if wanted is not None:
                        args, kwargs = self.by_pytorch.differentiable_arguments(args, kwargs, wanted)
                    return self._record(function, args, kwargs, as_region=wanted is not None)
                except NotRecorded as reason:
                    why = str(reason)
                except NOT_COMPILED as error:
                    if self.options.capture != "auto":
                        raise
                    why = self._refused[function] = explanation(error)
                    if isinstance(error, RunsTwice):
                        self._whole.add(function)
                in_parts = function not in self._whole
            return self.by_pytorch.call(original, args, kwargs, why, in_parts)

    def call_part(self, path: str, args: tuple, kwargs: dict):
        """A call of a submodule by the model's own code, which PyTorch runs: as a compiled region.

        Raises:
            NotRecorded: PyTorch has to run it.
            CaptureError, LoweringError: it cannot be compiled.
        """
        function = self._function(path, args, kwargs)
        if (why := self._refused.get(function) or self._changes_too_often(path)) is not None:
            raise NotRecorded(why)
        with self._outside_of_code(), self.by_pytorch.timed() as found:
            try:
                result = self._record(function, args, kwargs, as_region=True)
            except NOT_COMPILED as error:
                self._refused[function] = explanation(error)
                raise
        use = self.regions.setdefault(name := self.name_of(path), regions.Use(name))
        use.forwards += 1
        use.seconds += found.seconds
        return result

    @contextlib.contextmanager
    def _outside_of_code(self) -> Iterator[None]:
        """As between calls of the model, although its code is running; it finds buffers as they are then."""
        before, self._capturing = self._capturing, None
        self.by_pytorch.expect_writes()
        try:
            yield
            for handle in self.handles.values():
                if handle.kind is Kind.BUFFER:
                    handle.refresh()
        finally:
            self._capturing = before

    def _function(self, path: str, args: tuple, kwargs: dict) -> "ModelCall":
        """The model, or a submodule, as it is now, to be called with these arguments."""
        state, changed = self.guards.token()
        if changed:
            log.info("graphacc: the model's Python state changed: %s", "; ".join(changed))
        given = self.given_numbers.note(path, args, kwargs)
        numbers, asked = self.guards.values() | given, self.guards.asked
        inputs, decided = (*self.guards.tensors, *numbers, *asked.computed(numbers)), asked.outcomes(numbers)
        function = ModelCall(self, self._mode(), state, inputs, decided, path=path, form=self.form)
        last = self._last_function
        if last is None or function != last:
            last = self._last_function = function
        return last  # it has its hash

    def _record(self, function: "ModelCall", args: tuple, kwargs: dict, as_region: bool = False):
        if caches_parametrizations() and any(_is_parametrization_with_buffers(module) for module in self.structure.modules):
            raise NotRecorded("parametrize.cached() around it: a parametrization that updates its buffers runs once for all calls inside")
        hooked = [mode for mode in function.mode[1] if mode is not True and mode is not False]
        if any(is_multi_grad_hook(hook) for mode in hooked for hooks in mode[1:] for hook in hooks):
            raise NotRecorded("a parameter has a hook of torch.autograd.graph.register_multi_grad_hook")
        if any(map(_IS_DIFFERENTIATED, self.handles.values())) and (name := next((handle.name for handle in self.handles.values() if handle.accumulator_has_hooks), None)):
            raise NotRecorded(f"the node of autograd that accumulates the gradient of {name!r} has hooks, which run in PyTorch's own backward alone")
        trains = torch.is_grad_enabled() and (as_region or any(handle.trains for handle in self.handles.values()))
        if any(self.handles[name].is_held for name in self.replaced if name in self.handles):
            self.settle_buffers()
            self._renew_held_buffers(self.replaced)
        if not trains:
            self.settle_buffers()
            self._drain()
        elif self.programs.ahead is None and not self.programs.compiled:
            given = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_nested]
            self.programs.look_ahead((type(self.model).__qualname__, _forms(self.handles), _form((given,), {})))
        tape = self._recording() if trains and not as_region else self._new_tape()
        tape.takes_gradients = as_region
        lifted, given = self.given_numbers.lift(function.path, args, kwargs)
        numbers = self.guards.values() | given
        inputs = self.guards.inputs() | self.guards.as_tensors(given | self.guards.asked.computed(numbers))
        self.guards.asked.needed.clear()
        try:
            result, tensors, filled = tape.record(function, (inputs, *lifted), {})
        except NewInput:
            return self._record(self._function(function.path, args, kwargs), args, kwargs, as_region)
        except (NeedsNumber, *NOT_COMPILED) as error:  # perhaps for want of a number
            if not numbers and not isinstance(error, NeedsNumber):
                raise
            self._fix_numbers(given)
            return self._record(self._function(function.path, args, kwargs), args, kwargs, as_region)
        if function.path and any(isinstance(leaf, Opaque) for leaf in tape.calls[-1].result_leaves):
            raise NotRecorded("it returns an object that a program cannot return")
        written = cast(ModelCall, tape.calls[-1].function).written
        if new := written.replaced - self.replaced:
            self.replaced |= new
            self._renew_held_buffers(new)
        self.guards.write(written.others | {label: number(numbers) for label, number in written.numbers.items()})
        if not trains:
            self.execution.run_forward(tape, tape.live(), keep_buffers=True)
            if tape.bucket is not None:  # other lengths share its program
                self._forms.get(function.path, set()).discard(_form(args, kwargs))
            tape.closed = True
            self._remember(tape)
            result, tensors, filled = objects.map_only(Promise, lambda promise: tape.value(promise.index), (result, tensors, filled))
        elif as_region:
            self.by_pytorch.make_differentiable(tape, "an argument requires a gradient")
            if function.path or tape.region is None or tape.region.num_differentiable <= 1:
                result, tensors, filled = objects.map_only(Promise, lambda promise: tape.value(promise.index), (result, tensors, filled))
        self.guards.write(tensors)
        if filled:
            refill((args, kwargs), given_back(filled, given))
        return result

    def _fix_numbers(self, given: Iterable[str]) -> None:
        """Numbers whose values the last run needed, or all if nobody knows which, are constants from now on.

        Args:
            given: labels of those that are arguments.
        """
        needed, own = self.guards.asked.needed, {*self.guards.numbers}
        needed = needed & {*own, *given} or {*own, *given}
        for label in needed & own:
            self.guards.fix(label)
        self.given_numbers.fix(needed - own)

    def _renew_held_buffers(self, names: Iterable[str]) -> None:
        """A call puts other tensors in the places of these buffers: those that the loop holds keep their values."""
        held = [handle for name in names if (handle := self.handles.get(name)) is not None and handle.is_held]
        for handle in held:
            handle.renew()
        if held:
            self.structure = Structure(self.model)

    def _changes_too_often(self, path: str) -> str | None:
        """Why calls of the model or a part of it are not worth programs: what they read has been another value in every one, and is no input."""
        if self.options.capture != "auto":
            return None
        return self.guards.too_many or self.given_numbers.too_many.get((path, torch.is_grad_enabled()))

    def _too_many_forms(self, function: ModelCall, args: tuple, kwargs: dict) -> str | None:
        """Why a call without gradients is not worth a program: every other one has had other shapes."""
        if self.options.capture != "auto" or self.programs.local_batch or any(handle.frees_host for handle in self.handles.values()):
            return None  # the user wants programs; other processes may see other shapes; the host need not hold the model
        form = _form(args, kwargs)
        known = self._forms.setdefault(function.path, {form})
        if form in known or len(known) < MAX_FORMS:
            known.add(form)
            return None
        return f"calls without gradients have had more than {MAX_FORMS} different shapes, each of which would be compiled; pad them to a few lengths to have them compiled"

    def generate(self, original: Callable, args: tuple, kwargs: dict):
        """A loop of calls without gradients, each with other shapes than the last one: all of it by PyTorch."""
        if self.capturing:
            return original(*args, **kwargs)
        with self.lock, self.by_pytorch.noted(f"{type(self.model).__name__}.generate()", "every token has other shapes"), self.by_pytorch.on_host():
            return original(*args, **kwargs)

    def _needs_autograd(self, args: tuple, kwargs: dict) -> str | None:
        """Why a call has to be run by PyTorch's autograd: an argument whose gradient is wanted."""
        if not torch.is_grad_enabled():
            return None
        for leaf in trees.leaves((args, kwargs)):
            if isinstance(leaf, Promise):
                wanted = (leaf.requires_gradient and leaf.tape is not self.tape) or (leaf.tape.is_eager and leaf.tape.value(leaf.index).requires_grad)
            else:
                wanted = isinstance(leaf, Tensor) and leaf.requires_grad
            if wanted:
                return f"an argument of shape {list(leaf.shape)} requires a gradient"
        return None

    def settle_buffers(self, ahead: Tape | None = None, *, are_written: bool = False) -> None:
        """What was recorded has its effect on the buffers now.

        Args:
            ahead: a recording that is about to run itself; later ones have their effect after it.
            are_written: code that PyTorch runs may write them (batch_norm's statistics): what was recorded reads them before.
        """
        if not self.in_loop_thread:
            return
        self.end_if_written()
        pending, tape = (None if x is not None and ahead is not None and x.serial >= ahead.serial else x for x in (self.gradients.pending, self.tape))
        concerned = self.may_read_buffers if are_written else self.writes_buffers
        if pending is not None and not pending.has_run and concerned(pending):
            self.execution.run_grad(pending)
        if tape is not None and tape.backward_at is None and not tape.closed and concerned(tape):
            self.by_pytorch.make_differentiable(tape, "a buffer of the model is read, or written, before backward()")

    def may_read_buffers(self, tape: Tape) -> bool:
        return any(handle.kind is Kind.BUFFER for handle in self.handles.values()) and bool(tape.forward_calls)

    def writes_buffers(self, tape: Tape) -> bool:
        return any(isinstance(call.function, ModelCall) and call.function.written.buffers for call in tape.forward_calls)

    def name_of(self, path: str) -> str:
        return f"the submodule {path} ({type(self.model.get_submodule(path)).__name__})" if path else f"the model {type(self.model).__name__}"

    def is_model(self, function: Callable) -> bool:
        return isinstance(function, ModelCall)

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
        """The torch.autocast around a recorded call, for the device on which the call runs now."""
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.fallback.backend.device_type if self.execution.tracing else "cpu", dtype=dtype, cache_enabled=False)

    def host_tensor(self, handle: Handle) -> Tensor:
        """A parameter as an ordinary tensor of PyTorch."""
        handle.refresh()
        return handle.host_value().requires_grad_(handle.tensor.requires_grad)

    def before_write(self, handle: Handle) -> None:
        """The loop is about to write a parameter or buffer: a backward that was recorded with its present value runs now."""
        self.run_pending()
        self.end_if_written()
        tape = self.tape
        if tape is not None and tape.backward_at is None and not tape.closed:
            if held := tape.live():
                self.execution.run_forward(tape, held, keep_buffers=True)
            else:
                self._discard(tape)
            tape.overwritten, tape.closed, self.tape = handle.name, True, None

    def run_pending(self) -> None:
        """A backward that was recorded with the present values of the parameters runs."""
        tape = self.gradients.pending
        if tape is not None and not tape.has_run:
            self.execution.run_grad(tape)

    def before_exposure(self, handle: Handle) -> None:
        """The loop gets a tensor through which it can write a parameter or buffer uncounted. An open recording goes on: see `end_if_written`."""
        self.run_pending()
        handle.watch()

    def before_another_form(self, handle: Handle) -> None:
        """The loop is about to give a parameter another dtype or shape (``model.double()``); optimizers keep the state that they have."""
        with self.lock:
            self.before_write(handle)
            if isinstance(handle.grad, Tape):
                self.gradients.settle(handle)
            for binding in self.bindings:
                self.fetch_optimizer_state(binding)
                binding.state_on_device = False
                if dict.get(binding.optimizer.state, handle.tensor):
                    binding.by_torch = f"{handle.name!r} has got another dtype or shape than the optimizer's state for it: make the optimizer after that"
                    binding.misfit = handle
            if self.programs.offload is not None:
                self.programs.state.discard(Kind.PARAM, handle.name)  # the host would go on giving the devices that form
            handle.forget_spent()
            self.form += 1

    def _mode(self) -> tuple:
        if not self.structure.is_current():
            self._follow_replacements()
        handles, modules = list(self.handles.values()), self.structure.modules
        if not columns.same(columns.handles_of(map(_TENSOR, handles)), handles):
            swapped = next(handle.name for handle in handles if handle_of(handle.tensor) is not handle)
            raise LoopError(
                f"{swapped!r} was exchanged by torch.utils.swap_tensors, which leaves the compiled model with a tensor that it does not know: "
                "swap before graphacc.compile, assign a new nn.Parameter to the module, or write in place (copy_)"
            )
        return tuple(zip(modules, map(_IS_TRAINING, modules))), columns.grad_modes(handles), code_of(modules), self.structure.places

    def swapped(self) -> str | None:
        """Why the tensors that the modules hold now cannot be moved to the devices, if they cannot."""
        if (sparse := self.structure.sparse) is not None:
            return f"{sparse!r} is a sparse tensor, which compiled programs do not have"
        if self.structure.is_current():
            return None
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensor in self.model.named_parameters():
                if not isinstance(tensor, nn.Parameter) or not tensor.is_leaf:
                    return f"{name!r} is no parameter but another tensor for the time of this call (torch.func)"
        return None

    def _exchanged(self) -> str | None:
        """Why a call cannot be recorded beside those that are, if the loop has replaced something since."""
        if self.tape is None or self.tape.closed or not self.tape.live() or self.structure.is_current():
            return None
        return "a module, parameter or buffer of the model was replaced between a call of the model and its backward()"

    def _follow_replacements(self) -> None:
        """The loop replaced, added or removed modules, parameters or buffers of the model."""
        if self.gradients.pending is not None and not self.gradients.pending.closed:
            self.gradients.force(self.gradients.pending)
        self.adopt_tensors()

    def adopt_tensors(self) -> None:
        present = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        for binding in self.bindings:
            if any(name in self.handles and id(self.handles[name].tensor) not in present for name in binding.names):
                self.fetch_optimizer_state(binding)  # it belongs to the tensor, and the devices have it under a name that another tensor gets
                binding.state_on_device = False
        for handle in self.handles.values():
            if not handle.frees_host or (id(handle.tensor) not in present and not handle.missing):
                handle.refresh()
        before = self.handles
        self.handles = self.fakes.handles = manage(self, self.model, before)
        self.form += _forms(before) != _forms(self.handles)
        current = {id(handle) for handle in self.handles.values()}
        for handle in before.values():
            if id(handle) not in current:
                handle.tensor._graphacc_handle = None  # an ordinary tensor again
                self.watched.discard(handle)
        self.structure = Structure(self.model)
        self._persistent = persistent_buffers(self.model)

    def _recording(self) -> Tape:
        """The tape that a model call is added to: the open one while the loop still holds results of it."""
        self.end_if_written()
        tape = self.tape
        if tape is not None and not tape.closed and tape.backward_at is None and tape.repeated() is None and self.keys.went_back():
            self.by_pytorch.make_differentiable(tape, "torch's random numbers were set back to where an earlier step began")
        if tape is None or tape.closed or tape.backward_at is not None or not tape.live():
            self.end_recording()
            tape = self.tape = self._new_tape()
        return tape

    def end_if_written(self) -> None:
        """An open recording ends where parameters were written uncounted since it began: what the loop can see of it is computed with the values from before.

        Raises:
            LoopError: they were written several times since, so that these values are not known.
        """
        tape = self.tape
        if not self.watched or tape is None or tape.closed or tape.backward_at is not None:
            return
        written = [handle for handle in list(self.watched) if handle.kind is Kind.PARAM and self.by_pytorch.written_since(handle, tape)]
        if not written:
            return
        held = tape.live()
        if unknown := next((handle for handle in written if not handle.knows(tape.parameter_versions[handle.name])), None):
            raise written_too_early(unknown.name)
        with contextlib.ExitStack() as stack:
            for handle in written:
                stack.enter_context(handle.as_before(tape.parameter_versions[handle.name]))
            if self.writes_buffers(tape) or not all(tape.has_value(index) for index in held):
                self.execution.run_forward(tape, held, keep_buffers=True)
        tape.overwritten, tape.closed, self.tape = min(handle.name for handle in written), True, None

    def end_recording(self) -> None:
        self.end_if_written()
        tape, self.tape = self.tape, None
        if tape is not None and not tape.closed and tape.backward_at is None:
            self._discard(tape)

    def _new_tape(self) -> Tape:
        for handle in list(self.watched):
            handle.note_uncounted()
        tape = Tape(self, self.keys.next())
        tape.versions = Versions(self.handles)
        return tape

    def _discard(self, tape: Tape) -> None:
        """A recording without backward ends: its only effect is on the buffers."""
        if self.writes_buffers(tape):
            self.execution.run_forward(tape, [], keep_buffers=True)
        tape.closed = True

    def records(self, handle: Handle) -> bool:
        """Whether a function of a parameter or buffer belongs on the tape; not that of a buffer which calls on it may have changed, as the loop reads its value now."""
        if not self.capturing:
            self.end_if_written()
        tape = self.tape
        return tape is not None and self.records_parameters() and not (handle.kind is Kind.BUFFER and self.writes_buffers(tape))

    def records_parameters(self) -> bool:
        """Whether a function of a parameter belongs on the tape: between a model call and its backward."""
        tape = self.tape
        return not self.capturing and self.in_loop_thread and tape is not None and not tape.closed and tape.backward_at is None and bool(tape.calls)

    def fake(self, value) -> Tensor:
        return self.fakes.of(value)

    @property
    def answers_reads(self) -> bool:
        """Whether code that asks for values of the batch can be answered: what the program's graph is captured of are the values that the loop gave, all of them."""
        return self.fallback.backend is FX and not self.programs.local_batch

    def answers(self, reads: Sequence[Read], inputs: Mapping) -> contextlib.AbstractContextManager:
        """While a graph is captured, recorded code gets the answers that it got when it was recorded; PyTorch reads values itself."""
        return Answers(reads, inputs) if reads and self.execution.tracing else contextlib.nullcontext()

    def answered(self, function: Callable, answers: tuple) -> Callable:
        """The function that is recorded where `function`, which has just run on fake tensors, got these answers."""
        return dataclasses.replace(function, answers=answers, written=self.written) if isinstance(function, ModelCall) else function

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
        num_hooks, flags = self.guards.num_hooks(), {}
        try:
            with borrowed(self.model), self.guards.noting((args, kwargs)), no_python_randomness(), self.guards.given(inputs) as placed:
                args, kwargs = as_numbers(args, kwargs, self.guards.asked)
                before = {path: dict(vars(module)) for path, module in self.model.named_modules()}
                buffers, containers = self.fakes.buffers(), Containers((args, kwargs))
                try:
                    if self.fallback.backend is FX:
                        result = self.fakes.call_model(function.path, args, kwargs, recorder)
                    else:
                        result = self.fakes.call_model_lazily(inputs, self.guards.given, self.guards.check_outside_kept, args, kwargs)
                finally:
                    if self.guards.num_hooks() != num_hooks:  # some models install theirs in a first forward, and note that in an attribute
                        flags = plain_attributes_written(self.model, before)
                if self.guards.asked.needed:
                    raise NeedsNumber("caught by the forward")
                if self.guards.asks_for_types and any(label in self.guards.numbers or is_of_call(label) for label in inputs):
                    raise NeedsNumber("a number has its own type")
                left = given_back((args, kwargs))
                refuse_in((result, left))
                if self.guards.asked.has_new:
                    self.guards.asked.has_new = False
                    raise NewInput("a comparison of numbers, or what is computed of them")
                self.guards.check_outside_kept(placed)
                fills = containers.are_changed()
                written = attributes_written(self.model, before, placed)
                check_unpacked(objects.flatten((result, left, written))[0])
                writes_buffers = self.fallback.backend is not FX or self.fakes.buffers() != buffers
                replaced = self.fakes.replaced_buffers() if self.fallback.backend is FX else frozenset()
        finally:
            self.guards.write(flags)
        if flags:
            raise NewInput("the forward installed hooks")
        tensors = {label: value for label, value in written.items() if isinstance(value, Tensor)}
        numbers = {label: function_of(value) for label, value in written.items() if type(value) is Number}
        others = {label: value for label, value in written.items() if label not in tensors and label not in numbers}
        self.guards.check_not_too_many(others)
        self.written = Written(
            buffers=writes_buffers and bool(buffers),
            replaced=replaced,
            tensors=tuple(tensors),
            others=others,
            numbers=numbers,
            values=self.guards.values(),
            before=self.guards.present(written.keys() - inputs.keys()),
            held=self.guards.held(),
            fills=fills,
        )
        return result, tensors, left if fills else ()

    def refuse(self, tape: Tape, error: Exception) -> None:
        """The calls of `tape` cannot be compiled: from now on PyTorch runs them, unless the user wants an error."""
        if self.options.capture != "auto":
            raise error
        for call in tape.forward_calls:
            if isinstance(call.asked, ModelCall):
                self._refused[call.asked] = explanation(error)

    # ---- values

    def fetch(self, handle: Handle) -> Tensor:
        """The current value of a parameter or buffer, from the devices."""
        self._drain()
        return self.programs.fetch(handle.kind, handle.name)

    def _drain(self) -> None:
        """Finish the updates that the host does. A recorded call keeps the parameters on the devices that it was recorded with."""
        recorded = (self.tape, self.gradients.pending)
        self.programs.drain(publish=all(tape is None or tape.closed or tape.has_run for tape in recorded))

    def materialize(self, tape: Tape, index: int) -> None:
        """Run what is needed for `tape` to have the value `index`."""
        with self.lock:
            if tape is self.tape:
                self.end_if_written()
                if tape.has_value(index):
                    return
            if tape.closed and tape.updates == self.execution.updates and not tape.is_eager:
                self.by_pytorch.run(tape, "a result of an earlier model call, which the loop had let go of, is read")
            if tape.closed:
                if tape.has_value(index):
                    return
                raise LoopError(
                    "a result of an earlier model call was not held by the loop when its step ran, so it was not computed: keep the model's output "
                    "alive until optimizer.step() to have it returned by the step"
                )
            if tape.backward_at is None:
                tape.num_reads += 1
                if self.buckets is None and (why := self.loss_forms.too_many(tape)) is not None:
                    self.by_pytorch.run_loss(tape, why)
                elif tape.num_reads > MAX_READS and tape.updates == self.execution.updates:
                    self.by_pytorch.make_differentiable(tape, f"values are read more than {MAX_READS} times before backward(), each after further calls")
                else:
                    self.execution.run_forward(tape, sorted({index, *tape.live()}), keep_buffers=False)
                return
            log.info("graphacc: a gradient or result is read between backward() and step(), so this step runs in parts")
            self.gradients.force(tape)

    def close(self, tape: Tape) -> None:
        tape.closed = True
        if tape.calls:
            self.template = tape
        self._remember(tape)
        if self.tape is tape:
            self.tape = None

    def _remember(self, tape: Tape) -> None:
        """Keep a finished recording to recognise later ones, which follow the first of those that are kept."""
        if self.recent and tape.is_another(self.recent[0]):
            return
        found = tape.as_template()
        others = [template for template in self.recent if not template.is_like(found)]
        self.recent = [found, *others][: MAX_TEMPLATES if self.buckets is None else MAX_BUCKETED_TEMPLATES]

    # ---- running

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer.step()``: one program where the loop is plain, parts of it where it is not.

        Returns:
            Whether it is done; if not, PyTorch's own step has to run, for which everything is on the host.
        """
        with self.lock, ranges.named("graphacc.step", self.steps + 1):
            self._settle_open_recording()
            binding = self.binding_of(optimizer)
            if binding.by_torch is not None:
                self.prepare_torch_step(binding)
                return False
            handles = self.gradients.used_by(optimizer, list(map(self.handles.__getitem__, binding.names)))
            names = tuple(map(_NAME, handles))
            if not names:
                return True
            if self._last_function is None:
                self.by_pytorch.note(f"the forward of {type(self.model).__name__}", "its gradients are not those of a call of the model: where the loop calls a method or a submodule, compile the submodule that it calls, or give the model a forward that does it")
            if changed := binding.note_changes():
                log.info("graphacc: %s changed between steps and became an input of the program", ", ".join(changed))
            self.losses.check()
            tape = self.gradients.pending
            kept = self.ways_back.keep(names, type(optimizer).__name__)
            try:
                self._step(binding, names)
            except NOT_COMPILED as error:
                if not self._step_in_parts(binding, names, tape, error):
                    return False
            for handle in handles if kept else ():
                handle.refresh()  # counts as a write, which autograd notices
            if not self.options.keep_gradients:
                self.gradients.spend(handles)
            self.steps += 1
            if tape is not None and tape.loss is not None:
                self.losses.watch(self.steps, tape)
            return True

    def _settle_open_recording(self) -> None:
        """A call without backward, of which the loop holds no result, has its effect on the buffers with the parameters that it was made with; for others see `WaysBack.keep`."""
        tape = self.tape
        if tape is not None and tape.backward_at is None and not tape.closed and self.writes_buffers(tape) and not tape.live():
            self.end_recording()

    def _step(self, binding: Binding, names: tuple[str, ...]) -> None:
        tape = self.gradients.pending
        codes = tape is not None and not tape.closed and tape.gradient_calls
        if tape is not None and codes and (self.options.keep_gradients or set(names) != set(tape.grad_bindings)):
            self.gradients.force(tape)  # another optimizer's step, or a reader, needs what the code on gradients gives, and the update would use it up
            tape = None
        whole = tape is not None and not tape.has_run and not self.gradients.accumulated and self.programs.runs_whole_steps and not self.options.keep_gradients
        if binding.by_fx:
            if tape is not None and not tape.has_run:
                self.execution.run_grad(tape)
            with self.fallback.fx_only():
                self.execution.run_update(tape, binding, names)
        elif whole and set(names) == set(tape.grad_bindings):
            self.execution.run_step(tape, binding, names)
        else:
            self.execution.run_update(tape, binding, names)

    def _step_in_parts(self, binding: Binding, names: tuple[str, ...], tape: Tape | None, error: Exception) -> bool:
        """After `error`: find out whether the model's gradients or the optimizer's update cannot be compiled, and do the other."""
        if self.options.capture == "fx":
            raise error
        if self.fallback.backend is not FX and not binding.by_fx:
            binding.by_fx = True
            try:
                self._step(binding, names)
                return True
            except NOT_COMPILED:
                binding.by_fx = False
        if tape is not None and not tape.closed:
            self.gradients.force(tape)
        try:
            self.execution.run_update(None, binding, names)
            return True
        except NOT_COMPILED as second:
            binding.by_torch = str(second)
            self.prepare_torch_step(binding)
            return False

    def prepare_torch_step(self, binding: Binding) -> None:
        """Bring to the host what the optimizer's own step reads: gradients and its state. Parameters come when they are read."""
        self.by_pytorch.note(f"the step of {type(binding.optimizer).__name__}", binding.by_torch or "")
        self.steps += 1
        self.ways_back.keep(tuple(name for name in binding.names if self.handles[name].has_grad), type(binding.optimizer).__name__)
        for name in binding.names:
            handle = self.handles[name]
            self.gradients.settle(handle)
            if isinstance(binding.optimizer, torch.optim.SparseAdam) and handle.host_grad is not None and not handle.host_grad.is_sparse:
                handle.host_grad = handle.host_grad.to_sparse(1)  # compiled programs give dense gradients, with zeros written out
        self.gradients.clip_on_host([self.handles[name] for name in binding.names])
        self.fetch_optimizer_state(binding)
        binding.state_on_device = False
        self.torch_steps.add(id(binding.optimizer))

    def runs_within(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step of an optimizer that holds this one runs now."""
        if not self.torch_steps:
            return False
        outer = (binding.optimizer for binding in self.bindings if id(binding.optimizer) in self.torch_steps)
        return any(inner is optimizer for other in outer for inner in inner_optimizers(other).values())

    @property
    def bindings(self) -> list[Binding]:
        """Of the optimizers that have stepped, and that the loop still has."""
        return list(self._bindings.values())

    def binding_of(self, optimizer: torch.optim.Optimizer) -> Binding:
        """What ties an optimizer to this model; made at first use."""
        binding = self._bindings.get(optimizer)
        if binding is None:
            binding = self._bindings[optimizer] = bind(self, optimizer)
        names, strangers = parameter_names(self, optimizer)  # groups can be added
        if binding.state_on_device and names != binding.names and (left := set(binding.names) - set(names)):
            self._bring_state_home(binding, left)
        binding.names = names
        if len(self._bindings) > 1:
            self._make_way(binding)
        if binding.misfit is not None and not dict.get(optimizer.state, binding.misfit.tensor):
            binding.by_torch = binding.misfit = None  # the loop has cleared the state
        if strangers and binding.by_torch is None:
            binding.by_torch = f"it holds {strangers} parameter(s) that do not belong to the compiled model"
        binding.adopt_state()
        return binding

    def _bring_state_home(self, binding: Binding, names: Iterable[str]) -> None:
        """The state of parameters that the loop has taken out of the optimizer's groups comes to ``optimizer.state``, where PyTorch leaves it."""
        with self.lock:
            self._drain()
            names = [name for name in names if name in self.handles]
            for name, tensors in () if binding.is_home() else self.programs.optimizer_state(names):
                binding.hold(self.handles[name].tensor, tensors)
            if self.programs.offload is None:
                self.programs.discard_state(names)
            binding.copies = {}  # of these alone, if any

    def _make_way(self, binding: Binding) -> None:
        """The devices have one state for each parameter: that of another optimizer of the same parameters comes to the host."""
        names = set(binding.names)
        for other in self.bindings:
            if other is not binding and other.state_on_device and not names.isdisjoint(other.names):
                self.fetch_optimizer_state(other)
                other.state_on_device = False

    def bring_home(self) -> None:
        """What the devices hold comes to the host, to be uploaded again in another layout; not what has no memory there (`Programs.adopt` moves that)."""
        with self.lock:
            for handle in self.handles.values():
                if not handle.frees_host:
                    handle.refresh()
            for binding in self.bindings:
                self.fetch_optimizer_state(binding)
                binding.state_on_device = False

    def _frozen(self) -> frozenset[str]:
        """Parameters that nothing trains."""
        return frozenset(handle.name for handle in self.handles.values() if handle.kind is Kind.PARAM and not handle.trains)

    def fetch_optimizer_state(self, binding: Binding) -> None:
        """Bring the optimizer's state to the host, into ``optimizer.state``; where it is there already, or the loop has put something else there, it stays."""
        if not binding.state_on_device or binding.is_home():
            return
        with self.lock:
            self._drain()
            for name, tensors in self.programs.optimizer_state(binding.names):
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
        self.programs.drain()
        self.deferred.require([handle])
        if handle.host_is_newer or not self.programs.holds(handle.kind, handle.name):
            return handle.host_value()
        return self.programs.exact(handle.kind, handle.name)

    def current_optimizer_state(self, binding: Binding) -> "dict[str, Tensor | tuple]":
        """"<parameter>/<state>" -> the optimizer's state where it is newest."""
        self.programs.drain()
        found: dict[str, Tensor | tuple] = {}
        known = self.programs.state_targets(binding.names if binding.state_on_device else ())
        for name in binding.names:
            targets = known.get(name, ())
            held = {} if targets else dict.get(binding.optimizer.state, self.handles[name].tensor, {})
            found |= {target: self.programs.exact(Kind.STATE, target) for target in targets}
            found |= {f"{name}/{key}": value for key, value in held.items() if isinstance(value, Tensor)}
        return found

    def other_optimizer_state(self, binding: Binding) -> OtherState:
        """The optimizer's state besides tensors of parameters, which is always on the host."""
        held = {name: dict.get(binding.optimizer.state, self.handles[name].tensor, {}) for name in binding.names}
        left_out = (Tensor, type(None), int, float) if binding.state_on_device else (Tensor, type(None))  # the devices have numbers as tensors
        found = {name: {key: value for key, value in values.items() if not isinstance(value, left_out)} for name, values in held.items()}
        own = {key: value for key, value in dict.items(binding.optimizer.state) if not isinstance(key, Tensor)}
        kinds = {} if is_separable(binding.optimizer) else kinds_of_state(binding.optimizer)
        return OtherState({name: values for name, values in found.items() if values}, own, kinds)

    def load(self, handle: Handle, read: Callable[[Index], np.ndarray]) -> None:
        """Replace the value of a parameter or buffer by one that is read block by block; every process reads what its devices hold."""
        with self.lock:
            self.before_write(handle)
            shape, dtype = handle.form
            if self.programs.offload is None:
                self.programs.load_blocks(handle.kind, handle.name, shape, dtype, read)
                handle.mark_loaded()
            else:  # the host has the exact values
                handle.overwrite(torch_view(read(whole(shape))))
                handle.writes += 1

    def blocks(self, kind: Kind, target: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterable[Index]:
        """What this process reads of a value that `load` or `load_optimizer_state` replaces."""
        on_host = not self.programs.keeps_state if kind is Kind.STATE else self.programs.offload is not None
        return [whole(shape)] if on_host else needed(*self.programs.layout_of(kind, target, shape, dtype))

    def load_optimizer_state(
        self, binding: Binding, state: Mapping[str, tuple[tuple[int, ...], torch.dtype, Callable[[Index], np.ndarray]]], others: OtherState
    ) -> None:
        """Replace an optimizer's state.

        Args:
            state: "<parameter>/<state>" -> shape, dtype and where it is read.
            others: as `other_optimizer_state` gives it.
        """
        with self.lock:
            self.programs.drain()
            optimizer, on_devices = binding.optimizer, self.programs.keeps_state
            note_kinds_of_state(optimizer, others.kinds)
            known = {name for name in binding.names if dict.get(optimizer.state, self.handles[name].tensor)}
            dict.clear(optimizer.state)
            if on_devices:
                self.programs.discard_state(binding.names, but=state)
            for target, (shape, dtype, read) in state.items():
                name, _, key = target.rpartition("/")
                if on_devices:
                    self.programs.load_blocks(Kind.STATE, target, shape, dtype, read)
                if not on_devices or name in known or name in others.parameters:
                    value = _without_values(shape, dtype) if on_devices else torch_view(read(whole(shape)))
                    number = None if is_separable(optimizer) else python_number(optimizer, key, value)
                    dict.setdefault(optimizer.state, self.handles[name].tensor, {})[key] = value if number is None else number
            for name, values in others.parameters.items():
                dict.setdefault(optimizer.state, self.handles[name].tensor, {}).update(values)
            dict.update(optimizer.state, others.keys)
            binding.state_on_device, binding.copies, binding.given_out = on_devices, {}, not on_devices

    def restart(self, *, seed: int, counter: int, steps: int) -> None:
        """Forget what was recorded, and continue the random numbers and the count of steps from a checkpoint. Gradients stay, as ``load_state_dict`` leaves them."""
        self.programs.drain()
        if self.tape is not None:
            self.close(self.tape)
        self.tape = self.template = None
        self.recent.clear()
        self.keys.restart(seed, counter)
        self.steps = steps


def _without_values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a capture is shown of state that is on the devices, where it cannot make it: an optimizer's constructor has made it, say."""
    return torch.empty(shape, dtype=dtype) if shape else torch.zeros((), dtype=dtype)


def _form(args: tuple, kwargs: dict) -> tuple:
    """Shapes and dtypes of a call's tensors."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _is_parametrization_with_buffers(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) and any(True for _ in module.buffers())


def _forms(handles: Mapping[str, Handle]) -> dict[str, tuple]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: (handle.tensor.dtype, handle.tensor.shape) for name, handle in handles.items()}


