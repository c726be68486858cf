"""Torch's dtypes and promotion rules, said in jax's."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

_JAX = {
    torch.bool: np.dtype(bool),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(jnp.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(jnp.float8_e5m2),
}
_TORCH = {value: key for key, value in _JAX.items()}
_WIDE = {np.dtype(np.float16): np.dtype(np.float32), np.dtype(jnp.bfloat16): np.dtype(np.float32)}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype of a torch dtype.

    Raises:
        TypeError: jax has no such dtype (quantised and complex32 tensors).
    """
    if dtype not in _JAX:
        raise TypeError(f"{dtype} has no jax counterpart; known are {', '.join(str(d) for d in _JAX)}")
    return _JAX[dtype]


def to_torch(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a jax array's dtype."""
    return _TORCH[np.dtype(dtype)]


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values and dtype as a numpy array (numpy itself does not know bf16)."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8
        return tensor.view(bits).numpy().view(to_jax(tensor.dtype))
    return tensor.numpy()


def cast(x, dtype) -> jax.Array:
    """`x` (array or number) in a numpy dtype; complex to real keeps the real part, as torch does."""
    dtype = np.dtype(dtype)
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return np.asarray(x).astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x != 0 if dtype == bool else x.real
    if x.dtype == bool and jnp.issubdtype(dtype, jnp.inexact):  # XLA makes y * convert(mask) a select, which loses 0 * NaN and 0 * inf
        return jnp.where(x, np.ones((), dtype), np.zeros((), dtype))
    return x if x.dtype == dtype else x.astype(dtype)


def wide(dtype) -> np.dtype:
    """The dtype in which torch computes a dtype's pointwise formulas: fp32 for bf16 and fp16, else the dtype itself."""
    return _WIDE.get(np.dtype(dtype), np.dtype(dtype))


def is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def result_type(a, b) -> np.dtype:
    """Torch's promotion of two operands: arrays of one or more dims before 0-d arrays before Python numbers."""
    return to_jax(torch.result_type(_stand_in(a), _stand_in(b)))


def _stand_in(x):
    if isinstance(x, (bool, int, float, complex)):
        return x
    return torch.empty((0,) if x.ndim else (), dtype=to_torch(x.dtype), device="meta")
