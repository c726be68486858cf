"""Of the orders with a small peak, one that stays near the program's own.

What runs soon after what it reads finds it in the caches, and what is independent can run beside it: XLA's order takes care of
both, and a planner that looks at the peak alone gives that up everywhere for the sake of a few places. Outside a stretch [low, top)
of the program's order the live sets do not depend on the order inside; so only a stretch around the places that are too high
is ordered as planned.
"""

from graphacc.passes.memory.order.graph import OrderGraph


def nearest_order(graph: OrderGraph, planned: tuple[int, ...]) -> tuple[int, ...]:
    """The program's order with one stretch ordered as in `planned`; its peak is at most that of `planned`.

    Args:
        graph: its operators must be numbered in the program's order.
        planned: a valid order.
    """
    num = graph.num_operators
    cap = graph.peak(planned)
    high = [place for place, memory in enumerate(graph.profile(range(num))) if memory > cap]
    if not high:
        return tuple(range(num))
    low, top, step = high[0], high[-1] + 1, 1
    while True:
        order = (*range(low), *(v for v in planned if low <= v < top), *range(top, num))
        if graph.peak(order) <= cap:
            return order
        low, top, step = max(0, low - step), min(num, top + step), 2 * step
