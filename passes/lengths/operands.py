"""What the rules ask of operators and layouts."""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from graphacc.passes.lengths.layout import Layout, Length, joined


def dim_of(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def require(condition: object, why: str) -> None:
    if not condition:
        raise ValueError(why)


def operands(node: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def known(layout: Layout) -> Layout:
    """With one reading for dims of constants."""
    return tuple(None if item is None else item.known() for item in layout)


def arguments(node: Any) -> list[Any]:
    """All arguments of an operator in the order of its schema, with its defaults."""
    given = [*node.args, *(node.kwargs.get(item.name, item.default_value) for item in node.target._schema.arguments[len(node.args) :])]
    return [item for item, argument in zip(given, node.target._schema.arguments, strict=True) if not argument.kwarg_only]


def joined_layouts(layouts: Sequence[Layout]) -> Layout:
    """Of tensors that are broadcast together."""
    rank = max(map(len, layouts), default=0)
    found: list[Length | None] = [None] * rank
    for layout in layouts:
        for dim, item in enumerate(layout, start=rank - len(layout)):
            found[dim] = joined(found[dim], item)
    return tuple(found)
