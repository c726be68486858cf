"""A region for one chunk: the partition along an axis of chunks, which run one after the other instead of on ranks.

What is row-wise the partition's rules know. The hidden states are split along the tokens; from where an operand has to be split for that, its own
operands follow, back to the region's inputs (labels, seeds of every token). The rest is replicated: every chunk reads it whole. Then every result is
`Shard` (a value of each token), `Partial` (a chunk has its term of the sum) or `Replicate`, and nothing moves between the chunks in between, or the
loss is not computed row by row.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import torch
import torch.fx

from graphacc._compat.torch_ import new_graph
from graphacc.graph import Input, Kind, Output, Phase, StepGraph, copy_node
from graphacc.ops.chunked import SAME, Body, Split
from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.cleanup import merge_common_subexpressions, remove_dead_code
from graphacc.passes.edit import shape_of
from graphacc.passes.loss_chunks.find import Refused, Region, described
from graphacc.passes.partition import AxisPlan, assign, write
from graphacc.passes.partition.in_time import number_parts
from graphacc.passes.partition.placement import REPLICATE, Partial, Placement, Shard, divides, view_split
from graphacc.passes.runner import Log

AXIS = "loss_chunks"
_MAX_COUNTS = 6  # numbers of chunks that are tried, from the one that was asked for up, and down
_PARTS = of_kind(OpKind.PART)
_RESHAPES = of_kind(OpKind.RESHAPE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """A region in chunks."""

    body: Body
    split: tuple[torch.fx.Node, ...]  # inputs of the region of which a chunk reads its part
    whole: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]  # of the region, in the order of the body's results


def in_chunks(region: Region, count: int) -> Chunks:
    """The region as a loop over `count` chunks, or the next number that divides the tokens: a larger one before a smaller one.

    Raises:
        Refused: no number divides, or a chunk would need what another one computes.
    """
    step = _as_step(region)
    names = {node: name.name for node, name in zip(region.inputs, step.placeholders)}
    first: Refused | None = None
    for numbers in (range(count, 2 * count + 1), range(count - 1, 1, -1)):
        possible = ((number, splits) for number in numbers if (splits := _splits(region, number)))
        for number, splits in itertools.islice(possible, _MAX_COUNTS):
            for split in splits:
                try:
                    return _written(step, region, _planned(step, region, names, split, number))
                except Refused as error:
                    first = first or error
    raise first or Refused(f"no number of chunks from 2 to {2 * count} divides its tokens, of {shape_of(region.hidden)}")


def _as_step(region: Region) -> StepGraph:
    """The region as a graph of its own."""
    graph, copies = new_graph(), dict[torch.fx.Node, torch.fx.Node]()
    inputs = []
    for i, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        value = node.meta["val"]
        copies[node].meta.update(val=value, phase=Phase.FORWARD, module_path="", stack_trace="")
        inputs.append(Input(name=copies[node].name, kind=Kind.BATCH, target=str(i), shape=tuple(value.shape), dtype=value.dtype))
    for node in region.nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in region.outputs))
    outputs = [Output(kind=Kind.USER, target=str(i), shape=tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for i, node in enumerate(region.outputs)]
    return StepGraph(graph, tuple(inputs), tuple(outputs))


def _splits(region: Region, count: int) -> list[Shard]:
    """How the tokens of the hidden states may be split, [T, D] or [B, T, D]: the dims as they are, and those that the loss reads a flat one as."""
    shape = tuple(shape_of(region.hidden))
    outers = {math.prod(view[:i]) for node in region.nodes if node in region.wide for view in [shape_of(node)] for i in range(1, len(view) - 1)}
    found = [*(Shard(dim) for dim in range(len(shape))), *(Shard(0, outer) for outer in sorted(outers - {1}))]
    return [split for split in found if divides(shape, split, count)]


def _planned(step: StepGraph, region: Region, names: Mapping[torch.fx.Node, str], split: Shard, count: int) -> AxisPlan:
    """The plan in which the hidden states are split so.

    Raises:
        Refused: it needs something to move between chunks.
    """
    nodes = {node.name: node for node in step.graph.nodes}
    hidden = names.get(region.hidden, region.hidden.name)
    inputs: dict[str, Placement] = {}
    pins: dict[str, Placement] = {}
    wanted: dict[str, Placement] = {hidden: split}
    while True:
        for name, placement in wanted.items():
            (inputs if nodes[name].op == "placeholder" else pins)[name] = placement
        plan = assign(step, AXIS, count, inputs, {}, lambda shape: None, pins=pins)
        cut = [_of_view(nodes[move.value], move.target, count) for move in plan.moves if move.collective == "shard" and isinstance(move.target, Shard)]
        wanted = {node.name: target for node, target in reversed(cut) if node.name not in inputs and node.name not in pins}
        if not wanted:
            break
    homes = {(item.kind, item.target): plan.placements[node.name] for item, node in zip(step.outputs, step.results)}
    plan = assign(step, AXIS, count, inputs, homes, lambda shape: None, pins=pins)  # type: ignore[arg-type]
    for move in plan.moves:
        if move.travels:
            raise Refused(_what_moves(nodes[move.reader], nodes[move.value]))
    return plan


def _what_moves(reader: torch.fx.Node, value: torch.fx.Node) -> str:
    what = f"what {described(value)} gives" if value.op == "call_function" else "a value"
    remedy = "; shift the labels instead of the logits (`F.pad(labels, (0, 1), value=-100)[:, 1:]`)" if reader.target in _PARTS else ""
    return f"{described(reader)} needs {what} {shape_of(value)} for all tokens, so that no chunk could be finished before the others{remedy}"


def _of_view(node: torch.fx.Node, split: Shard, count: int) -> tuple[torch.fx.Node, Shard]:
    """What has to be split for a reshaped value to be split so."""
    while node.target in _RESHAPES and isinstance(source := node.args[0], torch.fx.Node):
        inner = view_split(tuple(shape_of(node)), split, tuple(shape_of(source)), count)
        if inner is None:
            break
        node, split = source, inner
    return node, split


def _written(step: StepGraph, region: Region, plan: AxisPlan) -> Chunks:
    """What a chunk does.

    Raises:
        Refused: something as large as the logits would be whole in every chunk.
    """
    local, report = write(step, plan)
    number_parts(local, AXIS, plan.num_ranks, "chunk")
    remove_dead_code(local, Log())
    left = {node.name for node in local.graph.nodes}
    whole = [node for node in region.nodes if node in region.wide and plan.placements[node.name] == REPLICATE and report.homes[node.name] in left]
    if whole:
        raise Refused(f"every chunk would compute {', '.join(map(described, whole))} for all tokens")
    merge_common_subexpressions(local, Log())
    number, *placeholders = local.placeholders
    kinds = list(zip(placeholders, region.inputs, plan.inputs, strict=True))
    split = [(inner, outside, place) for inner, outside, place in kinds if isinstance(place, Shard)]
    shared = [(inner, outside) for inner, outside, place in kinds if not isinstance(place, Shard)]
    last = number
    for inner in (*(inner for inner, *_ in split), *(inner for inner, _ in shared)):
        last.append(inner)
        last = inner
    body = Body(
        chunks=plan.num_ranks,
        splits=tuple(Split(place.dim, place.outer) for *_, place in split),
        results=tuple(Split(place.dim, place.outer) if isinstance(place, Shard) else place.op if isinstance(place, Partial) else SAME for place in plan.outputs),
        graph=local.graph,
    )
    return Chunks(body=body, split=tuple(outside for _, outside, _ in split), whole=tuple(outside for _, outside in shared), outputs=region.outputs)
