"""What a step costs, predicted from its graph without compiling it: memory of one device, work, and seconds on a `Hardware`."""

from graphacc.costs.hardware import Chip, Hardware, Level
from graphacc.costs.memory import MemoryPrediction, predict_memory
from graphacc.costs.repeats import Reduced, Repeat, reduce_repeats
from graphacc.costs.seconds import collective_seconds, compute_seconds, work_seconds
from graphacc.costs.work import Work, kernels, node_work

__all__ = [
    "Chip",
    "Hardware",
    "Level",
    "MemoryPrediction",
    "Reduced",
    "Repeat",
    "Work",
    "collective_seconds",
    "compute_seconds",
    "kernels",
    "node_work",
    "predict_memory",
    "reduce_repeats",
    "work_seconds",
]
