"""Reading and writing at indices: `index`, `gather`, `scatter` and their kin.

Torch checks indices and raises; XLA cannot, so an index out of range reads or writes an unspecified element.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.errors import LoweringError
from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.hidden_zero import with_hidden_zero
from graphacc.lowering.partitioned import is_partitioned
from graphacc.lowering.registry import register

_IN_RANGE = "promise_in_bounds"


def _write(x, selector, source, method):
    """``x.at[selector].<method>(source)`` for "set", "add", "multiply", "max" or "min".

    bf16 values that meet in one place are combined in fp32 and rounded once; on bool, adding is "or" and multiplying
    "and", as in torch.
    """
    dtype = x.dtype
    if dtype == bool and method != "set":
        x, source, method = x.astype(np.int8), cast(source, np.int8), {"add": "max", "multiply": "min"}.get(method, method)
    elif method in ("add", "multiply"):
        x = cast(x, wide(dtype))
    update = getattr(x.at[selector], method)
    return cast(update(cast(source, x.dtype), mode=_IN_RANGE), dtype)


def _selector(ctx, indices):
    """torch's list of optional index tensors as a numpy index; trailing dims may be left out."""
    indices = _with_masks(indices)
    if any(index is not None and index.dtype == bool for index in indices):
        raise LoweringError(
            f"{ctx.node.name} ({ctx.node.target}) indexes with a bool tensor: how many elements that selects depends "
            "on the data, and XLA's shapes are fixed; use torch.where or a multiplication with the mask"
        )
    return tuple(slice(None) if index is None else index for index in indices)


def _with_masks(indices):
    """torch's index tensors, those of uint8 as the masks that they are."""
    return [index if index is None or index.dtype != np.uint8 else index != 0 for index in indices]


@register("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(ctx, x, indices):
    return x.at[_selector(ctx, indices)].get(mode=_IN_RANGE)


@register("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(ctx, x, indices, values, accumulate=False):
    given = [(dim, index) for dim, index in enumerate(_with_masks(indices)) if index is not None]
    if len(given) == 1 and given[0][1].dtype == bool:
        return _put_where(x, *given[0], cast(values, x.dtype), accumulate)
    selector = _selector(ctx, indices)
    rank = len(jax.eval_shape(lambda: x.at[selector].get()).shape)
    values = values.reshape(values.shape[max(0, values.ndim - rank) :])  # torch takes further dims of size 1 in front
    return _write(x, selector, cast(values, x.dtype), "add" if accumulate else "set")


def _put_where(x, first, mask, values, accumulate):
    """Put values where `mask`, which covers the dims of `x` from `first` on, is true: the n-th value at the n-th place."""
    rest = x.shape[first + mask.ndim :]
    values = values.reshape((1,) * (first + 1 + len(rest) - values.ndim) + values.shape)
    if values.shape[first] == 1:
        values = values.reshape(*values.shape[:first], *(1,) * mask.ndim, *values.shape[first + 1 :])
    elif values.shape[first] == 0:  # for a mask without a true element
        return x
    else:
        nth = jnp.clip(jnp.cumsum(mask.reshape(-1).astype(np.int64)) - 1, 0, values.shape[first] - 1)
        values = jnp.take(values, nth, axis=first, mode="clip")
        values = values.reshape(*values.shape[:first], *mask.shape, *values.shape[first + 1 :])
    return jnp.where(_expand_right(mask, mask.ndim + len(rest)), jnp.add(x, values) if accumulate else values, x)


@register("aten._unsafe_masked_index.default")
def _unsafe_masked_index(ctx, x, mask, indices, fill):
    indices = [None if i is None else jnp.clip(i, 0, x.shape[dim] - 1) for dim, i in enumerate(indices)]
    values = x.at[_selector(ctx, indices)].get(mode=_IN_RANGE)
    return jnp.where(_expand_right(mask, values.ndim), values, cast(fill, x.dtype))


@register("aten._unsafe_masked_index_put_accumulate.default")
def _unsafe_masked_index_put(ctx, x, mask, indices, values):
    indices = [None if i is None else jnp.clip(i, -x.shape[dim], x.shape[dim] - 1) for dim, i in enumerate(indices)]
    values = jnp.where(_expand_right(mask, values.ndim), values, np.zeros((), values.dtype))
    return index_put(ctx, x, indices, values, accumulate=True)


def _expand_right(mask, ndim):
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


@register("aten.embedding.default")
def _embedding(ctx, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return weight.at[indices].get(mode=_IN_RANGE, wrap_negative_indices=False)


def _zeros_when_needed(shape: tuple[int, ...], rows):
    """Zeros to which `rows` are added. On GPUs not before these exist: XLA makes what depends on nothing early, and the table's gradient would be in memory through the whole backward."""
    if not rows.size or is_partitioned():
        return jnp.zeros(shape, rows.dtype)

    def behind(rows):
        return jnp.broadcast_to(with_hidden_zero(jnp.zeros((), rows.dtype), rows[:1, :1]), shape)

    return lax.platform_dependent(rows, cuda=behind, default=lambda rows: jnp.zeros(shape, rows.dtype))


@register("aten.embedding_dense_backward.default")
def _embedding_dense_backward(ctx, grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    indices, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    rows = cast(rows, wide(grad.dtype))
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, rows.dtype).at[indices].add(1, mode=_IN_RANGE)
        rows = rows / counts[indices][:, None]
    if padding_idx >= 0:
        rows = jnp.where((indices == padding_idx)[:, None], np.zeros((), rows.dtype), rows)
    total = _zeros_when_needed((num_weights, rows.shape[1]), rows)
    return cast(total.at[indices].add(rows, mode=_IN_RANGE, wrap_negative_indices=False), grad.dtype)


@register("aten.index_select.default", "aten.index_select_backward.default")
def _index_select(ctx, x, dim, index):
    if x.ndim == 0:
        return x
    return x.at[_along(dim % x.ndim, index.reshape(-1))].get(mode=_IN_RANGE)


def _along(dim: int, index) -> tuple:
    return (slice(None),) * dim + (index,)


@register("aten.index_add.default")
def _index_add(ctx, x, dim, index, source, *, alpha=1):
    source = source * np.asarray(alpha, source.dtype) if alpha != 1 else source
    return _at(x, dim, index, source, "add")


@register("aten.index_copy.default")
def _index_copy(ctx, x, dim, index, source):
    return _at(x, dim, index, source, "set")


@register("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def _index_fill(ctx, x, dim, index, value):
    return _at(x, dim, index, value, "set")


def _at(x, dim, index, source, method):
    """Update the slices of `x` along `dim` at a 1-d index; a 0-d tensor counts as one of length 1."""
    whole = x.reshape(1) if x.ndim == 0 else x
    if not isinstance(source, (bool, int, float, complex)) and source.ndim < whole.ndim and source.size == 1:
        source = source.reshape((1,) * whole.ndim)
    return _write(whole, _along(dim % whole.ndim, index.reshape(-1)), cast(source, x.dtype), method).reshape(x.shape)


def _positions(index, dim):
    """A numpy index that addresses, for every element of `index`, its own place in the other dims."""
    return tuple(index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim))


def _at_least_1d(*arrays):
    return tuple(x.reshape(1) if getattr(x, "ndim", 1) == 0 else x for x in arrays)


@register("aten.gather.default")
def gather(ctx, x, dim, index, sparse_grad=False):
    x, index = _at_least_1d(x, index)
    if index.size == 0:
        return jnp.zeros(ctx.shape, x.dtype)
    return x.at[_positions(index, dim % x.ndim)].get(mode=_IN_RANGE).reshape(ctx.shape)


def _scatter(x, dim, index, source, method):
    """Put `source` (array or number) into `x` at `index` along `dim` by an ``x.at[...]`` method."""
    shape = x.shape
    x, index = _at_least_1d(x, index)
    dim = dim % x.ndim
    if index.size == 0:
        return x.reshape(shape)
    source = cast(source, x.dtype)
    if source.ndim:
        source = source[tuple(slice(n) for n in index.shape)]
    if (
        method == "set"
        and index.shape[dim] == 1
        and all(n == m for d, (n, m) in enumerate(zip(index.shape, x.shape)) if d != dim)
    ):
        # One element per line: a comparison that fuses with its neighbours (the gradient of a cross-entropy).
        return jnp.where(lax.broadcasted_iota(index.dtype, x.shape, dim) == index, source, x).reshape(shape)
    return _write(x, _positions(index, dim), source, method).reshape(shape)


@register("aten.scatter.value", "aten.scatter.src")
def scatter(ctx, x, dim, index, source):
    return _scatter(x, dim, index, source, "set")


@register("aten.scatter.reduce", "aten.scatter.value_reduce")
def _scatter_reduce_old(ctx, x, dim, index, source, *, reduce):
    return _scatter(x, dim, index, source, {"add": "add", "multiply": "multiply"}[reduce])


@register("aten.scatter_add.default")
def scatter_add(ctx, x, dim, index, source):
    return _scatter(x, dim, index, source, "add")


_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def _identity(reduce, dtype):
    """The value that leaves the other operand of the reduction as it is."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype == bool:
        return reduce == "amin"
    lowest, highest = (-np.inf, np.inf) if jnp.issubdtype(dtype, jnp.inexact) else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return lowest if reduce == "amax" else highest


def _reduce_into(ctx, x, reduce, include_self, update):
    """Combine values into `x` by `update(array, value or None, method)`; `None` means the caller's own source."""
    touched = update(jnp.zeros(x.shape, np.int64), 1, "add")
    start = x if include_self else jnp.where(touched > 0, cast(_identity(reduce, x.dtype), x.dtype), x)
    result = update(start, None, _METHODS[reduce])
    if reduce != "mean":
        return result
    count = jnp.maximum(touched + int(include_self), 1)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return result / count.astype(x.dtype)
    return jnp.floor_divide(result, count.astype(x.dtype))


@register("aten.scatter_reduce.two")
def _scatter_reduce(ctx, x, dim, index, source, reduce, *, include_self=True):
    return _reduce_into(
        ctx, x, reduce, include_self, lambda a, value, how: _scatter(a, dim, index, source if value is None else value, how)
    )


@register("aten.index_reduce.default")
def _index_reduce(ctx, x, dim, index, source, reduce, *, include_self=True):
    return _reduce_into(
        ctx, x, reduce, include_self, lambda a, value, how: _at(a, dim, index, source if value is None else value, how)
    )


@register("aten.take.default")
def _take(ctx, x, index):
    return x.reshape(-1).at[index].get(mode=_IN_RANGE)


@register("aten.put.default")
def _put(ctx, x, index, source, accumulate=False):
    return _write(x.reshape(-1), index.reshape(-1), source.reshape(-1), "add" if accumulate else "set").reshape(x.shape)


@register("aten.masked_scatter.default")
def _masked_scatter(ctx, x, mask, source):
    x, mask = (jnp.broadcast_to(y, ctx.shape) for y in (x, mask))
    if source.size == 0:
        return x
    nth = jnp.cumsum(mask.reshape(-1).astype(np.int64)) - 1
    values = source.reshape(-1).at[jnp.clip(nth, 0, source.size - 1)].get(mode=_IN_RANGE)
    return jnp.where(mask, values.reshape(ctx.shape), x)


@register("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def _embedding_bag(
    ctx,
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    last=False,
    padding_idx=-1,
):
    """Sum (mode 0), mean (1) or maximum (2) of the rows of each bag.

    Bags start at `offsets`; with `last`, the final offset is where the last bag ends.
    """
    bags = ctx.element(0).shape[0]
    bag = jnp.searchsorted(offsets, lax.iota(offsets.dtype, indices.shape[0]), side="right") - 1
    used = (indices != padding_idx) & (bag < bags)
    place = jnp.where(used, bag, bags)  # one more bag takes what does not count
    rows = cast(weight[indices], wide(weight.dtype))
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    count = jnp.zeros(bags + 1, indices.dtype).at[place].add(1, mode=_IN_RANGE)[:bags]
    if mode == 2:
        out = jnp.full((bags + 1, rows.shape[1]), -np.inf, rows.dtype).at[place].max(rows, mode=_IN_RANGE)[:bags]
        out = jnp.where(count[:, None] > 0, out, 0)
    else:
        out = jnp.zeros((bags + 1, rows.shape[1]), rows.dtype).at[place].add(rows, mode=_IN_RANGE)[:bags]
        out = out / jnp.maximum(count, 1)[:, None] if mode == 1 else out
    # The other results only serve torch's own backward kernels, which have no rule.
    return cast(out, ctx.element(0).dtype), *(jnp.zeros(ctx.element(i).shape, ctx.element(i).dtype) for i in (1, 2, 3))
