"""The program of one rank, written as an `AxisPlan` says."""

import dataclasses
import itertools
from typing import Any

import torch.fx

from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, MeshShard, Output, StepGraph
from graphacc.passes.partition.emit import Emitter
from graphacc.passes.partition.placement import Partial, Placement, Shard, local_shape
from graphacc.passes.partition.plan import Action, AxisPlan
from graphacc.passes.partition.report import ForcedGather, PartitionReport, source_line


def write(step: StepGraph, plan: AxisPlan) -> tuple[StepGraph, PartitionReport]:
    """The program of one rank of ``plan.axis``; `step`, of which the plan was made, is not changed.

    Raises:
        GraphError: a local call does not give what the plan says, or communicates otherwise.
    """
    build = Emitter(plan.axis, plan.num_ranks)
    values: list[Any] = []
    for action in plan.actions:
        build.node = action.node
        read = [values[i] for i in action.inputs]
        if build.masked:
            read = [build.masked.get(value, value) if isinstance(value, torch.fx.Node) else value for value in read]
        new = action.write(build, *read)
        if action.expected is not None:
            _check(plan, action, new)
        values.append(new)
    results = tuple(values[i] for i in plan.results)
    build.graph.output(results)
    build.graph.output_node().meta["val"] = tuple(node.meta["val"] for node in results)
    _say_what_moves(plan, build)
    inputs, outputs = signature(step, plan)
    report = PartitionReport(
        plan=plan,
        collectives=build.collectives,
        forced=forced_gathers(step, plan),
        notes=list(plan.notes),
        homes={name: values[action].name for name, action in plan.homes.items()},
    )
    return StepGraph(build.graph, inputs, outputs, step.constants), report


def signature(step: StepGraph, plan: AxisPlan) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """The inputs and outputs of the program of one rank."""
    inputs = tuple(_sharded(plan, item, placement) for item, placement in zip(step.inputs, plan.inputs))
    return inputs, tuple(_sharded(plan, item, placement) for item, placement in zip(step.outputs, plan.outputs))


def _sharded(plan: AxisPlan, item: Any, placement: Placement) -> Any:
    if plan.sums_late and item.kind is Kind.GRAD and isinstance(placement, Partial):
        behind = tuple(dataclasses.replace(shard, dim=shard.dim + 1) for shard in item.shards)
        own = MeshShard(axis=plan.axis, size=plan.num_ranks, dim=0)
        return dataclasses.replace(item, shape=(plan.num_ranks, *item.shape), shards=(own, *behind), num_terms=item.num_terms + 1)
    if not isinstance(placement, Shard):
        return item
    shard = MeshShard(axis=plan.axis, size=plan.num_ranks, dim=placement.dim, outer=placement.outer)
    return dataclasses.replace(item, shards=(*item.shards, shard))


def _check(plan: AxisPlan, action: Action, new: Any) -> None:
    node, value = action.node, action.node.meta["val"]
    expected = local_shape(tuple(value.shape), action.expected, plan.num_ranks)
    got = new.meta["val"]
    if tuple(got.shape) != expected or got.dtype != value.dtype:
        raise GraphError(
            f"partition along {plan.axis}: node {node.name!r} ({node.target}) became {got.dtype}{list(got.shape)}, but as {action.expected} "
            f"of {value.dtype}{list(value.shape)} it must be {list(expected)}: its rule is wrong"
        )


def _say_what_moves(plan: AxisPlan, build: Emitter) -> None:
    """Every collective gets its move in ``meta["move"]``: they are written in the order in which they were planned."""
    planned = (move for move in plan.moves if move.travels)
    for move, item in itertools.zip_longest(planned, build.collectives):
        if move is None or item is None or (move.collective, move.size_bytes) != (item.kind, item.size_bytes):
            raise GraphError(
                f"partition along {plan.axis}: the plan moves {move}, where the program has {item}: the rule of an operator communicates and is "
                f"not marked as Communicating"
            )
        item.node.meta["move"] = move


def forced_gathers(step: StepGraph, plan: AxisPlan) -> list[ForcedGather]:
    """The moves that an operator forced, with the user's source line."""
    moves = [move for move in plan.moves if move.forced]
    nodes = {node.name: node for node in step.graph.nodes} if moves else {}
    found = []
    for move in moves:
        value, reader = nodes[move.value].meta["val"], nodes[move.reader]
        found.append(ForcedGather(move, str(reader.target), tuple(value.shape), source_line(reader.meta.get("stack_trace"))))
    return found
