"""The inner loops in C++ (`csrc/planner`), on numpy arrays. Offsets are in units and in the packing's order of items."""

import contextlib
import ctypes
import enum
import threading
import time
from collections.abc import Iterator

import numpy as np

from graphacc.kernels import library
from graphacc.passes.memory.addresses.packing import Packing
from graphacc.passes.memory.addresses.windows import Windows

_ARRAY = ctypes.POINTER(ctypes.c_int64)


class Outcome(enum.IntEnum):
    """How a search ended."""

    FOUND = 0
    IMPOSSIBLE = 1  # a proof after `search`; only a failure after `beam`
    STOPPED = 2


class Rule(enum.IntEnum):
    """Which item a search decides next, of those that nothing unplaced can lie below."""

    LOWEST = 0  # the lowest; ties by the order
    RENEWED = 1  # the same; where the problem falls apart, items of the sections with the most left to place come first in each part
    FEWEST = 2  # the lowest of the section of which the fewest items can be the lowest
    FAILING = 3  # the same, sections at which the search has failed often before others


class StopFlag:
    """Ends the searches that were given it, from any thread."""

    def __init__(self):
        self.value = ctypes.c_int32(0)

    def set(self) -> None:
        self.value.value = 1

    def is_set(self) -> bool:
        return self.value.value != 0


@contextlib.contextmanager
def stop_at(deadline: float) -> Iterator[StopFlag]:
    """A flag that is set at `deadline` (of time.monotonic()), and when the block ends."""
    stop = StopFlag()
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), stop.set)
    timer.start()
    try:
        yield stop
    finally:
        stop.set()
        timer.cancel()
        timer.join()


class _Problem(ctypes.Structure):
    _fields_ = [
        ("num_items", ctypes.c_int64),
        ("num_sections", ctypes.c_int64),
        ("first", _ARRAY),
        ("last", _ARRAY),
        ("size", _ARRAY),
        ("fixed", _ARRAY),
        ("top", _ARRAY),
        ("capacity", _ARRAY),
        ("num_windows", ctypes.c_int64),
        ("window_first", _ARRAY),
        ("window_second", _ARRAY),
        ("window_height", _ARRAY),
    ]


class _Result(ctypes.Structure):
    _fields_ = [("outcome", ctypes.c_int64), ("nodes", ctypes.c_int64)]


class _Call:
    """A packing in a given order, as the C functions take it. Keeps the arrays alive."""

    def __init__(self, packing: Packing, order: np.ndarray, top: np.ndarray, capacity: np.ndarray, windows: Windows | None = None):
        self.order = order
        per_item = (packing.first, packing.last, packing.size, packing.fixed, top)
        self.arrays = [np.ascontiguousarray(a[order], np.int64) for a in per_item]
        self.arrays.append(np.ascontiguousarray(capacity, np.int64))
        if windows is not None:
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            self.arrays += [np.ascontiguousarray(a, np.int64) for a in (rank[windows.first], rank[windows.second], windows.height)]
        pointers = [a.ctypes.data_as(_ARRAY) for a in self.arrays]
        self.problem = ctypes.byref(_Problem(len(packing), packing.num_sections, *pointers[:6], 0 if windows is None else len(windows), *pointers[6:]))
        self.offsets = np.zeros(len(packing), np.int64)
        self.out = self.offsets.ctypes.data_as(_ARRAY)
        self.result = _Result()

    def solution(self) -> np.ndarray:
        offsets = np.empty_like(self.offsets)
        offsets[self.order] = self.offsets
        return offsets

    def outcome(self) -> tuple[Outcome, np.ndarray | None, int]:
        outcome = Outcome(self.result.outcome)
        return outcome, self.solution() if outcome is Outcome.FOUND else None, self.result.nodes


def skyline(packing: Packing, order: np.ndarray) -> np.ndarray:
    """Place the item that can lie lowest next, ties by the order. O(n log n) in practice; always finds offsets."""
    return _place("gacc_address_skyline", packing, order)


def settle(packing: Packing, order: np.ndarray) -> np.ndarray:
    """Place the items in the order, each as low as it can lie above those placed before. O(n log n).

    In the order of the offsets of a solution, no item ends up higher than it was.
    """
    return _place("gacc_address_settle", packing, order)


def _place(function: str, packing: Packing, order: np.ndarray) -> np.ndarray:
    unlimited = np.zeros(len(packing), np.int64)
    call = _Call(packing, order, unlimited, unlimited[:0])
    library.call(function, call.problem, call.out)
    return call.solution()


def search(
    packing: Packing, order: np.ndarray, limits: tuple[np.ndarray, np.ndarray], max_nodes: int, stop: StopFlag, *, rule: Rule = Rule.LOWEST, windows: Windows | None = None
) -> tuple[Outcome, np.ndarray | None, int]:
    """Depth-first search for offsets within the limits; see `Packing.limits`. Returns outcome, offsets, number of nodes.

    Args:
        windows: of the packing under these limits; None: none are known, nor inferred on the way.
    """
    call = _Call(packing, order, *limits, windows)
    args = (ctypes.c_int64(max_nodes), ctypes.c_int32(rule), ctypes.byref(stop.value), call.out, ctypes.byref(call.result))
    library.call("gacc_address_search", call.problem, *args)
    return call.outcome()


def beam(
    packing: Packing, order: np.ndarray, limits: tuple[np.ndarray, np.ndarray], width: int, bias: float, stop: StopFlag, *, windows: Windows | None = None
) -> tuple[Outcome, np.ndarray | None, int]:
    """Beam search of a width; `bias` > 0 evens out how much the waste of tight and of loose sections counts."""
    call = _Call(packing, order, *limits, windows)
    args = (ctypes.c_int64(width), ctypes.c_double(bias), ctypes.byref(stop.value), call.out, ctypes.byref(call.result))
    library.call("gacc_address_beam", call.problem, *args)
    return call.outcome()
