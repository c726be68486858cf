"""The check of a compiled loop against plain PyTorch, while it runs.

While it is on, every program's inputs are copied to the host before it runs, PyTorch computes the same from these copies, with the
same random numbers, and the results are compared. Every program starts from the compiled values, so errors do not add up over steps.

A tensor may differ by `tolerances.STEP` of its largest change. Where it differs by more, PyTorch runs again from inputs that
are changed by one unit in the last place: what that does to its values (and what gradients that are uncertain by as much do to
the optimizer's result: Adam makes a full step out of a gradient that is rounding noise) is accepted too. What is left is an error.
The pass at fault is found by building the program again without each optional pass.
"""

import contextlib
import copy
import dataclasses
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from graphacc.capture import FX
from graphacc.capture.borrow import TensorsNow, borrowed, substitute
from graphacc.capture.guards import dense_gradients
from graphacc.capture.model import computing_in
from graphacc.capture.optimizer import is_absent, is_separable, plain, run_step, stand_in
from graphacc.capture.randomness import keyed_randomness
from graphacc.capture.update import FIRST_STREAM
from graphacc.errors import StrategyError, VerificationError
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.loop import build
from graphacc.loop.execution import microbatch_seed
from graphacc.loop.managed import handle_of
from graphacc.loop.optimizers import Binding, python_number
from graphacc.loop.programs import STATE_KINDS, Compiled, Programs
from graphacc.loop.tape import Tape
from graphacc.loop.tolerances import NOISE, ROUNDING, STEP, coarsest, largest, widened
from graphacc.passes.pipeline import build_pipeline
from graphacc.runtime import TrainState
from graphacc.runtime.distributed import process_count

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine

Key = tuple[Kind, str]
Values = dict[Key, Tensor]

NO_PASS = "capture, partition or lowering"

_ORDER = (Kind.LOSS, Kind.USER, Kind.GRAD, Kind.BUFFER, Kind.PARAM, Kind.STATE)
"""Of what differs, the first is reported: the forward's values come before those that are computed from them."""


@dataclasses.dataclass
class Report:
    """What was verified so far."""

    steps: int = 0  # calls of an optimizer's step
    programs: int = 0  # runs of programs
    worst: "Difference | None" = None  # the one that is nearest to its tolerance, or furthest above
    seconds: float = 0.0  # that verification took

    def lines(self) -> list[str]:
        if not self.programs:
            return []
        worst = "" if self.worst is None else f"worst relative difference {self.worst.relative:.2g} ({self.worst.allowed:.2g} allowed), of {self.worst.name}; "
        return [f"verified: {self.steps} steps ({self.programs} program runs) against PyTorch; {worst}{self.seconds:.2f} s"]

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "verified: nothing yet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one value is from PyTorch's."""

    kind: Kind
    target: str
    largest: float  # absolute difference, where it is furthest above its tolerance
    got: float  # the two values there
    expected: float
    scale: float  # what differences are relative to
    tolerance: float  # absolute, there
    ratio: float  # of the difference to the tolerance

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else self.largest

    @property
    def allowed(self) -> float:
        """The relative difference that is accepted: more than the table's where rounding alone makes more."""
        return self.tolerance / self.scale if self.scale else self.tolerance

    @property
    def name(self) -> str:
        what = {Kind.LOSS: "the loss", Kind.USER: "a value that the loop computes from the model's results"}
        of = {Kind.GRAD: "the gradient of", Kind.BUFFER: "the buffer", Kind.PARAM: "the parameter", Kind.STATE: "the optimizer's state"}
        return what.get(self.kind) or f"{of[self.kind]} {self.target!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """One run of a program, with everything that it starts from."""

    compiled: Compiled
    tape: Tape
    binding: Binding | None
    code: build.GradientCode | None
    outputs: tuple[int, ...]  # value indices that it gives besides the loss
    keep_buffers: bool
    start: Values  # parameters, buffers, gradients so far and optimizer state
    batch: dict[int, Tensor]  # the tape's externals
    seeds: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)  # of a region's backward: the gradients of its results
    inputs: tuple[int, ...] = ()  # and the externals that get one

    @property
    def kind(self) -> str:
        return self.compiled.kind


@dataclasses.dataclass
class _Reference:
    """What PyTorch computes in the place of a program."""

    values: Values
    grads: dict[str, Tensor]  # those that the optimizer used


class Verifier:
    """Checks the programs of one engine while `remaining` is above 0."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self.remaining = 0  # steps to check
        self.report = Report()
        self._capture: Callable[[], build.Step] | None = None  # of the program that runs next
        self._failure: VerificationError | None = None  # of a step that has to be finished first

    def request(self, steps: int) -> Report:
        """Check the next `steps` steps.

        Raises:
            StrategyError: the run has several processes, the host does the update, or the strategy changes numerics.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise StrategyError(f"verify={steps!r}: give the number of steps to check, 0 or more")
        if steps and process_count() > 1:
            raise StrategyError(
                f"verify={steps} in a run of {process_count()} processes: PyTorch would need every process's values on each; run the same strategy "
                "in one process (on virtual CPU devices, if need be), where the programs are the same"
            )
        if steps and self.engine.programs.strategy.offload is not None:
            raise StrategyError(
                f"verify={steps} with offload={self.engine.programs.strategy.offload!r}: programs are compared, and the host's update is none: verify without offload "
                "and delay, where the model and its gradients are the same"
            )
        if steps and (changes := self.engine.programs.strategy.changes_numerics):
            raise StrategyError(
                f"verify={steps}: {'; '.join(changes)}. PyTorch computes exactly, so that every step would differ: verify without these fields "
                "(what they change is bounded by graphacc.ops.quantize.error_bound)"
            )
        self.remaining = steps
        return self.report

    def note_capture(self, capture: Callable[[], build.Step]) -> None:
        """How the program that runs next is captured."""
        self._capture = capture if self.remaining else None

    def end_of_step(self) -> None:
        """An optimizer's step is done.

        Raises:
            VerificationError: one of its programs gave other values than PyTorch.
        """
        if not self.remaining:
            return
        self.remaining -= 1
        self.report.steps += 1
        failure, self._failure, self._capture = self._failure, None, None
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def watching(
        self,
        compiled: Compiled,
        tape: Tape,
        *,
        binding: Binding | None = None,
        code: build.GradientCode | None = None,
        outputs: Sequence[int] | None = None,
        keep_buffers: bool = True,
    ) -> Iterator[None]:
        """Inside runs a program, whose inputs are on the devices; compare what it gave afterwards."""
        if not self.remaining:
            yield
            return
        start = time.perf_counter()
        held = [] if compiled.kind == "update" else [*(tape.outputs if outputs is None else outputs)]
        held += [] if code is None else code.results
        run = _Run(
            compiled=compiled,
            tape=tape,
            binding=binding,
            code=code,
            outputs=tuple(held),
            keep_buffers=keep_buffers,
            start=self._snapshot(tape, code),
            batch={i: tape.external(i).detach().clone() for i in range(len(tape.externals))},
        )
        capture = self._capture
        expected = _reference(self.engine, run, run.start)
        self.report.seconds += time.perf_counter() - start
        yield
        start = time.perf_counter()
        failure = self._compare(run, capture, expected)
        self.report.seconds += time.perf_counter() - start
        if failure is not None:
            if compiled.kind not in ("step", "update"):
                raise failure
            self._failure = self._failure or failure

    def check_backward(
        self,
        compiled: Compiled,
        capture: Callable[[], build.Step],
        tape: Tape,
        *,
        seeds: Mapping[int, Tensor],
        inputs: Sequence[int],
        buffers: Mapping[str, Tensor],
        fetched: Mapping[Key, Callable[[], Tensor]],
    ) -> None:
        """Compare what the backward of a region gave.

        Args:
            seeds: value index -> the gradient of that result.
            inputs: the externals that get a gradient.
            buffers: those that were others when its forward ran.

        Raises:
            VerificationError: it is not what PyTorch gives.
        """
        if not self.remaining:
            return
        start = time.perf_counter()
        run = _Run(
            compiled=compiled,
            tape=tape,
            binding=None,
            code=None,
            outputs=tuple(seeds),
            keep_buffers=False,
            start=self._snapshot(tape, None) | {(Kind.BUFFER, name): value for name, value in buffers.items()},
            batch={i: tape.external(i).detach().clone() for i in range(len(tape.externals))},
            seeds={index: seed.detach().clone() for index, seed in seeds.items()},
            inputs=tuple(inputs),
        )
        failure = self._compare(run, capture, _reference(self.engine, run, run.start), fetched)
        self.report.seconds += time.perf_counter() - start
        if failure is not None:
            raise failure

    def _snapshot(self, tape: Tape, code: build.GradientCode | None) -> Values:
        """Copies of what a program starts from."""
        engine, programs = self.engine, self.engine.programs
        found = {(handle.kind, name): self._value(handle) for name, handle in engine.handles.items()}
        names = {*tape.grad_values, *(code.names if code is not None else ())}
        found |= {(Kind.GRAD, name): programs.fetch(Kind.GRAD, name) for name in names if programs.holds(Kind.GRAD, name)}
        for targets in programs.state_targets(names).values() if code is not None else ():
            found |= {(Kind.STATE, target): programs.fetch(Kind.STATE, target) for target in targets}
        return {key: value.detach().clone() for key, value in found.items()}

    def _value(self, handle) -> Tensor:
        self.engine.deferred.require([handle])
        return self.engine.programs.fetch(handle.kind, handle.name) if handle.host_is_stale else handle.host_value()

    def _got(self, run: _Run, key: Key) -> Tensor:
        kind, target = key
        if kind in (Kind.PARAM, Kind.BUFFER):
            return self._value(self.engine.handles[target])
        if kind in (Kind.LOSS, Kind.USER):
            return run.tape.value(run.tape.loss if kind is Kind.LOSS else int(target))
        return self.engine.programs.fetch(kind, target)

    def _compare(
        self, run: _Run, capture: Callable[[], build.Step] | None, expected: _Reference, fetched: Mapping[Key, Callable[[], Tensor]] | None = None
    ) -> VerificationError | None:
        if fetched is None:
            got = {key: self._got(run, key).detach().clone() for key in expected.values}
        else:
            got = {key: fetched[key]() if key in fetched else torch.zeros_like(value) for key, value in expected.values.items()}
        found = _differences(run, expected.values, got, {})
        bounds: dict[Key, Tensor | float] = {}
        if any(item.ratio > 1 for item in found):
            bounds = _uncertainty(self.engine, run, expected)
            found = _differences(run, expected.values, got, bounds)
        self.report.programs += 1
        known = [item for item in (*found, self.report.worst) if item is not None]
        self.report.worst = max(known, key=lambda item: item.ratio, default=None)
        wrong = sorted((item for item in found if item.ratio > 1), key=lambda item: (_ORDER.index(item.kind), -item.ratio))
        if not wrong:
            return None
        source = fault = ""
        if self.engine.fallback.backend is FX:
            source = _source(self.engine.model, capture(), wrong[0]) or _source(self.engine.model, run.compiled.graph, wrong[0])
            fault = _fault(self.engine, run, capture, expected.values, bounds)
        return VerificationError(_message(run, self.engine.steps + 1, wrong, source, fault))


def _message(run: _Run, step: int, wrong: Sequence[Difference], source: str, fault: str) -> str:
    first, others = wrong[0], list(dict.fromkeys(item.name for item in wrong[1:]))
    lines = [
        f"step {step}, the {run.kind} program: {first.name} differs from PyTorch's by {first.largest:.3g} ({first.got:.7g}, PyTorch "
        f"{first.expected:.7g}), {first.relative:.2g} of {first.scale:.3g}; the tolerance there is {first.tolerance:.2g}"
    ]
    lines += [f"  made at {source}"] if source else []
    lines += [f"  also different: {', '.join(others[:4])}" + f" and {len(others) - 4} more" * (len(others) > 4)] if others else []
    lines += [f"  at fault: {fault}" if fault else "  the program was captured by lazy tensors, so there are no passes to search"]
    return "\n".join([*lines, "  this is an error of graphacc, or code that does not do the same twice: please report it with the model"])


# ---- PyTorch's values


def _reference(engine: "Engine", run: _Run, start: Values) -> _Reference:
    """What the program should give, computed by PyTorch from `start`, which stays as it is."""
    own_code = engine.direct_calls(), torch._C.DisableTorchFunctionSubclass()
    with own_code[0], own_code[1], torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        if run.kind == "backward":
            return _Reference(_backward(engine, run, start), {})
        if run.kind == "forward":
            return _Reference(_forward(engine, run, start, {}, grads=False), {})
        values = {} if run.kind == "update" else _forward(engine, run, start, (env := {}), grads=True)
        if run.kind == "grad":
            return _Reference(values, {})
        env = {i: run.tape.value(i).detach() for i in run.code.forward_values} if run.kind == "update" else env
        return _update(engine, run, start, env, values)


def _forward(engine: "Engine", run: _Run, start: Values, env: dict[int, Tensor], *, grads: bool) -> Values:
    """The forward, and backward if `grads`: loss, results, buffers, and the gradients added to those so far."""
    tape, strategy = run.tape, engine.programs.strategy
    count = engine.execution.count(tape) if run.kind == "grad" and engine.execution.parts(tape) is None else 1
    wanted = [i for i in (tape.loss, *run.outputs) if i is not None and any(i in call.results for call in tape.forward_calls)]
    wanted = [i for i in wanted if run.kind != "forward" or i in run.outputs]
    parts: list[dict[int, Tensor]] = []
    total: dict[str, Tensor] = {}
    with tape.as_recorded(), borrowed(engine.model), dense_gradients(engine.model):
        leaves = {name: _leaf(handle.tensor, start[handle.kind, name], name in tape.grad_values) for name, handle in engine.handles.items()}
        substitute(engine.model, {id(engine.handles[name].tensor): leaf for name, leaf in leaves.items()})
        for microbatch in range(count):
            env.clear()
            whole = {i: build.microbatch(tensor, tape, i, count, microbatch) for i, tensor in run.batch.items()} if count > 1 else run.batch
            batch = {i: tensor.clone() for i, tensor in whole.items()}  # the recorded code may write into it
            with keyed_randomness(microbatch_seed(tape, microbatch), tape.counter), torch.set_grad_enabled(grads), computing_in(strategy.precision, "cpu"):
                tape.replay(tape.forward_calls, env, batch, TensorsNow(engine.model))
            parts.append({i: env[i].detach().clone() for i in wanted})
            if grads:
                made = torch.autograd.grad(env[tape.loss] / count, [leaves[name] for name in tape.grad_values], allow_unused=True, retain_graph=False)
                for name, grad in zip(tape.grad_values, made):
                    if grad is not None:
                        total[name] = total[name] + grad if name in total else grad
        buffers = {name: buffer.detach().clone() for name, buffer in engine.model.named_buffers() if (Kind.BUFFER, name) in start}
    found: Values = {}
    for index in wanted:
        if index == tape.loss:
            found[Kind.LOSS, "loss"] = torch.stack([part[index].reshape(()) / count for part in parts]).sum()
        else:
            found[Kind.USER, str(index)] = build.from_microbatches([lambda part=part: part[index] for part in parts], tape.values[index])()
    if run.keep_buffers:
        found |= {(Kind.BUFFER, name): buffer for name, buffer in buffers.items()}
    if run.kind == "grad":
        found |= {(Kind.GRAD, name): start[Kind.GRAD, name] + grad for name, grad in total.items()}
    else:
        env |= {tape.grad_values[name]: grad for name, grad in total.items()}
    return found


def _backward(engine: "Engine", run: _Run, start: Values) -> Values:
    """The gradients of a region's parameters and inputs."""
    tape, env = run.tape, {}
    with tape.as_recorded(), borrowed(engine.model), dense_gradients(engine.model):
        leaves = {name: start[handle.kind, name].clone().requires_grad_(handle.tensor.requires_grad) for name, handle in engine.handles.items()}
        substitute(engine.model, {id(engine.handles[name].tensor): leaf for name, leaf in leaves.items()})
        batch = {i: tensor.clone().requires_grad_(i in run.inputs) for i, tensor in run.batch.items()}
        precision = computing_in(engine.programs.strategy.precision, "cpu")
        with keyed_randomness(microbatch_seed(tape, 0), tape.counter), torch.enable_grad(), precision:
            tape.replay(tape.forward_calls, env, batch, TensorsNow(engine.model))
        wanted = {(Kind.GRAD, name): leaf for name, leaf in leaves.items() if leaf.requires_grad} | {(Kind.USER, f"input {i}"): batch[i] for i in run.inputs}
        pairs = [(env[index], seed.to(env[index].dtype)) for index, seed in run.seeds.items() if env[index].requires_grad]
        grads = torch.autograd.grad([value for value, _ in pairs], list(wanted.values()), [seed for _, seed in pairs], allow_unused=True) if pairs else []
    return {key: grad for key, grad in zip(wanted, grads) if grad is not None}


def _leaf(tensor: Tensor, value: Tensor, took_gradient: bool) -> Tensor:
    """A copy of `value` that takes a gradient if `tensor` does, or did at its backward and was frozen since, with the hooks of the user."""
    leaf = value.clone().requires_grad_(tensor.requires_grad or took_gradient)
    for hook in (tensor._backward_hooks or {}).values() if leaf.requires_grad else ():
        leaf.register_hook(hook)
    return leaf


def _update(engine: "Engine", run: _Run, start: Values, env: Mapping[int, Tensor], values: Values) -> _Reference:
    """Gradient code and the optimizer's step; `env` has the gradients of a whole step."""
    code, tape = run.code, run.tape
    made = tape.grad_values if code.tape.gradient_calls else {name: tape.grad_values[name] for name in code.names if name in tape.grad_values}
    grads = {name: env[index] if run.kind == "step" else start[Kind.GRAD, name] for name, index in made.items()}
    extras = [run.batch[i].clone() for i in code.external_indices] + [env[i].detach() for i in code.forward_values]
    extras += [start[handle.kind, handle.name].clone() for handle in code.handles]
    with torch.no_grad(), keyed_randomness(microbatch_seed(tape, 0), tape.counter, FIRST_STREAM):
        after = code.replay(grads, extras)
        used = {name: grad.clone() for name, grad in code.update_gradients(after).items()}
    values |= {(Kind.USER, str(i)): after[i].detach().clone() for i in code.results}
    return _Reference(values | _optimized(run, start, used), used)


def _optimized(run: _Run, start: Values, grads: Mapping[str, Tensor]) -> Values:
    """Parameters and state after the optimizer's own step."""
    optimizer = run.binding.optimizer
    tensors = {name: nn.Parameter(start[Kind.PARAM, name].clone()) for name in run.code.names}
    for name, tensor in tensors.items():
        tensor.grad = grads[name].to(tensor.dtype, copy=True)
    groups = []
    for group in optimizer.param_groups:
        named = [handle.name for parameter in group["params"] if (handle := handle_of(parameter)) is not None]
        groups.append({**plain(group), "params": [tensors[name] for name in named if name in tensors]})
    double = stand_in(optimizer, groups, {tensor: _state(optimizer, start, name) for name, tensor in tensors.items()})
    run_step(double)
    found: Values = {(Kind.PARAM, name): tensor.detach() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        for key, value in double.state[tensor].items():
            if isinstance(value, (Tensor, int, float)):
                found[Kind.STATE, f"{name}/{key}"] = torch.as_tensor(value).detach()
    return found


def _state(optimizer: torch.optim.Optimizer, start: Values, name: str) -> dict[str, object]:
    """The optimizer's state of one parameter as its own code keeps it; none where it is not yet there."""
    held = {target.rpartition("/")[2]: x for (kind, target), x in start.items() if kind is Kind.STATE and target.rpartition("/")[0] == name}
    if any(x.numel() and bool(is_absent(x).all()) for x in held.values()):
        return {}
    numbers = {} if is_separable(optimizer) else {key: python_number(optimizer, key, x) for key, x in held.items()}
    return {key: x.clone() if numbers.get(key) is None else numbers[key] for key, x in held.items()}


# ---- comparing


def _dtype(run: _Run, engine: "Engine", tensor: Tensor) -> torch.dtype:
    """The dtype in which a value was computed."""
    used = [tensor.dtype, *(call.autocast for call in run.tape.calls if call.autocast is not None)]
    used += [x.dtype for (kind, _), x in run.start.items() if kind is Kind.PARAM and x.dtype in (torch.bfloat16, torch.float16)]
    return coarsest([*used, *([torch.bfloat16] if engine.programs.strategy.precision == "bf16" else [])])


def _scale(run: _Run, key: Key, expected: Tensor) -> tuple[float, float]:
    """What differences of a value are relative to: its largest change; and its largest value."""
    whole = largest(widened(expected))
    before = run.start.get(key)
    if before is None or before.shape != expected.shape:
        return whole, whole
    if bool(widened(before).isnan().all()):
        return whole, whole
    return largest(widened(expected) - widened(before)), max(whole, largest(widened(before)))


def _base(run: _Run, key: Key, expected: Tensor) -> float:
    """The absolute tolerance by the table."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0
    change, whole = _scale(run, key, expected)
    dtype = _dtype(run, run.tape.engine, expected)
    return STEP[dtype] * change + ROUNDING * torch.finfo(expected.dtype).eps * whole


def _differences(run: _Run, expected: Values, got: Values, bounds: Mapping[Key, "Tensor | float"]) -> list[Difference]:
    found = []
    for key, want in expected.items():
        have, wide = widened(got[key]).reshape(want.shape), widened(want)
        finite = torch.isfinite(wide)
        same = torch.where(finite, torch.isfinite(have), (have == wide) | (have.isnan() & wide.isnan()))
        error = torch.where(finite, (have - wide).abs(), torch.zeros(())).masked_fill(~same, float("inf"))
        if not error.numel():
            continue
        allowed = torch.as_tensor(bounds.get(key, _base(run, key, want)), dtype=torch.float64).broadcast_to(error.shape)
        ratios = torch.where(error == 0, 0.0, error / allowed)
        at = int(ratios.argmax())
        first = [x.flatten()[at].real.item() for x in (have, wide)]
        found.append(
            Difference(
                kind=key[0],
                target=key[1],
                largest=error.flatten()[at].item(),
                got=first[0],
                expected=first[1],
                scale=_scale(run, key, want)[0],
                tolerance=allowed.flatten()[at].item(),
                ratio=ratios.flatten()[at].item(),
            )
        )
    return found


_SIDES = tuple(sign * 0.5**power for power in range(6) for sign in (1, -1))
"""Parts of a gradient's uncertainty that are tried: Adam's second step is largest for one of them in the middle."""


_BETWEEN = 1.5
"""Allows for what lies between two of them."""


def _uncertainty(engine: "Engine", run: _Run, expected: _Reference) -> dict[Key, "Tensor | float"]:
    """Absolute tolerances that allow for what rounding alone does to PyTorch's values."""
    generator = torch.Generator().manual_seed(0)
    start = {key: _perturbed(run, engine, value, generator) if key[0] in (Kind.PARAM, Kind.GRAD) else value for key, value in run.start.items()}
    seeds = {index: _perturbed(run, engine, seed, generator) for index, seed in run.seeds.items()}
    other = _reference(engine, dataclasses.replace(run, seeds=seeds), start)
    noise = {
        key: NOISE * largest(widened(other.values[key]) - widened(value))
        for key, value in expected.values.items()
        if key[0] not in (Kind.PARAM, Kind.STATE)
    }
    found: dict[Key, Tensor | float] = {key: _base(run, key, expected.values[key]) + amount for key, amount in noise.items()}
    if not expected.grads:
        return found
    spread = {}
    for name, grad in expected.grads.items():
        tolerance = STEP.get(_dtype(run, engine, grad), 0.0) * largest(widened(grad))
        spread[name] = max(tolerance, NOISE * largest(widened(other.grads[name]) - widened(grad)))
    with torch._C.DisableTorchFunctionSubclass():
        moved = [_optimized(run, run.start, {name: grad + sign * spread[name] for name, grad in expected.grads.items()}) for sign in _SIDES]
    for key in moved[0]:
        value = widened(expected.values[key])
        found[key] = _base(run, key, expected.values[key]) + _BETWEEN * torch.stack([(widened(side[key]) - value).abs() for side in moved]).amax(0)
    return found


def _perturbed(run: _Run, engine: "Engine", value: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor that a program starts from, changed at random by a unit in the last place."""
    if not value.is_floating_point():
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
    return (value * (1 + signs * torch.finfo(_dtype(run, engine, value)).eps).to(torch.float64)).to(value.dtype)


# ---- who is at fault


def _fault(
    engine: "Engine", run: _Run, capture: Callable[[], StepGraph], expected: Values, bounds: Mapping[Key, "Tensor | float"]
) -> str:
    """The first optional pass, or the memory plan, without which the same program gives PyTorch's values."""

    def is_right(**changes) -> bool:
        try:
            got = _rerun(engine, run, capture, expected, **changes)
        except Exception:
            return False
        return all(item.ratio <= 1 for item in _differences(run, expected, got, bounds))

    if is_right():
        return "no pass: built and run again from the same values, the program gives PyTorch's results (an upload, or memory that is used twice)"
    programs = engine.programs
    dims = programs._dims("forward", capture())
    passes = build_pipeline(
        capture(), programs.strategy, batch_dims=dims, splits=programs.splits.splits, experts=programs.experts, whole_sequences=programs.whole_sequences(run.kind)
    )
    for name in dict.fromkeys(item.name for item in passes if item.optional):
        if is_right(without=frozenset([name])):
            return f"pass {name!r}: without it the difference vanishes"
    if engine.programs.memory_plan != "xla" and is_right(memory_plan="xla"):
        return 'the memory plan: with memory_plan="xla" the difference vanishes'
    return f"{NO_PASS}: the difference stays without any one of the optional passes"


def _rerun(engine: "Engine", run: _Run, capture: Callable[[], StepGraph], expected: Values, **changes) -> Values:
    """The values of the same program, built with other settings and run on a state of its own."""
    programs: Programs = copy.copy(engine.programs)
    vars(programs).update(state=TrainState(programs.mesh), compiled=[], ahead=None, **changes)
    for name in ("_runs", "homes"):  # of a pipeline
        if name in vars(programs):
            setattr(programs, name, dict(getattr(programs, name)))
    compiled = programs._compile(run.kind, "verification", capture)
    for item in compiled.graph.inputs:
        if item.kind in STATE_KINDS and (item.kind, item.target) in run.start:
            programs.put(compiled, item.kind, item.target, run.start[item.kind, item.target])
    count = engine.execution.count(run.tape) if run.kind == "grad" else 1
    cut = engine.execution.parts(run.tape) if count > 1 else None
    feeds = engine.execution.feeds_of_parts(compiled, run.tape) if run.kind == "grad" else [engine.execution.feeds(compiled, run.tape, binding=run.binding)]
    if run.kind == "backward":
        feeds[0] |= {(Kind.BATCH, build.gradient_path(index)): seed for index, seed in run.seeds.items()}
        fetched = programs.run(compiled, feeds[0], keep_gradients=False)
        return {key: fetched[key]() for key in expected}
    parts = programs.run_microbatches(compiled, feeds) if run.kind == "grad" else [programs.run(compiled, feeds[0])]
    got: Values = {}
    for kind, target in expected:
        if (kind, target) in parts[0]:
            fetchers = [part[kind, target] for part in parts]
            like = run.tape.values[run.tape.loss if kind is Kind.LOSS else int(target)]
            got[kind, target] = torch.stack([fetch() for fetch in fetchers]).sum() if kind is Kind.LOSS else build.from_microbatches(fetchers, like, cut and cut.results[target])()
        else:
            got[kind, target] = programs.fetch(kind, target) if programs.holds(kind, target) else run.start[kind, target]
    return got


# ---- the user's line


def _source(model: nn.Module, step: StepGraph, item: Difference) -> str:
    """Module and line that made a value; for what belongs to a parameter, those that use the parameter."""
    if not hasattr(step, "placeholders"):
        return ""
    if item.kind in (Kind.LOSS, Kind.USER):
        starts = [node for node, out in zip(step.results, step.outputs) if (out.kind, out.target) == (item.kind, item.target)]
        node = _nearest(starts, lambda node: node.all_input_nodes)
        return "" if node is None else _place(node.meta["module_path"], node.meta["stack_trace"])
    name = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
    starts = [node for node, held in zip(step.placeholders, step.inputs) if name in (held.target, *held.aliases) and held.kind in (Kind.PARAM, Kind.BUFFER)]
    node = _nearest(starts, lambda node: [user for user in node.users if user.op == "call_function"], inside=True)
    return _place(name.rpartition(".")[0], "" if node is None else node.meta["stack_trace"])


def _nearest(nodes: Sequence[fx.Node], following: Callable[[fx.Node], Sequence[fx.Node]], inside: bool = False) -> fx.Node | None:
    """The nearest node of the forward that stands in the user's code; `inside`: of a module (a cast of a parameter does not)."""
    seen, queue = set(nodes), list(nodes)
    for node in queue:
        if node.meta.get("phase") is Phase.FORWARD and node.meta.get("stack_trace") and node.op == "call_function" and (not inside or node.meta["module_path"]):
            return node
        for other in following(node):
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return None


def _place(path: str, stack: str) -> str:
    lines = [line.strip() for line in stack.strip().splitlines()]
    text = ": ".join(lines[-2:])
    where = f"module {path!r}" if path else ""
    return ", ".join(filter(None, (where, text)))


__all__ = ["NO_PASS", "Difference", "Report", "Verifier"]
