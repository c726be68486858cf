"""Sums of matrix products, joined into one product where that needs less memory.

A weight that is used at many steps (a recurrent network, layers that share their weights) gets its gradient as a sum of products,
A₁B₁ + A₂B₂ + ... = [A₁ A₂ ...] [B₁; B₂; ...]. XLA fuses the additions, so that all products live at once; where their operands are
smaller, the one product of the joined operands takes less memory and less time. It works on the program of one device: what is
smaller depends on the local shapes.
"""

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.partition.regroup import continues, is_sum, terms
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import SEGMENT

aten = torch.ops.aten
_TRANSPOSED = [1, 0]


def join_products(step: StepGraph, log: Log) -> StepGraph:
    """Rewrite every sum in the backward part that has several products of the same kind, smaller in operands than in result."""
    for last in [node for node in step.graph.nodes if is_sum(node) and not continues(node)]:
        groups: dict[tuple | int, list[torch.fx.Node]] = {}
        for position, term in enumerate(terms(last)):
            groups.setdefault(_kind(term) or position, []).append(term)  # a term may be there twice
        if all(len(group) == 1 for group in groups.values()):
            continue
        edit = Editor(step.graph, last)
        total, *others = [_join(step, last, group) for group in groups.values()]
        for other in others:
            total = edit(aten.add.Tensor, total, other)
        last.replace_all_uses_with(total)
        step.graph.erase_node(last)
        log.rewrote()
    if log.rewrites:
        step.graph.eliminate_dead_code()
    return step


def _kind(term: torch.fx.Node) -> tuple | None:
    """What products have in common that can be joined; None for a term that gains nothing."""
    product, transposed = _product(term)
    if product.target is not aten.mm.default:
        return None
    a, b = product.args
    (rows, inner), columns = a.meta["val"].shape, b.meta["val"].shape[1]
    if len(term.users) > 1 or inner * (rows + columns) >= rows * columns:
        return None
    return transposed, _is_transposed(a), _is_transposed(b), term.meta.get(SEGMENT)


def _product(term: torch.fx.Node) -> tuple[torch.fx.Node, bool]:
    """What a term is but for transpositions, and whether these leave it transposed."""
    transposed = False
    while _is_transposed(term) and len(term.args[0].users) == 1:
        term, transposed = term.args[0], not transposed
    return term, transposed


def _is_transposed(node: torch.fx.Node) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == _TRANSPOSED


def _join(step: StepGraph, before: torch.fx.Node, group: list[torch.fx.Node]) -> torch.fx.Node:
    """The sum of the terms in a group."""
    if len(group) == 1:
        return group[0]
    edit = Editor(step.graph, before, like=group[-1])
    products = [_product(term)[0] for term in group]
    left = _concatenate(edit, [product.args[0] for product in products], 1)
    right = _concatenate(edit, [product.args[1] for product in products], 0)
    joined = edit(aten.mm.default, left, right)
    return edit(aten.permute.default, joined, _TRANSPOSED) if _product(group[0])[1] else joined


def _concatenate(edit: Editor, parts: list[torch.fx.Node], dim: int) -> torch.fx.Node:
    """The parts, either all transposed or none, in a row; what they are transposed from is joined, so that nothing is moved twice."""
    if not _is_transposed(parts[0]):
        return edit(aten.cat.default, parts, dim)
    joined = edit(aten.cat.default, [part.args[0] for part in parts], 1 - dim)
    return edit(aten.permute.default, joined, _TRANSPOSED)


JOIN_PRODUCTS = Pass(name="join-products", exact=False, optional=True, run=join_products)
