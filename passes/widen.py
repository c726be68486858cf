"""Gradients that are computed in half precision, and sent in fp32, come in fp32 from the product that sums them.

Under mixed precision autograd casts the gradient of every parameter. Where ranks sum them, the product's fp32 sums are rounded, written, read again, and written
in fp32 for the message: 8 bytes for each parameter where 4 do, and half as much memory again for the largest gradient. A table's gradient is summed in fp32 as
well. Where nothing is sent the update casts what it reads, and narrow gradients take half the memory.
"""

import torch
import torch.fx

from graphacc.graph import Phase, StepGraph
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind
from graphacc.passes.edit import Editor
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import CASTS

aten = torch.ops.aten
_VIEWS = of_kind(*LAYOUT_KINDS, OpKind.PART)
_NARROW = (torch.bfloat16, torch.float16)


def widen_gradients(step: StepGraph, log: Log) -> StepGraph:
    """Rewrite products and gradients of lookups that nothing reads but casts to fp32 for messages."""
    for node in list(step.graph.nodes):
        if node.op != "call_function" or node.meta["phase"] is not Phase.BACKWARD or node.target not in (aten.mm.default, aten.embedding_dense_backward.default):
            continue
        if node.meta["val"].dtype in _NARROW and _is_cast(node):
            edit = Editor(step.graph, node)
            if node.target is aten.mm.default:
                wide = edit(torch.ops.graphacc.wide_mm.default, *node.args)
            else:
                wide = edit(node.target, edit(aten._to_copy.default, node.args[0], dtype=torch.float32), *node.args[1:])
            _replace(step, node, wide)
            log.rewrote()
    return step


def _is_cast(node: torch.fx.Node) -> bool:
    """Whether all readers of a value, in this layout or another one, are casts to fp32; that something waits for it counts as none."""
    readers = [user for user in node.users if not _waits_for(user, node)]
    return bool(readers) and all(
        user.op == "call_function"
        and ((user.target in CASTS and user.meta["val"].dtype is torch.float32 and _is_sent(user)) or (user.target in _VIEWS and _is_cast(user)))
        for user in readers
    )


def _is_sent(node: torch.fx.Node) -> bool:
    """Whether a value is stored in any case, for messages."""
    return bool(node.users) and all("move" in user.meta or (user.target in _VIEWS and _is_sent(user)) for user in node.users)


def _waits_for(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    return user.target is torch.ops.graphacc.after.default and user.all_input_nodes[0] is not node


def _replace(step: StepGraph, node: torch.fx.Node, wide: torch.fx.Node) -> None:
    """Let the readers of `node` read `wide`, which is it in fp32."""
    for user in list(node.users):
        if _waits_for(user, node):
            user.replace_input_with(node, wide)
        elif user.target in CASTS:
            user.replace_all_uses_with(wide)
            step.graph.erase_node(user)
        else:
            assert callable(user.target)
            _replace(step, user, Editor(step.graph, user)(user.target, wide, *user.args[1:], **user.kwargs))
    step.graph.erase_node(node)


WIDEN_GRADIENTS = Pass(name="widen-gradients", exact=False, optional=True, run=widen_gradients)
