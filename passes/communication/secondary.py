"""ZeRO++'s secondary partition (hpZ): the backward gathers weights within a node.

Wang et al., "ZeRO++", 2023, section 3.2. Under ZeRO-3 a weight is gathered over all ranks for the forward and again for the backward, each
time across nodes. Here the forward gathers in two steps, in n nodes of g consecutive ranks; rank = node * g + place:

    forward    part [p] -> gather over the ranks with this place in their nodes [n * p] = the secondary partition
               -> gather over the node [g, n, p] -> the whole [n, g, p]
    backward   after(secondary partition, gradient) -> gather over the node -> the whole

so that each part crosses nodes once in a step, and no more than in one gather. Together a node's ranks keep the whole from forward to backward: each the
bytes of the weight divided by g, and if gathers are quantised, of its codes. The secondary partition is a value of the step and no state: a
stale one cannot exist. The whole has the bits that one gather over all ranks gives.

It is not cut out of the whole: XLA moves such a cut to the backward, and keeps the whole until then. What two steps cost is a copy that brings the
node's parts into the order of the ranks; where gathers are quantised, that is part of the dequantisation.
"""

import dataclasses
from typing import Any

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import Phase, StepGraph
from graphacc.ops.mesh import split_group
from graphacc.passes.edit import Editor
from graphacc.passes.partition.axis import verify_collectives
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import Log, Pass
from graphacc.strategy.axes import FSDP

collective, own, aten = torch.ops._c10d_functional, torch.ops.graphacc, torch.ops.aten
GATHER = collective.all_gather_into_tensor.default


@dataclasses.dataclass
class SecondaryReport:
    """What the backward gathers within groups."""

    group: int
    count: int = 0  # gathers of the backward
    gathered_bytes: int = 0  # whole tensors, by these
    kept_bytes: int = 0  # by one rank from forward to backward
    left: int = 0  # gathers of the backward over all ranks
    left_bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.count} gathers of the backward within groups of {self.group}, {self.gathered_bytes} bytes, out of {self.kept_bytes} kept by a rank"
        return text + (f"; {self.left} over all ranks, {self.left_bytes} bytes: the forward gathers them in no form, or in another dtype" if self.left else "")


def secondary_partition_pass(group: int) -> Pass:
    """Weights that forward and backward gather over `fsdp` are gathered in the backward over `group` consecutive ranks."""

    def run(step: StepGraph, log: Log) -> StepGraph:
        log.details = report = SecondaryReport(group)
        forward, backward = _gathers(step)
        for made, gathers in backward.items():
            size = sum(map(_bytes, gathers))
            if made not in forward:
                report.left, report.left_bytes = report.left + len(gathers), report.left_bytes + size
                continue
            first = forward[made]
            secondary = _across_nodes(step, first, group)
            _within_node(step, first, secondary, None, group)
            for node in gathers:
                _within_node(step, node, secondary, _made(node.all_input_nodes[0])[1], group)
            report.count, report.gathered_bytes = report.count + len(gathers), report.gathered_bytes + size
            report.kept_bytes += _bytes(secondary)
            log.rewrote(len(gathers))
        return step

    return Pass(name="secondary-partition", exact=True, optional=True, run=run, verify=_verify, key=("secondary-partition", group))


def is_across_nodes(node: torch.fx.Node) -> bool:
    """Whether a gather makes a secondary partition, which is kept until the backward anyway."""
    return node.target is GATHER and split_group(str(node.args[-1]))[1] == "%"


def _gathers(step: StepGraph) -> tuple[dict[Any, torch.fx.Node], dict[Any, list[torch.fx.Node]]]:
    """How the operand is made -> the first gather of a weight over `fsdp` in the forward; all those in the backward."""
    forward: dict[Any, torch.fx.Node] = {}
    backward: dict[Any, list[torch.fx.Node]] = {}
    for node in step.graph.nodes:
        if node.target is GATHER and node.args[-1] == FSDP and node.meta["move"].role is Role.WEIGHT:
            made, _ = _made(node.all_input_nodes[0])
            if node.meta["phase"] is Phase.FORWARD:
                forward.setdefault(made, node)
            elif node.meta["phase"] is Phase.BACKWARD:
                backward.setdefault(made, []).append(node)
    return forward, backward


def _made(value: torch.fx.Node) -> tuple[Any, torch.fx.Node | None]:
    """How a value is made of one input alone, ordering edges left out, as a key (itself, if otherwise); and what it waits for."""
    start, calls, anchor = value, [], None
    while value.op == "call_function":
        if value.target is own.after.default:
            value, anchor = value.all_input_nodes  # two: a value does not wait for itself
            continue
        if len(value.all_input_nodes) != 1:
            return start, None
        arguments = torch.fx.map_arg((value.args, value.kwargs), lambda _: None)
        calls.append((value.target, repr(arguments)))
        value = value.all_input_nodes[0]
    return (value, *calls), anchor


def _bytes(node: torch.fx.Node) -> int:
    return size_bytes(tuple(node.meta["val"].shape), node.meta["val"].dtype)


def _across_nodes(step: StepGraph, node: torch.fx.Node, group: int) -> torch.fx.Node:
    """The secondary partition of what a gather is given."""
    source, ranks, axis = _arguments(node)
    edit = Editor(step.graph, node)
    gathered = edit(GATHER, source, ranks // group, f"{axis}%{group}")
    gathered.meta["move"] = dataclasses.replace(node.meta["move"], axis=f"{axis}%{group}", size_bytes=_bytes(gathered))
    return edit(collective.wait_tensor.default, gathered)


def _within_node(step: StepGraph, node: torch.fx.Node, secondary: torch.fx.Node, anchor: torch.fx.Node | None, group: int) -> None:
    """A gather over all ranks becomes one of secondary partitions over the node, not before `anchor` exists."""
    _, ranks, axis = _arguments(node)
    edit = Editor(step.graph, node)
    source = secondary if anchor is None else edit(own.after.default, secondary, anchor)
    gathered = edit(GATHER, source, group, f"{axis}/{group}")
    gathered.meta["move"] = dataclasses.replace(node.meta["move"], axis=f"{axis}/{group}")
    parts = edit.view(edit(collective.wait_tensor.default, gathered), [group, ranks // group, gathered.meta["val"].numel() // ranks])
    (waited,) = node.users
    waited.replace_all_uses_with(edit.view(edit(aten.permute.default, parts, [1, 0, 2]), list(node.meta["val"].shape)))
    step.graph.erase_node(waited)
    step.graph.erase_node(node)


def _arguments(node: torch.fx.Node) -> Any:
    """Operand, number of ranks and group of a gather."""
    return node.args


def _verify(step: StepGraph) -> None:
    """No weight that the forward gathers over all of `fsdp` is gathered so again."""
    verify_collectives(step)
    forward, backward = _gathers(step)
    for made, gathers in backward.items():
        if made in forward:
            raise GraphError(f"gather {gathers[0].name!r} of the backward crosses nodes, although the forward gathers the same: it has a secondary partition")
