"""From labels to a plan: which label is split, what has to be communicated first.

Candidates are every label that is split in some operand, every argument in which the operator is linear and which is
a partial sum, and replication. The cheapest in bytes received wins; ties go to the earlier kind, which keeps
the results spread.
"""

import math

import torch

from graphacc.graph import Phase
from graphacc.passes.partition.constants import is_zero
from graphacc.passes.partition.placement import REPLICATED, Partial, Placement, Replicated, Split, divides, size_bytes
from graphacc.passes.partition.rules import Call, Dims, Label, Operand, Plan, is_replicated, replicate


def choose(call: Call, dims: Dims) -> Plan:
    """The cheapest way to carry out `call`."""
    if is_replicated(call):
        return replicate(call, "")
    plans = [*_split_plans(call, dims), *_linear_plans(call, dims)]
    if not plans or (dims.matmul and call.phase is Phase.UPDATE):
        return replicate(call, "its split dim cannot stay split here")
    plans.append(replicate(call, "cheaper than the alternatives"))
    return min(plans, key=lambda plan: _cost(call, plan))


def plan_for_result(call: Call, dims: Dims, split: Split) -> Plan | None:
    """The plan that gives result 0 the placement `split`, whatever the operands are, or None if there is none."""
    label = dims.results[0][split.dim]
    return None if label is None else _split_plan(call, dims, label, split)


def _split_plans(call: Call, dims: Dims) -> list[Plan]:
    found: dict[tuple, Plan | None] = {}
    for operand in call.operands:
        split = operand.placement
        if isinstance(split, Split) and (label := dims.labels(operand)[split.dim]) is not None:
            key = (label, split.outer, split.padding)
            if key not in found:
                found[key] = _split_plan(call, dims, label, split)
    return [plan for plan in found.values() if plan is not None]


def _split_plan(call: Call, dims: Dims, label: Label, like: Split) -> Plan | None:
    """Every operand and result with `label` is split along it as `like`; None if that cannot be."""
    if like.padding and not dims.pads:
        return None
    reduces = not all(value is None or label in labels for value, labels in zip(call.results, dims.results))
    if reduces and label not in dims.reduce:
        return None
    required = [_place(operand.name, dims.labels(operand), label, like, dims, reduces) for operand in call.operands]
    results = tuple(_place_result(labels, label, like, dims) for labels in dims.results)
    shapes = [operand.shape for operand in call.operands] + [
        () if value is None else tuple(value.shape) for value in call.results
    ]
    for shape, placement in zip(shapes, (*required, *results)):
        if shape and isinstance(placement, Split) and not divides(shape, placement, call.num_ranks):
            return None
    sets = {} if dims.size is None else {dims.size: call.local(call.results[0].shape, results[0])}
    return Plan(tuple(required), results, sets, dims.emit.get(label))


def _place(name: str, labels, label: Label, like: Split, dims: Dims, reduces: bool) -> Placement:
    if label in labels:
        return Split(list(labels).index(label), like.outer, like.padding)
    return Partial(dims.reduce[label]) if reduces and name in dims.once else REPLICATED


def _place_result(labels, label: Label, like: Split, dims: Dims) -> Placement:
    if label in labels:
        return Split(list(labels).index(label), like.outer, like.padding)
    op = dims.reduce[label]
    return REPLICATED if op is None else Partial(op)


def _linear_plans(call: Call, dims: Dims) -> list[Plan]:
    """Plans that pass a partial value on, where the result is not much larger than what would be reduced before."""
    plans = []
    groups = [(name,) for name in dims.linear] + ([dims.joint] if dims.joint else [])
    for group in groups:
        members = [operand for operand in call.operands if operand.name in group]
        common = _common_partial(members, dims.moves) if {operand.name for operand in members} == set(group) else None
        if common is not None and all(_passes(call, operand, value) for operand in members for value in call.results):
            required = tuple(common if operand in members else REPLICATED for operand in call.operands)
            plans.append(Plan(required, common))
    return plans


def _common_partial(operands: list[Operand], any_op: bool) -> Partial | None:
    """The partial placement of all operands; zeros count as a partial sum, too."""
    placements = {
        operand.placement for operand in operands if not (isinstance(operand.placement, Replicated) and is_zero(operand.node))
    }
    if len(placements) != 1:
        return None
    (placement,) = placements
    if not isinstance(placement, Partial) or (
        placement.op != "sum" and (not any_op or any(op.placement != placement for op in operands))
    ):
        return None
    return placement


def _passes(call: Call, operand: Operand, result: torch.Tensor | None) -> bool:
    """The partial result has no fewer bits than the partial operand, and is not much larger.

    Backward may grow fourfold (a slice's gradient in its parameter's shape): what it makes is mostly added up further and
    scattered once, at half the cost of reducing to all ranks.
    """
    if result is None:
        return True
    growth = 4 if call.phase is Phase.BACKWARD else 1
    if isinstance(operand.placement, Partial) and result.numel() > growth * max(math.prod(operand.shape), 1):
        return False
    before, after = operand.dtype, result.dtype
    return before == after or (
        before.is_floating_point and after.is_floating_point and torch.finfo(after).eps < torch.finfo(before).eps
    )


def _cost(call: Call, plan: Plan) -> int:
    return sum(redistribution_bytes(operand, to) for operand, to in zip(call.operands, plan.operands))


def redistribution_bytes(operand: Operand, to: Placement | None) -> int:
    """Bytes that a rank receives to bring `operand` to `to`, about."""
    size = size_bytes(operand.shape, operand.dtype)
    match operand.placement, to:
        case (_, None) | (Replicated(), _):
            return 0
        case Partial(), Replicated():
            return 2 * size
        case source, target:
            return 0 if source == target else size
