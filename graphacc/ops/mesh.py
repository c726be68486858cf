"""Operators that depend on the device's place on a mesh axis, and an ordering edge.

Collectives are torch's own functional ones (``torch.ops._c10d_functional``) with the mesh axis as the group name.
"""

import torch
import torch.distributed
from torch import Tensor

from graphacc._compat.torch_ import exchange_with, group_rank


@torch.library.custom_op("graphacc::axis_index", mutates_args=())
def axis_index(size: int, axis: str) -> Tensor:
    """This device's index along `axis`, int64 0-d; `size` is the number of ranks on it."""
    return torch.tensor(group_rank(axis), dtype=torch.int64)


@axis_index.register_fake
def _(size, axis):
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("graphacc::shard", mutates_args=())
def shard(x: Tensor, dim: int, outer: int, size: int, axis: str) -> Tensor:
    """This device's block of a tensor that every rank of `axis` holds whole.

    Dim `dim` is read as [outer, size, rest]; the block keeps [outer, 1, rest], flattened again. With `outer` 1 the
    blocks are contiguous.

    Args:
        x: tensor whose dim `dim` is a multiple of ``outer * size``.

    Returns:
        The block: the shape of `x` with dim `dim` divided by `size`.
    """
    blocks = x.unflatten(dim, (outer, size, -1)).select(dim + 1, group_rank(axis))
    return blocks.flatten(dim, dim + 1).clone()


@shard.register_fake
def _(x, dim, outer, size, axis):
    assert x.shape[dim] % (outer * size) == 0, f"dim {dim} of {list(x.shape)} is no multiple of {outer} * {size}"
    shape = list(x.shape)
    shape[dim] //= size
    return x.new_empty(shape)


@torch.library.custom_op("graphacc::permute_ranks", mutates_args=())
def permute_ranks(x: Tensor, targets: list[int], axis: str) -> Tensor:
    """The tensor of the rank that sends to this one: rank i of `axis` sends to rank ``targets[i]``, a permutation."""
    rank = group_rank(axis)
    return exchange_with(x.contiguous(), targets[rank], targets.index(rank), axis)


@permute_ranks.register_fake
def _(x, targets, axis):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("graphacc::after", mutates_args=())
def after(x: Tensor, dependency: Tensor) -> Tensor:
    """`x`, but not before `dependency` exists: an ordering edge that keeps equal computations apart in time."""
    return x.clone()


@after.register_fake
def _(x, dependency):
    return torch.empty_like(x)


@torch.library.custom_op("graphacc::mark_sharding", mutates_args=())
def mark_sharding(x: Tensor, spec: str) -> Tensor:
    """`x`, which is to be split as `spec` says, and its gradient alike: the mesh axes of its dims, "tp,," (empty: whole)."""
    return x.clone()


@mark_sharding.register_fake
def _(x, spec):
    return torch.empty_like(x)


def _save_spec(ctx, inputs, output):
    ctx.spec = inputs[1]


mark_sharding.register_autograd(lambda ctx, grad: (torch.ops.graphacc.mark_sharding(grad, ctx.spec), None), setup_context=_save_spec)
