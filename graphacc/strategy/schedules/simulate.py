"""What a schedule does, found by playing it: whether it is complete and free of deadlock, its bubble, its live microbatches."""

import collections
import dataclasses
from collections.abc import Sequence

from graphacc.errors import StrategyError
from graphacc.strategy.schedules.schedule import Action, Costs, Part, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """A schedule played with given costs."""

    spans: dict[Action, tuple[float, float]]  # start and end of every action, in the unit of the costs
    makespan: float  # from the first start to the last end
    bubble_fraction: float  # share of the stages' time in which they do nothing
    peak_live: tuple[int, ...]  # per stage: most (microbatch, chunk) pairs whose activations are held at once


def validate(schedule: Schedule) -> None:
    """Check that a schedule does everything once, in an order that can be run.

    Raises:
        StrategyError: an action is missing, doubled, or on a stage that does not hold its chunk; or the stages wait for each
            other in a circle, and then names the actions that wait.
    """
    simulate(schedule)


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] = Costs()) -> Simulation:
    """Play a schedule: every stage does its actions in order, each as soon as what it reads is there.

    Args:
        costs: of every chunk, or one for all.

    Raises:
        StrategyError: as `validate`.
    """
    _check_complete(schedule)
    spans = _play(schedule, [costs] * schedule.num_chunks if isinstance(costs, Costs) else costs)
    makespan = max((end for _, end in spans.values()), default=0.0)
    busy = sum(end - start for start, end in spans.values())
    return Simulation(
        spans=spans,
        makespan=makespan,
        bubble_fraction=1 - busy / (makespan * schedule.num_stages) if makespan else 0.0,
        peak_live=tuple(_peak_live(actions, schedule.splits_backward) for actions in schedule.stages),
    )


def dispatch_order(schedule: Schedule, costs: Costs = Costs()) -> list[Action]:
    """All actions in one order that every stage's order and every dependency agree with, by their simulated start."""
    spans = simulate(schedule, costs).spans
    return sorted(spans, key=lambda action: spans[action][0])  # the sort is stable, and `spans` is in a valid order


def one_after_the_other(schedule: Schedule, num_microbatches: int) -> list[Action]:
    """The actions of another number of microbatches on the schedule's chunks, one microbatch after the other."""
    chunks = range(schedule.num_chunks)
    parts = [(Part.FORWARD, chunk) for chunk in chunks] + [(Part.BACKWARD, chunk) for chunk in reversed(chunks)]
    parts += [(Part.WEIGHTS, chunk) for chunk in reversed(chunks) if schedule.splits_backward]
    return [Action(part, microbatch, chunk) for microbatch in range(num_microbatches) for part, chunk in parts]


def _check_complete(schedule: Schedule) -> None:
    parts = tuple(Part) if schedule.splits_backward else (Part.FORWARD, Part.BACKWARD)
    wanted = {
        Action(part, microbatch, chunk)
        for part in parts
        for microbatch in range(schedule.num_microbatches)
        for chunk in range(schedule.num_chunks)
    }
    counts = collections.Counter(action for actions in schedule.stages for action in actions)
    problems = [f"{action} is missing" for action in wanted - counts.keys()]
    problems += [f"{action} is done {count} times" for action, count in counts.items() if count > 1]
    problems += [f"{action} does not exist" for action in counts.keys() - wanted]
    for stage, actions in enumerate(schedule.stages):
        problems += [
            f"{action} is on stage {stage}, its chunk on {schedule.stage_of(action.chunk)}"
            for action in actions
            if schedule.stage_of(action.chunk) != stage
        ]
    if problems:
        raise StrategyError(f"schedule {schedule.name!r}: {'; '.join(sorted(problems)[:5])}")


def _play(schedule: Schedule, costs: Sequence[Costs]) -> dict[Action, tuple[float, float]]:
    spans: dict[Action, tuple[float, float]] = {}
    places, free = [0] * schedule.num_stages, [0.0] * schedule.num_stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.stages):
            while places[stage] < len(actions):
                action = actions[places[stage]]
                needed = schedule.requirements(action)
                if any(other not in spans for other in needed):
                    break
                arrivals = (spans[other][1] + costs[other.chunk].transfer * (schedule.stage_of(other.chunk) != stage) for other in needed)
                start = max(free[stage], *arrivals, 0.0)
                free[stage] = start + costs[action.chunk].of(action.part, schedule.splits_backward)
                spans[action] = (start, free[stage])
                places[stage] += 1
                moved = True
    waiting = [
        f"stage {s} for {_awaited(schedule, actions[places[s]], spans)} before {actions[places[s]]}"
        for s, actions in enumerate(schedule.stages)
        if places[s] < len(actions)
    ]
    if waiting:
        raise StrategyError(f"schedule {schedule.name!r} deadlocks; waiting: {'; '.join(waiting)}")
    return spans


def _awaited(schedule: Schedule, action: Action, done: dict) -> Action:
    return next(other for other in schedule.requirements(action) if other not in done)


def _peak_live(actions: tuple[Action, ...], splits_backward: bool) -> int:
    """Most pairs of microbatch and chunk between their forward and the end of their backward."""
    last = Part.WEIGHTS if splits_backward else Part.BACKWARD
    live = peak = 0
    for action in actions:
        live += action.part is Part.FORWARD
        peak = max(peak, live)
        live -= action.part is last
    return peak
