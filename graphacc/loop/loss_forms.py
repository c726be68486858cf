"""Losses whose form changes from batch to batch: another number of boxes, of pairs, or of terms, for which whole programs would be compiled for ever.

The model's own calls are the same in all of them. After some forms it runs compiled by itself, as a function of autograd (see `graphacc.loop.regions`), and
PyTorch runs what the loop computes of its results.
"""

import typing

from graphacc.loop import regions
from graphacc.loop.tape import Tape

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine

MAX_LOSS_FORMS = 8
"""Forms of the loop's own code behind the same calls of the model for which whole programs are compiled."""

MAX_KNOWN = 512
"""Recordings, and calls of the model, that are remembered."""


class LossForms:
    """Counts the forms of the loop's own code behind the calls of one model: at backward, and at each value that is read before."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._known: dict[tuple, None] = {}  # recordings that are compiled
        self._counts: dict[tuple, int] = {}  # (calls of the model, number of values read before backward, or None at it) -> how many of those begin with them

    def too_many(self, tape: Tape) -> str | None:
        """Why a recording, which is about to be compiled, is not worth it; None where it is, or where its loss cannot be run by itself."""
        whole = tape.forward_key
        if whole in self._known:
            return None
        if (calls := self._calls(tape)) is not None:
            place = calls, tape.num_reads if tape.backward_at is None else None
            if self._counts.get(place, 0) >= MAX_LOSS_FORMS:
                return (
                    f"with the same calls of the model it has had more than {MAX_LOSS_FORMS} forms (shapes, or numbers of calls), each of which would be compiled; the model "
                    "itself is compiled. Give what varies (boxes, pairs, terms) one size, with a mask, to have whole steps compiled"
                )
            self._counts[place] = self._counts.get(place, 0) + 1
        self._known[whole] = None
        for held in (self._known, self._counts):
            if len(held) > MAX_KNOWN:
                held.pop(next(iter(held)))
        return None

    def _calls(self, tape: Tape) -> tuple | None:
        """The identity of the model's calls; None where the loop computes nothing of their results that PyTorch could run by itself."""
        engine = self.engine
        if engine.options.capture != "auto" or any(handle.frees_host for handle in engine.handles.values()) or not regions.possible(engine) or tape.closed:
            return None  # the user wants programs; the host need not hold the model and its gradients
        calls, rest = regions.parted(tape)
        apart = calls and rest and not any(call.draws for call in rest) and all(call.grad_enabled for call in calls)
        return tape.key(calls) if apart else None
