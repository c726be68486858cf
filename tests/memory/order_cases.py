"""Order problems for tests: random programs, and the smallest peak by trying every order."""

import functools
import random

from graphacc.passes.memory.order.graph import OrderGraph
from graphacc.passes.memory.problem import Buffer, Operator, Problem


def random_problem(seed: int, num_operators: int) -> Problem:
    """A program of operators that create, read and update buffers in place; some buffers are inputs, outputs, or both."""
    rng = random.Random(seed)
    sizes = lambda: rng.choice([0, 1, 1, 2, 3, 5, 8, 13])
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
