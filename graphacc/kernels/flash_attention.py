"""The Python face of the CPU attention kernels: a ctypes structure as in `csrc/include/gacc.h`, and XLA's names for them.

Callers vouch for the tensors: dense, on the host, of shapes that fit. ``graphacc.ops.flash_attention`` is the caller that checks.

Legend: B batch, H query heads, G key/value heads, T query length, S key length, D head size, E value head size.
"""

import ctypes
import dataclasses

import torch
from torch import Tensor

from graphacc.kernels import library

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""What q, k and v may be, and its number in the C ABI."""

FORWARD, BACKWARD = "gacc_flash_forward", "gacc_flash_backward"
"""Names of the C functions, and of the XLA custom calls."""


class _Attention(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "bias", "q_segments", "kv_segments")],
        ("bias_strides", ctypes.c_int64 * 4),
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")],
        ("left", ctypes.c_int64),
        ("right", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("empty_rows", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("dropout", ctypes.c_float),
        ("key", ctypes.c_uint32 * 2),
        ("stream", ctypes.c_int64),
        ("start", ctypes.c_int64 * 4),
        ("global_size", ctypes.c_int64 * 4),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a call of the operator has besides tensors; see `graphacc.ops.flash_attention`."""

    left: int
    right: int
    scale: float
    empty_rows: int
    dropout: float
    stream: int
    global_size: tuple[int, ...]  # of the scores, [B, H, T, S]; empty without dropout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a call; all dense."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, E]
    bias: Tensor | None  # fp32, broadcastable to [B, H, T, S], of 4 dims
    q_segments: Tensor | None  # int32 [B, T]
    kv_segments: Tensor | None  # int32 [B, S]
    key: Tensor | None  # int64 [2]
    start: Tensor | None  # int64 [4]


def forward(inputs: Inputs, options: Options, *, threads: int, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] in q's dtype and log-sum-exp [B, H, T] in fp32.

    Raises:
        ValueError: the library refuses an argument.
    """
    q = inputs.q
    out, lse = q.new_empty((*q.shape[:-1], inputs.v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)
    library.call(FORWARD, ctypes.byref(_structure(inputs, options)), _pointer(out), _pointer(lse), _isa(isa), ctypes.c_int32(threads))
    return out, lse


def backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, options: Options, *, bias_grad: bool, threads: int, isa: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and (with `bias_grad`) the bias, in their shapes and dtypes; `grad` and `out` are dense."""
    grads = [torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
    grad_bias = torch.zeros_like(inputs.bias) if bias_grad else None
    arrays = [_pointer(x) for x in (grad, out, lse, *grads, grad_bias)]
    library.call(BACKWARD, ctypes.byref(_structure(inputs, options)), *arrays, _isa(isa), ctypes.c_int32(threads))
    return *grads, grad_bias


def _structure(inputs: Inputs, options: Options) -> _Attention:
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    pointers = {field.name: _pointer(getattr(inputs, field.name)) for field in dataclasses.fields(Inputs)[:6]}
    strides = () if bias is None else [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride())]
    words = () if inputs.key is None else [word & 0xFFFFFFFF for word in inputs.key.tolist()]
    return _Attention(
        **pointers,
        bias_strides=(ctypes.c_int64 * 4)(*strides),
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        q_len=q.shape[2],
        kv_len=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        left=options.left,
        right=options.right,
        dtype=DTYPES[q.dtype],
        empty_rows=options.empty_rows,
        scale=options.scale,
        dropout=options.dropout,
        key=(ctypes.c_uint32 * 2)(*words),
        stream=options.stream,
        start=(ctypes.c_int64 * 4)(*(() if inputs.start is None else inputs.start.tolist())),
        global_size=(ctypes.c_int64 * 4)(*options.global_size),
    )


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None or x.numel() == 0 else x.data_ptr())


def _isa(name: str | None) -> ctypes.c_int32:
    return ctypes.c_int32(library.available_isas()[library.default_isa() if name is None else name])
