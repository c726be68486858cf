"""Random loops equal plain PyTorch, or are refused by an error of ours: none differs, none raises anything else. `.ci/run` runs 500 others on one device."""

import pytest
import random_loops
from selection import with_matrix


def test_random_loops():
    results = {seed: random_loops.compare(seed) for seed in range(3)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}
    assert sum(result == "equal" for result in results.values()) >= 2, results


@pytest.mark.parametrize("first", with_matrix([1000, 1010, 1020], [1000]))
@pytest.mark.matrix
def test_random_loops_on_several_devices(first):
    results = {seed: random_loops.compare(seed, "fsdp=2") for seed in range(first, first + 8)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}


@pytest.mark.matrix
def test_random_loops_in_bf16():
    results = {seed: random_loops.compare(seed, "precision=bf16") for seed in range(2000, 2010)}
    assert not {seed: result for seed, result in results.items() if result.startswith("WRONG")}
