"""The pass that lets backward compute values of the forward again (Chen et al., "Training deep nets with sublinear memory cost", 2016)."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

from graphacc.costs.memory import saved_for_backward
from graphacc.graph import CHECKPOINT, Phase, StepGraph
from graphacc.passes.remat.auto import Choice, choose_variants
from graphacc.passes.remat.exchanged import exchanged_values
from graphacc.passes.remat.recompute import recompute, verify_recomputed
from graphacc.passes.remat.regions import REGION, Regions, find_regions
from graphacc.passes.remat.variants import VARIANTS
from graphacc.passes.runner import Log, Pass
from graphacc.strategy.spec import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematReport:
    """What is computed again."""

    num_regions: int
    num_calls: int  # of the forward that backward repeats
    saved_bytes: tuple[int, int]  # that the whole mesh keeps from forward to backward, before and after
    choice: Choice | None = None  # of remat="auto"

    def __str__(self) -> str:
        before, after = (size / 1e6 for size in self.saved_bytes)
        line = f"  {self.num_regions} regions, {self.num_calls} calls are computed again; kept for backward: {before:.1f} -> {after:.1f} MB of the whole step"
        return line if self.choice is None else f"{line}\n{self.choice}"


def needs_remat(step: StepGraph, strategy: Strategy) -> bool:
    """Whether anything is computed again: backward follows a forward, and the strategy or the user's model asks for it."""
    phases = {node.meta["phase"] for node in step.graph.nodes if node.op == "call_function"}
    asked = strategy.remat != "none" or any(CHECKPOINT in node.meta for node in step.graph.nodes)
    return asked and phases >= {Phase.FORWARD, Phase.BACKWARD}


def remat_pass(strategy: Strategy, later: Sequence[Pass]) -> Pass:
    """Recomputation as `strategy.remat` says, and of what the user has checkpointed.

    Args:
        later: the passes that follow: no collective of their partitions is repeated, and "auto" predicts the memory of what they leave.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        regions = find_regions(step, blocks=strategy.remat != "none")
        _mark(step, regions)
        before = sum(saved_for_backward(step).values())
        kept = {node.name for node in exchanged_values(step, [item for item in later if item.decide is not None])}
        names = list(dict.fromkeys(regions[node] for node in step.graph.nodes if node in regions))
        choice = None
        if strategy.remat == "auto":
            assert strategy.memory_gb is not None, "Strategy asks for it"
            free = [name for name in names if not _is_pinned(name)]
            choice = choose_variants(free, lambda variants: _local(step.copy(), variants, kept, later), round(strategy.memory_gb * 1e9))
            variants = dict(choice.variants)
        else:
            variants = {name: _variant(name, strategy) for name in names if not _is_pinned(name)}
        num_calls = _rewrite(step, regions, variants, kept)
        log.rewrote(num_calls)
        after = sum(saved_for_backward(step).values())
        log.details = RematReport(num_regions=len(names), num_calls=num_calls, saved_bytes=(before, after), choice=choice)
        return step

    return Pass(name="rematerialise", exact=True, optional=True, run=run, verify=verify_recomputed, key=("rematerialise", strategy))


def _mark(step: StepGraph, regions: Regions) -> None:
    """Say of calls which region they belong to, for the prediction and for who reads the program."""
    for node in step.graph.nodes:
        if node in regions:
            node.meta[REGION] = regions[node]
        elif node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD:
            read = [regions[operand] for operand in node.all_input_nodes if operand in regions]
            if read:
                node.meta[REGION] = read[-1]


def _rewrite(step: StepGraph, regions: Regions, variants: Mapping[str, str], kept: set[str]) -> int:
    """Let backward compute again what the variants of the regions do not keep; regions without one are the user's."""
    stays = {
        node
        for node, region in regions.items()
        if node.name in kept or (VARIANTS[variants[region]](node) if region in variants else node.meta[CHECKPOINT].saved)
    }
    num_calls = recompute(step, regions, stays)
    step.graph.eliminate_dead_code()
    return num_calls


def _local(step: StepGraph, variants: Mapping[str, str], kept: set[str], later: Sequence[Pass]) -> StepGraph:
    """The program of one rank under these variants."""
    regions = {node: node.meta[REGION] for node in step.graph.nodes if REGION in node.meta and node.meta["phase"] is Phase.FORWARD}
    _rewrite(step, regions, variants, kept)
    for item in later:
        step = item.run(step, Log())
    return step


def _variant(region: str, strategy: Strategy) -> str:
    """What a region keeps under a strategy that says it: the first pattern that fits it, everything where none does."""
    if strategy.remat == "blocks":
        return "inputs"
    pairs = strategy.remat if isinstance(strategy.remat, tuple) else ()
    return next((variant for pattern, variant in pairs if fnmatch.fnmatchcase(region.partition(", segment ")[0], pattern)), "all")


def _is_pinned(region: str) -> bool:
    """Whether a region is the user's own."""
    return region.startswith(PINNED)


PINNED = "checkpoint "
"""How the names of regions begin that the model itself gives to torch.utils.checkpoint."""
