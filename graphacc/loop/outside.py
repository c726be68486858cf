"""What a forward can read of the process around it: torch's settings, the environment, files; and what it prints there."""

import builtins
import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from graphacc._compat.torch_ import patched
from graphacc.capture.own_code import is_own_file
from graphacc.capture.source import calling_line, is_user_file
from graphacc.errors import CaptureError
from graphacc.loop.places import Answers

log = logging.getLogger("graphacc")

_NAMES = (
    "are_deterministic_algorithms_enabled",
    "get_default_device",
    "get_default_dtype",
    "get_deterministic_debug_mode",
    "get_float32_matmul_precision",
    "get_num_interop_threads",
    "get_num_threads",
    "initial_seed",
    "is_anomaly_check_nan_enabled",
    "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_warn_always_enabled",
)
SETTINGS = Answers(**{name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}, is_autocast_enabled=lambda: torch.is_autocast_enabled("cuda"))
"""Functions of torch that tell of its settings, by name. Autocast on CPU, and modes that are on around a call, are a part of the call."""
ENVIRONMENT = Answers()
"""Environment variables, of which those are added that the code of a forward names."""
_OTHERWISE = ("importlib", "linecache", "inspect", "traceback", "tokenize", "warnings", "logging", "torch", "torch_xla", "graphacc", "jax", "jaxlib")
"""Modules that open files of their own accord, but for the one by which torch loads a file."""
_said: set[str] = set()  # lines that print


@contextlib.contextmanager
def files_noted(note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` with the name of every file or folder that the user's own code asks for inside, by whatever function.

    Raises:
        CaptureError: a file is about to be written.
    """
    thread = threading.get_ident()

    def noting(function: Callable) -> Callable:
        def asked(*args, **kwargs):
            file = args[0] if args else kwargs.get("file", kwargs.get("path", "."))
            if threading.get_ident() == thread and isinstance(file, (str, bytes, os.PathLike)) and _asks():
                note(os.fsdecode(file))
                mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
                if isinstance(mode, str) and not set(mode).isdisjoint("wax+"):
                    raise CaptureError(f"what is to be compiled writes the file {os.fsdecode(file)}, which a compiled program does not do: write it outside of the model")
            return function(*args, **kwargs)

        return asked

    asking = {name: noting(getattr(os, name)) for name in ("stat", "listdir", "scandir")}
    with patched(builtins, open=noting(open)), patched(io, open=noting(io.open)), patched(os, **asking):
        yield


def _asks() -> bool:
    """Whether the user's own code has asked for what is called here, itself or by a library's function, such as numpy.load."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if is_user_file(frame.f_code.co_filename) and "site-packages" not in frame.f_code.co_filename:
            return True
        if name != "torch.serialization" and (name.partition(".")[0] in _OTHERWISE or frame.f_code.co_filename.startswith("<frozen importlib")):
            return False
        frame = frame.f_back
    return False


@contextlib.contextmanager
def prints_said() -> Iterator[None]:
    """Says once per line that what the forward prints, or logs, is printed when it is captured, and not in every step."""
    thread = threading.get_ident()

    def said(original: Callable, depth: int, is_own: Callable[[str], bool]) -> Callable:
        def printing(*args, **kwargs):
            original(*args, **kwargs)
            if threading.get_ident() == thread and is_own(sys._getframe(depth).f_code.co_filename) and (line := calling_line()) not in _said:
                _said.add(line)
                log.warning("graphacc: the forward prints only when it is captured, not in every step\n  at %s", line)

        return printing

    with patched(builtins, print=said(builtins.print, 1, is_user_file)), patched(logging.Logger, _log=said(logging.Logger._log, 2, is_own_file)):
        yield
