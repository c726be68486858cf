"""The optimizer's step, and gradient code before it, as a StepGraph.

The optimizer's own ``step`` runs once on a stand-in whose parameters, gradients, state and learning rates are traced. The
single-tensor path is taken; step counts are carried in float64 inside the graph, so bias corrections are those of Python's doubles.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphacc._compat.torch_ import compiling, data_dependent_errors
from graphacc.capture.optimizer import (
    Member,
    hyperparameters,
    lazy_keys,
    members,
    plain,
    run_step,
    stand_in,
    state_layout,
    with_numbers,
)
from graphacc.capture.scalars import ValueNeeded, traced_scalars
from graphacc.capture.source import SourceMode
from graphacc.capture.tracing import KEY, Results, Slot, trace
from graphacc.errors import CaptureError
from graphacc.graph import Input, Kind, Phase, StepGraph

Transform = Callable[[dict[str, Tensor], list[Tensor]], dict[str, Tensor]]
"""(gradients by parameter name, extras) -> gradients by parameter name."""

FIRST_STREAM = 2**20
"""Random operators of gradient code take streams from here on, those of the model below."""


def capture_update(
    model: nn.Module,
    optimizer: Optimizer,
    grads: Sequence[str],
    *,
    transform: Transform | None = None,
    extras: Sequence[Input] = (),
    dynamic: Iterable[str] = (),
) -> StepGraph:
    """Capture one step of the optimizer.

    Args:
        optimizer: any optimizer of torch.optim, or another whose ``step`` computes with torch; left as it is.
        grads: names of the parameters that have a gradient.
        transform: gradient code that runs before the optimizer, such as clipping.
        extras: further inputs, which `transform` gets in this order; their names are not used.
        dynamic: numbers of the parameter groups that are inputs besides the learning rates, see `hyperparameters`.

    Returns:
        A graph with inputs PARAM, GRAD, STATE, HYPER and the extras, and outputs PARAM and STATE. Without `transform`
        only parameters that both have a gradient and belong to the optimizer appear.

    Raises:
        CaptureError: the optimizer cannot be captured.
    """
    update = _Update(model, optimizer, tuple(grads), transform, tuple(extras), hyperparameters(optimizer, dynamic))
    try:
        return update.trace(capturable=False)
    except CaptureError as error:
        # RAdam and ASGD branch on their state, except in the form that torch made for CUDA graphs.
        branched = isinstance(error.__cause__, (ValueNeeded, *data_dependent_errors()))
        if not branched or not any("capturable" in group for group in optimizer.param_groups):
            raise
        return update.trace(capturable=True)


class _Update:
    """What is known before tracing: the members, their state and the slots of all inputs."""

    def __init__(self, model, optimizer, grads, transform, extras, numbers):
        self.optimizer, self.transform, self.extras, self.numbers = optimizer, transform, extras, numbers
        self.members = members(model, optimizer, grads)
        parameters = {member.name: member.parameter for member in self.members}
        every = dict(model.named_parameters())
        self.grads = {name: every[name] for name in grads} if transform else parameters
        self.state = {member.name: state_layout(optimizer, member) for member in self.members}
        self.lazy = lazy_keys(optimizer, self.members)
        self.slots = [Slot.like(Kind.PARAM, name, tensor) for name, tensor in parameters.items()]
        self.slots += [Slot.like(Kind.GRAD, name, tensor) for name, tensor in self.grads.items()]
        self.slots += [Slot.like(Kind.STATE, f"{name}/{key}", x) for name, held in self.state.items() for key, x in held.items()]
        self.slots += [Slot(kind=Kind.HYPER, target=name, shape=(), dtype=torch.float64) for name in numbers]
        known = {(slot.kind, slot.target) for slot in self.slots}
        further = [extra for extra in extras if (extra.kind, extra.target) not in known]  # gradient code may read a parameter
        self.slots += [Slot(kind=extra.kind, target=extra.target, shape=extra.shape, dtype=extra.dtype) for extra in further]

    def trace(self, *, capturable: bool) -> StepGraph:
        def program(tensors: list[Tensor]) -> Results:
            feeds = {(slot.kind, slot.target): tensor for slot, tensor in zip(self.slots, tensors)}
            with torch.no_grad():
                return self.program(feeds, capturable)

        with compiling():
            step = trace(
                [*self.slots, KEY],
                program,
                source=SourceMode({}, Phase.UPDATE),
                what=f"the optimizer {type(self.optimizer).__name__}",
                constants="<const>.update",
                first_stream=FIRST_STREAM,
            )
        return _without_unused_key(step)

    def program(self, feeds: dict[tuple[Kind, str], Tensor], capturable: bool) -> Results:
        grads = {name: feeds[Kind.GRAD, name] for name in self.grads}
        if self.transform is not None:
            grads = self.transform(grads, [feeds[extra.kind, extra.target] for extra in self.extras])
            _check_transformed(grads, self.members)
        state = {name: {key: feeds[Kind.STATE, f"{name}/{key}"] for key in held} for name, held in self.state.items()}
        steady = self.step(feeds, grads, state, capturable)
        if not self.lazy:
            return steady
        fresh = {name: {} if name in self.lazy else held for name, held in state.items()}
        return self.merge(feeds, self.step(feeds, grads, fresh, capturable), steady)

    def step(
        self, feeds: dict[tuple[Kind, str], Tensor], grads: dict[str, Tensor], state: dict[str, dict[str, Tensor]], capturable: bool
    ) -> Results:
        """Run the optimizer on copies of the traced inputs; returns new parameters and state in the inputs' dtypes."""
        numbers = {name: feeds[Kind.HYPER, name] for name in self.numbers}
        values = {member.name: _working_copy(feeds[Kind.PARAM, member.name], grads[member.name]) for member in self.members}
        groups = [with_numbers(plain(g, capturable=capturable), i, numbers) for i, g in enumerate(self.optimizer.param_groups)]
        for i, group in enumerate(groups):
            group["params"] = [values[member.name] for member in self.members if member.group == i]
        held = {values[name]: {key: _working_state(key, x) for key, x in entries.items()} for name, entries in state.items()}
        double = stand_in(self.optimizer, groups, held)
        before = _python_numbers(double)
        with traced_scalars(type(double), [(tensor, self.numbers[name]) for name, tensor in numbers.items()]):
            run_step(double)
        _check_python_numbers(double, before)
        return self.results(feeds, values, double)

    def results(self, feeds: dict[tuple[Kind, str], Tensor], values: dict[str, Tensor], double: Optimizer) -> Results:
        found: Results = []
        for name, value in values.items():
            found.append((Kind.PARAM, name, value.to(feeds[Kind.PARAM, name].dtype)))
            after = {key: x for key, x in double.state[value].items() if x is not None}
            if set(after) != set(self.state[name]):
                raise CaptureError(
                    f"{type(self.optimizer).__name__} has state {sorted(self.state[name])} for {name!r} before a step and {sorted(after)} "
                    "after it: a captured step keeps the same state, so create all of it in the first step"
                )
            for key in self.state[name]:
                target = f"{name}/{key}"
                found.append((Kind.STATE, target, torch.as_tensor(after[key]).to(feeds[Kind.STATE, target].dtype)))
        return found

    def merge(self, feeds: dict[tuple[Kind, str], Tensor], fresh: Results, steady: Results) -> Results:
        """Where state is NaN, which stands for "not yet there", take the result of a first step."""
        merged: Results = []
        for (kind, target, first), (_, _, later) in zip(fresh, steady):
            name = target if kind is Kind.PARAM else target.rpartition("/")[0]
            if name in self.lazy:
                absent = feeds[Kind.STATE, f"{name}/{self.lazy[name][0]}"].isnan()
                absent = absent if absent.shape == later.shape else absent.flatten()[0]
                later = torch.where(absent, first, later)
            merged.append((kind, target, later))
        return merged


def _without_unused_key(step: StepGraph) -> StepGraph:
    (index,) = step.input_indices(Kind.KEY)
    node = step.placeholders[index]
    if not node.users:
        step.graph.erase_node(node)
        step.inputs = step.inputs[:index] + step.inputs[index + 1 :]
        step.module.recompile()
    return step


def _working_copy(value: Tensor, grad: Tensor) -> Tensor:
    copy = value.clone()
    copy.grad = grad.clone()
    return copy


def _working_state(key: str, value: Tensor) -> Tensor:
    """State for the step to write into; the step count in float64, so that what is computed from it is too."""
    return value.double() if key == "step" and value.is_floating_point() else value.clone()


def _check_transformed(grads: object, wanted: Sequence[Member]) -> None:
    missing = [member.name for member in wanted if member.name not in grads]
    if missing:
        raise CaptureError(f"the gradient code returned no gradient for {missing}: return one for every parameter that it was given")


def _python_numbers(double: Optimizer) -> dict[str, object]:
    """Numbers that a step should not change, since the graph holds their values: those of groups and of the object."""
    numbers = {f"param_groups[{i}][{key!r}]": x for i, group in enumerate(double.param_groups) for key, x in group.items()}
    numbers |= {f"self.{name}": x for name, x in vars(double).items()}
    return {name: x for name, x in numbers.items() if isinstance(x, (int, float))}


def _check_python_numbers(double: Optimizer, before: dict[str, object]) -> None:
    after = _python_numbers(double)
    changed = [name for name in before if name not in after or after[name] != before[name]]
    if changed:
        raise CaptureError(
            f"{type(double).__name__}.step() changes {', '.join(changed)}, which the captured step would hold at its present value: "
            "keep what changes in self.state[parameter]"
        )
