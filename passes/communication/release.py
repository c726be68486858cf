"""Whole tensors of the backward are let go: gradients that ZeRO scatters, and along `tp` the activations that gradients are products of.

Nothing reads a gradient before the optimizer does, so that a scheduler may scatter all of them at the end, and keep the whole model's until then: XLA's for
GPUs is one or two layers late, and all layers where autograd casts every gradient behind the backward, as it does for parameters that the forward has cast
at its beginning. So the backward waits: with gradients 0, 1, ... in the order in which they are made,

    dy 3 ---waits for---> scattered 1          while gradient 2 is on its way

where what may be on its way is whole gradients of up to `IN_FLIGHT_BYTES`, or one (FSDP has such a limit by the streams' events: Zhao et al., "PyTorch FSDP",
VLDB 2023, section 3.4). The waiting is `graphacc::wait_for`, on that from which the gradient of the weight and that of the layer's input are made, so that the
backward does not go on without the scatter. (Not under a pipeline's schedule that puts off the gradients of weights
itself, nor without buckets, where XLA's combiner joins messages, which it cannot if one waits for another.)

For the same reason a scheduler puts off the products themselves. Along `tp` gradients are small beside the activations that they are products of, which every
rank has whole, or gathers: XLA kept those of all layers; and the product of a head that is tied to the embedding is added to a gradient that is the last to be there: XLA kept that of
the logits. There the backward waits for the products. It begins behind the loss, which would keep the logits.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Hashable

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import Phase, StepGraph
from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.communication.buckets import (
    MAX_BYTES,
    REDUCE,
    SCATTER,
    SMALL_BYTES,
    goes_further,
    is_small,
    place_of,
)
from graphacc.passes.edit import Editor
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import SEGMENT, VIEWS

aten = torch.ops.aten
IN_FLIGHT_BYTES = MAX_BYTES
"""Whole gradients that may be on their way, or activations that may wait for their product, when the next gradient is made."""

_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
_WAIT_FOR = torch.ops.graphacc.wait_for.default
_AFTER = torch.ops.graphacc.after.default
_SEEN_THROUGH = VIEWS | {_AFTER}
_WAY = VIEWS | {aten.cat.default, aten.constant_pad_nd.default, operator.getitem}
_ADDED = _WAY | {aten.add.Tensor}
"""On their way to a gradient of a parameter that is used twice, as a tied head is."""
_PRODUCTS = of_kind(OpKind.PRODUCT) | {aten.convolution_backward.default, torch.ops.graphacc.grouped_mm_weight_grad.default}


def release(step: StepGraph, log: Log) -> StepGraph:
    """Make the backward wait for the loss, for scatters of gradients and for products that give gradients; values stay as they are."""
    log.rewrote(_finish_results(step))
    for gradients in _sequences(step):
        log.rewrote(_tie(step, gradients))
    return step


def _is_summed(node: torch.fx.Node) -> bool:
    """A gradient's sum or scatter over another axis, such as `cp`, in front of its last scatter; or the wait for that."""
    if node.target is _WAIT_TENSOR:
        node = node.all_input_nodes[0]
    return node.target in (REDUCE, SCATTER) and "move" in node.meta and node.meta["move"].role is Role.GRADIENT


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A gradient that the backward does not read: those that one message scatters, or one product."""

    maker: torch.fx.Node  # the call that makes it; of several, the last of them
    way: tuple[torch.fx.Node, ...]  # what only carries it to its scatter, with that and its wait, in the order of the graph; without a scatter nothing
    size_bytes: int  # what stays in memory as long as it is put off
    makers: frozenset[torch.fx.Node] = frozenset()  # all of them, where a scatter joins several

    @classmethod
    def scattered_by(cls, scatter: torch.fx.Node) -> "_Gradient":
        way, makers, left = {scatter, *scatter.users}, set[torch.fx.Node](), list(scatter.all_input_nodes)
        while left:
            node = left.pop()
            if node in way or node in makers:
                continue
            if node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD and (node.target in _WAY or _is_summed(node)):
                way.add(node)
                left.extend(node.all_input_nodes)
            else:
                makers.add(node)
        scatters = [node for node in way if node.target is SCATTER]
        first = [node for node in scatters if node is not scatter] or scatters
        return cls(max(makers), tuple(sorted(way)), sum(node.meta["move"].size_bytes for node in first), frozenset(makers))

    @property
    def done(self) -> torch.fx.Node:
        """What exists once nothing of it is in memory."""
        return self.way[-1] if self.way else self.maker

    @property
    def source(self) -> torch.fx.Node | None:
        """The gradient of a layer's output, of which this one is a product."""
        if self.maker.target not in _PRODUCTS:
            return None
        found = []
        for node in self.maker.all_input_nodes:
            while node.target in _SEEN_THROUGH and node.meta["phase"] is Phase.BACKWARD:
                node = node.all_input_nodes[0]
            if node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD and isinstance(node.meta["val"], torch.Tensor):
                found.append(node)
        return max(found, default=None)

    def finish_before(self, reader: torch.fx.Node) -> None:
        """Begin the scatter where the gradient is made, and wait for it in front of `reader`, unless something in front of that has read it."""
        if not self.way:
            return
        at = self.maker
        for node in self.way[:-1]:
            if at < node:
                at.append(node)
                at = node
        if not any(user < reader for user in self.done.users):
            reader.prepend(self.done)


def _finish_results(step: StepGraph) -> int:
    """Let the backward begin behind the loss, and other numbers that the forward gives, as far as this rank computes them alone: computed last, they keep the logits to the end."""
    results = {_local(node) for node in step.results if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD and node.meta["val"].numel() == 1}
    constants: set[torch.fx.Node] = set()
    for node in step.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
            continue
        if node.op != "call_function" or node.meta["phase"] is not Phase.BACKWARD or not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
            continue
        readers = [user for user in node.users if user.meta.get("phase") is Phase.BACKWARD]
        before = sorted(result for result in results if result.op == "call_function" and result < node)
        if SEGMENT in node.meta or not readers or not before:
            return 0
        edit, waiting = Editor(step.graph, node.next, like=node), node
        for result in before:
            waiting = edit(_WAIT_FOR, waiting, result)
        for reader in readers:
            reader.replace_input_with(node, waiting)
        return len(before)
    return 0


def _local(result: torch.fx.Node) -> torch.fx.Node:
    """What a result is summed up from over the ranks."""
    while result.target in (_WAIT_TENSOR, REDUCE):
        result = result.all_input_nodes[0]
    return result


def _sequences(step: StepGraph) -> list[list[_Gradient]]:
    """The gradients of one stage's backward that would stay in memory, or what they are made of, in the order in which they are made."""
    found: dict[Hashable, list[_Gradient]] = collections.defaultdict(list)
    scattered: set[torch.fx.Node] = set()
    for node in step.graph.nodes:
        if node.op != "call_function" or node.meta["phase"] is not Phase.BACKWARD:
            continue
        if node.target is SCATTER and node.meta["move"].role is Role.GRADIENT and not goes_further(node):
            gradient = _Gradient.scattered_by(node)
            scattered |= gradient.makers
            found[place_of(node)] += [] if is_small(node) else [gradient]
        elif node.target in _PRODUCTS and _is_put_off(node) and (size := _kept_bytes(node)) > SMALL_BYTES:
            found[place_of(node)].append(_Gradient(node, (), size))
    for place, gradients in found.items():
        found[place] = sorted((gradient for gradient in gradients if gradient.way or gradient.maker not in scattered), key=lambda gradient: gradient.maker)
    return list(found.values())


def _kept_bytes(product: torch.fx.Node) -> int:
    """Of the factors that the backward has made."""
    made = (node.meta["val"] for node in product.all_input_nodes if node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD)
    return max((size_bytes(tuple(value.shape), value.dtype) for value in made if isinstance(value, torch.Tensor)), default=0)


def _is_put_off(product: torch.fx.Node) -> bool:
    """Whether no call of the backward computes with it."""
    left, seen = [product], {product}
    while left:
        for user in left.pop().users:
            waits = user.target is _AFTER and user.all_input_nodes[0] not in seen
            if user in seen or waits or user.op == "output" or user.meta["phase"] is Phase.UPDATE:
                continue
            if user.target not in _ADDED and "move" not in user.meta and user.target is not _WAIT_TENSOR:
                return False
            seen.add(user)
            left.append(user)
    return True


def _tie(step: StepGraph, gradients: list[_Gradient]) -> int:
    """Make what gradients are made of wait for scatters of earlier ones; returns how many do."""
    made = [0, *itertools.accumulate(gradient.size_bytes for gradient in gradients)]
    count, due = 0, 0  # those in front of this one have been waited for
    for k, gradient in enumerate(gradients):
        end = max((i + 1 for i in range(due, k) if made[k] - made[i + 1] >= IN_FLIGHT_BYTES), default=due)
        source = gradient.source if end > due else None
        if source is None:
            continue
        readers = sorted(user for user in source.users if gradients[end - 1].maker < user)
        if readers:
            edit, waiting = Editor(step.graph, readers[0]), source
            for earlier in gradients[due:end]:
                earlier.finish_before(readers[0])
                waiting = edit(_WAIT_FOR, waiting, earlier.done)
            for reader in readers:
                reader.replace_input_with(source, waiting)
            count, due = count + 1, end
    return count


def _verify(step: StepGraph) -> None:
    """What waits for a gradient is in the stage of the pipeline that makes it."""
    for node in step.graph.nodes:
        waited = node.all_input_nodes[-1] if node.target is _WAIT_FOR else node
        if waited.op == "call_function" and waited.meta["phase"] is Phase.BACKWARD and waited.meta.get(SEGMENT) != node.meta.get(SEGMENT):
            raise GraphError(f"node {node.name!r} of segment {node.meta.get(SEGMENT)} waits for {waited.name!r} of segment {waited.meta.get(SEGMENT)}")


RELEASE_GRADIENTS = Pass(name="release-gradients", exact=True, optional=True, run=release, verify=_verify)
