"""What a failed trace tells the user: the source line, the operation, why it cannot be captured, and what to write instead."""

import contextlib

from graphacc._compat.torch_ import data_dependent_errors, dynamic_shape_errors
from graphacc.capture.source import user_line
from graphacc.errors import CaptureError, GraphAccError

_VALUE = (
    "it needs the value of a tensor while the step is captured (.item(), .tolist(), bool() of a tensor as in `if tensor:`, "
    "float(), int()), but a captured step is one fixed program for all batches",
    "choose with torch.where(condition, a, b) or multiply by a mask; keep numbers for logging outside of the model; "
    "make what is fixed during training a Python number",
)
_SHAPE = (
    "the shape of its result depends on the values of a tensor (nonzero, unique, masked_select, x[bool_mask]), but every shape "
    "in a captured step is fixed",
    "keep the full shape and mask instead: torch.where(mask, x, 0), multiply by the mask, or give torch.nonzero_static a size",
)
_NUMPY = (
    "it leaves torch (NumPy, pickling or a raw data pointer), which a captured step cannot follow",
    "use the torch function of the same name, or compute it before the batch reaches the model",
)
_OTHER = ("the code raised an error while it was captured, see above", "make sure that the same call works without GraphAcc")


class Passing(Exception):
    """Base of exceptions that are messages between our own functions, and pass through a capture."""


@contextlib.contextmanager
def explained(what: str):
    """Turn any exception of the block into a CaptureError that says where, why and what to do.

    Args:
        what: the thing that is captured, as in "the model".
    """
    try:
        yield
    except (GraphAccError, Passing):
        raise
    except Exception as error:
        raise CaptureError(_message(what, error)) from error


def _message(what: str, error: Exception) -> str:
    why, remedy = _reason(error)
    where = user_line(error) or "(no line of the user's code is on the stack)"
    return f"{what} cannot be captured.\n  {where}\n  operation: {_operation(error)}\n  why: {why}.\n  remedy: {remedy}."


def _reason(error: Exception) -> tuple[str, str]:
    text = str(error).lower()
    if isinstance(error, data_dependent_errors()) or "data-dependent" in text or "item()" in text:
        return _VALUE
    if isinstance(error, dynamic_shape_errors()) or "dynamic shape" in text:
        return _SHAPE
    if "numpy" in text or "data pointer" in text or "storage" in text:
        return _NUMPY
    return _OTHER


def _operation(error: Exception) -> str:
    operator = getattr(error, "func", None)
    if operator is not None:
        return str(operator)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
