"""A captured step for XLA's SPMD partitioner (`Strategy.tp_by`): the passes on the whole graph, the marks, and the layouts of inputs and outputs."""

from collections.abc import Collection, Mapping

from graphacc.graph import StepGraph
from graphacc.hlo import HloStep
from graphacc.passes.hlo.marks import annotations_of, marking_passes
from graphacc.passes.hlo.shardings import with_layouts
from graphacc.passes.partition.placement import Shard
from graphacc.passes.runner import PassReport, run_passes
from graphacc.runtime.graph_as_hlo import graph_as_hlo
from graphacc.strategy import Strategy


def spmd_step(
    step: StepGraph, strategy: Strategy, *, splits: Mapping[str, Shard], batch_dims: Mapping[str, int | None], without: Collection[str] = ()
) -> tuple[HloStep, list[PassReport]]:
    """The step with its shardings, and what the passes did to the graph, which may be changed.

    Args:
        splits: parameter -> its split along `tp`.
        batch_dims: target of every BATCH input -> the dim that is split over the data axes, or None.
        without: names of optional passes that are left out.
    """
    passes = marking_passes(step, strategy, splits=splits, batch_dims=batch_dims)
    step, reports = run_passes(step, [item for item in passes if item.name not in without])
    return with_layouts(graph_as_hlo(step), strategy, batch_dims=batch_dims, annotations=annotations_of(splits)), reports
