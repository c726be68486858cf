"""Backward reads copies of the forward's calls, made from what is kept.

Kept are the calls of no region, those that the caller names, and what a region gives to other calls of the forward or to the outputs. Every
other value of a region that backward reads is written again, once for each region, from kept values seen through ``graphacc::after`` and
the first gradient that reaches the region: so a copy cannot be computed before it is needed, and no common-subexpression pass merges
it with the original. Parameters, and what follows from them by views and casts alone, are read as they are; ZeRO-3 gathers them again by
a pass of its own. Random operators draw by counter, and give the copy the same bits. Buffers are written by the originals alone.
"""

from collections.abc import Collection, Mapping

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import CHECKPOINT, CHUNKED, Kind, Phase, StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.remat.regions import always_there
from graphacc.passes.stages.values import SEGMENT, is_item

_AFTER = torch.ops.graphacc.after.default


def recompute(step: StepGraph, regions: Mapping[torch.fx.Node, str], kept: Collection[torch.fx.Node] = ()) -> int:
    """Rewrite `step` in place; an exact rewriting, also of a step that is partitioned later.

    Args:
        regions: call of the forward -> its region (`find_regions`).
        kept: calls in regions that are not computed again.

    Returns:
        The number of calls that were written again.
    """
    return _Recomputation(step, regions, kept_values(step, regions, kept)).run()


def kept_values(step: StepGraph, regions: Mapping[torch.fx.Node, str], kept: Collection[torch.fx.Node] = ()) -> set[torch.fx.Node]:
    """The calls of regions that are kept: `kept`, results of the step, and what is read by the forward outside of the region."""
    found = {*kept, *step.results, *(node for node in regions if _is_index(node))}
    for node, region in regions.items():
        others = (user for user in node.users if user.op == "call_function" and user.meta["phase"] is Phase.FORWARD)
        if any(regions.get(user) != region for user in others):
            found.add(node)
    for node in regions:  # of a call with several results all are kept or none
        if is_item(node):
            (source,) = node.all_input_nodes
            found |= {source, *source.users} if source in found or node in found else set()
    return found & regions.keys()


def verify_recomputed(step: StepGraph) -> None:
    """A copy reads a value of the forward through `after` alone, unless it is free (a parameter's view, a constant)."""
    free = always_there(step)
    for node in step.graph.nodes:
        if is_copy(node) and node.target is not _AFTER:
            read = [x.name for x in node.all_input_nodes if x.op == "call_function" and x.meta["phase"] is Phase.FORWARD and x not in free and not _is_index(x)]
            if read:
                raise GraphError(f"node {node.name!r}, a copy for backward, reads {read} of the forward, which would stay in memory for it")


def is_copy(node: torch.fx.Node) -> bool:
    """Whether a call was written for backward to compute a value again, or to wait for a gradient."""
    return bool(node.meta.get(_COPIED))


def _is_index(node: torch.fx.Node) -> bool:
    """Whether a call gives integers: where tokens go, what was looked up. They are small, and read as they are, for the partition
    knows by them which rows belong together."""
    value = node.meta["val"]
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype in _INTEGERS


_INTEGERS = (torch.int64, torch.int32, torch.int16)

_COPIED = "recomputed"
"""Entry of ``node.meta`` of copies."""


class _Recomputation:
    def __init__(self, step: StepGraph, regions: Mapping[torch.fx.Node, str], kept: Collection[torch.fx.Node]):
        self.step, self.regions, self.kept = step, regions, kept
        self.order = {node: i for i, node in enumerate(step.graph.nodes)}
        self.free = always_there(step)
        self.kinds = {node: item.kind for node, item in zip(step.placeholders, step.inputs)}
        self.copies: dict[tuple, torch.fx.Node] = {}
        self.anchors: dict[tuple, torch.fx.Node] = {}  # region and segment -> the first gradient that reaches it
        self.varying: set[torch.fx.Node] = set()  # what is no constant
        self.gradients: set[torch.fx.Node] = set()
        self.last: dict[int | None, torch.fx.Node] = {}  # segment -> its latest gradient so far
        self.is_behind_results = any(CHUNKED in node.meta for node in step.graph.nodes)  # the loop over chunks computes both
        self.since = self._scalar_results()  # and gradients that were made since the last anchor, in order

    def run(self) -> int:
        for node in list(self.step.graph.nodes):
            if node.op != "call_function":
                self.varying.update({node} if node.op == "placeholder" else ())
                continue
            if any(operand in self.varying for operand in node.all_input_nodes):
                self.varying.add(node)
            if node.meta["phase"] is Phase.BACKWARD:
                self._visit(node)
                self._put_behind_results(node)
        return len(self.copies)

    def _put_behind_results(self, node: torch.fx.Node) -> None:
        """Let the gradient of the logits wait for the loss, by the first number that it is made of: XLA:CPU may else compute the loss behind it, and keep the logits beside their gradient."""
        value = node.meta["val"]
        if self.is_behind_results or node not in self.varying or SEGMENT in node.meta or not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
            return
        readers, last = [user for user in node.users if user.meta.get("phase") is Phase.BACKWARD], node
        for result in self._scalar_results():
            if result < node:
                last = Editor(self.step.graph, last.next, like=node, meta={_COPIED: True})(_AFTER, last, result)
                self.order[last] = self.order[node]
                self.varying.add(last)
        for reader in readers:
            reader.replace_input_with(node, last)
        self.is_behind_results = True

    def _visit(self, node: torch.fx.Node) -> None:
        """Let a call of backward read copies."""
        gradients = [x for x in node.all_input_nodes if x in self.gradients and isinstance(x.meta["val"], torch.Tensor)]
        for operand in dict.fromkeys(node.all_input_nodes):
            if operand in self.regions and operand not in self.kept:
                place = self.regions[operand], node.meta.get(SEGMENT)
                if place not in self.anchors:
                    anchor = max(gradients, key=self.order.__getitem__, default=None) or self.last.get(node.meta.get(SEGMENT))
                    if anchor is None:  # nothing has been computed for backward: the value is needed at once
                        continue
                    self.anchors[place] = self._behind_loose_ends(anchor, node)
                node.replace_input_with(operand, self._copy(operand, place, node))
        if node in self.varying and (gradients or any(self._is_seed(x) for x in node.all_input_nodes)):
            self.gradients.add(node)
            self.since.append(node)
            if isinstance(node.meta["val"], torch.Tensor):
                self.last[node.meta.get(SEGMENT)] = node

    def _is_seed(self, node: torch.fx.Node) -> bool:
        """Whether gradients start here: with the constant one of a loss, with gradients from outside, or behind another stage's."""
        if node.op == "placeholder":
            return self.kinds[node] in (Kind.BATCH, Kind.CROSS)
        return node in self.gradients or node not in self.varying

    def _scalar_results(self) -> list[torch.fx.Node]:
        """The loss, and other numbers that the forward gives to the outputs: computed last, they would keep the logits to the end."""
        results = (node for node in self.step.results if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD)
        return [node for node in dict.fromkeys(results) if node.meta["val"].numel() == 1]

    def _behind_loose_ends(self, anchor: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
        """`anchor`, not before the loss and all gradients that nothing has read yet: a compiler would put off the products that give gradients of
        parameters, and keep what they read (the copies of the region behind, the logits) for so long. What comes later reads it there.

        Under a pipeline the anchor stays as it is, since schedules put off these products themselves.
        """
        if SEGMENT in before.meta:
            return anchor
        anchor = self._entry(anchor)
        reached, place = {anchor}, self.order[anchor]
        for node in reversed(self.since):
            if any(user in reached for user in node.users):
                reached.add(node)
        ends = [node for node in self.since if node not in reached and self.order[node] < place and self._is_loose(node, place)]
        self.since = [node for node in self.since if self.order[node] > place]
        readers = [user for user in anchor.users if self.order.get(user, -1) > place and user.meta.get("phase") is Phase.BACKWARD]
        last = anchor
        for end in ends:
            last = Editor(self.step.graph, last.next, like=anchor, meta={_COPIED: True})(_AFTER, last, end)
        for reader in readers:
            reader.replace_input_with(anchor, last)
        self.gradients.add(last)
        self.order[last] = place
        return last

    def _entry(self, gradient: torch.fx.Node) -> torch.fx.Node:
        """The gradient that enters a region, of one that follows from it and parameters alone."""
        while True:
            read = [operand for operand in gradient.all_input_nodes if operand in self.varying and operand not in self.free and operand.op != "placeholder"]
            if len(read) != 1 or read[0] not in self.gradients or CHUNKED in read[0].meta or not isinstance(read[0].meta["val"], torch.Tensor):
                return gradient
            gradient = read[0]

    def _is_loose(self, node: torch.fx.Node, place: int) -> bool:
        """Whether no call of backward before this place reads a gradient."""
        read = (user for user in node.users if user.meta.get("phase") is Phase.BACKWARD)
        return isinstance(node.meta["val"], torch.Tensor) and all(self.order.get(user, -1) > place for user in read)

    def _copy(self, value: torch.fx.Node, place: tuple, before: torch.fx.Node) -> torch.fx.Node:
        """`value` for the backward of a region, in front of its first reader `before`."""
        if value in self.free or (value.op == "placeholder" and self.kinds[value] not in (Kind.BATCH, Kind.KEY)):
            return value
        if _is_index(value) and value in self.kept:
            return value
        key = value, place
        if key in self.copies:
            return self.copies[key]
        kept = {"phase": Phase.BACKWARD, _COPIED: True} | ({SEGMENT: before.meta[SEGMENT]} if SEGMENT in before.meta else {})
        edit = Editor(self.step.graph, before, like=value, meta=kept, without=(CHECKPOINT, SEGMENT))
        computed = value.op == "call_function" and self.regions.get(value) == place[0] and value not in self.kept
        if computed:
            read = {operand: self._copy(operand, place, before) for operand in dict.fromkeys(value.all_input_nodes)}
            new = edit.repeat(value, *torch.fx.map_arg((value.args, value.kwargs), read.__getitem__))
        else:
            new = edit(_AFTER, value, self.anchors[place])
        self.copies[key] = new
        return new
