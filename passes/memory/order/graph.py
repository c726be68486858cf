"""The compiled form of an order problem: who waits for whom, and what each operator brings to life and lets die.

Dependencies follow from the program order: a read sees the last write before it, and a write waits for that write and for
all reads since. A buffer lives from its first write (an input: from the start) to its last access (an output: to the end).

Live bytes are a function of the downset S of operators that have run. While v runs after S, memory is
``live(S) + new(v) + workspace(v)``; the peak of an order is the largest such value.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from graphacc.errors import PlanError
from graphacc.passes.memory.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderGraph:
    """Operators 0..n-1, and the buffers that can begin or end while they run (all others are part of `base`)."""

    base: int  # bytes that live all the time
    sizes: tuple[int, ...]  # of each buffer
    producers: tuple[int, ...]  # of each buffer: the operator that creates it, or -1 where it lives from the start
    lasting: tuple[bool, ...]  # of each buffer: it lives to the end
    accesses: tuple[tuple[int, ...], ...]  # of each buffer: all operators that touch it, its producer included
    touched: tuple[tuple[int, ...], ...]  # of each operator: the buffers that it touches
    new: tuple[int, ...]  # of each operator: bytes that it creates
    workspace: tuple[int, ...]  # of each operator: bytes that live only while it runs
    preds: tuple[tuple[int, ...], ...]  # of each operator: those that must run before
    succs: tuple[tuple[int, ...], ...]

    @property
    def num_operators(self) -> int:
        return len(self.preds)

    def start_bytes(self) -> int:
        """Live bytes before the first operator."""
        return self.base + sum(size for size, producer in zip(self.sizes, self.producers) if producer < 0)

    def profile(self, order: Iterable[int]) -> list[int]:
        """Memory while each operator of `order` runs, in that order."""
        return [during for during, _ in self.levels(order)]

    def levels(self, order: Iterable[int]) -> list[tuple[int, int]]:
        """Memory while each operator of `order` runs, and live bytes after it."""
        left = [len(users) for users in self.accesses]
        live = self.start_bytes()
        result = []
        for v in order:
            live += self.new[v]
            during = live + self.workspace[v]
            for buffer in self.touched[v]:
                left[buffer] -= 1
                if not left[buffer] and not self.lasting[buffer]:
                    live -= self.sizes[buffer]
            result.append((during, live))
        return result

    def peak(self, order: Iterable[int]) -> int:
        """Largest memory while an operator of `order` runs."""
        return max(self.profile(order), default=self.base)

    def is_valid(self, order: Sequence[int]) -> bool:
        """Whether `order` is a permutation of the operators that keeps every dependency."""
        position = {v: i for i, v in enumerate(order)}
        if len(position) != len(order) or position.keys() != set(range(self.num_operators)):
            return False
        return all(position[u] < position[v] for v in position for u in self.preds[v])

    def restrict(self, chosen: Sequence[int], executed: set[int]) -> "OrderGraph":
        """The subproblem of the operators `chosen` (its operator i is ``chosen[i]``) when exactly `executed` have run before."""
        local = {v: i for i, v in enumerate(chosen)}
        base, buffers = self.base, []
        for size, producer, lasting, users in zip(self.sizes, self.producers, self.lasting, self.accesses):
            inside = tuple(local[v] for v in users if v in local)
            born = producer < 0 or producer in executed
            done = not lasting and all(v in executed for v in users)
            stays = lasting or any(v not in local and v not in executed for v in users)
            if not inside or (born and stays):
                base += size if born and not done else 0
            else:
                buffers.append((size, -1 if born else local[producer], stays, inside))
        preds = [tuple(local[u] for u in self.preds[v] if u in local) for v in chosen]
        return make_graph(base, buffers, preds, [self.workspace[v] for v in chosen])

    def detach(self, chosen: Sequence[int], *, shared_die: bool = False) -> "OrderGraph":
        """The operators `chosen` on their own, with memory counted from 0.

        Args:
            shared_die: a buffer from outside that others touch too is freed after its last access here (True), or lives on.
        """
        local = {v: i for i, v in enumerate(chosen)}
        buffers = []
        for buffer in dict.fromkeys(buffer for v in chosen for buffer in self.touched[v]):
            producer, users = self.producers[buffer], self.accesses[buffer]
            stays = self.lasting[buffer] or any(v not in local and v != producer for v in users)
            if producer not in local and shared_die:
                stays = self.lasting[buffer]
            if producer in local or not stays:
                inside = tuple(local[v] for v in users if v in local)
                buffers.append((self.sizes[buffer], local.get(producer, -1), stays, inside))
        preds = [tuple(local[u] for u in self.preds[v] if u in local) for v in chosen]
        return make_graph(0, buffers, preds, [self.workspace[v] for v in chosen])


def make_graph(
    base: int, buffers: Iterable[tuple[int, int, bool, tuple[int, ...]]], preds: Sequence[Iterable[int]], workspace: Sequence[int]
) -> OrderGraph:
    """An OrderGraph from buffers as (size, producer or -1, lasting, accesses) and the operators' predecessors."""
    buffers = tuple(buffers)
    touched: list[list[int]] = [[] for _ in preds]
    succs: list[list[int]] = [[] for _ in preds]
    new = [0] * len(preds)
    for index, (size, producer, _, users) in enumerate(buffers):
        for v in users:
            touched[v].append(index)
        if producer >= 0:
            new[producer] += size
    for v, before in enumerate(preds):
        for u in before:
            succs[u].append(v)
    sizes, producers, lasting, accesses = zip(*buffers) if buffers else ((), (), (), ())
    return OrderGraph(
        base=base,
        sizes=sizes,
        producers=producers,
        lasting=lasting,
        accesses=accesses,
        touched=tuple(map(tuple, touched)),
        new=tuple(new),
        workspace=tuple(workspace),
        preds=tuple(map(tuple, preds)),
        succs=tuple(map(tuple, succs)),
    )


def compile_problem(problem: Problem) -> OrderGraph:
    """The OrderGraph of `problem`.

    Raises:
        PlanError: an operator reads a buffer before it is written, waits for a later one, or an output is never written.
    """
    preds: list[set[int]] = [set(operator.after) for operator in problem.operators]
    users: list[list[int]] = [[] for _ in problem.buffers]
    writer = [-1] * len(problem.buffers)
    readers: list[list[int]] = [[] for _ in problem.buffers]
    created = [-1] * len(problem.buffers)
    for v, operator in enumerate(problem.operators):
        _check_indices(problem, v)
        for buffer in sorted({*operator.reads, *operator.writes}):
            users[buffer].append(v)
            if buffer in operator.writes:
                preds[v].update(readers[buffer] or [writer[buffer]])
                if writer[buffer] < 0 and not problem.buffers[buffer].is_input:
                    created[buffer] = v
                writer[buffer], readers[buffer] = v, []
            elif writer[buffer] < 0 and not problem.buffers[buffer].is_input:
                raise PlanError(
                    f"operator {v} ({operator.name!r}) reads buffer {buffer} ({problem.buffers[buffer].name!r}), which nothing "
                    "before it writes: operators must come in a valid program order, and inputs be marked is_input"
                )
            else:
                preds[v].add(writer[buffer])
                readers[buffer].append(v)
    base, buffers = 0, []
    for index, buffer in enumerate(problem.buffers):
        if buffer.is_input and buffer.is_output:
            base += buffer.size
        elif users[index]:
            buffers.append((buffer.size, created[index], buffer.is_output, tuple(users[index])))
        elif buffer.is_output:
            raise PlanError(f"buffer {index} ({buffer.name!r}) is an output that no operator writes")
    return make_graph(base, buffers, [sorted(before - {-1}) for before in preds], [op.workspace for op in problem.operators])


def _check_indices(problem: Problem, v: int) -> None:
    operator = problem.operators[v]
    for buffer in (*operator.reads, *operator.writes):
        if not 0 <= buffer < len(problem.buffers):
            raise PlanError(f"operator {v} ({operator.name!r}) names buffer {buffer}, but there are {len(problem.buffers)}")
    for before in operator.after:
        if not 0 <= before < v:
            raise PlanError(
                f"operator {v} ({operator.name!r}) must run after operator {before}, which does not come before it: "
                "operators must come in a valid program order"
            )


def live_ranges(problem: Problem, order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open live range of every buffer, as positions in `order`.

    It is empty where nothing touches a buffer, unless that is both input and output.
    """
    end = len(order)
    first, last = [end] * len(problem.buffers), [-1] * len(problem.buffers)
    for position, v in enumerate(order):
        for buffer in {*problem.operators[v].reads, *problem.operators[v].writes}:
            first[buffer] = min(first[buffer], position)
            last[buffer] = position
    ranges = []
    for buffer, low, high in zip(problem.buffers, first, last):
        touched = high >= 0
        low = 0 if buffer.is_input or not touched else low
        ranges.append((low, end if buffer.is_output and (touched or buffer.is_input) else high + 1))
    return tuple(ranges)
