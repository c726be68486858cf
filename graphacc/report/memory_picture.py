"""The memory plan of a compiled program as a picture: XLA's plan, and below it the one that runs."""

import os

from graphacc.errors import PlanError
from graphacc.passes.memory.addresses.picture import save_plans
from graphacc.runtime import Program


def memory_plan(program: Program, path: str | os.PathLike) -> None:
    """Draw live bytes over the schedule, and the addresses of all temporaries, for XLA's plan and ours.

    Args:
        program: for a compiled model ``model.programs[i].program``.
        path: ends in .png, or in .html for a page that names every value and lists the largest at the peak.

    Raises:
        PlanError: the program's memory was not planned, or the path has another ending.
    """
    plan = program.plan
    if plan is None or plan.map_before is None:
        reason = 'it was compiled with memory_plan="xla", or for devices that are not planned' if plan is None else plan.reason
        raise PlanError(f"program {program.name!r} has no memory plan to draw: {reason}")
    maps = {_title("XLA's plan", plan.schedule): plan.map_before}
    if plan.map_after is not None:
        maps["planned by GraphAcc"] = plan.map_after
    save_plans(path, maps, lower_bound=plan.lower_bound)


def _title(name: str, schedule: str) -> str:
    return f"{name} ({schedule.lower().replace('_', '-')} schedule)" if schedule else name
