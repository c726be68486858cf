"""Activation functions, computed in fp32 for bf16 and fp16 as torch does on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.extremes import clip, minimum
from graphacc.lowering.registry import register

_SQRT_HALF = np.sqrt(0.5)
_SQRT_2_OVER_PI = np.sqrt(2.0 / np.pi)


def register_wide(name):
    """Register a formula that runs on its tensors in the wide dtype and whose result is rounded once."""

    def add(formula):
        @functools.wraps(formula)
        def rule(ctx, *args, **kwargs):
            dtype = wide(ctx.dtype)
            args = [cast(x, dtype) if isinstance(x, jax.Array) else x for x in args]
            return cast(formula(*args, **kwargs), ctx.dtype)

        register(name)(rule)
        return formula

    return add


@register_wide("aten.gelu.default")
def _gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(_SQRT_2_OVER_PI.astype(x.dtype) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + lax.erf(x * _SQRT_HALF.astype(x.dtype)))


@register_wide("aten.gelu_backward.default")
def _gelu_backward(grad, x, approximate="none"):
    if approximate == "tanh":
        scale = _SQRT_2_OVER_PI.astype(x.dtype)
        tanh = jnp.tanh(scale * (x + 0.044715 * x * x * x))
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * x * x))
    cdf = 0.5 * (1 + lax.erf(x * _SQRT_HALF.astype(x.dtype)))
    density = jnp.exp(-0.5 * x * x) * np.asarray(1 / np.sqrt(2 * np.pi), x.dtype)
    return grad * (cdf + x * density)


@register_wide("aten.silu.default")
def _silu(x):
    return x * jax.nn.sigmoid(x)


@register_wide("aten.silu_backward.default")
def _silu_backward(grad, x):
    sigmoid = jax.nn.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@register_wide("aten.sigmoid_backward.default")
def _sigmoid_backward(grad, y):
    return grad * jnp.conj(y * (1 - y))


@register_wide("aten.tanh_backward.default")
def _tanh_backward(grad, y):
    return grad * jnp.conj(1 - y * y)


@register_wide("aten.threshold.default")
def _threshold(x, threshold, value):
    return jnp.where(x <= threshold, np.asarray(value, x.dtype), x)


@register_wide("aten.threshold_backward.default")
def _threshold_backward(grad, x, threshold):
    return jnp.where(x <= threshold, jnp.zeros_like(grad), grad)


@register_wide("aten.hardtanh_backward.default")
def _hardtanh_backward(grad, x, low, high):
    return jnp.where((x <= low) | (x >= high), jnp.zeros_like(grad), grad)


@register_wide("aten.leaky_relu.default")
def _leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, x * slope)


@register_wide("aten.leaky_relu_backward.default")
def _leaky_relu_backward(grad, x, slope, _is_result):
    return jnp.where(x > 0, grad, grad * slope)


@register_wide("aten.elu.default")
def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * (alpha * scale))


@register_wide("aten.celu.default")
def _celu(x, alpha=1.0):
    return jnp.where(x > 0, x, jnp.expm1(x / alpha) * alpha)


@register_wide("aten.softplus.default")
def _softplus(x, beta=1, threshold=20):
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(minimum(scaled, np.asarray(threshold, scaled.dtype)))) / beta)


@register_wide("aten.softplus_backward.default")
def _softplus_backward(grad, x, beta, threshold):
    scaled = x * beta
    return jnp.where(scaled > threshold, grad, grad * jax.nn.sigmoid(scaled))


@register_wide("aten.hardsigmoid.default")
def _hardsigmoid(x):
    return clip(x + 3, 0, 6) / 6


@register_wide("aten.hardswish.default")
def _hardswish(x):
    return x * clip(x + 3, 0, 6) / 6


@register_wide("aten.mish.default")
def _mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


@register_wide("aten.hardshrink.default")
def _hardshrink(x, bound=0.5):
    return jnp.where((x >= -bound) & (x <= bound), jnp.zeros_like(x), x)


@register_wide("aten.softshrink.default")
def _softshrink(x, bound=0.5):
    return jnp.where(x > bound, x - bound, jnp.where(x < -bound, x + bound, x * 0))


@register_wide("aten._prelu_kernel.default")
def _prelu(x, weight):
    return jnp.where(x > 0, x, x * weight)


@register_wide("aten.glu.default")
def _glu(x, dim=-1):
    value, gate = jnp.split(x, 2, axis=dim)
    return value * jax.nn.sigmoid(gate)
