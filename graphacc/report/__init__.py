"""Reports on what was planned, compiled and run: pictures and tables."""

from graphacc.report.communication import Collective, Communication, communication
from graphacc.report.memory_picture import memory_plan
from graphacc.report.timeline import Bar, Timeline, timeline

__all__ = ["Bar", "Collective", "Communication", "Timeline", "communication", "memory_plan", "timeline"]
