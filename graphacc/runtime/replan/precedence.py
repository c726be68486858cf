"""Which thunks of one sequence must stay before which others.

Inside one value, and on memory that does not move (parameters, constants, outputs), conflicting accesses to a byte keep their
order: read after write, write after read, write after write. Two values in the same place never force an order: they get new
places. Thunks that share an ordered resource (collectives, unless the reader releases them; side effects) keep theirs, so that all
devices run their collectives in one order. What runs beside asynchronous work keeps doing so: it stays between the thunks that start it and wait for it.
"""

from graphacc.runtime.replan.intervals import IntervalMap
from graphacc.runtime.replan.model import Sequence, Thunk
from graphacc.runtime.replan.values import Values

Predecessors = list[set[int]]  # per place in Sequence.thunks: places that must come before


def find_predecessors(sequence: Sequence, values: Values) -> Predecessors:
    """Direct predecessors; their transitive closure is the whole relation."""
    predecessors: Predecessors = [set() for _ in sequence.thunks]
    memory: dict[tuple[str, int], IntervalMap] = {}
    last_of: dict[str, int] = {}
    for place, thunk in enumerate(sequence.thunks):
        for name in thunk.ordered:
            if name in last_of:
                predecessors[place].add(last_of[name])
            last_of[name] = place
        _keep_beside(place, thunk, predecessors)
        ranges = _ranges(values, [a for t in values.executable.family(thunk) for a in t.accesses])
        for (key, start, end), writes in ranges.items():
            _touch(memory.setdefault(key, IntervalMap()), start, end, writes, place, predecessors[place])
        predecessors[place].discard(place)
    return predecessors


def _keep_beside(place: int, thunk: Thunk, predecessors: Predecessors) -> None:
    """A thunk that waits for another: what stands between them stays between them."""
    if thunk.waits_for is not None:
        predecessors[place] |= set(range(thunk.waits_for, place))
        for between in range(thunk.waits_for + 1, place):
            predecessors[between].add(thunk.waits_for)


def _ranges(values: Values, accesses) -> dict[tuple[tuple[str, int], int, int], bool]:
    """(memory, start, end) -> whether it is written; memory is a value, or an allocation that does not move."""
    found: dict[tuple[tuple[str, int], int, int], bool] = {}
    for access in accesses:
        if access.size:
            value = values.of_access.get(access.index)
            memory = ("allocation", access.allocation) if value is None else ("value", value.index)
            key = (memory, access.offset, access.end)
            found[key] = found.get(key, False) or access.mode.writes
    return found


def _touch(memory: IntervalMap, start: int, end: int, writes: bool, place: int, before: set[int]) -> None:
    """Record one access; add to `before` whom it must follow. Held per byte: (last writer or None, its readers since)."""
    for low, high, held in memory.read(start, end):
        writer, readers = held or (None, frozenset())
        if writer is not None:
            before.add(writer)
        if writes:
            before |= readers
            memory.write(low, high, (place, frozenset()))
        else:
            memory.write(low, high, (writer, readers | {place}))


def is_legal(order: tuple[int, ...], predecessors: Predecessors) -> bool:
    """Whether `order` is a permutation that keeps every predecessor before."""
    if sorted(order) != list(range(len(predecessors))):
        return False
    at = {place: position for position, place in enumerate(order)}
    return all(at[p] < at[place] for place in range(len(predecessors)) for p in predecessors[place])
