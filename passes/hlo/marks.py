"""The marks of tensor and sequence parallelism on what XLA partitions, a graph or captured HLO: what `graphacc.passes.partition` decides along `tp`, as shardings."""

from collections.abc import Mapping

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.ops.facts import LAYOUT_KINDS, of_kind
from graphacc.passes.attention import ATTACH_ATTENTION
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.edit import Editor
from graphacc.passes.experts import ATTACH_EXPERTS
from graphacc.passes.hlo.operators import Operators
from graphacc.passes.one_hot import SUM_ONE_HOTS
from graphacc.passes.partition import AxisPlan, Role
from graphacc.passes.partition.placement import Partial, Shard
from graphacc.passes.pipeline import tensor_parallel_plan
from graphacc.passes.remat import needs_remat, remat_pass
from graphacc.passes.runner import Log, Pass
from graphacc.strategy.annotations import P
from graphacc.strategy.axes import TP
from graphacc.strategy.spec import Strategy

_VIEWS = of_kind(*LAYOUT_KINDS)


def marking_passes(step: StepGraph, strategy: Strategy, *, splits: Mapping[str, Shard], batch_dims: Mapping[str, int | None]) -> list[Pass]:
    """The passes in front of XLA's partitioner: those on the whole graph, and the marks of sequences where the strategy splits them.

    Args:
        step: the captured graph.
        splits: parameter -> its split along `tp`.
        batch_dims: target of every BATCH input -> the dim that is split over the data axes, or None.
    """
    passes = [DEAD_CODE, COMMON_SUBEXPRESSIONS, SUM_ONE_HOTS, ATTACH_ATTENTION, ATTACH_EXPERTS]
    if needs_remat(step, strategy):  # what the model checkpoints; there is no partition yet whose collectives could be kept
        passes.append(remat_pass(strategy, ()))
    if strategy.sequence_parallel:

        def run(step: StepGraph, log: Log) -> StepGraph:
            _mark_sequences(step, tensor_parallel_plan(step, strategy, splits, batch_dims), log)
            return step

        passes.append(Pass(name="mark-sequences", exact=True, run=run))
    return [*passes, DEAD_CODE]


def annotations_of(splits: Mapping[str, Shard]) -> dict[str, P]:
    """The splits of parameters as shardings. XLA pads nothing that is stored and knows no interleaved blocks: what would be padded stays whole, and blocks are contiguous."""
    return {name: P(*([None] * split.dim), TP) for name, split in splits.items() if not split.padding}


def hlo_marks(operators: Operators, strategy: Strategy, *, splits: Mapping[str, Shard], batch_dims: Mapping[str, int | None]) -> dict[int, str]:
    """The marks of sequences in captured HLO, where the strategy splits them: number of a value -> the text of its spec."""
    if not strategy.sequence_parallel:
        return {}
    plan = tensor_parallel_plan(operators.step, strategy, splits, batch_dims)
    return {operators.values[node.name]: spec for node, spec in _sequences(operators.step, plan).items() if node.name in operators.values}


def _mark_sequences(step: StepGraph, plan: AxisPlan, log: Log) -> None:
    following = dict(zip(step.graph.nodes, list(step.graph.nodes)[1:]))
    for node, spec in _sequences(step, plan).items():
        mark = Editor(step.graph, following[node], like=node)(torch.ops.graphacc.mark_sharding.default, node, spec)
        node.replace_all_uses_with(mark, delete_user_cb=lambda user, mark=mark: user is not mark)
        log.rewrote()


def _sequences(step: StepGraph, plan: AxisPlan) -> dict[torch.fx.Node, str]:
    """What the plan sums up along `tp` and keeps split along the sequence, and the texts of specs that say so."""
    nodes = {node.name: node for node in step.graph.nodes}
    found: dict[torch.fx.Node, str] = {}
    for move in plan.moves:
        if move.role is Role.ACTIVATION and isinstance(move.source, Partial) and isinstance(move.target, Shard):
            for node in _with_sequence(nodes[move.value], move.target, plan):
                split = plan.placements[node.name] if node is not nodes[move.value] else move.target
                assert isinstance(split, Shard), f"{node.name} is placed as {split}"
                found[node] = "," * split.dim + TP
    return found


def _with_sequence(node: torch.fx.Node, split: Shard, plan: AxisPlan) -> list[torch.fx.Node]:
    """A value, or the views of it, in which the sequence is a dim of its own: [B * T, D] is split in interleaved blocks, which no sharding names."""
    if split.outer == 1:
        return [node]
    found = []
    for user in node.users:
        placement = plan.placements.get(user.name)
        if user.target in _VIEWS and isinstance(placement, Shard):
            found += _with_sequence(user, placement, plan)
    return found
