"""While tracing, scaled dot-product attention becomes one graphacc::sdpa node instead of torch's decomposition.

Legend: B batch, H query heads, G key/value heads, T query length, S key length, D and E head sizes.
"""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import graphacc.ops  # noqa: F401  (registers graphacc::sdpa)
from graphacc._compat.torch_ import in_this_thread, patched
from graphacc.ops.flash_attention import flash_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention as graphacc::sdpa.

    Attention whose mask takes a gradient (a learned bias) becomes graphacc::flash_attention, and what has shapes that these do
    not know is written out in elementary operators.
    """
    if not _is_whole(query, key, value, attn_mask, enable_gqa):
        with sdpa_kernel(SDPBackend.MATH):
            return torch._C._nn.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if query.dim() == 3:  # [B, T, D]: one head
        mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
        return _sdpa(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), mask, dropout_p, is_causal, scale).squeeze(1)
    return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _is_whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        return False
    if query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1]:
        return False
    same_heads = query.dim() == 3 or query.shape[1] == key.shape[1]
    return same_heads or (enable_gqa and query.shape[1] % key.shape[1] == 0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    k, v = k.to(q.dtype), v.to(q.dtype)  # mixed only where a buffer in fp32 met a projection in bf16
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if mask is not None and mask.requires_grad:
        return flash_attention(q, k, v, bias=mask, causal=bool(is_causal), scale=scale, dropout=dropout_p)
    dropout_mask = None
    if dropout_p > 0.0:
        kept = torch.rand(*q.shape[:3], k.shape[2], device=q.device) >= dropout_p
        dropout_mask = kept.to(torch.float32) / (1.0 - dropout_p) if dropout_p < 1.0 else kept.to(torch.float32)
    return torch.ops.graphacc.sdpa(q, k, v, mask, dropout_mask, bool(is_causal), scale)[0]


class _Intercept(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._C._nn.scaled_dot_product_attention:
            func = attention
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def whole_attention():
    """Keep attention whole inside the block.

    Two hooks, since each misses calls: the mode those nested inside torch's own functions (nn.MultiheadAttention), the
    rebound name those through a reference that was imported before.
    """
    with patched(F, scaled_dot_product_attention=in_this_thread(attention, F.scaled_dot_product_attention)), _Intercept():
        yield
