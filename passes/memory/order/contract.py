"""Merges that no order can lose by: they make the graph smaller for the bound and for the searches.

An operator u with one successor w, such that u never frees anything, may always be put off until right before w: between
its old and its new place memory only falls, by what u creates. At its new place u needs ``live(X) + workspace(u)``, where
X is the downset before w; w needs ``live(X) + new(w) + workspace(w)`` there. So u and w become one operator, without loss,
where workspace(u) <= new(w) + workspace(w).

u never frees anything where every buffer that it touches lives to the end or is touched by w too.
"""

import dataclasses
from collections.abc import Sequence

from graphacc.passes.memory.order.graph import OrderGraph, make_graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """A smaller graph, and the operators of the larger one behind each of its operators."""

    graph: OrderGraph
    members: tuple[tuple[int, ...], ...]  # in the order in which they run

    def expand(self, order: Sequence[int]) -> tuple[int, ...]:
        """An order of the larger graph from one of the smaller."""
        return tuple(v for merged in order for v in self.members[merged])

    def shrink(self, order: Sequence[int]) -> tuple[int, ...]:
        """An order of the smaller graph from one of the larger: every merged operator where its last member was."""
        last = {members[-1]: merged for merged, members in enumerate(self.members)}
        return tuple(last[v] for v in order if v in last)


def contract(graph: OrderGraph) -> Contraction:
    """Merge every operator that can be put off into its only successor. Operators must be numbered in a valid order."""
    return merge(graph, _groups(graph))


def merge(graph: OrderGraph, members: Sequence[tuple[int, ...]]) -> Contraction:
    """One operator for each group; groups must be convex, ordered inside, and come in a valid order."""
    group = [0] * graph.num_operators
    for index, merged in enumerate(members):
        for v in merged:
            group[v] = index
    buffers = [
        (size, producer if producer < 0 else group[producer], lasting, tuple(sorted({group[v] for v in users})))
        for size, producer, lasting, users in zip(graph.sizes, graph.producers, graph.lasting, graph.accesses)
    ]
    buffers = [item for item in buffers if not _is_internal(item)]
    preds = [sorted({group[u] for v in merged for u in graph.preds[v]} - {index}) for index, merged in enumerate(members)]
    small = make_graph(graph.base, buffers, preds, [0] * len(members))
    workspace = tuple(_climb(graph, merged)[0] - new for merged, new in zip(members, small.new))
    return Contraction(graph=dataclasses.replace(small, workspace=workspace), members=tuple(members))


def _groups(graph: OrderGraph) -> tuple[tuple[int, ...], ...]:
    """The operators that run together, each group in the order in which it runs."""
    groups = {v: [v] for v in range(graph.num_operators)}
    for u in range(graph.num_operators):
        if not _never_frees(graph, u):
            continue
        group, (w,) = groups[u], graph.succs[u]
        hill, outliving = _climb(graph, group)
        if hill - outliving <= _climb(graph, groups[w])[0]:
            groups[w] = groups.pop(u) + groups[w]
    return tuple(map(tuple, groups.values()))


def _never_frees(graph: OrderGraph, u: int) -> bool:
    if len(graph.succs[u]) != 1:
        return False
    return all(graph.lasting[buffer] or graph.succs[u][0] in graph.accesses[buffer] for buffer in graph.touched[u])


def _climb(graph: OrderGraph, group: Sequence[int]) -> tuple[int, int]:
    """How far memory rises while the group runs, above its level before, and the bytes that the group leaves behind."""
    if len(group) == 1:
        return graph.new[group[0]] + graph.workspace[group[0]], graph.new[group[0]]
    part = graph.detach(group)
    made = zip(part.sizes, part.producers, part.lasting)
    outliving = sum(size for size, producer, lasting in made if lasting and producer >= 0)
    return part.peak(range(len(group))) - part.start_bytes(), outliving


def _is_internal(item: tuple[int, int, bool, tuple[int, ...]]) -> bool:
    """Created and dead inside one operator: such a buffer is part of the workspace."""
    _, producer, lasting, users = item
    return producer >= 0 and not lasting and users == (producer,)
