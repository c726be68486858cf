"""Sampling of a volume at the points of a grid, with the derivatives that torch's kernels have at the edges.

Legend: N samples, C channels, (D, H, W) the volume's size, (E, F, G) the grid's.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register

_BILINEAR, _NEAREST = 0, 1
_BORDER, _REFLECTION = 1, 2


def _clipped(place, size):
    """Without a gradient at the edges themselves, too, where jnp.clip has half of it."""
    return jnp.where(place > 0, jnp.where(place < size - 1, place, size - 1), 0.0).astype(place.dtype)


def _reflected(place, size, align_corners):
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    if high <= low:
        return jnp.zeros_like(place)
    distance = place - low
    distance = jnp.where(distance < 0, -distance, distance)
    flips = jax.lax.stop_gradient(jnp.floor(distance / (high - low)))
    extra = distance - flips * (high - low)
    return _clipped(jnp.where(flips % 2 == 0, extra + low, high - extra), size)


def _place(coordinate, size, padding_mode, align_corners):
    """Where in a dim of `size` elements a coordinate from -1 to 1 is."""
    place = (coordinate + 1) / 2 * (size - 1) if align_corners else ((coordinate + 1) * size - 1) / 2
    if padding_mode == _BORDER:
        return _clipped(place, size)
    return _reflected(place, size, align_corners) if padding_mode == _REFLECTION else place


def _sample(x, grid, mode, padding_mode, align_corners):
    """x [N, C, D, H, W] at grid [N, E, F, G, 3], whose last dim counts W first: [N, C, E, F, G]."""
    sizes = x.shape[2:]
    places = [_place(grid[..., 2 - dim], size, padding_mode, align_corners) for dim, size in enumerate(sizes)]
    if mode == _NEAREST:
        return _read(x, [jnp.round(place) for place in places])
    lows = [jax.lax.stop_gradient(jnp.floor(place)) for place in places]
    total = jnp.zeros((), x.dtype)
    for corner in itertools.product((0, 1), repeat=3):
        weights = [place - low if side else 1 - (place - low) for place, low, side in zip(places, lows, corner)]
        values = _read(x, [low + side for low, side in zip(lows, corner)])
        total = total + values * (weights[0] * weights[1] * weights[2])[:, None]
    return total


def _read(x, places):
    """The elements at whole places, [N, C, E, F, G]; 0 outside."""
    inside, index = True, []
    for place, size in zip(places, x.shape[2:]):
        inside = inside & (place >= 0) & (place <= size - 1)
        index.append(jnp.clip(jax.lax.stop_gradient(place), 0, size - 1).astype(np.int64))
    samples = np.arange(x.shape[0]).reshape(-1, 1, 1, 1)
    values = jnp.moveaxis(x, 1, -1)[(samples, *index)]  # [N, E, F, G, C]
    return jnp.moveaxis(jnp.where(inside[..., None], values, 0), -1, 1)


@register("aten.grid_sampler_3d.default")
def _grid_sampler_3d(ctx, x, grid, interpolation_mode, padding_mode, align_corners):
    x, grid = cast(x, wide(x.dtype)), cast(grid, wide(grid.dtype))
    return cast(_sample(x, grid, interpolation_mode, padding_mode, align_corners), ctx.dtype)


@register("aten.grid_sampler_3d_backward.default")
def _grid_sampler_3d_backward(ctx, grad, x, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    def call(x, grid):
        return _sample(x, grid, interpolation_mode, padding_mode, align_corners)

    x, grid = cast(x, wide(x.dtype)), cast(grid, wide(grid.dtype))
    grads = jax.vjp(call, x, grid)[1](cast(grad, x.dtype))
    return tuple(None if said is None else cast(value, ctx.element(i).dtype) for i, (value, said) in enumerate(zip(grads, ctx.val)))
