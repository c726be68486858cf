"""Operators that depend on the device's place on a mesh axis, and an ordering edge.

Collectives are torch's own functional ones (``torch.ops._c10d_functional``) with the mesh axis as the group name. Two other forms name a part
of the axis's ranks: "fsdp/4" is the group of 4 consecutive ranks that this one belongs to, as in one node, and "fsdp%4" the group of the
ranks that have its place in their groups of 4, across nodes (`split_group`).
"""

import re

import torch
import torch.distributed
from torch import Tensor

from graphacc._compat.torch_ import exchange_with, group_rank

_SUBGROUP = re.compile(r"(?P<axis>[\w+]+)(?P<kind>[/%])(?P<size>\d+)")


def split_group(group: str) -> tuple[str, str, int]:
    """The mesh axis (or axes joined by "+") of a group, its kind ("" for all ranks, "/" or "%") and the number behind that.

    Examples:
        >>> split_group("fsdp"), split_group("fsdp/4"), split_group("fsdp%4")
        (('fsdp', '', 0), ('fsdp', '/', 4), ('fsdp', '%', 4))
    """
    match = _SUBGROUP.fullmatch(group)
    return (match["axis"], match["kind"], int(match["size"])) if match else (group, "", 0)


def subgroups(kind: str, size: int, num_ranks: int) -> list[list[int]]:
    """The ranks of every group of an axis of `num_ranks`, which `size` divides.

    Examples:
        >>> subgroups("/", 4, 8), subgroups("%", 4, 8)
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
    """
    assert num_ranks % size == 0, f"groups of {size} do not divide {num_ranks} ranks"
    if kind == "/":
        return [list(range(start, start + size)) for start in range(0, num_ranks, size)]
    return [list(range(place, num_ranks, size)) for place in range(size)]


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
def after(x: Tensor, dependency: Tensor, strict: bool = False) -> Tensor:
    """`x`, but not before `dependency` exists: an ordering edge that keeps equal computations apart in time.

    Args:
        strict: no schedule may have it otherwise. Else XLA's on CUDA may, where it finds that nothing is lost by it.
    """
    return x.clone()


@after.register_fake
def _(x, dependency, strict=False):
    return torch.empty_like(x)


@torch.library.custom_op("graphacc::wait_for", mutates_args=())
def wait_for(x: Tensor, dependency: Tensor) -> Tensor:
    """`x`, whose readers do not begin before `dependency` exists: where a scheduler would let memory grow. On CPU, whose schedules are planned for memory, `x` itself."""
    return x.clone()


@wait_for.register_fake
def _(x, dependency):
    return torch.empty_like(x)


@torch.library.custom_op("graphacc::barrier", mutates_args=())
def barrier(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, none of which is read before all of them are in memory. On CPU, whose schedules are planned for memory, the tensors themselves."""
    return [x.clone() for x in tensors]


@barrier.register_fake
def _(tensors):
    return [torch.empty_like(x) for x in tensors]


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
