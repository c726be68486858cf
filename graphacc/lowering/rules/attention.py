"""Scaled dot-product attention and its backward, numerically as `graphacc.ops.attention`.

Legend: B batch, H query heads, G key/value heads, R = H / G query heads per key head, T query length, S key length,
D head size, E value head size. Queries are viewed as [B, G, R, T, D], so keys and values are never repeated.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register
from graphacc.lowering.rules.matmul import dot

_HEADS = ((0, 1), (0, 1))


def _group(x, groups):
    """[B, H, ...] -> [B, G, R, ...]."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _group_mask(mask, heads, groups):
    """Broadcastable to [B, H, T, S] -> broadcastable to [B, G, R, T, S]."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return _group(mask, groups) if mask.shape[1] == heads else mask[:, :, None]


def _scores(q, k, mask, is_causal, scale):
    """[B, G, R, T, D], [B, G, S, D] -> [B, G, R, T, S], masked positions at -inf, in fp32 (fp64)."""
    scores = dot(q, k, ((4,), (3,)), _HEADS, wide(q.dtype)) * np.asarray(scale, wide(q.dtype))
    if is_causal:
        query, key = (lax.broadcasted_iota(np.int32, scores.shape[-2:], dim) for dim in (0, 1))
        scores = jnp.where(query >= key, scores, -np.inf)
    if mask is None:
        return scores
    mask = _group_mask(mask, q.shape[1] * q.shape[2], q.shape[1])
    return jnp.where(mask, scores, -np.inf) if mask.dtype == bool else scores + cast(mask, scores.dtype)


def attend(q, k, v, mask, dropout_mask, is_causal, scale):
    """Output [B, H, T, E] in q's dtype and log-sum-exp [B, H, T] in fp32 (fp64); rows masked entirely give 0 and -inf."""
    groups = k.shape[1]
    scores = _scores(_group(q, groups), k, mask, is_causal, scale)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(largest == -np.inf, 0, largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.log(total) + largest
    if dropout_mask is not None:
        weights = weights * _group(dropout_mask, groups)
    out = dot(cast(weights, v.dtype), v, ((4,), (2,)), _HEADS, total.dtype) / jnp.where(total == 0, 1, total)
    return cast(out, q.dtype).reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def attend_backward(grad, q, k, v, mask, dropout_mask, out, lse, is_causal, scale):
    """Gradients of q, k and v, from probabilities recomputed with the forward's log-sum-exp."""
    groups = k.shape[1]
    grad, queries, out, lse = (_group(x, groups) for x in (grad, q, out, lse))
    lse = cast(lse, wide(q.dtype))[..., None]
    probabilities = jnp.exp(_scores(queries, k, mask, is_causal, scale) - jnp.where(lse == -np.inf, 0, lse))
    dropout = None if dropout_mask is None else _group(dropout_mask, groups)
    dropped = probabilities if dropout is None else probabilities * dropout
    dtype = probabilities.dtype
    grad_v = dot(cast(dropped, v.dtype), cast(grad, v.dtype), ((2, 3), (2, 3)), _HEADS, dtype)
    grad_p = dot(cast(grad, v.dtype), v, ((4,), (3,)), _HEADS, dtype)
    grad_p = grad_p if dropout is None else grad_p * dropout
    delta = jnp.sum(cast(grad, dtype) * cast(out, dtype), axis=-1, keepdims=True)
    grad_s = cast(probabilities * (grad_p - delta) * np.asarray(scale, dtype), q.dtype)
    grad_q = dot(grad_s, k, ((4,), (2,)), _HEADS, dtype)
    grad_k = dot(grad_s, queries, ((2, 3), (2, 3)), _HEADS, dtype)
    return cast(grad_q, q.dtype).reshape(q.shape), cast(grad_k, k.dtype), cast(grad_v, v.dtype)


@register("graphacc.sdpa.default")
def _sdpa(ctx, q, k, v, mask, dropout_mask, is_causal, scale):
    return attend(q, k, v, mask, dropout_mask, is_causal, scale)


@register("graphacc.sdpa_backward.default")
def _sdpa_backward(ctx, grad, q, k, v, mask, dropout_mask, out, lse, is_causal, scale):
    return attend_backward(grad, q, k, v, mask, dropout_mask, out, lse, is_causal, scale)


def _check_no_dropout(dropout_p):
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p} draws random numbers: capture must turn this attention into graphacc::sdpa first"
        )


def _scale(q, scale):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


@register("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _flash_for_cpu(ctx, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    _check_no_dropout(dropout_p)
    out, lse = attend(q, k, v, attn_mask, None, is_causal, _scale(q, scale))
    return out, cast(lse, ctx.element(1).dtype)


@register("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_for_cpu_backward(ctx, grad, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    _check_no_dropout(dropout_p)
    return attend_backward(grad, q, k, v, attn_mask, None, out, logsumexp, is_causal, _scale(q, scale))
