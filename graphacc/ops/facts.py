"""Facts about operators: one record for each operator that passes recognise, so that they agree on what a view or a cast is.

A record states what is true of the operator wherever it stands. What a pass makes of it (how far it looks through, what it leaves alone)
is said by that pass, in terms of kinds:

    _CHAIN = of_kind(OpKind.SAME, OpKind.CAST, OpKind.RESHAPE)

Other facts have their own registries: element by element and views of memory are torch's (`torch.Tag.pointwise`, the schema's aliases), FLOPs
are torch's and `costs/work.py`'s, bytes follow from operands and results, and how dims belong together is the partition rule.
"""

import dataclasses
import enum
import functools
import operator
import typing
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from graphacc.ops import mesh, random  # noqa: F401  (the table names their operators)


class OpKind(enum.Enum):
    """What an operator does with its first operand, or makes without one."""

    SAME = enum.auto()  # gives the same elements in the same shape, be it in other memory
    CAST = enum.auto()  # the same elements in another dtype
    RESHAPE = enum.auto()  # the same elements in row-major order, in the shape that is its second argument
    SQUEEZE = enum.auto()  # adds or drops dims of size 1
    PERMUTE = enum.auto()  # the same elements, dims in another order
    EXPAND = enum.auto()  # the elements repeated along dims of size 1
    PART = enum.auto()  # a block of the elements
    LOOKUP = enum.auto()  # elements or rows of its first operand, chosen by indices
    FILL = enum.auto()  # every element is one number
    COUNT = enum.auto()  # numbers at equal distances
    RANDOM = enum.auto()  # by key, stream and the element's place
    PRODUCT = enum.auto()  # of matrices
    ORDER = enum.auto()  # the first operand, not before the second one exists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is true of one operator."""

    kind: OpKind | None = None
    value: float | None = None  # FILL: the number
    value_at: int | None = None  # FILL: the position of the argument that is the number
    factors: tuple[int, int] | None = None  # PRODUCT: positions of the two matrices
    linear: tuple[str, ...] = ()  # arguments in each of which it is linear by itself
    joint: tuple[str, ...] = ()  # arguments in which it is linear taken together


NOTHING = Facts()
_TABLE = {
    "alias.default detach.default clone.default lift_fresh.default lift_fresh_copy.default": Facts(kind=OpKind.SAME, linear=("self",)),
    "_to_copy.default": Facts(kind=OpKind.CAST, linear=("self",)),
    "prims.convert_element_type.default": Facts(kind=OpKind.CAST),
    "view.default _unsafe_view.default reshape.default": Facts(kind=OpKind.RESHAPE, linear=("self",)),
    "squeeze.default squeeze.dim squeeze.dims unsqueeze.default": Facts(kind=OpKind.SQUEEZE, linear=("self",)),
    "permute.default t.default transpose.int": Facts(kind=OpKind.PERMUTE, linear=("self",)),
    "expand.default prims.broadcast_in_dim.default": Facts(kind=OpKind.EXPAND),
    "slice.Tensor select.int": Facts(kind=OpKind.PART),
    "index.Tensor _unsafe_index.Tensor index_select.default gather.default embedding.default": Facts(kind=OpKind.LOOKUP),
    "zeros.default zeros_like.default new_zeros.default": Facts(kind=OpKind.FILL, value=0.0),
    "ones.default ones_like.default new_ones.default": Facts(kind=OpKind.FILL, value=1.0),
    "full.default full_like.default": Facts(kind=OpKind.FILL, value_at=1),
    "new_full.default": Facts(kind=OpKind.FILL, value_at=2),
    "scalar_tensor.default": Facts(kind=OpKind.FILL, value_at=0),
    "empty.memory_format empty_like.default new_empty.default": Facts(kind=OpKind.FILL),  # any number will do
    "arange.default arange.start arange.start_step": Facts(kind=OpKind.COUNT),
    "graphacc.random_uniform.default graphacc.random_bits.default": Facts(kind=OpKind.RANDOM),
    "mm.default bmm.default graphacc.wide_mm.default": Facts(kind=OpKind.PRODUCT, factors=(0, 1)),
    "addmm.default": Facts(kind=OpKind.PRODUCT, factors=(1, 2)),
    "graphacc.after.default": Facts(kind=OpKind.ORDER),
    "graphacc.wait_for.default": Facts(kind=OpKind.ORDER),
    "mul.Tensor": Facts(linear=("self", "other")),
    "mul.Scalar div.Tensor div.Scalar neg.default sum.default sum.dim_IntList": Facts(linear=("self",)),
    "graphacc.sort_rows.default graphacc.unsort_rows.default": Facts(linear=("rows",)),
    "prims.div.default": Facts(linear=("a",)),
    "add.Tensor sub.Tensor where.self": Facts(joint=("self", "other")),
    "lerp.Scalar": Facts(joint=("self", "end")),
}


def _overload(name: str) -> torch._ops.OpOverload:
    parts = name.split(".")
    return functools.reduce(getattr, parts if len(parts) == 3 else ["aten", *parts], torch.ops)


FACTS: dict[Any, Facts] = {}
for _names, _facts in _TABLE.items():
    for _name in _names.split():
        assert _overload(_name) not in FACTS, f"{_name} has two records"
        FACTS[_overload(_name)] = _facts


def facts(target: Any) -> Facts:
    """The record of an operator; one that says nothing for others."""
    return FACTS.get(target, NOTHING)


@functools.cache
def draws(target: Any) -> bool:
    """Whether an operator draws from a generator of torch's."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@functools.cache
def is_pointwise(target: Any) -> bool:
    """Whether torch tags an operator as working element by element."""
    return torch.Tag.pointwise in target.tags


@functools.cache
def of_kind(*kinds: OpKind) -> frozenset[Any]:
    """The operators of these kinds."""
    return frozenset(target for target, record in FACTS.items() if record.kind in kinds)


LAYOUT_KINDS = (OpKind.SAME, OpKind.RESHAPE, OpKind.SQUEEZE, OpKind.PERMUTE)
"""Every element of the operand is one element of the result, unchanged."""


@functools.cache
def takes(target: torch._ops.OpOverload, argument: str) -> bool:
    """Whether an operator has an argument of this name."""
    return any(item.name == argument for item in target._schema.arguments)


def fill_value(target: Any, args: tuple) -> Any:
    """The number that every element of a FILL is; None for other operators, and where any number will do."""
    record = facts(target)
    return args[record.value_at] if record.value_at is not None and len(args) > record.value_at else record.value


def is_packed_factor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the first factor of a product of matrices is a transposed view no larger than the second, as in a weight's gradient xᵀ @ dy.

    Programs of the CPU copy it row by row, see the rule of ``aten.mm``.
    """
    return a.ndim == 2 and a.stride() == (1, a.shape[0]) and min(a.shape) > 1 and a.numel() <= b.numel()


ALIGNED = 64
"""Elements that dims are padded to a multiple of, for GPUs."""
LEAST_PADDED = 1024
"""Dims that are padded, at least: a copy of a factor, where one is made, costs about 300 / its other length of the product."""


def padding_of_rows(size: int) -> int:
    """How far rows of a factor or a result of a product in half precision are padded on GPUs, see the rule of ``aten.mm``."""
    return -size % ALIGNED if size % 8 and size >= LEAST_PADDED else 0


def before_barrier(node: torch.fx.Node) -> torch.fx.Node:
    """The value that a result of `graphacc::barrier` is; other values are themselves."""
    while node.op == "call_function" and node.target is operator.getitem:
        barrier, index = typing.cast(tuple[torch.fx.Node, int], node.args)
        if barrier.target is not torch.ops.graphacc.barrier.default:
            break
        node = typing.cast(Sequence[torch.fx.Node], barrier.args[0])[index]
    return node


def product_readers(node: torch.fx.Node) -> int:
    """How many products of matrices read a value, or its elements in another layout."""
    users = [user for user in node.users if user.op == "call_function"]
    return sum(1 if facts(user.target).kind is OpKind.PRODUCT else product_readers(user) if facts(user.target).kind in LAYOUT_KINDS else 0 for user in users)


def is_read_transposed(node: torch.fx.Node | None) -> bool:
    """Whether a product's result is only read with its last two dims swapped, as the gradient of a weight [G, N, K] is.

    The product then computes it so: grouped products on CPU and CUDA, see the lowering of ``graphacc.grouped_mm_weight_grad``.
    """
    if node is None or not node.users:
        return False
    ndim = node.meta["val"].ndim
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    for user in node.users:
        operands: Any = user.args
        if str(user.target) == "aten.permute.default":
            if [dim % ndim for dim in operands[1]] != swapped:
                return False
        elif str(user.target) != "aten.transpose.int" or sorted(dim % ndim for dim in operands[1:]) != [ndim - 2, ndim - 1]:
            return False
    return True
