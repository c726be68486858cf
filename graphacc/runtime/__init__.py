"""Runs compiled StepGraphs: devices and mesh, programs, the state on the devices, exchange with torch, checkpoints."""

from graphacc.runtime.devices import available_devices, default_platform, make_mesh, select_devices
from graphacc.runtime.exchange import to_device, to_torch
from graphacc.runtime.program import (
    DEFAULT_PLAN_SECONDS,
    Cost,
    Memory,
    Program,
    check_memory_plan,
    default_options,
    look_ahead,
)
from graphacc.runtime.replan.figures import MemoryPlan
from graphacc.runtime.state import TrainState

__all__ = [
    "DEFAULT_PLAN_SECONDS",
    "Cost",
    "Memory",
    "MemoryPlan",
    "Program",
    "TrainState",
    "available_devices",
    "check_memory_plan",
    "default_options",
    "default_platform",
    "look_ahead",
    "make_mesh",
    "select_devices",
    "to_device",
    "to_torch",
]
