"""The optimizer's step, and gradient code before it, as a StepGraph.

The optimizer's own ``step`` runs once on a stand-in whose parameters, gradients, state and learning rates are traced. The
single-tensor path is taken; step counts are carried in float64 inside the graph, so bias corrections are those of Python's
doubles.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphacc._compat.torch_ import compiling, data_dependent_errors
from graphacc.capture.backend import FX, Backend
from graphacc.capture.optimizer import (
    Member,
    attributes_of,
    check_python_state,
    hyperparameters,
    is_absent,
    is_separable,
    lazy_keys,
    members,
    plain,
    run_step,
    stand_in,
    state_layouts,
    with_numbers,
)
from graphacc.capture.replicate import is_elementwise, replicated
from graphacc.capture.scalars import ValueNeeded, traced_scalars
from graphacc.capture.source import SourceMode
from graphacc.capture.tracing import KEY, Results, Slot
from graphacc.errors import CaptureError
from graphacc.graph import Input, Kind, Phase, StepGraph
from graphacc.hlo import HloStep

Transform = Callable[[dict[str, Tensor], list[Tensor]], dict[str, Tensor]]
"""(gradients by parameter name, extras) -> gradients by parameter name."""

FIRST_STREAM = 2**20
"""Random operators of gradient code take streams from here on, those of the model below."""

_Feeds = dict[tuple[Kind, str], Tensor]


def capture_update(
    model: nn.Module,
    optimizer: Optimizer,
    grads: Sequence[str],
    *,
    transform: Transform | None = None,
    extras: Sequence[Input] = (),
    updated: Sequence[str] | None = None,
    results: Callable[[], dict[str, Tensor]] = dict,
    dynamic: Iterable[str] = (),
    alike: Mapping[str, Hashable] | None = None,
    backend: Backend = FX,
) -> StepGraph | HloStep:
    """Capture one step of the optimizer.

    Args:
        optimizer: any optimizer of torch.optim, or another whose ``step`` computes with torch; left as it is.
        grads: names of the parameters that have a gradient.
        transform: gradient code that runs before the optimizer, such as clipping.
        extras: further inputs, which `transform` gets in this order; their names are not used.
        updated: names of the parameters that have a gradient after `transform`; default: `grads`.
        results: called after `transform`; the values that it gives, by target, become outputs of kind USER.
        dynamic: numbers of the parameter groups that are inputs besides the learning rates, see `hyperparameters`.
        alike: parameter -> what is equal for parameters whose states have equal numbers (tensors of no dims, such as the count of steps). A number that a step
            changes alike for all of them is one input and one output, with the other targets as its aliases. None: nothing is known of them.
        backend: what records it; FX gives a StepGraph, LAZY an HloStep.

    Returns:
        A graph with inputs PARAM, GRAD, STATE, HYPER and the extras (and KEY if `transform` draws random numbers), and outputs
        PARAM and STATE. Without `transform` only parameters that both have a gradient and belong to the optimizer appear.

    Raises:
        CaptureError: the optimizer cannot be captured.
    """
    found = members(model, optimizer, grads if updated is None else updated)
    step = _capture_optimizer(optimizer, found, hyperparameters(optimizer, dynamic), alike, backend)
    if transform is None:
        return step
    return backend.joined(_capture_gradient_code(model, grads, found, transform, extras, results, backend), step)


def capture_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    grads: Sequence[str],
    *,
    transform: Transform,
    extras: Sequence[Input] = (),
    updated: Sequence[str],
    results: Callable[[], dict[str, Tensor]] = dict,
    backend: Backend = FX,
) -> StepGraph | HloStep:
    """Capture the gradient code that `capture_update` would put in front of the optimizer's step, alone: its outputs are GRAD and USER."""
    return _capture_gradient_code(model, grads, members(model, optimizer, updated), transform, extras, results, backend)


def _capture_gradient_code(
    model: nn.Module,
    grads: Sequence[str],
    found: Sequence[Member],
    transform: Transform,
    extras: Sequence[Input],
    results: Callable[[], dict[str, Tensor]],
    backend: Backend,
) -> StepGraph | HloStep:
    """A graph from GRAD and the extras to the GRAD that the optimizer sees, and USER results."""
    parameters = dict(model.named_parameters())
    slots = [Slot.like(Kind.GRAD, name, parameters[name]) for name in grads]
    slots += [Slot(kind=extra.kind, target=extra.target, shape=extra.shape, dtype=extra.dtype) for extra in extras]

    def program(tensors: list[Tensor]) -> Results:
        with torch.no_grad():
            result = transform(dict(zip(grads, tensors)), tensors[len(grads) : -1])
        missing = [member.name for member in found if member.name not in result]
        if missing:
            raise CaptureError(
                f"the gradient code returned no gradient for {missing}: return one for every parameter that it got"
            )
        user: Results = [(Kind.USER, target, tensor.detach()) for target, tensor in results().items()]
        return [(Kind.GRAD, member.name, result[member.name].to(member.parameter.dtype)) for member in found] + user

    source = SourceMode({}, Phase.UPDATE)
    step = backend.trace(
        [*slots, KEY], program, source=source, what="the gradient code", constants="<const>.gradients", first_stream=FIRST_STREAM
    )
    return _without_unused_key(step) if isinstance(step, StepGraph) else step


def _without_unused_key(step: StepGraph) -> StepGraph:
    (index,) = step.input_indices(Kind.KEY)
    node = step.placeholders[index]
    if not node.users:
        step.graph.erase_node(node)
        step.inputs = step.inputs[:index] + step.inputs[index + 1 :]
    return step


def _capture_optimizer(
    optimizer: Optimizer, found: Sequence[Member], numbers: dict[str, float], alike: Mapping[str, Hashable] | None, backend: Backend
) -> StepGraph | HloStep:
    check_python_state(optimizer)
    state = state_layouts(optimizer, found)
    if not (backend.replicates and is_separable(optimizer)):
        return _traced(optimizer, found, state, numbers, backend)
    for likeness in (_likeness_but_for_shape, _likeness):
        first: dict[tuple, str] = {}
        representatives = {}
        for member in found:
            key = likeness(member, state[member.name]), None if alike is None else alike[member.name]
            representatives[member.name] = first.setdefault(key, member.name)
        step = _traced(optimizer, [member for member in found if representatives[member.name] == member.name], state, numbers, backend)
        assert isinstance(step, StepGraph)  # only those can be replicated
        if likeness is _likeness or is_elementwise(step):
            break
    shapes = {member.name: member.parameter.shape for member in found}
    return replicated(step, representatives, shapes, joins_numbers=alike is not None) if len(first) < len(found) else step


def _traced(
    optimizer: Optimizer, found: Sequence[Member], state: dict[str, dict[str, Tensor]], numbers: dict[str, float], backend: Backend
) -> StepGraph | HloStep:
    update = _Update(optimizer, found, state, numbers, backend)
    try:
        return update.trace(capturable=False)
    except CaptureError as error:
        # RAdam, ASGD and Rprop branch on values, except in the form that torch made for CUDA graphs.
        branched = isinstance(error.__cause__, (ValueNeeded, *data_dependent_errors()))
        if not branched or not any("capturable" in group for group in optimizer.param_groups):
            raise
        return update.trace(capturable=True)


def _likeness(member: Member, state: dict[str, Tensor]) -> tuple:
    """Members with equal ones have the same operators in their updates."""
    parameter = member.parameter
    layout = tuple((key, tuple(x.shape), x.dtype) for key, x in sorted(state.items()))
    return member.group, tuple(parameter.shape), parameter.stride(), parameter.dtype, layout


def _likeness_but_for_shape(member: Member, state: dict[str, Tensor]) -> tuple:
    """Members with equal ones have the same operators if those work element by element.

    Tensors of no dims do not decide dtypes as others do, and where strides are not those of the shape they are part of the likeness.
    """
    parameter = member.parameter
    if parameter.dim() == 0 or not parameter.is_contiguous() or any(x.dim() > 0 and x.shape != parameter.shape for x in state.values()):
        return _likeness(member, state)
    return member.group, parameter.dtype, tuple((key, x.dim() > 0, x.dtype) for key, x in sorted(state.items()))


class _Update:
    """What is known before the optimizer is traced: its members, their state and the slots of all inputs."""

    def __init__(
        self,
        optimizer: Optimizer,
        found: Sequence[Member],
        state: dict[str, dict[str, Tensor]],
        numbers: dict[str, float],
        backend: Backend,
    ):
        self.optimizer, self.members, self.numbers, self.backend = optimizer, found, numbers, backend
        self.state = {member.name: state[member.name] for member in found}
        self.lazy = lazy_keys(optimizer, found)
        self.slots = [Slot.like(Kind.PARAM, member.name, member.parameter) for member in found]
        self.slots += [Slot.like(Kind.GRAD, member.name, member.parameter) for member in found]
        self.slots += [Slot.like(Kind.STATE, f"{name}/{key}", x) for name, held in self.state.items() for key, x in held.items()]
        self.slots += [Slot(kind=Kind.HYPER, target=name, shape=(), dtype=torch.float64) for name in numbers]

    def trace(self, *, capturable: bool) -> StepGraph | HloStep:
        def program(tensors: list[Tensor]) -> Results:
            feeds = {(slot.kind, slot.target): tensor for slot, tensor in zip(self.slots, tensors)}
            state = {name: {key: feeds[Kind.STATE, f"{name}/{key}"] for key in held} for name, held in self.state.items()}
            steady = self.step(feeds, state, capturable)
            if not self.lazy:
                return steady
            fresh = {name: {} if name in self.lazy else held for name, held in state.items()}
            return self.merge(feeds, self.step(feeds, fresh, capturable), steady)

        source, what = SourceMode({}, Phase.UPDATE), f"the optimizer {type(self.optimizer).__name__}"
        with compiling(), torch.no_grad():
            return self.backend.trace(self.slots, program, source=source, what=what, constants="<const>.update")

    def step(self, feeds: _Feeds, state: dict[str, dict[str, Tensor]], capturable: bool) -> Results:
        """Run the optimizer on copies of the traced inputs; returns new parameters and state in the inputs' dtypes."""
        numbers = {name: feeds[Kind.HYPER, name] for name in self.numbers}
        values = {member.name: feeds[Kind.PARAM, member.name].clone() for member in self.members}
        for member in self.members:
            value = values[member.name]
            value.grad = feeds[Kind.GRAD, member.name].clone()
            vars(value).update(attributes_of(member.parameter))
        groups = [with_numbers(plain(g, capturable=capturable), i, numbers) for i, g in enumerate(self.optimizer.param_groups)]
        for i, group in enumerate(groups):
            group["params"] = [values[member.name] for member in self.members if member.group == i]
        held = {values[name]: {key: _working_state(key, x) for key, x in entries.items()} for name, entries in state.items()}
        double = stand_in(self.optimizer, groups, held)
        with traced_scalars(type(double), [(tensor, self.numbers[name]) for name, tensor in numbers.items()]):
            run_step(double)
        return self.results(feeds, values, double)

    def results(self, feeds: _Feeds, values: dict[str, Tensor], double: Optimizer) -> Results:
        found: Results = []
        for name, value in values.items():
            found.append((Kind.PARAM, name, value.to(feeds[Kind.PARAM, name].dtype)))
            after = {key: x for key, x in double.state[value].items() if x is not None}
            if set(after) != set(self.state[name]):
                raise CaptureError(
                    f"{type(self.optimizer).__name__} has state {sorted(self.state[name])} for {name!r} before a step and "
                    f"{sorted(after)} "
                    "after it: a captured step keeps the same state, so create all of it in the first step"
                )
            for key in self.state[name]:
                target = f"{name}/{key}"
                found.append((Kind.STATE, target, torch.as_tensor(after[key]).to(feeds[Kind.STATE, target].dtype)))
        return found

    def merge(self, feeds: _Feeds, fresh: Results, steady: Results) -> Results:
        """Where state is not yet there, take the result of a first step."""
        merged: Results = []
        for (kind, target, first), (_, _, later) in zip(fresh, steady):
            name = target if kind is Kind.PARAM else target.rpartition("/")[0]
            if name in self.lazy:
                state = feeds[Kind.STATE, f"{name}/{self.lazy[name][0]}"]
                absent = is_absent(state) if self.backend is FX else state.isnan()  # torch_xla has no view of the bits
                absent = absent if absent.shape == later.shape else absent.flatten()[0]
                later = torch.where(absent, first, later)
            merged.append((kind, target, later))
        return merged


def _working_state(key: str, value: Tensor) -> Tensor:
    """State for the step to write into; the step count in float64, so that what is computed from it is too."""
    return value.double() if key == "step" and value.is_floating_point() else value.clone()
