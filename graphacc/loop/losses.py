"""Watching for losses that are not finite, without making the loop wait for the device."""

import math
import warnings

from torch import Tensor

from graphacc.errors import NonFiniteLossError
from graphacc.loop.tape import Tape


class LossWatch:
    """Checks the loss of each step: at once to stop, one step late to warn."""

    def __init__(self, action: str):
        self.action = action  # "warn", "stop" or "ignore"
        self._last: tuple[int, Tape] | None = None

    def watch(self, step: int, tape: Tape) -> None:
        """A step was started whose loss `tape` holds."""
        self._last = None if self.action == "ignore" else (step, tape)
        if self.action == "stop":
            self.check()

    def check(self) -> None:
        """Look at the loss of the last step that was watched."""
        if self._last is None:
            return
        (step, tape), self._last = self._last, None
        loss = tape.value(tape.loss)
        if math.isfinite(_number(loss)):
            return
        message = (
            f"the loss of step {step} is {_number(loss)}: the parameters are probably lost; look at the batch of that step, "
            "lower the learning rate or clip the gradients (max_grad_norm=)"
        )
        if self.action == "stop":
            raise NonFiniteLossError(message + ", and go back to a checkpoint from before it")
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _number(loss: Tensor) -> float:
    return float(loss.detach().double())
