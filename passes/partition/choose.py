"""From labels to a plan: which label is split, what has to be communicated first.

Candidates are every label that is split in some operand, every argument in which the operator is linear and which is
a partial sum, and replication. The cheapest in bytes received wins; ties go to the earlier kind, which keeps
the results spread.
"""

import math

import torch

from graphacc.graph import Phase
from graphacc.passes.partition.constants import is_zero
from graphacc.passes.partition.placement import REPLICATE, Partial, Placement, Replicate, Shard, divides, size_bytes
from graphacc.passes.partition.rules import Call, Communicating, Dims, Emit, Label, Operand, Plan, is_replicated, replicate

_FAR_LARGER = 64
"""A sum of partial products of what is split already is made rather than that so many times its bytes are moved to spare it."""


def choose(call: Call, dims: Dims, *, counts_sums: bool = False, adds_once: bool = False) -> Plan:
    """The cheapest way to carry out `call`.

    Args:
        counts_sums: what it costs to sum up partial results counts, too.
        adds_once: what is added to a partial sum and is replicated is added by the first rank, and the sum stays partial, whatever it grows to.
    """
    if is_replicated(call):
        return replicate(call, "")
    plans = [*_split_plans(call, dims), *_linear_plans(call, dims, adds_once)]
    if not plans or (dims.matmul and call.phase is Phase.UPDATE):
        return replicate(call, "its split dim cannot stay split here")
    plans.append(replicate(call, "cheaper than the alternatives"))
    if counts_sums and dims.matmul:  # products of activations keep what they make split (Megatron-LM), whatever the sizes; but a router's gradient is far smaller than its tokens
        least = min((_cost(call, plan) for plan in plans if not _sum_cost(call, plan)), default=math.inf)

        def sums(plan: Plan) -> bool:
            return _sum_cost(call, plan) > 0 and (_cost(call, plan) > 0 or _FAR_LARGER * _sum_cost(call, plan) > least)

        return min(plans, key=lambda plan: (_cost(call, plan) == math.inf, sums(plan), _cost(call, plan)))
    return min(plans, key=lambda plan: _cost(call, plan) + (_sum_cost(call, plan) if counts_sums else 0))


def plan_for_result(call: Call, dims: Dims, split: Shard) -> Plan | None:
    """The plan that gives result 0 the placement `split`, whatever the operands are, or None if there is none."""
    label = dims.results[0][split.dim]
    return None if label is None else _split_plan(call, dims, label, split)


def _split_plans(call: Call, dims: Dims) -> list[Plan]:
    found: dict[tuple, Plan | None] = {}
    for operand in call.operands:
        split = operand.placement
        if isinstance(split, Shard) and (label := dims.labels(operand)[split.dim]) is not None:
            key = (label, split.outer, split.padding, split.order)
            if key not in found:
                found[key] = _split_plan(call, dims, label, split)
    found |= {label: _split_plan(call, dims, label, Shard(0)) for label in dims.offers}
    return [plan for plan in found.values() if plan is not None]


def _split_plan(call: Call, dims: Dims, label: Label, like: Shard) -> Plan | None:
    """Every operand and result with `label` is split along it as `like`; None if that cannot be."""
    reduces = not all(value is None or label in labels for value, labels in zip(call.results, dims.results))
    if reduces and label not in dims.reduce:
        return None
    if like.padding and not dims.pads and (reduces if like.order is not None else label not in dims.padded | dims.looks_up):
        return None
    if like.order is not None and label in dims.emit:  # what is emitted may count on the places of elements
        return None
    required = [_place(operand.name, dims.labels(operand), label, like, dims, reduces) for operand in call.operands]
    results = tuple(_place_result(labels, label, like, dims) for labels in dims.results)
    shapes = [operand.shape for operand in call.operands] + [
        () if value is None else tuple(value.shape) for value in call.results
    ]
    for shape, placement in zip(shapes, (*required, *results)):
        if shape and isinstance(placement, Shard) and not divides(shape, placement, call.num_ranks):
            return None
    sets = {} if dims.size is None else {dims.size: call.local(call.results[0].shape, results[0])}
    emit = dims.emit.get(label)
    if reduces and like.padding and label not in dims.looks_up:
        if dims.reduce[label] is None:
            return None
        emit = _without_padding(call, dims, label, emit)
    return Plan(tuple(required), results, sets, emit, restore=dims.offers.get(label, ()))


_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


def _without_padding(call: Call, dims: Dims, label: Label, emit: Emit | None) -> Emit:
    """The local call on operands whose padding along `label` is set to what does not count in the reduction."""
    names = [argument.name for argument in call.node.target._schema.arguments]
    along = {operand.name: list(dims.labels(operand)).index(label) for operand in call.operands if label in dims.labels(operand)}
    sizes = {operand.name: operand.shape[along[operand.name]] for operand in call.operands if operand.name in along}

    def run(build, args, kwargs):
        args = [
            build.mask_padding(x, along[name], sizes[name], _NEUTRAL[dims.reduce[label]]) if name in along else x
            for name, x in zip(names, args)
        ]
        return build.call(call.node.target, *args, **kwargs) if emit is None else emit(build, args, kwargs)

    return Communicating(run) if isinstance(emit, Communicating) else run


def _place(name: str, labels, label: Label, like: Shard, dims: Dims, reduces: bool) -> Placement:
    if label in labels:
        return like.along(list(labels).index(label))
    return Partial(dims.reduce[label]) if reduces and name in dims.once else REPLICATE


def _place_result(labels, label: Label, like: Shard, dims: Dims) -> Placement:
    if label in labels:
        return like.along(list(labels).index(label))
    op = dims.reduce[label]
    return REPLICATE if op is None else Partial(op)


def _linear_plans(call: Call, dims: Dims, adds_once: bool) -> list[Plan]:
    """Plans that pass a partial value on, where the result is not much larger than what would be reduced before."""
    plans = []
    groups = [(name,) for name in dims.linear] + ([dims.joint] if dims.joint else [])
    for group in groups:
        members = [operand for operand in call.operands if operand.name in group]
        common = _common_partial(members, dims.moves, adds_once) if {operand.name for operand in members} == set(group) else None
        if common is not None and all(_passes(call, operand, value, adds_once) for operand in members for value in call.results):
            required = tuple(common if operand in members else REPLICATE for operand in call.operands)
            plans.append(Plan(required, common))
    return plans


def _common_partial(operands: list[Operand], any_op: bool, adds_once: bool) -> Partial | None:
    """The partial placement of all operands; zeros count as a partial sum, too, and what is replicated if it is added once."""
    placements = {
        operand.placement for operand in operands if not (isinstance(operand.placement, Replicate) and (adds_once or is_zero(operand.node)))
    }
    if len(placements) != 1:
        return None
    (placement,) = placements
    if not isinstance(placement, Partial) or (
        placement.op != "sum" and (not any_op or any(op.placement != placement for op in operands))
    ):
        return None
    return placement


def _passes(call: Call, operand: Operand, result: torch.Tensor | None, any_size: bool) -> bool:
    """The partial result has no fewer bits than the partial operand, and is not much larger, unless it may have any size.

    Backward may grow fourfold (a slice's gradient in its parameter's shape): what it makes is mostly added up further and
    scattered once, at half the cost of reducing to all ranks.
    """
    if result is None:
        return True
    growth = 4 if call.phase is Phase.BACKWARD else 1
    if not any_size and isinstance(operand.placement, Partial) and result.numel() > growth * max(math.prod(operand.shape), 1):
        return False
    before, after = operand.dtype, result.dtype
    return before == after or (
        before.is_floating_point and after.is_floating_point and torch.finfo(after).eps < torch.finfo(before).eps
    )


def _cost(call: Call, plan: Plan) -> float:
    return sum(_move_cost(operand, to, call.num_ranks) for operand, to in zip(call.operands, plan.operands))


def _sum_cost(call: Call, plan: Plan) -> int:
    results = plan.results if isinstance(plan.results, tuple) else (plan.results,) * len(call.results)
    values = [value for value, placement in zip(call.results, results) if isinstance(placement, Partial) and value is not None]
    return sum(2 * size_bytes(tuple(value.shape), value.dtype) for value in values)


def _move_cost(operand: Operand, to: Placement | None, num_ranks: int) -> float:
    if to is None or to == operand.placement or to in operand.held:
        return 0
    return math.inf if operand.fixed else redistribution_bytes(operand, to, num_ranks)


def redistribution_bytes(operand: Operand, to: Placement | None, num_ranks: int) -> int:
    """Bytes that a rank receives to bring `operand` to `to`, about."""
    size = size_bytes(operand.shape, operand.dtype)
    match operand.placement, to:
        case (_, None) | (Replicate(), _):
            return 0
        case Partial(), Replicate():
            return 2 * size
        case Shard() as source, Shard() as target if source != target and exchanges(source, target):
            return size // num_ranks
        case source, target:
            return 0 if source == target else size


def exchanges(source: Shard, target: Shard) -> bool:
    """Whether an all-to-all brings one split to another."""
    return source.dim != target.dim and source.plain and target.plain
