"""What a failed trace tells the user: the source line, the operation, why it cannot be captured, and what to write instead."""

import contextlib
import dataclasses
import traceback
import weakref

import torch

from graphacc._compat.torch_ import data_dependent_errors, dynamic_shape_errors
from graphacc.capture.source import forward_line, user_line
from graphacc.errors import CaptureError, GraphAccError


class AutocastIgnored(RuntimeError):
    """The code runs under a torch.autocast that has no effect on the tensors that record it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reason:
    """Why a capture failed."""

    why: str
    remedy: str
    operation: str = ""  # in the place of the one that failed, where that says nothing


_VALUE = _Reason(
    why="it needs the value of a tensor while the step is captured (.item(), .tolist(), bool() of a tensor as in `if tensor:`, "
    "float(), int()), but a captured step is one fixed program for all batches",
    remedy="choose with torch.where(condition, a, b) or multiply by a mask; keep numbers for logging outside of the model; "
    "make what is fixed during training a Python number",
)
_SHAPE = _Reason(
    why="the shape of its result depends on the values of a tensor (nonzero, unique, masked_select, x[bool_mask]), but every shape "
    "in a captured step is fixed",
    remedy="keep the full shape and mask instead: torch.where(mask, x, 0), multiply by the mask, or give torch.nonzero_static a size",
)
_NUMPY = _Reason(
    why="it leaves torch (NumPy, pickling or a raw data pointer), which a captured step cannot follow",
    remedy="use the torch function of the same name, or compute it before the batch reaches the model",
)
_ANOMALY = _Reason(
    why="torch.autograd.set_detect_anomaly(True, check_nan=True) looks for NaN among the values of every gradient while backward runs, but a captured step "
    "is run as a whole",
    remedy="leave it off but where a NaN is looked for; graphacc.compile(..., nan_loss=\"stop\") stops at a loss that is not finite",
    operation="the check of a gradient for NaN",
)
_INFERENCE = _Reason(
    why="a part of the code runs under torch.inference_mode(), whose tensors torch.fx cannot follow",
    remedy="write torch.no_grad() in its place",
    operation="torch.inference_mode()",
)
_AUTOCAST = _Reason(
    why="torch.autocast for the CPU or CUDA has no effect on lazy tensors, so that results would have other dtypes",
    remedy='cast in the code (x.to(torch.bfloat16)), or let the strategy do it (precision="bf16")',
)
_DISTRIBUTION = _Reason(
    why="an object of torch.distributions checks its arguments, or a sample, by values that follow from the model's parameters, but a captured step is one "
    "fixed program",
    remedy="give it validate_args=False, for all of them torch.distributions.Distribution.set_default_validate_args(False); or return its arguments, and make "
    "it in the loop, where they are checked",
    operation="the check of a distribution",
)
_OTHER = _Reason(why="the code raised an error while it was captured, see above", remedy="make sure that the same call works without GraphAcc")


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
    line = user_line(error)
    reason = _reason(error, line)
    where = line or forward_line(error) or "(no line of the user's code is on the stack)"
    return f"{what} cannot be captured.\n  {where}\n  operation: {reason.operation or _operation(error)}\n  why: {reason.why}.\n  remedy: {reason.remedy}."


def _reason(error: Exception, line: str) -> _Reason:
    text = str(error).lower()
    if isinstance(error, AutocastIgnored):
        return _AUTOCAST
    if isinstance(error, data_dependent_errors()) or "data-dependent" in text or "item()" in text:
        if any(frame.f_globals.get("__name__") == "torch.distributions.distribution" for frame, _ in traceback.walk_tb(error.__traceback__)):
            return _DISTRIBUTION
        return _ANOMALY if not line and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() else _VALUE
    if isinstance(error, dynamic_shape_errors()) or "dynamic shape" in text:
        return _SHAPE
    if "inference tensor" in text or (isinstance(error, KeyError) and isinstance(error.args[0], weakref.ref)):  # how torch's functional tensors fail
        return _INFERENCE
    if "numpy" in text or "data pointer" in text or "pickle" in text:
        return _NUMPY
    return _OTHER


def _operation(error: Exception) -> str:
    operator = getattr(error, "func", None)
    if operator is not None:
        return str(operator)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
