"""Which variant of every region fits a budget at the least cost: an integer program.

Variables: x[i, v] in {0, 1}, region i takes variant v; exactly one per region. Objective: the cost of what is computed again, sum of cost[i, v] x[i, v], and
among equal costs the bytes that are kept; without a budget first the peak, then the cost. Constraints (`_bound_peaks`), with kept[j, v] the bytes that region j keeps from forward to backward, regions in the
order of the forward:

- in the backward of region i: sum over j < i of kept[j, v] x[j, v] + sum of inside[i, v] x[i, v] <= budget, where inside[i, v] is what is stored at
  the region's worst moment besides what earlier regions keep: gradients, the copies, its own kept values;
- outside of regions (the head, the update): sum over all j of kept[j, v] x[j, v] + outside <= budget.

So the peak is what is bounded, not the sum of what is kept. `validate` computes the peaks of an answer anew.
"""

import dataclasses

from graphacc.errors import GraphError

_SECONDS = 20.0  # deterministic ones, of CP-SAT's
_STEPS = 1 << 40  # of the objective: costs are rounded to so many steps in all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to treat a region."""

    name: str
    kept_bytes: int  # from forward to backward
    inside_bytes: int  # stored at the worst moment of the region's backward, besides what earlier regions keep
    cost: float  # of what is computed again, in floating-point operations


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematProblem:
    """Regions in the order of the forward, and the budget of what lives besides arguments and outputs."""

    regions: tuple[tuple[Variant, ...], ...]
    outside_bytes: int  # stored at the worst moment outside of regions, besides what they keep
    budget_bytes: int | None  # None: as little as possible


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematSolution:
    """A variant for every region."""

    chosen: tuple[int, ...]
    peak_bytes: int
    cost: float
    lower_bound: float  # of the cost, at this budget or at the least peak

    @property
    def gap(self) -> float:
        """How far the answer may be from the best, relative to it."""
        return max(0.0, 1 - self.lower_bound / self.cost) if self.cost > 0 else 0.0


def solve(problem: RematProblem) -> RematSolution | None:
    """The cheapest choice within the budget, or the one with the least peak; None where none is within it.

    Raises:
        GraphError: CP-SAT ran out of time without an answer.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    takes = [[model.new_bool_var(f"{i} {variant.name}") for variant in region] for i, region in enumerate(problem.regions)]
    for row in takes:
        model.add_exactly_one(row)
    limit = model.new_int_var(0, 1 << 50, "peak")
    if problem.budget_bytes is not None:
        model.add(limit <= problem.budget_bytes)
    _bound_peaks(model, takes, problem, limit)
    pairs = [(variant, x) for region, row in zip(problem.regions, takes) for variant, x in zip(region, row)]
    total = sum(max(variant.cost for variant in region) for region in problem.regions) or 1.0
    dearness = sum(round(variant.cost / total * _STEPS) * x for variant, x in pairs)
    kept = sum(variant.kept_bytes * x for variant, x in pairs)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # the same answer in every process
    solver.parameters.max_deterministic_time = _SECONDS
    bound = 0.0
    for aim in (limit, dearness) if problem.budget_bytes is None else (dearness, kept):  # the second one among equals by the first
        model.minimize(aim)
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise GraphError(f"what to compute again: no answer after {_SECONDS} deterministic seconds for {len(takes)} regions; choose remat='blocks'")
        bound = solver.best_objective_bound if aim is dearness else bound
        model.add(aim <= round(solver.objective_value))
    chosen = tuple(next(v for v, x in enumerate(row) if solver.value(x)) for row in takes)
    found = RematSolution(
        chosen=chosen,
        peak_bytes=peak_of(problem, chosen),
        cost=sum(region[v].cost for region, v in zip(problem.regions, chosen)),
        lower_bound=bound * total / _STEPS,
    )
    validate(problem, found)
    return found


def _bound_peaks(model, takes: list[list], problem: RematProblem, limit) -> None:
    kept = 0
    for region, row in zip(problem.regions, takes):
        model.add(kept + sum(variant.inside_bytes * x for variant, x in zip(region, row)) <= limit)
        kept = kept + sum(variant.kept_bytes * x for variant, x in zip(region, row))
    model.add(kept + problem.outside_bytes <= limit)


def peak_of(problem: RematProblem, chosen: tuple[int, ...]) -> int:
    """The largest of the peaks that a choice has."""
    kept, worst = 0, 0
    for region, v in zip(problem.regions, chosen, strict=True):
        worst = max(worst, kept + region[v].inside_bytes)
        kept += region[v].kept_bytes
    return max(worst, kept + problem.outside_bytes)


def validate(problem: RematProblem, solution: RematSolution) -> None:
    """Check an answer against the problem."""
    peak = peak_of(problem, solution.chosen)
    if peak != solution.peak_bytes or (problem.budget_bytes is not None and peak > problem.budget_bytes):
        raise GraphError(f"what to compute again: the answer has a peak of {peak} bytes, said to be {solution.peak_bytes}, in a budget of {problem.budget_bytes}")
