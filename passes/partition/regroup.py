"""Sums of gradients, regrouped: what comes straight from products is added first.

The gradient of an activation that feeds several products (query, key and value, and a residual) is a chain of additions in
the order of autograd. Along a tensor-parallel axis the products' shares are partial sums and the residual's is not. Added up
first, the partial ones need one sum over the ranks; in autograd's order each would need its own.
"""

import torch
import torch.fx

from graphacc.ops.facts import OpKind, of_kind
from graphacc.graph import Phase, StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.runner import Log, Pass

aten = torch.ops.aten
_PRODUCTS = of_kind(OpKind.PRODUCT)
_VIEWS = of_kind(OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.PERMUTE)


def regroup_sums(step: StepGraph, log: Log) -> StepGraph:
    """Rewrite every chain of additions in the backward part whose products do not stand first."""
    graph = step.graph
    for last in [node for node in graph.nodes if is_sum(node) and not continues(node)]:
        parts = terms(last)
        ordered = sorted(parts, key=lambda term: not _is_product(term))  # stable
        if len(parts) < 3 or ordered == parts:
            continue
        edit, total = Editor(graph, last), ordered[0]
        for term in ordered[1:]:
            total = edit(aten.add.Tensor, total, term)
        last.replace_all_uses_with(total)
        graph.erase_node(last)
        log.rewrote(1)
    graph.eliminate_dead_code()
    return step


def is_sum(node: torch.fx.Node) -> bool:
    """Whether a node of the backward part adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or node.meta.get("phase") is not Phase.BACKWARD:
        return False
    values = [arg.meta["val"] for arg in node.args if isinstance(arg, torch.fx.Node)]
    like = node.meta["val"]
    return len(values) == 2 and all(value.shape == like.shape and value.dtype == like.dtype for value in values)


def continues(node: torch.fx.Node) -> bool:
    """Whether a sum is only a term of another sum."""
    return len(node.users) == 1 and is_sum(next(iter(node.users)))


def terms(last: torch.fx.Node) -> list[torch.fx.Node]:
    """What a chain of additions that ends in `last` adds up, in its order."""
    found, left = [], list(reversed(last.args))
    while left:
        arg = left.pop()
        if is_sum(arg) and continues(arg):
            left += reversed(arg.args)
        else:
            found.append(arg)
    return found


def _is_product(node: torch.fx.Node) -> bool:
    while node.target in _VIEWS:
        node = node.args[0]
    return node.target in _PRODUCTS


REGROUP_SUMS = Pass(name="regroup-sums", exact=False, optional=True, run=regroup_sums)
