"""Pipeline schedules as plain data: who does what in which order, checked and measured before anything runs."""

from graphacc.strategy.schedules.build import SCHEDULES, build_schedule, check_schedule
from graphacc.strategy.schedules.schedule import Action, Costs, Part, Schedule
from graphacc.strategy.schedules.simulate import Simulation, dispatch_order, one_after_the_other, simulate, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Part",
    "Schedule",
    "Simulation",
    "build_schedule",
    "check_schedule",
    "dispatch_order",
    "one_after_the_other",
    "simulate",
    "validate",
]
