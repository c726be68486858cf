"""Random loops equal plain PyTorch, or are refused by an error of ours: none differs, none raises anything else."""

import pytest
import random_loops
from selection import with_matrix

SEEDS_PER_TEST = 15


@pytest.mark.parametrize("first", with_matrix(range(0, 135, SEEDS_PER_TEST), [0, 15, 30, 45]))
def test_random_loops(first):
    results = {seed: random_loops.compare(seed) for seed in range(first, first + SEEDS_PER_TEST)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}
    assert sum(result == "equal" for result in results.values()) >= SEEDS_PER_TEST * 0.7, results


@pytest.mark.parametrize("first", with_matrix([1000, 1010, 1020], [1000]))
def test_random_loops_on_several_devices(first):
    results = {seed: random_loops.compare(seed, "fsdp=2") for seed in range(first, first + 8)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}
