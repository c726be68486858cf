"""Orders that are cut out of the graph by minimum cuts: divide at the operators that are hardest to run, and conquer.

Given a target peak, an operator v that every known order runs above the target gets the best that it can have: its minimum
cut says which downset S to run before it. The graph falls into three parts, S, v and the rest, which are ordered alone, each
with what lives through it as a constant. This generalises ROAM's cuts at memory-insensitive operators, whose S is forced.

Among the operators that are too high the one with the largest cut goes first: it has the least choice of S.
"""

import dataclasses
from collections.abc import Callable, Sequence

from graphacc.passes.memory.bounds import CutModel
from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.heuristics import Order, eager_free, immediate, list_schedule, under_cap
from graphacc.passes.memory.order.search import best_order

MAX_GUIDES = 4
SMALL = 40
MAX_STATES = 3000


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of the graph that is to be ordered."""

    graph: OrderGraph
    names: tuple[int, ...]  # of its operators in the whole graph
    guides: tuple[Order, ...]  # known orders of it


def cut_into_order(
    graph: OrderGraph, guides: Sequence[Order], target: int, difficulty: Callable[[int], int], keep_going: Callable[[], bool]
) -> Order:
    """An order that aims at `target`; where a part cannot be brought below it, the best known order of that part stays.

    Args:
        graph: the whole graph.
        guides: known orders of it.
        target: bytes.
        difficulty: the least memory with which an operator can run, or a bound of it.
        keep_going: asked before every cut; False leaves the remaining parts as they are.
    """
    order: list[int] = []
    pending = [_Part(graph=graph, names=tuple(range(graph.num_operators)), guides=tuple(guides))]
    while pending:
        part = pending.pop()
        known = _known_orders(part, target)
        best = known[0]
        cut = None
        if part.graph.peak(best) > target and keep_going():
            v = _hardest(part, known, target, difficulty)
            cut = CutModel(part.graph).cut(v)
        if cut is None or cut.value > target:
            order.extend(part.names[v] for v in best)
            continue
        rest = [u for u in range(part.graph.num_operators) if u not in cut.before and u != v]
        pending.append(_sub_part(part, known, rest, {*cut.before, v}))
        pending.append(_sub_part(part, known, [v], set(cut.before)))
        pending.append(_sub_part(part, known, sorted(cut.before), set()))
    return tuple(order)


def _known_orders(part: _Part, target: int) -> list[Order]:
    """Orders of a part, the lowest peak first; new ones are made only where the known ones miss the target."""
    graph = part.graph
    known = sorted(set(part.guides), key=graph.peak)
    if graph.peak(known[0]) <= target:
        return known
    capped = [under_cap(graph, guide, target) for guide in known[:2]]
    fresh = [list_schedule(graph), eager_free(graph), immediate(graph), *capped]
    if graph.num_operators <= SMALL and (exact := best_order(graph, MAX_STATES)) is not None:
        fresh.append(exact)
    return sorted({*known, *fresh}, key=graph.peak)[:MAX_GUIDES]


def _hardest(part: _Part, known: Sequence[Order], target: int, difficulty: Callable[[int], int]) -> int:
    """Of the operators that no known order runs within the target, or else that the best one does not, the most difficult."""
    least: dict[int, int] = {}
    for order in known:
        for v, memory in zip(order, part.graph.profile(order)):
            least[v] = min(memory, least.get(v, memory))
    high = [v for v, memory in least.items() if memory > target]
    high = high or [v for v, memory in zip(known[0], part.graph.profile(known[0])) if memory > target]
    return max(high, key=lambda v: (difficulty(part.names[v]), least[v]))


def _sub_part(part: _Part, known: Sequence[Order], chosen: list[int], executed: set[int]) -> _Part:
    local = {v: i for i, v in enumerate(chosen)}
    return _Part(
        graph=part.graph.restrict(chosen, executed),
        names=tuple(part.names[v] for v in chosen),
        guides=tuple(tuple(local[v] for v in order if v in local) for order in known),
    )
