"""Reductions and scans. An empty list of dims, or none, means all dims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, is_float, wide
from graphacc.lowering.extremes import largest, smallest
from graphacc.lowering.registry import register


def axes(x, dim) -> tuple[int, ...]:
    """The dims to reduce, non-negative."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    return tuple(d % max(x.ndim, 1) for d in dims) if dims and x.ndim else tuple(range(x.ndim))


def _reduce(function, ctx, x, dim=None, keepdim=False, **_dtype):
    return cast(function(x, axis=axes(x, dim), keepdims=keepdim), ctx.dtype)


def _reduce_to_extreme(function, ctx, x, dim=None, keepdim=False):
    return function(x, axes(x, dim), keepdim)


def _reduce_in_result(function, ctx, x, dim=None, keepdim=False, **_dtype):
    """The operand is cast to the result's dtype first: sums of integers are 64-bit; bf16 is summed in fp32."""
    x = cast(x, wide(ctx.dtype))
    return cast(function(x, axis=axes(x, dim), keepdims=keepdim), ctx.dtype)


def _register_reductions():
    for name, function in {"any": jnp.any, "all": jnp.all}.items():
        register(*(f"aten.{name}.{overload}" for overload in ("default", "dim", "dims")))(functools.partial(_reduce, function))
    for name, function in {"amax": largest, "amin": smallest}.items():
        register(f"aten.{name}.default", f"prims.{name}.default")(functools.partial(_reduce_to_extreme, function))
    tables = {"sum": jnp.sum, "nansum": jnp.nansum, "mean": jnp.mean, "prod": jnp.prod}
    overloads = {
        "sum": ("default", "dim_IntList"),
        "nansum": ("default",),
        "mean": ("default", "dim"),
        "prod": ("default", "dim_int"),
    }
    for name, function in tables.items():
        register(*(f"aten.{name}.{overload}" for overload in overloads[name]))(functools.partial(_reduce_in_result, function))
    register("prims.sum.default")(functools.partial(_reduce_in_result, jnp.sum))
    register("prims.prod.default")(functools.partial(_reduce_in_result, jnp.prod))


_register_reductions()


@register("aten.max.default")
def _max(ctx, x):
    return largest(x, axes(x, None))


@register("aten.min.default")
def _min(ctx, x):
    return smallest(x, axes(x, None))


def _arg(function, x, dim, keepdim):
    if dim is None:
        index = function(x.reshape(-1), axis=0)
        return index.reshape((1,) * x.ndim) if keepdim else index
    return function(x, axis=dim, keepdims=keepdim) if x.ndim else jnp.zeros((), np.int64)


def _comparable(x):
    return x.astype(np.int8) if x.dtype == bool else x


@register("aten.argmax.default")
def _argmax(ctx, x, dim=None, keepdim=False):
    return cast(_arg(jnp.argmax, _comparable(x), dim, keepdim), ctx.dtype)


@register("aten.argmin.default")
def _argmin(ctx, x, dim=None, keepdim=False):
    return cast(_arg(jnp.argmin, _comparable(x), dim, keepdim), ctx.dtype)


@register("aten.max.dim")
def _max_dim(ctx, x, dim, keepdim=False):
    index = _arg(jnp.argmax, _comparable(x), dim, keepdim)
    return largest(x, axes(x, dim), keepdim), cast(index, np.int64)


@register("aten.min.dim")
def _min_dim(ctx, x, dim, keepdim=False):
    index = _arg(jnp.argmin, _comparable(x), dim, keepdim)
    return smallest(x, axes(x, dim), keepdim), cast(index, np.int64)


@register("aten.aminmax.default")
def _aminmax(ctx, x, *, dim=None, keepdim=False):
    return tuple(function(x, axes(x, dim), keepdim) for function in (smallest, largest))


@register("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def _count_nonzero(ctx, x, dim=None):
    return jnp.sum((x != 0).astype(np.int64), axis=axes(x, dim))


def variance(x, dim, correction, keepdim):
    """Mean of squared distances to the mean (both in the wide dtype), with `correction` taken off the count, and the mean."""
    dims = axes(x, dim)
    count = float(np.prod([x.shape[d] for d in dims]))
    x = cast(x, wide(x.dtype))
    mean = jnp.mean(x, axis=dims, keepdims=True)
    squares = jnp.sum(jnp.square(jnp.abs(x - mean)), axis=dims, keepdims=keepdim)
    return squares / max(count - (1 if correction is None else correction), 0.0), mean if keepdim else jnp.squeeze(mean, dims)


@register("aten.var.correction", "prims.var.default")
def _var(ctx, x, dim=None, correction=None, keepdim=False, output_dtype=None):
    return cast(variance(x, dim, correction, keepdim)[0], ctx.dtype)


@register("aten.var.dim")
def _var_dim(ctx, x, dim, unbiased=True, keepdim=False):
    return cast(variance(x, dim, int(unbiased), keepdim)[0], ctx.dtype)


@register("aten.std.correction")
def _std(ctx, x, dim=None, *, correction=None, keepdim=False):
    return cast(jnp.sqrt(variance(x, dim, correction, keepdim)[0]), ctx.dtype)


@register("aten.var_mean.correction")
def _var_mean(ctx, x, dim=None, *, correction=None, keepdim=False):
    result, mean = variance(x, dim, correction, keepdim)
    return cast(result, ctx.element(0).dtype), cast(mean, ctx.element(1).dtype)


@register("aten.std_mean.correction")
def _std_mean(ctx, x, dim=None, *, correction=None, keepdim=False):
    result, mean = variance(x, dim, correction, keepdim)
    return cast(jnp.sqrt(result), ctx.element(0).dtype), cast(mean, ctx.element(1).dtype)


@register("aten.linalg_vector_norm.default")
def vector_norm(ctx, x, order=2, dim=None, keepdim=False, *, dtype=None):
    x = cast(jnp.abs(x), wide(ctx.dtype))
    dims = axes(x, dim)
    if order in (float("inf"), float("-inf")):
        result = (largest if order > 0 else smallest)(x, dims, keepdim)
    elif order == 0:
        result = jnp.sum((x != 0).astype(x.dtype), axis=dims, keepdims=keepdim)
    elif order == 2:
        result = jnp.sqrt(jnp.sum(x * x, axis=dims, keepdims=keepdim))
    else:
        result = jnp.power(jnp.sum(jnp.power(x, order), axis=dims, keepdims=keepdim), 1.0 / order)
    return cast(result, ctx.dtype)


@register("aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype")
def _norm(ctx, x, order, dim, keepdim=False, *, dtype=None):
    return vector_norm(ctx, x, 2 if order is None else order, dim, keepdim)


@register("aten.norm.Scalar")
def _norm_all(ctx, x, order=2):
    return vector_norm(ctx, x, order)


@register("aten.logsumexp.default")
def _logsumexp(ctx, x, dim, keepdim=False):
    return cast(jax.nn.logsumexp(cast(x, wide(ctx.dtype)), axis=axes(x, dim), keepdims=keepdim), ctx.dtype)


@register("aten.trace.default")
def _trace(ctx, x):
    return cast(jnp.trace(cast(x, ctx.dtype)), ctx.dtype)


def _scan(function, ctx, x, dim, *, dtype=None):
    x = cast(x, wide(ctx.dtype))
    return cast(function(x, axis=dim % x.ndim) if x.ndim else x, ctx.dtype)


def _cumlogsumexp(x, axis):
    """XLA:CPU computes JAX's own by windows that repeat the exponentials."""
    return lax.associative_scan(jnp.logaddexp, x, axis=axis)


for _name, _function in {"cumsum": lax.cumsum, "cumprod": lax.cumprod, "logcumsumexp": _cumlogsumexp}.items():
    register(f"aten.{_name}.default")(functools.partial(_scan, _function))


def _scan_with_indices(better, x, dim):
    """Running best value of a dim and the index of its last occurrence; NaN wins."""
    if x.ndim == 0 or x.size == 0:
        return x, jnp.zeros(x.shape, np.int64)

    def pick(left, right):
        take = better(right[0], left[0]) | (right[0] == left[0])
        if is_float(x):
            take = (take & ~jnp.isnan(left[0])) | jnp.isnan(right[0])
        return jnp.where(take, right[0], left[0]), jnp.where(take, right[1], left[1])

    index = lax.broadcasted_iota(np.int64, x.shape, dim % x.ndim)
    return lax.associative_scan(pick, (x, index), axis=dim % x.ndim)


@register("aten.cummax.default")
def _cummax(ctx, x, dim):
    return _scan_with_indices(jnp.greater, x, dim)


@register("aten.cummin.default")
def _cummin(ctx, x, dim):
    return _scan_with_indices(jnp.less, x, dim)
