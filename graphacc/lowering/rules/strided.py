"""`as_strided` on arrays without strides: it addresses the storage of its input, which must be all in the input.

The input's fake value says how its elements lay in storage. When the input fills its storage densely, the storage in
row-major order is a permutation of it, and the result a slice, a reshape or a gather with constant indices.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from graphacc.errors import LoweringError
from graphacc.lowering.registry import register


@register("aten.as_strided.default", "aten.as_strided_copy.default")
def _as_strided(ctx, x, size, stride, storage_offset=None):
    fake = ctx.node.args[0].meta["val"]
    offset = fake.storage_offset() if storage_offset is None else storage_offset
    starts = _slice_starts(fake, size, stride, offset)
    if starts is not None:
        return lax.slice(x, starts, [start + n for start, n in zip(starts, size)])
    flat = _storage(ctx, fake, x)
    if list(stride) == _contiguous_strides(size):
        return lax.slice_in_dim(flat, offset, offset + math.prod(size)).reshape(tuple(size))
    return jnp.take(flat, _positions(size, stride, offset), mode="clip")


@register("aten.as_strided_scatter.default")
def _as_strided_scatter(ctx, x, source, size, stride, storage_offset=None):
    fake = ctx.node.args[0].meta["val"]
    offset = fake.storage_offset() if storage_offset is None else storage_offset
    order = _storage_order(ctx, fake)
    flat = lax.transpose(x, order).reshape(-1).at[_positions(size, stride, offset)].set(source, mode="promise_in_bounds")
    shape = [x.shape[dim] for dim in order]
    return lax.transpose(flat.reshape(shape), np.argsort(order))


def _positions(size, stride, offset) -> np.ndarray:
    """Storage index of every element, int64 of shape `size`."""
    index = np.full((), offset, np.int64)
    for length, step in zip(size, stride):
        index = index[..., None] + np.arange(length) * step
    return index


def _contiguous_strides(size) -> list[int]:
    return list(torch.empty(tuple(size), device="meta").stride())


def _slice_starts(fake: torch.Tensor, size, stride, offset) -> list[int] | None:
    """Where the result starts in the input if it is a plain slice of it, as torch's decomposed `split` makes."""
    if list(stride) != list(fake.stride()) or any(n > whole for n, whole in zip(size, fake.shape)):
        return None
    rest, starts = offset - fake.storage_offset(), [0] * len(size)
    for dim in sorted(range(len(size)), key=lambda d: -stride[d]):
        if stride[dim] > 0 and fake.shape[dim] > 1:
            starts[dim], rest = divmod(rest, stride[dim])
    inside = all(start >= 0 and start + n <= whole for start, n, whole in zip(starts, size, fake.shape))
    return starts if rest == 0 and inside else None


def _storage_order(ctx, fake: torch.Tensor) -> list[int]:
    """The permutation of the input's dims that lays its elements out as its storage has them."""
    order = sorted(range(fake.ndim), key=lambda dim: (-fake.stride(dim), dim))
    stored = fake.untyped_storage().nbytes() // fake.element_size()
    if not fake.permute(order).is_contiguous() or fake.storage_offset() or stored != fake.numel():
        raise LoweringError(
            f"{ctx.node.name} (as_strided) reads the storage of a {list(fake.shape)} tensor with strides {list(fake.stride())}, "
            f"of whose {stored} elements the tensor shows {fake.numel()}; XLA has no storage behind a tensor: "
            "use slicing, unfold or expand in the model"
        )
    return order


def _storage(ctx, fake: torch.Tensor, x) -> jax.Array:
    return lax.transpose(x, _storage_order(ctx, fake)).reshape(-1)
