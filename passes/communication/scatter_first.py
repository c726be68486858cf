"""A gradient is scattered over `fsdp` before it is summed over another axis, which then sums a rank's part and not the whole.

The partition along `tp` comes before those that ZeRO scatters along, so that ranks which have the same weights and other tokens, or other heads, sum the
whole gradient first. Sums over two axes may be taken in either order:

    g [n] -> all-reduce over tp [n]             -> reduce-scatter over fsdp [n]
    g [n] -> reduce-scatter over fsdp [n]       -> all-reduce over tp [n / fsdp]

as the ranks of `dp` have it already, and behind the scatters over `cp` and `ep` as well, where there are some. What stands
between the two (casts to more bits, other layouts, padding) is linear, and stays in front of the scatter.
"""

import dataclasses

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.communication.buckets import REDUCE, SCATTER
from graphacc.passes.edit import Editor, only_user
from graphacc.passes.partition.axis import verify_collectives
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import CASTS, VIEWS

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ORDER = of_kind(OpKind.ORDER)
_LINEAR = VIEWS | {aten.constant_pad_nd.default}


def scatter_first(step: StepGraph, log: Log) -> StepGraph:
    """Rewrite every scatter of a gradient that was summed over another axis, and is not read as such a sum. What waited for the sum waits for what is summed."""
    for scatter in [node for node in step.graph.nodes if node.target is SCATTER and node.meta["move"].role is Role.GRADIENT]:
        (value,) = scatter.all_input_nodes
        part = only_user(scatter)
        if part is None or _reader(value) is not scatter:
            continue
        for sums in sums_in_front_of(value):
            _sum_behind(step, part, sums)
            log.rewrote()
    return step


def sums_in_front_of(gradient: torch.fx.Node, *, scattered: bool = False) -> list[torch.fx.Node]:
    """The sums of a gradient over mesh axes, the last one first, that nothing reads but what makes `gradient`.

    Args:
        scattered: also those in front of a scatter over another axis, behind which they are made.
    """
    found, node = [], gradient
    while node.op == "call_function" and (node is gradient or _reader(node) is not None):
        if node.target is _WAIT:
            sums = node.all_input_nodes[0]
            if scattered and sums.target is SCATTER:
                node = sums.all_input_nodes[0]
                continue
            if sums.target is not REDUCE or sums.meta["move"].role is not Role.GRADIENT or sums.args[1] != "sum" or only_user(sums) is None:
                break
            found.append(sums)
            node = sums
        elif node.target not in _LINEAR or len(node.all_input_nodes) != 1 or not _is_linear(node):
            break
        node = node.all_input_nodes[0]
    return found


def _reader(value: torch.fx.Node) -> torch.fx.Node | None:
    """The only call that computes with a value; others may wait for it."""
    readers = [user for user in value.users if not (user.target in _ORDER and user.all_input_nodes[0] is not value)]
    return readers[0] if len(readers) == 1 else None


def _is_linear(node: torch.fx.Node) -> bool:
    """Whether a copy, cast or padding of a sum is the sum of such."""
    if node.target is aten.constant_pad_nd.default:
        return node.args[2:] in ((), (0,), (0.0,))
    return node.target not in CASTS or _keeps_bits(node)


def _keeps_bits(cast: torch.fx.Node) -> bool:
    before, after = cast.all_input_nodes[0].meta["val"].dtype, cast.meta["val"].dtype
    return before == after or (before.is_floating_point and after.is_floating_point and torch.finfo(after).eps < torch.finfo(before).eps)


def _sum_behind(step: StepGraph, part: torch.fx.Node, sums: torch.fx.Node) -> None:
    """Sum a rank's `part` over the axis of `sums`, in its place."""
    summed = only_user(sums)
    assert summed is not None, f"{sums.name} has several readers"
    value = part.meta["val"]
    edit = Editor(step.graph, part.next, like=part)
    new = edit(REDUCE, part, *sums.args[1:])
    new.meta["move"] = dataclasses.replace(sums.meta["move"], size_bytes=size_bytes(tuple(value.shape), value.dtype))
    done = edit(_WAIT, new)
    part.replace_all_uses_with(done, delete_user_cb=lambda user: user is not new)
    summed.replace_all_uses_with(sums.all_input_nodes[0])
    step.graph.erase_node(summed)
    step.graph.erase_node(sums)


SCATTER_FIRST = Pass(name="scatter-first", exact=False, optional=True, run=scatter_first, verify=verify_collectives)
