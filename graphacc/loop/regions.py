"""Regions: recorded calls as one function of PyTorch's autograd, whose forward and backward are compiled programs.

Where gradients have to flow between a recording and code that PyTorch runs (a module in front of the model or after it, another compiled
model as in ``D(G(z))``, an island inside the model), the recorded calls run at once, as a `torch.autograd.Function`. Its inputs are the tensors that
require a gradient and the model's parameters. Its backward is a program that computes the forward part again, with the same
random numbers and buffers, and the gradients of the inputs and parameters, which are ordinary tensors on the host. A backward that is
itself differentiated (``create_graph=True``) is run by PyTorch, which computes the forward part again, too.
"""

import copy
import dataclasses
import typing
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphacc.capture import FX
from graphacc.capture.randomness import keyed_randomness
from graphacc.errors import CaptureError, LoopError, LoweringError
from graphacc.graph import Kind
from graphacc.loop import build
from graphacc.loop.tape import Call, Param, Tape
from graphacc.runtime.distributed import process_count

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine


@dataclasses.dataclass
class Use:
    """What calls that run as a region cost so far."""

    name: str
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0  # on the host, with waiting for the devices, and without compiling

    def __str__(self) -> str:
        each = 1e3 * self.seconds / max(1, self.forwards)
        again = f", {self.backwards} times backward, which computes the forward part again" if self.backwards else ""
        return f"{self.name} runs compiled, as a function of PyTorch's autograd: {self.forwards} times forward{again}; {each:.1f} ms on the host for each"


def possible(engine: "Engine", tape: Tape | None = None) -> bool:
    """Whether recorded calls can be a region: one program gives the whole batch's results, and its backward comes later."""
    strategy = engine.programs.strategy
    at_once = strategy.microbatches == 1 or engine.programs.chose_microbatches
    whole = strategy.pp == 1 and at_once and not engine.programs.local_batch and process_count() == 1
    return whole and engine.fallback.backend is FX and not engine.by_pytorch.differentiates_twice and (tape is None or (tape.backward_at is None and not tape.closed))


def run(engine: "Engine", tape: Tape, *, model_alone: bool = False) -> None:
    """Run the calls of a recording as a region; functions of the model's results by PyTorch, if the loop holds both.

    Leaves the recording as it is where a region cannot do it.

    Args:
        model_alone: functions of the model's results by PyTorch in any case.

    Raises:
        LoopError, CaptureError, LoweringError: see `Region.run`.
    """
    calls, outputs = tape.forward_calls, tape.live()
    path = next((call.function.path for call in calls if engine.is_model(call.function)), "")
    rest = []
    if model_alone or (len(calls) > 1 and any(depends(tape.values[one], tape.values[other]) for one in outputs for other in outputs if one != other)):
        calls, rest = parted(tape)
        read = {index for call in rest for index in tape.reads(call)}
        outputs = [index for call in calls for index in call.results if index in {*read, *outputs}]
        if not calls or any(depends(tape.values[one], tape.values[other]) for one in outputs for other in outputs if one != other):
            return
    part = copy.copy(tape)
    part.calls = calls
    region = Region(engine, part, engine.name_of(path), outputs)
    with engine.by_pytorch.timed() as found:
        region.run()
    tape.has_run = True
    if not path:  # `Engine.call_part` counts the others, with what recording them takes
        region.use.forwards += 1
        region.use.seconds += found.seconds
    if rest and not _run_rest(engine, tape, rest, {index: tape.value(index) for index in outputs}):
        return
    tape.is_eager, tape.region = True, region
    engine.close(tape)


def parted(tape: Tape) -> tuple[list[Call], list[Call]]:
    """The calls of the model, and the loop's functions of their results; no calls where that is another order of what follows from each other."""
    calls = tape.forward_calls
    models = [tape.engine.is_model(call.function) for call in calls]
    inside, rest = ([call for call, is_model in zip(calls, models) if is_model is wanted] for wanted in (True, False))
    made = {index for call in rest for index in call.results}
    moved = rest if models.count(True) > 1 else []  # behind a call of the model that they stood before
    follows = any(index in made for call in inside for index in tape.reads(call)) or not models[0]
    buffers = {name for name, handle in tape.engine.handles.items() if handle.kind is Kind.BUFFER}
    stays = any(call.draws or call.writes or call.replaces is not None or any(isinstance(leaf, Param) and leaf.name in buffers for leaf in call.leaves) for call in moved)
    return ([], rest) if follows or stays or any(call.writes or call.repeats is not None for call in inside[1:]) else (inside, rest)


def _run_rest(engine: "Engine", tape: Tape, calls: Sequence[Call], env: dict[int, Tensor]) -> bool:
    """Let PyTorch run recorded functions of a region's results; False if they draw random numbers, whose place in the program it does not know."""
    externals = {index: tape.whole_external(index) for call in calls for index in call.externals}
    drawn = keyed_randomness(tape.seed, tape.counter)
    with engine.by_pytorch.buffers_kept(True), engine.by_pytorch.on_host(tape), torch.enable_grad(), torch.autocast("cpu", enabled=False), drawn:
        tape.replay(calls, env, externals, {name: handle.tensor for name, handle in engine.handles.items()})
    if drawn.count:
        return False
    for value, tensor in env.items():
        tape.fulfil(value, tensor)
    return True


class Region:
    """The calls of one recording, as a function of autograd.

    Args:
        tape: has no backward.
        name: what it is called in `model.explain()`.
        outputs: the values that it gives.
    """

    def __init__(self, engine: "Engine", tape: Tape, name: str, outputs: list[int]):
        self.engine = engine
        self.tape = tape
        self.outputs = outputs
        self.inputs = tape.inputs
        self.use = engine.regions.setdefault(name, Use(name))
        self.handles = [handle for handle in engine.handles.values() if handle.kind is Kind.PARAM and handle.tensor.requires_grad]
        self._buffers: dict[str, Tensor] = {}  # what backward reads of the buffers as they were

    @property
    def num_differentiable(self) -> int:
        return sum(self.tape.values[index].requires_grad for index in self.outputs)

    def run(self) -> None:
        """Compute the outputs, as results of autograd.

        Raises:
            LoopError: a parameter or an input was changed since the calls were recorded.
            CaptureError, LoweringError: they cannot be compiled.
        """
        engine, tape = self.engine, self.tape
        self._check_unchanged()
        engine.settle_buffers(ahead=tape, are_written=engine.writes_buffers(tape))
        self._buffers = self._buffers_before()
        with engine.fallback.fx_only():
            engine.execution.run_forward(tape, self.outputs, keep_buffers=True)
        tape.has_run = True
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
            tensors = [*(tape.sources[index] for index in self.inputs), *(handle.tensor for handle in self.handles)]
            results = typing.cast("tuple[Tensor, ...]", _Compiled.apply(self, *tensors))
        self._results = [weakref.ref(result) for result in results]
        for index, result in zip(self.outputs, results):
            tape.fulfil(index, result)

    def _check_unchanged(self) -> None:
        if self.tape.updates != self.engine.execution.updates:
            raise LoopError(
                "backward() reaches a model call whose parameters an optimizer's step has changed since (PyTorch raises an error there, too, if autograd had saved one of them): "
                "call the model again after the step, or backward() before it"
            )
        self.engine.by_pytorch.check_parameters_unchanged(self.tape)

    def _buffers_before(self) -> dict[str, Tensor]:
        """Copies of the buffers that forward changes and backward reads (BatchNorm's backward does not read its statistics)."""
        engine = self.engine
        if not engine.writes_buffers(self.tape):
            return {}
        read = engine.buffers_read.get(self._key)  # None until its backward was compiled
        handles = [handle for handle in engine.handles.values() if handle.kind is Kind.BUFFER and (read is None or handle.name in read)]
        for handle in handles:
            handle.refresh()
        return {handle.name: handle.host_value().clone() for handle in handles}

    def _buffers_of_backward(self) -> dict[str, Tensor]:
        """Copies of all buffers as the calls found them, as far as their backward reads them: autograd's graph keeps some, and must not see them change."""
        handles = [handle for handle in self.engine.handles.values() if handle.kind is Kind.BUFFER]
        for handle in handles:
            handle.refresh()
        return {handle.name: self._buffers.get(handle.name, handle.host_value()).clone() for handle in handles}

    @property
    def _key(self) -> tuple:
        return self.tape.forward_key

    def check_hooked(self, index: int, what: str) -> None:
        """Refuse to look at the gradient of a result that others depend on: paths through them are not seen there.

        Raises:
            LoopError: another result depends on the result `index`.
        """
        if any(depends(self.tape.values[other], self.tape.values[index]) for other in self.outputs if other != index):
            raise LoopError(
                f"{what} on a result of a compiled call of which another result is computed: the call became one function of autograd, where the gradients "
                "that reach it through the other are not seen. Do it right after the model's call, before a result is used by code that PyTorch runs"
            )

    def _check_hooks(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for index, ref in zip(self.outputs, self._results):
                result = ref()
                if result is not None and (result._backward_hooks or (result.retains_grad and not result.is_leaf)):
                    self.check_hooked(index, "a hook or retain_grad()")

    def values(self) -> list[Tensor]:
        """What forward gave."""
        return [self.tape.value(index).detach().to(self.tape.values[index].dtype) for index in self.outputs]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs and parameters."""
        self._check_hooks()
        given = {index: grad for index, grad in zip(self.outputs, grads) if grad is not None}
        with self.engine.lock, self.engine.by_pytorch.timed() as time:
            self._check_unchanged()
            fetched = self._run_backward(given)
        self.use.backwards += 1
        self.use.seconds += time.seconds
        wanted = [(Kind.USER, f"input {index}") for index in self.inputs] + [(Kind.GRAD, handle.name) for handle in self.handles]
        return [fetched[key]() if key in fetched else None for key in wanted]

    def _run_backward(self, given: dict[int, Tensor]) -> dict:
        engine, tape, programs = self.engine, self.tape, self.engine.programs

        def capture() -> build.Step:
            with engine.fallback.fx_only():  # as forward was, whatever another program needed since
                return engine.execution.capture(build.vjp_graph, tape, tuple(given), self.inputs, programs.strategy.precision)

        aspects = {**engine.execution.forward_aspects(tape), "results": tuple(given), "inputs": tuple(self.inputs)}
        compiled = programs.get("backward", aspects, capture)
        engine.buffers_read.setdefault(self._key, compiled.buffers_read)
        engine.execution.upload(compiled, tape)
        feeds = engine.execution.feeds(compiled, tape) | {(Kind.BATCH, build.gradient_path(index)): grad for index, grad in given.items()}
        now = {}
        try:
            for name in self._buffers.keys() & compiled.buffers_read:
                now[name] = programs.state.find(Kind.BUFFER, name)
                programs.put(compiled, Kind.BUFFER, name, self._buffers[name])
            fetched = programs.run(compiled, feeds, keep_gradients=False)
            engine.execution.note_run(compiled)
        finally:
            for array, item in now.values():
                programs.state.set(item, array)
        engine.verifier.check_backward(compiled, capture, tape, seeds=given, inputs=self.inputs, buffers=self._buffers, fetched=fetched)
        return fetched

    def gradients_by_pytorch(self, inputs: Sequence[Tensor], grads: Sequence[Tensor | None], twice: bool) -> list[Tensor | None]:
        """The same by PyTorch, which computes the forward part again on the host.

        Args:
            inputs: the tensors from outside that require a gradient.
            twice: the gradients have to be differentiable.
        """
        engine, tape = self.engine, self.tape
        with engine.lock, torch.enable_grad():
            self._check_unchanged()
            parameters = [handle.tensor for handle in self.handles]
            with torch._C.DisableTorchFunctionSubclass():
                # What lies before the inputs in PyTorch's graph reaches the same parameters, and other inputs: the gradients of this region stop here.
                sources = [x.view_as(x) if twice else x.detach().requires_grad_() for x in inputs]
                weights = [x.view_as(x) for x in parameters] if twice else parameters
                given = {index: x.clone() for index, x in zip(self.inputs, sources)}  # which it may write
                stand_ins = self._buffers_of_backward()
            if twice:
                stand_ins |= {handle.name: weight for handle, weight in zip(self.handles, weights)}
            env = engine.by_pytorch.replay(tape, given, stand_ins)
            pairs = [(env[index], grad) for index, grad in zip(self.outputs, grads) if grad is not None and env[index].requires_grad]
            with torch._C.DisableTorchFunctionSubclass():
                return list(_grad(pairs, [*sources, *weights], twice))


def depends(one: Tensor, other: Tensor) -> bool:
    """Whether `one` is computed from `other`, by their places in autograd's graph."""
    if one.grad_fn is None or other.grad_fn is None:
        return False
    seen: set[object] = set()
    stack: list[Any] = [one.grad_fn]
    while stack:
        function = stack.pop()
        if function is other.grad_fn:
            return True
        if function is not None and function not in seen:
            seen.add(function)
            stack.extend(following for following, _ in function.next_functions)
    return False


def _grad(pairs: list[tuple[Tensor, Tensor]], wanted: list[Tensor], twice: bool) -> Sequence[Tensor | None]:
    if not pairs:
        return [None] * len(wanted)
    outputs, seeds = zip(*pairs)
    return torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, create_graph=twice)


class _Compiled(torch.autograd.Function):
    """A region in PyTorch's graph."""

    @staticmethod
    def forward(ctx, region: Region, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        ctx.save_for_backward(*tensors[: len(region.inputs)])  # PyTorch notices writes into them
        ctx.set_materialize_grads(False)
        values = region.values()
        ctx.mark_non_differentiable(*(value for index, value in zip(region.outputs, values) if not region.tape.values[index].requires_grad))
        return tuple(values)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        region: Region = ctx.region
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            region.engine.by_pytorch.note_differentiated_twice()
            return None, *region.gradients_by_pytorch(inputs, grads, twice=True)
        try:
            return None, *region.gradients(grads)
        except (CaptureError, LoweringError) as error:
            region.engine.by_pytorch.refuse_region(region.tape, error)
            return None, *region.gradients_by_pytorch(inputs, grads, twice=False)
