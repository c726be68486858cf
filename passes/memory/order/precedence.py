"""What every order below a threshold has in common: precedences that minimum cuts prove.

Let C be a threshold, and t an operator.

- One operator u that is not ordered against t: if u cannot run below C before t has run, then t runs before u in every order
  whose peak is at most C; likewise the other way round.
- Several, W: if no u of W can run below C while neither t nor another of W has run, then no u of W can be the first of them
  to run before t; so t runs before all of W. ("Not first", as schedulers for machines reason.) This sees what cuts for
  single operators cannot: that each of two updates would fit if the other had been done already.

Each precedence makes the other cuts larger and so may prove more. In the end either some operator cannot run below C at
all, which proves that every peak is above C, or the precedences guide the search for an order.

Asking for all pairs would take too long, so t goes along one longest path (the trunk: forward and backward of a
training step), where the answer to the first question is monotone and bisection finds it.
"""

import itertools
from collections.abc import Callable, Sequence
from operator import or_

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
    model: CutModel,
    threshold: int,
    path: Sequence[int],
    operators: Sequence[int],
    keep_going: Callable[[], bool],
    *,
    num_together: int = 0,
) -> bool:
    """Add to `model` the precedences that hold in every order whose peak is at most `threshold`.

    Args:
        model: changed in place.
        threshold: bytes.
        path: operators, each an ancestor of the next.
        operators: those to place along the path, the ones that need the most memory first.
        keep_going: asked before every operator; False ends the search, with what is proved so far.
        num_together: how many of `operators` to look at together; 0: each alone.

    Returns:
        False where it is proved that no order has a peak of at most `threshold`.
    """
    before, on_path = -1, sum(1 << t for t in path)
    while before < len(model.required) and keep_going():
        before = len(model.required)
        if not all(_place(model, threshold, path, on_path, v) for v in operators if keep_going()):
            return False
        if len(model.required) == before and num_together:
            heavy = _heavy(model.graph, path, operators)
            if not _place_together(model, threshold, heavy, operators[:num_together], keep_going):
                return False
    return True


def _place(model: CutModel, threshold: int, path: Sequence[int], on_path: int, v: int) -> bool:
    """Find between which operators of the path (`on_path` as bits) v has to run. False: nowhere."""
    if model.exceeds(threshold, v):
        return False
    first = (model.ancestors[v] & on_path).bit_count()
    last = len(path) - (model.descendants[v] & on_path).bit_count()
    free = [t for t in path[first:last] if t != v]
    early = _count(free, lambda t: model.exceeds(threshold, v, before=model.since(t)))
    if early and not model.require(free[early - 1], v):
        return False
    late = _count(free[early:][::-1], lambda t: model.exceeds(threshold, v, after=model.until(t)))
    return not late or model.require(v, free[-late])


def _place_together(
    model: CutModel, threshold: int, path: Sequence[int], operators: Sequence[int], keep_going: Callable[[], bool]
) -> bool:
    """For each operator of the path the largest set of `operators` that it runs before, because none of the set can be first.

    What can be first before one operator of the path can be first before a later one too: so the sets shrink along the path.

    Returns:
        False for a contradiction.
    """
    together = list(operators)
    for t in path:
        size = -1
        together = [u for u in together if u != t and not model.ancestors[t] >> u & 1]
        while size != len(together):
            if not keep_going():
                return True
            size = len(together)
            together = _never_first(model, threshold, t, together)
        for u in together:
            if not model.ancestors[u] >> t & 1 and not model.require(t, u):
                return False
    return True


def _never_first(model: CutModel, threshold: int, t: int, operators: list[int]) -> list[int]:
    """Those that cannot run while neither t nor another of `operators` has run."""
    later = [model.since(u) for u in operators]
    rest = list(itertools.accumulate(reversed(later), or_, initial=0))[-2::-1]  # of each: all that come behind it
    first = itertools.accumulate(later, or_, initial=model.since(t))
    return [u for u, others, more in zip(operators, first, rest) if model.exceeds(threshold, u, before=others | more)]


def _heavy(graph: OrderGraph, path: Sequence[int], operators: Sequence[int]) -> list[int]:
    """The operators of the path that need as much memory as one of `operators`."""
    least = min(graph.new[v] + graph.workspace[v] for v in operators)
    return [t for t in path if graph.new[t] + graph.workspace[t] >= least]


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
