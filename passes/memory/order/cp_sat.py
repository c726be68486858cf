"""Orders decided by OR-Tools' CP-SAT: what runs before each of the few operators that are too high, as one integer program.

A program over the places of all operators does not close beyond some dozens of them. But in a good order few operators are above
the target, and all that matters for operator h is the downset S_h that has run before it. So, for a set H of operators:

- x[h, v] in {0, 1}: v is in S_h. Fixed where v leads to h or h to v; x[h, u] >= x[h, v] for every u that must run before v.
- The downsets form a chain: for h, k in H either h is in S_k or k in S_h, and where h is in S_k, S_h is part of S_k (`_chain`).
- live[h], the bytes of all buffers that are born in S_h and not dead: a buffer is dead only if all that touch it are in S_h
  (`_add_memory`). Minimise the largest live[h] + new(h) + workspace(h), down to the target and no further.

With H = all operators that is the order problem itself. Here H begins as the operators that the known order runs above the target. The
downsets cut the graph into parts, each is ordered alone (`guided`), and what is too high then joins H, until nothing is or the program
says that the target cannot be reached. The program begins from the known order, from which CP-SAT's neighbourhood searches improve.
"""

import itertools
from collections.abc import Callable
from typing import Any

from graphacc.passes.memory.bounds import CutModel
from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.order.guided import cut_into_order
from graphacc.passes.memory.order.heuristics import Order

SIZES = (1200, 300, 5000)
"""Operators of a window: with fewer there is too little choice, with more the programs take long."""
PLACES = (0.5, 0.2, 0.8)
"""Which part of the window lies before the first operator that is too high."""
MAX_SECONDS = 4.0
"""For one program."""
MAX_ROUNDS = 8
MAX_JOINING = 12
"""Operators that join H in one round."""
MAX_CELLS = 60_000
"""Operators times H of a program: larger ones find nothing in their time."""


def lower_window(graph: OrderGraph, order: Order, target: int, keep_going: Callable[[], bool]) -> Order | None:
    """`order` with a window around its first operator above `target` ordered anew, within `target`; None where that is not found.

    Args:
        graph: its operators.
        order: a valid order of it whose peak is above the target.
        target: bytes.
        keep_going: asked before every program.
    """
    first = next(i for i, memory in enumerate(graph.profile(order)) if memory > target)
    tried = set()
    for size, place in itertools.product(SIZES, PLACES):
        low = max(0, int(first - size * place))
        inside = order[low : low + size]
        if (low, len(inside)) in tried:
            continue
        tried.add((low, len(inside)))
        found = order_below(graph.restrict(inside, set(order[:low])), target, keep_going)
        if found is not None:
            return order[:low] + tuple(inside[v] for v in found) + order[low + size :]
    return None


def order_below(graph: OrderGraph, target: int, keep_going: Callable[[], bool]) -> Order | None:
    """An order of `graph` whose peak is at most `target`; None where none is found. Its operators must be numbered in a valid order."""
    guide = tuple(range(graph.num_operators))
    profile, cuts = graph.profile(guide), CutModel(graph)
    decided = [v for v in guide if profile[v] > target]
    for _ in range(MAX_ROUNDS):
        if not decided:
            return guide
        if len(decided) * graph.num_operators > MAX_CELLS or not keep_going():
            return None
        downsets = find_downsets(graph, cuts, decided, target, max(profile[v] for v in decided))
        if downsets is None:
            return None
        order = _order_through(graph, downsets, target, keep_going)
        memory = dict(zip(order, graph.profile(order)))
        if max(memory.values()) <= target:
            return order
        joining = {v for v in order if memory[v] > target} - set(decided)
        if not joining:
            return None
        decided += sorted(joining, key=lambda v: -memory[v])[:MAX_JOINING]
    return None


def find_downsets(graph: OrderGraph, cuts: CutModel, decided: list[int], target: int, peak: int) -> dict[int, set[int]] | None:
    """For each operator of `decided` what runs before it, so that it needs at most `target` bytes; None where that is not found.

    Args:
        graph: its operators must be numbered in a valid order.
        cuts: of the graph, for its ancestors and descendants.
        decided: H.
        target: bytes.
        peak: the most bytes that one of `decided` needs in the order of the numbers.
    """
    from ortools.sat.python import cp_model  # it takes a second, and most problems need no integer program

    model = cp_model.CpModel()
    before = _Before(model, graph, cuts, decided)
    highest = model.new_int_var(min(target, peak), peak, "")
    for h in decided:
        before.add_precedences(h)
        _add_memory(model, graph, before, h, highest)
    for h, k in itertools.permutations(decided, 2):
        _chain(model, graph, before, h, k)
    model.minimize(highest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.max_time_in_seconds = MAX_SECONDS
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.max_presolve_iterations = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or solver.objective_value > target:
        return None
    return {h: {v for v in range(graph.num_operators) if solver.value(before[h, v])} for h in decided}


class _Before:
    """x[h, v] as literals; `zero` and `one` where they are known."""

    def __init__(self, model: Any, graph: OrderGraph, cuts: CutModel, decided: list[int]):
        self.zero, self.one = model.new_constant(0), model.new_constant(1)
        self._model, self._graph = model, graph
        self._literals: dict[tuple[int, int], Any] = {}
        for h, v in itertools.product(decided, range(graph.num_operators)):
            if v == h or cuts.descendants[h] >> v & 1:
                self._literals[h, v] = self.zero
            elif cuts.ancestors[h] >> v & 1:
                self._literals[h, v] = self.one
            elif (v, h) in self._literals:
                self._literals[h, v] = self._literals[v, h].negated()
            else:
                self._literals[h, v] = self.new_literal(v < h)

    def __getitem__(self, pair: tuple[int, int]) -> Any:
        return self._literals[pair]

    def new_literal(self, hint: bool) -> Any:
        """A literal of the model that is `hint` in the known order."""
        literal = self._model.new_bool_var("")
        self._model.add_hint(literal, hint)
        return literal

    def is_known(self, literal: Any) -> bool:
        return literal is self.zero or literal is self.one

    def add_precedences(self, h: int) -> None:
        """S_h is a downset."""
        for v, preds in enumerate(self._graph.preds):
            for u in () if self.is_known(self[h, v]) else preds:
                if not self.is_known(self[h, u]):
                    self._model.add_implication(self[h, v], self[h, u])


def _add_memory(model: Any, graph: OrderGraph, before: _Before, h: int, highest: Any) -> None:
    """What lives when h runs is at most `highest`."""
    constant, literals, weights = graph.base + graph.new[h] + graph.workspace[h], [], []
    for size, producer, lasting, users in zip(graph.sizes, graph.producers, graph.lasting, graph.accesses):
        born = before.one if producer < 0 else before[h, producer]
        others = [before[h, v] for v in users if v != producer]
        if born is before.zero or not (lasting or others):
            continue  # not born, or dead as soon as its producer has run
        literals.append(born)
        weights.append(size)
        others = [user for user in others if user is not before.one]
        if lasting or any(user is before.zero for user in others):
            continue
        dead = others[0] if len(others) == 1 else before.one
        if len(others) > 1:
            dead = before.new_literal(max(users) < h)
            for user in others:
                model.add_implication(dead, user)
        literals.append(dead)
        weights.append(-size)
    model.add(type(highest).weighted_sum(literals, weights) + constant <= highest)


def _chain(model: Any, graph: OrderGraph, before: _Before, h: int, k: int) -> None:
    """If h runs before k, then so does all that runs before h."""
    first = before[k, h]
    if first is before.zero:
        return
    for v in range(graph.num_operators):
        inner, outer = before[h, v], before[k, v]
        if v not in (h, k) and inner is not before.zero and outer is not before.one:
            model.add_bool_or(first.negated(), inner.negated(), outer)


def _order_through(graph: OrderGraph, downsets: dict[int, set[int]], target: int, keep_going: Callable[[], bool]) -> Order:
    """An order in which exactly `downsets[h]` runs before h, for each of them: what lies between two of them is ordered alone."""
    order: list[int] = []
    done: set[int] = set()
    chain = sorted(downsets, key=lambda h: len(downsets[h]))
    for h, downset in [*((h, downsets[h]) for h in chain), (None, set(range(graph.num_operators)))]:
        part = sorted(downset - done)
        if part:
            local = graph.restrict(part, done)
            difficulty = [new + workspace for new, workspace in zip(local.new, local.workspace)]
            order += [part[v] for v in cut_into_order(local, [tuple(range(len(part)))], target, difficulty.__getitem__, keep_going)]
            done |= downset
        if h is not None:
            order.append(h)
            done.add(h)
    return tuple(order)
