"""The engine of one compiled model: decides which program to run at each point of the loop, and runs it.

A loop of forward, backward and ``optimizer.step()`` runs one "step" program. A loop that accumulates gradients runs a
"grad" program per backward and an "update" program per step. Evaluation, and values that are read before backward,
run a "forward" program. All programs share one state on the devices.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc.capture import FX, hyperparameters, init_optimizer_state
from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.loop import build, collector
from graphacc.loop.fakes import Fakes
from graphacc.loop.fallback import Fallback
from graphacc.loop.losses import LossWatch
from graphacc.loop.managed import SPENT, Handle, SpentGradient, manage
from graphacc.loop.optimizers import Binding, bind, parameter_names
from graphacc.loop.programs import Compiled, Programs
from graphacc.loop.promise import Promise
from graphacc.loop.tape import Tape

log = logging.getLogger("graphacc")

_GOLDEN = 0x9E3779B9
"""Multiplied with a microbatch's number, spreads it over 32 bits (the golden ratio), so that its random key is its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for besides the strategy."""

    seed: int  # first word of every random key
    max_grad_norm: float | None = None  # clip the total norm of the gradients that an optimizer's step uses
    nan_loss: str = "warn"  # "warn", "stop" or "ignore" when a loss is not finite
    capture: str = "auto"  # "fx", "lazy", or "auto": lazy tensors where torch.fx refuses


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """The model as a recorded function; equal where the same code would run."""

    engine: "Engine" = dataclasses.field(compare=False, repr=False)
    mode: tuple  # training flag of every module, requires_grad of every parameter

    def __call__(self, *args, **kwargs):
        """Call the model in the mode in which the loop called it, which may be another by now."""
        modules, flags = list(self.engine.model.modules()), self.mode[0]
        now = [module.training for module in modules]
        try:
            _set_training(modules, flags)
            with self.engine.direct_calls():
                return self.engine.model(*args, **kwargs)
        finally:
            _set_training(modules, now)


class Engine:
    """Everything behind one compiled model."""

    def __init__(self, model: nn.Module, programs: Programs, options: Options):
        self.model = model
        self.programs = programs
        self.options = options
        self.handles = manage(self, model)
        self.fakes = Fakes(model, self.handles)
        self.tape: Tape | None = None  # the recording that a call of the model would add to
        self.template: Tape | None = None  # the last finished recording, to recognise the next one quickly
        self.pending: Tape | None = None  # had its backward, not yet run
        self.accumulated: set[str] = set()  # parameters whose gradient so far lies on the devices
        self.bindings: dict[int, Binding] = {}
        self.seed = options.seed  # first word of the random key
        self.counter = 0  # of model calls; second word of the random key
        self.steps = 0
        self.hide_gradients = False
        self.capturing = False  # the model's own code runs, on fake tensors
        self.host_grads: dict[str, Tensor] = {}  # gradients that the loop wrote, to be uploaded before they are added to
        self.losses = LossWatch(options.nan_loss)
        self.fallback = Fallback(options.capture, programs.strategy)
        self._persistent = set(model.state_dict(keep_vars=True))
        self._joints: dict[tuple, build.Step] = {}

    # ---- calls of the model

    @contextlib.contextmanager
    def direct_calls(self) -> Iterator[None]:
        """Calls of the model inside run its own code instead of being recorded."""
        before, self.capturing = self.capturing, True
        try:
            yield
        finally:
            self.capturing = before

    def call(self, original: Callable, args: tuple, kwargs: dict):
        """A call of the model by the user's loop."""
        if self.capturing:
            return original(*args, **kwargs)
        trains = torch.is_grad_enabled() and any(h.tensor.requires_grad for h in self.handles.values())
        function = ModelCall(self, self._mode())
        if trains:
            return self._recording().record(function, args, kwargs)
        tape = self._new_tape()
        result = tape.record(function, args, kwargs)
        self._run_forward(tape, tape.live(), keep_buffers=True)
        tape.closed = True
        return pytree.tree_map_only(Promise, lambda promise: tape.value(promise.index), result)

    def _mode(self) -> tuple:
        with torch._C.DisableTorchFunctionSubclass():
            grads = tuple(handle.tensor.requires_grad for handle in self.handles.values())
        return tuple(module.training for module in self.model.modules()), grads

    def _recording(self) -> Tape:
        """The tape that a model call is added to: the open one while the loop still holds results of it."""
        tape = self.tape
        if tape is None or tape.closed or tape.backward_at is not None or not tape.live():
            if tape is not None and not tape.closed and tape.backward_at is None:
                self._discard(tape)
            tape = self.tape = self._new_tape()
        return tape

    def _new_tape(self) -> Tape:
        self.counter += 1
        tape = Tape(self, self.counter)
        tape.parameter_versions = {name: handle.version for name, handle in self.handles.items()}
        return tape

    def _discard(self, tape: Tape) -> None:
        """A recording without backward ends: its only effect is on the buffers."""
        if any(isinstance(call.function, ModelCall) for call in tape.calls) and any(True for _ in self.model.buffers()):
            self._run_forward(tape, [], keep_buffers=True)
        tape.closed = True

    def records_parameters(self) -> bool:
        """Whether a function of a parameter belongs on the tape: between a model call and its backward."""
        tape = self.tape
        return not self.capturing and tape is not None and not tape.closed and tape.backward_at is None and bool(tape.calls)

    def fake(self, value) -> Tensor:
        return self.fakes.of(value)

    def run_fake(self, function: Callable, args: tuple, kwargs: dict):
        if not isinstance(function, ModelCall):
            return self.fakes.run(function, args, kwargs)
        with self.direct_calls():
            return self.fallback.attempt(lambda: self._call_on_fakes(args, kwargs))

    def _call_on_fakes(self, args: tuple, kwargs: dict):
        call = self.fakes.call_model if self.fallback.backend is FX else self.fakes.call_model_lazily
        return call(args, kwargs)

    # ---- gradients

    def backward(self, tape: Tape) -> None:
        """``loss.backward()`` was recorded on `tape`."""
        self._settle_pending()
        self._refuse_spent()
        self.pending = tape
        tape.outputs = tape.live()
        for output in self.fallback.attempt(lambda: self._joint(tape)).outputs:
            if output.kind is not Kind.GRAD:
                continue
            handle = self.handles[output.target]
            if isinstance(handle.grad, Tensor):
                self.accumulated.add(handle.name)
                self.host_grads[handle.name] = handle.grad
            index = tape.add_value(self.fakes.gradient_of(handle))
            tape.grad_values[handle.name] = tape.grad_bindings[handle.name] = index
            handle.grad = tape

    def _settle_pending(self) -> None:
        """Before another backward: the gradients of the last one go to the accumulators."""
        tape, self.pending = self.pending, None
        if tape is None or tape.has_run:
            return
        if tape.gradient_calls or tape.grad_bindings != tape.grad_values:
            self._force(tape)
        else:
            self._run_grad(tape)

    def _refuse_spent(self) -> None:
        spent = [name for name, handle in self.handles.items() if handle.grad is SPENT]
        if spent:
            raise LoopError(
                f"backward() after a step without zero_grad(): PyTorch would add to the old gradients, of {spent[0]!r} and "
                f"{len(spent) - 1} more, which the compiled step consumed; call optimizer.zero_grad() or model.zero_grad() before backward()"
            )

    def read_grad(self, handle: Handle) -> Tensor | None:
        """``parameter.grad``."""
        if self.hide_gradients or handle.grad is None:
            return None
        if handle.grad is SPENT:
            return SpentGradient(handle)
        if isinstance(handle.grad, Tape):
            return handle.grad.promise(handle.grad.grad_bindings[handle.name])
        return handle.grad

    def write_grad(self, handle: Handle, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        if self.hide_gradients:
            return
        name, tape = handle.name, handle.grad
        if isinstance(value, Promise) and value.tape is self.pending and not value.tape.closed:
            value.tape.grad_bindings[name] = value.index
            handle.grad = value.tape
            return
        handle.grad = None if value is None else value.detach().clone()
        self.accumulated.discard(name)
        self.host_grads.pop(name, None)
        if isinstance(tape, Tape):
            tape.grad_bindings.pop(name, None)
            if tape is self.pending and not tape.grad_bindings:
                self._drop_pending()

    def _drop_pending(self) -> None:
        """All gradients of the pending backward were cleared: what remains is its effect on buffers, and its values."""
        tape, self.pending = self.pending, None
        if not tape.has_run:
            self._run_forward(tape, sorted({*tape.outputs, tape.loss}), keep_buffers=True)
        self._close(tape)

    # ---- values

    def fetch(self, handle: Handle) -> Tensor:
        """The current value of a parameter or buffer, from the devices."""
        return self.programs.fetch(handle.kind, handle.name)

    def materialize(self, tape: Tape, index: int) -> None:
        """Run what is needed for `tape` to have the value `index`."""
        if tape.closed:
            raise LoopError(
                "a result of an earlier model call was not held by the loop when its step ran, so it was not computed: keep the model's output "
                "alive until optimizer.step() to have it returned by the step"
            )
        if tape.backward_at is None:
            self._run_forward(tape, sorted({index, *tape.live()}), keep_buffers=False)
            return
        log.info("graphacc: a gradient or result is read between backward() and step(), so this step runs in parts")
        self._force(tape)

    def _force(self, tape: Tape) -> None:
        """Compute everything on the tape now; the gradients become ordinary host tensors."""
        if not tape.has_run:
            self._run_grad(tape)
        grads = {name: self.programs.fetch(Kind.GRAD, name) for name in tape.grad_values}
        code = build.GradientCode(tape=tape, names=tuple(tape.grad_bindings), max_norm=None)
        externals = [self._whole_external(tape, i) for i in code.external_indices]
        values = [tape.value(i) for i in code.forward_values]
        env = code.replay(grads, [*externals, *values, *(self._refreshed(handle) for handle in code.handles)])
        for value, tensor in env.items():
            if not tape.has_value(value):
                tape.fulfil(value, tensor)
        for name, value in tape.grad_bindings.items():
            self.handles[name].grad = env[value]
        self.accumulated -= set(tape.grad_values)
        if self.pending is tape:
            self.pending = None
        self._close(tape)

    def _whole_external(self, tape: Tape, index: int) -> Tensor:
        if tape.externals[index] is not tape.sources[index]:
            raise LoopError(
                f"{tape.external_paths[index]} is this process's part of the batch, and code on gradients that is run outside of the step "
                'reads it: use batch="global", or leave the gradients unread until optimizer.step()'
            )
        return tape.externals[index]

    def _refreshed(self, handle: Handle) -> Tensor:
        handle.refresh()
        return handle.host_value()

    def _close(self, tape: Tape) -> None:
        tape.closed = True
        self.template = tape
        if self.tape is tape:
            self.tape = None

    # ---- running

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``: one program where the loop is plain, parts of it where it is not."""
        binding = self.binding_of(optimizer)
        names = tuple(name for name in binding.names if self.handles[name].grad not in (None, SPENT))
        if not names:
            return
        if changed := binding.note_changes():
            log.info("graphacc: %s changed between steps and became an input of the program", ", ".join(changed))
        self.losses.check()
        tape = self.pending
        whole = tape is not None and not tape.has_run and not self.accumulated and self.programs.runs_whole_steps
        if whole and set(names) == set(tape.grad_values):
            self._run_step(tape, binding, names)
        else:
            self._run_update(tape, binding, names)
        for name in names:
            self.handles[name].grad = SPENT
        self.steps += 1
        if tape is not None:
            self.losses.watch(self.steps, tape)

    def binding_of(self, optimizer: torch.optim.Optimizer) -> Binding:
        """What ties an optimizer to this model; made at first use."""
        if id(optimizer) not in self.bindings:
            self.bindings[id(optimizer)] = bind(self, optimizer)
        binding = self.bindings[id(optimizer)]
        binding.names = parameter_names(self, optimizer)  # groups can be added
        return binding

    def _joint(self, tape: Tape) -> build.Step:
        key = (self.fallback.backend.name, tape.key(tape.forward_calls), tape.loss, tuple(tape.outputs))
        if key not in self._joints:
            strategy = self.programs.strategy
            self._joints[key] = self._capture(build.joint_graph, tape, tape.outputs, strategy.precision, strategy.microbatches)
        return self._joints[key]

    def _run_forward(self, tape: Tape, outputs: Sequence[int], *, keep_buffers: bool) -> None:
        """Compute values of the forward part."""
        wanted = [index for index in outputs if not tape.has_value(index)]
        compiled = self._program(
            "forward",
            {**self._forward_aspects(tape), "results": tuple(wanted), "buffers kept": keep_buffers},
            lambda: self._capture(build.forward_graph, tape, wanted, self.programs.strategy.precision, keep_buffers),
        )
        self._fulfil(tape, self._run(compiled, tape))

    def _run_grad(self, tape: Tape) -> None:
        """Forward and backward; adds to the gradients on the devices."""
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
        parts = self.programs.run_microbatches(compiled, feeds)
        self._mark_stale(compiled)
        tape.fulfil(tape.loss, lambda: torch.stack([part[Kind.LOSS, "loss"]() for part in parts]).sum())
        for index in tape.outputs:
            tape.fulfil(index, build.from_microbatches([part[Kind.USER, str(index)] for part in parts], tape.values[index]))
        self.accumulated |= set(tape.grad_values)
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
        compiled = self._program(
            "step",
            {**self._forward_aspects(tape), "results": tuple(tape.outputs), **_update_aspects(binding, code)},
            lambda: build.step_graph(self._joint(tape), self._capture(build.update_graph, binding.optimizer, code, binding.dynamic)),
        )
        self._upload_optimizer_state(compiled, binding)
        self._fulfil(tape, self._run(compiled, tape, binding=binding))
        self.pending = None
        self._close(tape)

    def _run_update(self, tape: Tape | None, binding: Binding, names: tuple[str, ...]) -> None:
        """The update alone, from gradients on the devices (and from the host, where the loop wrote them)."""
        if tape is not None and not tape.has_run:
            self._run_grad(tape)
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
            if isinstance(grad := self.handles[name].grad, Tensor):
                self.programs.put(compiled, Kind.GRAD, name, grad)
        self._upload_optimizer_state(compiled, binding)
        self._fulfil(tape, self._run(compiled, tape, binding=binding))
        self._close(tape)

    def _gradient_code(self, tape: Tape, names: tuple[str, ...]) -> build.GradientCode:
        made = {*tape.grad_values.values(), *(index for call in tape.gradient_calls for index in call.results)}
        results = tuple(index for index in tape.live() if index in made and not tape.has_value(index))
        return build.GradientCode(tape=tape, names=names, max_norm=self.options.max_grad_norm, results=results)

    def _capture(self, build_graph: Callable[..., build.Step], *args) -> build.Step:
        with self.direct_calls(), collector.paused():
            return build_graph(self.fallback.backend, self.model, *args)

    def _program(self, kind: str, aspects: dict[str, object], capture: Callable[[], build.Step]) -> Compiled:
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
        self._mark_stale(compiled)
        return fetched

    def _feeds(
        self, compiled: Compiled, tape: Tape, *, binding: Binding | None = None, microbatch: int | None = None
    ) -> dict[tuple[Kind, str], object]:
        """The inputs of a program that are no state."""
        seed = self.seed ^ ((microbatch or 0) * _GOLDEN & 0xFFFFFFFF)
        feeds: dict[tuple[Kind, str], object] = {(Kind.KEY, "key"): [seed, tape.counter & 0xFFFFFFFF]}
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

    def _mark_stale(self, compiled: Compiled) -> None:
        for item in compiled.graph.outputs:
            if item.kind in (Kind.PARAM, Kind.BUFFER):
                self.handles[item.target].host_is_stale = True

    def _upload(self, compiled: Compiled, tape: Tape) -> None:
        """Parameters and buffers that are not on the devices yet, or were written on the host."""
        for item in compiled.graph.inputs:
            if item.kind not in (Kind.PARAM, Kind.BUFFER):
                continue
            handle = self.handles.get(item.target)
            if handle is not None and (handle.host_is_newer or not self.programs.holds(item.kind, item.target)):
                if compiled.kind != "update" and handle.version != tape.parameter_versions.get(handle.name, handle.version):
                    raise LoopError(
                        f"{handle.name!r} was written between the model's call and optimizer.step(), but the compiled step runs the call "
                        "only then: write parameters and buffers before the call or after the step"
                    )
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
        for name in binding.names:
            if tensors := self.programs.optimizer_state(name):
                binding.optimizer.state[self.handles[name].tensor].update(tensors)

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
        self.accumulated.clear()
        self.host_grads.clear()
        for handle in self.handles.values():
            handle.grad = None
        self.seed, self.counter, self.steps = seed, counter, steps

    def _fulfil(self, tape: Tape, fetched: dict[tuple[Kind, str], Callable[[], Tensor]]) -> None:
        for (kind, target), fetch in fetched.items():
            tape.fulfil(tape.loss if kind is Kind.LOSS else int(target), fetch)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag


def _update_aspects(binding: Binding, code: build.GradientCode) -> dict[str, object]:
    return {"optimizer settings": binding.key(), "gradient code": code.key()}
