import itertools
import random

from graphacc.runtime.replan.intervals import IntervalMap

SIZE = 40


class Bytes:
    """The slow reference: one value per byte."""

    def __init__(self):
        self.values = [None] * SIZE

    def write(self, start, end, value):
        self.values[start:end] = [value] * (end - start)


def spread(runs) -> list:
    return [value for start, end, value in runs for _ in range(start, end)]


def random_pair(rng) -> tuple[IntervalMap, Bytes]:
    intervals, reference = IntervalMap(), Bytes()
    for value in range(rng.randrange(12)):
        start, end = sorted(rng.choices(range(SIZE + 1), k=2))
        intervals.write(start, end, value)
        reference.write(start, end, value)
    return intervals, reference


def test_reads_see_the_last_write():
    rng = random.Random(0)
    for _ in range(300):
        intervals, reference = random_pair(rng)
        start, end = sorted(rng.choices(range(SIZE + 1), k=2))
        runs = intervals.read(start, end)
        assert spread(runs) == reference.values[start:end]
        assert [run[0] for run in runs] == [start, *(run[1] for run in runs)][: len(runs)]


def test_runs_never_overlap():
    rng = random.Random(1)
    for _ in range(100):
        runs = list(random_pair(rng)[0])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs))


def test_join_merges_byte_by_byte():
    rng = random.Random(2)
    for _ in range(200):
        (a, a_bytes), (b, b_bytes) = random_pair(rng), random_pair(rng)
        joined = a.join(b, lambda x, y: (x, y))
        pairs = zip(a_bytes.values, b_bytes.values)
        assert spread(joined.read(0, SIZE)) == [pair if pair != (None, None) else None for pair in pairs]


def test_copies_are_independent():
    a = IntervalMap()
    a.write(0, 10, "old")
    b = a.copy()
    assert a == b
    b.write(5, 6, "new")
    assert a.read(0, 10) == [(0, 10, "old")] and a != b
