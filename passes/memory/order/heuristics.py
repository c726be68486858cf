"""Starting orders: program order, updates at once, and XLA's and inductor's schedulers, written anew from their description.

- `immediate`: program order, but the operators that lead to one result alone (the update of one parameter) run as soon as
  what they wait for has run;
- `list_schedule`: XLA's memory list scheduler: the ready operator with the largest (bytes freed - bytes defined);
- `lpmf`: inductor's "least peak memory first": of the ready operators that do not raise the peak so far the one that leaves
  the least memory, otherwise the one that raises it least;
- `bfs`: inductor's breadth-first order: the ready operator whose predecessors ran earliest;
- `dfs`: inductor's depth-first order: from the operators that touch the fewest bytes, their predecessors first.

And `under_cap`, which follows a given order, but runs what frees memory as soon as it fits under a cap, and no sooner.
"""

import heapq
from collections.abc import Callable, Iterator

from graphacc.passes.memory.order.graph import OrderGraph

Order = tuple[int, ...]


def program(graph: OrderGraph) -> Order:
    """The order in which the operators are numbered."""
    return tuple(range(graph.num_operators))


class _Frontier:
    """The ready operators, and by how much each would change the live bytes; both follow as operators run."""

    def __init__(self, graph: OrderGraph):
        self.graph = graph
        self.waiting = [len(before) for before in graph.preds]
        self.left = [len(users) for users in graph.accesses]
        self.delta = list(graph.new)
        self.live = graph.start_bytes()
        for buffer, users in enumerate(graph.accesses):
            if len(users) == 1 and not graph.lasting[buffer]:
                self.delta[users[0]] -= graph.sizes[buffer]

    def run(self, v: int) -> Iterator[int]:
        """Run v; yields every operator that became ready, or is ready and changes memory otherwise than before."""
        graph = self.graph
        self.live += self.delta[v]
        self.waiting[v] = -1
        for buffer in graph.touched[v]:
            self.left[buffer] -= 1
            if self.left[buffer] == 1 and not graph.lasting[buffer]:
                last = next(u for u in graph.accesses[buffer] if self.waiting[u] >= 0)
                self.delta[last] -= graph.sizes[buffer]
                if not self.waiting[last]:
                    yield last
        for u in graph.succs[v]:
            self.waiting[u] -= 1
            if not self.waiting[u]:
                yield u

    def ready(self) -> list[int]:
        return [v for v, count in enumerate(self.waiting) if not count]


def _by_key(graph: OrderGraph, key: Callable[[_Frontier, int], tuple]) -> Order:
    """Always run the ready operator with the smallest key; keys may only fall while an operator waits."""
    frontier = _Frontier(graph)
    heap = [(key(frontier, v), v) for v in frontier.ready()]
    heapq.heapify(heap)
    order = []
    while heap:
        _, v = heapq.heappop(heap)
        if frontier.waiting[v]:
            continue
        order.append(v)
        for u in frontier.run(v):
            heapq.heappush(heap, (key(frontier, u), u))
    return tuple(order)


def list_schedule(graph: OrderGraph) -> Order:
    """The ready operator that frees the most bytes more than it defines; then the one with more users, then the earlier."""
    return _by_key(graph, lambda frontier, v: (frontier.delta[v], -len(graph.succs[v]), v))


def eager_free(graph: OrderGraph) -> Order:
    """Program order, but a ready operator that frees at least what it creates runs at once."""
    return _by_key(graph, lambda frontier, v: (frontier.delta[v] > 0, v))


def lpmf(graph: OrderGraph) -> Order:
    """Least peak memory first."""
    frontier = _Frontier(graph)
    by_delta = [(frontier.delta[v], v) for v in frontier.ready()]
    by_new = [(graph.new[v] + graph.workspace[v], v) for v in frontier.ready()]
    heapq.heapify(by_delta)
    heapq.heapify(by_new)
    order, peak = [], frontier.live
    for _ in range(graph.num_operators):
        v = _pop_fitting(graph, frontier, by_delta, peak)
        while v is None:
            _, candidate = heapq.heappop(by_new)
            v = candidate if not frontier.waiting[candidate] else None
        order.append(v)
        peak = max(peak, frontier.live + graph.new[v] + graph.workspace[v])
        for u in frontier.run(v):
            heapq.heappush(by_delta, (frontier.delta[u], u))
            heapq.heappush(by_new, (graph.new[u] + graph.workspace[u], u))
    return tuple(order)


def _pop_fitting(graph: OrderGraph, frontier: _Frontier, heap: list[tuple[int, int]], peak: int) -> int | None:
    """The ready operator of smallest delta that keeps `peak`, or None; the heap keeps all the others."""
    aside, found = [], None
    while heap and found is None:
        item = heapq.heappop(heap)
        v = item[1]
        if frontier.waiting[v] or item[0] != frontier.delta[v]:
            continue
        if frontier.live + graph.new[v] + graph.workspace[v] <= peak:
            found = v
        else:
            aside.append(item)
    for item in aside:
        heapq.heappush(heap, item)
    return found


def under_cap(graph: OrderGraph, guide: Order, cap: int) -> Order:
    """Follow `guide`, but run a ready operator that frees at least what it creates as soon as it fits under `cap`, and no sooner.

    What does not fit is put off until memory has fallen, or until nothing else is left.
    """
    rank = {v: i for i, v in enumerate(guide)}
    frontier = _Frontier(graph)
    fitting: list[tuple[int, int]] = []  # (rank, operator) that free memory and fit
    put_off: list[tuple[int, int, int]] = []  # (bytes needed, rank, operator) that free memory and did not fit
    others: list[tuple[int, int]] = []  # (rank, operator) that raise the live bytes
    order: list[int] = []

    def offer(v: int) -> None:
        if frontier.delta[v] <= 0:
            heapq.heappush(put_off, (graph.new[v] + graph.workspace[v], rank[v], v))
        else:
            heapq.heappush(others, (rank[v], v))

    for v in frontier.ready():
        offer(v)
    while len(order) < graph.num_operators:
        while put_off and frontier.live + put_off[0][0] <= cap:
            _, place, v = heapq.heappop(put_off)
            heapq.heappush(fitting, (place, v))
        while fitting and (frontier.waiting[fitting[0][1]] or not _fits(graph, frontier, fitting[0][1], cap)):
            _, v = heapq.heappop(fitting)
            if not frontier.waiting[v]:
                offer(v)
        while others and (frontier.waiting[others[0][1]] or frontier.delta[others[0][1]] <= 0):
            heapq.heappop(others)
        v = heapq.heappop(fitting)[1] if fitting else heapq.heappop(others)[1] if others else heapq.heappop(put_off)[2]
        if frontier.waiting[v]:
            continue
        order.append(v)
        for u in frontier.run(v):
            offer(u)
    return tuple(order)


def _fits(graph: OrderGraph, frontier: _Frontier, v: int, cap: int) -> bool:
    return frontier.live + graph.new[v] + graph.workspace[v] <= cap


def bfs(graph: OrderGraph) -> Order:
    """The ready operator whose predecessors' positions are smallest, compared as sorted lists."""
    position = [0] * graph.num_operators
    waiting = [len(before) for before in graph.preds]
    heap = [((), v) for v, count in enumerate(waiting) if not count]
    order = []
    while heap:
        _, v = heapq.heappop(heap)
        position[v] = len(order)
        order.append(v)
        for u in graph.succs[v]:
            waiting[u] -= 1
            if not waiting[u]:
                heapq.heappush(heap, (tuple(sorted(position[p] for p in graph.preds[u])), u))
    return tuple(order)


def dfs(graph: OrderGraph) -> Order:
    """Predecessors first, from the operators that touch the fewest bytes on."""
    weight = [sum(graph.sizes[buffer] for buffer in buffers) for buffers in graph.touched]
    return _depth_first(graph, sorted(range(graph.num_operators), key=lambda v: (weight[v], v)), weight)


def _depth_first(graph: OrderGraph, roots: list[int], weight: list[int]) -> Order:
    done: set[int] = set()
    order = []
    for root in roots:
        stack = [root]
        while stack:
            v = stack[-1]
            before = [u for u in graph.preds[v] if u not in done]
            if v in done:
                stack.pop()
            elif before:
                stack.extend(sorted(before, key=lambda u: (weight[u], u), reverse=True))
            else:
                done.add(v)
                order.append(stack.pop())
    return tuple(order)


def immediate(graph: OrderGraph) -> Order:
    """Program order, but what leads to one result alone runs as soon as what it waits for has run."""
    owner = _owners(graph)
    cones: dict[int, list[int]] = {}
    for v, sink in enumerate(owner):
        if sink >= 0:
            cones.setdefault(sink, []).append(v)
    trigger = {
        sink: max((u for v in cone for u in graph.preds[v] if owner[u] != sink), default=-1) for sink, cone in cones.items()
    }
    place = [(v, -1, v) if sink < 0 else (trigger[sink], sink, v) for v, sink in enumerate(owner)]
    return tuple(sorted(range(graph.num_operators), key=place.__getitem__))


def _owners(graph: OrderGraph) -> list[int]:
    """For each operator the one operator without successors that it leads to, or -1 where it leads to several."""
    owner = [-1] * graph.num_operators
    for v in reversed(range(graph.num_operators)):
        targets = {owner[u] for u in graph.succs[v]} or {v}
        owner[v] = targets.pop() if len(targets) == 1 else -1
    return owner


HEURISTICS: dict[str, Callable[[OrderGraph], Order]] = {
    "program order": program,
    "immediate updates": immediate,
    "eager free": eager_free,
    "XLA list scheduler": list_schedule,
    "LPMF": lpmf,
    "BFS": bfs,
    "DFS": dfs,
}
