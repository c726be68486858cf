"""An order for every sequence of an executable: one `Problem` of the planner core per sequence, inner sequences first.

The buffers of a sequence's problem are the *stretches* of its values: the maximal runs of places over which a value holds bytes.
A loop-carried value gives two of them to the loop's body, one that comes in and one that goes out. A thunk with nested sequences
is one operator, whose workspace is what its nested sequences need beyond the buffers that it touches itself.
"""

import bisect
import dataclasses
import math
import operator
import time
from collections.abc import Callable

from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.problem import Buffer, Operator, Problem
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.liveness import Liveness, Orders
from graphacc.runtime.replan.model import Control, Executable, Sequence, Thunk
from graphacc.runtime.replan.nearest import nearest_order
from graphacc.runtime.replan.precedence import Predecessors, find_predecessors, is_legal
from graphacc.runtime.replan.values import Value, Values

BOUND_SHARE = 0.2  # of a sequence's time, for the bound of its relaxed problem where that is another one
MIN_THUNKS = 3  # a shorter sequence has nothing to reorder


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """What a solver found for one sequence's problem."""

    order: tuple[int, ...]
    peak: int
    lower_bound: int


OrderSolver = Callable[[Problem, float, float], SequenceOrder]
"""(problem, seconds, a bound that ends the search) -> the best order found, its peak, and a bound for all orders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """One run of places of a sequence over which a value holds bytes."""

    value: Value
    places: tuple[int, ...]  # places (in Sequence.thunks) that touch it, in their current order
    comes_in: bool  # it holds bytes before the sequence
    goes_out: bool  # it holds bytes behind it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
    """Orders for all sequences, and the bound that comes with them."""

    orders: Orders
    lower_bound: int  # bytes; no order of the thunks needs less


def aligned(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def find_orders(values: Values, solve: OrderSolver, seconds: float, bound_wanted: float = math.inf) -> Ordering:
    """Plan the order of every sequence.

    Args:
        values: of the executable.
        solve: the planner core.
        seconds: for all sequences together: each gets its share, by length, of what is left.
        bound_wanted: bytes; a lower bound as high as this says that no order is worth searching for.
    """
    executable = values.executable
    deadline = time.monotonic() + seconds
    planned = [s for s in reversed(executable.sequences) if len(s.thunks) >= MIN_THUNKS]
    num_left = sum(len(s.thunks) for s in planned)
    orders: Orders = {}
    bounds: dict[int, int] = {}
    for sequence in planned:
        share = max(0.0, deadline - time.monotonic()) * len(sequence.thunks) / num_left
        num_left -= len(sequence.thunks)
        found = _solve_sequence(sequence, values, orders, bounds, solve, share, bound_wanted if sequence is executable.root else math.inf)
        bounds[sequence.index] = found.lower_bound
        if found.order != tuple(range(len(sequence.thunks))):
            orders[sequence.index] = found.order
    return Ordering(orders=orders, lower_bound=bounds.get(executable.root.index, 0))


def _solve_sequence(
    sequence: Sequence, values: Values, orders: Orders, bounds: dict[int, int], solve: OrderSolver, seconds: float, bound_wanted: float
) -> SequenceOrder:
    model = SequenceModel(sequence, values, orders, bounds)
    found = solve(model.problem, seconds, bound_wanted + model.slack)
    if not is_legal(found.order, model.predecessors):
        raise NotUnderstood(f"the planner gave an illegal order for sequence {sequence.index}: it breaks a dependency")
    found = dataclasses.replace(found, order=nearest_order(compile_problem(model.problem), found.order))
    if model.relaxed == model.problem:
        return found
    bound = max(found.lower_bound - model.slack, solve(model.relaxed, BOUND_SHARE * seconds, bound_wanted).lower_bound)
    return dataclasses.replace(found, lower_bound=bound)


class SequenceModel:
    """One sequence as a problem of the planner core.

    In `problem`, nested sequences need what they need in their planned orders; in `relaxed`, what they need in any order, so that
    its bound holds for all orders of everything.
    """

    def __init__(self, sequence: Sequence, values: Values, orders: Orders, bounds: dict[int, int]):
        self.sequence = sequence
        self.predecessors: Predecessors = find_predecessors(sequence, values)
        self._values = values
        self._executable: Executable = values.executable
        self._liveness = Liveness(values, orders)
        self._between = self._liveness.between(sequence).intervals(len(values.all))  # [V] intervals of places
        self._place_of = _places(sequence)
        self.stretches = [s for value in values.all for s in self._stretches(value)]
        workspaces = [self._workspace(place, thunk, bounds) for place, thunk in enumerate(sequence.thunks)]
        self.slack = max((planned - least for planned, least in workspaces), default=0)  # the two bounds differ by this at most
        self.problem = self._problem([planned for planned, _ in workspaces])
        self.relaxed = self._problem([least for _, least in workspaces])

    def size(self, value: Value) -> int:
        """Bytes of a value in the arena."""
        return aligned(value.size, self._executable.alignment)

    # --- stretches ---

    def _stretches(self, value: Value) -> list[Stretch]:
        places = list(dict.fromkeys(self._place_of[t] for t in value.thunks if t in self._place_of))
        if not places:
            return []
        between = self._between[value.index]
        runs: list[list[int]] = [[]]
        for place in sorted(places):
            if runs[-1] and not _holds(between, place):
                runs.append([])
            runs[-1].append(place)
        first, last = runs[0][0], runs[-1][-1]
        found = [
            Stretch(
                value=value,
                places=tuple(run),
                comes_in=run[0] == first and _holds(between, first),
                goes_out=run[-1] == last and _holds(between, last + 1),
            )
            for run in runs
        ]
        return [s for s in found if not self._is_inside_one(s)]

    def _is_inside_one(self, stretch: Stretch) -> bool:
        """Whether it lives only within the nested sequences of one thunk: then it is part of that thunk's workspace."""
        alone = len(stretch.places) == 1 and not stretch.comes_in and not stretch.goes_out
        return alone and self.sequence.thunks[stretch.places[0]].control is not Control.LEAF

    # --- nested sequences ---

    def _workspace(self, place: int, thunk: Thunk, bounds: dict[int, int]) -> tuple[int, int]:
        """Bytes that a thunk's nested sequences need beyond its own buffers: as planned, and at least."""
        if thunk.control is Control.LEAF:
            return 0, 0
        own = sum(self.size(s.value) for s in self.stretches if place in s.places)
        planned = max(0, self._peak_inside(thunk) - own)
        least = max([0, *(bounds.get(nested.index, 0) - own for nested in thunk.nested)])
        return planned, min(planned, least)

    def _peak_inside(self, thunk: Thunk) -> int:
        """Largest sum of the values that the thunk and its nested sequences touch, over its steps."""
        touched = {a.index for t in self._executable.family(thunk) for a in t.accesses}
        inside = {self._values.of_access[a] for a in touched if a in self._values.of_access}
        timeline = self._liveness.timeline
        steps = self._liveness.occupied[timeline.begin[thunk.index] : timeline.end[thunk.index] + 1]
        return max(sum(self.size(v) for v in inside if occupied >> v.index & 1) for occupied in steps)

    # --- the problem ---

    def _problem(self, workspaces: list[int]) -> Problem:
        """All dependencies are in `after`, byte by byte; so an access that does not create its buffer is listed as a read."""
        reads: list[list[int]] = [[] for _ in self.sequence.thunks]
        writes: list[list[int]] = [[] for _ in self.sequence.thunks]
        for number, stretch in enumerate(self.stretches):
            first, *later = stretch.places
            (reads if stretch.comes_in else writes)[first].append(number)
            for place in later:
                reads[place].append(number)
        operators = tuple(
            Operator(
                name=thunk.name,
                reads=tuple(reads[place]),
                writes=tuple(writes[place]),
                after=tuple(sorted(self.predecessors[place])),
                workspace=workspaces[place],
            )
            for place, thunk in enumerate(self.sequence.thunks)
        )
        return Problem(operators=operators, buffers=tuple(self._buffer(s) for s in self.stretches))

    def _buffer(self, stretch: Stretch) -> Buffer:
        return Buffer(
            name=f"value {stretch.value.index}",
            size=self.size(stretch.value),
            is_input=stretch.comes_in,
            is_output=stretch.goes_out,
        )


def _holds(intervals: list[tuple[int, int]], place: int) -> bool:
    """Whether a place is in one of the half-open intervals, which ascend."""
    last = bisect.bisect_right(intervals, place, key=operator.itemgetter(0)) - 1
    return last >= 0 and place < intervals[last][1]


def _places(sequence: Sequence) -> dict[int, int]:
    """Thunk index, nested ones included -> place in the sequence of the thunk that it belongs to."""
    return {i: place for place, thunk in enumerate(sequence.thunks) for i in range(thunk.index, thunk.last + 1)}
