"""Prefetch: weights are gathered a fixed number of buckets ahead of their first reader, in forward and backward.

Nothing but parameters goes into ZeRO-3's gathers, so that a scheduler may start all of them at once, and keep the whole model; or, where
the backward's wait for the gradient of their own first reader, none before it is needed. With gathers 0, 1, ... in the order of their
first readers, gather k is made to wait for the last reader of gather k - prefetch - 1 that comes before the first one of the next:

    prefetch = 1     gather 2 ---waits for---> readers of 0
                     gather 3 ---waits for---> readers of 1          while 1 is read, 2 is on its way

so that no more than `prefetch` + 1 are there at a time (FSDP's `limit_all_gathers`: Zhao et al., "PyTorch FSDP", VLDB 2023, section
3.4), as a dependency of the program that holds under any schedule. A weight that is read again much later (a tied embedding)
stays until then, on top of this, and small tensors (`is_small`) are gathered at the start. The first gathers of the backward wait for the first gradient alone.

A weight larger than any bucket (an embedding, the head) has a gradient as large as what is gathered. In the backward its product is made
to wait for what reads the gathered weight, so that both are not there at once:

    dx = dy @ W^T     first, and W is let go
    dW = x^T @ dy     ---waits for---> dx

XLA for GPUs computes what is looked up in a table again wherever it is read, also in the backward, and would keep the whole gathered table until then: what the
forward looks up is stored (`graphacc::wait_for`, a barrier there).

The waiting is `graphacc::after`. In the backward it is there already, on each parameter (`passes/partition/regather.py`), and is given
another dependency; in the forward it is put in front of the gather.
"""

import collections
import operator
from collections.abc import Hashable

import torch
import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import Phase, StepGraph
from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.passes.communication.buckets import GATHER, MAX_BYTES, is_small, last_gather, place_of, readers
from graphacc.passes.communication.secondary import is_across_nodes
from graphacc.passes.edit import Editor
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import VIEWS

AFTER = torch.ops.graphacc.after.default
_PRODUCTS = of_kind(OpKind.PRODUCT)


def prefetch_pass(distance: int) -> Pass:
    """Ties gathers of weights `distance` gathers ahead of their first readers; values stay as they are."""

    def run(step: StepGraph, log: Log) -> StepGraph:
        for gathers in sequences(step):
            log.rewrote(_tie(step, gathers, distance))
            for gather in gathers:
                log.rewrote(_delay_gradients(step, gather))
                log.rewrote(_store_lookups(step, gather))
        return step

    def verify(step: StepGraph) -> None:
        for gathers in sequences(step):
            _verify(gathers, distance)

    return Pass(name="prefetch", exact=True, optional=True, run=run, verify=verify, key=("prefetch", distance))


def sequences(step: StepGraph) -> list[list[torch.fx.Node]]:
    """The gathers of large weights that forward and backward (of one stage) read, each in the order of the first readers."""
    given = _given(step)
    found: dict[Hashable, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in step.graph.nodes:
        if node.target is not GATHER or node.meta["move"].role is not Role.WEIGHT or is_small(node) or is_across_nodes(node):
            continue
        if node.meta["phase"] is not Phase.UPDATE and node.all_input_nodes[0] in given:
            found[place_of(node)].append(node)
    return [sorted(gathers, key=_first) for gathers in found.values()]


def _given(step: StepGraph) -> set[torch.fx.Node]:
    """Inputs, secondary partitions, which stay there in any case, and what is made of these without communication."""
    given = set(step.placeholders)
    for node in step.graph.nodes:
        read = node.all_input_nodes[:1] if node.target is AFTER else node.all_input_nodes
        local = getattr(node.target, "namespace", "") != "_c10d_functional" or is_across_nodes(node) or any(map(is_across_nodes, read))
        if node.op == "call_function" and local and given.issuperset(read):
            given.add(node)
    return given


def _first(gather: torch.fx.Node) -> torch.fx.Node:
    """The first reader of what is gathered; of what nothing reads the gather."""
    return min(readers(gather), default=gather)


def _tie(step: StepGraph, gathers: list[torch.fx.Node], distance: int) -> int:
    """Make the gathers of one sequence wait; returns how many do."""
    count = 0
    first = next((anchor for gather in gathers[:1] for anchor in _waits(gather)), None)
    for k, gather in enumerate(gathers):
        anchor = _anchor(gathers, k, distance) or first
        if anchor is None or anchor > gather:
            continue
        own = [node for node in _afters(gather) if anchor < node]
        for node in own:
            node.args = (node.args[0], anchor, True)
        if not own:
            edit = Editor(step.graph, gather)
            gather.update_arg(0, edit(AFTER, gather.all_input_nodes[0], anchor, True))
        count += 1
    return count


def _delay_gradients(step: StepGraph, gather: torch.fx.Node) -> int:
    """Make the gradient of a weight larger than a bucket wait for what reads the gathered weight in the backward; returns how many products do."""
    whole = last_gather(gather)
    if whole.meta["move"].size_bytes <= MAX_BYTES:
        return 0
    weight, count = whole.meta["val"], 0
    for reader in (node for node in readers(gather) if node.target in _PRODUCTS and node.meta["phase"] is Phase.BACKWARD):
        found = {product for factor in _factors(reader) for product in readers(_source(factor)) if product.target in _PRODUCTS and product is not reader}
        for product in sorted(found):
            factor = min(_factors(product), key=lambda node: node.meta["val"].numel())
            if product.meta["val"].numel() == weight.numel() > factor.meta["val"].numel() and _move_behind(product, reader):
                product.replace_input_with(factor, Editor(step.graph, product)(AFTER, factor, reader, True))
                count += 1
    return count


def _store_lookups(step: StepGraph, gather: torch.fx.Node) -> int:
    """Keep what is looked up in a gathered table from being computed again by its readers; returns how many lookups there are."""
    lookups = [node for node in readers(gather) if node.target is torch.ops.aten.embedding.default and node.meta["phase"] is Phase.FORWARD]
    for lookup in lookups:
        stored = Editor(step.graph, lookup.next, like=lookup)(torch.ops.graphacc.wait_for.default, lookup, lookup.args[1])
        lookup.replace_all_uses_with(stored, delete_user_cb=lambda user, stored=stored: user is not stored)
    return len(lookups)


def _move_behind(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Move `node` and views of it behind `other`; false where that, or something else between the two, reads it."""
    moved, left = [], [node]
    while left:
        at = left.pop()
        if at > other:
            continue
        if at is not node and at.target not in VIEWS:
            return False
        moved.append(at)
        left.extend(at.users)
    for at in sorted(moved, reverse=True):
        other.append(at)
    return True


def _factors(product: torch.fx.Node) -> list[torch.fx.Node]:
    places = facts(product.target).factors
    assert places is not None
    return [node for place in places if isinstance(node := product.args[place], torch.fx.Node)]


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """What a factor is a view of."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _anchor(gathers: list[torch.fx.Node], k: int, distance: int) -> torch.fx.Node | None:
    """The value that gather `k` waits for: of the last reader of gather k - distance - 1, or an earlier one's."""
    if k <= distance:
        return None
    limit = min(_first(gathers[k - distance]), gathers[k])
    for gather in reversed(gathers[: k - distance]):
        values = [value for node in readers(gather) if (value := _value(node)) is not None and value < limit]
        if values:
            return max(values)
    return None


def _value(node: torch.fx.Node) -> torch.fx.Node | None:
    """A tensor that exists once a call is done."""
    if isinstance(node.meta["val"], torch.Tensor):
        return node
    items = [user for user in node.users if user.target is operator.getitem and isinstance(user.meta["val"], torch.Tensor)]
    return items[0] if items else None


def _afters(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """The calls of `graphacc::after` that what is gathered goes through."""
    found, left, seen = [], list(gather.all_input_nodes), set()
    while left:
        node = left.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target is AFTER:
            found.append(node)
            left.append(node.all_input_nodes[0])
        else:
            left.extend(node.all_input_nodes)
    return found


def _waits(gather: torch.fx.Node) -> list[torch.fx.Node]:
    return [node.all_input_nodes[1] for node in _afters(gather)]


def _verify(gathers: list[torch.fx.Node], distance: int) -> None:
    """Every gather behind the first ones of a sequence waits strictly."""
    for k, gather in enumerate(gathers):
        if k > distance and not any(node.args[2:] == (True,) for node in _afters(gather)):
            raise GraphError(f"gather {gather.name!r} of weights may start at any time: it waits for no reader of the {k} gathers before it")
