"""Nothing that is kept of a long program grows with the square of its length."""

import random
import tracemalloc

import numpy as np
import pytest

from graphacc.runtime.replan.addressing import Occupancy, find_addresses
from graphacc.runtime.replan.liveness import BitSets, Liveness, find_overlap
from graphacc.runtime.replan.model import Access, Allocation, AllocationKind, Executable, Mode, Sequence, Thunk
from graphacc.runtime.replan.ordering import SequenceModel
from graphacc.runtime.replan.values import Values


def step(num_thunks: int) -> Executable:
    """Each thunk writes a value that the next one reads; every third of the first half is read again at the mirrored place of the second."""
    rng = random.Random(num_thunks)
    sizes = [64 * rng.randint(1, 100) for _ in range(num_thunks)]
    offsets = np.cumsum([0, *sizes]).tolist()
    reads = [[place - 1] if place else [] for place in range(num_thunks)]
    for place in range(0, num_thunks // 2, 3):
        reads[num_thunks - 1 - place].append(place)
    thunks = [
        Thunk(
            "kernel",
            f"thunk {place}",
            None,
            (*(_access(Mode.READ, offsets[v], sizes[v]) for v in dict.fromkeys(reads[place])), _access(Mode.WRITE, offsets[place], sizes[place])),
        )
        for place in range(num_thunks)
    ]
    allocation = Allocation(0, max(o + s for o, s in zip(offsets, sizes)), AllocationKind.TEMPORARY, None)
    fields = {"assignment": None, "instruction_names": {}, "message": None, "planned_fields": ()}
    return Executable(root=Sequence(thunks, None), allocations={0: allocation}, alignment=64, **fields)


def _access(mode: Mode, offset: int, size: int) -> Access:
    return Access(mode, 0, offset, size, None)


def kept_bytes(num_thunks: int) -> int:
    """What liveness, occupancy and the order problem of a program hold."""
    executable = step(num_thunks)
    values = Values(executable)
    tracemalloc.start()
    try:
        liveness = Liveness(values, {})
        kept = liveness, Occupancy(values, liveness), SequenceModel(executable.root, values, {}, {})
        assert len(kept[1].sizes) == num_thunks
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.matrix
def test_what_is_kept_grows_with_the_length():
    assert kept_bytes(4000) < 2.2 * kept_bytes(2000)


@pytest.mark.parametrize("seed", range(5))
def test_bit_sets_look_like_the_list_that_they_were_made_of(seed):
    rng = random.Random(seed)
    sets = [rng.getrandbits(30)]
    for _ in range(rng.choice((0, 40, 700))):
        sets.append(sets[-1] ^ (1 << rng.randrange(30)) * rng.randrange(2))
    found = BitSets(sets)
    assert len(found) == len(sets) and list(found) == sets
    assert [found[place] for place in (0, len(sets) // 2, len(sets) - 1, -1)] == [sets[place] for place in (0, len(sets) // 2, len(sets) - 1, -1)]
    low, high = sorted((rng.randrange(len(sets) + 1), rng.randrange(len(sets) + 1)))
    assert found[low:high] == sets[low:high]
    intervals = found.intervals(30)
    assert [sum(1 << bit for bit in range(30) if any(a <= place < b for a, b in intervals[bit])) for place in range(len(sets))] == sets
    with pytest.raises(IndexError):
        found[len(sets)]


def test_occupancy_is_that_of_the_steps():
    executable = step(60)
    values = Values(executable)
    liveness = Liveness(values, {})
    occupancy = Occupancy(values, liveness)
    sets = list(liveness.occupied)
    assert occupancy.live.tolist() == [sum(int(occupancy.sizes[v]) for v in range(60) if bits >> v & 1) for bits in sets]
    for v in range(60):
        assert set(occupancy.conflicting(v).tolist()) == {w for w in range(60) if any(bits >> v & bits >> w & 1 for bits in sets)}
    addresses = find_addresses(values, liveness, lambda problem, seconds: (), 1.0)
    for v in range(60):
        for w in set(occupancy.conflicting(v).tolist()) - {v}:
            a, b = sorted((v, w), key=lambda x: addresses.offsets[x])
            assert addresses.offsets[a] + occupancy.sizes[a] <= addresses.offsets[b]


def test_an_overlap_is_found():
    apart = Values(step(60))
    assert find_overlap(apart, Liveness(apart, {})) is None
    values = Values(step(3))
    second = values.all[1]
    second.start, second.end = values.all[0].start + 1, values.all[0].end + 1
    found = find_overlap(values, Liveness(values, {}))
    assert found is not None and {value.index for value in found} == {0, 1}
