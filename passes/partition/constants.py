"""Recognising values by their making."""

import torch.fx

from graphacc.ops.facts import LAYOUT_KINDS, OpKind, fill_value, of_kind

_SAME = of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.EXPAND, OpKind.PART)


def is_zero(node: torch.fx.Node) -> bool:
    """The value is zeros, by its making."""
    while node.target in _SAME:
        node = node.args[0]
    return fill_value(node.target, node.args) == 0
