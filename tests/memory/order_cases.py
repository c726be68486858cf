"""Order problems for tests: random programs, and the smallest peak by trying every order."""

import functools
import random

from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.problem import Buffer, Operator, Problem


def random_problem(seed: int, num_operators: int) -> Problem:
    """A program of operators that create, read and update buffers in place; some buffers are inputs, outputs, or both."""
    rng = random.Random(seed)

    def sizes():
        return rng.choice([0, 1, 1, 2, 3, 5, 8, 13])

    buffers = [
        Buffer(name=f"input{i}", size=sizes(), is_input=True, is_output=rng.random() < 0.4) for i in range(rng.randrange(4))
    ]
    operators = []
    reach = rng.choice([2, 4, num_operators])
    for v in range(num_operators):
        reads = [b for b in range(len(buffers))[-2 * reach :] if rng.random() < 1.5 / (reach + 1)]
        updates = [b for b in range(len(buffers)) if rng.random() < 0.04]
        created = range(len(buffers), len(buffers) + rng.choice([0, 1, 1, 1, 2]))
        buffers.extend(Buffer(name=f"b{b}", size=sizes(), is_output=rng.random() < 0.1) for b in created)
        after = tuple(u for u in range(v) if rng.random() < 0.03)
        workspace = rng.choice([0, 0, 0, 4])
        operators.append(
            Operator(name=f"op{v}", reads=tuple(reads), writes=(*updates, *created), after=after, workspace=workspace)
        )
    return Problem(operators=tuple(operators), buffers=tuple(buffers))


def best_peak(graph: OrderGraph) -> int:
    """The smallest peak over all orders, by dynamic programming over all downsets, with live bytes counted from scratch."""
    everything = (1 << graph.num_operators) - 1
    waits = [sum(1 << u for u in before) for before in graph.preds]
    touchers = [sum(1 << v for v in users) for users in graph.accesses]

    def live(done: int) -> int:
        total = graph.base
        for size, producer, lasting, users in zip(graph.sizes, graph.producers, graph.lasting, touchers):
            born = producer < 0 or done >> producer & 1
            total += size if born and (lasting or users & ~done) else 0
        return total

    @functools.cache
    def peak_from(done: int) -> int:
        if done == everything:
            return 0
        best = None
        for v in range(graph.num_operators):
            if not done >> v & 1 and not waits[v] & ~done:
                here = live(done) + graph.new[v] + graph.workspace[v]
                peak = max(here, peak_from(done | 1 << v))
                best = peak if best is None else min(best, peak)
        return best

    return peak_from(0)


class _Program:
    """Builds a program one operator after the other."""

    def __init__(self):
        self.buffers: list[Buffer] = []
        self.operators: list[Operator] = []

    def state(self, size: int) -> int:
        """A buffer that is both input and output."""
        self.buffers.append(Buffer(name=f"state{len(self.buffers)}", size=size, is_input=True, is_output=True))
        return len(self.buffers) - 1

    def call(self, *reads: int, size: int, into: int | None = None) -> int:
        """One operator; its result's buffer."""
        if into is None:
            self.buffers.append(Buffer(name=f"b{len(self.buffers)}", size=size))
            into = len(self.buffers) - 1
        self.operators.append(Operator(name=f"op{len(self.operators)}", reads=reads, writes=(into,)))
        return into

    def adam(self, param: int, grad: int, size: int) -> None:
        """Twelve operators, as a trace of Adam has them; the moments and the parameter in place."""
        m, v = self.state(size), self.state(size)
        self.call(self.call(m, size=size), self.call(grad, size=size), size=size, into=m)
        squared = self.call(self.call(grad, size=size), grad, size=size)
        self.call(self.call(v, size=size), squared, size=size, into=v)
        denominator = self.call(self.call(v, size=size), size=size)
        step = self.call(self.call(m, size=size), denominator, size=size)
        self.call(param, step, size=size, into=param)


def layered_training_problem(num_layers: int, rng: random.Random) -> Problem:
    """Forward, backward and Adam of a chain of residual blocks of random sizes; all updates come last. 26 operators a layer."""
    program = _Program()
    params = [(program.state(size), size) for size in (rng.choice([4, 16, 64, 256]) * 1024 for _ in range(num_layers))]
    x, kept = program.state(64 * 1024), []
    for param, _ in params:
        width = rng.choice([16, 64, 128]) * 1024
        hidden = program.call(x, param, size=width)
        active = program.call(hidden, size=width)
        out = program.call(active, param, size=64 * 1024)
        kept.append((x, hidden, active))
        x = program.call(x, out, size=64 * 1024)
    grad, updates = program.call(x, size=64 * 1024), []
    for (param, size), (before, hidden, active) in reversed(list(zip(params, kept))):
        width = program.buffers[hidden].size
        inner = program.call(grad, param, size=width)
        outer_weight = program.call(grad, active, size=size)
        through = program.call(inner, hidden, size=width)
        inner_weight = program.call(through, before, size=size)
        updates.append((param, program.call(outer_weight, inner_weight, size=size), size))
        grad = program.call(grad, program.call(through, param, size=64 * 1024), size=64 * 1024)
    for update in updates:
        program.adam(*update)
    return Problem(operators=tuple(program.operators), buffers=tuple(program.buffers))
