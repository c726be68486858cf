"""Reports on what was planned, compiled and run: pictures and tables."""

from graphacc.report.communication import Collective, Communication, communication
from graphacc.report.memory_picture import memory_plan
from graphacc.report.timeline import Bar, Timeline, timeline
from graphacc.report.update_timeline import UpdateBar, UpdateTimeline

__all__ = ["Bar", "Collective", "Communication", "Timeline", "UpdateBar", "UpdateTimeline", "communication", "memory_plan", "timeline"]
