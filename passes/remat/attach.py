"""The pass that lets backward compute values of the forward again (Chen et al., "Training deep nets with sublinear memory cost", 2016)."""

import dataclasses
from collections.abc import Sequence

import torch.fx

from graphacc.costs.memory import saved_for_backward
from graphacc.graph import CHECKPOINT, Phase, StepGraph
from graphacc.passes.remat.exchanged import exchanged_values
from graphacc.passes.remat.recompute import recompute, verify_recomputed
from graphacc.passes.remat.regions import find_regions
from graphacc.passes.runner import Log, Pass
from graphacc.strategy.spec import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematReport:
    """What is computed again."""

    num_regions: int
    num_calls: int  # of the forward that backward repeats
    saved_bytes: tuple[int, int]  # that the whole mesh keeps from forward to backward, before and after

    def __str__(self) -> str:
        before, after = (size / 1e6 for size in self.saved_bytes)
        return f"  {self.num_regions} regions, {self.num_calls} calls are computed again; kept for backward: {before:.1f} -> {after:.1f} MB of the whole step"


def needs_remat(step: StepGraph, strategy: Strategy) -> bool:
    """Whether anything is computed again: backward follows a forward, and the strategy or the user's model asks for it."""
    phases = {node.meta["phase"] for node in step.graph.nodes if node.op == "call_function"}
    asked = strategy.remat != "none" or any(CHECKPOINT in node.meta for node in step.graph.nodes)
    return asked and phases >= {Phase.FORWARD, Phase.BACKWARD}


def remat_pass(strategy: Strategy, partitions: Sequence[Pass]) -> Pass:
    """Recomputation as `strategy.remat` says, and of what the user has checkpointed.

    Args:
        partitions: the passes that partition the step afterwards; no collective of theirs is repeated.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        regions = find_regions(step, blocks=strategy.remat == "blocks")
        before = sum(saved_for_backward(step).values())
        kept = exchanged_values(step, partitions) | _kept_by_policy(regions)
        num_calls = recompute(step, regions, kept)
        step.graph.eliminate_dead_code()
        log.rewrote(num_calls)
        after = sum(saved_for_backward(step).values())
        log.details = RematReport(num_regions=len(set(regions.values())), num_calls=num_calls, saved_bytes=(before, after))
        return step

    return Pass(name="rematerialise", exact=True, optional=True, run=run, verify=verify_recomputed, key=("rematerialise", strategy))


def _kept_by_policy(regions: dict[torch.fx.Node, str]) -> set[torch.fx.Node]:
    """What a policy of the user's keeps (``torch.utils.checkpoint.create_selective_checkpoint_contexts``)."""
    return {node for node in regions if CHECKPOINT in node.meta and node.meta[CHECKPOINT].saved}
