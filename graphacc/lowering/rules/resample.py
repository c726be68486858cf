"""Resizing by nearest neighbour or interpolation, antialiased or not, one dim at a time, with constant indices and weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register


def _step(size: int, out: int, scale: float | None) -> np.float32:
    """Input elements per output element; torch computes it in fp32."""
    return np.float32(1.0 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(out)


def _nearest(x, out, scales, shift=0.0):
    """`shift` 0.5 takes the element at the output element's centre (nearest-exact)."""
    for dim, n, scale in zip(range(x.ndim - len(out), x.ndim), out, scales):
        place = np.floor((np.arange(n, dtype=np.float32) + np.float32(shift)) * _step(x.shape[dim], n, scale))
        x = jnp.take(x, np.minimum(place.astype(np.int64), x.shape[dim] - 1), axis=dim, mode="clip")
    return x


def _nearest_exact(x, out, scales):
    return _nearest(x, out, scales, 0.5)


def _linear_places(size: int, n: int, scale: float | None, align_corners: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each element of a result: the elements before and behind it, and the weight of the latter."""
    if align_corners:
        place = np.arange(n) * ((size - 1) / (n - 1) if n > 1 else 0.0)
    else:
        place = np.maximum((np.arange(n) + 0.5) * (1.0 / scale if scale else size / n) - 0.5, 0.0)
    low = np.minimum(np.floor(place).astype(np.int64), size - 1)
    return low, np.minimum(low + 1, size - 1), place - low


def _linear(align_corners, x, out, scales):
    for dim, n, scale in zip(range(x.ndim - len(out), x.ndim), out, scales):
        low, high, weight = _linear_places(x.shape[dim], n, scale, align_corners)
        weight = weight.astype(x.dtype).reshape([-1] + [1] * (x.ndim - dim - 1))
        x = jnp.take(x, low, axis=dim, mode="clip") * (1 - weight) + jnp.take(x, high, axis=dim, mode="clip") * weight
    return x


MOST_MULTIPLIED = 512
"""Elements along a dim up to which the gradient of a linear interpolation is a product with a dense matrix. XLA:CPU scatters 13 ns an element, one after the other."""


def _linear_by_products(align_corners, x, out, scales):
    """`_linear`, whose transposed map is then a product and no scatter."""
    if max(x.shape[-len(out) :]) > MOST_MULTIPLIED:
        return _linear(align_corners, x, out, scales)
    for dim, n, scale in zip(range(x.ndim - len(out), x.ndim), out, scales):
        low, high, weight = _linear_places(x.shape[dim], n, scale, align_corners)
        matrix = np.zeros((x.shape[dim], n), x.dtype)
        np.add.at(matrix, (low, np.arange(n)), 1 - weight.astype(x.dtype))
        np.add.at(matrix, (high, np.arange(n)), weight.astype(x.dtype))
        x = jnp.moveaxis(jnp.tensordot(x, matrix, (dim, 0), precision="highest"), -1, dim)
    return x


def _forward(resize, ctx, x, scales):
    spatial = len(ctx.shape) - 2
    return cast(resize(cast(x, wide(x.dtype)), ctx.shape[2:], list(scales) or [None] * spatial), ctx.dtype)


def _backward(resize, ctx, grad, scales):
    grad = cast(grad, wide(grad.dtype))
    scales = list(scales) or [None] * (grad.ndim - 2)
    primal = jax.ShapeDtypeStruct(ctx.shape, grad.dtype)
    return cast(jax.linear_transpose(lambda x: resize(x, grad.shape[2:], scales), primal)(grad)[0], ctx.dtype)


def _register_nearest(name, resize):
    @register(f"aten.{name}.default")
    def forward(ctx, x, output_size, *scales):
        return _forward(resize, ctx, x, scales)

    @register(f"aten.{name}.vec")
    def forward_vec(ctx, x, output_size, scale_factors):
        return _forward(resize, ctx, x, scale_factors or () if output_size is None else ())

    @register(f"aten.{name}_backward.default")
    def backward(ctx, grad, output_size, input_size, *scales):
        return _backward(resize, ctx, grad, scales)


def _register_linear(name):
    def resize(align_corners, form=_linear):
        return functools.partial(form, align_corners)

    @register(f"aten.{name}.default")
    def forward(ctx, x, output_size, align_corners, *scales):
        return _forward(resize(align_corners), ctx, x, scales)

    @register(f"aten.{name}.vec")
    def forward_vec(ctx, x, output_size, align_corners, scale_factors):
        return _forward(resize(align_corners), ctx, x, scale_factors or () if output_size is None else ())

    @register(f"aten.{name}_backward.default")
    def backward(ctx, grad, output_size, input_size, align_corners, *scales):
        return _backward(resize(align_corners, _linear_by_products), ctx, grad, scales)


@functools.lru_cache(maxsize=256)
def _antialiased_weights(name: str, size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """[size, out]: what torch's kernel makes of each element of one dim (the last: it is wrong about a width of 1)."""
    with torch.inference_mode():
        elements = torch.eye(size, dtype=torch.float64).reshape(1, 1, size, size)
        return getattr(torch.ops.aten, name).default(elements, [size, out], align_corners, None, scale)[0, 0].numpy()


def _antialiased(name, align_corners):
    def resize(x, out, scales):
        for dim, n, scale in zip((2, 3), out, scales):
            matrix = _antialiased_weights(name, x.shape[dim], n, align_corners, scale).astype(x.dtype)
            x = jnp.moveaxis(jnp.tensordot(x, matrix, (dim, 0), precision="highest"), -1, dim)
        return x

    return resize


def _register_antialiased(name):
    @register(f"aten.{name}.default")
    def forward(ctx, x, output_size, align_corners, *scales):
        return _forward(_antialiased(name, align_corners), ctx, x, scales)

    @register(f"aten.{name}.vec")
    def forward_vec(ctx, x, output_size, align_corners, scale_factors):
        return _forward(_antialiased(name, align_corners), ctx, x, scale_factors or () if output_size is None else ())

    @register(f"aten.{name}_backward.default")
    def backward(ctx, grad, output_size, input_size, align_corners, *scales):
        return _backward(_antialiased(name, align_corners), ctx, grad, scales)


for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register_antialiased(_name)
for _spatial in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_spatial}d", _nearest)
    _register_nearest(f"_upsample_nearest_exact{_spatial}d", _nearest_exact)
for _name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"):
    _register_linear(_name)
