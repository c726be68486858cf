"""Sorting and selection. NaN counts as the largest value, as in torch; indices are int64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, is_float
from graphacc.lowering.registry import register


def sort_with_indices(x, dim, descending=False):
    """Stable sort along `dim`: values and where they stood."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    dim = dim % x.ndim
    index = lax.broadcasted_iota(np.int64, x.shape, dim)
    operands = (lax.rev(x, [dim]), lax.rev(index, [dim])) if descending else (x, index)
    key = _key(operands[0])
    _, values, index = lax.sort((key, *operands), dimension=dim, is_stable=True, num_keys=1)
    return (lax.rev(values, [dim]), lax.rev(index, [dim])) if descending else (values, index)


def _key(x):
    """What to compare: XLA orders -NaN first, torch puts every NaN last; it orders -0 before 0, torch takes them as equal."""
    if x.dtype == bool:
        return x.astype(np.int8)
    return jnp.where(jnp.isnan(x), np.asarray(np.nan, x.dtype), x + np.zeros((), x.dtype)) if is_float(x) else x


@register("aten.sort.default")
def _sort(ctx, x, dim=-1, descending=False):
    return sort_with_indices(x, dim, descending)


@register("aten.sort.stable")
def _sort_stable(ctx, x, *, stable=None, dim=-1, descending=False):
    return sort_with_indices(x, dim, descending)


@register("aten.argsort.default")
def _argsort(ctx, x, dim=-1, descending=False):
    return sort_with_indices(x, dim, descending)[1]


@register("aten.argsort.stable")
def _argsort_stable(ctx, x, *, stable, dim=-1, descending=False):
    return sort_with_indices(x, dim, descending)[1]


@register("aten.topk.default")
def _topk(ctx, x, k, dim=-1, largest=True, sorted=True):
    if x.ndim == 0 or not largest or x.dtype == bool:
        values, index = sort_with_indices(x, dim, largest)
        return (values, index) if x.ndim == 0 else tuple(lax.slice_in_dim(y, 0, k, axis=dim % x.ndim) for y in (values, index))
    values, index = lax.top_k(jnp.moveaxis(_key(x), dim, -1), k)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim).astype(np.int64)


def _pick(values, index, place, dim, keepdim):
    """The elements at `place` (broadcastable, 1 along `dim`) of sorted values and their indices."""
    picked = tuple(jnp.take_along_axis(y, place, dim, mode="promise_in_bounds") for y in (values, index))
    return picked if keepdim else tuple(jnp.squeeze(y, dim) for y in picked)


def _select_order(x, dim, keepdim, place):
    """Sort along `dim`, take what `place(sorted, length)` says."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    values, index = sort_with_indices(x, dim)
    return _pick(values, index, place(values, x.shape[dim]), dim, keepdim)


def _middle(values, length, dim):
    """The lower median, or the first NaN where there is one."""
    shape = [1 if d == dim % values.ndim else n for d, n in enumerate(values.shape)]
    middle = jnp.full(shape, (length - 1) // 2, np.int64)
    if not is_float(values):
        return middle
    numbers = jnp.sum(~jnp.isnan(values), axis=dim, keepdims=True)
    return jnp.where(numbers < length, jnp.minimum(numbers, length - 1), middle)


def _middle_number(values, length, dim):
    """The lower median of what is no NaN."""
    numbers = jnp.sum((values == values), axis=dim, keepdims=True)
    return jnp.maximum((numbers - 1) // 2, 0)


@register("aten.median.dim")
def _median_dim(ctx, x, dim, keepdim=False):
    return _select_order(x, dim, keepdim, functools.partial(_middle, dim=dim))


@register("aten.nanmedian.dim")
def _nanmedian_dim(ctx, x, dim, keepdim=False):
    return _select_order(x, dim, keepdim, functools.partial(_middle_number, dim=dim))


@register("aten.median.default")
def _median(ctx, x):
    return _select_order(x.reshape(-1), 0, False, functools.partial(_middle, dim=0))[0]


@register("aten.nanmedian.default")
def _nanmedian(ctx, x):
    return _select_order(x.reshape(-1), 0, False, functools.partial(_middle_number, dim=0))[0]


@register("aten.kthvalue.default")
def _kthvalue(ctx, x, k, dim=-1, keepdim=False):
    return _select_order(
        x, dim, keepdim, lambda values, _: jnp.full([1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)], k - 1)
    )


@register("aten.mode.default")
def _mode(ctx, x, dim=-1, keepdim=False):
    """The smallest of the most frequent values, and the last place where it stands."""
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    values, index = sort_with_indices(x, dim)
    count = jnp.sum(jnp.expand_dims(values, dim % x.ndim) == jnp.expand_dims(values, dim % x.ndim + 1), axis=dim % x.ndim)
    place = jnp.argmax(count, axis=dim, keepdims=True)
    return _pick(values, index, place + jnp.max(count, axis=dim, keepdims=True) - 1, dim, keepdim)


def _search(sorted_sequence, values, right, dtype):
    side = "right" if right else "left"
    if sorted_sequence.ndim == 1:
        return jnp.searchsorted(sorted_sequence, values, side=side).astype(dtype)
    rows = sorted_sequence.reshape(-1, sorted_sequence.shape[-1])
    found = jax.vmap(lambda row, value: jnp.searchsorted(row, value, side=side))(rows, values.reshape(rows.shape[0], -1))
    return found.reshape(values.shape).astype(dtype)


@register("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def _searchsorted(ctx, sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    return _search(sequence, jnp.asarray(values), right or side == "right", ctx.dtype)


@register("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def _bucketize(ctx, values, boundaries, *, out_int32=False, right=False):
    return _search(boundaries, jnp.asarray(values), right, ctx.dtype)


@register("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", "aten.isin.Scalar_Tensor")
def _isin(ctx, elements, tests, *, assume_unique=False, invert=False):
    return jnp.isin(jnp.asarray(elements), jnp.asarray(tests), invert=invert)


@register("aten.histc.default")
def _histc(ctx, x, bins=100, min=0, max=0):
    """Counts of equal bins; elements outside [min, max] are dropped; an empty range means that of the data."""
    x = x.reshape(-1)
    low, high = (jnp.min(x), jnp.max(x)) if min == max and x.size else (cast(min, x.dtype), cast(max, x.dtype))
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.floor((x - low) * bins / (high - low)).astype(np.int64)
    inside = (x >= low) & (x <= high)
    place = jnp.where(inside, jnp.clip(place, 0, bins - 1), bins)
    return cast(jnp.zeros(bins + 1, np.int64).at[place].add(1, mode="promise_in_bounds")[:bins], ctx.dtype)
