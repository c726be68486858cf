"""The errors that GraphAcc raises for its users.

Every message says what happened, where, the values, the rule and the remedy. Our own invariants use ``assert``.
"""

from collections.abc import Collection


class GraphAccError(Exception):
    """Base of every error that GraphAcc raises on purpose."""


class CaptureError(GraphAccError):
    """The model or the optimizer cannot be captured; the message names the user's source line."""


class ParameterWritten(CaptureError):
    """The forward writes into parameters, which no captured step does, however it is captured."""

    def __init__(self, names: Collection[str], line: str = ""):
        super().__init__(
            f"the forward writes into parameter(s) {', '.join(names)}: in a captured step only the optimizer changes parameters; keep what "
            "the forward updates in a buffer (register_buffer), or update it in the loop, after optimizer.step()" + (f"\n  at {line}" if line else "")
        )
        self.names = frozenset(names)


class RowsCounted(CaptureError):
    """What the loop gives counts rows of the whole batch, or code asks for values of all of it, of which a program has a microbatch."""


class NeverCaptured(CaptureError):
    """The forward does what no program does, however it is captured: it reads a parameter's gradient, or makes parameters."""


class GraphError(GraphAccError):
    """A StepGraph breaks one of its invariants; the message names the node, and the pass when there is one."""


class LoweringError(GraphAccError):
    """An operator has no lowering rule, or a rule gave another shape or dtype than the graph says."""


class StrategyError(GraphAccError, ValueError):
    """A strategy is inconsistent, or does not fit the model, the batch or the devices."""


class CheckpointError(GraphAccError):
    """A checkpoint is missing, truncated, damaged or of another model."""


class DistributedError(GraphAccError):
    """The processes of a run cannot be joined (what started them says too little, or contradicts itself), or do not do the same."""


class LoopError(GraphAccError):
    """The training loop asks for something that a compiled step cannot give; the message says what to set."""


class BatchIndexError(GraphAccError, IndexError):
    """A label or an index in the batch is out of range; the message names the user's line, the value and the bounds."""


class BatchValueError(LoopError, RuntimeError):
    """The batch has values with which PyTorch raises a RuntimeError: an integer that is a divisor is 0, or a mask has more true elements than there are values."""


class NonFiniteLossError(GraphAccError):
    """The loss of a step is NaN or infinite, and ``nan_loss="stop"`` was set."""


class VerificationError(GraphAccError):
    """A compiled program gave other values than plain PyTorch; the message names the tensor, the user's line and the pass at fault."""


class PlanError(GraphAccError, ValueError):
    """A memory problem is malformed, or a plan breaks one of its rules; the message names the buffers and the values."""
