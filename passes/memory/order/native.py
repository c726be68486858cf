"""The threshold search and the minimum cuts in C++ (`csrc/planner_order`)."""

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


class _Network(ctypes.Structure):
    _fields_ = [
        ("num_nodes", ctypes.c_int64),
        ("num_operators", ctypes.c_int64),
        ("num_arcs", ctypes.c_int64),
        ("tails", ctypes.POINTER(ctypes.c_int32)),
        ("heads", ctypes.POINTER(ctypes.c_int32)),
        ("sizes", _ARRAY),
    ]


class FlowNetwork:
    """A network over node 0 (the source), node 1 (the sink), the operators from node 2 on, and others."""

    def __init__(self, num_nodes: int, num_operators: int, arcs: np.ndarray):
        """`arcs`: int64 [3, A], the tail, the head and the capacity of each."""
        self.num_operators = num_operators
        tails, heads = np.ascontiguousarray(arcs[:2], np.int32)
        self._arrays = tails, heads, np.ascontiguousarray(arcs[2], np.int64)  # kept alive: the structure points into them
        pointers = (a.ctypes.data_as(kind) for a, (_, kind) in zip(self._arrays, _Network._fields_[3:]))
        self._native = _Network(num_nodes, num_operators, arcs.shape[1], *pointers)

    def min_cut(self, inside: int, outside: int, limit: int) -> tuple[int, int]:
        """The minimum cut with `inside` on the source's side and `outside` on the sink's (disjoint sets of operators, as bits).

        Returns:
            Its size, or where that is more than `limit` some number that is; and the operators on its source's side but those of
            `inside`, as bits (the smallest such set).
        """
        num_bytes = (self.num_operators + 7) // 8
        value = ctypes.c_int64()
        side = ctypes.create_string_buffer(num_bytes)
        sets = (bits.to_bytes(num_bytes, "little") for bits in (inside, outside))
        library.call("gacc_min_cut", ctypes.byref(self._native), *sets, ctypes.c_int64(limit), ctypes.byref(value), side)
        return value.value, int.from_bytes(side.raw, "little")
