"""The whole pipeline as one list."""

import functools
from collections.abc import Mapping

import torch

from graphacc.errors import GraphError, StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.partition.driver import partition
from graphacc.passes.partition.regather import separate_backward_reads, verify_backward_reads
from graphacc.passes.partition.zero import zero_layouts
from graphacc.passes.runner import Log, Pass
from graphacc.strategy.spec import Strategy


def build_pipeline(step: StepGraph, strategy: Strategy, *, batch_dims: Mapping[str, int | None]) -> list[Pass]:
    """The passes that turn a captured graph into the program of one device of `strategy`.

    Args:
        step: the captured graph, with global shapes. Only its signature is read.
        batch_dims: target of every BATCH input -> the dim that is split over the devices, or None. Any choice gives the
            same results; `default_batch_dims` makes a good one.

    Raises:
        StrategyError: `batch_dims` does not fit the signature, or a batch dim does not divide.
    """
    check_batch(step, strategy, batch_dims)
    passes = [DEAD_CODE, COMMON_SUBEXPRESSIONS]
    if strategy.zero_stage == 3:
        passes.append(REGATHER)
    if strategy.fsdp > 1:
        passes.append(partition_pass("fsdp", strategy.fsdp, strategy.zero_stage, batch_dims))
    if strategy.dp > 1:
        passes.append(partition_pass("dp", strategy.dp, 0, batch_dims))
    return [*passes, DEAD_CODE, COMMON_SUBEXPRESSIONS]


def partition_pass(axis: str, num_ranks: int, stage: int, batch_dims: Mapping[str, int | None]) -> Pass:
    """The partition along one data axis; not exact bit for bit, for sums are taken in another order."""

    def run(step: StepGraph, log: Log) -> StepGraph:
        layouts = zero_layouts(step, num_ranks, stage, batch_dims)
        result, log.details = partition(step, axis, num_ranks, layouts.inputs, layouts.outputs, layouts.state)
        log.rewrote(len(log.details.collectives))
        return result

    return Pass(
        name=f"partition-{axis}", exact=False, run=run, verify=functools.partial(_verify_axis, axis=axis, num_ranks=num_ranks)
    )


REGATHER = Pass(name="separate-backward-reads", exact=True, run=separate_backward_reads, verify=verify_backward_reads)


def _verify_axis(step: StepGraph, axis: str, num_ranks: int) -> None:
    """Every collective over `axis` has its size, and every result of a collective is waited for."""
    collective = torch.ops._c10d_functional
    sized = (collective.all_gather_into_tensor.default, collective.reduce_scatter_tensor.default)
    for node in step.graph.nodes:
        if node.target in sized and node.args[-1] == axis and node.args[-2] != num_ranks:
            raise GraphError(f"node {node.name!r} communicates over {node.args[-2]} ranks of {axis!r}, which has {num_ranks}")
        if node.target in (*sized, collective.all_reduce.default):
            early = [user.name for user in node.users if user.target is not collective.wait_tensor.default]
            if early:
                raise GraphError(f"nodes {early} read {node.name!r} without waiting for it")


def default_batch_dims(step: StepGraph) -> dict[str, int | None]:
    """Dim 0 of every batch input whose dim 0 has the batch size, that of the first input with a dim."""
    shapes = {item.target: item.shape for item in step.inputs if item.kind is Kind.BATCH}
    size = next((shape[0] for shape in shapes.values() if shape), None)
    return {target: 0 if shape and shape[0] == size else None for target, shape in shapes.items()}


def check_batch(step: StepGraph, strategy: Strategy, batch_dims: Mapping[str, int | None]) -> None:
    """Raise StrategyError unless every batch input has a valid dim that dp * fsdp divides."""
    targets = {item.target: item for item in step.inputs if item.kind is Kind.BATCH}
    if set(batch_dims) != set(targets):
        raise StrategyError(
            f"batch_dims names {sorted(batch_dims)}, the batch has {sorted(targets)}: give every one a dim, or None"
        )
    ranks = strategy.dp * strategy.fsdp
    for target, dim in batch_dims.items():
        shape = targets[target].shape
        if dim is not None and not 0 <= dim < len(shape):
            raise StrategyError(
                f"batch_dims[{target!r}] is {dim}, but that tensor has shape {list(shape)}: give a dim from 0, or None"
            )
        if dim is not None and shape[dim] % ranks:
            raise StrategyError(
                f"batch input {target!r} has shape {list(shape)}: its dim {dim} of size {shape[dim]} is split over "
                f"dp={strategy.dp} x fsdp={strategy.fsdp} = {ranks} devices, which do not divide it. "
                f"Use a batch size that is a multiple of {ranks}, or fewer devices; where the batch is another dim, name it: "
                f"graphacc.compile(..., batch_dims={{{target!r}: 1}}), or None for a tensor that every device needs whole"
            )
