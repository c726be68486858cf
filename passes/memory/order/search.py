"""Exact search over downsets: the order with the smallest peak, or the proof that none is below a threshold.

States are downsets. From a state every ready operator leads on; but one that fits under the peak so far and frees at least
what it creates is run at once, alone: whatever an order does later, doing that first costs it nothing. States that are
reached twice are the same from there on, so only the one with the lower peak so far is kept.
"""

import heapq

from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.heuristics import Order


def best_order(graph: OrderGraph, max_states: int) -> Order | None:
    """The order with the smallest peak, by best-first search on the peak so far; None where that takes more than `max_states`."""
    everything = (1 << graph.num_operators) - 1
    waits = [sum(1 << u for u in before) for before in graph.preds]
    users = [sum(1 << v for v in accesses) for accesses in graph.accesses]
    came: dict[int, tuple[int, int]] = {}
    best = {0: 0}
    heap = [(0, 0, 0, graph.start_bytes())]  # (peak so far, minus the number of operators, downset, live)
    while heap:
        peak, _, done, live = heapq.heappop(heap)
        if best[done] < peak:
            continue
        if done == everything:
            return _path(came, done)
        if len(best) > max_states:
            return None
        for v, after in _moves(graph, waits, users, done, live, peak):
            higher, following = max(peak, live + graph.new[v] + graph.workspace[v]), done | 1 << v
            if higher < best.get(following, higher + 1):
                best[following] = higher
                came[following] = done, v
                heapq.heappush(heap, (higher, -following.bit_count(), following, after))
    raise AssertionError("every order ends: the heap cannot run empty")


def _moves(
    graph: OrderGraph, waits: list[int], users: list[int], done: int, live: int, peak: int
) -> list[tuple[int, int]]:
    """The operators to go on with and the live bytes after each; a single one where it costs nothing."""
    moves = []
    for v, before in enumerate(waits):
        if done >> v & 1 or before & ~done:
            continue
        now = done | 1 << v
        dying = [b for b in graph.touched[v] if not users[b] & ~now and not graph.lasting[b]]
        after = live + graph.new[v] - sum(graph.sizes[b] for b in dying)
        if after <= live and live + graph.new[v] + graph.workspace[v] <= peak:
            return [(v, after)]
        moves.append((v, after))
    return moves


def _path(came: dict[int, tuple[int, int]], done: int) -> Order:
    order = []
    while done:
        done, v = came[done]
        order.append(v)
    return tuple(reversed(order))
