"""Kinds of values that the stage passes tell apart.

A value is *free* where every stage can compute it for next to nothing: constants, index ranges, positions on the mesh,
hyperparameters, read-only buffers, mere views and casts of parameters, and what follows from these alone. Free values
are computed again where they are read, and never sent.
"""

import math
import operator

import torch
import torch.fx

from graphacc.graph import Kind, StepGraph
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind

aten = torch.ops.aten

SEGMENT = "segment"
"""Entry of ``node.meta``: the place of a node in the order forward chunk 0, ..., V-1, backward chunk V-1, ..., 0."""

VIEWS = of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.EXPAND, OpKind.PART)
"""Calls that only look at a value in another way, or copy or cast it."""

_RANDOM = of_kind(OpKind.RANDOM)
CASTS = of_kind(OpKind.CAST)


def written_inputs(step: StepGraph) -> set[torch.fx.Node]:
    """Placeholders whose value an output replaces."""
    placeholders = step.placeholders
    return {placeholders[index] for index in step.donations().values()}


def free_values(step: StepGraph) -> set[torch.fx.Node]:
    """The free calls of a graph; placeholders are not among them."""
    written = written_inputs(step)
    sources = {node: item.kind for node, item in zip(step.placeholders, step.inputs) if node not in written}
    anywhere = {node for node, kind in sources.items() if kind in (Kind.HYPER, Kind.BUFFER)}
    views = {node for node, kind in sources.items() if kind is Kind.PARAM}
    free: set[torch.fx.Node] = set()
    for node in step.graph.nodes:
        if node.op != "call_function" or _is_bound(node):
            continue
        if node.target in VIEWS and node.args[0] in views:
            views.add(node)
            free.add(node)
        elif all(operand in anywhere for operand in node.all_input_nodes):
            anywhere.add(node)
            free.add(node)
    return free


def _is_bound(node: torch.fx.Node) -> bool:
    """Whether a call must not be repeated: a collective, or random numbers, which cost something."""
    return node.target in _RANDOM or getattr(node.target, "namespace", "") == "_c10d_functional"


def size_bytes(node: torch.fx.Node) -> float:
    """Bytes of a value; infinite for a call with several results, which cannot be passed on as one."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return math.inf
    return value.numel() * value.dtype.itemsize


def readers(node: torch.fx.Node, free: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The calls that read a value, through free values of it."""
    found: set[torch.fx.Node] = set()
    stack, seen = [node], set()
    while stack:
        for user in stack.pop().users:
            if user in free:
                stack.extend({user} - seen)
                seen.add(user)
            elif user.op == "call_function":
                found.add(user)
    return found


def is_item(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem
