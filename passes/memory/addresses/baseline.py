"""XLA's heuristic, to compare with: `GlobalDecreasingSizeBestFitHeap` (xla/service/heap_simulator, spatial sort by size)."""

from collections.abc import Sequence

from graphacc.passes.memory.problem import AddressProblem, LiveBuffer


def best_fit(problem: AddressProblem) -> tuple[int, ...]:
    """Largest buffer first, then longest-lived; each in the smallest gap that holds it, or on top of all that it meets.

    O(n^2). Fixed buffers come first.

    Returns:
        Offsets in bytes. Nothing is promised about the capacity.
    """
    buffers, offsets = problem.buffers, {i: b.offset for i, b in enumerate(problem.buffers) if b.offset is not None}
    free = (i for i, b in enumerate(buffers) if b.offset is None)
    for i in sorted(free, key=lambda i: (-buffers[i].size, buffers[i].lower - buffers[i].upper, i)):
        met = [(at, at + buffers[j].size) for j, at in offsets.items() if _meet(buffers[i], buffers[j])]
        offsets[i] = _smallest_gap(met, buffers[i].size, problem.alignment)
    return tuple(offsets[i] for i in range(len(buffers)))


def _meet(a: LiveBuffer, b: LiveBuffer) -> bool:
    return a.lower < b.upper and b.lower < a.upper


def _smallest_gap(taken: Sequence[tuple[int, int]], size: int, alignment: int) -> int:
    """The offset of the smallest gap between taken [start, end) that holds the size, the lowest of equals; else the top."""
    best, top = None, 0
    for start, end in sorted(taken):
        if start - top >= size and (best is None or start - top < best[0]):
            best = (start - top, top)
        top = max(top, -(-end // alignment) * alignment)
    return top if best is None else best[1]
