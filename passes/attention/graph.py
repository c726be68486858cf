"""Editing a graph in place: nodes with fake values, chains of single users."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphacc._compat.torch_ import fake_mode

aten = torch.ops.aten


class Editor:
    """Inserts calls in front of a node, from which they take phase, module and source line."""

    def __init__(self, graph: fx.Graph, before: fx.Node):
        self.graph, self.before = graph, before

    def __call__(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self.before.meta.items() if key != "val"}
        values, named = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
        with fake_mode(), torch.no_grad():
            node.meta["val"] = target(*values, **named)
        return node

    def view(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """`x` in another shape, made dense first where strides forbid a view."""
        if list(x.meta["val"].shape) == shape:
            return x
        if not x.meta["val"].is_contiguous():
            x = self(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self(aten.view.default, x, shape)


def shape_of(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def items(node: fx.Node) -> dict[int, fx.Node]:
    """Index -> the getitem of a node with several results."""
    return {user.args[1]: user for user in node.users}
