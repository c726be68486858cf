"""The pass: every value of routed rows is computed in the order, of tokens or of experts, in which the fewest bytes change their order.

Products of experts need rows sorted by expert. What is done row by row around them, such as a mixture's weighting of what its experts give, can be done
in either order, since ``f(sort(x)) = sort(f(x))``. Models do it wherever it was easiest to write: Mixtral's weights multiply sorted rows, and widen
them to the weights' dtype before they are put back. Under `ep` a change of order is an exchange between ranks, and sorted rows take the room of all
rows that a rank may be sent; on one device it is a copy.

Which order is a minimum cut (networkx): the values that products make or read lie on one side, the values that anything else makes or reads on the
other, and a value that is made on one side and read on the other costs its bytes, once. Mixtral in bf16 sends 8 bytes an element of its rows
in forward and backward so, and 12 as it is written. Results stay the same bit for bit.

Legend: M rows.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import fx

from graphacc.graph import StepGraph
from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.passes.edit import Editor, infer, shape_of
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.runner import Log, Pass

aten, ops = torch.ops.aten, torch.ops.graphacc
_SORT, _UNSORT = ops.sort_rows.default, ops.unsort_rows.default
_ALONG_DIMS = of_kind(OpKind.PART) | {aten.cat.default, aten.sum.dim_IntList, aten.mean.dim}
"""Operators that keep rows apart unless they work along dim 0; their second argument is the dim, or dims."""
_LOOKUPS = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.embedding.default)
"""Operators that look up what is at each index along dim 0 of a table."""
_KEEPS_ROWS = frozenset({OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.SQUEEZE})
"""Kinds of operators whose results have the rows of their operands, where they have as many."""


class _Order(enum.Enum):
    """Of the rows of a value."""

    SORTED = "by expert"
    TOKENS = "as the tokens come"


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a node holds: the rows of a value, which is the same in either order."""

    value: fx.Node
    order: _Order


class _Use(NamedTuple):
    user: fx.Node
    operand: fx.Node
    held: _Held


class _Routing:
    """The values of rows with the same ids, and who reads them."""

    def __init__(self, ids: fx.Node, turns: Sequence[fx.Node]):
        """`turns`: the sorts by these ids, and their inverses."""
        self.ids = ids
        self.held: dict[fx.Node, _Held] = {}
        self.made: dict[fx.Node, _Order] = {}  # values that can be made in one order alone
        self.uses: list[_Use] = []
        for node in sorted(self._readers(turns)):
            self._read(node, node.all_input_nodes)

    @property
    def values(self) -> dict[fx.Node, _Order]:
        """Value -> the order in which it is made now."""
        return {node: held.order for node, held in self.held.items() if held.value is node}

    def is_free(self, node: fx.Node) -> bool:
        return node in self.held and self.held[node].value is node and node not in self.made

    def _readers(self, turns: Sequence[fx.Node]) -> set[fx.Node]:
        """The calls that may read rows of this routing: of what is turned, and of what follows with as many rows."""
        found, left = set(turns), [*turns, *(turn.all_input_nodes[0] for turn in turns)]
        while left:
            for user in left.pop().users:
                if user not in found:
                    found.add(user)
                    value = user.meta.get("val")
                    if isinstance(value, torch.Tensor) and value.shape[:1] == self.ids.meta["val"].shape:
                        left.append(user)
        return found

    def _read(self, node: fx.Node, operands: list[fx.Node]) -> None:
        if node.target in (_SORT, _UNSORT) and _ids_of(node) is self.ids and self._turns(node):
            return
        read = [_Use(node, operand, self.held[operand]) for operand in operands if operand in self.held]
        if not read:
            return
        self.uses += read
        orders = {use.held.order for use in read}
        if node.target is ops.grouped_mm.default and orders == {_Order.SORTED} and operands[0] in self.held:
            self._make(node, _Order.SORTED)
        elif len(orders) == 1 and self._is_row_by_row(node):
            self.held[node] = _Held(node, *orders)

    def _turns(self, node: fx.Node) -> bool:
        """Whether a sort, or its inverse, gives a value that is known in the other order."""
        rows = node.all_input_nodes[0]
        before, after = (_Order.TOKENS, _Order.SORTED) if node.target is _SORT else (_Order.SORTED, _Order.TOKENS)
        if rows not in self.held and rows.meta["val"].is_contiguous():
            self._make(rows, before)
        if rows not in self.held or self.held[rows].order is not before:
            return False
        self.held[node] = _Held(self.held[rows].value, after)
        return True

    def _make(self, node: fx.Node, order: _Order) -> None:
        self.held[node], self.made[node] = _Held(node, order), order

    def _is_row_by_row(self, node: fx.Node) -> bool:
        """Whether every row of a result is computed of the same row of each operand that has rows, and of nothing else that has any."""
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.shape[:1] != self.ids.meta["val"].shape:
            return False
        if node.target in _ALONG_DIMS:
            dims = _listed(node.args[1] if len(node.args) > 1 else 0)
            rank = len(shape_of(node.all_input_nodes[0]))
            return bool(dims) and all(isinstance(dim, int) and dim % rank for dim in dims) and self.held.keys() >= set(node.all_input_nodes)
        if node.target in _LOOKUPS:
            table, *others = node.all_input_nodes
            return table not in self.held and _listed(node.args[1])[:1] == others
        if facts(node.target).kind in _KEEPS_ROWS:
            return shape_of(node.all_input_nodes[0])[:1] == shape_of(self.ids)
        if node.target is not aten.expand.default and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return False
        return all(self._fits(operand, value) for operand in node.all_input_nodes)

    def _fits(self, operand: fx.Node, result: torch.Tensor) -> bool:
        """Whether an operand has the rows of a result along the same dim, or is the same for all of them."""
        given = operand.meta["val"]
        return given.dim() == result.dim() if operand in self.held else given.dim() < result.dim() or given.shape[0] == 1


def _ids_of(turn: fx.Node) -> fx.Node:
    return turn.all_input_nodes[-1]


def _listed(argument: object) -> list:
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def order_rows(step: StepGraph, log: Log) -> StepGraph:
    """Choose the order of every value of every routing, of one after the other: they may have values in common."""
    for ids in dict.fromkeys(_ids_of(node) for node in step.graph.nodes if node.target in (_SORT, _UNSORT)):
        if len(shape_of(ids)) != 1 or shape_of(ids) == [1]:
            continue
        routing = _Routing(ids, [node for node in ids.users if node.target in (_SORT, _UNSORT) and _ids_of(node) is ids])
        chosen = _cheapest(routing)
        if _turned_bytes(routing, chosen) < _turned_bytes(routing, routing.values):
            _write(step, routing, chosen)
            log.rewrote()
    return step


ORDER_ROWS = Pass(name="order-rows", exact=True, optional=True, run=order_rows)


def _turned_bytes(routing: _Routing, orders: Mapping[fx.Node, _Order]) -> int:
    """Bytes of all values that are read in the order in which they are not made."""
    turned = {use.held.value for use in routing.uses if _wanted(routing, use, orders) is not orders[use.held.value]}
    return sum(_size_bytes(value) for value in turned)


def _size_bytes(value: fx.Node) -> int:
    return size_bytes(tuple(shape_of(value)), value.meta["val"].dtype)


def _wanted(routing: _Routing, use: _Use, orders: Mapping[fx.Node, _Order]) -> _Order:
    return orders[use.user] if routing.is_free(use.user) else use.held.order


def _cheapest(routing: _Routing) -> dict[fx.Node, _Order]:
    """The order of every value for which the fewest bytes change theirs; of equals, that with the fewest sorted ones."""
    import networkx  # it takes a fifth of a second, and most models have no experts

    network = networkx.DiGraph()  # what flows from tokens to experts; an edge without a capacity is not cut
    network.add_nodes_from(_Order)
    for value, order in routing.made.items():
        network.add_edge(*((value, _Order.SORTED) if order is _Order.SORTED else (_Order.TOKENS, value)))
    for use in routing.uses:
        value, size = use.held.value, _size_bytes(use.held.value)
        user = use.user if routing.is_free(use.user) else use.held.order
        network.add_edge(value, (value, "sorted"), capacity=size)
        network.add_edge((value, "sorted"), user)
        network.add_edge(user, (value, "put back"))
        network.add_edge((value, "put back"), value, capacity=size)
    _, (_, by_expert) = networkx.minimum_cut(network, _Order.TOKENS, _Order.SORTED)  # the nodes from which flow could still reach the end: the smallest such side
    return {value: _Order.SORTED if value in by_expert else _Order.TOKENS for value in routing.values}


def _write(step: StepGraph, routing: _Routing, orders: Mapping[fx.Node, _Order]) -> None:
    """Every user reads the order that it wants; a value that some read in its other order is turned in front of the first of them."""
    turned: dict[fx.Node, fx.Node] = {}
    for user, group in itertools.groupby(routing.uses, key=lambda use: use.user):
        uses, new = list(group), {}
        edit = Editor(step.graph, user, like=uses[0].held.value if user.op == "output" else None)
        for use in uses:
            value, wanted = use.held.value, _wanted(routing, use, orders)
            if wanted is not orders[value] and value not in turned:
                turned[value] = edit(_SORT if wanted is _Order.SORTED else _UNSORT, value, routing.ids)
            read = value if wanted is orders[value] else turned[value]
            if use.operand.meta["val"].is_contiguous() and not read.meta["val"].is_contiguous():
                read = edit(aten.clone.default, read, memory_format=torch.contiguous_format)
            new[use.operand] = read
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: new.get(node, node))
        if routing.is_free(user):
            user.meta["val"] = infer(cast(Callable, user.target), user.args, user.kwargs)
    for node in reversed([node for node, held in routing.held.items() if held.value is not node]):
        if not node.users:  # what it turns may be in its other order now
            step.graph.erase_node(node)
