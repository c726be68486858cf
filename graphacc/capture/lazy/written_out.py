"""Operators that are recorded in elementary ones, because torch_xla's own form is wrong, slow to partition, or runs on the host."""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import decomposition
from graphacc.capture.decompositions import decompositions
from graphacc.lowering.registry import find

aten = torch.ops.aten

_BY_DECOMPOSITION = (
    aten.native_batch_norm.default,  # torch_xla's running variance is biased, torch's is not
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm.default,  # torch_xla takes HLO's batch-norm, for which XLA gathers what is split
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._linalg_solve_ex.default,  # torch's backward goes by which of a matrix and its transpose was factored
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten.aminmax.default,  # torch_xla gives its results the shape of the whole tensor
    aten.roll.default,  # torch_xla divides by the size of a dim, which may be zero: the process would die
    aten.linalg_vector_norm.default,  # torch_xla gives a wrong number for the norm of order infinity
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
    aten.logit.default,  # torch_xla does not clamp to [eps, 1 - eps]
    aten.logit_backward.default,
    aten.elu_backward.default,  # torch_xla takes the input for the result: also the gradients of celu and selu
    aten.hardtanh_backward.default,  # these three let a gradient through at the bounds, also relu6's at 0
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.floor_divide.default,  # torch takes the remainder away first, so that 3 // 0.3 is 9
    aten.threshold.default,  # the next ones hide a NaN
    aten.threshold_backward.default,
    aten.softshrink.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.logsumexp.default,  # torch_xla subtracts an infinite maximum
)

_BY_RULE = (
    aten.linalg_inv_ex.default,  # torch_xla's `info` has another shape
    aten.cummax.default,  # of equal elements torch takes the last
    aten.unfold_copy.default,
    aten.clamp.default,  # a NaN stays one, and integers with a bound that is a float become floats
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.complex.default,
    aten.polar.default,
    aten.bitwise_right_shift.Tensor,  # torch_xla shifts zeros into negative integers
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.bitwise_left_shift.Tensor,  # multiplies by powers of 2, which are not exact and have no result for shifts by as many bits as there are
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
)


@functools.cache
def written_out() -> dict[torch._ops.OpOverload, Callable]:
    """Operator -> the function that is recorded in its place."""
    table = {operator: decompositions()[operator] for operator in _BY_DECOMPOSITION}
    return table | {
        aten.as_strided.default: _as_strided,
        aten.as_strided_copy.default: _as_strided,
        aten.as_strided_scatter.default: _as_strided_scatter,
        aten.histc.default: _histc,
        aten.count_nonzero.default: _count_nonzero,  # torch_xla records the shape of the whole tensor
        aten.count_nonzero.dim_IntList: _count_nonzero,
        aten.diagonal_backward.default: decomposition(aten.diagonal_backward.default),  # by diagonal_scatter, see `is_wrong`
        aten._chunk_cat.default: decomposition(aten._chunk_cat.default),  # torch's own form resizes, which is lost
        aten._efficientzerotensor.default: _zeros,  # the gradient of sgn, a kind of tensor that torch_xla does not know
    } | dict.fromkeys(_BY_RULE, _by_rule)


@functools.cache
def written_out_where_wrong() -> dict[torch._ops.OpOverload, Callable]:
    """The same for those that torch_xla gets wrong for some arguments (see `is_wrong`)."""
    return {
        aten.diagonal.default: _diagonal,
        aten.diagonal_copy.default: _diagonal,
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.pow.Tensor_Scalar: _pow,
    } | dict.fromkeys((*_ROUNDING, *_INTEGERS_WRONG), _by_rule)


_AVG_POOLS = frozenset(
    {aten.avg_pool2d.default, aten.avg_pool3d.default, aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default}
)
_ADAPTIVE = frozenset({aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default})
_NLL_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss_backward.default})
_RESAMPLED = frozenset(
    {aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default}
)
_SOFTMAXES = frozenset(
    {aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default, aten._log_softmax_backward_data.default}
)
_ROUNDING = frozenset({aten.div.Tensor_mode, aten.div.Scalar_mode})
_INTEGERS_WRONG = frozenset({aten.cumsum.default, aten.cumprod.default})
_MOVING = frozenset({aten.clone.default, aten._to_copy.default, aten.diagonal_scatter.default})
_DIAGONALS = frozenset({aten.diagonal.default, aten.diagonal_copy.default, aten.diagonal_scatter.default})
_ADAPTIVE_BACKWARD = {aten._adaptive_avg_pool2d_backward.default: 2, aten._adaptive_avg_pool3d_backward.default: 3}


def is_wrong(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether torch_xla's own form of an operator gives another result than torch for these arguments.

    It knows no divisor and no uneven last window of average pooling, pools to sizes that do not divide to wrong shapes, and is wrong about
    enlargement by fractions and distances of order 0 and infinity, broadcasts no batches of distances, drops the batch dims of singular values,
    and knows diagonals of the last two dims alone. It rounds inside a softmax in half precision, rounds a quotient of floats where torch takes the remainder
    away first, and gives cumulative sums of integers their dtype. The loss of one sample without a batch ends the process.
    """
    if computes_complex(func, args, kwargs):
        return True
    given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    if func in _RESAMPLED:
        return any(scale is not None and scale != int(scale) for scale in (given.get("scales_h"), given.get("scales_w")))
    if func in _AVG_POOLS:
        return bool(given.get("ceil_mode")) or given.get("divisor_override") is not None
    if func in _ADAPTIVE:
        return any(size % max(out, 1) for size, out in zip(args[0].shape[-len(args[1]) :], args[1]))
    if func in _ADAPTIVE_BACKWARD:
        dims = _ADAPTIVE_BACKWARD[func]
        return any(size % max(out, 1) for size, out in zip(args[1].shape[-dims:], args[0].shape[-dims:]))
    if func is aten._cdist_forward.default:
        return args[0].shape[:-2] != args[1].shape[:-2]
    if func in _SOFTMAXES:
        return args[0].dtype in (torch.float16, torch.bfloat16)
    if func in _ROUNDING:
        return kwargs.get("rounding_mode") == "floor" and any(isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()) for x in args)
    if func in _INTEGERS_WRONG:
        return not args[0].is_floating_point() and kwargs.get("dtype") is None
    if func is aten._linalg_svd.default:
        return args[0].dim() > 2
    if func in _DIAGONALS:
        rank = args[0].dim()
        return (given.get("dim1", 0) % rank, given.get("dim2", 1) % rank) != (rank - 2, rank - 1)
    if func in _NLL_LOSSES:
        return given["self"].dim() == 1
    return func is aten._pdist_forward.default and given.get("p", 2.0) in (0.0, math.inf)


def computes_complex(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether an operator computes with complex numbers, of which torch_xla's own forms drop imaginary parts and conjugations."""
    if func.is_view or func._schema.is_mutable or func in _MOVING or func._schema.name.endswith("_copy"):
        return False
    return any(isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex()) for x in pytree.tree_leaves((args, kwargs)))


def replacement(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Callable | None:
    """The function that is recorded in an operator's place; None for the operator's rule."""
    function = written_out().get(func) or written_out_where_wrong().get(func) or decompositions().get(func)
    return function or (None if computes_complex(func, args, kwargs) and find(func) is not None else decomposition(func))


def _count_nonzero(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    return (x != 0).sum(dim) if dim is not None else (x != 0).sum()


def _with_last(x: Tensor, dim1: int, dim2: int) -> list[int]:
    """The order of dims in which these two come last."""
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    return [dim for dim in range(x.dim()) if dim not in (dim1, dim2)] + [dim1, dim2]


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return x.permute(_with_last(x, dim1, dim2)).diagonal(offset, -2, -1)


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    order = _with_last(x, dim1, dim2)
    result = x.permute(order).diagonal_scatter(src, offset, -2, -1)
    return result.permute([order.index(dim) for dim in range(x.dim())])


def _zeros(size: Sequence[int], *, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _pow(x: Tensor, exponent) -> Tensor:
    """With a complex exponent as a tensor, which the rule of powers wants."""
    return torch.pow(x, torch.full((), exponent, dtype=torch.result_type(x, exponent))) if isinstance(exponent, complex) else NotImplemented


def _by_rule(*args, **kwargs):
    """By the operator's rule in `graphacc.lowering`, in no other operators."""
    return NotImplemented


def _positions(size: Sequence[int], stride: Sequence[int], offset: int | None, like: Tensor) -> Tensor:
    """Where the elements of a strided view lie in the flat tensor, int64 [prod(size)]."""
    positions = torch.full((), offset or 0, dtype=torch.int64, device=like.device)
    for dim, (length, step) in enumerate(zip(size, stride)):
        along = torch.arange(length, device=like.device) * step
        positions = positions + along.reshape([length] + [1] * (len(size) - dim - 1))
    return positions.reshape(-1)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    return x.reshape(-1).index_select(0, _positions(size, stride, storage_offset, x)).reshape(size)


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    flat = x.reshape(-1)
    return flat.scatter(0, _positions(size, stride, storage_offset, x), src.reshape(-1)).reshape(x.shape)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts per bin of equal width; values outside [min, max] are not counted. The bounds are given, not found in the values."""
    if min >= max:
        return NotImplemented
    wide = x.to(torch.float64).reshape(-1)
    place = ((wide - min) * (bins / (max - min))).floor().clamp(max=bins - 1).to(torch.int64)
    counted = (wide >= min) & (wide <= max)
    place = torch.where(counted, place, bins)
    return torch.zeros(bins + 1, dtype=x.dtype, device=x.device).scatter_add(0, place, torch.ones_like(wide, dtype=x.dtype))[:bins]
