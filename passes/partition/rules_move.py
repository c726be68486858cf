"""Rules of operators that move elements: views, permutations, slices, concatenation, creation from a shape."""

import dataclasses
import math
from collections.abc import Collection

import torch
import torch.fx

from graphacc.errors import LoweringError
from graphacc.graph import Phase
from graphacc.passes.partition.placement import REPLICATE, Partial, Placement, Replicate, Shard, view_split
from graphacc.passes.partition.routing import exchanged
from graphacc.passes.partition.rules import Call, Dims, Plan, replicate, rule, split_of
from graphacc.strategy.axes import ZERO_AXES

aten = torch.ops.aten


@rule("aten.view.default aten._unsafe_view.default")
def _view(call: Call) -> Plan:
    (operand,) = call.operands
    shape = tuple(call.results[0].shape)
    placement: Placement | None = operand.placement
    if isinstance(placement, Shard):
        placement = view_split(operand.shape, placement, shape, call.num_ranks)
        if placement is None:
            return replicate(call, "the new shape has no single dim that holds the split one")
    size = "shape" if "shape" in call.arguments else "size"
    return Plan((operand.placement,), placement, {size: call.local(shape, placement)})


def _moved(call: Call, source: list[int | None], *, name: str = "self", size: str | None = None) -> Dims:
    """The dims of the one operand; `source` gives the operand's dim for every dim of the result, None for a new one."""
    labels = range(len(call.shape(name)))
    return Dims({name: labels}, [source], linear=(name,), moves=True, size=size, padded=frozenset(labels))


@rule("aten.permute.default aten.permute_copy.default")
def _permute(call: Call) -> Dims:
    return _moved(call, [call.dim("self", dim) for dim in call["dims"]])


@rule("aten.transpose.int")
def _transpose(call: Call) -> Dims:
    order = list(range(len(call.shape("self"))))
    a, b = call.dim("self", call["dim0"]), call.dim("self", call["dim1"])
    order[a], order[b] = order[b], order[a]
    return _moved(call, order)


@rule("aten.t.default")
def _t(call: Call) -> Dims:
    return _moved(call, list(reversed(range(len(call.shape("self"))))))


@rule("aten.unsqueeze.default")
def _unsqueeze(call: Call) -> Dims:
    order: list[int | None] = list(range(len(call.shape("self"))))
    order.insert(call["dim"] % (len(order) + 1), None)
    return _moved(call, order)


@rule("aten.squeeze.default aten.squeeze.dim aten.squeeze.dims")
def _squeeze(call: Call) -> Dims:
    shape = call.shape("self")
    dims = call.arguments.get("dim", range(len(shape)))
    named = {call.dim("self", dim) for dim in ([dims] if isinstance(dims, int) else dims) if shape}
    gone = {dim for dim in named if shape[dim] == 1}
    found = _moved(call, [dim for dim in range(len(shape)) if dim not in gone])
    if named == gone:
        return found

    def emit(build, args, kwargs):  # a rank's part may have size 1 in other dims too
        return build.call(aten.squeeze.dims, args[0], sorted(gone))

    return dataclasses.replace(found, emit=dict.fromkeys(named - gone, emit))


@rule("aten.expand.default")
def _expand(call: Call) -> Dims:
    """Dims that are made larger carry labels of their own, so that a result can be split along them."""
    shape, result = call.shape("self"), tuple(call.results[0].shape)
    offset = len(result) - len(shape)
    kept = [i if size == result[i + offset] else None for i, size in enumerate(shape)]
    source = [("new", i) if i < offset or kept[i - offset] is None else i - offset for i in range(len(result))]
    return Dims({"self": kept}, [source], linear=("self",), moves=True, size="size")


@rule("prims.broadcast_in_dim.default")
def _broadcast_in_dim(call: Call) -> Dims:
    shape, result = call.shape("a"), tuple(call.results[0].shape)
    source: list = [("new", i) for i in range(len(result))]
    kept: list = [None] * len(shape)
    for i, dim in enumerate(call["broadcast_dimensions"]):
        if shape[i] == result[dim]:
            source[dim] = kept[i] = i
    return Dims({"a": kept}, [source], linear=("a",), moves=True, size="shape")


@rule("aten.slice.Tensor")
def _slice(call: Call) -> Dims | Plan:
    shape = call.shape("self")
    dim, step = call.dim("self", call["dim"]), call.arguments.get("step", 1)
    start, end, _ = slice(call.arguments.get("start"), call.arguments.get("end")).indices(shape[dim] if shape else 0)
    split = split_of(call, "self")
    if split is None or split.dim != dim:
        return _on_dim(call, [dim])
    if end == shape[dim] and _holds_steps(call, split, start, step, end):
        return Plan((split,), split, {"end": call.local(shape, split)[dim]})
    units = _units(split, shape[dim], start, end) if step == 1 else None
    if units is None:
        return _on_dim(call, [dim])
    ranks = call.num_ranks
    return Plan((split,), Shard(dim, units), {"start": start // ranks, "end": end // ranks})


def _units(split: Shard, size: int, start: int, end: int) -> int | None:
    """The outer part of ``[start:end]`` of a split dim that reads as [outer, ranks, rest]; None if it cuts through a block."""
    unit = size // split.outer
    if not split.plain or start >= end or start % unit or end % unit:
        return None
    return (end - start) // unit


def _holds_steps(call: Call, split: Shard, start: int, step: int, size: int) -> bool:
    """Whether every rank has the same elements out of each `step` of ``[start::step]``, as of the gates and values of a layer that alternate."""
    return split.plain and 0 <= start < step and step > 1 and size % (step * split.outer * call.num_ranks) == 0


@rule("aten.flip.default aten.roll.default aten.cumsum.default aten.cumprod.default aten.tril.default aten.triu.default")
def _rearrange(call: Call) -> Dims:
    """The dims that are worked along are kept whole; the others may be split."""
    name = call.node.target._schema.name
    if name in ("aten::tril", "aten::triu"):
        return _on_dim(call, [-2, -1])
    dims = call.arguments.get("dims", call.arguments.get("dim"))
    dims = [dims] if isinstance(dims, int) else (dims or range(len(call.shape("self"))))
    return _on_dim(call, dims, moves=name in ("aten::flip", "aten::roll"), linear=name != "aten::cumprod")


def _on_dim(call: Call, whole, *, moves: bool = True, linear: bool = True, name: str = "self") -> Dims:
    """Operand and result have the same dims; those in `whole` are never split."""
    held = {call.dim(name, dim) for dim in whole}
    labels = [None if dim in held else dim for dim in range(len(call.shape(name)))]
    return Dims({name: labels}, [labels] * len(call.results), linear=(name,) if linear else (), moves=moves and linear)


@rule("aten.select.int")
def _select(call: Call) -> Dims:
    gone = call.dim("self", call["dim"])
    return Dims(
        {"self": [None if dim == gone else dim for dim in range(len(call.shape("self")))]},
        [[dim for dim in range(len(call.shape("self"))) if dim != gone]],
        linear=("self",),
        moves=True,
    )


@rule("aten.split.Tensor aten.split_with_sizes.default aten.unbind.int")
def _split(call: Call) -> Dims | Plan:
    gone = call.dim("self", call["dim"])
    if (plan := _split_along(call, gone)) is not None:
        return plan
    labels = [None if dim == gone else dim for dim in range(len(call.shape("self")))]
    unbind = call.node.target._schema.name == "aten::unbind"
    result = [label for dim, label in enumerate(labels) if not (unbind and dim == gone)]
    return Dims({"self": labels}, [result] * len(call.results), linear=("self",), moves=True)


def _split_along(call: Call, dim: int) -> Plan | None:
    """Parts of a dim that is split, where they do not cut through its blocks."""
    split, size = split_of(call, "self"), call.shape("self")[dim]
    if split is None or split.dim != dim or call.node.target._schema.name == "aten::unbind":
        return None
    sizes = [value.shape[dim] for value in call.results]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    units = [_units(split, size, start, start + length) for start, length in zip(starts, sizes)]
    if None in units:
        return None
    local = [length // call.num_ranks for length in sizes]
    name, value = ("split_sizes", local) if "split_sizes" in call.arguments else ("split_size", local[0])
    return Plan((split,), tuple(Shard(dim, unit) for unit in units), {name: value})


@rule("aten.slice_backward.default aten.select_backward.default")
def _slice_backward(call: Call) -> Dims | Plan:
    rank = len(call["input_sizes"])
    whole = call["dim"] % rank
    if (plan := _slice_backward_along(call, whole)) is not None:
        return plan
    result = [None if dim == whole else dim for dim in range(rank)]
    select = call.node.target._schema.name == "aten::select_backward"
    grad = [label for dim, label in enumerate(result) if not (select and dim == whole)]
    return Dims({"grad_output": grad}, [result], linear=("grad_output",), size="input_sizes")


def _slice_backward_along(call: Call, dim: int) -> Plan | None:
    split = split_of(call, "grad_output")
    if call.node.target._schema.name == "aten::select_backward" or split is None or split.dim != dim:
        return None
    size, part = call["input_sizes"][dim], call.shape("grad_output")[dim]
    unit = part // split.outer
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    if end == size and _holds_steps(call, split, start, call["step"], size):
        local = call.local(call["input_sizes"], split)
        return Plan((split,), split, {"input_sizes": local, "end": local[dim]})
    if call["step"] != 1 or not split.plain or size % unit or start % unit:
        return None
    placement, ranks = Shard(dim, size // unit), call.num_ranks
    sets = {"input_sizes": call.local(call["input_sizes"], placement), "start": start // ranks, "end": end // ranks}
    return Plan((split,), placement, sets)


@rule("aten.slice_scatter.default aten.select_scatter.default")
def _slice_scatter(call: Call) -> Dims:
    rank, whole = len(call.shape("self")), call.dim("self", call["dim"])
    labels = [None if dim == whole else dim for dim in range(rank)]
    select = call.node.target._schema.name == "aten::select_scatter"
    src = [label for dim, label in enumerate(labels) if not (select and dim == whole)]
    return Dims({"self": labels, "src": src}, [labels], joint=("self", "src"), moves=True)


@rule("aten.constant_pad_nd.default")
def _pad(call: Call) -> Dims:
    rank, pad = len(call.shape("self")), call["pad"]
    whole = [rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    return _on_dim(call, whole, moves=False, linear=call.arguments.get("value", 0) == 0)


@rule("aten.cat.default")
def _cat(call: Call) -> Dims | Plan:
    shape = tuple(call.results[0].shape)
    dim = call["dim"] % len(shape)
    if (plan := _cat_along_split(call, dim)) is not None:
        return plan
    labels = [None if i == dim else i for i in range(len(shape))]
    return Dims({"tensors": [labels] * len(call.operands)}, [labels], joint=("tensors",), moves=True)


def _cat_along_split(call: Call, dim: int) -> Plan | None:
    """Tensors split along `dim` in blocks of one size, put behind one another: the outer parts add up."""
    placements = [operand.placement for operand in call.operands]
    if not all(isinstance(placement, Shard) and placement.dim == dim and placement.plain for placement in placements):
        return None
    if len({operand.shape[dim] // operand.placement.outer for operand in call.operands}) > 1:
        return None
    return Plan(tuple(placements), Shard(dim, sum(placement.outer for placement in placements)))


@rule("aten.stack.default")
def _stack(call: Call) -> Dims:
    rank = len(call.results[0].shape)
    labels = list(range(rank - 1))
    result: list[int | None] = list(labels)
    result.insert(call["dim"] % rank, None)
    return Dims({"tensors": [labels] * len(call.operands)}, [result], joint=("tensors",), moves=True)


@rule("aten.repeat.default")
def _repeat(call: Call) -> Plan:
    """A split dim that is repeated r times reads as [r, ranks, rest]."""
    (operand,) = call.operands
    split = split_of(call, "self")
    if split is None or not split.plain:
        kept = operand.placement if isinstance(operand.placement, Partial) and math.prod(call["repeats"]) == 1 else REPLICATE
        return Plan((kept,), kept, reason="padded or sorted" if split else "")
    offset = len(call["repeats"]) - len(operand.shape)
    dim = split.dim + offset
    return Plan((split,), Shard(dim, split.outer * call["repeats"][dim]))


@rule("aten.new_zeros.default aten.new_ones.default aten.new_full.default aten.new_empty.default")
def _new(call: Call) -> Plan:
    """Only the dtype of the operand counts."""
    return Plan((None,), REPLICATE)


@rule("aten.as_strided.default aten.as_strided_scatter.default", reads_nodes=True)
def _as_strided(call: Call) -> Plan:
    """Strides mean memory, so that the operand has to be laid out as it was before."""
    for operand in call.operands:
        value: torch.Tensor = operand.node.meta["val"]
        if not isinstance(operand.placement, Replicate) and not value.is_contiguous():
            raise LoweringError(
                f"{call.node.name} (as_strided) reads the storage of a {list(value.shape)} tensor with strides {list(value.stride())}, which XLA does not have: "
                "use slicing, unfold or expand in the model"
            )
    return replicate(call, "as_strided addresses memory")


@rule("_c10d_functional.all_gather_into_tensor.default", reads_nodes=True)
def _all_gather(call: Call) -> Dims | Plan:
    """Over another axis, of g ranks: a dim 0 that reads [outer, ranks, rest] here becomes [g * outer, ranks, rest].

    What ZeRO has split over that axis as well, and the update needs whole, is gathered here first, while it is smaller; but experts stay split.
    """
    split = split_of(call, "input")
    if split is not None and call.phase is Phase.UPDATE and call["group_name"] in ZERO_AXES and not _leads_to(call.node, () if call.experts is None else call.experts.updated):
        return Plan((REPLICATE,), REPLICATE, restore=(None,))
    if split is not None and split.dim == 0 and split.plain:
        return Plan((split,), Shard(0, split.outer * call["group_size"]))
    labels = [None, *range(1, len(call.shape("input")))]
    return Dims({"input": labels}, [labels], linear=("input",), moves=True)


def _leads_to(node: torch.fx.Node, results: Collection[torch.fx.Node]) -> bool:
    left = [node] if results else []
    while left:
        at = left.pop()
        if at in results:
            return True
        left += [user for user in at.users if user.op == "call_function"]
    return False


@rule("_c10d_functional.reduce_scatter_tensor.default")
def _reduce_scatter(call: Call) -> Dims | Plan:
    split, groups = split_of(call, "input"), call["group_size"]
    if split is not None and split.dim == 0 and split.plain and split.outer % groups == 0:
        return Plan((split,), Shard(0, split.outer // groups))
    labels = [None, *range(1, len(call.shape("input")))]
    return Dims({"input": labels}, [labels], linear=("input",) if call["reduce_op"] == "sum" else ())


@rule("_c10d_functional.all_to_all_single.default", reads_nodes=True)
def _all_to_all(call: Call) -> Dims | Plan:
    """Blocks of dim 0 change places over another axis."""
    split = split_of(call, "input")
    if split is not None and split.dim and split.order is not None and split.order.kind != "sorted":
        return Plan((split,), exchanged(split))
    labels = [None, *range(1, len(call.shape("input")))]
    return Dims({"input": labels}, [labels], linear=("input",), moves=True)


@rule("_c10d_functional.all_reduce.default")
def _all_reduce(call: Call) -> Dims | Plan:
    (operand,) = call.operands
    if operand.placement == Partial(call["reduce_op"]):
        return Plan((operand.placement,), operand.placement)
    labels = range(len(operand.shape))
    return Dims({"input": labels}, [labels])


@rule("graphacc.shard.default")
def _shard(call: Call) -> Dims | Plan:
    """A block along another axis, cut out of [outer, size, rest]."""
    split, dim = split_of(call, "x"), call["dim"]
    if split is None or split.dim != dim:
        labels = [None if i == dim else i for i in range(len(call.shape("x")))]
        return Dims({"x": labels}, [labels], linear=("x",), moves=True)
    cut = call["outer"] * call["size"]
    if not split.plain:
        return replicate(call, "padded or sorted")
    if split.outer % cut == 0:  # our ranks lie behind the block's
        return Plan((split,), Shard(dim, split.outer // call["size"]))
    if call["outer"] % (split.outer * call.num_ranks) == 0:  # our ranks lie before the block's
        return Plan((split,), Shard(dim, split.outer), {"outer": call["outer"] // call.num_ranks})
    return replicate(call, "the block of the other axis crosses the split")
