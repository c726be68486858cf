"""Memory planning of what XLA really runs: compiled executable -> problem of the planner core -> planned executable.

The road: `envelope` and `schema` open the bytes, `cpu` or `gpu` (with `riegeli` and `hlo_slots`) reads them into the `model`;
`values`, `identity` and `liveness` say what lives where and when; `ordering` and `addressing` ask the planner core; `rewrite`
writes the plan back; `verify` proves it from the final bytes; `api` loads it. `compiling` does all that for a program that is
compiled, or finds it in the compile cache.
"""

from graphacc.runtime.replan.api import Candidate, ReplanResult, replan, replan_best
from graphacc.runtime.replan.compiling import compile_and_replan
from graphacc.runtime.replan.errors import NotUnderstood, VerificationError
from graphacc.runtime.replan.figures import MemoryPlan

__all__ = [
    "Candidate",
    "MemoryPlan",
    "NotUnderstood",
    "ReplanResult",
    "VerificationError",
    "compile_and_replan",
    "replan",
    "replan_best",
]
