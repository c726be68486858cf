"""Where in the user's code an operator comes from: source lines and the submodule, for every node of a trace."""

import bisect
import linecache
import os
import sys
import traceback
from collections.abc import Mapping
from types import CodeType, FrameType

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphacc._compat.torch_ import annotate_nodes, annotation, next_node_number
from graphacc.graph import CHECKPOINT, Phase

_GRAPHACC = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_EXAMPLES = os.path.join(_GRAPHACC, "examples") + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MAX_LINES = 6
_LINE = "_graphacc_line"


def is_user_file(filename: str) -> bool:
    """Whether a source file is neither torch's, ours, nor the standard library's."""
    if filename.startswith(("<", _TORCH)):
        return False
    if filename.startswith(_GRAPHACC):
        return filename.startswith(_EXAMPLES)
    return not filename.startswith(_STANDARD_LIBRARY) or "site-packages" in filename


def user_line(error: BaseException) -> str:
    """``File "x.py", line n, in f: text`` of the innermost user frame of `error`'s traceback ("" without one)."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f'File "{last.filename}", line {last.lineno}, in {last.name}: {(last.line or "").strip()}'


def forward_line(error: BaseException) -> str:
    """The line of the forward whose backward has failed, as `SourceMode` noted it ("" if it is not known)."""
    return getattr(error, _LINE, "")


def calling_line() -> str:
    """``File "x.py", line n, in f: text`` of the innermost user frame on the stack ("" without one)."""
    frame = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    code, line = frame.f_code, frame.f_lineno
    return f'File "{code.co_filename}", line {line}, in {code.co_name}: {linecache.getline(code.co_filename, line, frame.f_globals).strip()}'


class SourceMode(TorchFunctionMode):
    """Notes at every torch function call where it stands; nodes traced from it carry that as ``meta["custom"]``, errors of ``torch.autograd.grad`` the line of the forward.

    Args:
        modules: id of a submodule -> its dotted path.
        phase: the phase that the nodes get.
    """

    def __init__(self, modules: Mapping[int, str], phase: Phase):
        super().__init__()
        self._modules = modules
        self.phase = phase
        self._user_code: dict[CodeType, bool] = {}
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._begun: list[tuple[int, str]] = []  # the number that autograd gives its next node, and the line whose code may make it
        self._around: tuple[FrameType | None, str | None, list[str]] = None, None, []  # the frame that has entered the mode, and what is noted of it and those around it

    def __enter__(self):
        frame = sys._getframe(1)
        self._around = frame, *self._described(frame)
        return super().__enter__()

    def __exit__(self, exc_type, exc_val, exc_tb):
        self._around = None, None, []
        return super().__exit__(exc_type, exc_val, exc_tb)

    def reset(self) -> None:
        """Operators to come have no place in the user's code, until the next note."""
        annotate_nodes({"phase": self.phase, "module_path": "", "stack_trace": ""})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.note(sys._getframe(1))
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if func is torch.autograd.grad:
                setattr(error, _LINE, self._line_of(annotation().get("sequence", -1)))
            raise

    def _line_of(self, sequence: int) -> str:
        """``File "x.py", line n, in f: text`` whose forward has made a node of autograd ("" if it is not known)."""
        at = bisect.bisect_right(self._begun, sequence, key=lambda begun: begun[0])
        return ": ".join(map(str.strip, self._begun[at - 1][1].splitlines())) if at else ""

    def note(self, frame: FrameType | None) -> None:
        """Describe the operators to come by the call stack that ends in `frame`."""
        path, lines = self._described(frame)
        checkpointed = {CHECKPOINT: annotation()[CHECKPOINT]} if CHECKPOINT in annotation() else {}
        annotate_nodes({"phase": self.phase, "module_path": path or "", "stack_trace": "".join(reversed(lines)), **checkpointed})
        if lines:
            self._begun.append((next_node_number(), lines[0]))

    def _described(self, frame: FrameType | None) -> tuple[str | None, list[str]]:
        """The innermost submodule whose code is on the stack, and the innermost lines of the user's."""
        lines: list[str] = []
        path = None
        entered, path_around, lines_around = self._around
        while frame is not None and frame is not entered:
            code = frame.f_code
            if len(lines) < _MAX_LINES and self._is_user(code):
                lines.append(self._text(code, frame))
            if path is None and code.co_varnames[:1] == ("self",):
                owner = frame.f_locals.get("self")
                path = self._modules.get(id(owner)) if isinstance(owner, nn.Module) else None
            if path is not None and len(lines) == _MAX_LINES:
                return path, lines
            frame = frame.f_back
        if frame is not None:
            return path_around if path is None else path, lines + lines_around[: _MAX_LINES - len(lines)]
        return path, lines

    def _is_user(self, code: CodeType) -> bool:
        known = self._user_code.get(code)
        if known is None:
            known = self._user_code[code] = is_user_file(code.co_filename)
        return known

    def _text(self, code: CodeType, frame: FrameType) -> str:
        line = frame.f_lineno
        known = self._texts.get((code, line))
        if known is None:
            text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            known = self._texts[code, line] = f'  File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}\n'
        return known
