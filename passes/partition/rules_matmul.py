"""Rules of products, attention and convolutions.

Legend: m, n free dims, k contracted, b batch; h heads, t queries, s keys, d and e head sizes.
"""

import operator
from collections.abc import Callable

import torch

from graphacc.passes.partition.placement import Placement, Shard
from graphacc.passes.partition.rules import Call, Dims, Emit, Label, Labels, rule

aten = torch.ops.aten

_SUM = {"k": "sum"}


@rule("aten.mm.default")
def _mm(call: Call) -> Dims:
    return Dims({"self": "mk", "mat2": "kn"}, ["mn"], reduce=_SUM, linear=("self", "mat2"), matmul=True, padded=frozenset("mkn"))


@rule("aten.bmm.default")
def _bmm(call: Call) -> Dims:
    return Dims({"self": "bmk", "mat2": "bkn"}, ["bmn"], reduce=_SUM, linear=("self", "mat2"), matmul=True)


@rule("aten.mv.default")
def _mv(call: Call) -> Dims:
    return Dims({"self": "mk", "vec": "k"}, ["m"], reduce=_SUM, linear=("self", "vec"))


@rule("aten.dot.default")
def _dot(call: Call) -> Dims:
    return Dims({"self": "k", "tensor": "k"}, [""], reduce=_SUM, linear=("self", "tensor"))


@rule("aten.addmm.default")
def _addmm(call: Call) -> Dims:
    added = _added(call, "mn")
    return Dims({"self": added, "mat1": "mk", "mat2": "kn"}, ["mn"], reduce=_SUM, once=("self",), matmul=True)


@rule("aten.baddbmm.default")
def _baddbmm(call: Call) -> Dims:
    added = _added(call, "bmn")
    return Dims({"self": added, "batch1": "bmk", "batch2": "bkn"}, ["bmn"], reduce=_SUM, once=("self",), matmul=True)


def _added(call: Call, result: str) -> Labels:
    """Labels of the tensor that is added to a product and broadcasts to it."""
    shape = call.shape("self")
    return [None if size == 1 else label for size, label in zip(shape, result[len(result) - len(shape) :])]


def _mask(call: Call, name: str) -> Labels:
    """Labels of a mask that broadcasts to [b, h, t, s]."""
    operand = call.operand(name)
    shape = () if operand is None else operand.shape
    labels = "bh.."[4 - len(shape) :]
    return [None if size == 1 or label == "." else label for size, label in zip(shape, labels)]


def _attention(call: Call, operands: dict[str, str], results: list[str]) -> Dims:
    """Batch and heads may be split. Grouped query heads stay with their key/value head: the key/value heads are split too,
    or, where there are fewer of them than ranks, whole, and a rank takes the one that its query heads belong to."""
    label, shares = heads_label(call)
    whole = {"k", "v"} if shares else set()

    def labels(name: str, text: str) -> Labels:
        return ["b", None if name in whole else label, *[None] * (len(text) - 2)]

    masks = {name: ["b" if x == "b" else label if x == "h" else None for x in _mask(call, name)] for name in ("mask", "dropout_mask")}
    given = {name: labels(name, text) for name, text in operands.items()}
    return Dims(
        {**given, **masks},
        [labels("k" if shares and text.startswith("bhs") else "", text) for text in results],
        reduce={"h": "sum"} if shares else {},
        emit={"h": share_heads(call)} if shares else {},
        offers=sequence_offers(call, results) if label == "h" else {},
    )


def heads_label(call: Call) -> tuple[str | None, bool]:
    """The label of the query heads if they can be split, and whether the key/value heads then are whole, and shared."""
    ranks, heads, groups = call.num_ranks, call.shape("q")[1], call.shape("k")[1]
    splits = [operand.placement for operand in call.operands if isinstance(operand.placement, Shard)]
    contiguous = all(split.outer == 1 for split in splits if split.dim == 1)
    shares = contiguous and ranks % groups == 0 and groups < ranks and heads % ranks == 0
    return "h" if heads == groups or (contiguous and groups % ranks == 0) or shares else None, shares


def sequence_offers(call: Call, results: list[str]) -> dict[Label, tuple[Placement | None, ...]]:
    """Attention over a split sequence exchanges it for split heads, and each result [B, H, T, D] back."""
    splits = {operand.name: operand.placement for operand in call.operands if isinstance(operand.placement, Shard)}
    queries = next((splits[name] for name in ("grad", "q") if name in splits), None)
    keys = splits.get("k", queries)
    if queries is None or queries.dim != 2:
        return {}
    return {"h": tuple({"bhtd": queries, "bhte": queries, "bhsd": keys, "bhse": keys}.get(text) for text in results)}


def share_heads(call: Call, prepare: Callable = lambda build, args: args) -> Emit:
    """Local attention with the one key/value head of this rank's query heads; its gradient stands among zeros."""
    groups = call.shape("k")[1]

    def emit(build, args, kwargs):
        args = prepare(build, args)
        names = [argument.name for argument in call.node.target._schema.arguments]
        head = build.call(aten.div.Tensor_mode, build.axis_index(), call.num_ranks // groups, rounding_mode="floor")
        index = build.call(aten.view.default, head, [1])
        args = [build.call(aten.index_select.default, x, 1, index) if name in ("k", "v") else x for name, x in zip(names, args)]
        called = build.call(call.node.target, *args, **kwargs)
        parts = [build.call(operator.getitem, called, i) for i in range(len(call.results))]
        if len(parts) < 3:
            return parts
        place = build.call(aten.arange.start_step, 0, groups, 1, dtype=torch.int64, device=head.meta["val"].device)
        mine = build.call(aten.view.default, build.call(aten.eq.Tensor, place, head), [1, groups, 1, 1])
        return [parts[0], *(_among_zeros(build, part, mine, groups) for part in parts[1:3]), *parts[3:]]

    return emit


def _among_zeros(build, part, mine, groups: int):
    """[B, 1, S, D] -> [B, G, S, D], zero but at the head where `mine` is true."""
    value = part.meta["val"]
    shape = [value.shape[0], groups, *value.shape[2:]]
    zero = build.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    return build.call(aten.where.self, mine, build.call(aten.expand.default, part, shape), zero)


@rule("graphacc.sdpa.default")
def _sdpa(call: Call) -> Dims:
    return _attention(call, {"q": "bhtd", "k": "bhsd", "v": "bhse"}, ["bhte", "bht"])


@rule("graphacc.sdpa_backward.default")
def _sdpa_backward(call: Call) -> Dims:
    operands = {"grad": "bhte", "q": "bhtd", "k": "bhsd", "v": "bhse", "out": "bhte", "lse": "bht"}
    return _attention(call, operands, ["bhtd", "bhsd", "bhse"])


def _batch_first(rank: int) -> Labels:
    return ["b", *[None] * (rank - 1)]


@rule("aten.convolution.default")
def _convolution(call: Call) -> Dims:
    rank = len(call.shape("input"))
    linear = () if call.operand("bias") is not None else ("input", "weight")
    return Dims({"input": _batch_first(rank)}, [_batch_first(rank)], linear=linear)


@rule("aten.convolution_backward.default")
def _convolution_backward(call: Call) -> Dims:
    batch = _batch_first(len(call.shape("input")))
    whole = [None] * len(batch)
    return Dims({"grad_output": batch, "input": batch}, [batch, whole, [None]], reduce={"b": "sum"})
