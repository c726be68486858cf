"""Predicting the memory of a step on one device from its StepGraph, without compiling it.

The graph is walked in its order with the live ranges that a compiler leaves: views share their base's memory, an
element-wise operator whose users can all compute it on the fly is never stored (its operands live longer instead), and
an output that replaces an input is written in place.
"""

import dataclasses
import math
import operator

import torch
import torch.fx
from torch.utils import _pytree as pytree

from graphacc.graph import StepGraph

_aten = torch.ops.aten

_VIEWS = frozenset(
    {
        operator.getitem,
        _aten.view.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.squeeze.dims,
        _aten.squeeze.dim,
        _aten.unsqueeze.default,
        _aten.alias.default,
        _aten.detach.default,
        torch.ops._c10d_functional.wait_tensor.default,
    }
)
"""Operators whose result shares, or can share, the memory of their first operand."""

_COMPUTED_ON_THE_FLY = frozenset(
    {
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.full.default,
        _aten.full_like.default,
        _aten.scalar_tensor.default,
        _aten.arange.start_step,
        _aten.arange.default,
        _aten.constant_pad_nd.default,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.embedding.default,
        _aten.gather.default,
        torch.ops.graphacc.random_uniform.default,
    }
)
_REDUCTIONS = frozenset({_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim, _aten.mean.default, _aten.amax.default, _aten.amin.default})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes on one device."""

    argument_bytes: int  # parameters, buffers, optimizer state and batch
    temporary_bytes: int  # largest sum of values that live at once, arguments aside
    output_bytes: int  # outputs that replace no input

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


def predict_memory(step: StepGraph) -> MemoryPrediction:
    """Predict the memory of one device for a step, in its graph's order.

    Args:
        step: a graph whose shapes are those of one device (after the passes).
    """
    nodes = list(step.graph.nodes)
    owners = _owners(nodes)
    last_use = _last_uses(nodes, owners)
    outputs = {owners.get(node, node) for node in step.results}
    live = peak = 0
    expiring: dict[int, int] = {}
    for time, node in enumerate(nodes):
        if node.op == "call_function" and owners.get(node) is node and node not in outputs:
            size = _size_bytes(node)
            live += size
            expiring[last_use[node]] = expiring.get(last_use[node], 0) + size
        peak = max(peak, live)
        live -= expiring.pop(time, 0)
    donated = step.donations()
    return MemoryPrediction(
        argument_bytes=sum(_size_bytes(node) for node in step.placeholders),
        temporary_bytes=peak,
        output_bytes=sum(_size_bytes(node) for i, node in enumerate(step.results) if i not in donated),
    )


def _owners(nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node | None]:
    """Node -> the node whose memory holds its value; None for a value that is never stored."""
    owners: dict[torch.fx.Node, torch.fx.Node | None] = {}
    for node in nodes:
        if node.op == "call_function" and node.target in _VIEWS:
            base = node.args[0]
            owners[node] = owners[base] if owners[base] is not None else node
        elif node.op == "call_function" and _computed_on_the_fly(node):
            owners[node] = None
        else:
            owners[node] = node
    return owners


def _computed_on_the_fly(node: torch.fx.Node) -> bool:
    if not _is_fusible(node) or not node.users:
        return False
    return all(user.op == "call_function" and (_is_fusible(user) or user.target in _REDUCTIONS) for user in node.users)


def _is_fusible(node: torch.fx.Node) -> bool:
    target = node.target
    if target in _COMPUTED_ON_THE_FLY:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _last_uses(nodes: list[torch.fx.Node], owners: dict[torch.fx.Node, torch.fx.Node | None]) -> dict[torch.fx.Node, int]:
    """Owner -> position of the last node that reads its memory, through views and values computed on the fly."""
    position = {node: i for i, node in enumerate(nodes)}
    read_until: dict[torch.fx.Node, int] = {}
    last: dict[torch.fx.Node, int] = {}
    for node in reversed(nodes):
        own = max((_reach(user, position, owners, read_until) for user in node.users), default=position[node])
        read_until[node] = own
        if (owner := owners.get(node)) is not None:
            last[owner] = max(last.get(owner, 0), own)
    return last


def _reach(user: torch.fx.Node, position: dict, owners: dict, read_until: dict) -> int:
    """When a user has read its operand: at its own place, or at its users' where it is computed there."""
    if user.op == "call_function" and owners.get(user) is None:
        return max(position[user], read_until[user])
    return position[user]


def _size_bytes(node: torch.fx.Node) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
