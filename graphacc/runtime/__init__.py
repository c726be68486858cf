"""Runs compiled StepGraphs: devices and mesh, programs, the state on the devices, exchange with torch, checkpoints."""

from graphacc.runtime.devices import available_devices, default_platform, make_mesh, select_devices
from graphacc.runtime.exchange import to_device, to_torch
from graphacc.runtime.program import Cost, Memory, Program, default_options
from graphacc.runtime.state import TrainState

__all__ = [
    "Cost",
    "Memory",
    "Program",
    "TrainState",
    "available_devices",
    "default_options",
    "default_platform",
    "make_mesh",
    "select_devices",
    "to_device",
    "to_torch",
]
