"""Which program computes a call of graphacc::flash_attention on a platform, and why: one pure function, for lowering and reports.

All forms compute the same operator from the same residuals (output and log-sum-exp), and none holds a [T, S] array.

Legend: B batch, H query heads, G key/value heads, T query length, S key length, D head size, E value head size.
"""

import dataclasses
import enum

MAX_CUDNN_HEAD = 128  # up to 128 on every chip since Ampere, forward and backward; more depends on chip and version
MAX_PALLAS_HEAD = 256  # what was compiled: larger blocks outgrow a TPU core's scoped fast memory
MIN_CUDNN_CAPABILITY = (8, 0)
BLOCK = 512  # keys per step of the scan of `Form.BLOCKWISE`


class Form(enum.Enum):
    """A program for the operator."""

    CPU_KERNEL = "XLA custom call to the kernels of csrc/"
    CUDNN = "cuDNN's fused attention"
    PALLAS = "Pallas kernels for TPU"
    BLOCKWISE = "blocks of keys in an XLA loop"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The form of a call, and why that one."""

    form: Form
    reason: str

    def __str__(self) -> str:
        return f"{self.form.value} ({self.reason})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """What the choice depends on."""

    dtype: str  # "float32"
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    left: int = -1  # as in graphacc::flash_attention; -1 if it hides no key
    right: int = -1
    bias: bool = False
    segments: bool = False
    dropout: bool = False

    @classmethod
    def of(cls, q, k, v, *, bias, q_segments, left: int, right: int, dropout: float) -> "Described":
        """From the operator's arguments; arrays and (fake) tensors are asked for shape and dtype alone."""
        q_len, kv_len = q.shape[2], k.shape[2]
        return cls(
            dtype=str(q.dtype).removeprefix("torch."),
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            q_len=q_len,
            kv_len=kv_len,
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            left=-1 if left >= q_len - 1 else left,
            right=-1 if right >= kv_len - 1 else right,
            bias=bias is not None,
            segments=q_segments is not None,
            dropout=dropout > 0,
        )

    @property
    def empty(self) -> bool:
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len, self.head_dim, self.value_dim)


def choose(platform: str, call: Described, *, capability: tuple[int, int] | None = None) -> Choice:
    """The form of `call`, forward and backward alike.

    Args:
        platform: "cpu", "cuda", "rocm" or "tpu", as JAX names them.
        capability: of the CUDA device, if it is known.
    """
    if call.dtype == "float64":
        return Choice(Form.BLOCKWISE, "fp64 is for reference, no kernel has it")
    if platform == "cpu":
        return Choice(Form.CPU_KERNEL, "it takes every call")
    kernels = {"cuda": (Form.CUDNN, _cudnn_refuses(call, capability)), "tpu": (Form.PALLAS, _pallas_refuses(call))}
    if platform not in kernels:
        return Choice(Form.BLOCKWISE, f"there is no kernel for {platform}")
    form, refusal = kernels[platform]
    return Choice(Form.BLOCKWISE, refusal) if refusal else Choice(form, "it takes calls of this kind")


def _cudnn_refuses(call: Described, capability: tuple[int, int] | None) -> str | None:
    if capability is not None and capability < MIN_CUDNN_CAPABILITY:
        return f"cuDNN's fused attention needs compute capability 8.0, the device has {'.'.join(map(str, capability))}"
    if call.dtype not in ("bfloat16", "float16"):
        return f"cuDNN's fused attention takes bf16 and fp16, the call is {call.dtype}"
    if call.empty:
        return "an array has no elements"
    if call.q_len == 1 or call.kv_len == 1:
        return "one query or one key: nothing to fuse"
    if call.head_dim != call.value_dim:
        return f"head sizes of keys and values differ, {call.head_dim} and {call.value_dim}: only some chips have that in cuDNN"
    if call.head_dim % 8 or call.head_dim > MAX_CUDNN_HEAD:
        return f"head size {call.head_dim} is no multiple of 8 up to {MAX_CUDNN_HEAD}"
    if call.dropout:
        return "dropout draws by the index in the global scores, so that no strategy changes it; cuDNN's own numbers would"
    if call.bias:
        return "a bias may hide all keys of a row, or shift it far from 0, where cuDNN gives NaN or wrong gradients"
    if call.segments:
        return "segments are known at run time only; cuDNN is told lengths"
    return _band_refused(call)


def _band_refused(call: Described) -> str | None:
    """cuDNN's masks: none, causal (query t sees keys up to t), and causal with the last left + 1 keys."""
    if call.left < 0 and call.right <= 0:
        return None
    if call.right != 0:
        return f"the band (left {call.left}, right {call.right}) is not causal: cuDNN has windows under a causal mask only"
    if call.q_len > call.kv_len:
        return f"a window over {call.q_len} queries and {call.kv_len} keys leaves queries without a key, or nearly: cuDNN wants T <= S"
    return None


def _pallas_refuses(call: Described) -> str | None:
    if call.dtype not in ("float32", "bfloat16"):
        return f"TPUs multiply fp32 and bf16, the call is {call.dtype}"
    if call.empty:
        return "an array has no elements"
    if max(call.head_dim, call.value_dim) > MAX_PALLAS_HEAD:
        return f"head size {max(call.head_dim, call.value_dim)} is above {MAX_PALLAS_HEAD}"
    if call.dropout:
        return "the kernels draw no random numbers"
    if call.bias:
        return "the kernels take no bias"
    return None
