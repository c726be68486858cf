"""Operators that make a tensor from its shape and numbers."""

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register


def _constant(ctx, value):
    return jnp.full(ctx.shape, cast(value, ctx.dtype), ctx.dtype)


@register(
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.zero.default",
    "aten.new_zeros.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_permuted.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten._efficientzerotensor.default",
    "prims.empty_strided.default",
    "prims.empty_permuted.default",
)
def _zeros(ctx, *_shape, **_layout):
    """Uninitialised memory does not exist in XLA: `empty` gives zeros."""
    return jnp.zeros(ctx.shape, ctx.dtype)


@register("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def _ones(ctx, *_shape, **_layout):
    return jnp.ones(ctx.shape, ctx.dtype)


@register("aten.full.default", "aten.full_like.default")
def _full(ctx, _shape, value, **_layout):
    return _constant(ctx, value)


@register("aten.new_full.default")
def _new_full(ctx, _x, _shape, value, **_layout):
    return _constant(ctx, value)


@register("aten.fill.Scalar", "aten.fill.Tensor")
def _fill(ctx, x, value):
    return jnp.broadcast_to(cast(value, ctx.dtype), ctx.shape)


@register("aten.scalar_tensor.default")
def _scalar_tensor(ctx, value, **_layout):
    return _constant(ctx, value)


@register("aten.arange.default")
def _arange_end(ctx, end, **layout):
    return _arange(ctx, 0, end)


@register("aten.arange.start", "aten.arange.start_step")
def _arange(ctx, start, end, step=1, **_layout):
    dtype = np.dtype(np.float64) if jnp.issubdtype(ctx.dtype, jnp.inexact) else ctx.dtype
    steps = lax.iota(dtype, ctx.shape[0])
    return cast(np.asarray(start, dtype) + steps * np.asarray(step, dtype), ctx.dtype)


@register("prims.iota.default")
def _iota(ctx, length, *, start, step, **_layout):
    return _arange(ctx, start, None, step)


@register("aten.linspace.default", "aten.linspace.Tensor_Tensor", "aten.linspace.Tensor_Scalar", "aten.linspace.Scalar_Tensor")
def linspace(ctx, start, end, steps, **_layout):
    """From both ends towards the middle, as torch does; computed in fp64 but for tensors of floats."""
    dtype = wide(ctx.dtype) if jnp.issubdtype(ctx.dtype, jnp.inexact) else np.dtype(np.float64)
    start, end = cast(start, dtype), cast(end, dtype)
    if not jnp.issubdtype(ctx.dtype, jnp.inexact):
        start, end = cast(cast(start, ctx.dtype), dtype), cast(cast(end, ctx.dtype), dtype)
    index = np.arange(steps).astype(dtype)
    step = (end - start) / max(steps - 1, 1)
    return cast(jnp.where(index < steps / 2, start + step * index, end - step * (steps - 1 - index)), ctx.dtype)


@register("aten.eye.default", "aten.eye.m")
def _eye(ctx, *_shape, **_layout):
    return jnp.eye(*ctx.shape, dtype=ctx.dtype)


@register(
    *(
        f"aten.{name}_window.{overload}"
        for name, overloads in {
            "bartlett": ("default", "periodic"),
            "blackman": ("default", "periodic"),
            "hamming": ("default", "periodic", "periodic_alpha", "periodic_alpha_beta"),
            "hann": ("default", "periodic"),
            "kaiser": ("default", "periodic", "beta"),
        }.items()
        for overload in overloads
    )
)
def _window(ctx, *numbers, **_layout):
    """A constant, which torch computes."""
    made = ctx.node.target(*numbers, dtype=torch.float64)
    return cast(made.numpy(), ctx.dtype)


@register("aten.tril_indices.default")
def _tril_indices(ctx, rows, columns, offset=0, **_layout):
    return jnp.asarray(np.stack(np.tril_indices(rows, offset, columns)).astype(ctx.dtype))


@register("aten.triu_indices.default")
def _triu_indices(ctx, rows, columns, offset=0, **_layout):
    return jnp.asarray(np.stack(np.triu_indices(rows, offset, columns)).astype(ctx.dtype))
