"""Lower bounds on the peak of every order, by minimum cuts.

While v runs, a downset S has run that holds all ancestors of v and neither v nor a descendant of v. So memory is then at
least ``new(v) + workspace(v)`` plus the minimum of live(S) over those downsets. That minimum is a cut: S is the source's
side, the precedences are arcs of infinite capacity, and a buffer is an arc of its size from its producer to a node of its
own, with infinite arcs from there to all that touch it: it is cut exactly where it lives. The largest of these values over
all v bounds the peak of every order, and the cut itself says what to run before v.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.native import FlowNetwork

_SOURCE, _SINK = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """The least memory with which one operator can run."""

    value: int  # bytes while it runs
    before: frozenset[int]  # a downset to run before it that reaches this value


class CutModel:
    """Minimum cuts of one OrderGraph, with everything that does not depend on the operator prepared once."""

    def __init__(self, graph: OrderGraph):
        self.graph = graph
        self.ancestors = _closure(graph.preds, range(graph.num_operators))
        self.descendants = _closure(graph.succs, reversed(range(graph.num_operators)))
        self.required: list[tuple[int, int]] = []  # precedences besides those of the graph
        self._infinite = sum(graph.sizes) + 1
        self._arcs = self._make_arcs()
        self._network: FlowNetwork | None = None  # of the arcs and of what is required

    def cut(self, v: int) -> Cut:
        """The minimum over what may run before v of the memory while v runs."""
        live, downset = self.least(self.ancestors[v], self.since(v))
        return Cut(value=live + self._own(v), before=frozenset(_members(downset).tolist()))

    def exceeds(self, threshold: int, v: int, *, after: int = 0, before: int = 0) -> bool:
        """Whether v cannot run with `threshold` bytes: its minimum cut is larger.

        Args:
            threshold: bytes.
            v: an operator.
            after, before: only orders in which v runs after, or before, these operators: `until` or `since` of each (sets as bits).
        """
        allowed = threshold - self._own(v)
        return self.least(self.ancestors[v] | after, self.since(v) | before, limit=allowed)[0] > allowed

    def until(self, v: int) -> int:
        """v and all that runs before it, as bits."""
        return self.ancestors[v] | 1 << v

    def since(self, v: int) -> int:
        """v and all that runs after it, as bits."""
        return self.descendants[v] | 1 << v

    def copy(self) -> "CutModel":
        """A model to which `require` can be applied alone."""
        twin = copy.copy(self)
        twin.ancestors, twin.descendants, twin.required = list(self.ancestors), list(self.descendants), list(self.required)
        return twin

    def require(self, u: int, v: int) -> bool:
        """From now on u runs before v. False, and nothing changes, where v has to run before u."""
        if self.ancestors[u] >> v & 1:
            return False
        earlier, later = self.until(u), self.since(v)
        for w in _members(later).tolist():
            self.ancestors[w] |= earlier
        for w in _members(earlier).tolist():
            self.descendants[w] |= later
        self.required.append((u, v))
        self._network = None
        return True

    def least(self, inside: int, outside: int, *, limit: int | None = None) -> tuple[int, int]:
        """The least live bytes over the downsets that hold all of `inside` and nothing of `outside` (sets as bits), and where.

        Where there is no such downset the bytes are more than those of all buffers together. Where they are more than `limit`,
        some number is returned that is.
        """
        if inside & outside:
            return self.graph.base + self._infinite, 0
        if self._network is None:
            self._network = self._make_network()
        most = self._infinite - 1 if limit is None else min(limit - self.graph.base, self._infinite - 1)
        live, free = self._network.min_cut(inside, outside, most)
        return self.graph.base + live, free | inside

    def _own(self, v: int) -> int:
        """Bytes that only v itself needs."""
        return self.graph.new[v] + self.graph.workspace[v]

    def _make_network(self) -> FlowNetwork:
        required = [(v + 2, u + 2, self._infinite) for u, v in self.required]
        arcs = np.concatenate([self._arcs, _columns(required)], axis=1)
        return FlowNetwork(2 + self.graph.num_operators + len(self.graph.sizes), self.graph.num_operators, arcs)

    def _make_arcs(self) -> np.ndarray:
        """Arcs of the whole graph, int64 [3, A]: node 0 is the source, 1 the sink, 2.. the operators, then the buffers."""
        graph, arcs = self.graph, []
        for v, before in enumerate(graph.preds):
            arcs.extend((v + 2, u + 2, self._infinite) for u in before)
        first_buffer = 2 + graph.num_operators
        for buffer, (size, producer, users) in enumerate(zip(graph.sizes, graph.producers, graph.accesses)):
            tail = producer + 2 if producer >= 0 else _SOURCE
            ends = [_SINK] if graph.lasting[buffer] else [v + 2 for v in users if v != producer]
            if len(ends) == 1:
                arcs.append((tail, ends[0], size))
            elif ends:
                arcs.append((tail, first_buffer + buffer, size))
                arcs.extend((first_buffer + buffer, end, self._infinite) for end in ends)
        return _columns(arcs)


def _columns(arcs: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(arcs, dtype=np.int64).reshape(-1, 3).T


def _closure(neighbours: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """For each operator all that can be reached, itself excluded, as the bits of an integer; `order` has neighbours first."""
    reached = [0] * len(neighbours)
    for v in order:
        bits = 0
        for u in neighbours[v]:
            bits |= reached[u] | 1 << u
        reached[v] = bits
    return reached


def _members(bits: int) -> np.ndarray:
    """The positions of the bits that are set, ascending."""
    data = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakBound:
    """No order of the graph has a lower peak."""

    value: int
    operator: int | None  # whose cut proves it; None: what lives at the start or at the end
    complete: bool  # no other operator's cut can raise it


def peak_bound(model: CutModel, ceilings: Sequence[int], keep_going: Callable[[], bool]) -> PeakBound:
    """The largest minimum cut over all operators.

    Args:
        model: the cuts of the graph.
        ceilings: for each operator the least memory with which any known order runs it: its cut is no larger, so operators
            whose ceiling is below the bound so far are left out.
        keep_going: asked before every cut; False ends the search with the bound so far.
    """
    graph = model.graph
    at_end = graph.base + sum(size for size, lasting in zip(graph.sizes, graph.lasting) if lasting)
    value, operator = max(graph.start_bytes(), at_end), None
    for v in sorted(range(graph.num_operators), key=lambda v: -ceilings[v]):
        if ceilings[v] <= value:
            break
        if not keep_going():
            return PeakBound(value=value, operator=operator, complete=False)
        cut = model.cut(v).value
        if cut > value:
            value, operator = cut, v
    return PeakBound(value=value, operator=operator, complete=True)
