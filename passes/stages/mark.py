"""Marks every call of a captured graph with the place of its segment: forward chunk 0, ..., V-1, then backward V-1, ..., 0.

Forward calls get their chunk from `forward_chunks`. A backward call stands as early as what it reads allows: behind the
backward calls that it reads, and in the backward of the last chunk that has the forward values that it reads, since a
chunk's activations stay on its stage. A gradient of a parameter moves on to a chunk that uses the parameter, and calls
that only serve later segments move there if that sends no more. The marks are wishes: `cut` keeps them wherever data allow,
also after passes that have rewritten the graph in between.
"""

from collections.abc import Mapping

import torch
import torch.fx

from graphacc.graph import Kind, StepGraph
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.assign import forward_chunks
from graphacc.passes.stages.places import update_places
from graphacc.passes.stages.replicas import add_replicas, contributions
from graphacc.passes.stages.values import SEGMENT, free_values, readers, size_bytes
from graphacc.strategy.spec import Strategy


def mark_pass(strategy: Strategy, homes: Mapping[str, int]) -> Pass:
    """Marks, and gives every further stage that uses a parameter a replica of it (see replicas.py)."""

    def run(step: StepGraph, log: Log) -> StepGraph:
        chunks = forward_chunks(step, strategy, homes)
        places = _Backward(step, chunks, strategy.pp * strategy.chunks).run()
        for node, place in (*chunks.items(), *places.items()):
            node.meta[SEGMENT] = place
        log.rewrote(add_replicas(step, strategy))
        return step

    return Pass(name="mark-stages", exact=False, run=run, key=("mark-stages", strategy, tuple(homes.items())))


def mark_update_pass(homes: Mapping[str, int]) -> Pass:
    """Marks an update's collectives with the stages of what they move, so that no message joins tensors of several: what one stage has would go to the other and back.

    Args:
        homes: parameter -> its stage.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        names = [item.target for item in step.inputs if item.kind in (Kind.PARAM, Kind.GRAD)]
        for node, place in update_places(step, {name: homes.get(name, 0) for name in names}).items():
            if "move" in node.meta:
                node.meta[SEGMENT] = place.stage
                log.rewrote()
        return step

    return Pass(name="mark-update", exact=True, run=run, key=("mark-update", tuple(homes.items())))


class _Backward:
    """Places of the backward calls, for given chunks of the forward calls."""

    def __init__(self, step: StepGraph, chunks: Mapping[torch.fx.Node, int], num_chunks: int):
        self.step, self.chunks, self.num_chunks = step, chunks, num_chunks
        self.free = free_values(step)
        self.used_in: dict[torch.fx.Node, set[int]] = {}  # forward value or parameter -> chunks that have it
        self.places: dict[torch.fx.Node, int] = {}
        self.nodes = [n for n in step.graph.nodes if n.op == "call_function" and n not in chunks and n not in self.free]

    def run(self) -> dict[torch.fx.Node, int]:
        self._find_chunks()
        at_home = self._gradient_chunks()
        fixed = {*self.step.results, *at_home}
        for node in self.nodes:
            place = max((self._after(operand) for operand in self._operands(node)), default=self.num_chunks)
            homes = [where for chunk in at_home.get(node, ()) if (where := self._backward_of(chunk)) >= place]
            self.places[node] = min(homes, default=place)
        self._sink(fixed)
        return self.places

    def _backward_of(self, chunk: int) -> int:
        return 2 * self.num_chunks - 1 - chunk

    def _operands(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """What a call reads, seen through free values."""
        found, stack = [], list(node.all_input_nodes)
        while stack:
            operand = stack.pop()
            if operand in self.free:
                stack.extend(operand.all_input_nodes)
            else:
                found.append(operand)
        return found

    def _find_chunks(self) -> None:
        for node in (*self.step.placeholders, *self.chunks):
            read_in = {self.chunks[reader] for reader in readers(node, self.free) if reader in self.chunks}
            self.used_in[node] = read_in | ({self.chunks[node]} if node in self.chunks else set())
        for node, item in zip(self.step.placeholders, self.step.inputs):
            if item.kind not in (Kind.PARAM, Kind.BUFFER):
                self.used_in[node] = set()

    def _after(self, operand: torch.fx.Node) -> int:
        """The earliest place that has an operand of a backward call at hand."""
        if operand in self.places:
            return self.places[operand]
        chunks = self.used_in.get(operand)
        return self._backward_of(max(chunks)) if chunks else self.num_chunks

    def _gradient_chunks(self) -> dict[torch.fx.Node, set[int]]:
        """Call that ends in one parameter's gradient -> the chunks that use the parameter."""
        parameters = {
            item.target: node for node, item in zip(self.step.placeholders, self.step.inputs) if item.kind is Kind.PARAM
        }
        found = {}
        for node, item in zip(self.step.results, self.step.outputs):
            if item.kind is Kind.GRAD and item.target in parameters:
                chunks = self.used_in[parameters[item.target]]
                found |= dict.fromkeys(contributions(node).leaves, chunks)
        return found

    def _sink(self, fixed: set[torch.fx.Node]) -> None:
        """Move calls that only serve later segments there, except for `fixed` ones."""
        for node in reversed(self.nodes):
            users = [self.places[user] for user in readers(node, self.free) if user in self.places]
            if node in fixed or not users or min(users) <= self.places[node]:
                continue
            if self._can_move(node, min(users)):
                self.places[node] = min(users)

    def _can_move(self, node: torch.fx.Node, place: int) -> bool:
        chunk, sent = 2 * self.num_chunks - 1 - place, 0.0
        for operand in self._operands(node):
            if operand in self.places:
                others = (user for user in readers(operand, self.free) if user is not node and user in self.places)
                there = self.places[operand] >= place or any(self.places[user] >= place for user in others)
                sent += 0.0 if there else size_bytes(operand)
            elif self.used_in.get(operand) and chunk not in self.used_in[operand]:
                return False
        return sent <= size_bytes(node)
