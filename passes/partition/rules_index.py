"""Rules of lookups: embedding, index, gather, scatter.

Labels: numbers are dims of the indexed tensor, ("i", j) the j-th dim of the indices broadcast together.
"""

import torch

from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.passes.partition.rules import Call, Dims, Emit, Label, Labels, Operand, rule, split_of

aten = torch.ops.aten


@rule("aten.embedding.default")
def _embedding(call: Call) -> Dims:
    """With the rows split (the vocabulary), a rank looks up the indices that lie in its block, and zero elsewhere."""
    indices = [("i", dim) for dim in range(len(call.shape("indices")))]
    split = split_of(call, "weight")
    rows = None if split is not None and split.outer > 1 else "rows"

    def emit(build, args, kwargs):
        weight, index = args[:2]
        inside, index = _own_rows(build, index, weight.meta["val"].shape[0])
        found = build.call(aten.embedding.default, weight, index)
        inside = build.call(aten.unsqueeze.default, inside, -1)
        return build.call(aten.where.self, inside, found, build.call(aten.zeros_like.default, found))

    return Dims(
        {"weight": [rows, "c"], "indices": indices},
        [[*indices, "c"]],
        reduce={"rows": "sum"},
        linear=("weight",),
        emit={"rows": emit},
        looks_up=frozenset({"rows"}),
    )


def _own_rows(build, index, size: int):
    """Whether an index lies in this rank's block of `size` rows, and the index within the block (any, if it does not)."""
    index = build.call(aten.sub.Tensor, index, build.call(aten.mul.Scalar, build.axis_index(), size))
    inside = build.call(aten.bitwise_and.Tensor, build.call(aten.ge.Scalar, index, 0), build.call(aten.lt.Scalar, index, size))
    return inside, build.call(aten.clamp.default, index, 0, size - 1)


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(call: Call) -> Dims:
    indices = [("i", dim) for dim in range(len(call.shape("indices")))]
    reduce = {} if call["scale_grad_by_freq"] else dict.fromkeys(indices, "sum")
    num_rows, padding_index = call["num_weights"], call["padding_idx"]

    def emit(build, args, kwargs):
        grad, index = args[:2]
        local = -(-num_rows // call.num_ranks)
        inside, own = _own_rows(build, index, local)
        if padding_index >= 0:
            inside = build.call(aten.bitwise_and.Tensor, inside, build.call(aten.ne.Scalar, index, padding_index))
        inside = build.call(aten.unsqueeze.default, inside, -1)
        grad = build.call(aten.where.self, inside, grad, build.call(aten.zeros_like.default, grad))
        return build.call(aten.embedding_dense_backward.default, grad, own, local, -1, False)

    rows = None if call["scale_grad_by_freq"] else "rows"
    return Dims(
        {"grad_output": [*indices, "c"], "indices": indices},
        [[rows, "c"]],
        reduce=reduce,
        linear=("grad_output",),
        emit={"rows": emit},
        padded=frozenset({"rows"}),
    )


@rule("aten.gather.default")
def _gather(call: Call) -> Dims:
    """Along the split dim, every rank looks up what lies in its block, and zero elsewhere: a partial sum."""
    labels, dim = _aligned(call, "self", "index"), call.dim("self", call["dim"])
    split = split_of(call, "self")
    contiguous = split is None or split.outer == 1
    along = [*labels[:dim], "along" if contiguous else None, *labels[dim + 1 :]] if labels else labels

    def emit(build, args, kwargs):
        x, _, index = args
        size = x.meta["val"].shape[dim]
        inside, index = _own_rows(build, index, size)
        found = build.call(aten.gather.default, x, dim, index)
        return build.call(aten.where.self, inside, found, build.call(aten.zeros_like.default, found))

    sums = call.results[0].dtype != torch.bool
    return Dims(
        {"self": along, "index": labels},
        [labels],
        reduce={"along": "sum"} if sums else {},
        linear=("self",),
        emit={"along": emit},
        looks_up=frozenset({"along"}),
    )


@rule("aten.scatter.value aten.scatter.src aten.scatter_add.default aten.scatter_reduce.two")
def _scatter(call: Call) -> Dims:
    labels = _aligned(call, *dict.fromkeys(operand.name for operand in call.operands))
    joint = ("self", "src") if call.node.target._schema.name == "aten::scatter_add" else ()
    return Dims({operand.name: labels for operand in call.operands}, [labels], joint=joint)


def _aligned(call: Call, *names: str) -> Labels:
    """Labels shared by tensors of equal rank: dims other than `dim` that have one size in all of them."""
    shapes = [call.shape(name) for name in names]
    whole = call.dim(names[0], call["dim"])
    return [None if dim == whole or len({shape[dim] for shape in shapes}) > 1 else dim for dim in range(len(shapes[0]))]


@rule("aten.index_select.default")
def _index_select(call: Call) -> Dims:
    dim = call.dim("self", call["dim"])
    labels: list[Label | None] = [None if i == dim else i for i in range(len(call.shape("self")))]
    result = [("i", 0) if i == dim else i for i in range(len(labels))]
    return Dims({"self": labels, "index": [("i", 0)]}, [result], linear=("self",))


@rule("aten.index_add.default")
def _index_add(call: Call) -> Dims:
    dim = call.dim("self", call["dim"])
    labels: list[Label | None] = [None if i == dim else i for i in range(len(call.shape("self")))]
    source = [("i", 0) if i == dim else i for i in range(len(labels))]
    operands = {"self": labels, "index": [("i", 0)], "source": source}
    return Dims(operands, [labels], reduce={("i", 0): "sum"}, joint=("self", "source"), once=("self",))


def _indexed(call: Call) -> tuple[list[int], list[Label], list[Label]]:
    """The indexed dims, the labels of the indices broadcast together, the labels of the result of a lookup."""
    rank = len(call.shape("self"))
    dims = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    indices = [("i", j) for j in range(max(len(operand.shape) for operand in _index_operands(call)))]
    others = [dim for dim in range(rank) if dim not in dims]
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    return dims, indices, [*others[:at], *indices, *others[at:]]


def _index_operands(call: Call) -> list[Operand]:
    return [operand for operand in call.operands if operand.name == "indices"]


def _index_labels(call: Call, dims: list[int], indices: list[Label]) -> tuple[list, list, dict]:
    """Labels of the indexed tensor and of every index, and what to emit where an index is the place itself.

    ``x[arange(B), positions]`` reads from sample b only what belongs to sample b. So dim 0 of x has the label of the
    dim along which the arange runs, and a rank counts its own samples.
    """
    operands = _index_operands(call)
    tensor: list[Label | None] = [None if dim in dims else dim for dim in range(len(call.shape("self")))]
    labels: list = [None] * len(call["indices"])
    emits = {}
    for operand in operands:
        mine = indices[len(indices) - len(operand.shape) :]
        labels[operand.index] = [None if size == 1 else label for size, label in zip(operand.shape, mine)]
        dim = dims[operands.index(operand)]
        along = running_dim(operand.node, call.shape("self")[dim])
        if along is not None and operand.shape[along] > 1 and mine[along] not in tensor:
            tensor[dim] = mine[along]
            emits[mine[along]] = _local_index(operand.index, call.shape("self")[dim] // call.num_ranks)
    return tensor, labels, emits


_KEEPS_ORDER = of_kind(OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.SQUEEZE)


def running_dim(node: torch.fx.Node, size: int) -> int | None:
    """The dim along which `node` is arange(size), all its other dims being of size 1; None if it is something else."""
    shape = tuple(node.meta["val"].shape)
    if shape.count(1) != len(shape) - 1 or size not in shape:
        return None
    while node.target in _KEEPS_ORDER:
        node = node.args[0]
    if facts(node.target).kind is not OpKind.COUNT:
        return None
    bounds = {1: (0, *node.args, 1), 2: (*node.args, 1), 3: node.args}[len(node.args)]
    return shape.index(size) if tuple(bounds) == (0, size, 1) else None


def _local_index(position: int, local_size: int) -> Emit:
    """Emit the call with index `position` counting this rank's own elements."""

    def emit(build, args, kwargs):
        indices = list(args[1])
        value = indices[position].meta["val"]
        running = build.call(aten.arange.start_step, 0, local_size, 1, dtype=value.dtype, device=value.device)
        indices[position] = build.call(aten.view.default, running, list(value.shape))
        return build.call(build.node.target, args[0], indices, *args[2:], **kwargs)

    return emit


@rule("aten.index.Tensor aten._unsafe_index.Tensor", reads_nodes=True)
def _index(call: Call) -> Dims:
    if any(operand.dtype in (torch.bool, torch.uint8) for operand in _index_operands(call)):
        return Dims({}, [[None] * len(call.results[0].shape)])
    dims, indices, result = _indexed(call)
    tensor, labels, emits = _index_labels(call, dims, indices)
    return Dims({"self": tensor, "indices": labels}, [result], linear=("self",), emit=emits)


@rule("aten.index_put.default aten._unsafe_index_put.default", reads_nodes=True)
def _index_put(call: Call) -> Dims:
    """With accumulation, indices and values may be split while the tensor is not: the ranks' additions add up."""
    if any(operand.dtype in (torch.bool, torch.uint8) for operand in _index_operands(call)):
        return Dims({}, [[None] * len(call.results[0].shape)])
    dims, indices, lookup = _indexed(call)
    tensor, labels, emits = _index_labels(call, dims, indices)
    accumulate = call.arguments.get("accumulate", False)
    shape = call.shape("values")
    values = [None if size == 1 else label for size, label in zip(shape, lookup[len(lookup) - len(shape) :])]
    return Dims(
        {"self": tensor, "indices": labels, "values": values},
        [tensor],
        reduce=dict.fromkeys([label for label in indices if label not in tensor], "sum") if accumulate else {},
        joint=("self", "values") if accumulate else (),
        once=("self",),
        emit=emits,
    )
