"""Random loops equal plain PyTorch, or are refused by an error of ours: none differs, none raises anything else."""

import pytest
import random_loops
from selection import with_matrix

FEW = (0, 3)


@pytest.mark.parametrize("first, count", with_matrix([FEW, (3, 12), *((first, 15) for first in range(15, 135, 15))], [FEW]))
def test_random_loops(first, count):
    results = {seed: random_loops.compare(seed) for seed in range(first, first + count)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}
    assert sum(result == "equal" for result in results.values()) >= count * 0.7, results


@pytest.mark.parametrize("first", with_matrix([1000, 1010, 1020], [1000]))
@pytest.mark.matrix
def test_random_loops_on_several_devices(first):
    results = {seed: random_loops.compare(seed, "fsdp=2") for seed in range(first, first + 8)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}
