"""What a step costs on one device, predicted from its graph without compiling it."""

from graphacc.costs.memory import MemoryPrediction, predict_memory

__all__ = ["MemoryPrediction", "predict_memory"]
