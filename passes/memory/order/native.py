"""The threshold search in C++ (`csrc/planner_order`)."""

import ctypes
import enum
from collections.abc import Iterable, Sequence

import numpy as np

from graphacc.kernels import library
from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.heuristics import Order

_ARRAY = ctypes.POINTER(ctypes.c_int64)


class Outcome(enum.IntEnum):
    """How a search ended."""

    FOUND = 0
    IMPOSSIBLE = 1  # a proof: no order stays within the threshold
    LOST = 2  # the beam was too narrow to say
    STOPPED = 3  # out of time


class _Graph(ctypes.Structure):
    _fields_ = [
        ("num_operators", ctypes.c_int64),
        ("num_buffers", ctypes.c_int64),
        ("start_bytes", ctypes.c_int64),
        ("created", _ARRAY),
        ("workspace", _ARRAY),
        ("rank", _ARRAY),
        ("size", _ARRAY),
        ("lasting", _ARRAY),
        ("pred_ends", _ARRAY),
        ("preds", _ARRAY),
        ("succ_ends", _ARRAY),
        ("succs", _ARRAY),
        ("touched_ends", _ARRAY),
        ("touched", _ARRAY),
        ("access_ends", _ARRAY),
        ("accesses", _ARRAY),
    ]


def beam(graph: OrderGraph, threshold: int, *, width: int, guide: Order, seconds: float) -> tuple[Outcome, Order | None]:
    """Look for an order of `graph` whose memory never exceeds `threshold`.

    Args:
        width: the number of downsets of each size that are kept: those with the fewest live bytes.
        guide: where live bytes are equal, downsets that this order reaches early are kept.
        seconds: time.

    Returns:
        How it ended, and the order if one was found.
    """
    rank = [0] * graph.num_operators
    for place, v in enumerate(guide):
        rank[v] = place
    columns = [graph.new, graph.workspace, rank, graph.sizes, graph.lasting]
    for lists in (graph.preds, graph.succs, graph.touched, graph.accesses):
        columns.extend(_flat(lists))
    arrays = [np.ascontiguousarray(column, np.int64) for column in columns]
    pointers = [array.ctypes.data_as(_ARRAY) for array in arrays]
    native = _Graph(graph.num_operators, len(graph.sizes), graph.start_bytes(), *pointers)
    outcome = ctypes.c_int64()
    order = np.zeros(graph.num_operators, np.int64)
    library.call(
        "gacc_order_beam",
        ctypes.byref(native),
        ctypes.c_int64(threshold),
        ctypes.c_int64(width),
        ctypes.c_double(seconds),
        ctypes.byref(outcome),
        order.ctypes.data_as(_ARRAY),
    )
    ended = Outcome(outcome.value)
    return ended, tuple(order.tolist()) if ended is Outcome.FOUND else None


def _flat(lists: Sequence[Iterable[int]]) -> tuple[np.ndarray, list[int]]:
    """The ends of the lists, and their items one after the other."""
    return np.cumsum([len(items) for items in lists], dtype=np.int64), [item for items in lists for item in items]
