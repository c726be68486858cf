"""Forward and backward of a batch in parts that run one after the other, so that together they give what the whole batch gives.

Microbatches are an axis in time: the partition's rules (`passes/partition`) plan the step along it as along an axis of ranks, and write the program of one part.
Rows of the batch are split, gradients and the loss are sums over the parts, and random numbers are those of the whole batch. What the
whole batch gives before a part can go on (labels that count, whose number divides the loss) is computed from the whole inputs by every part; it depends on
the batch alone. Where it depends on parameters (statistics of BatchNorm, pairs of examples, how evenly tokens go to experts) no part can be computed
before the others, and the step is `Inseparable`.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.fx
from torch import Tensor

from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, StepGraph, copy_node
from graphacc.ops.chunked import MAX, MIN, SAME, SUM, Split
from graphacc.passes.cleanup import remove_dead_code
from graphacc.passes.edit import Editor, shape_of
from graphacc.passes.experts import ATTACH_EXPERTS
from graphacc.passes.partition import AxisPlan, Move, assign, write
from graphacc.passes.partition.in_time import number_parts
from graphacc.passes.partition.placement import REPLICATE, Partial, Placement, Shard
from graphacc.passes.partition.report import source_line
from graphacc.passes.runner import Log

aten = torch.ops.aten
AXIS = "microbatches"
NUMBER = "number of the microbatch"
"""Target of the BATCH input that tells the parts apart, int64, 0-d."""
_GIVEN = (Kind.BATCH, Kind.KEY, Kind.BUFFER)


class Inseparable(Exception):
    """A part of the batch needs of the others what they compute with parameters; the message says where."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A step in parts.

    Attributes:
        step: of one part. Its BATCH inputs are the parts of the batch's, `whole` and `NUMBER`; gradients and loss add up over the parts.
        count: how many there are.
        splits: BATCH input -> how it is split; one that is left out is read whole.
        whole: target of a further BATCH input -> the one of the captured step that it is.
        repeated: what each part computes with parameters for the whole batch, for the user; empty where nothing is.
        results: target of a USER output -> how the batch's comes out of the parts': its split, or "sum", "max", "min" or "same".
    """

    step: StepGraph
    count: int
    splits: Mapping[str, Split]
    whole: Mapping[str, str]
    results: Mapping[str, Split | str]
    repeated: str


def in_microbatches(step: StepGraph, count: int, dims: Mapping[str, int | None]) -> Microbatches:
    """One of `count` parts of forward and backward of a batch.

    Args:
        step: forward and backward of the batch. It is not changed.
        dims: target of a BATCH input -> the dim of its examples, or None; one that `count` does not divide is read whole.

    Raises:
        Inseparable: the parts need more of each other than sums of gradients.
    """
    splits = {
        item.target: Shard(dim)
        for item in step.inputs
        if item.kind is Kind.BATCH and (dim := dims.get(item.target)) is not None and item.shape[dim] % count == 0
    }
    if not splits:
        raise Inseparable(f"no tensor of the batch has a dim of examples that {count} divides")
    step = ATTACH_EXPERTS.run(step.copy(), Log())  # rows that go to experts are sorted by a form that the rules know
    _tensors_for_numbers(step)
    whole: dict[str, str] = {}
    while True:
        plan = _planned(step, count, splits)
        nodes = {node.name: node for node in step.graph.nodes}
        needed = {move.value: move for move in plan.moves if move.travels}
        if not needed:
            break
        given = _given(step)
        for name, move in needed.items():
            if nodes[name] not in given:
                raise Inseparable(_why(nodes[name], nodes.get(move.reader), move))
        _compute_whole(step, [nodes[name] for name in needed], splits.keys(), whole)
    return _written(step, plan, splits, whole)


_ADDS = (aten.add.Tensor, aten.sub.Tensor)


def _tensors_for_numbers(step: StepGraph) -> None:
    """What is added to a result with one element becomes a tensor, which can be added once: the result may be a sum over the parts."""
    for node in list(step.graph.nodes):
        if node.target not in _ADDS or node.meta["val"].numel() > 1:
            continue
        value = node.meta["val"]
        for place in (0, 1):
            if not isinstance(number := node.args[place], torch.fx.Node):
                node.update_arg(place, Editor(step.graph, node)(aten.full.default, [], number, dtype=value.dtype, device=value.device))


def joined(values: Sequence[Tensor], how: Split | str) -> Tensor:
    """A result of the batch from those of its parts, in order."""
    if isinstance(how, Split):
        blocks = [value.unflatten(how.dim, (how.outer, -1)) for value in values]
        return torch.stack(blocks, how.dim + 1).flatten(how.dim, how.dim + 2)
    if how == SAME:
        return values[0]
    return functools.reduce({SUM: torch.add, MAX: torch.maximum, MIN: torch.minimum}[how], values)


def _planned(step: StepGraph, count: int, splits: Mapping[str, Shard]) -> AxisPlan:
    """The plan along the axis of parts: gradients and loss as sums over them, results of the user as they are computed."""
    inputs: dict[str, Placement] = {item.name: splits[item.target] for item in step.inputs if item.kind is Kind.BATCH and item.target in splits}
    sums: dict[tuple[Kind, str], Placement] = {(item.kind, item.target): Partial() for item in step.outputs if item.kind in (Kind.GRAD, Kind.LOSS)}
    results = [(node.name, (item.kind, item.target)) for node, item in zip(step.results, step.outputs) if item.kind is Kind.USER]
    try:
        plan = assign(step, AXIS, count, inputs, sums, lambda shape: None, adds_once=True)
        homes = {key: place for name, key in results if isinstance(place := plan.placements[name], Partial)}
        return assign(step, AXIS, count, inputs, sums | homes, lambda shape: None, adds_once=True) if homes else plan
    except GraphError as error:
        raise Inseparable(str(error)) from error


def _given(step: StepGraph) -> set[torch.fx.Node]:
    """The values that follow from the batch, buffers and random numbers alone."""
    kinds = {node: item.kind for node, item in zip(step.placeholders, step.inputs)}
    found: set[torch.fx.Node] = set()
    for node in step.graph.nodes:
        if kinds[node] in _GIVEN if node in kinds else node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _compute_whole(step: StepGraph, values: list[torch.fx.Node], split: Collection[str], whole: dict[str, str]) -> None:
    """Let every part compute these values from the inputs of the whole batch."""
    graph = step.graph
    inputs = dict(zip(step.placeholders, step.inputs))
    read: dict[str, torch.fx.Node] = {whole[item.target]: node for node, item in inputs.items() if item.target in whole}
    last, added = step.placeholders[-1], []
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in _ancestors(values):
        item = inputs.get(node)
        if item is None:
            with graph.inserting_before(node):
                copies[node] = copy_node(graph, node, copies.__getitem__)
        elif item.kind is not Kind.BATCH or item.target not in split:
            copies[node] = node
        else:
            if item.target not in read:
                with graph.inserting_after(last):
                    read[item.target] = last = copy_node(graph, node, copies.__getitem__)
                target = f"{item.target} of the whole batch"
                whole[target] = item.target
                added.append(dataclasses.replace(item, name=last.name, target=target))
            copies[node] = read[item.target]
    for node in values:
        node.replace_all_uses_with(copies[node], delete_user_cb=lambda user: user not in copies.values())
    step.inputs = (*step.inputs, *added)
    remove_dead_code(step, Log())


def _ancestors(values: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """These nodes and what they are computed from, in the graph's order."""
    found, stack = set(values), list(values)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                stack.append(node)
    return [node for node in values[0].graph.nodes if node in found]


def _repeated(step: StepGraph, plan: AxisPlan, split: Collection[str]) -> str:
    """The first call that every part makes with parameters and all examples."""
    kinds = {node: item for node, item in zip(step.placeholders, step.inputs)}
    of_batch: set[torch.fx.Node] = set()
    of_model: set[torch.fx.Node] = set()
    for node in step.graph.nodes:
        item = kinds.get(node)
        if (item is not None and item.kind is Kind.BATCH and item.target in split) or not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
        if (item is not None and item.kind is Kind.PARAM) or not of_model.isdisjoint(node.all_input_nodes):
            of_model.add(node)
        if node in of_batch and node in of_model and plan.placements.get(node.name) == REPLICATE:
            return f"{node.target} of {shape_of(node)}{_at(node)}"
    return ""


def _written(step: StepGraph, plan: AxisPlan, splits: Mapping[str, Shard], whole: Mapping[str, str]) -> Microbatches:
    local, _ = write(step, plan)
    number = number_parts(local, AXIS, plan.num_ranks, "microbatch")
    _write_buffers_last(local, number, plan.num_ranks)
    value = number.meta["val"]
    local.inputs = (
        Input(name=number.name, kind=Kind.BATCH, target=NUMBER, shape=tuple(value.shape), dtype=value.dtype),
        *(dataclasses.replace(item, shape=tuple(shape_of(node))) for item, node in zip(step.inputs, local.placeholders[1:], strict=True)),
    )
    local.outputs = tuple(dataclasses.replace(item, shape=tuple(shape_of(node))) for item, node in zip(step.outputs, local.results, strict=True))
    remove_dead_code(local, Log())
    local.verify()
    return Microbatches(
        step=local,
        count=plan.num_ranks,
        splits={target: Split(place.dim) for target, place in splits.items()},
        whole=dict(whole),
        repeated=_repeated(step, plan, splits.keys() | whole.keys()),
        results={item.target: _combined(place) for item, place in zip(step.outputs, plan.outputs, strict=True) if item.kind is Kind.USER},
    )


def _combined(place: Placement) -> Split | str:
    if isinstance(place, Shard):
        return Split(place.dim, place.outer)
    return place.op if isinstance(place, Partial) else SAME


def _write_buffers_last(local: StepGraph, number: torch.fx.Node, count: int) -> None:
    """Buffers keep what they have until the last part: all parts read the same."""
    before = {item.target: node for node, item in zip(local.placeholders[1:], local.inputs, strict=True) if item.kind is Kind.BUFFER}
    results = list(local.results)
    for place, (node, item) in enumerate(zip(local.results, local.outputs, strict=True)):
        if item.kind is Kind.BUFFER and item.target in before and node.op == "call_function":
            edit = Editor(local.graph, node.next, like=node)  # where a stage of a pipeline makes the new value
            results[place] = edit(aten.where.self, edit(aten.eq.Scalar, number, count - 1), node, before[item.target])
    local.graph.output_node().args = (tuple(results),)


def _why(value: torch.fx.Node, reader: torch.fx.Node | None, move: Move) -> str:
    reads = "the loop" if reader is None or reader is value else str(reader.target)
    what = "a value" if value.op == "placeholder" else f"what {value.target} gives"
    return f"{reads} needs {what} {shape_of(value)} for the whole batch, which depends on parameters{_at(value if reader is None else reader)}"


def _at(node: torch.fx.Node) -> str:
    line = source_line(node.meta.get("stack_trace"))
    return f", at {line}" if line else ""


__all__ = ["NUMBER", "Inseparable", "Microbatches", "in_microbatches", "joined"]
