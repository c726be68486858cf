"""How much of a region is kept for backward: variants from everything to nothing but what the region reads."""

from collections.abc import Callable

import torch
import torch.fx

from graphacc.costs.work import node_work
from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.stages.values import VIEWS

aten = torch.ops.aten

_CHEAP = VIEWS | of_kind(OpKind.RANDOM) | {aten.constant_pad_nd.default, aten.full.default}


def _is_product(node: torch.fx.Node) -> bool:
    return node_work(node).flops > 0


def _is_dear(node: torch.fx.Node) -> bool:
    """Whether a call is more than an element-wise operator, which compilers fuse with what reads it."""
    return node.target not in _CHEAP and torch.Tag.pointwise not in getattr(node.target, "tags", ())


VARIANTS: dict[str, Callable[[torch.fx.Node], bool]] = {
    "all": lambda node: True,
    "cheap": _is_dear,
    "products": _is_product,
    "inputs": lambda node: False,
}
"""Name -> whether a call of the region is kept: everything; all but what is element by element; products, convolutions and attention; nothing."""
