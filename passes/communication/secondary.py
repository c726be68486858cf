"""ZeRO++'s secondary partition (hpZ): the backward gathers weights within a node.

Wang et al., "ZeRO++", 2023, section 3.2. Under ZeRO-3 a weight is gathered over all ranks for the forward and again for the backward. Here
each rank keeps, from one to the other, its part of what the forward gathered, cut for a group of consecutive ranks; the backward gathers
that within the group, so that no weight crosses nodes twice:

    forward    part [n] -> gather over fsdp [ranks * n] -> the whole, and a cut of it for the group: [ranks * n / group]
    backward   after(cut, gradient) -> gather over the group [ranks * n] -> the whole

The secondary partition is a value of the step and no state: a stale one cannot exist. The whole has the same bits as a gather over all ranks
gives. It costs the bytes of a gathered weight divided by the group, on every rank; if gathers are quantised, of its codes.
"""

import dataclasses
from typing import Any

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import Phase, StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.partition.axis import verify_collectives
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import Log, Pass

collective, own = torch.ops._c10d_functional, torch.ops.graphacc
GATHER = collective.all_gather_into_tensor.default


@dataclasses.dataclass
class SecondaryReport:
    """What the backward gathers within groups."""

    group: int
    count: int = 0  # gathers
    kept_bytes: int = 0  # by one rank from forward to backward
    gathered_bytes: int = 0  # whole tensors
    left: int = 0  # gathers of the backward over all ranks: of what the forward does not gather in this form
    left_bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.count} gathers of the backward within groups of {self.group}, {self.gathered_bytes} bytes, out of {self.kept_bytes} kept by a rank"
        return text + (f"; {self.left} over all ranks, {self.left_bytes} bytes: the forward gathers them in no form, or in another dtype" if self.left else "")


def secondary_partition_pass(group: int) -> Pass:
    """Gathers of weights in the backward, over `fsdp`, become gathers over `group` consecutive ranks."""

    def run(step: StepGraph, log: Log) -> StepGraph:
        log.details = report = SecondaryReport(group)
        forward: dict[Any, torch.fx.Node] = {}  # how the operand is made -> the gather
        cuts: dict[torch.fx.Node, torch.fx.Node] = {}  # gather of the forward -> this rank's part for its group
        for node in list(step.graph.nodes):
            if node.target is not GATHER or node.args[-1] != "fsdp" or node.meta["move"].role is not Role.WEIGHT:
                continue
            made, anchor = _made(node.all_input_nodes[0])
            if made is not None and node.meta["phase"] is Phase.FORWARD:
                forward.setdefault(made, node)
            elif made is not None and node.meta["phase"] is Phase.BACKWARD:
                if made in forward:
                    source = forward[made]
                    if source not in cuts:
                        cuts[source] = _cut(step, source, group)
                        report.kept_bytes += _bytes(cuts[source])
                    _gather_again(step, node, cuts[source], anchor, group)
                    report.count, report.gathered_bytes = report.count + 1, report.gathered_bytes + _bytes(node)
                    log.rewrote()
                else:
                    report.left, report.left_bytes = report.left + 1, report.left_bytes + _bytes(node)
        return step

    return Pass(name="secondary-partition", exact=True, optional=True, run=run, verify=_verify, key=("secondary-partition", group))


def is_secondary(node: torch.fx.Node) -> bool:
    """Whether a node is a secondary partition."""
    return bool(node.meta.get("secondary"))


def _made(value: torch.fx.Node) -> tuple[Any, torch.fx.Node | None]:
    """How a value is made of one input alone, ordering edges left out, as a key (None: it is made otherwise); and what it waits for."""
    calls, anchor = [], None
    while value.op == "call_function":
        if value.target is own.after.default:
            value, anchor = value.all_input_nodes  # two: a value does not wait for itself
            continue
        if len(value.all_input_nodes) != 1:
            return None, None
        source = value.all_input_nodes[0]
        arguments = torch.fx.map_arg((value.args, value.kwargs), lambda _: None)
        calls.append((value.target, repr(arguments)))
        value = source
    return (value, *calls), anchor


def _bytes(node: torch.fx.Node) -> int:
    return size_bytes(tuple(node.meta["val"].shape), node.meta["val"].dtype)


def _cut(step: StepGraph, gather: torch.fx.Node, group: int) -> torch.fx.Node:
    """This rank's part of what was gathered, right behind the gather."""
    (waited,) = gather.users
    edit = Editor(step.graph, waited.next, like=gather)
    cut = edit(own.shard.default, waited, 0, 1, group, f"fsdp/{group}")
    cut.meta["secondary"] = True
    return cut


def _gather_again(step: StepGraph, node: torch.fx.Node, cut: torch.fx.Node, anchor: torch.fx.Node | None, group: int) -> None:
    edit = Editor(step.graph, node)
    source = cut if anchor is None else edit(own.after.default, cut, anchor)
    gathered = edit(GATHER, source, group, f"fsdp/{group}")
    gathered.meta["move"] = dataclasses.replace(node.meta["move"], axis=f"fsdp/{group}")
    (waited,) = node.users
    waited.replace_all_uses_with(edit(collective.wait_tensor.default, gathered))
    step.graph.erase_node(waited)
    step.graph.erase_node(node)


def _verify(step: StepGraph) -> None:
    """No weight that the forward gathers over all of `fsdp` is gathered so again."""
    verify_collectives(step)
    forward = set()
    for node in step.graph.nodes:
        if node.target is GATHER and node.args[-1] == "fsdp" and node.meta["move"].role is Role.WEIGHT:
            made, _ = _made(node.all_input_nodes[0])
            if node.meta["phase"] is Phase.FORWARD:
                forward.add(made)
            elif node.meta["phase"] is Phase.BACKWARD and made is not None and made in forward:
                raise GraphError(f"gather {node.name!r} of the backward crosses groups, although the forward gathers the same: it has a secondary partition")
