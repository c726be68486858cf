"""Pipeline stages: a captured graph is marked (mark.py), rewritten by the other passes, and cut at the end (cut.py)."""

from graphacc.passes.stages.cut import Place, Segment, cut
from graphacc.passes.stages.mark import mark_pass, mark_update_pass
from graphacc.passes.stages.places import marked_places, update_places
from graphacc.passes.stages.replicas import MARK, owner_of

__all__ = ["MARK", "Place", "Segment", "cut", "mark_pass", "mark_update_pass", "marked_places", "owner_of", "update_places"]
