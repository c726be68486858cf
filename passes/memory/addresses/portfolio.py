"""Decides whether items fit a capacity, by searches and beams under many tie orders, on several threads.

No tie order is good for all problems, and how long a search takes with one is heavy-tailed. So many short attempts are
made: depth-first searches under perturbed orders by the rules in turn, their node limits by Luby's sequence ("Optimal speedup of Las Vegas
algorithms", 1993), and beams that grow wider. Each kind finds what the others do not; the searches that decide first where few items fit
find the most, and get most of the time. Half of them aim below the capacity, at the bound: the less room is left, the sooner a mistake shows.
What they have not decided after a moment goes to CP-SAT as well (`cp_sat`).
"""

import concurrent.futures
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from graphacc.passes.memory.addresses import cp_sat, native
from graphacc.passes.memory.addresses.native import Outcome, Rule, StopFlag
from graphacc.passes.memory.addresses.orders import perturbed, static_orders
from graphacc.passes.memory.addresses.packing import Packing
from graphacc.passes.memory.addresses.windows import Windows, windows_of

LUBY_NODES = {Rule.LOWEST: 5_000, Rule.RENEWED: 5_000, Rule.FEWEST: 1_000, Rule.FAILING: 1_000}
FEWEST_SHARE = 8  # of the time, against 1 for the other searches, 1 for beams and 2 for CP-SAT; half of it for the bound where that is below the capacity
SPREADS = (0.02, 0.05, 0.1, 0.2, 0.4)
BEAM_WIDTH, BEAM_GROWTH = 30, 3
MAX_BEAM_CELLS = 2_000_000  # width * items; a cell costs about 70 bytes
BIASES = (0.01, 1.0)
LUBY_CONFLICTS = 60
CP_SAT_ORDERS = (4, 0, 5, 3)  # of `static_orders`, one of each kind first
CP_SAT_AFTER = 0.3  # seconds of searches and beams before CP-SAT begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether items fit."""

    outcome: Outcome
    offsets: np.ndarray | None = None  # units


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Aim:
    """A height to be reached."""

    limits: tuple[np.ndarray, np.ndarray]
    windows: Windows

    @classmethod
    def of(cls, packing: Packing, capacity: int) -> "_Aim":
        limits = packing.limits(capacity)
        return cls(limits=limits, windows=windows_of(packing, limits[1]))


class _Race:
    """What the threads of one decision share."""

    def __init__(self, packing: Packing, capacity: int, seed: int, deadline: float, stop: StopFlag):
        self.packing, self.aim, self.deadline, self.stop = packing, _Aim.of(packing, capacity), deadline, stop
        self.tight_aim = _Aim.of(packing, packing.bound) if packing.bound < capacity else None  # None, too, once nothing fits it
        self.lock = threading.Lock()
        orders = static_orders(packing)
        aims = (False,) if self.tight_aim is None else (False, True)
        self.kinds = [
            *(_Kind(self._searches((Rule.FEWEST, Rule.FAILING), orders, random.Random(seed + tight), tight), share=FEWEST_SHARE // len(aims)) for tight in aims),
            _Kind(self._searches((Rule.RENEWED, Rule.LOWEST), orders, random.Random(seed))),
            _Kind(self._beams(orders, random.Random(seed))),
        ]
        self.program = cp_sat.Attempts(packing, self.aim.limits[0], self.aim.windows)
        if cp_sat.num_cells(packing) <= cp_sat.MAX_CELLS:
            self.kinds.append(_Kind(self._programs(orders, random.Random(seed)), share=2, after=CP_SAT_AFTER))
        self.decision = Decision(outcome=Outcome.STOPPED)

    def work(self) -> None:
        """Make attempts until one decides, or until the flag is set."""
        while not self.stop.is_set():
            with self.lock:
                kind = min(self.kinds, key=lambda k: k.seconds / k.share)
                attempt = next(kind.attempts)
                kind.seconds += kind.expected
            start = time.perf_counter()
            outcome, offsets = attempt()
            seconds = time.perf_counter() - start
            with self.lock:
                kind.seconds += seconds - kind.expected
                kind.expected = seconds
                if outcome is not Outcome.STOPPED and self.decision.outcome is Outcome.STOPPED:
                    self.decision = Decision(outcome=outcome, offsets=offsets)
                    self.stop.set()
            if self.stop.is_set():
                self.end()

    def end(self) -> None:
        """Stop the attempts that are running."""
        self.stop.set()
        self.program.stop()

    def _searches(self, rules: Sequence[Rule], orders: list[np.ndarray], rng: random.Random, is_tight: bool = False) -> Iterator[Callable]:
        """`is_tight`: for the bound, as long as something may fit it."""
        for order, rule in itertools.product(orders, rules):
            yield self._search(order, LUBY_NODES[rule], rule, is_tight)
        for i in itertools.count():
            rule = rules[i // len(orders) % len(rules)]
            yield self._search(perturbed(orders[i % len(orders)], rng.choice(SPREADS), rng), LUBY_NODES[rule] * luby(i + 1), rule, is_tight)

    def _beams(self, orders: list[np.ndarray], rng: random.Random) -> Iterator[Callable]:
        width = BEAM_WIDTH
        for round_ in itertools.count():
            for order, bias in itertools.product(orders, BIASES):
                yield self._beam(perturbed(order, SPREADS[0] if round_ else 0.0, rng), width, bias)
            width = min(width * BEAM_GROWTH, max(BEAM_WIDTH, MAX_BEAM_CELLS // len(self.packing)))

    def _programs(self, orders: list[np.ndarray], rng: random.Random) -> Iterator[Callable]:
        for i in itertools.count():
            first_round = i < len(CP_SAT_ORDERS)
            order = orders[CP_SAT_ORDERS[i % len(CP_SAT_ORDERS)]]
            order = perturbed(order, 0.0 if first_round else rng.choice(SPREADS), rng)
            yield self._program(order, LUBY_CONFLICTS * (1 if first_round else luby(i - len(CP_SAT_ORDERS) + 1)))

    def _program(self, order: np.ndarray, max_conflicts: int) -> Callable:
        return lambda: self.program.run(order, max_conflicts, self.deadline)

    def _search(self, order: np.ndarray, max_nodes: int, rule: Rule, is_tight: bool) -> Callable:
        def attempt():
            tight = self.tight_aim if is_tight else None
            aim = tight or self.aim
            outcome, offsets, _ = native.search(self.packing, order, aim.limits, max_nodes, self.stop, rule=rule, windows=aim.windows)
            if tight is not None and outcome is Outcome.IMPOSSIBLE:
                self.tight_aim = None
                return Outcome.STOPPED, None
            return outcome, offsets

        return attempt

    def _beam(self, order: np.ndarray, width: int, bias: float) -> Callable:
        def attempt():
            outcome, offsets, _ = native.beam(self.packing, order, self.aim.limits, width, bias, self.stop, windows=self.aim.windows)
            return (outcome, offsets) if outcome is Outcome.FOUND else (Outcome.STOPPED, None)

        return attempt


class _Kind:
    """One kind of attempt, and the time that it has had: of all time its share, once the others have had `after` seconds each."""

    def __init__(self, attempts: Iterator[Callable], *, share: int = 1, after: float = 0.0):
        self.attempts = attempts
        self.share = share
        self.seconds = after * share
        self.expected = 0.0


def decide(packing: Packing, capacity: int, *, deadline: float, threads: int, seed: int = 0) -> Decision:
    """Find offsets with which the arena has at most `capacity` bytes, or prove that there are none.

    Args:
        packing: connected in time; see `Packing.parts`.
        capacity: bytes.
        deadline: of time.monotonic(); STOPPED after it.
        threads: how many attempts run at the same time.
        seed: of the perturbations.
    """
    with native.stop_at(deadline) as stop, concurrent.futures.ThreadPoolExecutor(threads) as pool:
        race = _Race(packing, capacity, seed, deadline, stop)
        workers = [pool.submit(race.work) for _ in range(threads)]
        try:
            for worker in workers:
                worker.result()
        finally:
            race.end()
    return race.decision


def luby(i: int) -> int:
    """The i-th term, from 1, of Luby's sequence 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ..."""
    while True:
        bits = i.bit_length()
        if i == (1 << bits) - 1:
            return 1 << (bits - 1)
        i -= (1 << (bits - 1)) - 1
