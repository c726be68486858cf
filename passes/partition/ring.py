"""Ring attention along `cp`: every rank keeps its queries, and keys and values travel around (Liu et al., arXiv 2310.01889).

In step j a rank holds the keys of rank r - j. What the steps give is joined by log-sum-exp. Under a causal mask half of all
pairs are empty; to give every rank the same work in every step, the sequence is dealt out zigzag for the time of the
attention: of 2n chunks, rank r has chunk r and chunk 2n - 1 - r. Then a rank attends to two half blocks in every step: its
high queries to the low keys always; and either its low queries to the low keys, if these come from an earlier rank, or
its high queries to the high keys. (Brandon et al., "Striped Attention", 2023, and Dubey et al., "Llama 3", 2024, deal out
alike.) No mask is computed, and nothing of size T x S exists.

Legend: B batch, H query heads, G key/value heads, T and S local lengths, D head size, r rank, n ranks, j step.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphacc.passes.partition.placement import REPLICATED, Split
from graphacc.passes.partition.rules import Call, Plan

aten, ops = torch.ops.aten, torch.ops.graphacc
_NAMES = [argument.name for argument in ops.flash_attention.default._schema.arguments]
_LENGTH = {"q": 2, "k": 2, "v": 2, "grad": 2, "out": 2, "lse": 2, "q_segments": 1, "kv_segments": 1}
"""Argument -> its dim of queries or keys."""
_KEYS = ("k", "v", "kv_segments")
Node = Any


def ring_plan(call: Call) -> Plan | None:
    """The plan of a flash attention, forward or backward, around the ring; None if it cannot go: the reasons are below."""
    splits = {operand.name: operand.placement for operand in call.operands}
    places = [splits[name] for name in ("q", "k", "v") if isinstance(splits[name], Split) and splits[name].dim == 2]
    causal = call["right"] == 0
    if len(places) < 3 or call["left"] >= 0 or call["right"] > 0 or call["bias"] is not None:
        return None  # a window or a bias says something about positions that a block does not know
    if call["q_segments"] is not None and call["empty_rows"] != 0:
        return None  # a query without any key would need all values
    if causal and (any(place.outer > 1 for place in places) or call.shape("q")[2] != call.shape("k")[2]):
        return None
    if causal and call.shape("q")[2] % (2 * call.num_ranks):
        return None
    required = tuple(
        Split(_LENGTH[operand.name], places[1 if operand.name in _KEYS else 0].outer) if operand.name in _LENGTH else None
        for operand in call.operands
    )
    queries, keys = places[0], places[1]
    backward = "grad" in call.arguments
    results = (queries, keys, keys, REPLICATED) if backward else (queries, queries)
    return Plan(required, results, emit=_emit(call, _backward if backward else _forward))


def _emit(call: Call, run: Callable) -> Callable:
    names = [argument.name for argument in call.node.target._schema.arguments]

    def emit(build, args, kwargs):
        values = dict(zip(names, args)) | kwargs
        values |= {name: call[name] for name in names if name not in values}
        return run(_Ring(build, call, values))

    return emit


@dataclasses.dataclass
class _Ring:
    """The local values of one attention, and how to write operators on them."""

    build: Any
    call: Call
    values: dict[str, Any]

    @property
    def ranks(self) -> int:
        return self.call.num_ranks

    @property
    def causal(self) -> bool:
        return self.call["right"] == 0

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.build.call(target, *args, **kwargs)

    def permute(self, x: Node, targets: Sequence[int]) -> Node:
        """`x` of the rank that sends to this one; rank i sends to ``targets[i]``."""
        return self.build.permute_ranks(x, list(targets))

    def turn(self, x: Node | None) -> Node | None:
        """One step around the ring."""
        return None if x is None else self.permute(x, [(rank + 1) % self.ranks for rank in range(self.ranks)])

    def earlier(self, step: int) -> Node:
        """bool, 0-d: the keys of step j come from an earlier rank."""
        return self.op(aten.ge.Scalar, self.build.axis_index(), step)

    def choose(self, condition: Node, x: Node | None, y: Node | None) -> Node | None:
        return None if x is None else self.op(aten.where.self, condition, x, y)

    def halves(self, x: Node | None, dim: int) -> tuple[Node | None, Node | None]:
        if x is None:
            return None, None
        half = x.meta["val"].shape[dim] // 2
        return self.op(aten.slice.Tensor, x, dim, 0, half), self.op(aten.slice.Tensor, x, dim, half, 2 * half)

    def join(self, low: Node, high: Node, dim: int) -> Node:
        return self.op(aten.cat.default, [low, high], dim)

    def zeros(self, x: Node, dtype: torch.dtype | None = None) -> Node:
        value = x.meta["val"]
        return self.op(aten.full.default, list(value.shape), 0, dtype=dtype or value.dtype, device=value.device)

    # The zigzag: chunk c of 2n lies with rank c // 2 outside, and with rank min(c, 2n - 1 - c) inside

    def _owners(self, odd: int) -> list[int]:
        chunks = [2 * rank + odd for rank in range(self.ranks)]
        return [min(chunk, 2 * self.ranks - 1 - chunk) for chunk in chunks]

    def _even_rank(self) -> Node:
        parity = self.op(aten.remainder.Scalar, self.build.axis_index(), 2)
        return self.op(aten.eq.Scalar, parity, 0)

    def deal(self, x: Node | None, dim: int) -> Node | None:
        """From contiguous blocks to the zigzag. The even chunks go to different ranks each, and so do the odd ones."""
        if x is None:
            return None
        first, second = self.halves(x, dim)
        first, second = self.permute(first, self._owners(0)), self.permute(second, self._owners(1))
        even = self._even_rank()
        return self.join(self.choose(even, first, second), self.choose(even, second, first), dim)

    def collect(self, x: Node, dim: int) -> Node:
        """From the zigzag to contiguous blocks: the inverse of `deal`."""
        low, high = self.halves(x, dim)
        even = self._even_rank()
        first, second = self.choose(even, low, high), self.choose(even, high, low)
        back = [self._inverse(self._owners(odd)) for odd in (0, 1)]
        return self.join(self.permute(first, back[0]), self.permute(second, back[1]), dim)

    @staticmethod
    def _inverse(targets: list[int]) -> list[int]:
        return [targets.index(rank) for rank in range(len(targets))]

    # Calls of the kernel

    def attend(self, q: Node, k: Node, v: Node, segments: tuple, causal: bool, start: Node | None) -> tuple[Node, Node]:
        """Output in fp32 and log-sum-exp of queries over one block of keys."""
        given = self.values | dict(zip(_NAMES[:5], (q, k, v, None, segments[0]))) | {"kv_segments": segments[1], "start": start}
        given["right"] = 0 if causal else -1
        called = self.op(ops.flash_attention.default, *(given[name] for name in _NAMES))
        out = self.op(operator.getitem, called, 0)
        return self.op(aten._to_copy.default, out, dtype=torch.float32), self.op(operator.getitem, called, 1)

    def attend_backward(self, rows: tuple, k: Node, v: Node, kv_segments: Node | None, causal: bool, start: Node | None) -> list[Node]:
        """Gradients of queries, keys and values, in fp32, of one block; `rows` are grad, q, out, lse and the segments of the queries."""
        grad, q, out, lse, segments = rows
        given = self.values | {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse, "start": start}
        given |= {"q_segments": segments, "kv_segments": kv_segments, "right": 0 if causal else -1}
        names = [argument.name for argument in ops.flash_attention_backward.default._schema.arguments]
        called = self.op(ops.flash_attention_backward.default, *(given[name] for name in names))
        return [self.op(aten._to_copy.default, self.op(operator.getitem, called, i), dtype=torch.float32) for i in range(3)]

    def start(self, q_chunk: Node, k_chunk: Node, length: int) -> Node | None:
        """Where a block lies in the global scores, for dropout: chunks of `length` positions."""
        if not self.call["dropout"]:
            return None
        before = self.values["start"]
        numbers = [self.op(aten.view.default, self.op(aten.mul.Scalar, chunk, length), [1]) for chunk in (q_chunk, k_chunk)]
        place = self.op(aten.constant_pad_nd.default, self.op(aten.cat.default, numbers, 0), [2, 0], 0)
        return place if before is None else self.op(aten.add.Tensor, before, place)

    def chunk(self, source: Node, high: bool) -> Node:
        """The number of a rank's low or high chunk."""
        if not high:
            return source
        return self.op(aten.add.Scalar, self.op(aten.neg.default, source), 2 * self.ranks - 1)

    def source(self, step: int) -> Node:
        """The rank whose keys this one holds in step j."""
        return self.op(aten.remainder.Scalar, self.op(aten.sub.Scalar, self.build.axis_index(), step), self.ranks)

    def merge(self, so_far: tuple[Node, Node], new: tuple[Node, Node]) -> tuple[Node, Node]:
        """Join outputs over disjoint keys; -inf stands for no key."""
        (out, lse), (new_out, new_lse) = so_far, new
        top = self.op(aten.maximum.default, lse, new_lse)
        top = self.op(aten.where.self, self.op(aten.isinf.default, top), self.zeros(top), top)
        weights = [self.op(aten.exp.default, self.op(aten.sub.Tensor, x, top)) for x in (lse, new_lse)]
        total = self.op(aten.add.Tensor, *weights)
        safe = self.op(aten.where.self, self.op(aten.eq.Scalar, total, 0), self.op(aten.full.default, [], 1, dtype=torch.float32), total)
        scaled = [
            self.op(aten.mul.Tensor, x, self.op(aten.unsqueeze.default, self.op(aten.div.Tensor, weight, safe), -1))
            for x, weight in zip((out, new_out), weights)
        ]
        return self.op(aten.add.Tensor, *scaled), self.op(aten.add.Tensor, top, self.op(aten.log.default, total))

    def unless(self, condition: Node, part: tuple[Node, Node]) -> tuple[Node, Node]:
        """The part, or one over no key where the condition holds."""
        out, lse = part
        nothing = self.op(aten.full.default, [], float("-inf"), dtype=torch.float32)
        return self.op(aten.where.self, condition, self.zeros(out), out), self.op(aten.where.self, condition, nothing, lse)

    def finish(self, out: Node, lse: Node) -> list[Node]:
        dtype = self.values["q"].meta["val"].dtype
        return [self.op(aten._to_copy.default, out, dtype=dtype), lse]


def _forward(ring: _Ring) -> list[Node]:
    q, k, v, segments, keys = (ring.values[name] for name in ("q", "k", "v", "q_segments", "kv_segments"))
    if ring.causal:
        return _forward_causal(ring, q, k, v, segments, keys)
    length = {"q": q.meta["val"].shape[2], "k": k.meta["val"].shape[2]}
    total = None
    for step in range(ring.ranks):
        if step:
            k, v, keys = ring.turn(k), ring.turn(v), ring.turn(keys)
        start = _start_of_blocks(ring, step, length)
        part = ring.attend(q, k, v, (segments, keys), False, start)
        total = part if total is None else ring.merge(total, part)
    return ring.finish(*total)


def _start_of_blocks(ring: _Ring, step: int, length: dict[str, int]) -> Node | None:
    """Of contiguous blocks of queries and keys, which may differ in length."""
    if not ring.call["dropout"]:
        return None
    q_chunk = ring.op(aten.mul.Scalar, ring.build.axis_index(), length["q"])
    return ring.start(q_chunk, ring.op(aten.mul.Scalar, ring.source(step), length["k"]), 1)


def _forward_causal(ring: _Ring, q, k, v, segments, keys) -> list[Node]:
    q, k, v = (ring.deal(x, 2) for x in (q, k, v))
    segments, keys = ring.deal(segments, 1), ring.deal(keys, 1)
    (low_q, high_q), (low_s, high_s) = ring.halves(q, 2), ring.halves(segments, 1)
    half, rank = low_q.meta["val"].shape[2], ring.build.axis_index()
    low, high = _own_blocks(ring, q, k, v, segments, keys)
    for step in range(1, ring.ranks):
        k, v, keys = ring.turn(k), ring.turn(v), ring.turn(keys)
        (low_k, high_k), (low_v, high_v), (low_t, high_t) = ring.halves(k, 2), ring.halves(v, 2), ring.halves(keys, 1)
        source, earlier = ring.source(step), ring.earlier(step)
        place = ring.start(ring.chunk(rank, True), source, half)
        high = ring.merge(high, ring.attend(high_q, low_k, low_v, (high_s, low_t), False, place))
        block = [ring.choose(earlier, x, y) for x, y in ((low_q, high_q), (low_k, high_k), (low_v, high_v))]
        sides = ring.choose(earlier, low_s, high_s), ring.choose(earlier, low_t, high_t)
        place = _start_of_choice(ring, earlier, rank, source, half)
        part = ring.attend(*block, sides, False, place)
        later = ring.op(aten.logical_not.default, earlier)
        low, high = ring.merge(low, ring.unless(later, part)), ring.merge(high, ring.unless(earlier, part))
    out, lse = (ring.collect(ring.join(a, b, 2), 2) for a, b in zip(low, high))
    return ring.finish(out, lse)


def _own_blocks(ring: _Ring, q, k, v, segments, keys) -> tuple[tuple[Node, Node], tuple[Node, Node]]:
    """Step 0: a rank's low and high queries over its own keys. Without dropout that is one causal call: low comes before high."""
    if not ring.call["dropout"]:
        out, lse = ring.attend(q, k, v, (segments, keys), True, None)
        outs, lses = ring.halves(out, 2), ring.halves(lse, 2)
        return (outs[0], lses[0]), (outs[1], lses[1])
    (low_q, high_q), (low_k, high_k), (low_v, high_v) = ring.halves(q, 2), ring.halves(k, 2), ring.halves(v, 2)
    (low_s, high_s), (low_t, high_t) = ring.halves(segments, 1), ring.halves(keys, 1)
    rank, half = ring.build.axis_index(), low_q.meta["val"].shape[2]
    top = ring.chunk(rank, True)
    low = ring.attend(low_q, low_k, low_v, (low_s, low_t), True, ring.start(rank, rank, half))
    high = ring.attend(high_q, high_k, high_v, (high_s, high_t), True, ring.start(top, top, half))
    across = ring.attend(high_q, low_k, low_v, (high_s, low_t), False, ring.start(top, rank, half))
    return low, ring.merge(high, across)


def _start_of_choice(ring: _Ring, earlier, rank, source, half: int) -> Node | None:
    if not ring.call["dropout"]:
        return None
    q_chunk = ring.choose(earlier, rank, ring.chunk(rank, True))
    return ring.start(q_chunk, ring.choose(earlier, source, ring.chunk(source, True)), half)


def _backward(ring: _Ring) -> list[Node]:
    names = ("grad", "q", "out", "lse", "q_segments")
    rows = [ring.values[name] for name in names]
    k, v, keys = (ring.values[name] for name in ("k", "v", "kv_segments"))
    grads = _backward_causal(ring, rows, k, v, keys) if ring.causal else _backward_full(ring, rows, k, v, keys)
    dtypes = [ring.values[name].meta["val"].dtype for name in ("q", "k", "v")]
    found = [ring.op(aten._to_copy.default, grad, dtype=dtype) for grad, dtype in zip(grads, dtypes)]
    empty = ring.op(aten.full.default, [0], 0, dtype=dtypes[0], device=ring.values["q"].meta["val"].device)
    return [*found, empty]


def _backward_full(ring: _Ring, rows, k, v, keys) -> list[Node]:
    length = {"q": rows[1].meta["val"].shape[2], "k": k.meta["val"].shape[2]}
    total = grad_k = grad_v = None
    for step in range(ring.ranks):
        if step:
            k, v, keys, grad_k, grad_v = (ring.turn(x) for x in (k, v, keys, grad_k, grad_v))
        parts = ring.attend_backward(tuple(rows), k, v, keys, False, _start_of_blocks(ring, step, length))
        sums = [part if so_far is None else ring.op(aten.add.Tensor, so_far, part) for so_far, part in zip((total, grad_k, grad_v), parts)]
        total, grad_k, grad_v = sums
    return [total, ring.turn(grad_k), ring.turn(grad_v)]  # the last step brings them home


def _backward_causal(ring: _Ring, rows, k, v, keys) -> list[Node]:
    rows = [ring.deal(x, 1 if name == 4 else 2) for name, x in enumerate(rows)]
    k, v, keys = ring.deal(k, 2), ring.deal(v, 2), ring.deal(keys, 1)
    pairs = [ring.halves(x, 1 if name == 4 else 2) for name, x in enumerate(rows)]
    low, high = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    half, rank = low[1].meta["val"].shape[2], ring.build.axis_index()
    grads_q, grads_k, grads_v = _own_blocks_backward(ring, rows, low, high, k, v, keys)
    for step in range(1, ring.ranks):
        k, v, keys = ring.turn(k), ring.turn(v), ring.turn(keys)
        grads_k, grads_v = [ring.turn(x) for x in grads_k], [ring.turn(x) for x in grads_v]
        (low_k, high_k), (low_v, high_v), (low_t, high_t) = ring.halves(k, 2), ring.halves(v, 2), ring.halves(keys, 1)
        source, earlier = ring.source(step), ring.earlier(step)
        place = ring.start(ring.chunk(rank, True), source, half)
        parts = ring.attend_backward(high, low_k, low_v, low_t, False, place)
        for grads, part, at in zip((grads_q, grads_k, grads_v), parts, (1, 0, 0)):
            grads[at] = ring.op(aten.add.Tensor, grads[at], part)
        block = tuple(ring.choose(earlier, x, y) for x, y in zip(low, high))
        sides = [ring.choose(earlier, x, y) for x, y in ((low_k, high_k), (low_v, high_v), (low_t, high_t))]
        parts = ring.attend_backward(block, *sides, False, _start_of_choice(ring, earlier, rank, source, half))
        for grads, part in zip((grads_q, grads_k, grads_v), parts):
            zero = ring.zeros(part)
            grads[0] = ring.op(aten.add.Tensor, grads[0], ring.choose(earlier, part, zero))
            grads[1] = ring.op(aten.add.Tensor, grads[1], ring.choose(earlier, zero, part))
    grads_k, grads_v = [ring.turn(x) for x in grads_k], [ring.turn(x) for x in grads_v]
    return [ring.collect(ring.join(*grads, 2), 2) for grads in (grads_q, grads_k, grads_v)]


def _own_blocks_backward(ring: _Ring, rows, low, high, k, v, keys) -> tuple[list[Node], list[Node], list[Node]]:
    if not ring.call["dropout"]:
        whole = ring.attend_backward(tuple(rows), k, v, keys, True, None)
        return tuple(list(ring.halves(x, 2)) for x in whole)
    (low_k, high_k), (low_v, high_v), (low_t, high_t) = ring.halves(k, 2), ring.halves(v, 2), ring.halves(keys, 1)
    rank, half = ring.build.axis_index(), low[1].meta["val"].shape[2]
    top = ring.chunk(rank, True)
    first = ring.attend_backward(low, low_k, low_v, low_t, True, ring.start(rank, rank, half))
    second = ring.attend_backward(high, high_k, high_v, high_t, True, ring.start(top, top, half))
    across = ring.attend_backward(high, low_k, low_v, low_t, False, ring.start(top, rank, half))
    add = lambda x, y: ring.op(aten.add.Tensor, x, y)  # noqa: E731
    return [first[0], add(second[0], across[0])], [add(first[1], across[1]), second[1]], [add(first[2], across[2]), second[2]]
