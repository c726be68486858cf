"""A value that is computed once and stays in memory: no fusion reaches across it.

XLA computes a value again in each fusion that reads it, if it counts the value as cheap; where every read repeats a window of reads, the work
multiplies. XLA:CPU drops optimization barriers before it fuses, so there the fence is a custom call (csrc/ffi/fence.cc).
"""

import jax
from jax import lax

from graphacc.kernels.library import register_xla_target

FENCE = "gacc_fence"
"""The custom call. Its result takes the operand's memory, so it costs nothing."""


def computed_once(x: jax.Array) -> jax.Array:
    """`x`, behind a fence."""
    return lax.platform_dependent(x, cpu=_fenced, default=lax.optimization_barrier) if x.size else x


def _fenced(x: jax.Array) -> jax.Array:
    register_xla_target(FENCE)
    return jax.ffi.ffi_call(FENCE, jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})(x)
