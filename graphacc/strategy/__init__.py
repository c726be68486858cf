"""Strategies: what may be chosen, and the search for it."""

from graphacc.strategy.spec import AXES, Strategy

__all__ = ["AXES", "Strategy"]
