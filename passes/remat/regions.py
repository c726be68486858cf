"""Regions of the forward: what is computed again together, between places where little crosses.

A region is, in this order of precedence, a call of ``torch.utils.checkpoint`` in the user's model, a repeated block ("transformer.h.3"), or,
in a model without numbered modules, a run of units between narrow cuts. Under a pipeline a region ends where its stage ends.
"""

import itertools
import math
import re

import torch.fx

from graphacc.graph import CHECKPOINT, CHUNKED, Kind, Phase, StepGraph
from graphacc.passes.stages.units import Unit, block_of, cuts, forward_part, units
from graphacc.passes.stages.values import SEGMENT, VIEWS, is_item

_NUMBERED = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")

REGION = "region"
"""Entry of ``node.meta``: the region of a call, of a copy, and of a call of backward that reads what the region made."""

Regions = dict[torch.fx.Node, str]
"""Call of the forward -> name of its region; calls in no region are left out."""


def find_regions(step: StepGraph, blocks: bool = True) -> Regions:
    """The regions of a step's forward, by name.

    Args:
        blocks: blocks and narrow cuts make regions; without, only what the user has checkpointed does.
    """
    found: Regions = {}
    if blocks:
        found |= _by_blocks(step)
    for node in step.graph.nodes:
        if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD and CHECKPOINT in node.meta:
            found[node] = node.meta[CHECKPOINT].region
    for node in always_there(step):
        found.pop(node, None)
    for node in step.graph.nodes:  # forward and backward of what a loop over chunks will hold are computed together
        if CHUNKED in node.meta:
            found.pop(node, None)
    for node in step.graph.nodes:  # several results stay with the call that gives them
        if is_item(node) and node in found and node.args[0] in found:
            found[node] = found[node.args[0]]
    return {node: f"{name}, segment {node.meta[SEGMENT]}" if SEGMENT in node.meta else name for node, name in found.items()}


def always_there(step: StepGraph) -> set[torch.fx.Node]:
    """Calls whose results backward may read without anything being kept for it: views and casts of parameters, and what follows from
    constants and buffers alone."""
    kinds = {node: item.kind for node, item in zip(step.placeholders, step.inputs)}
    parameters = {node for node, kind in kinds.items() if kind is Kind.PARAM}
    constants = {node for node, kind in kinds.items() if kind in (Kind.BUFFER, Kind.HYPER)}
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in VIEWS and node.args[0] in parameters:
            parameters.add(node)
        elif constants.issuperset(node.all_input_nodes):
            constants.add(node)
    return (parameters | constants) - kinds.keys()


def _by_blocks(step: StepGraph) -> Regions:
    forward = forward_part(step)
    if not forward.nodes:
        return {}
    found = units(forward, cuts(forward))
    numbered = {block_of(node) for node in forward.nodes} - {""}
    if not numbered:
        return _by_cuts(found)
    nested = {block for block in numbered if _is_made_of_blocks(block, found)}
    regions = {}
    for node in forward.nodes:
        block = block_of(node)
        if block:
            regions[node] = _inner_block(node) if block in nested else block
    return regions


def _is_made_of_blocks(block: str, found: list[Unit]) -> bool:
    """Whether narrow cuts separate several numbered modules inside of a block: the stages of a ResNet or a Swin."""
    inside = [{_inner_block(node) for node in unit.nodes if block_of(node) == block} for unit in found]
    whole = {next(iter(paths)) for paths in inside if len(paths) == 1}
    return len(whole) > 1


def _inner_block(node: torch.fx.Node) -> str:
    """The second of the numbered modules that a call is in, or the first if there is no second."""
    path = node.meta.get("module_path") or ""
    ends = [number.end() for number in _NUMBERED.finditer(path)][:2]
    return path[: ends[-1]] if ends else ""


def _by_cuts(found: list[Unit]) -> Regions:
    """About as many regions as each has units, so that neither what is kept between them nor one region's values dominate; not the last
    one, whose values are needed at once."""
    count = max(1, round(math.sqrt(len(found))))
    edges = [round(i * len(found) / count) for i in range(count + 1)]
    groups = [found[first:last] for first, last in itertools.pairwise(edges)]
    return {node: f"units {i}" for i, group in enumerate(groups[:-1]) for unit in group for node in unit.nodes}
