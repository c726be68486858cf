"""The pass that partitions a step along one mesh axis."""

import functools
from collections.abc import Callable, Hashable

import torch

from graphacc.errors import GraphError
from graphacc.graph import StepGraph
from graphacc.passes.partition.plan import AxisPlan
from graphacc.passes.partition.report import PartitionReport
from graphacc.passes.partition.write import write
from graphacc.passes.runner import Log, Pass

collective = torch.ops._c10d_functional
_SIZED = (collective.all_gather_into_tensor.default, collective.reduce_scatter_tensor.default)


def axis_pass(
    axis: str,
    num_ranks: int,
    decide: Callable[[StepGraph], AxisPlan],
    *,
    key: Hashable,
    note: Callable[[StepGraph, PartitionReport], None] | None = None,
) -> Pass:
    """The partition along `axis`; not exact bit for bit, for sums are taken in another order.

    Args:
        decide: makes the plan of the step that the pass is given.
        key: everything besides that step which `decide` depends on.
        note: adds to the report what the program changes besides the order of sums.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        result, report = write(step, decide(step))
        if note is not None:
            note(result, report)
        log.details = report
        log.rewrote(len(report.collectives))
        return result

    verify = functools.partial(_verify_axis, axis=axis, num_ranks=num_ranks)
    return Pass(name=f"partition-{axis}", exact=False, run=run, verify=verify, decide=decide, key=(axis, num_ranks, key))


def _verify_axis(step: StepGraph, axis: str, num_ranks: int) -> None:
    """Every collective over `axis` has its size."""
    for node in step.graph.nodes:
        if node.target in _SIZED and node.args[-1] == axis and node.args[-2] != num_ranks:
            raise GraphError(f"node {node.name!r} communicates over {node.args[-2]} ranks of {axis!r}, which has {num_ranks}")
        if node.target is collective.all_to_all_single.default and node.args[-1] == axis and len(node.args[1]) != num_ranks:
            raise GraphError(f"node {node.name!r} exchanges {len(node.args[1])} blocks over {num_ranks} ranks of {axis!r}")
    verify_collectives(step)


def verify_collectives(step: StepGraph) -> None:
    """Every collective says what it moves, and its result is waited for."""
    for node in step.graph.nodes:
        if node.target in (*_SIZED, collective.all_reduce.default, collective.all_to_all_single.default):
            early = [user.name for user in node.users if user.target is not collective.wait_tensor.default]
            if early:
                raise GraphError(f"nodes {early} read {node.name!r} without waiting for it")
            if "move" not in node.meta:
                raise GraphError(f"node {node.name!r} ({node.target}) does not say what it moves: meta['move'] is missing")
