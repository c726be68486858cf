"""Recognising values by their making."""

import torch
import torch.fx

aten = torch.ops.aten
_SAME = (
    aten.expand.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILL_VALUE = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}


def is_zero(node: torch.fx.Node) -> bool:
    """The value is zeros, by its making."""
    while node.target in _SAME:
        node = node.args[0]
    if node.target in _FILL_VALUE:
        return node.args[_FILL_VALUE[node.target]] == 0
    return node.target in _ZEROS
