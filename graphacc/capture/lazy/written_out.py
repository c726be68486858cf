"""Operators that are recorded in elementary ones, because torch_xla's own form is wrong, slow to partition, or runs on the host."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphacc.capture.decompositions import decompositions

aten = torch.ops.aten

_BY_DECOMPOSITION = (
    aten.native_batch_norm.default,  # torch_xla's running variance is biased, torch's is not
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm.default,  # torch_xla takes HLO's batch-norm, for which XLA gathers what is split
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.linalg_vector_norm.default,  # torch_xla gives a wrong number for the norm of order infinity
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
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
        aten.linalg_inv_ex.default: _refused,  # torch_xla's `info` has another shape
    }


def _count_nonzero(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    return (x != 0).sum(dim) if dim is not None else (x != 0).sum()


def _refused(*args, **kwargs):
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
