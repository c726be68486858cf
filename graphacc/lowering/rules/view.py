"""Operators that rearrange elements. jax arrays have no strides, so a view and its copy are the same here."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, to_jax
from graphacc.lowering.fence import stored_on_gpus
from graphacc.lowering.registry import register
from graphacc.ops.facts import product_readers


@register(
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.detach_copy.default",
    "aten.lift.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    "prims.clone.default",
    "prims.view_of.default",
)
def _same(ctx, x, **_layout):
    return x


@register(
    "aten.view.default",
    "aten.view_copy.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten._reshape_alias.default",
    "aten._reshape_copy.default",
    "aten.unsqueeze.default",
    "aten.unsqueeze_copy.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze_copy.default",
    "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims",
    "prims.reshape.default",
    "prims.squeeze.default",
    "prims.split_dim.default",
    "prims.collapse_view.default",
)
def reshape(ctx, x, *_target):
    """All of these keep the row-major order of the elements."""
    return lax.reshape(x, ctx.shape)


@register("aten.view.dtype", "aten.view_copy.dtype")
def _view_dtype(ctx, x, dtype):
    target = to_jax(dtype)
    if target.itemsize > x.dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, target.itemsize // x.dtype.itemsize)
    return lax.bitcast_convert_type(x, target).reshape(ctx.shape)


@register("aten.permute.default", "aten.permute_copy.default", "prims.transpose.default")
def permute(ctx, x, dims):
    return lax.transpose(x, [dim % x.ndim for dim in dims])


@register("aten.transpose.int", "aten.transpose_copy.int")
def _transpose(ctx, x, dim0, dim1):
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@register("aten.t.default", "aten.t_copy.default")
def _t(ctx, x):
    return x.T


@register("aten.expand.default", "aten.expand_copy.default")
def _expand(ctx, x, _size, implicit=False):
    return jnp.broadcast_to(x, ctx.shape)


@register("prims.broadcast_in_dim.default")
def _broadcast_in_dim(ctx, x, shape, dims):
    return lax.broadcast_in_dim(x, shape, dims)


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """Start and end (exclusive) of torch's slice of a dim, in [0, size]."""
    start, end, _ = slice(start, end, step).indices(size)
    return start, max(start, end)


@register("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_tensor(ctx, x, dim=0, start=None, end=None, step=1):
    dim = dim % x.ndim
    start, end = slice_bounds(x.shape[dim], start, end, step)
    return lax.slice_in_dim(x, start, end, step, dim)


@register("aten.select.int", "aten.select_copy.int")
def select(ctx, x, dim, index):
    return lax.index_in_dim(x, index, dim, keepdims=False)


@register("aten.narrow.default", "aten.narrow_copy.default")
def _narrow(ctx, x, dim, start, length):
    dim, start = dim % x.ndim, start % max(x.shape[dim], 1) if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim)


@register(
    "aten.split.Tensor",
    "aten.split_copy.Tensor",
    "aten.unsafe_split.Tensor",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    "aten.unsafe_split_with_sizes.default",
    "aten.chunk.default",
    "aten.unsafe_chunk.default",
)
def split(ctx, x, _sizes, dim=0):
    pieces, start = [], 0
    for value in ctx.val:
        size = value.shape[dim]
        pieces.append(lax.slice_in_dim(x, start, start + size, axis=dim % x.ndim))
        start += size
    return tuple(pieces)


@register("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(ctx, x, dim=0):
    return tuple(lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim]))


@register("aten.cat.default", "prims.cat.default")
def cat(ctx, tensors, dim=0):
    pieces = [cast(x, ctx.dtype) for x in tensors if x.shape != (0,) or len(ctx.shape) == 1]  # torch skips empty 1-d ones
    if not pieces:
        return jnp.zeros(ctx.shape, ctx.dtype)
    joined = lax.concatenate(pieces, dim % len(ctx.shape))
    return stored_on_gpus(joined) if product_readers(ctx.node) > 1 else joined


@register("aten.stack.default")
def _stack(ctx, tensors, dim=0):
    return jnp.stack([cast(x, ctx.dtype) for x in tensors], dim)


@register("aten.repeat.default")
def _repeat(ctx, x, repeats):
    return jnp.tile(x, tuple(repeats))


@register("aten.flip.default", "prims.rev.default")
def _flip(ctx, x, dims):
    return lax.rev(x, [dim % x.ndim for dim in dims]) if x.ndim else x


@register("aten.roll.default")
def _roll(ctx, x, shifts, dims=()):
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@register("aten.constant_pad_nd.default")
def _constant_pad(ctx, x, pad, value=0):
    low_high = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[::2], pad[1::2]))[::-1]
    return lax.pad(x, np.asarray(value).astype(x.dtype), [(low, high, 0) for low, high in low_high])


@register("aten.slice_scatter.default")
def _slice_scatter(ctx, x, source, dim=0, start=None, end=None, step=1):
    dim = dim % x.ndim
    start, end = slice_bounds(x.shape[dim], start, end, step)
    source = cast(source, x.dtype)
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, source, start, dim)
    return x.at[(slice(None),) * dim + (slice(start, end, step),)].set(source)


@register("aten.select_scatter.default")
def _select_scatter(ctx, x, source, dim, index):
    dim = dim % x.ndim
    source = jnp.expand_dims(cast(source, x.dtype), dim)
    return lax.dynamic_update_slice_in_dim(x, source, index % x.shape[dim], dim)


@register("aten.slice_backward.default")
def _slice_backward(ctx, grad, sizes, dim, start, end, step):
    dim = dim % len(sizes)
    start, _ = slice_bounds(sizes[dim], start, end, step)
    return _embed(grad, sizes[dim], dim, start, step)


@register("aten.select_backward.default")
def _select_backward(ctx, grad, sizes, dim, index):
    dim = dim % len(sizes)
    return _embed(jnp.expand_dims(grad, dim), sizes[dim], dim, index % sizes[dim], 1)


def _embed(x, size, dim, start, step):
    """Zeros with `x` at start, start + step, ... of a dim of length `size`."""
    count = x.shape[dim]
    padding = [(0, 0, 0)] * x.ndim
    covered = (count - 1) * step + 1 if count else 0
    padding[dim] = (start, size - start - covered, step - 1)
    return lax.pad(x, np.zeros((), x.dtype), padding)


def triangle(shape, diagonal):
    """bool[..., rows, columns]: column - row <= diagonal, the part that `tril` keeps."""
    rows, columns = (lax.broadcasted_iota(np.int32, shape[-2:], d) for d in (0, 1))
    return columns - rows <= diagonal


@register("aten.tril.default")
def _tril(ctx, x, diagonal=0):
    return jnp.where(triangle(x.shape, diagonal), x, np.zeros((), x.dtype))


@register("aten.triu.default")
def _triu(ctx, x, diagonal=0):
    return jnp.where(triangle(x.shape, diagonal - 1), np.zeros((), x.dtype), x)


@register("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(ctx, x, offset=0, dim1=0, dim2=1):
    return jnp.diagonal(x, offset, dim1, dim2)


@register("aten.diagonal_scatter.default")
def _diagonal_scatter(ctx, x, source, offset=0, dim1=0, dim2=1):
    return _place(x, cast(source, x.dtype), jnp.diagonal(jnp.arange(x.size).reshape(x.shape), offset, dim1, dim2))


@register("aten.diagonal_backward.default")
def _diagonal_backward(ctx, grad, sizes, offset, dim1, dim2):
    positions = jnp.diagonal(jnp.arange(np.prod(sizes)).reshape(tuple(sizes)), offset, dim1, dim2)
    return _place(jnp.zeros(tuple(sizes), grad.dtype), grad, positions)


def _place(x, source, positions):
    """`x` with `source` at these row-major positions, which are distinct."""
    flat = x.reshape(-1).at[positions.reshape(-1)].set(source.reshape(-1), mode="promise_in_bounds", unique_indices=True)
    return flat.reshape(x.shape)


def _windows(shape, dim, size, step):
    """The function that takes an array of this shape to its windows along `dim`, which become the last dim."""
    dim = dim % len(shape)
    count = (shape[dim] - size) // step + 1
    index = np.arange(count)[:, None] * step + np.arange(size)[None, :]
    return lambda x: jnp.moveaxis(jnp.take(x, index, axis=dim, mode="clip"), dim + 1, -1)


@register("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(ctx, x, dim, size, step):
    return _windows(x.shape, dim, size, step)(x) if x.ndim else jnp.broadcast_to(x, ctx.shape)


@register("aten.unfold_backward.default")
def _unfold_backward(ctx, grad, sizes, dim, size, step):
    windows = _windows(tuple(sizes), dim, size, step)
    primal = jax.ShapeDtypeStruct(tuple(sizes), grad.dtype)
    grad = jnp.broadcast_to(grad, jax.eval_shape(windows, primal).shape)
    return jax.linear_transpose(windows, primal)(grad)[0]


@register("aten.view_as_real.default", "aten.view_as_real_copy.default")
def _view_as_real(ctx, x):
    return jnp.stack([x.real, x.imag], -1)


@register("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def _view_as_complex(ctx, x):
    return lax.complex(x[..., 0], x[..., 1])


@register("aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default", "aten.type_as.default")
def to_copy(ctx, x, *_dtype, **_layout):
    return cast(x, ctx.dtype)


@register("aten.copy.default")
def _copy(ctx, x, source, non_blocking=False):
    return jnp.broadcast_to(cast(source, ctx.dtype), ctx.shape)
