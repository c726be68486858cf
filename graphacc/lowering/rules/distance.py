"""Gradients of distances between rows, and of a loss by margins between classes.

Legend: P, R rows, M features; N samples, C classes.
"""

import jax.numpy as jnp
import numpy as np

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register
from graphacc.lowering.settled import settled

_MEAN = 1  # ATen's number of the reduction


def _slope(difference, distance, p):
    """The derivative of a distance of order p by one difference; 0 where the distance is 0, as torch has it."""
    sign, size = jnp.sign(difference), jnp.abs(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return sign
    if np.isinf(p):
        return sign * (size == jnp.max(size, -1, keepdims=True))
    if p < 1:
        sign = jnp.where(difference == 0, 0, sign)
        size = jnp.where(difference == 0, 1, size)
    slope = difference / distance if p == 2 else sign * size ** (p - 1) / distance ** (p - 1)
    return jnp.where(distance == 0, 0, slope)


@register("aten._cdist_backward.default")
def _cdist_backward(ctx, grad, x1, x2, p, cdist):
    """The gradient of x1 [..., P, M], for distances [..., P, R] to x2 [..., R, M]."""
    grad, x1, x2, cdist = (cast(x, wide(x.dtype)) for x in (grad, x1, x2, cdist))
    x1, x2 = (settled(x1), settled(x2)) if np.isinf(p) else (x1, x2)
    slope = _slope(x1[..., :, None, :] - x2[..., None, :, :], cdist[..., None], p)
    return cast(jnp.broadcast_to(jnp.sum(grad[..., None] * slope, axis=-2), ctx.shape), ctx.dtype)


@register("aten._pdist_backward.default")
def _pdist_backward(ctx, grad, x, p, pdist):
    """The gradient of x [P, M], for the distances of each pair i < j, in this order."""
    grad, x, pdist = (cast(value, wide(value.dtype)) for value in (grad, x, pdist))
    x = settled(x) if np.isinf(p) else x
    i, j = np.triu_indices(x.shape[0], 1)
    each = grad[:, None] * _slope(x[i] - x[j], pdist[:, None], p)
    return cast(jnp.zeros(x.shape, each.dtype).at[i].add(each).at[j].add(-each), ctx.dtype)


def _per_sample(grad, x, reduction):
    """The gradient of each sample's loss, [N, 1], and x as [N, C]."""
    rows = x.reshape(-1, x.shape[-1])
    grad = jnp.broadcast_to(grad.reshape(-1, 1), (rows.shape[0], 1))
    return grad / (rows.shape[0] if reduction == _MEAN else 1), rows


@register("aten.multi_margin_loss_backward.default")
def _multi_margin_loss_backward(ctx, grad, x, target, p, margin, weight=None, reduction=_MEAN):
    grad, x = cast(grad, wide(grad.dtype)), cast(x, wide(x.dtype))
    grad, rows = _per_sample(grad, x, reduction)
    is_target = target.reshape(-1, 1) == np.arange(rows.shape[1])
    own = jnp.take_along_axis(rows, target.reshape(-1, 1), 1)
    distance = margin - own + rows
    slope = jnp.where((distance > 0) & ~is_target, 1.0 if p == 1 else 2 * distance, 0.0) / rows.shape[1]
    slope = slope if weight is None else slope * jnp.take(cast(weight, rows.dtype), target.reshape(-1, 1))
    result = grad * jnp.where(is_target, -jnp.sum(slope, 1, keepdims=True), slope)
    return cast(result.reshape(ctx.shape), ctx.dtype)
