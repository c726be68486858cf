"""Scaled dot-product attention as one operator forward and one backward.

Keeping it whole in the captured graph lets a later pass choose the kernel, and avoids torch's CPU decomposition, whose
backward reads another saved value than its forward gives (wrong gradients without a message).

Legend: B batch, H query heads, G key/value heads (H is a multiple of G), T query length, S key length, D head size,
E value head size.
"""

import torch
from torch import Tensor


def _accumulate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, G, S, D] -> [B, H, S, D]."""
    groups = num_heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_heads(grad: Tensor, num_groups: int) -> Tensor:
    """[B, H, S, D] -> [B, G, S, D]: the adjoint of `_repeat_heads`."""
    if grad.shape[1] == num_groups:
        return grad
    return grad.unflatten(1, (num_groups, -1)).sum(2)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """[B, H, T, D], [B, H, S, D] -> [B, H, T, S] with masked positions at -inf."""
    scores = (_accumulate(q) @ _accumulate(k).transpose(-1, -2)) * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and zero in rows that are masked entirely (as torch's fused kernels give)."""
    empty = torch.isneginf(lse)
    return (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()


@torch.library.custom_op("graphacc::sdpa", mutates_args=())
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale + mask) v, computed in fp32 (fp64 for fp64 inputs).

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D]; H is a multiple of G.
        v: [B, G, S, E].
        mask: broadcastable to [B, H, T, S]: bool (False is masked) or added to the scores; takes no gradient.
        dropout_mask: [B, H, T, S] in fp32: 0 or 1 / (1 - p), multiplied onto the probabilities.
        is_causal: additionally mask positions s > t.
        scale: factor on the scores.

    Returns:
        The output [B, H, T, E] in q's dtype, and the log-sum-exp of each row [B, H, T] in fp32 (fp64).
    """
    heads = q.shape[1]
    scores = _scores(q, _repeat_heads(k, heads), mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = _probabilities(scores, lse)
    if dropout_mask is not None:
        probabilities = probabilities * dropout_mask
    return (probabilities @ _accumulate(_repeat_heads(v, heads))).to(q.dtype).contiguous(), lse.contiguous()


@sdpa.register_fake
def _(q, k, v, mask, dropout_mask, is_causal, scale):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


@torch.library.custom_op("graphacc::sdpa_backward", mutates_args=())
def sdpa_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sdpa` with respect to q, k and v, recomputing the probabilities from `lse`.

    Args:
        grad: [B, H, T, E], gradient of the output.
        out, lse: the results of `sdpa`; the other arguments are its own.

    Returns:
        Gradients of q, k and v in their shapes and dtypes.
    """
    heads, groups = q.shape[1], k.shape[1]
    keys, values = _repeat_heads(k, heads), _accumulate(_repeat_heads(v, heads))
    probabilities = _probabilities(_scores(q, keys, mask, is_causal, scale), lse)
    grad = _accumulate(grad)
    dropped = probabilities if dropout_mask is None else probabilities * dropout_mask
    grad_v = dropped.transpose(-1, -2) @ grad
    grad_p = grad @ values.transpose(-1, -2)
    if dropout_mask is not None:
        grad_p = grad_p * dropout_mask
    grad_s = probabilities * (grad_p - (grad * _accumulate(out)).sum(-1, keepdim=True)) * scale
    grad_q = grad_s @ _accumulate(keys)
    grad_k = grad_s.transpose(-1, -2) @ _accumulate(q)
    return (
        grad_q.to(q.dtype).contiguous(),
        _sum_heads(grad_k, groups).to(k.dtype).contiguous(),
        _sum_heads(grad_v, groups).to(v.dtype).contiguous(),
    )


@sdpa_backward.register_fake
def _(grad, q, k, v, mask, dropout_mask, out, lse, is_causal, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, mask, dropout_mask, is_causal, scale = inputs
    ctx.save_for_backward(q, k, v, mask, dropout_mask, *output)
    ctx.is_causal, ctx.scale = is_causal, scale


def _backward(ctx, grad, _grad_lse):
    q, k, v, mask, dropout_mask, out, lse = ctx.saved_tensors
    grads = torch.ops.graphacc.sdpa_backward(grad, q, k, v, mask, dropout_mask, out, lse, ctx.is_causal, ctx.scale)
    return *grads, None, None, None, None


sdpa.register_autograd(_backward, setup_context=_save)
