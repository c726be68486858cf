"""Memory planning of what XLA really runs: compiled executable -> problem of the planner core -> planned executable.

The road: `envelope` and `schema` open the bytes, `cpu` reads them into the `model`; `values`, `identity` and `liveness` say what
lives where and when; `ordering` and `addressing` ask the planner core; `rewrite` writes the plan back; `verify` proves it from
the final bytes; `api` loads it.
"""

from graphacc.runtime.replan.api import Candidate, ReplanResult, compile_and_replan, replan, replan_best
from graphacc.runtime.replan.cache import PlanCache
from graphacc.runtime.replan.errors import NotUnderstood, VerificationError

__all__ = [
    "Candidate",
    "NotUnderstood",
    "PlanCache",
    "ReplanResult",
    "VerificationError",
    "compile_and_replan",
    "replan",
    "replan_best",
]
