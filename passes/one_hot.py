"""Sums over the classes of a one-hot: they are the value itself, and need no pass over the classes.

The gradient of a cross-entropy with respect to the log-probabilities is one value in each row [tokens, classes], and log_softmax's
gradient asks for the sum of the row (`aten._log_softmax_backward_data`). Computed as it stands that reads as many elements as there are
logits; with the classes split over devices every device would, for all classes:

    sum(where(arange(first, last) == class & valid, value, 0), classes)  ->  where(first <= class < last & valid, value, 0)
"""

from typing import Any

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.runner import Log, Pass

aten = torch.ops.aten
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)


def sum_one_hots(step: StepGraph, log: Log) -> StepGraph:
    """Rewrite every such sum; all terms but one are zero, so that no bit changes."""
    node: Any
    for node in list(step.graph.nodes):
        found = _match(node) if node.target is aten.sum.dim_IntList else None
        if found is None:
            continue
        (first, last), index, masks, value, zero = found
        edit = Editor(step.graph, node)
        valid = edit(aten.bitwise_and.Tensor, edit(aten.ge.Scalar, index, first), edit(aten.lt.Scalar, index, last))
        for mask in masks:
            valid = edit(aten.bitwise_and.Tensor, valid, mask)
        result = edit(aten.where.self, valid, value, zero)
        shape = list(node.meta["val"].shape)
        kept = [*node.args[0].meta["val"].shape[:-1], 1]
        if list(result.meta["val"].shape) != kept:
            result = edit(aten.expand.default, result, kept)
        node.replace_all_uses_with(result if shape == kept else edit(aten.squeeze.dims, result, [len(kept) - 1]))
        step.graph.erase_node(node)
        log.rewrote()
    if log.rewrites:
        step.graph.eliminate_dead_code()
    return step


def _match(node: Any) -> tuple | None:
    """The classes, each row's class, further conditions, value and zero, of a sum over the classes, the last dim; None if it is another sum."""
    row = node.args[0]
    rank = row.meta["val"].dim()
    if not node.args[1] or [dim % rank for dim in node.args[1]] != [rank - 1] or row.target is not aten.where.self or node.meta["val"].dtype != row.meta["val"].dtype:
        return None
    condition, value, zero = row.args
    if not _is_zero(zero) or not _is_one_class(value):
        return None
    parts = list(condition.args) if condition.target in _AND else [condition]
    equal = [part for part in parts if part.target is aten.eq.Tensor]
    if len(equal) != 1:
        return None
    masks = [part for part in parts if part is not equal[0]]
    classes = [(operand, bounds) for operand in equal[0].args if (bounds := _classes(operand)) is not None]
    if len(classes) != 1 or not all(_is_one_class(mask) for mask in masks):
        return None
    running, bounds = classes[0]
    (index,) = (operand for operand in equal[0].args if operand is not running)
    whole = bounds[1] - bounds[0] == row.meta["val"].shape[-1]
    return (bounds, index, masks, value, zero) if whole and _is_one_class(index) and not index.meta["val"].is_floating_point() else None


def _classes(node: Any) -> tuple[int, int] | None:
    """First and last + 1 of a running index."""
    if not all(isinstance(arg, int) for arg in node.args) or node.meta["val"].is_floating_point():
        return None
    if node.target is aten.arange.default and len(node.args) == 1:
        return 0, node.args[0]
    if node.target in (aten.arange.start, aten.arange.start_step) and (len(node.args) == 2 or node.args[2] == 1):
        return node.args[0], node.args[1]
    return None


def _is_one_class(node: Any) -> bool:
    """Whether a value is the same for all classes."""
    shape = node.meta["val"].shape
    return not shape or shape[-1] == 1


def _is_zero(node: Any) -> bool:
    return node.target is aten.full.default and not isinstance(node.args[1], torch.fx.Node) and node.args[1] == 0


SUM_ONE_HOTS = Pass(name="sum-one-hots", exact=True, optional=True, run=sum_one_hots)
