"""A value that is computed once and stays in memory: no fusion reaches across it.

XLA computes a value again in each fusion that reads it, if it counts the value as cheap; where every read repeats a window of reads, the work
multiplies. XLA:CPU drops optimization barriers before it fuses, so there the fence is a custom call (csrc/ffi/fence.cc).
"""

import jax
from jax import lax

from graphacc.kernels.library import register_xla_target
from graphacc.lowering.partitioned import is_partitioned

_WITH_GRADIENT = (
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
    "upsample_bicubic2d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
).split()
REREADING = frozenset(
    f"aten.{name}.default"
    for name in (*_WITH_GRADIENT, *(f"{name}_backward" for name in _WITH_GRADIENT), "avg_pool1d", "im2col", "col2im", "cumsum", "cumprod", "logcumsumexp")
)
"""Operators whose rules read an element of an operand for several elements of the result. What an operand is computed from would be computed
again for each of them: for GELU before an unfolding of 3 x 3 nine times.
"""

FENCE = "gacc_fence"
"""The custom call. Its result takes the operand's memory, so it costs nothing."""


def computed_once(x: jax.Array) -> jax.Array:
    """`x`, behind a fence."""
    if is_partitioned():
        return lax.optimization_barrier(x)
    return lax.platform_dependent(x, cpu=_fenced, default=lax.optimization_barrier) if x.size else x


def read_often(x: jax.Array) -> jax.Array:
    """`x` for an operator of `REREADING`: behind a fence on the CPU; other platforms weigh what a fusion computes again."""
    return lax.platform_dependent(x, cpu=_fenced, default=lambda x: x) if x.size and not is_partitioned() else x


def stored_on_gpus(x: jax.Array) -> jax.Array:
    """`x`, which XLA:GPU would copy for each of several products that read it, such as the gradients of queries, keys and values behind one another; or would compute
    again in each reader out of something larger, which stays for them, such as rows out of the buckets in which they were sent."""
    return lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x) if x.size else x


def _fenced(x: jax.Array) -> jax.Array:
    register_xla_target(FENCE)
    return jax.ffi.ffi_call(FENCE, jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})(x)
