"""A rewrite that is wrong in one place is always caught. Each test breaks a right one, and shows first that it passes."""

import itertools
import random

import jax
import programs
import pytest
from rewrites import Rewrite

from graphacc._compat import jax_ as compat
from graphacc.runtime.replan import cpu
from graphacc.runtime.replan.errors import NotUnderstood, VerificationError
from graphacc.runtime.replan.liveness import Liveness
from graphacc.runtime.replan.precedence import find_predecessors

NAMES = sorted(programs.PROGRAMS)


def right_rewrite(name: str) -> Rewrite:
    """A program's right plan."""
    return Rewrite(programs.serialized(name), compat.xla_library())


@pytest.fixture(scope="module", params=NAMES)
def plan(request) -> Rewrite:
    try:
        found = right_rewrite(request.param)
    except NotUnderstood as error:
        if not programs.NEWER:
            raise
        pytest.skip(f"jax {jax.__version__}: XLA's plan kept: {error}")
    found.check(found.reread())
    return found


def value_of(plan: Rewrite, executable, access):
    """The value of an access of the planned program, or None."""
    names = plan.names()
    for thunk in executable.thunks:
        if access in thunk.accesses:
            was = plan.values.executable.thunks[names[thunk.index]]
            return plan.values.of_access.get(was.accesses[thunk.accesses.index(access)].index)


@pytest.mark.default_cases("branches", "loops")
def test_a_moved_access_is_caught(plan):
    rng = random.Random(0)
    movable = [a.index for a in plan.reread().accesses if is_shared(plan, a.index)]
    for index in rng.sample(movable, min(25, len(movable))):
        broken = plan.reread()
        access = broken.accesses[index]
        places = range(0, broken.temporary.size - access.size + 1, 64)
        elsewhere = [p for p in places if p != access.offset]
        if not elsewhere:
            continue
        access.slice.offset = rng.choice(elsewhere)
        with pytest.raises(VerificationError):
            plan.check(broken)


def is_shared(plan: Rewrite, index: int) -> bool:
    """Whether somebody else touches its bytes too: a value that is written and never read may lie anywhere that is free."""
    executable = plan.reread()
    value = value_of(plan, executable, executable.accesses[index])
    return value is not None and len(value.thunks) > 1


@pytest.mark.default_cases("branches", "loops")
def test_two_live_values_in_one_place_are_caught(plan):
    rng = random.Random(1)
    liveness = Liveness(plan.values, plan.orders)
    pairs = [
        (a, b)
        for bits in set(liveness.occupied)
        for a in plan.values.all
        for b in plan.values.all
        if a is not b and bits >> a.index & bits >> b.index & 1 and len(a.thunks) > 1 and len(b.thunks) > 1
    ]
    assert pairs
    for moved, onto in rng.sample(pairs, min(25, len(pairs))):
        broken = plan.reread()
        size = broken.temporary.size
        target = plan.offsets[onto.index]
        if target + moved.size > size:
            target = max(0, (size - moved.size) // 64 * 64)
            if target >= plan.offsets[onto.index] + onto.size:
                continue
        for access in broken.accesses:
            if value_of(plan, broken, access) is moved:
                access.slice.offset += target - plan.offsets[moved.index]
        with pytest.raises(VerificationError):
            plan.check(broken)


def test_a_dropped_dependency_is_caught(plan):
    """Two neighbours, the second of which must follow the first, change places, and the order says so."""
    num_broken = 0
    for sequence in plan.original.sequences:
        predecessors = find_predecessors(plan.values.executable.sequences[sequence.index], plan.values)
        order = plan.orders.get(sequence.index, tuple(range(len(sequence.thunks))))
        for i in range(len(order) - 1):
            if order[i] not in predecessors[order[i + 1]]:
                continue
            swapped = (*order[:i], order[i + 1], order[i], *order[i + 2 :])
            with pytest.raises(VerificationError):
                plan.check(swap(plan, sequence.index, i), {**plan.orders, sequence.index: swapped})
            num_broken += 1
    assert num_broken > 3


def swap(plan: Rewrite, sequence_index: int, place: int):
    """The planned program with two neighbours of a sequence of the original swapped."""
    broken = plan.reread()
    names = plan.names()
    old = plan.original.sequences[sequence_index]
    members = {t.index for t in old.thunks}
    sequence = next(s for s in broken.sequences if {names[t.index] for t in s.thunks} == members)
    order = list(range(len(sequence.thunks)))
    order[place], order[place + 1] = order[place + 1], order[place]
    cpu.reorder(sequence, tuple(order))
    return broken


def test_an_undeclared_swap_is_caught(plan):
    caught = 0
    for place in range(len(plan.original.root.thunks) - 1):
        with pytest.raises(VerificationError, match="changed more of it than its offsets"):
            plan.check(swap(plan, 0, place))
        caught += 1
    assert caught


def test_swapped_collectives_are_caught():
    plan = right_rewrite("collectives")
    sequence = plan.original.root
    order = plan.orders.get(0, tuple(range(len(sequence.thunks))))
    places = [i for i, place in enumerate(order) if "collective" in sequence.thunks[place].ordered]
    assert len(places) > 3
    for a, b in itertools.pairwise(places):
        swapped = list(range(len(order)))
        swapped[a], swapped[b] = b, a
        broken = plan.reread()
        cpu.reorder(broken.root, tuple(swapped))
        with pytest.raises(VerificationError, match="changed the order of the|other values"):
            plan.check(broken, {**plan.orders, 0: tuple(order[i] for i in swapped)})


@pytest.mark.parametrize("name", ["training_step", "collectives"])
def test_dropped_and_doubled_thunks_are_caught(name):
    plan = right_rewrite(name)
    for change in (lambda thunks: thunks.pop(1), lambda thunks: thunks.append(thunks[0])):
        broken = plan.reread()
        del broken.root.message.thunk_resources[:]
        change(broken.root.message.thunks)
        with pytest.raises(VerificationError, match="not a permutation"):
            plan.check(broken)


def test_resources_that_name_other_thunks_are_caught():
    plan = right_rewrite("collectives")
    broken = plan.reread()
    indices = broken.root.message.thunk_resources[0].thunk_indices
    indices[0] = next(i for i in range(len(broken.root.thunks)) if i not in indices)
    with pytest.raises(VerificationError):
        plan.check(broken)


def test_a_changed_parameter_of_a_thunk_is_caught(plan):
    broken = plan.reread()
    kernel = next(t for t in broken.thunks if t.kind == "kernel_thunk")
    kernel.message.kernel_thunk.kernel_name += "x"
    with pytest.raises(VerificationError, match="changed more of it than its offsets"):
        plan.check(broken)


def test_misaligned_values_are_caught(plan):
    broken = plan.reread()
    broken.temporary.message.size += 64
    for access in broken.accesses:
        if broken.is_temporary(access):
            access.slice.offset += 32
    with pytest.raises(VerificationError, match="moved by"):
        plan.check(broken)


def test_other_changes_to_the_executable_are_caught(plan):
    broken = plan.reread()
    broken.message.entry_function_name += "x"
    with pytest.raises(VerificationError, match="entry_function_name"):
        plan.check(broken)
    broken = plan.reread()
    broken.allocations[0].message.size += 64
    with pytest.raises(VerificationError, match="buffer assignment"):
        plan.check(broken)
