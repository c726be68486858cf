"""What every order below a threshold has in common: precedences that minimum cuts prove.

Let C be a threshold, u an operator and t another that is not ordered against it. If u cannot run below C before t has run,
then t runs before u in every order whose peak is at most C; likewise the other way round. Each such precedence makes the
other cuts larger and so may prove more. In the end either some operator cannot run below C at all, which proves that
every peak is above C, or the precedences guide the search for an order. This sees what a cut for one operator alone cannot:
that two operators, each of which could run at its best moment, exclude each other's.

Asking for all pairs would take too long, so t goes along one longest path (the trunk: forward and backward of a
training step), where the answer is monotone and bisection finds it.
"""

from collections.abc import Callable, Sequence

from graphacc.passes.memory.bounds import CutModel
from graphacc.passes.memory.order.graph import OrderGraph


def trunk(graph: OrderGraph) -> list[int]:
    """A longest path of the graph, whose operators must be numbered in a valid order."""
    if not graph.num_operators:
        return []
    length, following = [1] * graph.num_operators, [-1] * graph.num_operators
    for v in reversed(range(graph.num_operators)):
        for u in graph.succs[v]:
            if length[u] + 1 > length[v]:
                length[v], following[v] = length[u] + 1, u
    path = [max(range(graph.num_operators), key=lambda v: length[v])]
    while following[path[-1]] >= 0:
        path.append(following[path[-1]])
    return path


def prove(
    model: CutModel, threshold: int, path: Sequence[int], operators: Sequence[int], keep_going: Callable[[], bool]
) -> bool:
    """Add to `model` the precedences that hold in every order whose peak is at most `threshold`.

    Args:
        model: changed in place.
        threshold: bytes.
        path: operators, each an ancestor of the next.
        operators: those to place along the path, the ones that need the most memory first.
        keep_going: asked before every operator; False ends the search, with what is proved so far.

    Returns:
        False where it is proved that no order has a peak of at most `threshold`.
    """
    changed = True
    while changed:
        changed = False
        for v in operators:
            if not keep_going():
                return True
            first = sum(model.ancestors[v] >> t & 1 for t in path)
            last = len(path) - sum(model.descendants[v] >> t & 1 for t in path)
            if model.cut(v).value > threshold:
                return False
            free = [t for t in path[first:last] if t != v]
            early = _count(free, lambda t: model.cut(v, before=t).value > threshold)
            if early:
                changed = True
                if not model.require(free[early - 1], v):
                    return False
                free = free[early:]
            late = _count(free[::-1], lambda t: model.cut(v, after=t).value > threshold)
            if late:
                changed = True
                if not model.require(v, free[-late]):
                    return False
    return True


def _count(items: Sequence[int], holds: Callable[[int], bool]) -> int:
    """How many of `items` from the start on `holds` is true for; it is true for a prefix of them."""
    if not items or not holds(items[0]):
        return 0
    low, high = 1, len(items)
    while low < high:
        middle = (low + high) // 2
        if holds(items[middle]):
            low = middle + 1
        else:
            high = middle
    return low
