"""Softmax, normalisation, dropout's backward and losses: the parts of a network that reduce and rescale."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register


def _along(function, ctx, x, dim):
    x = cast(x, wide(ctx.dtype))
    return cast(function(x, axis=dim) if x.ndim else function(x.reshape(1), axis=0).reshape(()), ctx.dtype)


@register("aten._softmax.default")
def softmax(ctx, x, dim, half_to_float=False):
    return _along(jax.nn.softmax, ctx, x, dim)


@register("aten._safe_softmax.default")
def _safe_softmax(ctx, x, dim, dtype=None):
    """Rows that are masked entirely give zeros."""
    empty = jnp.all(x == -np.inf, axis=dim, keepdims=True)
    return jnp.where(empty, np.zeros((), ctx.dtype), softmax(ctx, x, dim))


@register("aten._log_softmax.default")
def _log_softmax(ctx, x, dim, half_to_float=False):
    return _along(jax.nn.log_softmax, ctx, x, dim)


@register("aten._softmax_backward_data.default")
def _softmax_backward(ctx, grad, output, dim, input_dtype):
    grad, output = (cast(x, wide(x.dtype)) for x in (grad, output))
    product = grad * output
    return cast(
        product - output * jnp.sum(product, axis=dim, keepdims=True) if product.ndim else jnp.zeros_like(product), ctx.dtype
    )


@register("aten._log_softmax_backward_data.default")
def _log_softmax_backward(ctx, grad, output, dim, input_dtype):
    grad, output = (cast(x, wide(x.dtype)) for x in (grad, output))
    total = jnp.sum(grad, axis=dim, keepdims=True) if grad.ndim else grad
    return cast(grad - jnp.exp(output) * total, ctx.dtype)


def _moments(x, dims, eps):
    """Mean and 1 / standard deviation over `dims`, which stay as 1."""
    mean = jnp.mean(x, axis=dims, keepdims=True)
    return mean, lax.rsqrt(jnp.mean(jnp.square(x - mean), axis=dims, keepdims=True) + np.asarray(eps, x.dtype))


@register("aten.native_layer_norm.default")
def _layer_norm(ctx, x, normalized_shape, weight, bias, eps):
    x = cast(x, wide(x.dtype))
    mean, rstd = _moments(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)
    out = (x - mean) * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return tuple(cast(value, ctx.element(i).dtype) for i, value in enumerate((out, mean, rstd)))


@register("aten.native_layer_norm_backward.default")
def _layer_norm_backward(ctx, grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    dtype = wide(x.dtype)
    grad, x, mean, rstd = (cast(y, dtype) for y in (grad, x, mean, rstd))
    inner = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    normal = (x - mean) * rstd
    scaled = grad if weight is None else grad * cast(weight, dtype)
    centred = scaled - jnp.mean(scaled, axis=inner, keepdims=True) - normal * jnp.mean(scaled * normal, axis=inner, keepdims=True)
    grads = (rstd * centred, jnp.sum(grad * normal, axis=outer), jnp.sum(grad, axis=outer))
    return tuple(None if ctx.val[i] is None else cast(value, ctx.element(i).dtype) for i, value in enumerate(grads))


@register("aten._fused_rms_norm.default")
def _rms_norm(ctx, x, normalized_shape, weight, eps):
    wide_x = cast(x, wide(x.dtype))
    eps = jnp.finfo(x.dtype).eps if eps is None else eps
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide_x), axis=dims, keepdims=True) + np.asarray(eps, wide_x.dtype))
    out = wide_x * rstd
    return tuple(cast(y, ctx.element(i).dtype) for i, y in enumerate((out if weight is None else out * weight, rstd)))


@register("aten.native_dropout_backward.default")
def _dropout_backward(ctx, grad, mask, scale):
    return cast(cast(grad, wide(ctx.dtype)) * mask * np.asarray(scale, wide(ctx.dtype)), ctx.dtype)


def _class_weights(logp, target, weight, ignore_index):
    """The target with a class dim of 1 (ignored ones read class 0), and each position's weight, 0 where it is ignored."""
    dim = 1 if logp.ndim > 1 else 0
    target = jnp.expand_dims(target, dim)
    used = target != ignore_index
    target = jnp.where(used, target, 0)
    weights = jnp.ones(target.shape, logp.dtype) if weight is None else weight[target]
    return target, jnp.where(used, weights, np.zeros((), logp.dtype)), dim


_NONE, _MEAN, _SUM = 0, 1, 2


@register("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll_loss(ctx, logp, target, weight, reduction, ignore_index):
    dtype = wide(logp.dtype)
    target, weights, dim = _class_weights(cast(logp, dtype), target, weight, ignore_index)
    picked = cast(jnp.take_along_axis(logp, target, dim, mode="promise_in_bounds"), dtype)
    loss = jnp.where(weights == 0, np.zeros((), dtype), -picked * weights).squeeze(dim)
    total = jnp.sum(weights)
    if reduction == _NONE:
        total = jnp.zeros((), dtype)
    else:
        loss = jnp.sum(loss) / total if reduction == _MEAN else jnp.sum(loss)
    return cast(loss, ctx.element(0).dtype), cast(total, ctx.element(1).dtype)


@register("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_loss_backward(ctx, grad, logp, target, weight, reduction, ignore_index, total_weight):
    dtype = wide(logp.dtype)
    target, weights, dim = _class_weights(cast(logp, dtype), target, weight, ignore_index)
    grad = cast(grad, dtype) / cast(total_weight, dtype) if reduction == _MEAN else cast(grad, dtype)
    grad = jnp.expand_dims(grad, dim) if grad.ndim else grad
    classes = lax.broadcasted_iota(target.dtype, logp.shape, dim)
    return cast(jnp.where((classes == target) & (weights != 0), -grad * weights, np.zeros((), dtype)), ctx.dtype)


@register("aten.log_sigmoid_forward.default")
def _log_sigmoid(ctx, x):
    x = cast(x, wide(x.dtype))
    decay = jnp.exp(-jnp.abs(x))
    buffer = decay if ctx.element(1).shape == x.shape else jnp.zeros(ctx.element(1).shape)
    return cast(jnp.minimum(x, 0) - jnp.log1p(decay), ctx.element(0).dtype), cast(buffer, ctx.element(1).dtype)
