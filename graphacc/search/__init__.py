"""The search for a strategy: what may be chosen, what it costs, and the plan that comes out."""

from graphacc.search.estimate import Estimate
from graphacc.search.find import Search, describe_parameter
from graphacc.search.plan import Plan, Rival
from graphacc.search.space import Request, first_strategy

__all__ = ["Estimate", "Plan", "Request", "Rival", "Search", "describe_parameter", "first_strategy"]
