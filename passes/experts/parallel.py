"""Expert parallelism: the partition along `ep`.

The batch is split over `ep` as over the data axes, and so are the experts: the stacked weights of grouped products, their gradients and
their optimizer state along dim 0. Rows go to the rank of their expert and back by all-to-all (`passes.partition.routing`), so that a mixture
of experts costs two exchanges of rows forward and two backward.

Every other parameter is the same on all ranks, and is split over them as ZeRO's stage says (`passes/partition/zero.py`), before `fsdp` splits what that
leaves; without ZeRO it is whole on each.
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import cast

import torch
from torch import fx

from graphacc.errors import StrategyError
from graphacc.graph import FILLED, Input, Kind, Output, Phase, StepGraph, local_shape
from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.experts.find import PRODUCTS
from graphacc.passes.partition import AxisPlan, assign
from graphacc.passes.partition.axis import axis_pass
from graphacc.passes.partition.placement import Shard
from graphacc.passes.partition.report import PartitionReport
from graphacc.passes.partition.rules import ExpertParallel
from graphacc.passes.partition.zero import batch_splits, split_before, zero_layouts
from graphacc.passes.runner import Pass
from graphacc.strategy.axes import EP
from graphacc.strategy.spec import Strategy

aten, ops = torch.ops.aten, torch.ops.graphacc
_SAME = of_kind(OpKind.SAME, OpKind.CAST, OpKind.ORDER)
_GROUPED = (ops.grouped_mm.default, ops.grouped_mm_weight_grad.default)
_TURNS = (aten.permute.default, aten.transpose.int)


def find_experts(step: StepGraph) -> frozenset[str]:
    """The parameters of a graph with a forward part that hold one matrix per expert, [E, ...]: the weights of grouped products."""
    params = {node: item.target for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.PARAM}
    found = set()
    for node in step.graph.nodes:
        if (node.target is ops.grouped_mm.default or str(node.target) in PRODUCTS) and len(node.args) > 1:
            weight = _root(node.args[1])
            if weight in params:
                found.add(params[weight])
    return frozenset(found)


def _root(weight: fx.Node) -> fx.Node:
    """What a weight is made of without moving its dim 0."""
    while weight.target in _SAME or (weight.target in _TURNS and _keeps_front(weight)):
        weight = weight.args[0]
    return weight


def _keeps_front(node: fx.Node) -> bool:
    rank = node.meta["val"].dim()
    dims = node.args[1] if node.target is aten.permute.default else node.args[1:3]
    return dims[0] % rank == 0 if node.target is aten.permute.default else 0 not in {dim % rank for dim in dims}


def expert_parallel_pass(step: StepGraph, strategy: Strategy, experts: Collection[str], batch_dims: Mapping[str, int | None], stage: int) -> Pass:
    """The partition along `ep`.

    Args:
        step: the captured graph; only its signature is read.
        experts: the parameters that are split.
        stage: of ZeRO: what it splits over `fsdp` of other parameters is split over `ep` too.

    Raises:
        StrategyError: the model has no experts, or a number of them that `ep` does not divide.
    """
    check_experts(step, strategy.ep, experts)

    def decide(step: StepGraph) -> AxisPlan:
        _check_routing(step, strategy.ep)
        own = [item for item in (*step.inputs, *step.outputs) if _is_of_experts(step, item, experts)]
        shapes = {local_shape(item.shape, item.shards) for item in own}
        layouts = zero_layouts(step, stage, batch_splits(step, batch_dims), lambda shape: Shard(0) if shape in shapes else split_before(shape, strategy.ep, strategy.fsdp))
        inputs = layouts.inputs | {item.name: Shard(0) for item in own if isinstance(item, Input)}
        outputs = layouts.outputs | {(item.kind, item.target): Shard(0) for item in own if isinstance(item, Output) and item.kind is Kind.GRAD}
        updated = frozenset(node for node, item in zip(step.results, step.outputs) if item.kind is Kind.PARAM and _is_of_experts(step, item, experts))
        spread = ExpertParallel(weights=frozenset(experts), updated=updated, capacity_factor=strategy.capacity_factor, multiple=strategy.dp * strategy.fsdp)
        return assign(step, EP, strategy.ep, inputs, outputs, layouts.state, experts=spread, reduce_narrow=strategy.reduces_narrow)

    zero = stage, strategy.fsdp if stage else 1
    key = strategy.reduces_narrow, strategy.capacity_factor, strategy.dp * strategy.fsdp, tuple(sorted(experts)), tuple(batch_dims.items()), zero
    return axis_pass(EP, strategy.ep, decide, key=key, note=functools.partial(_note_rows, strategy=strategy))


def check_experts(step: StepGraph, num_ranks: int, experts: Collection[str]) -> None:
    """Raise StrategyError unless there are experts, which `num_ranks` divides."""
    if not experts:
        raise StrategyError(
            f"ep={num_ranks} spreads experts over devices, but no grouped product of sorted rows with a parameter [experts, ...] is in this "
            f"model: leave ep=1, and use fsdp for models without experts"
        )
    for item in step.inputs:
        if item.kind is Kind.PARAM and item.target in experts and item.shape[0] % num_ranks:
            fits = ", ".join(str(count) for count in range(1, item.shape[0] + 1) if item.shape[0] % count == 0)
            raise StrategyError(
                f"ep={num_ranks} does not divide the {item.shape[0]} experts of {item.target!r} {list(item.shape)}: choose ep out of {fits}"
            )


def check_pins(pins: Mapping[str, Iterable[str | None]], experts: Collection[str]) -> None:
    """Raise StrategyError where a parameter is annotated with `ep` that it cannot follow."""
    for name, spec in pins.items():
        dims = [dim for dim, entry in enumerate(spec) if entry == EP]
        if dims and (dims != [0] or name not in experts):
            raise StrategyError(
                f"the annotation {spec!r} on {name!r} splits dim {dims[0]} over ep, which splits dim 0 of the weights of experts and nothing else "
                f"({', '.join(sorted(experts)) or 'this model has none'}): take ep out of the annotation"
            )


def _check_routing(step: StepGraph, num_ranks: int) -> None:
    """Raise StrategyError if the model is run forward and no routing was recognised."""
    phases = {node.meta.get("phase") for node in step.graph.nodes if node.op == "call_function"}
    if Phase.FORWARD in phases and not any(node.target is ops.grouped_mm.default for node in step.graph.nodes):
        raise StrategyError(
            f"ep={num_ranks}: the model has experts, but how it routes rows to them is not known (the report of the pass "
            f"'attach-experts' says what was left, and why): sort the experts' ids, look rows up in that order and put them back, or leave ep=1"
        )


def _is_of_experts(step: StepGraph, item: Input | Output, experts: Collection[str]) -> bool:
    """Whether an input or output has the experts of a parameter along dim 0: that itself, its gradient, state of its shape."""
    owner = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
    if item.kind not in (Kind.PARAM, Kind.GRAD, Kind.STATE) or owner not in experts:
        return False
    if item.kind is Kind.STATE:
        shapes = {other.target: other.shape for other in step.inputs if other.kind is Kind.PARAM}
        return bool(item.shape) and item.shape == shapes.get(owner, item.shape)
    return True


def _note_rows(step: StepGraph, report: PartitionReport, strategy: Strategy) -> None:
    """The share of rows that grouped products compute, and what is dropped."""
    share = 1.0
    for node in step.graph.nodes:
        if node.target is ops.bucket_rows.default and node.args[0] is node.args[1]:
            rows, room = node.args[1].meta["val"].shape[0], cast(int, node.args[4])
            share = min(1.0, rows / (strategy.ep * room))
            if strategy.capacity_factor is None:
                continue
            where = node.meta.get("module_path") or node.name
            report.notes.append(
                f"{where}: ranks send each other at most {room} of their {rows} rows (capacity_factor={strategy.capacity_factor}); "
                f"rows beyond are dropped, and give zero"
            )
        elif node.target in _GROUPED:
            node.meta[FILLED] = share
