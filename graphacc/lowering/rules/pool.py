"""Pooling over the last one to three dims, as selects or sums over the strided slices that the window's offsets give.

All of it is pointwise on slices, so XLA fuses it and the gradient of max pooling needs no scatter.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, is_float, wide
from graphacc.lowering.extremes import largest
from graphacc.lowering.fence import computed_once
from graphacc.lowering.registry import register


def _spread(values, spatial: int, default=1) -> list[int]:
    values = [values] if isinstance(values, int) else list(values or [default])
    return values * spatial if len(values) == 1 else values


class _Window:
    """A pooling window: which input element each of its offsets reads for each output element."""

    def __init__(self, spatial, shape, out_shape, kernel, stride, padding, dilation=1):
        self.spatial, self.size, self.out = spatial, shape[-spatial:], out_shape[-spatial:]
        self.kernel = _spread(kernel, spatial)
        self.stride = _spread(stride if stride else self.kernel, spatial)
        self.padding = _spread(padding, spatial, 0)
        self.dilation = _spread(dilation, spatial)
        reach = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(self.out, self.stride, self.dilation, self.kernel)]
        self.high = [max(r - p - n, 0) for r, p, n in zip(reach, self.padding, self.size)]

    def offsets(self):
        return itertools.product(*map(range, self.kernel))

    def pad(self, x, value):
        config = [(0, 0, 0)] * (x.ndim - self.spatial) + [(p, h, 0) for p, h in zip(self.padding, self.high)]
        return lax.pad(x, np.asarray(value).astype(x.dtype), config)

    def read(self, padded, offset):
        """The elements that one offset of the window reads, in the shape of the output."""
        index = [slice(None)] * (padded.ndim - self.spatial)
        for o, d, s, n in zip(offset, self.dilation, self.stride, self.out):
            index.append(slice(o * d, o * d + (n - 1) * s + 1, s))
        return padded[tuple(index)]

    def put(self, x, offset):
        """The transpose of `read` after `pad`: place the elements back in the shape of the input, zeros elsewhere."""
        config = [(0, 0, 0)] * (x.ndim - self.spatial)
        for o, d, s, n, p, size in zip(offset, self.dilation, self.stride, self.out, self.padding, self.size):
            low = o * d - p
            config.append((low, size - low - ((n - 1) * s + 1), s - 1))
        return lax.pad(x, np.zeros((), x.dtype), config)

    def positions(self, offset) -> np.ndarray:
        """Row-major index in the unpadded plane that the offset reads, -1 outside; shaped as the output's plane."""
        position, inside = np.zeros((), np.int64), np.ones((), bool)
        for o, d, s, n, p, size in zip(offset, self.dilation, self.stride, self.out, self.padding, self.size):
            place = o * d - p + np.arange(n) * s
            position = position[..., None] * size + place
            inside = inside[..., None] & (place >= 0) & (place < size)
        return np.where(inside, position, -1).astype(self.index_dtype)

    @property
    def index_dtype(self) -> np.dtype:
        """Of indices inside the program: half the bytes of torch's int64, if the plane allows that."""
        return np.dtype(np.int32 if math.prod(self.size) <= np.iinfo(np.int32).max else np.int64)


def _max_pool(spatial, ctx, x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """Maxima and their indices. Without the fence XLA chooses every window's index again for each element of the gradient that may come from it:
    for a 3 x 3 window 81 reads instead of 9.
    """
    window = _Window(spatial, x.shape, ctx.element(0).shape, kernel_size, stride, padding, dilation)
    lowest = -np.inf if is_float(x) else jnp.iinfo(x.dtype).min
    padded = window.pad(x, lowest)
    best = index = None
    for offset in window.offsets():
        value, position = window.read(padded, offset), window.positions(offset)
        inside = position >= 0
        if best is None:
            best, index = value, jnp.broadcast_to(position, value.shape)
            continue
        better = inside & ((value > best) | (index < 0))
        better = better | (inside & jnp.isnan(value)) if is_float(x) else better
        best, index = jnp.where(better, value, best), jnp.where(better, position, index)
    assert index is not None, "a window has at least one element"
    return best, computed_once(index).astype(np.int64)


def _max_pool_backward(spatial, ctx, grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices):
    window = _Window(spatial, x.shape, grad.shape, kernel_size, stride, padding, dilation)
    wide_grad = cast(grad, wide(grad.dtype))
    total = jnp.zeros(x.shape, wide_grad.dtype)
    indices = indices.astype(window.index_dtype)
    for offset in window.offsets():
        chosen = indices == window.positions(offset)
        total = total + window.put(jnp.where(chosen, wide_grad, np.zeros((), wide_grad.dtype)), offset)
    return cast(total, ctx.dtype)


def _register(table):
    for name, (rule, spatial) in table.items():
        register(f"aten.{name}.default")(
            lambda ctx, *args, _rule=rule, _spatial=spatial, **kwargs: _rule(_spatial, ctx, *args, **kwargs)
        )


def _avg_counts(window, count_include_pad, divisor) -> np.ndarray:
    """How many elements each window counts, shaped as the output's plane."""
    counts = np.ones((), np.float64)
    for size, n, k, s, p in zip(window.size, window.out, window.kernel, window.stride, window.padding):
        start = np.arange(n) * s - p
        end = np.minimum(start + k, size + p)
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, size)
        counts = counts[..., None] * (end - start)
    return np.full(counts.shape, divisor, np.float64) if divisor else counts


_MOST_SLICES = 32


def _window_sum(window, x):
    """Sums of all windows: of few elements as a sum of slices, of many one dim after the other."""
    if math.prod(window.kernel) <= _MOST_SLICES:
        padded = window.pad(x, 0)
        return sum(window.read(padded, offset) for offset in window.offsets())
    for dim in range(window.spatial):
        x = _sum_along(window, x, dim)
    return x


def _sum_along(window, x, dim):
    """Sums along one spatial dim. A window may be much longer than the dim: what it reads beyond is not there to be added."""
    axis = x.ndim - window.spatial + dim
    size, out, kernel, stride, padding = (of[dim] for of in (window.size, window.out, window.kernel, window.stride, window.padding))
    if padding >= (out - 1) * stride and kernel - padding >= size:  # the last and the first window cover everything
        return jnp.broadcast_to(jnp.sum(x, axis, keepdims=True), (*x.shape[:axis], out, *x.shape[axis + 1 :]))
    ones, pads = [1] * x.ndim, [(0, 0)] * x.ndim
    pads[axis] = padding, max((out - 1) * stride + kernel - padding - size, 0)
    sizes, strides = ([*ones[:axis], value, *ones[axis + 1 :]] for value in (kernel, stride))
    return lax.slice_in_dim(lax.reduce_window(x, np.zeros((), x.dtype), lax.add, sizes, strides, pads), 0, out, axis=axis)


def _avg_pool(spatial, ctx, x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    window = _Window(spatial, x.shape, ctx.shape, kernel_size, stride, padding)
    counts = _avg_counts(window, count_include_pad, divisor_override)
    dtype = wide(x.dtype)
    return cast(_window_sum(window, cast(x, dtype)) / counts.astype(dtype), ctx.dtype)


def _avg_pool_backward(spatial, ctx, grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    window = _Window(spatial, x.shape, grad.shape, kernel_size, stride, padding)
    dtype = wide(grad.dtype)
    grad = cast(grad, dtype) / _avg_counts(window, count_include_pad, divisor_override).astype(dtype)
    primal = jax.ShapeDtypeStruct(x.shape, dtype)
    return cast(jax.linear_transpose(lambda value: _window_sum(window, value), primal)(grad)[0], ctx.dtype)


def _adaptive_bounds(size: int, out: int) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each adaptive window."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _adaptive_matrix(size: int, out: int) -> np.ndarray:
    """[size, out] averaging weights."""
    matrix = np.zeros((size, out))
    for i, (start, end) in enumerate(_adaptive_bounds(size, out)):
        matrix[start:end, i] = 1 / (end - start)
    return matrix


def _adaptive_average(x, out):
    for dim, n in zip(range(x.ndim - len(out), x.ndim), out):
        if x.shape[dim] % n == 0:
            x = jnp.mean(x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]), dim + 1)
        else:
            matrix = _adaptive_matrix(x.shape[dim], n).astype(x.dtype)
            x = jnp.moveaxis(jnp.tensordot(x, matrix, (dim, 0), precision="highest"), -1, dim)
    return x


def _adaptive_avg_pool(spatial, ctx, x, _output_size):
    return cast(_adaptive_average(cast(x, wide(x.dtype)), ctx.shape[-spatial:]), ctx.dtype)


def _adaptive_avg_pool_backward(spatial, ctx, grad, x):
    grad = cast(grad, wide(grad.dtype))
    primal = jax.ShapeDtypeStruct(x.shape, grad.dtype)
    (result,) = jax.linear_transpose(lambda value: _adaptive_average(value, grad.shape[-spatial:]), primal)(grad)
    return cast(result, ctx.dtype)


def _adaptive_max_pool(spatial, ctx, x, _output_size):
    """Gather every window, padded to the longest by repeating its last element, and take the first largest."""
    shape, out = x.shape, ctx.element(0).shape[-spatial:]
    position = np.zeros((), np.int64)
    for size, n in zip(shape[-spatial:], out):
        bounds = _adaptive_bounds(size, n)
        longest = max(end - start for start, end in bounds)
        place = np.array([[min(start + k, end - 1) for k in range(longest)] for start, end in bounds])
        position = position[..., None, None] * size + place
    # [out0, k0, out1, k1, ...] -> [out..., k...]
    position = position.transpose(*range(0, 2 * spatial, 2), *range(1, 2 * spatial, 2)).reshape(math.prod(out), -1)
    windows = jnp.take(x.reshape(*shape[:-spatial], -1), position, axis=-1, mode="clip")
    best = jnp.argmax(windows, -1)
    index = jnp.take_along_axis(jnp.broadcast_to(position, windows.shape), best[..., None], -1)[..., 0]
    result_shape = ctx.element(0).shape
    return largest(windows, (windows.ndim - 1,)).reshape(result_shape), index.reshape(result_shape)


def _adaptive_max_pool_backward(spatial, ctx, grad, x, indices):
    planes = math.prod(x.shape[:-spatial])
    total = jnp.zeros((planes, math.prod(x.shape[-spatial:])), wide(grad.dtype))
    rows = np.arange(planes)[:, None]
    total = total.at[rows, indices.reshape(planes, -1)].add(cast(grad, total.dtype).reshape(planes, -1), mode="promise_in_bounds")
    return cast(total.reshape(x.shape), ctx.dtype)


_register(
    {
        "max_pool2d_with_indices": (_max_pool, 2),
        "max_pool3d_with_indices": (_max_pool, 3),
        "max_pool2d_with_indices_backward": (_max_pool_backward, 2),
        "max_pool3d_with_indices_backward": (_max_pool_backward, 3),
        "adaptive_avg_pool1d": (_adaptive_avg_pool, 1),
        "avg_pool1d": (_avg_pool, 1),
        "avg_pool2d": (_avg_pool, 2),
        "avg_pool3d": (_avg_pool, 3),
        "avg_pool2d_backward": (_avg_pool_backward, 2),
        "avg_pool3d_backward": (_avg_pool_backward, 3),
        "_adaptive_avg_pool2d": (_adaptive_avg_pool, 2),
        "_adaptive_avg_pool3d": (_adaptive_avg_pool, 3),
        "_adaptive_avg_pool2d_backward": (_adaptive_avg_pool_backward, 2),
        "_adaptive_avg_pool3d_backward": (_adaptive_avg_pool_backward, 3),
        "adaptive_max_pool2d": (_adaptive_max_pool, 2),
        "adaptive_max_pool3d": (_adaptive_max_pool, 3),
        "adaptive_max_pool2d_backward": (_adaptive_max_pool_backward, 2),
        "adaptive_max_pool3d_backward": (_adaptive_max_pool_backward, 3),
    }
)
