"""Small groups of operators that are best run in one go, such as the update of one parameter: found, ordered and merged.

A group K ends in an operator w that all of it leads to. By the exchange argument of Liu ("An application of generalized tree
pebbling to sparse matrix factorization", 1987) nothing is lost by running K in one go, in an order that rises by H, where

1. whenever a part of K has run, no fewer bytes live than before K and than after K, and
2. some x in K cannot run without at least H bytes above the level before K, and
3. everything outside that any operator of K waits for, x waits for too.

For then, in any order, all of K can be moved to where x runs: that place has room for H, and elsewhere memory only falls. A
buffer from outside that others touch too may be freed by K or not; each condition takes it the way that is worse.

Scalars next to large tensors break 1 and 2 by a few bytes. Up to a tolerance each is let pass, and counted: what 1 lacks
adds up over the groups, of what 2 lacks the largest counts. No order of the merged graph has a lower peak than the best order
of the graph itself, and one has a peak that is higher by no more than that `loss`.

Equal groups, as in repeated layers and in the updates of equal parameters, are looked at once.
"""

import dataclasses
from collections.abc import Sequence

from graphacc.passes.memory.bounds import CutModel
from graphacc.passes.memory.order.contract import Contraction, merge
from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.heuristics import HEURISTICS, Order
from graphacc.passes.memory.order.search import best_order

MAX_MEMBERS = 64
MAX_STATES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Hill:
    """A group that is one hill in its best known order."""

    order: Order
    tops: dict[int, int]  # the operators x of condition 2 -> the bytes that it lacks
    dip: int  # the bytes that condition 1 lacks


def merge_cones(graph: OrderGraph, ancestors: Sequence[int], tolerance: int) -> tuple[Contraction, int]:
    """Merge all groups.

    Args:
        graph: its operators must be numbered in a valid order.
        ancestors: of each operator, as the bits of an integer (`CutModel.ancestors`).
        tolerance: bytes.

    Returns:
        The merged graph, and the loss in bytes.
    """
    groups = {v: (v,) for v in range(graph.num_operators)}
    leader = list(range(graph.num_operators))
    inside = _post_dominated(graph)
    hills: dict[tuple[OrderGraph, OrderGraph], _Hill | None] = {}
    dips = overshoot = 0
    for w in range(graph.num_operators):
        cone = _cone(graph, sorted({leader[v] for v in inside[w]}), groups)
        if len(cone) < 2:
            continue
        members = sorted(v for lead in cone for v in groups[lead])
        parts = graph.detach(members), graph.detach(members, shared_die=True)
        hill = hills[parts] if parts in hills else hills.setdefault(parts, _hill(*parts, tolerance))
        top = _top(graph, members, hill, ancestors) if hill else None
        if hill is None or top is None:
            continue
        dips += hill.dip
        overshoot = max(overshoot, top)
        for lead in cone:
            del groups[lead]
        groups[w] = tuple(members[i] for i in hill.order)
        for v in members:
            leader[v] = w
    return merge(graph, [groups[lead] for lead in sorted(groups)]), dips + overshoot


def _hill(part: OrderGraph, freeing: OrderGraph, tolerance: int) -> _Hill | None:
    """A group's order and what it lacks, or None where its best known order is not one hill."""
    order = best_order(part, MAX_STATES) or min((heuristic(part) for heuristic in HEURISTICS.values()), key=part.peak)
    after = [live for _, live in part.levels(order)]
    start, end = part.start_bytes(), after[-1]
    if any(live < start or live <= end for live in after[:-1]):
        return None
    dip = _dip(part, freeing, end)
    tops = _tops(freeing, part.peak(order) - start, tolerance) if dip <= tolerance else {}
    return _Hill(order=order, tops=tops, dip=dip)


def _dip(part: OrderGraph, freeing: OrderGraph, end: int) -> int:
    """How far live bytes can fall inside the group below those before it, or below those after it."""
    model, freeing_model = CutModel(part), CutModel(freeing)
    last = part.num_operators - 1  # all others lead to it
    below_start = freeing.start_bytes() - freeing_model.least(0, 1 << last)[0]
    sources = [v for v, before in enumerate(part.preds) if not before]
    below_end = max(end - model.least(1 << v, 0)[0] for v in sources)
    return max(below_start, below_end, 0)


def _tops(freeing: OrderGraph, height: int, tolerance: int) -> dict[int, int]:
    """The operators that cannot run far below `height`, and by how much they can."""
    model = CutModel(freeing)
    lacks = {v: freeing.start_bytes() + height - model.cut(v).value for v in range(freeing.num_operators)}
    return {v: max(lack, 0) for v, lack in lacks.items() if lack <= tolerance}


def _top(graph: OrderGraph, members: Sequence[int], hill: _Hill, ancestors: Sequence[int]) -> int | None:
    """The bytes that condition 2 lacks with the best x for which condition 3 holds; None without one."""
    inside = sum(1 << v for v in members)
    outside = 0
    for v in members:
        for u in graph.preds[v]:
            outside |= 1 << u
    outside &= ~inside
    return min((lack for top, lack in hill.tops.items() if not outside & ~ancestors[members[top]]), default=None)


def _post_dominated(graph: OrderGraph) -> list[list[int]]:
    """For each operator w those from which every way on leads through w, w included; of many, those that come last."""
    depth = [0] * graph.num_operators
    parent = [-1] * graph.num_operators
    for v in reversed(range(graph.num_operators)):
        meeting = _common(graph.succs[v], parent, depth)
        parent[v] = meeting
        depth[v] = depth[meeting] + 1 if meeting >= 0 else 0
    inside: list[list[int]] = [[v] for v in range(graph.num_operators)]
    for v, w in enumerate(parent):
        inside[v] = sorted(inside[v])[-MAX_MEMBERS:]
        if w >= 0:
            inside[w].extend(inside[v])
    return inside


def _common(targets: Sequence[int], parent: list[int], depth: list[int]) -> int:
    """The first operator that every way from all of `targets` leads through; -1 for none."""
    if not targets:
        return -1
    meeting = targets[0]
    for other in targets[1:]:
        while meeting != other:
            if meeting < 0 or other < 0:
                return -1
            if depth[meeting] >= depth[other]:
                meeting = parent[meeting]
            else:
                other = parent[other]
    return meeting


def _cone(graph: OrderGraph, leads: Sequence[int], groups: dict[int, tuple[int, ...]]) -> list[int]:
    """Those of the groups `leads`, closed towards the last of them, that begin where the fewest bytes are live for them alone.

    Grown backwards from the last, always by the group that adds the fewest such bytes.
    """
    pending = {lead: _num_outside_succs(graph, groups[lead]) for lead in leads}
    home = {v: lead for lead in leads for v in groups[lead]}
    left: dict[int, int] = {}  # buffer -> accesses that the groups taken lack, its creation aside
    ready, taken = [leads[-1]], []
    owned, fewest, length = 0, None, 0
    while ready:
        costs = {lead: _owned_change(graph, groups[lead], left) for lead in ready}
        lead = min(ready, key=lambda lead: (costs[lead], -lead))
        ready.remove(lead)
        taken.append(lead)
        owned += costs[lead]
        if fewest is None or owned < fewest:
            fewest, length = owned, len(taken)
        for v in groups[lead]:
            for buffer in graph.touched[v]:
                if graph.producers[buffer] != v:
                    left[buffer] = left.get(buffer, _num_uses(graph, buffer)) - 1
            for u in graph.preds[v]:
                if home.get(u, lead) != lead:
                    pending[home[u]] -= 1
                    if not pending[home[u]]:
                        ready.append(home[u])
    return sorted(taken[:length])


def _num_outside_succs(graph: OrderGraph, group: Sequence[int]) -> int:
    """Dependencies from a group to operators outside it."""
    inside = set(group)
    return sum(u not in inside for v in group for u in graph.succs[v])


def _num_uses(graph: OrderGraph, buffer: int) -> int:
    """Accesses of a buffer, its creation aside."""
    return len(graph.accesses[buffer]) - (graph.producers[buffer] >= 0)


def _owned_change(graph: OrderGraph, group: Sequence[int], left: dict[int, int]) -> int:
    """By how many bytes the buffers from outside that die with the groups taken change when `group` joins them."""
    inside = set(group)
    change = 0
    touches: dict[int, int] = {}
    for v in group:
        for buffer in graph.touched[v]:
            if graph.producers[buffer] != v:
                touches[buffer] = touches.get(buffer, 0) + 1
            elif left.get(buffer) == 0:
                change -= graph.sizes[buffer]
    for buffer, count in touches.items():
        dies = not graph.lasting[buffer] and left.get(buffer, _num_uses(graph, buffer)) == count
        change += graph.sizes[buffer] if dies and graph.producers[buffer] not in inside else 0
    return change
