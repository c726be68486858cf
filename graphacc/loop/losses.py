"""Watching for losses that are not finite, without making the loop wait for the device."""

import collections
import math
import warnings

from graphacc.errors import NonFiniteLossError
from graphacc.loop.tape import Tape
from graphacc.runtime.distributed import process_count

MAX_BEHIND = 2
"""Steps whose losses may be unknown while the next one is started: the device has work while the host prepares more."""


class LossWatch:
    """Checks the loss of each step: at once to stop; to warn, when it is there, and before the second step after it is started."""

    def __init__(self, action: str):
        self.action = action  # "warn", "stop" or "ignore"
        self._watched: collections.deque[tuple[int, Tape, int]] = collections.deque()
        self._lost = False  # the last loss was not finite, which is said once for all that follow it so

    def watch(self, step: int, tape: Tape) -> None:
        """A step was started whose loss `tape` holds."""
        if self.action == "ignore" or tape.loss is None:
            return
        self._watched.append((step, tape, tape.loss))
        if self.action == "stop":
            self._look(*self._watched.popleft())

    def check(self) -> None:
        """Look at losses of earlier steps, before another one is started: at those that are there, and at those that are `MAX_BEHIND` steps old."""
        while self._watched and (len(self._watched) >= MAX_BEHIND or _is_there(*self._watched[0][1:])):
            self._look(*self._watched.popleft())

    def _look(self, step: int, tape: Tape, index: int) -> None:
        loss = tape.number(index)
        said, self._lost = self._lost, not math.isfinite(loss)
        if not self._lost or (said and self.action == "warn"):
            return
        message = (
            f"the loss of step {step} is {loss}: the parameters are probably lost; look at the batch of that step, "
            "lower the learning rate or clip the gradients (max_grad_norm=)"
        )
        if self.action == "stop":
            raise NonFiniteLossError(message + ", and go back to a checkpoint from before it")
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _is_there(tape: Tape, index: int) -> bool:
    """Whether a loss can be read without waiting. Several processes do not ask: reading can be a collective, which all of them start in the same place."""
    return process_count() == 1 and tape.is_ready(index)
