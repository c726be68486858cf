"""remat="auto": variants are chosen against the predicted peak of the program of one rank.

The step is carried through all later passes once for every variant, taken by all regions alike. The predicted memory of these programs, in program
order, gives the numbers of the integer program (`choose.py`), which is solved for a ladder of peaks from that of keeping everything down to the least. Taken is the
cheapest of these answers whose own program, carried through the passes and predicted, is within the budget. The ladder does not depend on the budget, so
that a larger budget never computes more again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch.fx

from graphacc.costs.memory import memory_profile, predict_memory, saved_for_backward
from graphacc.errors import StrategyError
from graphacc.graph import Phase, StepGraph
from graphacc.passes.remat.choose import RematProblem, RematSolution, Variant, peak_of, solve
from graphacc.passes.remat.recompute import is_copy
from graphacc.passes.remat.regions import REGION
from graphacc.passes.remat.variants import VARIANTS
from graphacc.passes.stages.units import work

_RUNGS = 64  # of the ladder
_WORTH_TRYING = 1.25  # times the budget: a peak of the integer program above which an answer's program is not made

Make = Callable[[Mapping[str, str]], StepGraph]
"""Variant of every region -> the program of one rank, or of one region's default where it is left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and how good it is."""

    variants: Mapping[str, str]  # region -> variant
    predicted_bytes: int  # of one device
    budget_bytes: int
    least_bytes: int  # predicted, of the choice that keeps the peak lowest
    solution: RematSolution

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for variant in self.variants.values():
            counts[variant] = counts.get(variant, 0) + 1
        said = ", ".join(f"{count} keep {variant}" for variant, count in counts.items())
        return (
            f"  of {len(self.variants)} regions {said}: {self.predicted_bytes / 1e9:.4g} GB predicted for memory_gb={self.budget_bytes / 1e9:.4g} "
            f"(the least is {self.least_bytes / 1e9:.4g}), {self.solution.cost / 1e9:.4g} GFLOP again, at most {100 * self.solution.gap:.2f} % above the bound"
        )


def choose_variants(regions: Sequence[str], make: Make, budget_bytes: int) -> Choice:
    """The cheapest variants whose predicted memory is within the budget.

    Args:
        regions: in the order of the forward.

    Raises:
        StrategyError: not even the choice with the lowest peak fits; names its memory.
    """
    programs = {name: make(dict.fromkeys(regions, name)) for name in VARIANTS}
    names, problem = list(VARIANTS), _problem(regions, programs)
    alike = {(v,) * len(regions): predict_memory(programs[name]).peak_bytes for v, name in enumerate(names)}
    known = dict(alike)

    def named(solution: RematSolution) -> dict[str, str]:
        return {region: names[v] for region, v in zip(regions, solution.chosen, strict=True)}

    def predicted(solution: RematSolution) -> int:
        if solution.chosen not in known:
            known[solution.chosen] = predict_memory(make(named(solution))).peak_bytes
        return known[solution.chosen]

    rungs = _ladder(problem, [_of(problem, chosen) for chosen in alike])
    lowest = min(rung.peak_bytes for rung in rungs)
    at_least = min((rung for rung in rungs if rung.chosen in alike or rung.peak_bytes == lowest), key=predicted)
    fixed = predict_memory(programs["all"])
    around = fixed.argument_bytes + fixed.output_bytes
    if predicted(at_least) > budget_bytes:
        raise StrategyError(
            f"memory_gb={budget_bytes / 1e9:.4g} holds no choice of what to compute again: the least that this step needs on a device is {predicted(at_least) / 1e9:.4g} GB "
            f"({around / 1e9:.4g} of it parameters, state and batch); raise memory_gb to that, split the step over more devices, or take a smaller batch"
        )
    tried = (rung for rung in rungs if rung.chosen in known or around + rung.peak_bytes <= _WORTH_TRYING * budget_bytes)
    taken = next((rung for rung in tried if predicted(rung) <= budget_bytes), at_least)
    best = solve(dataclasses.replace(problem, budget_bytes=max(0, budget_bytes - around)))
    bound = taken.cost if best is None else min(best.lower_bound, taken.cost)
    return Choice(
        variants=named(taken),
        predicted_bytes=predicted(taken),
        budget_bytes=budget_bytes,
        least_bytes=predicted(at_least),
        solution=dataclasses.replace(taken, lower_bound=bound),
    )


def _ladder(problem: RematProblem, alike: Sequence[RematSolution]) -> list[RematSolution]:
    """The best choices for peaks between that of keeping everything and the least, and those in which regions are alike; by cost."""
    lowest = solve(problem)
    assert lowest is not None, "without a budget there is an answer"
    highest = max(each.peak_bytes for each in alike)
    found = {each.chosen: each for each in (*alike, lowest)}
    for rung in range(1, _RUNGS):
        target = highest - (highest - lowest.peak_bytes) * rung // _RUNGS
        answer = solve(dataclasses.replace(problem, budget_bytes=target))
        if answer is not None:
            found.setdefault(answer.chosen, answer)
    return sorted(found.values(), key=lambda each: (each.cost, -each.peak_bytes))


def _of(problem: RematProblem, chosen: Sequence[int]) -> RematSolution:
    """A choice that was not searched for: its cost is bounded by nothing."""
    cost = sum(region[v].cost for region, v in zip(problem.regions, chosen, strict=True))
    return RematSolution(chosen=tuple(chosen), peak_bytes=peak_of(problem, tuple(chosen)), cost=cost, lower_bound=0.0)


def _problem(regions: Sequence[str], programs: Mapping[str, StepGraph]) -> RematProblem:
    """The numbers of the integer program, without a budget."""
    rows: dict[str, list[Variant]] = {region: [] for region in regions}
    outside = 0
    for name, step in programs.items():
        kept = dict.fromkeys(regions, 0)
        for node, size in saved_for_backward(step).items():
            if node.meta.get(REGION) in kept:
                kept[node.meta[REGION]] += size
        cost = dict.fromkeys(regions, 0.0)
        for node in step.graph.nodes:
            if is_copy(node) and node.meta.get(REGION) in cost:
                cost[node.meta[REGION]] += work(node)
        peaks = _peaks(step)
        before = 0
        for region in regions:
            inside = max(peaks.get(region, 0) - before, kept[region])
            rows[region].append(Variant(name=name, kept_bytes=kept[region], inside_bytes=inside, cost=cost[region]))
            before += kept[region]
        outside = max(outside, peaks.get("", 0) - before)
    return RematProblem(regions=tuple(tuple(rows[region]) for region in regions), outside_bytes=outside, budget_bytes=None)


def _peaks(step: StepGraph) -> dict[str, int]:
    """Region -> the most that is stored during its backward; "": during all else."""
    stored = memory_profile(step)
    found: dict[str, int] = {}
    now = ""
    for node in step.graph.nodes:
        if node.op == "call_function":
            now = _section(node, now)
            found[now] = max(found.get(now, 0), stored.get(node, 0))
    return found


def _section(node: torch.fx.Node, before: str) -> str:
    """The region in whose backward a call stands; calls of backward without a mark stand with those in front of them."""
    return node.meta.get(REGION, before) if node.meta["phase"] is Phase.BACKWARD else ""
