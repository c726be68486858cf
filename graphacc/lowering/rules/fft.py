"""The three Fourier transforms that ATen's ``fft`` functions come down to."""

import math

import jax.numpy as jnp
import numpy as np

from graphacc.lowering.dtypes import cast
from graphacc.lowering.registry import register


def _scale(x, normalization: int, sizes) -> jnp.ndarray:
    """0: none, 1: divide by the square root of the number of points, 2: by the number."""
    factor = {0: 1.0, 1: 1 / math.sqrt(math.prod(sizes)), 2: 1 / math.prod(sizes)}[normalization]
    return x if factor == 1.0 else x * np.asarray(factor, x.real.dtype)


@register("aten._fft_r2c.default")
def _r2c(ctx, x, dim, normalization, onesided):
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return cast(_scale(transform(x, axes=tuple(dim)), normalization, [x.shape[d] for d in dim]), ctx.dtype)


@register("aten._fft_c2c.default")
def _c2c(ctx, x, dim, normalization, forward):
    if not dim:
        return x
    transform = jnp.fft.fftn if forward else _unscaled_inverse
    return cast(_scale(transform(x, axes=tuple(dim)), normalization, [x.shape[d] for d in dim]), ctx.dtype)


def _unscaled_inverse(x, axes):
    return jnp.fft.ifftn(x, axes=axes, norm="forward")


@register("aten._fft_c2r.default")
def _c2r(ctx, x, dim, normalization, last_dim_size):
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    return cast(_scale(jnp.fft.irfftn(x, sizes, axes=tuple(dim), norm="forward"), normalization, sizes), ctx.dtype)
