"""What a step costs on one device, predicted from its graph without compiling it."""

from graphacc.costs.memory import MemoryPrediction, predict_memory
from graphacc.costs.repeats import Reduced, Repeat, reduce_repeats

__all__ = ["MemoryPrediction", "Reduced", "Repeat", "predict_memory", "reduce_repeats"]
