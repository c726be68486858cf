"""Making one rank's part of a tensor that is created from a shape, instead of cutting it out of the whole.

Covers constants, random numbers (a block's bits depend on its place in the global tensor alone) and element-wise
operators and expansions of those: a dropout mask is drawn for the local samples only. What is broadcast into an element-wise operator is cut
instead of the larger result: of one-hot labels [T, V] the labels [T].
"""

import math
from collections.abc import Callable

import torch
import torch.fx

from graphacc.ops.facts import OpKind, facts, of_kind, takes
from graphacc.passes.partition.choose import plan_for_result
from graphacc.passes.partition.placement import REPLICATE, Shard, view_split
from graphacc.passes.partition.rules import Call, Dims, Plan, find_rule

aten, random, prims = torch.ops.aten, torch.ops.graphacc, torch.ops.prims
_EXPANDS = of_kind(OpKind.EXPAND) | {aten.unsqueeze.default}


def creation_plan(node: torch.fx.Node, split: Shard, call_of: Callable[[torch.fx.Node], Call]) -> Plan | None:
    """How to make one rank's part of `node` afresh; None if it has to be cut out of the whole."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta["val"], torch.Tensor):
        return None  # an input, or one result of several
    call = call_of(node)
    plan = _plan(call, split)
    if plan is None:
        return None
    for operand, required in zip(call.operands, plan.operands):
        if isinstance(required, Shard) and creation_plan(operand.node, required, call_of) is None and math.prod(operand.shape) >= node.meta["val"].numel():
            return None
    return plan


def _plan(call: Call, split: Shard) -> Plan | None:
    target, shape = call.node.target, tuple(call.results[0].shape)
    kind = facts(target).kind
    if kind is OpKind.FILL and takes(target, "size"):
        return Plan((None,) * len(call.operands), split, {"size": call.local(shape, split)})
    if kind is OpKind.RANDOM:
        return _random_plan(call, split)
    if kind is OpKind.COUNT:
        return _arange_plan(call, split)
    if kind is OpKind.RESHAPE:
        inner = view_split(shape, split, call.shape("self"), call.num_ranks)
        return None if inner is None else Plan((inner,), split, {"size": call.local(shape, split)})
    found = find_rule(target)
    dims = found(call) if found is not None and call.operands else None
    if (
        isinstance(dims, Dims)
        and (dims.pads or target in _EXPANDS)
        and all(operand.placement == REPLICATE for operand in call.operands)
    ):
        return plan_for_result(call, dims, split)
    return None


def _arange_plan(call: Call, split: Shard) -> Plan | None:
    """A rank's block of a running index starts at its own place."""
    if split.outer > 1 or not split.plain or not call.results[0].dtype.is_signed or call.results[0].dtype.is_floating_point:
        return None
    step, size = call.arguments.get("step", 1), call.results[0].shape[0] // call.num_ranks
    start, value = call.arguments.get("start", 0), call.results[0]
    if not all(isinstance(number, int) for number in (start, step)):
        return None

    def emit(build, args, kwargs):
        running = build.call(aten.arange.start_step, start, start + size * step, step, dtype=value.dtype, device=value.device)
        shift = build.call(aten.mul.Scalar, build.axis_index(), size * step)
        return build.call(aten.add.Tensor, running, build.call(aten._to_copy.default, shift, dtype=value.dtype))

    return Plan((), split, emit=emit)


def _random_plan(call: Call, split: Shard) -> Plan | None:
    """Draw the block only. A dim read as [outer, ranks, rest] is drawn with its outer part as a dim of its own."""
    if not split.plain:
        return None
    shape, local = list(call["size"]), call.local(call["size"], split)
    whole, dim = list(call["global_size"]), split.dim
    if split.outer == 1:
        block, at = local, dim
    elif call["start"] is None and shape[dim] == whole[dim]:
        block = [*local[:dim], split.outer, local[dim] // split.outer, *local[dim + 1 :]]
        whole = [*whole[:dim], split.outer, whole[dim] // split.outer, *whole[dim + 1 :]]
        at = dim + 1
    else:
        return None

    def emit(build, args, kwargs):
        key, stream, _, _, start = args
        offset = build.offset(len(block), at, block[at])
        start = offset if start is None else build.call(aten.add.Tensor, start, offset)
        drawn = build.call(call.node.target, key, stream, block, whole, start)
        return drawn if block == local else build.call(aten.view.default, drawn, local)

    return Plan((REPLICATE,) * len(call.operands), split, emit=emit)
