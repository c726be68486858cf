"""The places of a graph's calls: of the gradients' graph from its marks, of an update's from where parameters lie."""

from collections.abc import Mapping

import torch
import torch.fx

from graphacc.graph import Kind, StepGraph
from graphacc.passes.stages.cut import Place
from graphacc.passes.stages.values import SEGMENT, free_values, is_item, size_bytes

_FORWARD, _BACKWARD, _WEIGHTS, _UPDATE = "F", "B", "W", "U"


def marked_places(step: StepGraph, num_stages: int, num_chunks: int, split_backward: bool) -> dict[torch.fx.Node, Place]:
    """Places by the marks of `mark_pass`; a call whose operands come later than its mark stands with them.

    Args:
        step: forward, and backward if there is one, after all other passes.
        split_backward: what only the gradient of one parameter needs gets a segment of its own ("W").
    """
    free = free_values(step)
    marks = _legal_marks(step, free)
    weights = _weight_calls(step, marks, num_chunks) if split_backward else set()

    def place(node: torch.fx.Node, mark: int) -> Place:
        if mark < num_chunks:
            return Place(mark, mark % num_stages, _FORWARD, mark)
        chunk = 2 * num_chunks - 1 - mark
        if node in weights:
            return Place(2 * num_chunks + mark, chunk % num_stages, _WEIGHTS, chunk)
        return Place(mark, chunk % num_stages, _BACKWARD, chunk)

    return {node: place(node, mark) for node, mark in marks.items()}


def _legal_marks(step: StepGraph, free: set[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """The marks; a call without one, such as the gather of a parameter's view, stands with the first that reads it."""
    results = set(step.results)
    nodes = [n for n in step.graph.nodes if n.op == "call_function" and (n not in free or n in results)]
    wanted: dict[torch.fx.Node, int] = {}
    for node in reversed(nodes):
        first = min((wanted[user] for user in node.users if user in wanted), default=0)
        wanted[node] = node.meta.get(SEGMENT, first)
    marks: dict[torch.fx.Node, int] = {}
    for node in nodes:
        if is_item(node) and node.args[0] in marks:
            marks[node] = marks[node.args[0]]
        else:
            marks[node] = max([wanted[node], *(marks[operand] for operand in node.all_input_nodes if operand in marks)])
    return marks


def _weight_calls(step: StepGraph, marks: Mapping[torch.fx.Node, int], num_chunks: int) -> set[torch.fx.Node]:
    """Backward calls that serve the gradient of one parameter alone, inside of one chunk."""
    gradients = {node: i for i, (node, out) in enumerate(zip(step.results, step.outputs)) if out.kind is Kind.GRAD}
    others = {node for node, out in zip(step.results, step.outputs) if out.kind is not Kind.GRAD}
    serves: dict[torch.fx.Node, int | None] = {}  # one gradient, or None for anything else
    for node in reversed(step.graph.nodes):
        if node not in marks:
            continue
        found = {serves[user] if marks.get(user) == marks[node] else None for user in node.users if user in marks}
        found |= {gradients[node]} if node in gradients else set()
        serves[node] = next(iter(found)) if len(found) == 1 and node not in others and marks[node] >= num_chunks else None
    alone = {node for node, gradient in serves.items() if gradient is not None}
    return {node for node in alone if not is_item(node) or node.args[0] in alone}


def update_places(step: StepGraph, homes: Mapping[str, int]) -> dict[torch.fx.Node, Place]:
    """Places in an update: a call stands with the largest tensor that it reads, one level behind what other stages send it.

    Args:
        homes: parameter -> its stage, for every parameter, gradient and state among the inputs.
    """
    free = free_values(step)
    results = set(step.results)
    nodes = [n for n in step.graph.nodes if n.op == "call_function" and (n not in free or n in results)]
    stages: dict[torch.fx.Node, int] = {}
    for node, item in zip(step.placeholders, step.inputs):
        if item.kind in (Kind.PARAM, Kind.GRAD, Kind.STATE):
            name = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
            stages[node] = homes[name]
    for node in nodes:
        known = [operand for operand in node.all_input_nodes if operand in stages]
        if is_item(node):
            stages[node] = stages[node.args[0]]
        else:
            stages[node] = stages[max(known, key=lambda operand: (_bytes(operand), -known.index(operand)))] if known else 0
    levels = _levels(nodes, stages)
    return {node: Place(levels[node], stages[node], _UPDATE, levels[node]) for node in nodes}


def _bytes(node: torch.fx.Node) -> float:
    value = node.meta["val"]
    return size_bytes(node) if isinstance(value, torch.Tensor) else sum(v.numel() * v.dtype.itemsize for v in value)


def _levels(nodes: list[torch.fx.Node], stages: Mapping[torch.fx.Node, int]) -> dict[torch.fx.Node, int]:
    """As early as other stages' values allow, then as late as all readers on the same stage."""
    levels: dict[torch.fx.Node, int] = {}
    for node in nodes:
        made = [operand for operand in node.all_input_nodes if operand in levels]
        levels[node] = max((levels[operand] + (stages[operand] != stages[node]) for operand in made), default=0)
        if is_item(node) and node.args[0] in levels:
            levels[node] = levels[node.args[0]]
    for node in reversed(nodes):
        users = [user for user in node.users if user in levels]
        if users and not is_item(node) and not any(is_item(user) for user in users):
            levels[node] = max(levels[node], min(levels[user] - (stages[user] != stages[node]) for user in users))
    return levels
