"""Solves an address problem: decides it where it has a capacity, minimises the height where it has none."""

import time

import numpy as np

from graphacc.passes.memory.addresses import native, portfolio
from graphacc.passes.memory.addresses.native import Outcome
from graphacc.passes.memory.addresses.orders import static_orders
from graphacc.passes.memory.addresses.packing import Packing, pack
from graphacc.passes.memory.addresses.repair import reorder, repair
from graphacc.passes.memory.problem import AddressPlan, AddressProblem, Status
from graphacc.passes.memory.validate import check_address_plan, check_problem

MAX_SEARCHED = 2_000  # items of a part that is searched as a whole; larger ones are repaired
SLICE = 0.25  # of the remaining time, for one target height
MIN_SLICE_SECONDS = 0.1
SMALL_SHARES = (0.001, 0.004, 0.016)  # of the bound: small items that live together have at most so much


def solve_addresses(problem: AddressProblem, *, seconds: float, threads: int = 2) -> AddressPlan:
    """Choose the offsets of an address problem.

    With a capacity the answer is OPTIMAL or FEASIBLE (it fits), INFEASIBLE (proved) or OUT_OF_TIME. Without one the height
    is minimised, and the answer is OPTIMAL or FEASIBLE. Returns before the time is up where nothing is left to gain.
    Every plan has passed the validator.

    Args:
        problem: buffers, alignment and capacity.
        seconds: budget of wall-clock time. One pass of the heuristics is always made.
        threads: number of searches at the same time.

    Raises:
        PlanError: the problem is malformed.
    """
    start = time.monotonic()
    check_problem(problem)
    if not problem.buffers:
        empty = {"offsets": (), "height": 0, "lower_bound": 0, "bound_source": "no buffers"}
        return AddressPlan(status=Status.OPTIMAL, seconds=time.monotonic() - start, **empty)
    solver = _Solver(pack(problem), deadline=start + seconds, threads=threads)
    if problem.capacity is None:
        solver.minimise()
        solved, missed = True, Status.OUT_OF_TIME
    else:
        outcome = solver.decide(problem.capacity)
        solved = outcome is Outcome.FOUND
        missed = Status.INFEASIBLE if outcome is Outcome.IMPOSSIBLE else Status.OUT_OF_TIME
    return _plan(problem, solver, solved, missed, start)


class _Solver:
    """The best offsets so far of each part, and the bound."""

    def __init__(self, packing: Packing, *, deadline: float, threads: int):
        self.packing, self.deadline, self.threads = packing, deadline, threads
        self.bound, self.bound_source = packing.bound, "max live"
        self.items = packing.parts()
        self.parts = [packing.select(items) for items in self.items]
        skylines = [self._skyline(part) for part in self.parts]
        self.orders, self.offsets = [order for order, _ in skylines], [offsets for _, offsets in skylines]
        self.num_attempts = 0

    @property
    def height(self) -> int:
        """Bytes of the arena with the best offsets so far."""
        return max(part.height(offsets) for part, offsets in zip(self.parts, self.offsets, strict=True))

    def solution(self) -> tuple[int, ...]:
        """The best offsets so far, in bytes, in the problem's order."""
        offsets = np.empty(len(self.packing), np.int64)
        for items, part in zip(self.items, self.offsets, strict=True):
            offsets[items] = part
        return tuple((offsets * self.packing.unit).tolist())

    def decide(self, capacity: int) -> Outcome:
        """Find offsets for the capacity in the time that is left."""
        if self.bound > capacity:
            return Outcome.IMPOSSIBLE
        return self._reach(capacity, self.deadline)

    def minimise(self) -> None:
        """Decide targets between the bound and the height: the bound first, then by halving what is undecided.

        Between the two the large items are packed without the small ones: these are many where little is to be gained, and a
        search that has gone wrong with the large ones tries all their places before it comes back.
        """
        if self.height > self.bound:
            self._reach(self.bound, self._slice_end(self.bound))
        for share in SMALL_SHARES:
            self._lower_by_large(share)
        undecided_above = self.bound
        target = (self.bound + self.height) // 2
        while self.height > self.bound and time.monotonic() < self.deadline:
            outcome = self._reach(target, self._slice_end(target))
            if outcome is Outcome.STOPPED:
                undecided_above = target
            undecided_above = max(undecided_above, self.bound)
            middle = (undecided_above + self.height) // 2
            target = middle if self.height - undecided_above > self.packing.unit else self.bound
            if target == self.bound:
                undecided_above = self.bound

    def _lower_by_large(self, share: float) -> None:
        """Bring the large items of every part that is too high down to the bound alone, and lay the small ones on top."""
        small_load = int(share * self.bound) // self.packing.unit
        for i, part in enumerate(self.parts):
            if part.height(self.offsets[i]) <= self.bound:
                continue
            is_small = part.smallest(small_load)
            large, small = np.flatnonzero(~is_small), np.flatnonzero(is_small)
            if not 0 < len(small) < len(part) or len(large) > MAX_SEARCHED:
                continue
            packing = part.select(large)
            self.num_attempts += 1
            deadline = self._slice_end(self.bound)
            found = portfolio.decide(packing, packing.bound, deadline=deadline, threads=self.threads, seed=self.num_attempts)
            if found.outcome is Outcome.FOUND:
                small = small[np.argsort(-part.size[small], kind="stable")]
                order = np.concatenate([large[np.argsort(found.offsets, kind="stable")], small])
                self.offsets[i] = min(self.offsets[i], native.settle(part, order), key=part.height)

    def _slice_end(self, target: int) -> float:
        """Until when to try a target. Repair keeps what it gains on the way, so it gets all the time."""
        above = [part for part, offsets in zip(self.parts, self.offsets, strict=True) if part.height(offsets) > target]
        if any(len(part) > MAX_SEARCHED for part in above):
            return self.deadline
        now = time.monotonic()
        return min(self.deadline, now + max(SLICE * (self.deadline - now), MIN_SLICE_SECONDS))

    def _reach(self, target: int, deadline: float) -> Outcome:
        """Bring every part to the target height, smallest first."""
        for i in sorted(range(len(self.parts)), key=lambda i: len(self.parts[i])):
            if self.parts[i].height(self.offsets[i]) <= target:
                continue
            outcome = self._reach_part(i, target, deadline)
            if outcome is Outcome.IMPOSSIBLE:
                self.bound = max(self.bound, self._next_height(target))
                self.bound_source = "exhaustive search"
            if outcome is not Outcome.FOUND:
                return outcome
        return Outcome.FOUND

    def _reach_part(self, i: int, target: int, deadline: float) -> Outcome:
        part = self.parts[i]
        self.num_attempts += 1
        if len(part) > MAX_SEARCHED:
            self._lower_large(i, target, deadline)
            return Outcome.FOUND if part.height(self.offsets[i]) <= target else Outcome.STOPPED
        decision = portfolio.decide(part, target, deadline=deadline, threads=self.threads, seed=self.num_attempts)
        if decision.outcome is Outcome.FOUND:
            self.offsets[i] = decision.offsets
        return decision.outcome

    def _next_height(self, height: int) -> int:
        """The smallest height above this one that some arena can have."""
        unit = self.packing.unit
        return height + 1 if self.packing.padding.any() else (height // unit + 1) * unit

    def _lower_large(self, i: int, target: int, deadline: float) -> None:
        """Half of the time for other tie orders, the other half for repair of what they leave."""
        part, now, seed = self.parts[i], time.monotonic(), self.num_attempts
        half = (now + deadline) / 2
        offsets = reorder(
            part, self.orders[i], self.offsets[i], target=target, deadline=half, threads=self.threads, seed=seed
        )
        self.offsets[i] = repair(part, offsets, target=target, deadline=deadline, seed=seed)

    def _skyline(self, part: Packing) -> tuple[np.ndarray, np.ndarray]:
        """The best tie order, and its offsets."""
        found = None
        for order in static_orders(part):
            offsets = native.skyline(part, order)
            if found is None or part.height(offsets) < part.height(found[1]):
                found = (order, offsets)
            if part.height(found[1]) <= self.bound:
                break
        return found


def _plan(problem: AddressProblem, solver: _Solver, solved: bool, missed: Status, start: float) -> AddressPlan:
    height = solver.height if solved else 0
    plan = AddressPlan(
        status=(Status.OPTIMAL if height <= solver.bound else Status.FEASIBLE) if solved else missed,
        offsets=solver.solution() if solved else (),
        height=height,
        lower_bound=solver.bound,
        bound_source=solver.bound_source,
        seconds=time.monotonic() - start,
    )
    check_address_plan(problem, plan)
    return plan
