"""What a run shows while it builds a program: which activity goes on and for how long, and at the end one line with the seconds of each.

The line goes to the logger "graphacc" at INFO. Where nobody has configured logging, process 0 writes it to stderr instead: a first step
that is silent for a minute looks like one that hangs. Setting the logger's level to WARNING, or handlers at WARNING, switches it off.
On a terminal the line is there from the beginning, and grows.
"""

import contextlib
import contextvars
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

from graphacc.runtime import ranges
from graphacc.runtime.distributed import is_first_process

log = logging.getLogger("graphacc")

_REFRESH_SECONDS = 0.2
_CLEAR = "\r\x1b[K"


@dataclasses.dataclass
class Elapsed:
    """A time that is being measured."""

    seconds: float = 0.0


class _Build:
    """The activities of one program that is being built. An activity inside another one stops the other's time."""

    def __init__(self, what: str):
        self.what = what
        self.start = self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}  # in the order in which they began
        self._open: list[str] = []

    def begin(self, activity: str) -> None:
        self._settle()
        self._seconds.setdefault(activity, 0.0)
        self._open.append(activity)

    def end(self) -> None:
        self._settle()
        self._open.pop()

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def activities(self) -> str:
        """The seconds so far; the ticking thread calls it, too."""
        going_on, now = self._open[-1:], time.perf_counter()
        found = {name: seconds + (now - self._since) * (name in going_on) for name, seconds in list(self._seconds.items())}
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())


_building: contextvars.ContextVar[_Build | None] = contextvars.ContextVar("graphacc_building", default=None)


@contextlib.contextmanager
def building(what: str) -> Iterator[Elapsed]:
    """The block builds this ("the step program"), in the blocks of `activity` inside; on success, a line says how long each took."""
    build, elapsed = _Build(what), Elapsed()
    before = _building.set(build)
    try:
        with ranges.named("graphacc.compile"), _ticking(build):
            yield elapsed
    finally:
        _building.reset(before)
        elapsed.seconds = time.perf_counter() - build.start
    text = f"graphacc: {what} took {elapsed.seconds:.2f} s: {build.activities()}"
    if _is_logged():
        log.info("%s", text)
    elif _is_written():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def activity(name: str) -> Iterator[Elapsed]:
    """A part of the program that is being built, such as "passes"; its seconds, those of activities inside included."""
    build, elapsed, start = _building.get(), Elapsed(), time.perf_counter()
    if build is not None:
        build.begin(name)
    try:
        yield elapsed
    finally:
        elapsed.seconds = time.perf_counter() - start
        if build is not None:
            build.end()


def _is_logged() -> bool:
    """Whether INFO messages reach a handler; Python's last resort, which writes where there is none, begins at WARNING."""
    return log.isEnabledFor(logging.INFO) and log.hasHandlers()


def _is_written() -> bool:
    """Whether nobody has said what to do with messages, so that they go to stderr."""
    untouched = log.level == logging.NOTSET and logging.getLogger().level <= logging.WARNING and logging.root.manager.disable < logging.INFO
    return not log.hasHandlers() and (untouched or log.isEnabledFor(logging.INFO)) and is_first_process()


@contextlib.contextmanager
def _ticking(build: _Build) -> Iterator[None]:
    """On a terminal, show the activities while they go on; what is shown is gone afterwards."""
    if not sys.stderr.isatty() or not is_first_process() or not (_is_logged() or _is_written()):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_tick, args=(build, done), name="graphacc-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


def _tick(build: _Build, done: threading.Event) -> None:
    while not done.wait(_REFRESH_SECONDS):
        with contextlib.suppress(OSError, ValueError):  # a terminal that was closed is no reason to stop
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0: of a terminal without a size
            text = f"graphacc: {build.what}: {build.activities()} ..."
            sys.stderr.write(f"{_CLEAR}{text[: columns - 1]}\r")  # what others write replaces it
            sys.stderr.flush()
