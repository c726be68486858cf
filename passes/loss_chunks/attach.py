"""Two passes: one marks the head in the captured step, the other puts a loop over chunks into the program of one rank.

The mark is for what comes in between. ZeRO-3 does not gather the head's weight a second time for a product that is in the same loop as the first,
nothing in the loop is computed again for backward, and under a pipeline all of it stands in the backward of the last stage, which also gives the
loss. The loop itself is made behind the partitions, of local shapes: gathers and scatters stay outside, and what it saves is what a rank has.
"""

import dataclasses

import torch
import torch.fx

from graphacc.graph import CHUNKED, Phase, StepGraph
from graphacc.ops.chunked import SUM
from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.edit import Editor, only_user
from graphacc.passes.loss_chunks.find import (
    Refused,
    Region,
    find_heads,
    find_region,
    hidden_of,
    source_of,
    waits_alone,
    weights_of,
)
from graphacc.passes.loss_chunks.split import Chunks, in_chunks
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import SEGMENT, VIEWS

_PRODUCTS = of_kind(OpKind.PRODUCT)
_HALF = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkReport:
    """What became of the head."""

    lines: tuple[str, ...] = ()  # a line for each loop
    notes: tuple[str, ...] = ()  # why there is none, for the user

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in (*self.lines, *self.notes))


def needs_chunks(step: StepGraph, count: int) -> bool:
    """Whether chunks are asked for, and the step has a loss and its gradient."""
    phases = {node.meta["phase"] for node in step.graph.nodes if node.op == "call_function"}
    return count > 1 and phases >= {Phase.FORWARD, Phase.BACKWARD}


def mark_heads_pass(count: int) -> Pass:
    """Marks what `chunk_pass` is to put into loops; values stay as they are.

    Args:
        count: of chunks, for what is said to the user.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        heads, weights, notes = find_heads(step), weights_of(step), []
        if not heads:
            notes.append(f"loss_chunks={count} does nothing: no product of a weight gives logits, from which a loss follows without a further layer")
        for product in heads:
            if CHUNKED in product.meta:  # a part of another head's loop
                continue
            hidden = hidden_of(product, weights)
            assert hidden is not None, "a head has hidden states"
            try:
                region = find_region(step, product, hidden)
                _check_stages(region)
            except Refused as error:
                notes.append(_refusal(count, product, error))
                continue
            _mark(region)
            log.rewrote(len(region.nodes))
        log.details = ChunkReport(notes=tuple(notes))
        return step

    return Pass(name="mark-head", exact=True, run=run, key=("mark-head", count))


def _check_stages(region: Region) -> None:
    stages = {node.meta[SEGMENT] for node in region.nodes if SEGMENT in node.meta and node.meta["phase"] is Phase.FORWARD}
    if len(stages) > 1:
        raise Refused("the stages of the pipeline divide it from its loss: pin both to one stage, with the strategy's field stages")


def _mark(region: Region) -> None:
    segments = [node.meta[SEGMENT] for node in region.nodes if SEGMENT in node.meta]
    for node in region.nodes:
        node.meta[CHUNKED] = True
        if SEGMENT in node.meta and node in region.made:
            node.meta[SEGMENT] = max(segments)
    region.product.meta[CHUNKED] = list(region.product.args).index(region.hidden)


def chunk_pass(count: int) -> Pass:
    """Replaces what is marked by loops over `count` chunks of the tokens; sums over tokens are taken chunk by chunk."""

    def run(step: StepGraph, log: Log) -> StepGraph:
        lines, notes = [], []
        for product in [node for node in step.graph.nodes if _is_marked_product(node)]:
            hidden = product.args[product.meta[CHUNKED]]
            assert isinstance(hidden, torch.fx.Node), "the hidden states are a tensor"
            try:
                region = find_region(step, product, hidden)
                chunks = in_chunks(region, count)
                wider = _widened(step.graph, region, chunks)
                if wider is not None:
                    region, chunks = wider, in_chunks(wider, count)
            except Refused as error:
                notes.append(_refusal(count, product, error))
                continue
            lines.append(f"{region.source}: {len(region.nodes)} calls, logits {list(product.meta['val'].shape)} of a rank, in {chunks.body.chunks} chunks")
            if chunks.body.chunks < count:
                notes.append(f"loss_chunks={count}: the head at {region.source} is computed in {chunks.body.chunks} chunks: its tokens, or what the loss does to them, cannot be divided by more")
            _replace(step, region, chunks)
            log.rewrote(len(region.nodes))
        log.details = ChunkReport(lines=tuple(lines), notes=tuple(notes))
        return step

    return Pass(name="loss-chunks", exact=False, optional=True, run=run, key=("loss-chunks", count))


def _is_marked_product(node: torch.fx.Node) -> bool:
    return node.target in _PRODUCTS and type(node.meta.get(CHUNKED)) is int and node.meta["phase"] is Phase.FORWARD


def _refusal(count: int, product: torch.fx.Node, why: Refused) -> str:
    return f"loss_chunks={count}: the head at {source_of(product)} is computed at once: {why}"


def _widened(graph: torch.fx.Graph, region: Region, chunks: Chunks) -> Region | None:
    """The region with the casts to 32 bits that follow its sums in 16, so that the sums are rounded once and not stored twice; None where none do."""
    more: set[torch.fx.Node] = set()
    for node, how in zip(chunks.outputs, chunks.body.results, strict=True):
        if how != SUM or node.meta["val"].dtype not in _HALF:
            continue
        chain, at = [], only_user(node)
        while at is not None and at.target in VIEWS:
            chain.append(at)
            if at.meta["val"].dtype is torch.float32:
                more |= {*chain}
            at = only_user(at)
    return region.with_nodes(graph, more) if more else None


def _replace(step: StepGraph, region: Region, chunks: Chunks) -> None:
    graph, inside = step.graph, set(region.nodes)
    _wait_for_other_values(graph, region)
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(region.inputs, key=order.__getitem__)
    if last.op == "placeholder":
        last = step.placeholders[-1]
    behind: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node not in inside and any(operand in behind or operand in region.made for operand in node.all_input_nodes):
            behind.add(node)
    held_up = [node for node in graph.nodes if node in behind and order[node] <= order[last]]
    meta = {"phase": Phase.BACKWARD, **({SEGMENT: region.product.meta[SEGMENT]} if SEGMENT in region.product.meta else {})}
    edit = Editor(graph, last.next, like=region.product, meta=meta, without=(CHUNKED, "region", "recomputed"))
    call = edit(torch.ops.graphacc.chunked.default, list(chunks.split), list(chunks.whole), chunks.body.write())
    at = call
    for i, node in enumerate(chunks.outputs):
        item = edit.item(call, i)
        item.meta.update({name: node.meta[name] for name in ("module_path", "stack_trace") if name in node.meta})
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
        at = item
    for node in held_up:
        at.append(node)
        at = node
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    left = [node.name for node in region.made if node in set(graph.nodes)]
    assert not left, f"{left} are still read behind the loop that replaces them"


def _wait_for_other_values(graph: torch.fx.Graph, region: Region) -> None:
    """What is ordered behind a value in the region is ordered behind a result of it, or, where the region reads it, behind the hidden states."""
    inside, before = set(region.nodes), set[torch.fx.Node]()
    for node in reversed(list(graph.nodes)):
        if node not in inside and any(user in inside or user in before for user in node.users):
            before.add(node)
    for node in region.made:
        for user in [user for user in node.users if user not in inside and waits_alone(user, node)]:
            user.update_arg(1, region.hidden if user in before else region.outputs[-1])
