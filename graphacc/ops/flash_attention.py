"""graphacc::flash_attention: exact attention without a [T, S] tensor, forward and backward, and its public face.

A score stands at (t, s) if query t sees key s; what masks say about positions is said by numbers, never by a tensor:

- ``left`` and ``right``: t - left <= s <= t + right, where -1 is no bound. Causal is right = 0; a causal window of w is left = w - 1.
- ``q_segments`` and ``kv_segments``: only equal segments see each other (padding, packed sequences).
- ``bias``: is added to the scores; broadcasts.
- ``key``, ``stream``, ``dropout``: probabilities are dropped by the random numbers of `graphacc.ops.random` at their index in the
  global [B, H, T, S], so a device that holds a block of it passes the block's ``start``.

Sources: Tri Dao et al., arXiv 2205.14135 and 2307.08691; ``torch.nn.functional.scaled_dot_product_attention`` for the meaning.

Legend: B batch, H query heads, G key/value heads (H is a multiple of G), T query length, S key length, D head size,
E value head size.
"""

import enum
import math

import torch
from torch import Tensor

from graphacc.kernels import flash_attention as kernels
from graphacc.ops import random as random_ops
from graphacc.ops.attention import _accumulate, _repeat_heads, _sum_heads

KERNEL_DTYPES = tuple(kernels.DTYPES)
"""What the kernels compute in; fp64 is written out."""

LARGE = 1e3
"""Rows whose log-sum-exp is beyond this, as finite masks make it, are normalised again in the backward."""


class EmptyRows(enum.IntEnum):
    """What a query gets whose keys are all masked; numbers as in `csrc/include/gacc.h`."""

    ZEROS = 0  # zeros, as with masks of -inf in torch's fused attention
    UNIFORM = 1  # the mean of all values, as where a mask adds the lowest finite number to the scores
    UNIFORM_CONSTANT = 2  # the same, and the bias gets no gradient there: the number stood in the bias' place


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v over the keys that each query sees, in memory linear in T and S.

    Args:
        q: [B, H, T, D] in fp32, bf16 or fp16 (fp64 works, with a [T, S] tensor, as a reference).
        k: [B, G, S, D] in q's dtype; H is a multiple of G (grouped-query attention).
        v: [B, G, S, E] in q's dtype.
        causal: query t sees keys s <= t.
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: query t sees keys t - left <= s <= t + right; one number w means (w - 1, 0), w keys up to t itself.
        bias: floating, broadcastable to [B, H, T, S]; takes a gradient if it requires one.
        segment_ids: int [B, T] (if T = S), or those of the queries [B, T] and the keys [B, S]: only equal segments see each other.
        dropout: probability with which a softmax weight is dropped; always applied.

    Returns:
        [B, H, T, E] in q's dtype. A query that sees no key gives zeros.

    Raises:
        TypeError: another dtype than these.
        ValueError: shapes that do not fit, or numbers out of range.
    """
    left, right = _band(causal, window)
    q_segments, kv_segments = _segments(segment_ids)
    key, size = None, []
    if dropout:
        key = torch.randint(0, 2**32, (2,), dtype=torch.int64, device=q.device)
        size = [*q.shape[:3], k.shape[2]]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return torch.ops.graphacc.flash_attention(
        q, k, v, bias, q_segments, kv_segments, key, None, left, right, scale, int(EmptyRows.ZEROS), float(dropout), 0, size
    )[0]


def _band(causal: bool, window: int | tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, 0 if causal else -1
    left, right = (window - 1, 0) if isinstance(window, int) else window
    if left < 0 or right < 0:
        raise ValueError(f"window={window!r}: a query must see itself, so give a number of keys from 1, or (left, right) from (0, 0)")
    return left, 0 if causal else right


def _segments(segment_ids: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if segment_ids is None:
        return None, None
    pair = (segment_ids, segment_ids) if isinstance(segment_ids, Tensor) else segment_ids
    return pair[0].to(torch.int32), pair[1].to(torch.int32)


def _check(q, k, v, bias, q_segments, kv_segments, key, start, left, right, scale, empty_rows, dropout, stream, global_size):
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (*kernels.DTYPES, torch.float64):
        raise TypeError(f"flash_attention: q, k and v are {q.dtype}, {k.dtype}, {v.dtype}: all must be fp32, bf16, fp16 or fp64 alike")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"flash_attention: {shapes}: each must have 4 dims, [batch, heads, length, head size]")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"flash_attention: {shapes}: batches must agree, heads and length of k and v, and head sizes of q and k"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"flash_attention: {shapes}: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    scores = [*q.shape[:3], k.shape[2]]
    if bias is not None:
        padded = [1] * (4 - bias.dim()) + list(bias.shape)
        if bias.dim() > 4 or any(size not in (1, full) for size, full in zip(padded, scores)):
            raise ValueError(f"flash_attention: bias {list(bias.shape)} does not broadcast to the scores {scores}")
        if not bias.is_floating_point():
            raise TypeError(f"flash_attention: bias is {bias.dtype}, it is added to the scores and must be floating")
    for name, ids, size in (("q_segments", q_segments, scores[2]), ("kv_segments", kv_segments, scores[3])):
        if ids is not None and (list(ids.shape) != [scores[0], size] or ids.dtype != torch.int32):
            raise ValueError(f"flash_attention: {name} is {ids.dtype}{list(ids.shape)}, expected int32{[scores[0], size]}")
    if (q_segments is None) != (kv_segments is None):
        raise ValueError("flash_attention: give q_segments and kv_segments both, or neither")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"flash_attention: dropout={dropout} is a probability, expected 0 <= dropout <= 1")
    if dropout and (key is None or len(global_size) != 4):
        raise ValueError("flash_attention: dropout needs a key (int64[2]) and the global size of the scores (4 numbers)")
    EmptyRows(empty_rows)


@torch.library.custom_op("graphacc::flash_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    key: Tensor | None,
    start: Tensor | None,
    left: int,
    right: int,
    scale: float,
    empty_rows: int,
    dropout: float,
    stream: int,
    global_size: list[int],
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] in q's dtype and log-sum-exp of each row [B, H, T] in fp32 (fp64); -inf in rows without a key.

    Args:
        q, k, v, bias, q_segments, kv_segments: see `flash_attention`; segments are int32.
        key, start, stream, global_size: as for `graphacc::random_uniform`, for the scores [B, H, T, S]; with dropout only.
        left, right: query t sees keys t - left <= s <= t + right; a negative number is no bound.
        empty_rows: an `EmptyRows`.
    """
    options = (left, right, scale, empty_rows, dropout, stream, global_size)
    _check(q, k, v, bias, q_segments, kv_segments, key, start, *options)
    tensors = (q, k, v, bias, q_segments, kv_segments, key, start)
    if _is_native(q):
        return kernels.forward(_inputs(*tensors), _options(*options), threads=torch.get_num_threads())
    return written_out(*tensors, *options)


@_forward.register_fake
def _(q, k, v, bias, q_segments, kv_segments, key, start, *options):
    _check(q, k, v, bias, q_segments, kv_segments, key, start, *options)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


@torch.library.custom_op("graphacc::flash_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    key: Tensor | None,
    start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    left: int,
    right: int,
    scale: float,
    empty_rows: int,
    dropout: float,
    stream: int,
    global_size: list[int],
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias in their shapes and dtypes; that of the bias has shape [0] without `bias_grad`.

    Args:
        grad: [B, H, T, E], gradient of the output.
        out, lse: the results of `graphacc::flash_attention`; the other arguments are its own.
    """
    options = (left, right, scale, empty_rows, dropout, stream, global_size)
    tensors = (q, k, v, bias, q_segments, kv_segments, key, start)
    if not _is_native(q):
        return _written_out_backward(grad, tensors, out, lse, options, bias_grad)
    *grads, grad_bias = kernels.backward(
        grad.contiguous(),
        _inputs(*tensors),
        out.contiguous(),
        lse.contiguous(),
        _options(*options),
        bias_grad=bias_grad,
        threads=torch.get_num_threads(),
    )
    return *grads, q.new_empty(0) if grad_bias is None else grad_bias.reshape(bias.shape).to(bias.dtype)


@_backward.register_fake
def _(grad, q, k, v, bias, q_segments, kv_segments, key, start, out, lse, *options):
    grad_bias = bias.new_empty(bias.shape) if options[-1] else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.options = inputs[8:]
    ctx.bias_grad = inputs[3] is not None and inputs[3].requires_grad


def _autograd(ctx, grad, _grad_lse):
    *tensors, out, lse = ctx.saved_tensors
    *grads, grad_bias = torch.ops.graphacc.flash_attention_backward(grad, *tensors, out, lse, *ctx.options, ctx.bias_grad)
    return *grads, grad_bias if ctx.bias_grad else None, *[None] * 11


_forward.register_autograd(_autograd, setup_context=_save)


def _is_native(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in kernels.DTYPES


def _inputs(q, k, v, bias, q_segments, kv_segments, key, start) -> kernels.Inputs:
    dense = {name: x.contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
    if bias is not None:
        bias = bias.float().reshape([1] * (4 - bias.dim()) + list(bias.shape)).contiguous()
    segments = [None if ids is None else ids.contiguous() for ids in (q_segments, kv_segments)]
    return kernels.Inputs(**dense, bias=bias, q_segments=segments[0], kv_segments=segments[1], key=key, start=start)


def _options(left, right, scale, empty_rows, dropout, stream, global_size) -> kernels.Options:
    return kernels.Options(
        left=left,
        right=right,
        scale=scale,
        empty_rows=empty_rows,
        dropout=dropout,
        stream=stream,
        global_size=tuple(global_size),
    )


# The formula with a [T, S] tensor: the reference, for fp64 and for devices without a kernel.


def allowed(q_len, kv_len, q_segments, kv_segments, left, right, device) -> Tensor:
    """bool, broadcastable to [B, H, T, S]: query t sees key s."""
    ahead = torch.arange(kv_len, device=device) - torch.arange(q_len, device=device)[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    seen = seen[None, None]
    return seen if q_segments is None else seen & (q_segments[:, None, :, None] == kv_segments[:, None, None, :])


def _kept(q, k, key, start, dropout, stream, global_size) -> Tensor | None:
    """[B, H, T, S] in fp32: 0 or 1 / (1 - p)."""
    if not dropout:
        return None
    kept = random_ops.random_uniform(key, stream, [*q.shape[:3], k.shape[2]], global_size, start) >= dropout
    return kept.float() / (1.0 - dropout if dropout < 1.0 else 1.0)


def _scores(q, k, bias, q_segments, kv_segments, left, right, scale) -> Tensor:
    scores = (_accumulate(q) @ _accumulate(_repeat_heads(k, q.shape[1])).mT) * scale
    if bias is not None:
        scores = scores + bias
    seen = allowed(q.shape[2], k.shape[2], q_segments, kv_segments, left, right, q.device)
    return scores.masked_fill(~seen, float("-inf"))


def _probabilities(scores, lse, empty_rows) -> Tensor:
    empty = torch.isneginf(lse)[..., None]
    p = (scores - lse[..., None].masked_fill(empty, 0.0)).exp()
    # A log-sum-exp of large magnitude has lost the digits that say among how many keys the row is shared.
    p = torch.where(lse[..., None].abs() > LARGE, p / p.sum(-1, keepdim=True), p).masked_fill(empty, 0.0)
    return p if empty_rows == EmptyRows.ZEROS else p.masked_fill(empty, 1.0 / scores.shape[-1])


def written_out(
    q, k, v, bias, q_segments, kv_segments, key, start, left, right, scale, empty_rows, dropout, stream, global_size
) -> tuple[Tensor, Tensor]:
    """`graphacc::flash_attention` in plain operators."""
    scores = _scores(q, k, bias, q_segments, kv_segments, left, right, scale)
    lse = scores.logsumexp(-1)
    p = _probabilities(scores, lse, empty_rows)
    kept = _kept(q, k, key, start, dropout, stream, global_size)
    out = (p if kept is None else p * kept) @ _accumulate(_repeat_heads(v, q.shape[1]))
    return out.to(q.dtype).contiguous(), lse.contiguous()


def _written_out_backward(grad, tensors, out, lse, options, bias_grad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias, q_segments, kv_segments, key, start = tensors
    left, right, scale, empty_rows, dropout, stream, global_size = options
    heads, groups = q.shape[1], k.shape[1]
    p = _probabilities(_scores(q, k, bias, q_segments, kv_segments, left, right, scale), lse, empty_rows)
    kept = _kept(q, k, key, start, dropout, stream, global_size)
    grad = _accumulate(grad)
    grad_v = (p if kept is None else p * kept).mT @ grad
    grad_p = grad @ _accumulate(_repeat_heads(v, heads)).mT
    grad_p = grad_p if kept is None else grad_p * kept
    grad_s = p * (grad_p - (grad * _accumulate(out)).sum(-1, keepdim=True))
    grad_bias = q.new_empty(0)
    if bias_grad:
        constant = torch.isneginf(lse)[..., None] & (empty_rows == EmptyRows.UNIFORM_CONSTANT)
        grad_bias = grad_s.masked_fill(constant, 0.0).sum_to_size(bias.shape).to(bias.dtype).contiguous()
    grad_s = grad_s * scale
    return (
        (grad_s @ _accumulate(_repeat_heads(k, heads))).to(q.dtype).contiguous(),
        _sum_heads(grad_s.mT @ _accumulate(q), groups).to(k.dtype).contiguous(),
        _sum_heads(grad_v, groups).to(v.dtype).contiguous(),
        grad_bias,
    )
