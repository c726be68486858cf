"""Slow, plain Python forms of what csrc/planner does, exhaustive search, and problems to try them on."""

import itertools
import random

import numpy as np

from graphacc.passes.memory.addresses.native import Rule
from graphacc.passes.memory.problem import AddressProblem, LiveBuffer

RULES = frozenset({"floor", "first", "support", "deadline", "parts", "failed"})
INFINITY = 1 << 62


def random_problem(rng: random.Random, *, num_buffers: int, num_fixed: int = 0, alignment: int = 1) -> AddressProblem:
    """Random live ranges; the fixed buffers are stacked from 0."""
    buffers, top = [], 0
    for i in range(num_buffers):
        lower = rng.randrange(10)
        size, offset = rng.randint(1, 9), None
        if i < num_fixed:
            offset, top = top, -(-(top + size) // alignment) * alignment + alignment * rng.randrange(2)
        buffers.append(LiveBuffer(name=str(i), lower=lower, upper=lower + rng.randint(1, 6), size=size, offset=offset))
    rng.shuffle(buffers)
    return AddressProblem(buffers=tuple(buffers), alignment=alignment)


def cut_problem(rng: random.Random, *, num_buffers: int, time: int = 2000, height: int = 1024) -> AddressProblem:
    """A rectangle of time * addresses cut into buffers without waste: it fits `height`, its largest live set."""
    pieces = [(0, time, 0, height)]
    while len(pieces) < num_buffers:
        left, right, low, high = pieces.pop(rng.randrange(len(pieces)))
        if right - left > 4 and (rng.random() < 0.5 or high - low < 4):
            cut = rng.randint(left + 1, right - 1)
            pieces += [(left, cut, low, high), (cut, right, low, high)]
        elif high - low >= 4:
            cut = rng.randint(low + 1, high - 1)
            pieces += [(left, right, low, cut), (left, right, cut, high)]
        else:
            pieces.append((left, right, low, high))
    rng.shuffle(pieces)
    return AddressProblem(
        buffers=tuple(LiveBuffer(name=str(i), lower=p[0], upper=p[1], size=p[3] - p[2]) for i, p in enumerate(pieces))
    )


def filled_problem(rng: random.Random, *, time: int = 14, height: int = 16, max_size: int = 6) -> AddressProblem:
    """Random buffers, as many as the load `height` has room for: hard to fit at their largest live set."""
    buffers, load = [], [0] * time
    for i in range(400):
        lower, size = rng.randrange(time), rng.randint(1, max_size)
        upper = min(time, lower + rng.randint(1, 6))
        if all(load[t] + size <= height for t in range(lower, upper)):
            load[lower:upper] = [load[t] + size for t in range(lower, upper)]
            buffers.append(LiveBuffer(name=str(i), lower=lower, upper=upper, size=size))
    return AddressProblem(buffers=tuple(buffers))


def pinwheel_problem(rng: random.Random, *, num_buffers: int, side: int = 64) -> AddressProblem:
    """A square cut into pinwheels of five pieces, which no straight cuts take apart, without waste: it fits `side`."""
    pieces = [(0, side, 0, side)]
    while len(pieces) < num_buffers:
        left, right, low, high = widest = max(pieces, key=lambda piece: min(piece[1] - piece[0], piece[3] - piece[2]))
        if min(right - left, high - low) < 3:
            break
        pieces.remove(widest)
        a, b = sorted(rng.sample(range(left + 1, right), 2))
        c, d = sorted(rng.sample(range(low + 1, high), 2))
        pieces += [(left, b, low, c), (b, right, low, d), (a, right, d, high), (left, a, c, high), (a, b, c, d)]
    rng.shuffle(pieces)
    return AddressProblem(buffers=tuple(LiveBuffer(name=str(i), lower=p[0], upper=p[1], size=p[3] - p[2]) for i, p in enumerate(pieces)))


def is_valid(packing, offsets, capacity) -> bool:
    """No two items of a section overlap, and all end below its capacity."""
    for section in range(packing.num_sections):
        inside = np.flatnonzero((packing.first <= section) & (packing.last > section))
        inside = inside[np.argsort(offsets[inside], kind="stable")]
        ends = offsets[inside] + packing.size[inside]
        if (ends[:-1] > offsets[inside][1:]).any() or ends[-1] > capacity[section]:
            return False
    return True


def optimal_height(problem: AddressProblem) -> int:
    """The least height, by settling the free buffers in every order."""
    free = [i for i, b in enumerate(problem.buffers) if b.offset is None]
    return min(_settled_height(problem, order) for order in itertools.permutations(free))


def _settled_height(problem: AddressProblem, order: tuple[int, ...]) -> int:
    buffers, align = problem.buffers, problem.alignment
    at = {i: b.offset for i, b in enumerate(buffers) if b.offset is not None}
    fixed = sorted(at, key=at.get)
    for i in order:
        met = [j for j in at if buffers[i].lower < buffers[j].upper and buffers[j].lower < buffers[i].upper]
        offset = max((at[j] + buffers[j].size for j in met if j not in fixed), default=0)
        offset = -(-offset // align) * align
        for j in fixed:
            if j in met and at[j] < offset + buffers[i].size and offset < at[j] + buffers[j].size:
                offset = -(-(at[j] + buffers[j].size) // align) * align
        at[i] = offset
    return max(at[i] + b.size for i, b in enumerate(buffers))


class State:
    """`AddressState` in csrc/planner, without undo and with each rule optional. Items are numbered by rank."""

    def __init__(self, packing, order, limits, rules=RULES):
        self.rules = rules
        self.first, self.last = packing.first[order].tolist(), packing.last[order].tolist()
        self.size, self.fixed = packing.size[order].tolist(), packing.fixed[order].tolist()
        self.top, self.capacity = limits[0][order].tolist(), limits[1].tolist()
        items, self.sections = range(len(order)), range(packing.num_sections)
        self.members = [[i for i in items if self.first[i] <= s < self.last[i]] for s in self.sections]
        self.met = [[j for j in items if j != i and self.first[i] < self.last[j] and self.first[j] < self.last[i]] for i in items]
        self.load = [sum(self.size[i] for i in members) for members in self.members]
        self.lowest = [max(0, offset) for offset in self.fixed]
        self.deadline, self.placed = [-1] * len(order), [False] * len(order)

    def copy(self) -> "State":
        other = object.__new__(State)
        other.__dict__ = dict(self.__dict__)
        other.lowest, other.deadline, other.placed = self.lowest[:], self.deadline[:], self.placed[:]
        return other

    def start(self) -> bool:
        for i in range(len(self.size)):
            if self.fixed[i] < 0:
                self.lowest[i] = self._above_fixed(i, 0)
        return self._infer()

    def next(self, items) -> int | None:
        """The item to be decided, None after all; ValueError where a deadline has passed."""
        unplaced = [i for i in items if not self.placed[i]]
        if not unplaced:
            return None
        best = min(unplaced, key=lambda i: self.lowest[i])
        if "deadline" in self.rules and any(0 <= self.deadline[i] <= self.lowest[best] for i in unplaced):
            raise ValueError
        return best

    def next_of_fewest(self, items) -> int | None:
        """The same: the lowest item of the section of which the fewest items can be the lowest, or what can lie below it."""
        unplaced = [i for i in items if not self.placed[i]]
        if not unplaced:
            return None
        for i in unplaced:
            if "deadline" in self.rules and self.deadline[i] >= 0 and not any(self.lowest[j] < self.deadline[i] for j in self.met[i] if not self.placed[j]):
                raise ValueError
        found = []
        for s in self.sections:
            rest = [i for i in self.rest(s) if i in items]
            latest = self.capacity[s] - sum(self.size[i] for i in rest)
            if able := [i for i in rest if self.lowest[i] <= latest]:
                lowest = min(able, key=lambda i: self.lowest[i])
                found.append((len(able), latest - self.lowest[lowest] if len(able) > 1 else 0, s, lowest))
        best = min(found)[-1]
        while below := [j for j in self.met[best] if not self.placed[j] and self.lowest[j] + self.size[j] <= self.lowest[best]]:
            best = min(below, key=lambda j: self.lowest[j])
        return best

    def place(self, item: int) -> bool:
        self.placed[item] = True
        possible = self.lowest[item] <= self.top[item] or self.fixed[item] >= 0
        for j in self.met[item]:
            if not self.placed[j]:
                self.deadline[j] = -1 if self.deadline[j] > self.lowest[item] else self.deadline[j]
                possible = self._raise(j, self.lowest[item] + self.size[item]) and possible
        return possible and self._infer()

    def skip(self, item: int) -> bool:
        if self.fixed[item] >= 0:
            return False
        end = self.lowest[item] + self.size[item]
        support = [self.lowest[j] + self.size[j] for j in self.met[item] if not self.placed[j] and self.lowest[j] < end]
        self.deadline[item] = end
        if "support" not in self.rules:
            return self._raise(item, self.lowest[item] + 1) and self._infer()
        return bool(support) and self._raise(item, min(support)) and self._infer()

    def largest_rest(self, item: int) -> int:
        return max(sum(self.size[i] for i in self.rest(s)) for s in range(self.first[item], self.last[item]))

    def rest(self, section: int) -> list[int]:
        return [i for i in self.members[section] if not self.placed[i]]

    def _above_fixed(self, item: int, offset: int) -> int:
        for j in sorted((j for j in self.met[item] if self.fixed[j] >= 0 and not self.placed[j]), key=lambda j: self.fixed[j]):
            if self.fixed[j] < offset + self.size[item] and offset < self.fixed[j] + self.size[j]:
                offset = self.fixed[j] + self.size[j]
        return offset

    def _raise(self, item: int, offset: int) -> bool:
        if offset <= self.lowest[item]:
            return True
        if self.fixed[item] >= 0:
            return False
        self.lowest[item] = self._above_fixed(item, offset)
        return self.lowest[item] <= self.top[item]

    def _infer(self) -> bool:
        before = None
        while before != self.lowest:
            before = self.lowest[:]
            if not all(self._infer_section(s) for s in self.sections):
                return False
        return True

    def _infer_section(self, section: int) -> bool:
        rest = sorted(self.rest(section), key=lambda i: self.lowest[i])
        if not rest:
            return True
        latest = self.capacity[section] - sum(self.size[i] for i in rest)
        if "floor" in self.rules and self.lowest[rest[0]] > latest:
            return False
        if "first" in self.rules and len(rest) > 1 and self.lowest[rest[1]] > latest:
            return all([self._raise(i, self.lowest[rest[0]] + self.size[rest[0]]) for i in rest[1:]])
        return True


class Search:
    """`gacc_address_search`: depth first. TimeoutError beyond the number of nodes."""

    def __init__(self, max_nodes: int = INFINITY, rule: Rule = Rule.LOWEST):
        self.nodes, self.max_nodes, self.rule, self.failed = 0, max_nodes, rule, set()

    def run(self, state: State) -> list[int] | None:
        """Offsets by rank, or None."""
        if not state.start():
            return None
        return self._parts(state, range(len(state.size)))

    def _solve(self, state: State, items) -> list[int] | None:
        key = frozenset((i, state.lowest[i], state.deadline[i]) for i in items if not state.placed[i])
        if "failed" in state.rules and key in self.failed:
            return None
        solved = self._decide(state, items)
        if solved is None:
            self.failed.add(key)
        return solved

    def _decide(self, state: State, items) -> list[int] | None:
        while True:
            self.nodes += 1
            if self.nodes >= self.max_nodes:
                raise TimeoutError
            try:
                item = state.next_of_fewest(items) if self.rule is Rule.FEWEST else state.next(items)
            except ValueError:
                return None
            if item is None:
                return state.lowest
            child = state.copy()
            if child.place(item):
                rest = [i for i in items if not child.placed[i]]
                cut = any(not self._crosses(child, s) for s in range(child.first[item] + 1, child.last[item]))
                if cut and "parts" in child.rules:
                    solved = self._parts(child, rest)
                else:
                    solved = self._solve(child, rest) if rest else child.lowest
                if solved is not None:
                    return solved
            if not state.skip(item):
                return None

    def _parts(self, state: State, items) -> list[int] | None:
        cuts = [s for s in state.sections if "parts" in state.rules and not self._crosses(state, s)]
        in_time = sorted(items, key=lambda i: state.first[i])
        groups = itertools.groupby(in_time, key=lambda i: sum(cut <= state.first[i] for cut in cuts))
        parts = [sorted(group, key=lambda i: (-state.largest_rest(i) if self.rule is Rule.RENEWED else 0, i)) for _, group in groups]
        solution = state.lowest
        for part in sorted(parts, key=len):
            solved = self._solve(state.copy(), part)
            if solved is None:
                return None
            solution = [new if i in part else old for i, (old, new) in enumerate(zip(solution, solved, strict=True))]
        return solution

    def _crosses(self, state: State, section: int) -> bool:
        return any(state.first[i] < section for i in state.rest(section))


def beam(state: State, width: int, bias: float) -> tuple[list[int] | None, int]:
    """`gacc_address_beam`: offsets by rank or None, and the number of nodes."""
    weights = [1 / (float(c - load) + bias * float(c)) for c, load in zip(state.capacity, state.load, strict=True)]
    items, nodes = range(len(state.size)), 0
    level = [state] if state.start() else []
    for _ in items:
        children = []
        for parent in level:
            state = parent.copy()
            while True:
                try:
                    item = state.next(items)
                except ValueError:
                    break
                nodes += 1
                child = state.copy()
                if child.place(item):
                    children.append((_waste(child, weights), child))
                if not state.skip(item):
                    break
        level, seen = [], set()
        for _, child in sorted(children, key=lambda c: c[0]):
            key = tuple(INFINITY if done else low for done, low in zip(child.placed, child.lowest, strict=True))
            if key not in seen and len(level) < width:
                seen.add(key)
                level.append(child)
    return (level[0].lowest if level else None), nodes


def _waste(state: State, weights: list[float]) -> float:
    waste = 0.0
    for section, weight in enumerate(weights):
        if rest := state.rest(section):
            floor = min(state.lowest[i] for i in rest)
            waste += weight * float(floor - state.load[section] + sum(state.size[i] for i in rest))
    return waste
