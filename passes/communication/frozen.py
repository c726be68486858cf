"""Weights that nothing trains (under LoRA, in a reference model) are kept as codes: quantised once, when they are uploaded.

Where gathers of weights are quantised, the message of a frozen weight is the same in every step. So the program reads the message of this
rank's part in the place of the part, which takes a quarter of its memory (an eighth with 4 bits), and nothing is quantised in a step:

    part [n] -> quantize -> gather ...     becomes     message -> gather ...

The loop's own tensor on the host stays exact: checkpoints are, and training it later starts from what it was.
"""

import dataclasses
from collections.abc import Collection, Iterable

import torch
import torch.fx

from graphacc.graph import Codes, Input, Kind, MeshShard, StepGraph
from graphacc.ops.facts import OpKind, of_kind
from graphacc.ops.quantize import message_bytes
from graphacc.passes.edit import Editor
from graphacc.passes.partition.placement import size_bytes

own, aten = torch.ops.graphacc, torch.ops.aten
_ON_THE_WAY = of_kind(OpKind.CAST, OpKind.RESHAPE, OpKind.ORDER)
"""What may stand between a weight's part and its gather: nothing that changes the order of its elements."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frozen:
    """Parameters that nothing trains, and the bits of their codes."""

    names: frozenset[str] = frozenset()
    bits: int = 8


class KeptCodes:
    """The frozen weights of one step that are read by quantised gathers alone, as inputs of codes.

    Args:
        gathers: those that will be quantised.
    """

    def __init__(self, step: StepGraph, frozen: Frozen, gathers: Collection[torch.fx.Node], block: int):
        self.step, self.bits, self.block = step, frozen.bits, block
        self.bytes_before = self.bytes_after = 0  # of the weights, on one rank
        self._inputs = {
            node: i
            for i, (node, item) in enumerate(zip(step.placeholders, step.inputs))
            if item.kind is Kind.PARAM and item.target in frozen.names and item.target not in step.constants and _only_gathered(node, gathers)
        }
        self._rows: dict[torch.fx.Node, torch.fx.Node] = {}  # placeholder -> the message as a row

    @property
    def count(self) -> int:
        return len(self._rows)

    def message(self, edit: Editor, source: torch.fx.Node) -> torch.fx.Node | None:
        """The kept message of what a gather is given, not before what that waits for; None if it is not kept."""
        node, anchor = _root(source)
        if node not in self._inputs:
            return None
        if node not in self._rows:
            self._rows[node] = self._row(node)
        row = self._rows[node]
        return row if anchor is None else edit(own.after.default, row, anchor)

    def _row(self, node: torch.fx.Node) -> torch.fx.Node:
        """The placeholder becomes that of the message; behind it, its one row."""
        before, item = node.meta["val"], self.step.inputs[self._inputs[node]]
        shape = (*(1 for _ in item.shards), message_bytes(before.numel(), self.bits, self.block))
        readers = list(node.users)
        node.meta["val"] = before.new_empty(shape, dtype=torch.uint8)
        row = Editor(self.step.graph, node.next, like=readers[0])(aten.view.default, node, [shape[-1]])
        inputs = list(self.step.inputs)
        inputs[self._inputs[node]] = _as_codes(item, shape[-1], self.bits, self.block)
        self.step = dataclasses.replace(self.step, inputs=tuple(inputs))
        self.bytes_before += size_bytes(tuple(before.shape), before.dtype)
        self.bytes_after += shape[-1]
        return row

    def drop_parts(self) -> StepGraph:
        """The step, without what was made of the parts for gathers that are gone."""
        for node in self._rows:
            _erase_dead(self.step.graph, [user for user in node.users if user is not self._rows[node]])
        return self.step


def _only_gathered(node: torch.fx.Node, gathers: Collection[torch.fx.Node]) -> bool:
    """Whether everything that reads a weight's part is one of `gathers`, at the end of casts and views."""
    left, found = [node], False
    while left:
        value = left.pop()
        for user in value.users:
            if user in gathers:
                found = True
            elif user.target in _ON_THE_WAY and user.args[0] is value and value not in user.args[1:]:
                left.append(user)
            else:
                return False
    return found


def _root(value: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node | None]:
    """What a value is a cast or a view of, and what it waits for."""
    anchor = None
    while value.op == "call_function" and value.target in _ON_THE_WAY:
        if value.target is own.after.default:
            anchor = value.all_input_nodes[1]
        value = value.all_input_nodes[0]
    return value, anchor


def _as_codes(item: Input, size: int, bits: int, block: int) -> Input:
    """An input of messages, one for each place along the axes that split the weight."""
    sizes = tuple(shard.size for shard in item.shards)
    shards = tuple(MeshShard(axis=shard.axis, size=shard.size, dim=dim) for dim, shard in enumerate(item.shards))
    codes = Codes(shape=item.shape, shards=item.shards, bits=bits, block=block)
    return dataclasses.replace(item, shape=(*sizes, size), dtype=torch.uint8, shards=shards, codes=codes)


def _erase_dead(graph: torch.fx.Graph, nodes: Iterable[torch.fx.Node]) -> None:
    for node in list(nodes):
        _erase_dead(graph, node.users)
        if not node.users:
            graph.erase_node(node)
