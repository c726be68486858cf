"""Routing to experts: sorts become one stable sort of the ids and a gather of rows; grouped products are `matmul.grouped_dot`."""

import jax.numpy as jnp
import numpy as np

from graphacc.lowering.fence import stored_on_gpus
from graphacc.lowering.registry import register
from graphacc.lowering.rules.matmul import grouped_dot, grouped_outer


def _order(ids):
    """[M]: which row stands at each place after a stable sort."""
    return jnp.argsort(ids.reshape(-1), stable=True)


def _take(rows, index):
    return jnp.take(rows, index, axis=0, mode="clip")


@register("graphacc.sort_rows.default")
def _sort_rows(ctx, rows, ids):
    return _take(rows.reshape(ids.size, *rows.shape[ids.ndim :]), _order(ids))


@register("graphacc.unsort_rows.default")
def _unsort_rows(ctx, rows, ids):
    return _take(rows, jnp.argsort(_order(ids))).reshape(ctx.shape)


@register("graphacc.expert_offsets.default")
def _expert_offsets(ctx, ids, num_experts):
    """How many ids lie below the end of each expert; negative ids count nowhere."""
    ids = ids.reshape(-1)
    below = (ids >= 0) & (ids <= np.arange(num_experts, dtype=ids.dtype)[:, None])
    return jnp.sum(below, axis=1, dtype=np.int32)


@register("graphacc.grouped_mm.default")
def _grouped_mm(ctx, rows, weight, offsets):
    return grouped_dot(rows, weight, offsets, ctx.node.args[1])


@register("graphacc.grouped_mm_weight_grad.default")
def _grouped_mm_weight_grad(ctx, rows, grad, offsets):
    return grouped_outer(rows, grad, offsets, ctx.node)


def _buckets(ids, per_bucket, num_buckets):
    """The bucket of every row, `num_buckets` for none, and where each bucket starts among the rows sorted by bucket."""
    bucket = jnp.where((ids >= 0) & (ids < per_bucket * num_buckets), ids // per_bucket, num_buckets)
    starts = jnp.sum(bucket < np.arange(num_buckets + 1, dtype=ids.dtype)[:, None], axis=1)
    return bucket, starts


def _where_rows(mask, rows, other):
    return jnp.where(mask.reshape(mask.shape + (1,) * (rows.ndim - mask.ndim)), rows, other)


@register("graphacc.bucket_rows.default")
def _bucket_rows(ctx, rows, ids, per_bucket, num_buckets, capacity, fill):
    """Every place of a bucket reads its row."""
    bucket, starts = _buckets(ids, per_bucket, num_buckets)
    place = starts[:-1, None] + np.arange(capacity)  # [N, C], among the sorted rows
    taken = _take(rows, _take(_order(bucket), place))
    return _where_rows(place < starts[1:, None], taken, np.asarray(fill, rows.dtype))


@register("graphacc.unbucket_rows.default")
def _unbucket_rows(ctx, buckets, ids, per_bucket):
    """Every row reads its place."""
    num_buckets, capacity = buckets.shape[:2]
    bucket, starts = _buckets(ids, per_bucket, num_buckets)
    slot = jnp.argsort(_order(bucket)) - _take(starts, bucket)
    taken = _take(buckets.reshape(num_buckets * capacity, *buckets.shape[2:]), bucket * capacity + slot)
    return stored_on_gpus(_where_rows((bucket < num_buckets) & (slot < capacity), taken, np.zeros((), buckets.dtype)))
