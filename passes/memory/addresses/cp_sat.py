"""Decides whether items fit a capacity with OR-Tools' CP-SAT: a clause-learning search, for what the searches in C++ leave open.

Variables are the offsets x_i in 0..top_i (fixed items: one value). Constraint, for every section: the intervals [x_i, x_i + s_i) of its
items do not overlap (`add_no_overlap`, which reasons over the whole set: edge finding, not-first). Two items that live together
share a section, so nothing else is needed. The search places the item that can lie lowest next, ties by a static order, and learns
from every failure; it has no restarts of its own, so `portfolio` makes short attempts with many orders.

One constraint for each section with this search finds in a second or less what `add_no_overlap_2d` takes several for.
"""

import time
from typing import Any

import numpy as np

from graphacc.passes.memory.addresses.native import Outcome
from graphacc.passes.memory.addresses.packing import Packing
from graphacc.passes.memory.addresses.windows import Windows

MAX_CELLS = 60_000
"""Items times sections of a problem that is given to CP-SAT; a larger one is not propagated through once in a second."""


def num_cells(packing: Packing) -> int:
    """Items of all sections together."""
    return int((packing.last - packing.first).sum())


class Attempts:
    """Attempts to decide one capacity, one after the other; `stop` ends them, from another thread."""

    def __init__(self, packing: Packing, top: np.ndarray, windows: Windows):
        """`top`: the largest offset of each item, in units."""
        self._packing, self._top, self._windows = packing, top, windows
        self._solver: Any = None  # that is running
        self._stopped = False

    def stop(self) -> None:
        """End the attempt that is running, and those that would follow."""
        self._stopped = True
        while (solver := self._solver) is not None:
            solver.stop_search()  # without effect until the solver has begun: so it is asked again
            time.sleep(0.002)

    def run(self, order: np.ndarray, max_conflicts: int, deadline: float) -> tuple[Outcome, np.ndarray | None]:
        """One search.

        Args:
            order: items, the first to be placed first where several can lie equally low.
            max_conflicts: after so many failures it gives up.
            deadline: of time.monotonic().
        """
        from ortools.sat.python import cp_model  # it takes a second, and most problems need no integer program

        packing, model = self._packing, cp_model.CpModel()
        fixed, size = packing.fixed.tolist(), packing.size.tolist()
        free = np.maximum(self._top, -1).tolist()
        if any(at < 0 and top < 0 for at, top in zip(fixed, free, strict=True)):
            return Outcome.IMPOSSIBLE, None
        offsets = [model.new_int_var(0, top, "") if at < 0 else model.new_constant(at) for at, top in zip(fixed, free, strict=True)]
        intervals = [model.new_fixed_size_interval_var(offset, length, "") for offset, length in zip(offsets, size, strict=True)]
        for section in range(packing.num_sections):
            inside = np.flatnonzero((packing.first <= section) & (packing.last > section))
            model.add_no_overlap([intervals[i] for i in inside])
        for i, j, height in zip(self._windows.first.tolist(), self._windows.second.tolist(), self._windows.height.tolist(), strict=True):
            model.add_linear_constraint(offsets[j] - offsets[i], size[i] - height, height - size[j])
        chosen = [offsets[i] for i in order if fixed[i] < 0]
        model.add_decision_strategy(chosen, cp_model.CHOOSE_LOWEST_MIN, cp_model.SELECT_MIN_VALUE)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.search_branching = cp_model.FIXED_SEARCH
        solver.parameters.linearization_level = 0
        solver.parameters.max_number_of_conflicts = max_conflicts
        solver.parameters.max_time_in_seconds = max(deadline - time.monotonic(), 0.0)
        self._solver = solver
        status = cp_model.UNKNOWN if self._stopped else solver.solve(model)
        self._solver = None
        if status == cp_model.INFEASIBLE:
            return Outcome.IMPOSSIBLE, None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Outcome.STOPPED, None
        return Outcome.FOUND, np.array([solver.value(offset) for offset in offsets], np.int64)
