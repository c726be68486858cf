"""Local improvement: parts of an order around its peak are searched again, everything outside them held fixed.

A window is a stretch of the order. Its operators, with what lives through it as a constant, are a small problem of their own,
which the beam search decides for a threshold just below the present peak. Windows grow until one helps.
"""

from collections.abc import Callable

from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.heuristics import Order
from graphacc.passes.memory.order.native import Outcome, beam

SIZES = (60, 120, 250, 500)
PLACES = (0.5, 0.2, 0.8)
"""Which part of the window lies before the first operator that is too high."""
WIDTHS = (50, 400)
STEP = 1e-4
"""By how much a window has to lower the peak, relative to it."""
MAX_SECONDS = 3.0
"""For one search."""


def improve_by_windows(graph: OrderGraph, order: Order, bound: int, keep_going: Callable[[], bool]) -> Order:
    """Lower the peak of `order` window by window, until no window helps or the peak is at `bound`."""
    while (peak := graph.peak(order)) > bound and keep_going():
        target = max(bound, peak - max(1, int(peak * STEP)))
        better = _improved(graph, order, target, keep_going)
        if better is None:
            return order
        order = better
    return order


def _improved(graph: OrderGraph, order: Order, target: int, keep_going: Callable[[], bool]) -> Order | None:
    """An order that a window brings to `target`, or None."""
    high = [i for i, memory in enumerate(graph.profile(order)) if memory > target]
    for size in SIZES:
        for place in PLACES:
            low = max(0, int(high[0] - size * place))
            if not keep_going():
                return None
            better = _searched(graph, order, low, max(high[-1] + 1, low + size), target)
            if better is not None:
                return better
    return None


def _searched(graph: OrderGraph, order: Order, low: int, high: int, target: int) -> Order | None:
    """`order` with the operators at [low, high) ordered anew so that memory there is at most `target`; None if not found."""
    inside = order[low:high]
    part = graph.restrict(inside, set(order[:low]))
    for width in WIDTHS:
        outcome, found = beam(part, target, width=width, guide=tuple(range(len(inside))), seconds=MAX_SECONDS)
        if found is not None:
            return order[:low] + tuple(inside[v] for v in found) + order[high:]
        if outcome is not Outcome.LOST:
            return None
    return None
