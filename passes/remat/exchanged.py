"""Values whose computation communicates: keeping them lets no collective run twice.

A partition's plan says what moves. A sum over ranks or a split that the forward settles is kept as it is settled; where the forward goes on
with another placement than the value's home (a gathered sequence, exchanged heads, tokens at their experts), the results of those who
read it are kept too. Axes are planned one by one, each on the step that is global along all others.
"""

from collections.abc import Iterable, Mapping

import torch.fx

from graphacc.graph import Phase, StepGraph
from graphacc.passes.partition import Move
from graphacc.passes.partition.placement import Partial
from graphacc.passes.partition.plan import AxisPlan, Role
from graphacc.passes.runner import Pass


def exchanged_values(step: StepGraph, partitions: Iterable[Pass]) -> set[torch.fx.Node]:
    """Calls of the forward that are kept so that these partitions communicate as if nothing were computed again."""
    nodes = {node.name: node for node in step.graph.nodes}
    found: set[torch.fx.Node] = set()
    for item in partitions:
        assert item.decide is not None, f"{item.name} is no partition"
        plan = item.decide(step)
        for move in plan.moves:
            if move.phase is Phase.FORWARD and move.travels and move.role in (Role.ACTIVATION, Role.TOKENS, Role.KEYS):
                found |= _kept_for(move, plan, nodes)
    return found


def _kept_for(move: Move, plan: AxisPlan, nodes: Mapping[str, torch.fx.Node]) -> set[torch.fx.Node]:
    value = nodes[move.value]
    if isinstance(move.source, Partial) or plan.placements.get(move.value) == move.target:
        return {value}
    readers = (*value.users, nodes[move.reader])  # a view's operand may be what moves for the view's reader
    return {value, *(reader for reader in readers if reader.op == "call_function" and reader.meta["phase"] is Phase.FORWARD)}
