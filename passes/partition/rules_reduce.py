"""Rules of reductions, and of operators that normalise or order along some dims."""

import math

import torch

from graphacc.passes.partition.rules import Call, Communicating, Dims, Emit, rule

aten = torch.ops.aten


def _reduced(call: Call, name: str = "self") -> tuple[list[int], bool]:
    """The dims that are reduced, and whether they stay as dims of size 1."""
    rank = len(call.shape(name))
    dims = call.arguments.get("dim", call.arguments.get("dims"))
    dims = [dims] if isinstance(dims, int) else dims
    return sorted({dim % max(rank, 1) for dim in dims} if dims else range(rank)), bool(call.arguments.get("keepdim", False))


def _reduction(
    call: Call, op: str | None, *, name: str = "self", emit: Emit | None = None, masks: bool = True, **facts
) -> Dims:
    """`op` over the reduced dims; None if `emit` reduces over the ranks itself.

    With `masks`, elements that are neutral for `op` do not change what is computed locally, so that padding can be masked.
    """
    gone, keepdim = _reduced(call, name)
    labels = range(len(call.shape(name)))
    result = [None if dim in gone else dim for dim in labels if keepdim or dim not in gone]
    emits = {dim: emit for dim in gone} if emit else {}
    padded = frozenset(dim for dim in labels if dim not in gone or (masks and op is not None))
    return Dims({name: labels}, [result] * len(call.results), reduce=dict.fromkeys(gone, op), emit=emits, padded=padded, **facts)


@rule("aten.sum.default aten.sum.dim_IntList")
def _sum(call: Call) -> Dims:
    return _reduction(call, "sum", linear=("self",))


@rule("prims.sum.default")
def _prims_sum(call: Call) -> Dims:
    return _reduction(call, "sum", name="inp", linear=("inp",))


@rule("aten.mean.default aten.mean.dim")
def _mean(call: Call) -> Dims:
    gone, keepdim = _reduced(call)
    count = math.prod(call.shape("self")[dim] for dim in gone)

    def emit(build, args, kwargs):
        total = build.call(aten.sum.dim_IntList, args[0], gone, keepdim, **kwargs)
        return build.call(aten.div.Scalar, total, count)

    return _reduction(call, "sum", emit=emit, linear=("self",))


@rule("aten.amax.default aten.max.default")
def _amax(call: Call) -> Dims:
    return _reduction(call, "max")


@rule("aten.amin.default aten.min.default")
def _amin(call: Call) -> Dims:
    return _reduction(call, "min")


@rule("aten.any.default aten.any.dim aten.any.dims aten.all.default aten.all.dim")
def _any(call: Call) -> Dims:
    """Truth is reduced as an integer: not every backend reduces booleans."""
    op = "max" if call.node.target._schema.name == "aten::any" else "min"

    def emit(build, args, kwargs):
        local = build.call(call.node.target, *args, **kwargs)
        reduced = build.all_reduce(build.call(aten._to_copy.default, local, dtype=torch.int32), op)
        return build.call(aten.ne.Scalar, reduced, 0)

    return _reduction(call, None, emit=Communicating(emit))


def _sum_squares(build, x, mean, gone: list[int], keepdim: bool):
    """Local sum of (x - mean)² over the dims `gone`; `mean` keeps them as size 1."""
    centred = build.call(aten.sub.Tensor, x, mean)
    return build.call(aten.sum.dim_IntList, build.call(aten.mul.Tensor, centred, centred), gone, keepdim)


def _global_mean(build, x, gone: list[int], count: int):
    total = build.all_reduce(build.call(aten.sum.dim_IntList, x, gone, True), "sum")
    return build.call(aten.div.Scalar, total, count)


def _count(call: Call, name: str) -> tuple[int, float]:
    """Number of elements reduced, and the divisor of the variance."""
    gone, _ = _reduced(call, name)
    count = math.prod(call.shape(name)[dim] for dim in gone)
    correction = call.arguments.get("correction")
    return count, max(0.0, count - (1 if correction is None else correction))


@rule("aten.var.correction prims.var.default")
def _var(call: Call) -> Dims:
    """Two passes, as the single-device operator: the mean over all ranks first, then the squares around it."""
    name = "inp" if call.node.target._schema.name == "prims::var" else "self"
    gone, keepdim = _reduced(call, name)
    count, divisor = _count(call, name)

    def emit(build, args, kwargs):
        squares = _sum_squares(build, args[0], _global_mean(build, args[0], gone, count), gone, keepdim)
        return build.call(aten.div.Scalar, squares, divisor)

    return _reduction(call, "sum", name=name, emit=Communicating(emit), masks=False)


@rule("aten.var_mean.correction")
def _var_mean(call: Call) -> Dims:
    gone, keepdim = _reduced(call)
    count, divisor = _count(call, "self")

    def emit(build, args, kwargs):
        mean = _global_mean(build, args[0], gone, count)
        squares = build.all_reduce(_sum_squares(build, args[0], mean, gone, keepdim), "sum")
        kept = mean if keepdim else build.call(aten.squeeze.dims, mean, gone)
        return [build.call(aten.div.Scalar, squares, divisor), kept]

    return _reduction(call, None, emit=Communicating(emit))


@rule("aten.linalg_vector_norm.default")
def _vector_norm(call: Call) -> Dims:
    """The 2-norm as the root of a sum of squares; other norms are taken of whole tensors along the reduced dims."""
    gone, keepdim = _reduced(call)
    if call["ord"] != 2:
        return _along(call, gone, keepdim=keepdim)

    def emit(build, args, kwargs):
        squares = build.call(aten.sum.dim_IntList, build.call(aten.mul.Tensor, args[0], args[0]), gone, keepdim, **kwargs)
        return build.call(aten.sqrt.default, build.all_reduce(squares, "sum"))

    return _reduction(call, None, emit=Communicating(emit))


def _along(call: Call, whole: list[int], *, keepdim: bool = True, name: str = "self") -> Dims:
    """Every tensor has the same dims; those in `whole` are never split, and leave the results without `keepdim`."""
    labels = [None if dim in whole else dim for dim in range(len(call.shape(name)))]
    result = labels if keepdim else [label for dim, label in enumerate(labels) if dim not in whole]
    return Dims({operand.name: labels for operand in call.operands}, [result] * len(call.results))


@rule(
    "aten.prod.dim_int aten.argmax.default aten.argmin.default aten.max.dim aten.min.dim "
    "aten.logsumexp.default aten.median.dim aten.nanmedian.dim aten.kthvalue.default aten.mode.default"
)
def _reduced_whole(call: Call) -> Dims:
    """Reductions that take the whole dim: the others may be split."""
    gone, keepdim = _reduced(call)
    return _along(call, gone, keepdim=keepdim)


@rule(
    "aten._softmax.default aten._log_softmax.default aten._safe_softmax.default aten._softmax_backward_data.default "
    "aten._log_softmax_backward_data.default aten.sort.default aten.sort.stable aten.topk.default "
    "aten.cummax.default aten.cummin.default aten.logcumsumexp.default"
)
def _whole(call: Call) -> Dims:
    name = call.operands[0].name
    return _along(call, [call.dim(name, call["dim"])], name=name)


@rule("aten.histc.default")
def _histogram(call: Call) -> Dims:
    """Counts add up over the ranks if the range of the bins does not depend on the data."""
    labels = range(len(call.shape("self")))
    return Dims({"self": labels}, [[None]], reduce=dict.fromkeys(labels, "sum") if call["min"] != call["max"] else {})
