"""StepGraph -> JAX: one rule per ATen operator, and the function that runs them.

``lower(step)`` gives a function over jax arrays; ``register`` adds the rule of an operator of your own.
"""

from graphacc.lowering import rules  # noqa: F401  (registers the rules)
from graphacc.lowering.interpret import Missing, check, lower, missing
from graphacc.lowering.registry import Context, register, registered

OWN_RULES = registered()
"""The overloads whose rules are this package's; nobody can replace one."""

__all__ = ["OWN_RULES", "Context", "Missing", "check", "lower", "missing", "register"]
