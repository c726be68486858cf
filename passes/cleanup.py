"""Clean-up passes, both exact: dead code and common subexpressions."""

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import StepGraph
from graphacc.ops.facts import draws
from graphacc.passes.edit import constant
from graphacc.passes.runner import Log, Pass


def remove_dead_code(step: StepGraph, log: Log) -> StepGraph:
    """Erase every call whose result nobody uses. All operators of a StepGraph are functional, collectives included."""
    for node in reversed(list(step.graph.nodes)):
        if node.op == "call_function" and not node.users:
            step.graph.erase_node(node)
            log.rewrote()
    return step


def _verify_no_dead_code(step: StepGraph) -> None:
    for node in step.graph.nodes:
        if node.op == "call_function" and not node.users:
            raise GraphError(f"node {node.name!r} ({node.target}) has no users")


def merge_common_subexpressions(step: StepGraph, log: Log) -> StepGraph:
    """Replace a call by an earlier one of the same operator with the same arguments.

    ``graphacc::after`` keeps equal computations apart by an argument of its own, and random operators differ in their
    stream, so that neither needs care here; operators with a hidden generator are left alone.
    """
    seen: dict[tuple, torch.fx.Node] = {}
    for node in list(step.graph.nodes):
        if node.op != "call_function" or draws(node.target):
            continue
        earlier = seen.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            step.graph.erase_node(node)
            log.rewrote()
    return step


def _key(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple([_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item)) for name, item in sorted(value.items())])
    return value if isinstance(value, torch.fx.Node) else constant(value)


DEAD_CODE = Pass(name="dead-code", exact=True, run=remove_dead_code, verify=_verify_no_dead_code)
COMMON_SUBEXPRESSIONS = Pass(name="common-subexpressions", exact=True, optional=True, run=merge_common_subexpressions)
