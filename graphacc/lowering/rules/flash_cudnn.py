"""graphacc::flash_attention by cuDNN's fused attention, for the calls that `graphacc.ops.flash_form` gives it.

cuDNN's softmax statistics are the log-sum-exp of the scaled scores (natural logarithm), which is the operator's own second result; its
causal mask lets query t see keys s <= t, and a window of w the keys t - w < s <= t. Every such row has a key (see `flash_form`), so
the operator's rule for empty rows is never asked. Grouped heads stay grouped: cuDNN sums the gradients of a group itself.

cuDNN is handed [B, T, H, D], as linear layers give and take it: transpositions to and from [B, H, T, D] then cancel or become layouts.

Legend: B batch, H query heads, G key/value heads, T query length, S key length, D head size.
"""

from graphacc._compat import jax_ as compat
from graphacc.ops.flash_form import Described


def options(call: Described, scale: float) -> compat.CudnnAttention:
    """What the custom calls are told besides their operands."""
    return compat.CudnnAttention(scale=scale, causal=call.right == 0, window=call.left + 1 if call.left >= 0 else None)


def forward(q, k, v, told: compat.CudnnAttention):
    """Output [B, H, T, D] in q's dtype and log-sum-exp [B, H, T] in fp32."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = compat.cudnn_attention(q, k, v, told)
    return out.swapaxes(1, 2), lse


def backward(grad, q, k, v, out, lse, told: compat.CudnnAttention):
    """Gradients of q, k and v in their shapes and dtypes."""
    grad, q, k, v, out = (x.swapaxes(1, 2) for x in (grad, q, k, v, out))
    return [x.swapaxes(1, 2) for x in compat.cudnn_attention_backward(grad, q, k, v, out, lse, told)]
