"""torch's functional collectives, and graphacc's operators that know their place, over the axes of a ``jax.shard_map``.

A group name is the name of a mesh axis, several joined by "+", outermost first ("dp+fsdp": one group over both), or a part of the ranks
of an axis ("fsdp/4", "fsdp%4": see `graphacc.ops.mesh`).
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, is_float
from graphacc.lowering.hidden_zero import with_hidden_zero
from graphacc.lowering.registry import register
from graphacc.lowering.rules.matmul import padded_rows
from graphacc.ops.facts import padding_of_rows
from graphacc.ops.mesh import split_group, subgroups


def axes_of(group: str) -> str | tuple[str, ...]:
    """The mesh axes of a group name, as jax's collectives take them.

    Examples:
        >>> axes_of("dp+fsdp")
        ('dp', 'fsdp')
    """
    if split_group(group)[1]:
        raise ValueError(f"group {group!r} is a part of its axis's ranks, over which this collective has no lowering: gathers and all-to-alls have one")
    names = tuple(group.split("+"))
    return names if len(names) > 1 else names[0]


def _members(group: str) -> dict:
    """A group that may be a part of its axis's ranks, as keyword arguments of jax's gathers and all-to-alls."""
    axis, kind, size = split_group(group)
    groups = subgroups(kind, size, lax.axis_size(axes_of(axis))) if kind else None
    return {"axis_name": axes_of(axis), "axis_index_groups": groups}


def _place(group: str):
    """How many ranks a group has, and this device's place among them."""
    axis, kind, size = split_group(group)
    total, index = lax.axis_size(axes_of(axis)), lax.axis_index(axes_of(axis))
    if kind == "/":
        return size, index % size
    return (total // size, index // size) if kind else (total, index)


def _bool_as_int(function):
    """jax has no collectives on bool: reduce 0 and 1."""

    def reduce(x, axes):
        return cast(function(x.astype(np.int32), axes), bool) if x.dtype == bool else function(x, axes)

    return reduce


def _with_nan(function, largest: bool):
    """A NaN of any device wins, which a reduction of floats between devices does not promise.

    What is reduced are integers in the order of the floats (their bits, mirrored below zero), with NaN beyond the infinities: one
    collective of the same bytes.
    """

    def reduce(x, axes):
        if not is_float(x):
            return function(x, axes)
        wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)  # exact; 16-bit integers are not reduced on every backend
        integers = jnp.int64 if wide.dtype == jnp.float64 else jnp.int32
        bits = lax.bitcast_convert_type(wide, integers)
        beyond = jnp.iinfo(integers).max if largest else jnp.iinfo(integers).min
        found = function(jnp.where(wide != wide, np.asarray(beyond, integers), _mirrored(bits)), axes)
        value = lax.bitcast_convert_type(_mirrored(found), wide.dtype)
        return jnp.where(found == beyond, np.asarray(np.nan, wide.dtype), value).astype(x.dtype)

    return reduce


def _mirrored(bits):
    """The bits of floats as integers in their order, and back."""
    return jnp.where(bits < 0, bits ^ np.asarray(jnp.iinfo(bits.dtype).max, bits.dtype), bits)


def _mean(x, axes):
    return lax.psum(x, axes) / np.asarray(lax.axis_size(axes), x.dtype)


_REDUCE = {
    "sum": _bool_as_int(lax.psum),
    "avg": _mean,
    "max": _with_nan(_bool_as_int(lax.pmax), largest=True),
    "min": _with_nan(_bool_as_int(lax.pmin), largest=False),
    "product": lambda x, axes: jnp.prod(lax.all_gather(x, axes), axis=0, dtype=x.dtype),
}


def _reduction(name: str):
    if name not in _REDUCE:
        raise ValueError(f"reduce operation {name!r} has no lowering; known are {', '.join(_REDUCE)}")
    return _REDUCE[name]


def _all_reduce(x, op, group):
    return _reduction(op)(x, axes_of(group))


def _all_gather(x, group):
    members = _members(group)
    if not x.size:  # of a batch without rows, which XLA does not gather
        groups = members["axis_index_groups"]
        return jnp.zeros((x.shape[0] * (len(groups[0]) if groups else lax.axis_size(members["axis_name"])), *x.shape[1:]), x.dtype)
    return lax.all_gather(x, axis=0, tiled=True, **members)


def _reduce_scatter(x, op, group):
    """Sums go by reduce-scatter; what XLA cannot reduce so is reduced whole, then cut."""
    axes = axes_of(group)
    if op in ("sum", "avg") and x.dtype != bool:
        total = lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)
        return total / np.asarray(lax.axis_size(axes), x.dtype) if op == "avg" else total
    return shard(_reduction(op)(x, axes), 0, 1, group)


def shard(x, dim, outer, group):
    """This device's block of dim `dim`, read as [outer, size, rest]."""
    size, place = _place(group)
    shape = x.shape
    blocks = x.reshape(*shape[:dim], outer, size, shape[dim] // (outer * size), *shape[dim + 1 :])
    block = lax.dynamic_index_in_dim(blocks, place, dim + 1, keepdims=False)
    return block.reshape(*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


@register("_c10d_functional.wait_tensor.default")
def _wait(ctx, x):
    return x


@register("_c10d_functional.all_reduce.default")
def _all_reduce_one(ctx, x, reduce_op, group_name):
    return _all_reduce(x, reduce_op, group_name)


@register("_c10d_functional.all_reduce_coalesced.default")
def _all_reduce_list(ctx, inputs, reduce_op, group_name):
    return tuple(_all_reduce(x, reduce_op, group_name) for x in inputs)


@register("_c10d_functional.all_gather_into_tensor.default")
def _all_gather_one(ctx, x, group_size, group_name):
    return _all_gather(x, group_name)


@register("_c10d_functional.all_gather_into_tensor_coalesced.default")
def _all_gather_list(ctx, inputs, group_size, group_name):
    return tuple(_all_gather(x, group_name) for x in inputs)


@register("_c10d_functional.reduce_scatter_tensor.default")
def _reduce_scatter_one(ctx, x, reduce_op, group_size, group_name):
    return _reduce_scatter(x, reduce_op, group_name)


@register("_c10d_functional.reduce_scatter_tensor_coalesced.default")
def _reduce_scatter_list(ctx, inputs, reduce_op, group_size, group_name):
    return tuple(_reduce_scatter(x, reduce_op, group_name) for x in inputs)


@register("_c10d_functional.all_to_all_single.default")
def _all_to_all(ctx, x, output_split_sizes, input_split_sizes, group_name):
    if len({*output_split_sizes, *input_split_sizes}) > 1:
        raise ValueError(
            f"all_to_all_single with unequal splits {input_split_sizes} -> {output_split_sizes}: pad them to equal sizes"
        )
    return lax.all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **_members(group_name))


@register("_c10d_functional.broadcast.default")
def _broadcast(ctx, x, src, group_name):
    axes = axes_of(group_name)
    return _REDUCE["sum"](jnp.where(lax.axis_index(axes) == src, x, jnp.zeros_like(x)), axes)


@register("graphacc.axis_index.default")
def _axis_index(ctx, size, axis):
    return _place(axis)[1].astype(np.int64)


@register("graphacc.shard.default")
def _shard(ctx, x, dim, outer, size, axis):
    return shard(x, dim % x.ndim, outer, axis)


@register("graphacc.permute_ranks.default")
def _permute_ranks(ctx, x, targets, axis):
    return lax.ppermute(x, axes_of(axis), list(enumerate(targets)))


@register("graphacc.after.default")
def _after(ctx, x, dependency, strict=False):
    """An optimization barrier of both; on CPU an integer zero xor-ed into the bits of `x`; both, if `strict`.

    On CUDA and TPU the barrier keeps what follows apart from what else reads `x`: the xor alone would be fused with, say, an Adam update of
    the parameter, and what that reads would be waited for. But the barrier alone does not always order: XLA drops operands of which nothing
    reads the result, and kept them for 21 of 37 gathers of a GPT-2 of 4 x 512. That lets its combiner join gathers that are
    not joined yet (40 instead of 88 in GPT-2 12 x 768), so that only gathers in buckets are strict. On CPU XLA drops
    barriers before its last common-subexpression elimination, and then merges, say, a gather for the backward with the one for the forward.
    """
    if dependency.size == 0:
        return x
    elsewhere = _behind_barrier if strict else lambda x, dependency: lax.optimization_barrier((x, dependency))[0]
    forms = {"cpu": with_hidden_zero, "default": elsewhere}
    if dependency.ndim == 2 and dependency.dtype.itemsize == 2 and padding_of_rows(dependency.shape[1]):
        forms["cuda"] = lambda x, dependency: elsewhere(x, padded_rows(dependency))  # what the products read: as it is, it would be in memory for this alone
    return lax.platform_dependent(x, dependency, **forms)


@register("graphacc.wait_for.default")
def _wait_for(ctx, x, dependency):
    """On CUDA and TPU a barrier of both, and a hidden zero in one element of `x`, without which XLA would drop `dependency`; on CPU `x`."""
    if x.size == 0 or dependency.size == 0:
        return x
    return lax.platform_dependent(x, dependency, cpu=lambda x, dependency: x, default=_with_one_element_behind)


@register("graphacc.barrier.default")
def _barrier(ctx, tensors):
    """On CUDA and TPU an optimization barrier, all of whose results are read: XLA neither drops one nor computes it again behind the barrier."""
    return lax.platform_dependent(*tensors, cpu=lambda *tensors: tensors, default=lambda *tensors: lax.optimization_barrier(tensors))


def _with_one_element_behind(x, dependency):
    x, dependency = lax.optimization_barrier((x, dependency))
    start, size = (0,) * x.ndim, (1,) * x.ndim
    return lax.dynamic_update_slice(x, with_hidden_zero(lax.slice(x, start, size), dependency), start)


def _behind_barrier(x, dependency):
    return with_hidden_zero(*lax.optimization_barrier((x, dependency)))


@register("graphacc.mark_sharding.default")
def _mark_sharding(ctx, x, spec):
    """The partition has followed it already."""
    return x
