"""Rules of operators that work element by element, with broadcasting."""

import torch

from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.passes.partition.placement import REPLICATE, Shard
from graphacc.passes.partition.rules import Call, Dims, Operand, Plan, replicate, rule

aten, mesh = torch.ops.aten, torch.ops.graphacc
_COPIES = of_kind(OpKind.SAME) | {torch.ops._c10d_functional.wait_tensor.default, mesh.mark_sharding.default, mesh.permute_ranks.default}


def broadcast_labels(shape: tuple[int, ...], result: tuple[int, ...]) -> list[int | None]:
    """Label every dim with the dim of the result that it lines up with; dims that are broadcast have none."""
    offset = len(result) - len(shape)
    return [i + offset if size == result[i + offset] and size != 1 else None for i, size in enumerate(shape)]


def pointwise(call: Call, **facts) -> Dims:
    """Labels of an operator that broadcasts its operands together; `facts` are further fields of `Dims`."""
    result = tuple(call.results[0].shape)
    labels: dict[str, list] = {}
    for operand in call.operands:
        mine = broadcast_labels(operand.shape, result)
        if operand.index is None:
            labels[operand.name] = mine
        else:
            labels.setdefault(operand.name, {})[operand.index] = mine
    return Dims(labels, [range(len(result))] * len(call.results), pads=True, **facts)


@rule(
    "aten.add.Tensor aten._to_copy.default aten.alias.default aten.detach.default aten.lift_fresh_copy.default aten.copy.default "
    "aten.masked_fill.Tensor aten.fill.Scalar prims.convert_element_type.default prims.div.default aten.bucketize.Tensor "
    "_c10d_functional.wait_tensor.default graphacc.mark_sharding.default graphacc.permute_ranks.default"
)
def _pointwise(call: Call) -> Dims:
    target = call.node.target
    known = facts(target)
    if target in _COPIES:
        return pointwise(call, linear=tuple([operand.name for operand in call.operands]), moves=True)
    if target is aten.bucketize.Tensor:
        dims = pointwise(call)
        return Dims({"self": dims.operands["self"]}, dims.results)
    return pointwise(call, linear=known.linear, joint=known.joint)


@rule("aten.view.dtype")
def _view_dtype(call: Call) -> Dims | Plan:
    """The bits of each element, read as another dtype."""
    (result,) = call.results
    if result is None or call.operands[0].shape != tuple(result.shape):
        return replicate(call, "its elements have another size")
    return pointwise(call)


@rule("aten.zeros_like.default aten.ones_like.default aten.full_like.default aten.empty_like.default")
def _like(call: Call) -> Plan:
    """Only the shape of the operand counts."""
    (operand,) = call.operands
    placement = operand.placement if isinstance(operand.placement, Shard) else REPLICATE
    return Plan((None,), placement)


@rule("graphacc.after.default")
def _after(call: Call) -> Plan:
    """The dependency may have any placement: nothing is read from it."""
    kept: Operand = call.operands[0]
    return Plan((kept.placement, None), kept.placement)


@rule("graphacc.barrier.default")
def _barrier(call: Call) -> Plan:
    placements = tuple(operand.placement for operand in call.operands)
    return Plan(placements, placements)


@rule("aten.fill.Tensor")
def _fill(call: Call) -> Dims:
    labels = range(len(call.shape("self")))
    return Dims({"self": labels}, [labels], pads=True)
