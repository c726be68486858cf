"""Routing of rows to experts: what a mixture of experts does besides its products, and the products themselves.

Every row has the number of its expert, its id. Sorted by id, the rows of an expert stand together, so that one grouped product
serves all experts. Ids from the number of experts on belong to no expert: their rows stand last and their products are zero.
Buckets are for expert parallelism: bucket b holds the rows for experts b * per_bucket up to (b + 1) * per_bucket, which live on
one rank.

Legend: M rows, E experts, N buckets, C capacity (rows of a bucket), K and F features.
"""

import torch
from torch import Tensor


def _empty(x: Tensor, shape) -> Tensor:
    return x.new_empty([*shape])


def _check_rows(name: str, rows: Tensor, ids: Tensor) -> None:
    assert rows.shape[: ids.dim()] == ids.shape, f"{name}: rows {list(rows.shape)} do not begin with the shape of ids {list(ids.shape)}"


@torch.library.custom_op("graphacc::sort_rows", mutates_args=())
def sort_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Rows in the order of their ids, equal ids in their own order.

    Args:
        rows: [*S, ...], any dtype.
        ids: int [*S].

    Returns:
        [M, ...] with M the number of ids.
    """
    return rows.flatten(0, ids.dim() - 1)[ids.flatten().argsort(stable=True)]


@sort_rows.register_fake
def _(rows, ids):
    _check_rows("sort_rows", rows, ids)
    return _empty(rows, (ids.numel(), *rows.shape[ids.dim() :]))


@torch.library.custom_op("graphacc::unsort_rows", mutates_args=())
def unsort_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """The inverse of `sort_rows`: [M, ...] in the order of int ids [*S] -> [*S, ...]."""
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    result[ids.flatten().argsort(stable=True)] = rows
    return result.view(*ids.shape, *rows.shape[1:])


@unsort_rows.register_fake
def _(rows, ids):
    assert rows.shape[0] == ids.numel(), f"unsort_rows: {rows.shape[0]} rows and {ids.numel()} ids"
    return _empty(rows, (*ids.shape, *rows.shape[1:]))


@torch.library.custom_op("graphacc::expert_offsets", mutates_args=())
def expert_offsets(ids: Tensor, num_experts: int) -> Tensor:
    """Where the rows of each expert end among the sorted rows: int32 [E], half-open.

    Args:
        ids: int, of any shape; ids outside [0, num_experts) count nowhere.
    """
    return (ids.flatten() == torch.arange(num_experts, device=ids.device)[:, None]).sum(1).cumsum(0).to(torch.int32)


@expert_offsets.register_fake
def _(ids, num_experts):
    return ids.new_empty([num_experts], dtype=torch.int32)


@torch.library.custom_op("graphacc::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Every expert's rows times its matrix; the meaning of ``torch.nn.functional.grouped_mm``.

    Args:
        rows: [M, K], sorted by expert.
        weight: [E, K, F].
        offsets: int32 [E], where each expert's rows end.

    Returns:
        [M, F]; rows beyond the last offset are zero.
    """
    result, start = rows.new_zeros(rows.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(offsets.tolist()):
        result[start:end] = rows[start:end] @ weight[expert]
        start = end
    return result


@grouped_mm.register_fake
def _(rows, weight, offsets):
    assert rows.shape[1] == weight.shape[1] and weight.shape[0] == offsets.shape[0], (
        f"grouped_mm: rows {list(rows.shape)}, weight {list(weight.shape)}, offsets {list(offsets.shape)}"
    )
    return _empty(rows, (rows.shape[0], weight.shape[2]))


@torch.library.custom_op("graphacc::grouped_mm_weight_grad", mutates_args=())
def grouped_mm_weight_grad(rows: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of `grouped_mm`'s weight: rows [M, K], grad [M, F], offsets int32 [E] -> [E, K, F]."""
    result, start = rows.new_zeros(offsets.shape[0], rows.shape[1], grad.shape[1]), 0
    for expert, end in enumerate(offsets.tolist()):
        result[expert] = rows[start:end].T @ grad[start:end]
        start = end
    return result


@grouped_mm_weight_grad.register_fake
def _(rows, grad, offsets):
    assert rows.shape[0] == grad.shape[0], f"grouped_mm_weight_grad: rows {list(rows.shape)}, grad {list(grad.shape)}"
    return _empty(rows, (offsets.shape[0], rows.shape[1], grad.shape[1]))


@torch.library.custom_op("graphacc::bucket_rows", mutates_args=())
def bucket_rows(rows: Tensor, ids: Tensor, per_bucket: int, num_buckets: int, capacity: int, fill: int) -> Tensor:
    """Rows put into the bucket of their expert, in their own order; a full bucket takes no more.

    Args:
        rows: [M, ...].
        ids: int [M]; rows whose id has no bucket are left out.
        fill: value of the places that stay free.

    Returns:
        [N, C, ...].
    """
    place = _places(ids, per_bucket, num_buckets, capacity)
    result = rows.new_full([num_buckets * capacity + 1, *rows.shape[1:]], fill)
    result[place] = rows
    return result[:-1].reshape(num_buckets, capacity, *rows.shape[1:])


@bucket_rows.register_fake
def _(rows, ids, per_bucket, num_buckets, capacity, fill):
    _check_rows("bucket_rows", rows, ids)
    return _empty(rows, (num_buckets, capacity, *rows.shape[1:]))


@torch.library.custom_op("graphacc::unbucket_rows", mutates_args=())
def unbucket_rows(buckets: Tensor, ids: Tensor, per_bucket: int) -> Tensor:
    """The rows [M, ...] that `bucket_rows` put into [N, C, ...]; zero where a row was left out."""
    place = _places(ids, per_bucket, *buckets.shape[:2])
    padded = torch.cat([buckets.flatten(0, 1), buckets.new_zeros(1, *buckets.shape[2:])])
    return padded[place]


@unbucket_rows.register_fake
def _(buckets, ids, per_bucket):
    return _empty(buckets, (ids.shape[0], *buckets.shape[2:]))


def _places(ids: Tensor, per_bucket: int, num_buckets: int, capacity: int) -> Tensor:
    """int64 [M]: the place of every row among the N * C of the buckets; N * C for those that are left out."""
    bucket = torch.div(ids, per_bucket, rounding_mode="floor")
    mine = bucket[:, None] == torch.arange(num_buckets, device=ids.device)
    slot = torch.where(mine, mine.cumsum(0) - 1, 0).sum(1)
    inside = mine.any(1) & (slot < capacity)
    return torch.where(inside, bucket * capacity + slot, num_buckets * capacity)
