"""Maxima and minima in which NaN wins, as in torch, on every platform.

XLA on CPU gives reductions, with the element-wise operators before them, to YNNPACK, whose max and min pass over NaN (jaxlib 0.10.2): the
sum of relu(x) is a number where x has a NaN. Without such fusions (``xla_cpu_experimental_ynn_fusion_type`` of dots alone) a step takes 1.07
(GPT-2) to 1.3 times as long (convolutions with BatchNorm); so max and min are written in what YNNPACK leaves to XLA.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import is_float


def maximum(a, b):
    """The larger of two arrays of one dtype; NaN where either is."""
    return jnp.where((a >= b) | (a != a), a, b) if is_float(a) else jnp.maximum(a, b)


def minimum(a, b):
    """The smaller of two arrays of one dtype; NaN where either is."""
    return jnp.where((a <= b) | (a != a), a, b) if is_float(a) else jnp.minimum(a, b)


def clip(x, low: float | None, high: float | None):
    """`x` between two numbers; NaN where it is NaN. As XLA's clamp, which is as fast as its max; a select is not."""
    if not is_float(x):
        x = x if low is None else jnp.maximum(x, np.asarray(low).astype(x.dtype))
        return x if high is None else jnp.minimum(x, np.asarray(high).astype(x.dtype))
    low, high = -np.inf if low is None else low, np.inf if high is None else high
    return lax.clamp(np.asarray(low, x.dtype), x, np.asarray(high, x.dtype))


def relu(x):
    """x where it is positive or NaN, else 0."""
    return clip(x, 0, None)


def largest(x, dims: tuple[int, ...], keepdims: bool = False):
    """The largest element along `dims`; NaN where there is one."""
    return _extreme(jnp.max, x, dims, keepdims)


def smallest(x, dims: tuple[int, ...], keepdims: bool = False):
    """The smallest element along `dims`; NaN where there is one."""
    return _extreme(jnp.min, x, dims, keepdims)


def _extreme(function: Callable, x, dims: tuple[int, ...], keepdims: bool):
    function = functools.partial(function, axis=dims, keepdims=keepdims)

    def with_nan(x):
        is_nan = jnp.max(jnp.isnan(x).astype(np.int8), axis=dims, keepdims=keepdims)
        return jnp.where(is_nan > 0, np.asarray(np.nan, x.dtype), function(x))

    return lax.platform_dependent(x, cpu=with_nan, default=function) if is_float(x) else function(x)
