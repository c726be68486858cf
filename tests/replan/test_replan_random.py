"""Random programs through compile, plan and run: the same bits on every device. `random_programs` says what they are made of.

A long run: ``XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/replan/test_replan_random.py COUNT [FIRST_SEED]``.
"""

import sys

import programs
import pytest
import random_programs
from greedy import SOLVERS
from selection import with_matrix

from graphacc._compat import jax_ as compat
from graphacc.runtime.replan.compiling import has_nested_collectives
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.planner import plan_bytes

BATCH = 20
NUM_ON_ONE_DEVICE = 220
NUM_ON_EIGHT_DEVICES = 80


def check(seed: int, num_devices: int) -> float:
    """Plan one program and compare; returns temporary memory after / before.

    Raises:
        NotUnderstood, VerificationError: of what the sampler makes the adapter should refuse collectives in loops only.
    """
    program = random_programs.sample(seed, num_devices=num_devices)
    compiled = program.compile()
    if not compiled.memory_analysis().temp_size_in_bytes:
        return 1.0
    options = dict(library=compat.xla_library(), solvers=SOLVERS, seconds=0.2, free_collectives=seed % 2 == 0)
    if has_nested_collectives(compiled.as_text()):
        with pytest.raises(NotUnderstood, match="holds collectives, whose order is lost"):
            plan_bytes(compat.serialize(compiled), **options)
        return 1.0
    planned = plan_bytes(compat.serialize(compiled), **options)
    if planned.serialized is None:
        return 1.0
    rewritten = compat.with_executable(compiled, compat.load_executable(planned.serialized, compiled))
    want = programs.bits(compiled(*program.arguments()))
    got = programs.bits(rewritten(*program.arguments()))
    assert got == want, f"seed {seed} on {num_devices} devices computes something else after planning: {program.steps}"
    return planned.temporary_after / planned.temporary_before


def check_many(first: int, count: int, num_devices: int) -> list[float]:
    return [check(seed, num_devices) for seed in range(first, first + count)]


@pytest.mark.parametrize("first", with_matrix(range(0, NUM_ON_ONE_DEVICE, BATCH), [0]))
@pytest.mark.matrix
def test_random_programs_give_the_same_bits(first):
    ratios = check_many(first, BATCH, 1)
    assert min(ratios) < 1  # most are planned


@pytest.mark.parametrize("first", with_matrix(range(0, NUM_ON_EIGHT_DEVICES, BATCH), [0]))
@pytest.mark.matrix
def test_random_programs_on_eight_devices_give_the_same_bits(first):
    ratios = check_many(first, BATCH, 8)
    assert min(ratios) < 1


def main(count: int, first: int = 0) -> None:
    ratios = [ratio for seed in range(first, first + count) for ratio in check_many(seed, 1, 8 if seed % 4 == 0 else 1)]
    changed = sum(ratio < 1 for ratio in ratios)
    print(f"{count} programs from seed {first}: all bits equal, {changed} planned, mean after / before {sum(ratios) / count:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
