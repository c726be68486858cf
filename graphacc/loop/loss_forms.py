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

MAX_KNOWN = 64
"""Calls of the model, with their shapes, whose losses are counted."""


class LossForms:
    """Counts the forms of the loop's own code behind the calls of one model: at backward, and at each value that is read before."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._forms: dict[tuple, set[tuple]] = {}  # (calls of the model, number of values read before backward, or None at it) -> recordings up to there

    def too_many(self, tape: Tape) -> str | None:
        """Why a recording, which is about to be compiled, is not worth it; None where it is, or where its loss cannot be run by itself."""
        whole = tape.forward_key
        if any(whole in forms for forms in self._forms.values()) or (calls := self._calls(tape)) is None:
            return None
        forms = self._forms.setdefault((calls, tape.num_reads if tape.backward_at is None else None), set())
        if len(forms) < MAX_LOSS_FORMS:
            forms.add(whole)
            if len(self._forms) > MAX_KNOWN:
                self._forms.pop(next(iter(self._forms)))
            return None
        return (
            f"with the same calls of the model it has had more than {MAX_LOSS_FORMS} forms (shapes, or numbers of calls), each of which would be compiled; the model itself is "
            "compiled. Give what varies (boxes, pairs, terms) one size, with a mask, to have whole steps compiled"
        )

    def _calls(self, tape: Tape) -> tuple | None:
        """The identity of the model's calls; None where the loop computes nothing of their results that PyTorch could run by itself."""
        engine = self.engine
        if engine.options.capture != "auto" or any(handle.frees_host for handle in engine.handles.values()) or not regions.possible(engine) or tape.closed:
            return None  # the user wants programs; the host need not hold the model and its gradients
        calls, rest = regions.parted(tape)
        apart = calls and rest and not any(call.draws for call in rest) and all(call.grad_enabled for call in calls)
        return tape.key(calls) if apart else None
