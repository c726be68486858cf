"""Why a compiled program keeps XLA's own plan."""

from graphacc.errors import GraphAccError


class NotUnderstood(GraphAccError):
    """Something in the executable is unknown to us, or contradicts our model of it; the message says what and where."""


class VerificationError(GraphAccError):
    """A rewritten program does not compute what the original computes; it is never loaded."""
