"""What one call of a StepGraph has to do: floating-point operations and bytes of memory, from ``meta["val"]`` alone.

Operations are counted as in torch.utils.flop_counter, whose registry says what torch's own operators do: 2 m k n of a product,
and none of what is element by element, whose cost is its bytes. A fused attention does, and counts, only the scores that its mask leaves.

Bytes are those of every distinct operand, read once, and of the results. Views have no work; neither have collectives, whose time is
that of `collective_seconds`. `node_work` takes each call by itself; `kernels` joins those that a compiler fuses, as `predict_memory` does.

Legend: B batch, H query heads, T query length, S key length, D head size, E value head size.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.costs.fx_problem import is_view
from graphacc.costs.memory import computed_on_the_fly
from graphacc.graph import FILLED, StepGraph
from graphacc.ops.chunked import Body, body_of
from graphacc.ops.facts import OpKind, of_kind

_aten, _ops = torch.ops.aten, torch.ops.graphacc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a call does."""

    flops: float = 0.0
    dims: tuple[int, int, int] | None = None  # (m, k, n) of its product; None: it has none
    dtype: str = "fp32"  # of the product: "bf16" (fp16 too), or "fp32"
    read_bytes: int = 0
    written_bytes: int = 0
    attends: bool = False  # a fused attention
    padding: float = 1.0  # so many times as many operations take as long: those of tiles that are full
    shares_kernel: bool = False  # with other parts of a message, see `kernels`

    @property
    def size_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


NO_WORK = Work()

_LOOKS_UP = of_kind(OpKind.LOOKUP) | {_ops.shard.default}
"""Operators that read of their first operand what they return, not all of it."""

_COPIES = of_kind(OpKind.CAST, OpKind.SAME)

_WAITS = of_kind(OpKind.ORDER)
"""Barriers: they read nothing of what they wait for."""

_COLLECTIVES = frozenset({"_c10d_functional"})

_FUSED = 8
"""A fused attention keeps its scores on the chip: it is as fast as a product whose smallest dim is so many times the head size. With the
table of `Chip.product_efficiency` that is 55 % of H100's peak for D=128, where 58 % were fitted to published steps of NVIDIA's."""

_TILE = 64
"""Queries that fill a fused attention's tiles: fewer take as long (the blocks of a ring). Fewer keys make it a product with a dim as small."""


def node_work(node: torch.fx.Node) -> Work:
    """The work of one call as a kernel of its own; none of placeholders, views and collectives."""
    if node.op != "call_function" or _communicates(node) or _shares_memory(node):
        return NO_WORK
    return _work(node, {operand: _through_views(operand) for operand in node.all_input_nodes})


def kernels(step: StepGraph, *, joins_parts_of: Callable[[torch.fx.Node], bool] | None = None) -> dict[torch.fx.Node, Work]:
    """The calls whose results are stored -> their work, with that of the calls that are fused into them.

    What is computed on the fly (see `predict_memory`) is neither written nor read; where it is used, its operands are read.

    Args:
        joins_parts_of: of these collectives; copies of the parts of their messages, into them and out of them, share a kernel, as XLA's horizontal fusion makes it for GPUs: the step of a GPT-2 of 124 M
            parameters has 148 casts of weights before gathers, and 148 copies behind them, and no more kernels under `fsdp=8` than under `dp=8` (804 and 827, for H100).
    """
    found: dict[torch.fx.Node, Work] = {}
    reads: dict[torch.fx.Node, dict[torch.fx.Node, int]] = {}  # value -> what is read where it is used -> bytes of it
    for node in [*step.placeholders, *(node for node in step.graph.nodes if node.op == "call_function")]:
        whole = {node: _size_bytes(node)}
        if node.op != "call_function" or _communicates(node):
            reads[node] = whole
        elif _shares_memory(node):
            (base, *_) = node.all_input_nodes
            reads[node] = whole if node.target is operator.getitem else {source: min(size, whole[node]) for source, size in reads[base].items()}
        elif computed_on_the_fly(node):
            reads[node] = _union(node, reads)
        else:
            reads[node] = whole
            work = _work(node, {operand: reads[operand] for operand in node.all_input_nodes})
            found[node] = dataclasses.replace(work, shares_kernel=True) if joins_parts_of is not None and _is_part_of_message(node, joins_parts_of) else work
    return found


def flops_by_dtype(step: StepGraph) -> dict[str, float]:
    """Dtype of products ("bf16", "fp32") -> operations of all that have it."""
    found: dict[str, float] = {}
    for node in step.graph.nodes:
        body = body_of(node)
        if body is not None:
            for dtype, flops in flops_by_dtype(StepGraph(body.graph, (), ())).items():
                found[dtype] = found.get(dtype, 0.0) + body.chunks * flops
            continue
        flops = _product(node)[0] if node.op == "call_function" else 0.0
        if flops:
            found[_dtype(node)] = found.get(_dtype(node), 0.0) + flops
    return found


def _is_part_of_message(node: torch.fx.Node, chosen: Callable[[torch.fx.Node], bool]) -> bool:
    """Whether a copy takes something out of a message of a chosen collective, or what it makes is only put into one beside others."""

    def moves(node: torch.fx.Node) -> bool:
        return chosen(node.all_input_nodes[0] if node.target is torch.ops._c10d_functional.wait_tensor.default else node)

    if node.target not in _COPIES:
        return False
    if any(map(moves, _through_views(node.all_input_nodes[0]))):
        return True
    joined = _readers(node)
    return all(reader.target is _aten.cat.default for reader in joined) and any(moves(last) for reader in joined for last in _readers(reader))


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What reads a value, through views."""
    found = []
    for user in node.users:
        found += _readers(user) if user.op == "call_function" and _shares_memory(user) else [user]
    return found


def _union(node: torch.fx.Node, reads: Mapping[torch.fx.Node, Mapping[torch.fx.Node, int]]) -> dict[torch.fx.Node, int]:
    """What a call reads, and how much of it at most."""
    union: dict[torch.fx.Node, int] = {}
    for operand in node.all_input_nodes:
        limit = _size_bytes(node) if node.target in _LOOKS_UP and operand is node.args[0] else math.inf
        for source, size in reads[operand].items():
            union[source] = max(union.get(source, 0), int(min(size, limit)))
    return union


def _work(node: torch.fx.Node, reads: Mapping[torch.fx.Node, Mapping[torch.fx.Node, int]]) -> Work:
    if (body := body_of(node)) is not None:
        return _loop(body)
    flops, dims = _product(node)
    return Work(
        flops=flops * node.meta.get(FILLED, 1.0),
        dims=dims,
        dtype=_dtype(node) if flops else "fp32",
        read_bytes=sum(_union(node, reads).values()),
        written_bytes=_size_bytes(node),
        attends=node.target in _ATTENDS,
        padding=_padding(node),
    )


def _padding(node: torch.fx.Node) -> float:
    place = _ATTENDS.get(node.target)
    if place is None:
        return 1.0
    q = node.args[place]
    assert isinstance(q, torch.fx.Node)
    return max(1.0, _TILE / max(q.meta["val"].shape[2], 1))


def _loop(body: Body) -> Work:
    """All chunks' kernels; the dims and the dtype are those of the largest product."""
    found = list(kernels(StepGraph(body.graph, (), ())).values())
    largest = max(found, key=lambda work: work.flops, default=NO_WORK)
    return Work(
        flops=body.chunks * sum(work.flops for work in found),
        dims=largest.dims,
        dtype=largest.dtype,
        read_bytes=body.chunks * sum(work.read_bytes for work in found),
        written_bytes=body.chunks * sum(work.written_bytes for work in found),
    )


def _through_views(node: torch.fx.Node) -> dict[torch.fx.Node, int]:
    """The value that a view looks at, and how much of it is read: what is expanded is read once."""
    size = _size_bytes(node)
    while node.op == "call_function" and _shares_memory(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
        size = min(size, _size_bytes(node))
    return {node: size}


def _communicates(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in _COLLECTIVES or node.target is _ops.permute_ranks.default


def _shares_memory(node: torch.fx.Node) -> bool:
    return node.target in _WAITS or node.target is _ops.barrier.default or is_view(node)


def _product(node: torch.fx.Node) -> tuple[float, tuple[int, int, int] | None]:
    """Operations, and (m, k, n)."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.target not in _OWN and packet not in flop_registry:
        return 0.0, None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    if node.target in _OWN:
        return _OWN[node.target](args)
    flops = float(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return flops, _DIMS[packet](args, node.meta["val"]) if packet in _DIMS else None


def _attention(args) -> tuple[float, tuple[int, int, int]]:
    """graphacc::sdpa computes all scores, also those that it masks: q kᵀ and p v."""
    q, k, v = args[:3]
    return 2.0 * _rows(q) * k.shape[-2] * (q.shape[-1] + v.shape[-1]), (q.shape[-2], q.shape[-1], k.shape[-2])


def _attention_backward(args) -> tuple[float, tuple[int, int, int]]:
    """q kᵀ again, and the gradients of p and of v (E operations a score), of q and of k (D)."""
    q, k, v = args[1:4]
    return 2.0 * _rows(q) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1]), (q.shape[-2], q.shape[-1], k.shape[-2])


def _flash(args) -> tuple[float, tuple[int, int, int]]:
    """As `_attention`, of the scores within the band alone; (left, right) follow q, k, v, bias, two segments, key and start."""
    return _within_band(_attention(args), args, *args[8:10])


def _flash_backward(args) -> tuple[float, tuple[int, int, int]]:
    """The arguments are grad, the eight of `_flash`, out, lse, left, right."""
    return _within_band(_attention_backward(args), args[1:], *args[11:13])


def _within_band(whole: tuple[float, tuple[int, int, int]], args, left: int, right: int) -> tuple[float, tuple[int, int, int]]:
    flops, (queries, size, keys) = whole
    share = _scores(queries, keys, left, right) / max(queries * keys, 1)
    keys = keys if keys < _TILE else max(keys, _FUSED * size)
    return flops * share, (max(queries, _FUSED * size), _FUSED * size, keys)


def _scores(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs t - left <= s <= t + right, where a negative number is no bound."""
    places = np.arange(queries)
    first = np.maximum(places - left, 0) if left >= 0 else np.zeros_like(places)
    last = np.minimum(places + right, keys - 1) if right >= 0 else np.full_like(places, keys - 1)
    return int(np.maximum(last - first + 1, 0).sum())


def _rows(q: torch.Tensor) -> int:
    """B * H * T."""
    return q.shape[:-1].numel()


def _grouped(args) -> tuple[float, tuple[int, int, int]]:
    """rows [M, K], weight [E, K, F]: each row meets one expert's matrix."""
    rows, weight = args[:2]
    per_expert = -(-rows.shape[0] // max(weight.shape[0], 1))
    return 2.0 * rows.numel() * weight.shape[-1], (per_expert, rows.shape[-1], weight.shape[-1])


def _grouped_weight_grad(args) -> tuple[float, tuple[int, int, int]]:
    """rows [M, K], grad [M, F], offsets [E]."""
    rows, grad, offsets = args[:3]
    per_expert = -(-rows.shape[0] // max(offsets.shape[0], 1))
    return 2.0 * rows.numel() * grad.shape[-1], (rows.shape[-1], per_expert, grad.shape[-1])


def _recurrent(args) -> tuple[float, tuple[int, int, int]]:
    """graphacc::recurrence: every step's state [B, H] times the weight [G, H]; (mode, gates [T, B, G], hidden) come first."""
    _, gates, hidden = args[:3]
    return 2.0 * gates.numel() * hidden.shape[1], (*hidden.shape, gates.shape[2])


def _recurrent_backward(args) -> tuple[float, tuple[int, int, int]]:
    """Every step's gradient [B, G] times the weight [G, H]; (mode, grad [T, B, H], grad_cell, hidden, cell, weight) come first."""
    grad, weight = args[1], args[5]
    return 2.0 * grad.shape[:2].numel() * weight.numel(), (grad.shape[1], *weight.shape)


def _wide(args) -> tuple[float, tuple[int, int, int]]:
    """[M, K] times [K, N]."""
    a, b = args
    return 2.0 * a.numel() * b.shape[1], _dims(a, b)


def _torch_grouped(args) -> tuple[float, tuple[int, int, int]]:
    """aten::_grouped_mm: rows [M, K] times [E, K, F], or [K, M] times [M, F] for a gradient of the weight."""
    a, b = args[:2]
    return 2.0 * a.numel() * b.shape[-1], (a.shape[-2], a.shape[-1], b.shape[-1])


_OWN: dict[object, Callable] = {
    _ops.sdpa.default: _attention,
    _ops.sdpa_backward.default: _attention_backward,
    _ops.flash_attention.default: _flash,
    _ops.flash_attention_backward.default: _flash_backward,
    _ops.wide_mm.default: _wide,
    _ops.grouped_mm.default: _grouped,
    _ops.grouped_mm_weight_grad.default: _grouped_weight_grad,
    _ops.recurrence.default: _recurrent,
    _ops.recurrence_backward.default: _recurrent_backward,
}
"""Operators that torch's registry does not count -> function of their arguments."""
_ATTENDS: dict[object, int] = {_ops.flash_attention.default: 0, _ops.flash_attention_backward.default: 1}
"""Fused attentions -> which argument has the queries."""
if hasattr(_aten, "_grouped_mm"):
    _OWN[_aten._grouped_mm.default] = _torch_grouped


def _convolution_dims(image, weight, out) -> tuple[int, int, int]:
    """As a product: all places of the output, what each reads, channels of the output."""
    groups = image.shape[1] // weight.shape[1] if weight.shape[1] else 1
    return math.prod(out.shape) // max(out.shape[1], 1), weight.shape[1:].numel(), max(weight.shape[0] // max(groups, 1), 1)


def _convolution_dims_of(args, val) -> tuple[int, int, int]:
    image, weight, transposed = args[0], args[1], args[6]
    return _convolution_dims(val, weight, image) if transposed else _convolution_dims(image, weight, val)


def _convolution_backward_dims(args, val) -> tuple[int, int, int]:
    grad, image, weight, transposed = args[0], args[1], args[2], args[7]
    return _convolution_dims(grad, weight, image) if transposed else _convolution_dims(image, weight, grad)


def _dims(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    return a.shape[-2], a.shape[-1], b.shape[-1]


_DIMS: dict[object, Callable] = {
    _aten.mm: lambda args, val: _dims(*args[:2]),
    _aten.bmm: lambda args, val: _dims(*args[:2]),
    _aten.addmm: lambda args, val: _dims(*args[1:3]),
    _aten.baddbmm: lambda args, val: _dims(*args[1:3]),
    _aten.convolution: _convolution_dims_of,
    _aten.convolution_backward: _convolution_backward_dims,
}
"""Operators of torch's registry -> (m, k, n) out of their arguments and result."""


def _dtype(node: torch.fx.Node) -> str:
    dtypes = [value.dtype for operand in node.all_input_nodes for value in _tensors(operand) if value.dtype.is_floating_point]
    return "bf16" if dtypes and dtypes[0] in (torch.bfloat16, torch.float16) else "fp32"


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    return [x for x in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(x, torch.Tensor)]


def _size_bytes(node: torch.fx.Node) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in _tensors(node))
