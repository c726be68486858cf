"""Ring attention along `cp`: every rank keeps its queries, and keys and values travel around (Liu et al., arXiv 2310.01889).

In step j a rank holds the keys of rank r - j. What the steps give is joined by log-sum-exp. Under a causal mask half of all
pairs are empty; to give every rank the same work in every step, the sequence is dealt out zigzag for the time of the
attention: of 2n chunks, rank r has chunk r and chunk 2n - 1 - r. Then a rank attends to two half blocks in every step: its
high queries to the low keys always; and either its low queries to the low keys, if these come from an earlier rank, or
its high queries to the high keys. (Brandon et al., "Striped Attention", 2023, and Dubey et al., "Llama 3", 2024, deal out
alike.) No mask is computed, and nothing of size T x S exists. A bias lies with its queries, and every step takes the columns of
the keys that it has.

Legend: B batch, H query heads, G key/value heads, T and S local lengths, D head size, r rank, n ranks, j step.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphacc.ops.facts import OpKind, facts
from graphacc.graph import Kind, StepGraph
from graphacc.ops.flash_attention import EmptyRows
from graphacc.passes.attention.masks import LOW
from graphacc.passes.partition.placement import REPLICATE, Partial, Shard
from graphacc.passes.partition.ring_values import Block, Gradients, Node, Pair, Ring
from graphacc.passes.partition.rules import Call, Communicating, Plan

aten, ops = torch.ops.aten, torch.ops.graphacc
_LENGTH = {"q": 2, "k": 2, "v": 2, "grad": 2, "out": 2, "lse": 2, "q_segments": 1, "kv_segments": 1}
"""Argument -> its dim of queries or keys."""
_KEYS = ("k", "v", "kv_segments")
_DEALT = ("q", "q_segments", *_KEYS)
"""Of both parts, so that the backward has what the forward has dealt out."""


def ring_plan(call: Call) -> Plan | None:
    """The plan of a flash attention, forward or backward, around the ring; None if it does not lie so. See also `hindrances`."""
    splits = {operand.name: operand.placement for operand in call.operands}
    places = [splits[name] for name in ("q", "k", "v") if isinstance(splits[name], Shard) and splits[name].dim == 2]
    if len(places) < 3:
        return None
    if (call["right"] == 0 or call["dropout"]) and any(place.outer > 1 for place in places):
        return None
    queries, keys = places[0], places[1]
    required = tuple(
        _bias_split(call, queries) or REPLICATE if operand.name == "bias" else
        Shard(_LENGTH[operand.name], places[1 if operand.name in _KEYS else 0].outer) if operand.name in _LENGTH else None
        for operand in call.operands
    )
    if "grad" not in call.arguments:
        return Plan(required, (queries, queries), emit=_emit(call, _forward, keys.outer))
    of_bias = (_bias_split(call, queries) or Partial("sum")) if call["bias_grad"] else REPLICATE
    return Plan(required, (queries, keys, keys, of_bias), emit=_emit(call, _backward, keys.outer))


def _bias_split(call: Call, queries: Shard) -> Shard | None:
    """A bias lies with its queries; None if it is the same for all of them, where every rank has it for all keys."""
    shape = call.shape("bias")
    return Shard(len(shape) - 2, queries.outer) if len(shape) > 1 and shape[-2] > 1 else None


def hindrances(step: StepGraph, num_ranks: int) -> dict[Node, str]:
    """The attentions of a graph, forward and backward, that cannot go around a ring, and why."""
    found = {}
    for node in step.graph.nodes:
        why = ""
        if node.target in (ops.flash_attention.default, ops.flash_attention_backward.default):
            names = (argument.name for argument in node.target._schema.arguments)
            why = _hindrance(step, dict(zip(names, node.args)) | dict(node.kwargs), num_ranks)
        elif node.target is ops.sdpa.default:
            why = "its mask is no band and no padding"
        if why:
            found[node] = why
    return found


def _hindrance(step: StepGraph, arguments: Mapping[str, Any], num_ranks: int) -> str:
    queries, keys = (arguments[name].meta["val"].shape[2] for name in ("q", "k"))
    causal = arguments["right"] == 0
    if arguments["left"] >= 0 or arguments["right"] > 0:
        return "a window says something about positions that a block does not know"
    if causal and arguments["empty_rows"] != EmptyRows.ZEROS:
        return "a query without any key would need all values, also those behind it"
    if causal and (queries != keys or queries % (2 * num_ranks)):
        return f"under a causal mask {queries} queries and {keys} keys must be equally many and a multiple of {2 * num_ranks}"
    if arguments["bias"] is not None and (why := _hides(step, arguments["bias"])):
        return (
            f"its bias is made of {why}, so it may hide positions by low finite numbers; the log-sum-exp of a block in which all "
            "are hidden does not tell how many there are"
        )
    return ""


def _hides(step: StepGraph, bias: Node) -> str:
    """What a bias is made of, besides parameters and small numbers: "" if there is nothing else. -inf is exact, and may be there."""
    inputs = {item.name: item for item in step.inputs}
    seen, left = set(), [bias]
    while left:
        node = left.pop()
        if node in seen or node.meta["val"].dtype == torch.bool:
            continue
        seen.add(node)
        if node.op == "placeholder":
            item = inputs[node.name]
            constant = step.constants.get(item.target)
            if item.kind is not Kind.PARAM and (constant is None or _low(float(constant.min()) if constant.numel() else 0.0)):
                return f"{item.kind.value} {item.target!r}"
            continue
        low = [number for number in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(number, (int, float)) and _low(number)]
        if low:
            return f"the number {low[0]:g}"
        looks_up = facts(node.target).kind is OpKind.LOOKUP
        left += node.all_input_nodes[:1] if looks_up else node.all_input_nodes
    return ""


def _low(number: float) -> bool:
    return math.isfinite(number) and number <= LOW


def _emit(call: Call, run: Callable, outer: int) -> Callable:
    names = [argument.name for argument in call.node.target._schema.arguments]

    def emit(build, args, kwargs):
        values = dict(zip(names, args)) | kwargs
        values |= {name: call[name] for name in names if name not in values}
        return run(Ring(build, call, values, outer))

    return Communicating(emit)


def _steps(ring: Ring) -> list[list[Block]]:
    """The calls of the kernel, step by step."""
    if not ring.causal:
        return [[Block(step, "whole", "whole")] for step in range(ring.ranks)]
    own = [Block(0, "whole", "whole", causal=True)]  # low comes before high
    if ring.call["dropout"]:  # its random numbers need contiguous blocks
        own = [Block(0, "low", "low", causal=True), Block(0, "high", "high", causal=True), Block(0, "high", "low")]
    return [own, *([Block(step, "high", "low"), Block(step, "chosen", "chosen")] for step in range(1, ring.ranks))]


def _forward(ring: Ring) -> list[Node]:
    outs, lses, blocks = _around(ring)
    (out,), (lse,) = ring.collect(ring.narrowed(outs, "q")), ring.collect(lses)  # apart, as most backwards read none of the log-sum-exp
    ring.build.ring_blocks[lse] = blocks
    return [out, lse]


def _around(ring: Ring) -> tuple[list[Node | None], list[Node | None], list[Pair]]:
    """Output, log-sum-exp, and the log-sum-exp of each block, each for the low and the high queries."""
    *queries, k, v, kv_segments = ring.rows(*_DEALT)
    bias = ring.bias_rows()
    outs: list[Node | None] = [None, None]
    lses: list[Node | None] = [None, None]
    blocks = []
    for step, (calls, keys) in enumerate(zip(_steps(ring), ring.keys_of_steps([k, v, kv_segments], outs, lses))):
        for block in calls:
            parts = ring.deliver(block, ring.attend(block, queries, keys, bias))
            for half, part in enumerate(parts):
                if part is not None:
                    outs[half], lses[half] = part if outs[half] is None else ring.merge((outs[half], lses[half]), part, step)
            blocks.append(tuple(part and part[1] for part in parts))
    return outs, lses, blocks


def _blocks_again(ring: Ring) -> list[Pair]:
    """The blocks of a forward part that is not in the graph that is written; if it is in the step, this call alone is being planned,
    and what the forward part sends is its own."""
    count = len(ring.build.collectives)
    blocks = _around(ring)[2]
    if ring.call.operand("lse").node.op == "call_function":
        del ring.build.collectives[count:]
    return blocks


def _backward(ring: Ring) -> list[Node]:
    blocks = ring.build.ring_blocks.get(ring.values["lse"]) or _blocks_again(ring)
    of_blocks = iter(blocks)
    tops, sums = ring.softmax_sums(blocks)
    q, q_segments, *keys, bias = ring.again([*ring.rows(*_DEALT), *ring.bias_rows()], ring.values["grad"])
    grad, out = ring.rows("grad", "out")
    rows = [grad, q, out, q_segments]
    grads = Gradients(ring)
    for step, (calls, held) in enumerate(zip(_steps(ring), ring.keys_of_steps(keys, grads.queries, grads.leaving, tops, sums))):
        if step:
            grads.turn()  # beside the keys of the next step: XLA makes one message of both
        for block in calls:
            lses = next(of_blocks)
            grads.add(block, ring.attend_backward(block, rows, held, [bias], lses, ring.shares(lses, tops, sums)))
        grads.add_up()
    grads.turn(role=None)  # brings them home, which is waited for
    return grads.results()
