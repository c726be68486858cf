"""What XLA for GPUs makes of a program's order, products and attention, as far as it decides what is stored and how long.

- Products of one factor are joined where one of two is small. Of two products of a gradient the one that the backward reads comes first; the other one can be put off as
  far as the program lets it be.
- cuDNN's attention writes heads as the next product reads them. Other attention is a loop over blocks of keys, and the zeros that loops begin with are made for all of one
  shape at once.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.costs.sizes import size_bytes
from graphacc.graph import Phase, StepGraph
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind
from graphacc.ops.flash_form import BLOCK, Described, Form, choose
from graphacc.passes.memory.problem import Buffer

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_ATTENTION = torch.ops.graphacc.flash_attention.default
ATTENTIONS = frozenset({_ATTENTION, torch.ops.graphacc.flash_attention_backward.default})
_PRODUCTS = frozenset({_aten.mm.default, torch.ops.graphacc.wide_mm.default})
_BUCKETS = torch.ops.graphacc.bucket_rows.default
_GRADIENTS = _PRODUCTS | {torch.ops.graphacc.grouped_mm_weight_grad.default}
"""Products of which a parameter's gradient can be one."""
_ORDERED = of_kind(OpKind.ORDER)
_CARRIES = of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.ORDER) | {_aten.add.Tensor, _aten.cat.default, _aten.constant_pad_nd.default, operator.getitem, _WAIT}
"""On the way of a gradient to the update, as of one of a parameter that is used twice."""

_RESHAPES, _TRANSPOSES = of_kind(OpKind.RESHAPE, OpKind.SQUEEZE), of_kind(OpKind.PERMUTE)
_JOINED_BYTES = 64 * 2**20
"""XLA joins products of one factor if factors and result of one of them are at most as large: programs compiled for H100 joined up to 58.7 MB, and did not from 86 MB on."""


def as_sent(step: StepGraph, groups: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]], *, late: bool) -> Iterable[torch.fx.Node]:
    """The nodes in the order in which XLA for GPUs begins them: a weight is gathered as soon as what the gather waits for is there, behind what is computed meanwhile,
    and products that are joined (`groups`) are together; `late` as of `graphacc.costs.memory`."""
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    ready: dict[torch.fx.Node, int] = {}  # parameters, and what is made of these alone -> the place of the last of what they wait for
    begun: dict[int, list[torch.fx.Node]] = collections.defaultdict(list)  # place -> the gathers that begin there
    for node in step.graph.nodes:
        waits = node.all_input_nodes[1:] if node.target in _ORDERED else []
        made_of = node.all_input_nodes[:1] if waits else node.all_input_nodes
        if node.op == "output" or any(operand not in ready for operand in made_of) or (node.op == "call_function" and not made_of):
            continue
        last = max((*(ready[operand] for operand in made_of), *(place[wait] for wait in waits)), default=-1)
        if node.target is _GATHER and last >= 0:
            begun[last].append(node)
        elif "move" not in node.meta and node.target is not _WAIT:
            ready[node] = last
    put_off, behind = {} if late else _put_off(step), collections.defaultdict(list)
    for product, other in put_off.items():
        behind[other].append(product)
    found: dict[torch.fx.Node, None] = {}
    last = _for_update(step) if late else put_off
    for node in itertools.chain((node for node in step.graph.nodes if node not in last), (node for node in step.graph.nodes if node in last)):
        work = [node]
        while work:
            unmade = [operand for operand in work[-1].all_input_nodes if operand not in found]
            if unmade:
                work += unmade
            elif (one := work.pop()) not in found:
                found[one] = None
                work += reversed([*begun.get(place[one], []), *groups.get(one, ()), *behind[one]])
    return found


def _put_off(step: StepGraph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Products that the backward does not read -> the product behind them of the same gradient, which it reads, and which XLA for GPUs computes first."""
    products = [node for node in step.graph.nodes if node.target in _PRODUCTS and node.meta.get("phase") is Phase.BACKWARD]
    readers: dict[torch.fx.Node, list[torch.fx.Node]] = collections.defaultdict(list)
    for product in products:
        for factor in product.all_input_nodes[:2]:
            readers[_described_factor(factor)[0]].append(product)
    waiting = {product for product in products if not _is_read_by_backward(product)}
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for source, them in readers.items():
        if source.meta.get("phase") is Phase.BACKWARD:
            found |= {product: other for product in them if product in waiting for other in them if other not in waiting and product < other}
    return found


def _for_update(step: StepGraph) -> set[torch.fx.Node]:
    """Products that the backward does not read, what is made for them alone, such as gathered factors, what carries them, and the update.

    Where rows go to experts of other ranks and back, XLA computes products meanwhile, and what carries them last: there a product that is larger than what it is made of
    in the backward stays in its place, and its way to the update is put off.
    """
    products = {node for node in step.graph.nodes if node.target in _GRADIENTS and node.meta.get("phase") is Phase.BACKWARD and not _is_read_by_backward(node)}
    found = set(products)
    if any(node.target is _BUCKETS for node in step.graph.nodes):
        found = {product for product in products if size_bytes(product) <= _largest_of_backward(product)}
    for node in reversed([*step.graph.nodes]):
        if node.users and node.meta.get("phase") is Phase.BACKWARD and found.issuperset(node.users):
            found.add(node)
    in_place = products - found
    for node in step.graph.nodes:
        is_way = (node.target in _CARRIES and node.target not in _ORDERED) or "move" in node.meta
        carries = is_way and any(operand in found or operand in in_place for operand in node.all_input_nodes)
        if carries or node.op == "output" or node.meta.get("phase") is Phase.UPDATE:
            found.add(node)
    return found


def _largest_of_backward(product: torch.fx.Node) -> int:
    """Bytes of the largest factor that the backward has made."""
    return max((size_bytes(factor) for factor in product.all_input_nodes[:2] if factor.meta.get("phase") is Phase.BACKWARD), default=0)


def _is_read_by_backward(gradient: torch.fx.Node) -> bool:
    """Whether a call of the backward computes with it, but for what carries it to the update."""
    left, seen = [gradient], {gradient}
    while left:
        for user in left.pop().users:
            if user in seen or user.op == "output" or user.meta["phase"] is Phase.UPDATE or (user.target in _ORDERED and user.args[0] not in seen):
                continue
            if user.target not in _CARRIES and "move" not in user.meta:
                return True
            seen.add(user)
            left.append(user)
    return False


def joined_products(step: StepGraph) -> dict[torch.fx.Node, tuple[torch.fx.Node, ...]]:
    """Products -> those that XLA for GPUs computes as one with them: they have a factor in common, none is made of another one, and one of any two is small (its pass DotMerger)."""
    classes: dict[tuple, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in step.graph.nodes:
        if node.target in _PRODUCTS:
            for side, factor in enumerate(node.all_input_nodes[:2]):
                classes[(side, node.target, *_described_factor(factor))].append(node)
    classes = {key: products for key, products in classes.items() if len(products) > 1}
    bits = {product: 1 << i for i, product in enumerate(dict.fromkeys(itertools.chain(*classes.values())))}
    made_of: dict[torch.fx.Node, int] = {}  # node -> the products that it is made of, as a mask
    for node in step.graph.nodes:
        made_of[node] = functools.reduce(operator.or_, (made_of[operand] | bits.get(operand, 0) for operand in node.all_input_nodes), 0)
    groups: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}
    for (side, *_), products in classes.items():
        left = [product for product in products if product not in groups]
        while left:
            first = left.pop(0)
            group, size, mask, behind = [first], _product_bytes(first), bits[first], made_of[first]
            for product in list(left):
                small = min(size, _product_bytes(product)) <= _JOINED_BYTES
                if small and not made_of[product] & mask and not behind & bits[product]:
                    size += _product_bytes(product) - size_bytes(product.all_input_nodes[side])
                    mask, behind = mask | bits[product], behind | made_of[product]
                    group.append(product)
                    left.remove(product)
            if len(group) > 1:
                groups |= dict.fromkeys(group, tuple(group))
    return groups


def _described_factor(node: torch.fx.Node) -> tuple:
    """What is equal for factors that are the same matrix."""
    shape, transposed = tuple(node.meta["val"].shape), False
    while node.op == "call_function" and (node.target in _RESHAPES or (node.target in _TRANSPOSES and node.meta["val"].dim() == 2)):
        transposed ^= node.target in _TRANSPOSES
        node = node.all_input_nodes[0]
    return node, shape, transposed


def _product_bytes(product: torch.fx.Node) -> int:
    """Of factors and result."""
    return size_bytes(product) + sum(map(size_bytes, product.all_input_nodes[:2]))


@dataclasses.dataclass
class BlockwiseAttentions:
    """What attentions in blocks of keys store on GPUs besides their results: loops, which begin with zeros that XLA makes for all loops at once where the first of them begins."""

    keys: dict[torch.fx.Node, int] = dataclasses.field(default_factory=dict)  # attention -> buffer of its keys cut in blocks, for the backward, which reads them uncut, too
    zeros: dict[tuple, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)  # shape -> operator that makes the zeros of this shape, and their buffers

    def add(self, node: torch.fx.Node, results: range, buffers: list[Buffer], *, place: int) -> frozenset[int]:
        """Add the buffers of a call that is the operator at `place`; returns those that it reads."""
        q, k, v = _attended(node)
        if node.target is _ATTENTION:
            self.keys[node] = len(buffers)
            buffers.append(Buffer(name=node.name, size=k.numel() * k.dtype.itemsize))
            self._begin((*q.shape[:3], v.shape[-1]), len(buffers), place)
            buffers.append(Buffer(name=node.name, size=4 * math.prod((*q.shape[:3], v.shape[-1]))))
            return frozenset()
        self._begin((*q.shape,), results[0], place)
        for number, value in zip(results[1:3], (k, v)):
            self._begin((BLOCK, *value.shape), number, place)
        return frozenset(self.keys[maker] for out in node.all_input_nodes for maker in out.all_input_nodes[:1] if out.target is operator.getitem and maker in self.keys)

    def _begin(self, shape: tuple, number: int, place: int) -> None:
        self.zeros.setdefault(shape, (place, []))[1].append(number)


def is_in_blocks(node: torch.fx.Node) -> bool:
    """Whether an attention on a GPU is a loop over several blocks of keys."""
    return _attention_form(node) is Form.BLOCKWISE and _attended(node)[1].shape[2] > BLOCK


def scores_bytes(node: torch.fx.Node) -> int:
    """Of a block of keys, and of what is made of them."""
    return 2 * 4 * BLOCK * math.prod(_attended(node)[0].shape[:3])


def _attended(node: torch.fx.Node) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of an attention, or of its backward."""
    args: Any = node.args
    q, k, v = args[:3] if node.target is _ATTENTION else args[1:4]
    return q.meta["val"], k.meta["val"], v.meta["val"]


def _attention_form(node: torch.fx.Node) -> Form:
    """Of a call of `graphacc::flash_attention` or its backward on a GPU."""
    args: Any = node.args
    *_, bias, q_segments, left, right, dropout = (*args[:5], args[8], args[9], args[12]) if node.target is _ATTENTION else (*args[1:6], args[11], args[12], args[15])
    call = Described.of(*_attended(node), bias=bias, q_segments=q_segments, left=left, right=right, dropout=dropout)
    return choose("cuda", call).form


def is_given_so(node: torch.fx.Node) -> bool:
    """Whether a copy of transposed heads is how cuDNN's attention writes its result: as [B, T, H, D]."""
    if node.target is not _aten.clone.default or node.all_input_nodes[0].target not in _TRANSPOSES:
        return False
    transposed = node.all_input_nodes[0]
    out = transposed.all_input_nodes[0]
    if out.target is not operator.getitem or (attention := out.all_input_nodes[0]).target is not _ATTENTION or _attention_form(attention) is not Form.CUDNN:
        return False
    b, h, t, d = out.meta["val"].shape
    return tuple(transposed.meta["val"].shape) == (b, t, h, d)
