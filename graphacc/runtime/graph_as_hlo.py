"""A StepGraph as an HloStep: its operators, with global shapes, handed to XLA's SPMD partitioner (`Strategy.tp_by`).

Attention, and what the graph marks, are whole calls, as in a lazily captured step. A gradient inside of a whole step is a link, so that it gets its
layout as soon as it is there.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from graphacc._compat.jax_ import x64
from graphacc.graph import Kind, Output, Phase, StepGraph
from graphacc.hlo import HloStep, Operand, Support, WholeCall
from graphacc.lowering import check
from graphacc.lowering.interpret import run_graph, run_node

ops = torch.ops.graphacc
_WHOLE = (ops.flash_attention.default, ops.flash_attention_backward.default, ops.mark_sharding.default)


def graph_as_hlo(step: StepGraph) -> HloStep:
    """The same step as a function of global arrays.

    Args:
        step: global along all axes.

    Raises:
        LoweringError: an operator has no rule.
    """
    check(step)
    items = dict(zip(step.placeholders, step.inputs))
    calls = {node: _whole_call(node) for node in step.graph.nodes if node.target in _WHOLE}
    gradients = _gradients(step)

    def function(arrays: Sequence[jax.Array], support: Support) -> list[jax.Array]:
        gathered = {node: support.gather(item, array) for (node, item), array in zip(items.items(), arrays, strict=True) if item.kind is Kind.PARAM}

        def run(node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
            read: Mapping[torch.fx.Node, Any] = env if node.meta["phase"] is Phase.UPDATE else collections.ChainMap(gathered, env)
            if node in calls:
                results = support.call(calls[node], [read[operand] for operand in _operands(node)])
                value: Any = tuple(results) if isinstance(node.meta["val"], (tuple, list)) else results[0]
            else:
                value = run_node(node, read)
            return support.constrain((Kind.GRAD, gradients[node]), value) if node in gradients else value

        with x64():
            results: Any = run_graph(step.graph, arrays, run)
        return list(results)

    links = (Output(kind=Kind.GRAD, target=name, shape=tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node, name in gradients.items())
    return HloStep(
        function=function,
        inputs=step.inputs,
        outputs=step.outputs,
        num_operators=len(step.graph.nodes),
        constants=step.constants,
        links=tuple(links),
        calls=tuple(calls.values()),
        unread=frozenset(node.name for node in step.placeholders if not node.users),
    )


def _whole_call(node: torch.fx.Node) -> WholeCall:
    def as_operand(operand: torch.fx.Node) -> Any:
        return Operand(operand.meta["val"].dtype)

    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    return WholeCall(
        operator=str(node.target),
        arguments=tuple(torch.fx.map_arg(node.args, as_operand)),
        results=tuple((tuple(value.shape), value.dtype) for value in results),
        module_path=node.meta.get("module_path") or "",
        stack_trace=node.meta.get("stack_trace") or "",
    )


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operands of a whole call, one for each place: a node may be read twice."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(node.args, found.append)
    return found


def _gradients(step: StepGraph) -> dict[torch.fx.Node, str]:
    """What the update of a whole step reads as the gradient of a parameter -> that parameter."""
    updated = {node: item.target for node, item in zip(step.results, step.outputs) if item.kind is Kind.PARAM}
    found: dict[torch.fx.Node, str] = {}
    for node in step.graph.nodes:
        if node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD and isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim():
            owners = _updated_by(node, updated)
            if len(owners) == 1 and owners[0] not in found.values():
                found[node] = owners[0]
    return found


def _updated_by(gradient: torch.fx.Node, updated: Mapping[torch.fx.Node, str]) -> list[str]:
    """The parameters whose new values follow from a value by calls of the update on tensors of its shape."""
    shape, seen, work, owners = gradient.meta["val"].shape, {gradient}, [gradient], []
    while work:
        for user in work.pop().users:
            value = user.meta.get("val")
            if user in seen or user.op != "call_function" or user.meta["phase"] is not Phase.UPDATE or not isinstance(value, torch.Tensor) or value.shape != shape:
                continue
            seen.add(user)
            work.append(user)
            owners += [updated[user]] if user in updated else []
    return owners
