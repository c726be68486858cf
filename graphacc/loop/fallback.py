"""Which way a model is captured, and the change from torch.fx to lazy tensors where torch.fx refuses."""

import contextlib
import typing
import warnings
from collections.abc import Callable, Iterator

from graphacc.capture import FX, Backend
from graphacc.capture.lazy import LAZY, ValueNeeded, installed
from graphacc.errors import CaptureError, GraphAccError, LoweringError, NeverCaptured, ParameterWritten, RowsCounted, StrategyError
from graphacc.passes.hlo.shardings import check_axes
from graphacc.strategy import Strategy

Result = typing.TypeVar("Result")

CHOICES = ("auto", "fx", "lazy", "torch_xla")
"""The last one captures nothing: see `graphacc.loop.on_torch_xla`."""

NOT_COMPILED = (CaptureError, LoweringError)
"""Errors of code that cannot be compiled: PyTorch runs it instead. A GraphError is a defect of a pass, and is not hidden by that."""

_READS_VALUES = 'capture="torch_xla" runs code that follows values of tensors, on torch_xla\'s own runtime and one device'


class Fallback:
    """The backend in force; "auto" begins with FX and changes once, for the rest of the run.

    Args:
        choice: "auto", "fx" or "lazy".

    Raises:
        StrategyError: lazy tensors are chosen for a strategy that they cannot follow.
    """

    def __init__(self, choice: str, strategy: Strategy):
        self.backend: Backend = LAZY if choice == "lazy" else FX
        self.strategy = strategy
        self._may_change = choice == "auto"
        if choice == "lazy":
            check_axes(strategy)

    def attempt(self, capture: Callable[[], Result]) -> Result:
        """Run `capture`; where torch.fx refuses, once more with lazy tensors.

        Raises:
            CaptureError, LoweringError: neither way works; what torch.fx said, and why lazy tensors do not help in a note.
        """
        try:
            return capture()
        except (ParameterWritten, RowsCounted, NeverCaptured):
            raise
        except (CaptureError, LoweringError) as error:
            if self.backend is LAZY:
                _note_values(error, error)
            if self.backend is not FX or not self._may_change:
                raise
            if why := self._hindrance():
                error.add_note(why)
                raise
            return self._instead(capture, error)

    @contextlib.contextmanager
    def fx_only(self) -> Iterator[None]:
        """Capture by torch.fx, and change to nothing else: for what lazy tensors do not record."""
        before = self.backend, self._may_change
        self.backend, self._may_change = FX, False
        try:
            yield
        finally:
            self.backend, self._may_change = before

    def _hindrance(self) -> str:
        """Why lazy tensors cannot be tried; "" if they can."""
        if not installed():
            return 'capture="lazy" may follow this code: it needs torch_xla, pip install "graphacc[lazy]"'
        try:
            check_axes(self.strategy)
        except StrategyError as error:
            return f"capture by lazy tensors was not tried: {error}"
        return ""

    def _instead(self, capture: Callable[[], Result], refusal: GraphAccError) -> Result:
        self.backend = LAZY
        try:
            result = capture()
        except GraphAccError as error:
            self.backend = FX
            refusal.add_note("capture by lazy tensors stops there, too" if str(error) == str(refusal) else f"capture by lazy tensors was tried too: {error}")
            _note_values(refusal, error)
            raise refusal from refusal.__cause__
        warnings.warn(
            f"the step is captured by lazy tensors, without the passes on operators, for torch.fx cannot follow it: {refusal}\n"
            '  capture="lazy" says that this is intended; capture="fx" makes it an error',
            RuntimeWarning,
            stacklevel=2,
        )
        return result


def _note_values(error: GraphAccError, found: GraphAccError) -> None:
    """Say what can be done about a model that reads values of tensors, if that is what was found."""
    if isinstance(found.__cause__, ValueNeeded):
        error.add_note(_READS_VALUES)


def explanation(error: Exception) -> str:
    """What an error says, with its notes."""
    return "\n  ".join([str(error), *getattr(error, "__notes__", ())])
