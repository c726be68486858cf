"""ZeRO-3's second gather: backward reads parameters through ``graphacc::after``, never what forward made of them.

Forward often saves a parameter for backward as a mere view, permutation or cast. Once parameters are split, that would
keep the gathered tensor alive from forward to backward. So every such chain that backward reads is written again,
on ``after(parameter, gradient)``: the partition then gathers a second time, not before that gradient exists, and no
common-subexpression pass can merge the two. What a loop over chunks of the loss will hold (``meta[CHUNKED]``) reads the first gather: its forward
and its backward run together. So do experts that `ep` alone splits, which are not gathered, and so does a head: the large weight that forward reads last, and
backward first, would be gathered again at once, with nothing to be computed beside it (FSDP2's users leave their last layer whole for this, with
``reshard_after_forward=False``).
"""

import functools
import math
from collections.abc import Collection

import torch
import torch.fx

from graphacc.passes.edit import Editor
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind
from graphacc.errors import GraphError
from graphacc.graph import CHUNKED, Kind, Phase, StepGraph
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import SEGMENT

aten = torch.ops.aten
_CHAIN = of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.PART)
_ORDER = of_kind(OpKind.ORDER)


def regather_pass(placed: Collection[str], head_bytes: float = math.inf) -> Pass:
    """Makes backward read parameters of its own; an exact rewriting of the global graph.

    Args:
        placed: parameters that are used as they are placed.
        head_bytes: of a head, which stays gathered from forward to backward, at least.
    """
    kept = frozenset(placed)
    run = functools.partial(_separate_backward_reads, placed=kept, head_bytes=head_bytes)
    verify = functools.partial(_verify_backward_reads, placed=kept, head_bytes=head_bytes)
    return Pass(name="separate-backward-reads", exact=True, optional=True, run=run, verify=verify, key=("separate-backward-reads", kept, head_bytes))


def head_of(step: StepGraph, min_bytes: float) -> str | None:
    """The parameter that backward reads first, if forward reads none behind it that has an eighth of its size, and it has at least so many bytes in the dtype that it is gathered in."""
    roots = _chains(step, frozenset())
    names = {node: item.target for node, item in zip(step.placeholders, step.inputs)}
    last: dict[str, int] = {}  # parameter -> where forward reads it last
    sizes: dict[str, int] = {}
    for place, node in enumerate(step.graph.nodes):
        if node.op != "call_function" or node in roots or node.target in _ORDER:
            continue
        read = {names[roots[operand]]: size_bytes(operand.meta["val"].shape, operand.meta["val"].dtype) for operand in node.all_input_nodes if operand in roots}
        if node.meta["phase"] is Phase.FORWARD:
            last |= dict.fromkeys(read, place)
            sizes |= read
        elif read:
            if node.meta["phase"] is not Phase.BACKWARD or CHUNKED in node.meta:
                return None
            first = max(read, key=lambda name: sizes.get(name, 0))
            behind = [size for name, size in sizes.items() if last[name] > last.get(first, -1)]
            return first if first in last and sizes[first] >= min_bytes and all(size < sizes[first] / 8 for size in behind) else None
    return None


def _separate_backward_reads(step: StepGraph, log: Log, placed: frozenset[str], head_bytes: float) -> StepGraph:
    roots = _chains(step, placed, head_of(step, head_bytes))
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    last: torch.fx.Node | None = None  # the latest value of backward
    for node in list(step.graph.nodes):
        if node.op != "call_function" or node.meta["phase"] is not Phase.BACKWARD or node in roots:
            continue
        if CHUNKED in node.meta:
            last = node if isinstance(node.meta["val"], torch.Tensor) else last
            continue
        for operand in dict.fromkeys(node.all_input_nodes):
            if operand in roots:
                anchor = _anchor(node, roots, order) or last
                if anchor is not None:
                    node.replace_input_with(operand, _copy(step, operand, roots, anchor, node, copies))
                    log.rewrote()
        if isinstance(node.meta["val"], torch.Tensor):
            last = node
    return step


def _chains(step: StepGraph, placed: frozenset[str], head: str | None = None) -> dict[torch.fx.Node, torch.fx.Node]:
    """Every parameter that is gathered anew for backward, and every value that is one seen through views and casts alone, with that parameter."""
    roots = {node: node for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM and item.target not in placed and item.target != head}
    for node in step.graph.nodes:
        if node.target in _CHAIN and node.meta["phase"] is not Phase.UPDATE and node.args[0] in roots:
            roots[node] = roots[node.args[0]]
    return roots


def _anchor(node: torch.fx.Node, roots: dict, order: dict[torch.fx.Node, int]) -> torch.fx.Node | None:
    """The last made among the values of backward that `node` reads besides parameters."""
    read = [
        operand
        for operand in node.all_input_nodes
        if operand not in roots
        and operand in order
        and operand.meta["phase"] is Phase.BACKWARD
        and isinstance(operand.meta["val"], torch.Tensor)
        and operand.meta["val"].numel() > 0  # what is empty is there at once
    ]
    return max(read, key=order.__getitem__, default=None)


def _copy(
    step: StepGraph, value: torch.fx.Node, roots: dict, anchor: torch.fx.Node, before: torch.fx.Node, copies: dict
) -> torch.fx.Node:
    """`value` written again for backward, in front of its first reader `before`."""
    if value in copies:
        return copies[value]
    place = {name: before.meta[name] for name in ("module_path", "stack_trace", SEGMENT) if name in before.meta}
    edit = Editor(step.graph, before, like=value, meta={"phase": Phase.BACKWARD, **place})
    if value.op == "placeholder":
        new = edit(torch.ops.graphacc.after.default, value, anchor)
    else:
        source = _copy(step, value.args[0], roots, anchor, before, copies)
        new = edit.repeat(value, (source, *value.args[1:]), dict(value.kwargs))
    copies[value] = new
    return new


def _verify_backward_reads(step: StepGraph, placed: frozenset[str], head_bytes: float) -> None:
    """Nothing in backward reads a forward view or cast of a parameter."""
    roots = _chains(step, placed, head_of(step, head_bytes))
    started = False
    for node in step.graph.nodes:
        if (
            node.op != "call_function"
            or node.meta["phase"] is not Phase.BACKWARD
            or node in roots
            or CHUNKED in node.meta
            or node.target is torch.ops.graphacc.after.default
        ):
            continue
        read = [operand.name for operand in node.all_input_nodes if operand in roots]
        if read and started:
            raise GraphError(f"node {node.name!r} of backward reads {read}, which forward made of a parameter")
        started = True
