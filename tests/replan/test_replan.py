import logging
import random

import jax
import jax.numpy as jnp
import programs
import pytest
from greedy import SOLVERS

from graphacc._compat import jax_ as compat
from graphacc.errors import GraphAccError
from graphacc.runtime.replan import (
    Candidate,
    NotUnderstood,
    VerificationError,
    api,
    replan,
    replan_best,
)
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.ordering import SequenceOrder
from graphacc.runtime.replan.planner import Solvers, plan_bytes
from graphacc.runtime.replan.schema import read_schema

OPTIONS = dict(seconds=1.0, solvers=SOLVERS, min_temporary_bytes=1, tolerance=0.0)


@pytest.fixture(autouse=True)
def _log_afresh():
    api._log_once.cache_clear()


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
@pytest.mark.default_cases("branches", "collectives", "loops", "training_step")
def test_planned_programs_give_the_same_bits(name):
    compiled = programs.compiled(name)
    result = replan(compiled, serialized=programs.serialized(name), **OPTIONS)
    programs.require_planned(result.plan)
    assert result.plan.lower_bound <= result.plan.temporary_after < result.plan.temporary_before
    assert result.plan.temporary_after == result.compiled.memory_analysis().temp_size_in_bytes
    assert result.plan.temporary_before == compiled.memory_analysis().temp_size_in_bytes
    for _ in range(3):
        want = programs.bits(compiled(*programs.arguments(name)))
        assert programs.bits(result.compiled(*programs.arguments(name))) == want


@pytest.mark.parametrize("name", ["training_step", "collectives"])
def test_planned_programs_keep_trees_shardings_and_donation(name):
    compiled = programs.compiled(name)
    planned = replan(compiled, **OPTIONS).compiled
    assert planned.in_tree == compiled.in_tree and planned.out_tree == compiled.out_tree
    assert planned.input_shardings == compiled.input_shardings and planned.output_shardings == compiled.output_shardings
    params, x = programs.arguments(name)
    value, updated = planned(params, x)
    assert all(p.is_deleted() for p in params) and not x.is_deleted()
    again, _ = planned(updated, x)
    assert not jnp.array_equal(value, again)


def test_planned_again_gives_the_reason(caplog):
    first = replan(programs.compiled("training_step"), **OPTIONS)
    programs.require_planned(first.plan)
    planned = first.compiled
    for _ in range(2):
        result = replan(planned, **OPTIONS)
        assert not result.plan.changed and result.compiled is planned
        assert "lost its code" in result.plan.reason
    assert [r.name for r in caplog.records] == ["graphacc.replan"]  # once


def test_the_planned_bytes_load_again_with_the_bytes_that_a_program_was_loaded_from():
    compiled = programs.compiled("branches")
    serialized = compat.serialize(compiled)
    loaded = compat.with_executable(compiled, compat.load_executable(serialized, compiled))
    result = replan(loaded, serialized=serialized, **OPTIONS)
    assert result.plan.changed
    want = programs.bits(compiled(*programs.arguments("branches")))
    assert programs.bits(result.compiled(*programs.arguments("branches"))) == want


class Store:
    """JAX's persistent compilation cache of one program, in memory."""

    _path = "memory"

    def __init__(self):
        self.entry, self.misses = None, 0

    def get(self, key):
        return self.entry

    def missed(self):
        self.misses += 1


def test_programs_from_the_compile_cache_are_planned_from_its_bytes():
    store = Store()
    jitted, arguments = programs.PROGRAMS["branches"]()
    for _ in range(2):
        with compat.persistent_cache(store):
            compiled = jitted.lower(*arguments).compile()
        store.entry = store.entry or compat.cache_entry(compat.serialize(compiled), 0.0)
        jax.clear_caches()
    assert store.misses == 1
    assert "lost its code" in replan(compiled, **OPTIONS).plan.reason
    result = replan(compiled, serialized=compat.cached_executable(store.entry), **OPTIONS)
    assert result.plan.changed
    want = programs.bits(compiled(*programs.arguments("branches")))
    assert programs.bits(result.compiled(*programs.arguments("branches"))) == want


def test_a_sort_that_has_run_keeps_the_plan(caplog):
    jitted, arguments = programs.PROGRAMS["library_calls"]()
    compiled = jitted.lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    result = replan(compiled, **OPTIONS)
    assert not result.plan.changed and "not serializable" in result.plan.reason
    programs.require_planned(replan(compiled, serialized=programs.serialized("library_calls"), **OPTIONS).plan)


def test_small_programs_keep_their_plan_silently(caplog):
    result = replan(programs.compiled("training_step"), seconds=1.0, solvers=SOLVERS)
    assert not result.plan.changed and "below 1048576" in result.plan.reason and not caplog.records


def test_host_callbacks_keep_the_plan():
    def function(x):
        jax.debug.callback(lambda y: None, x.sum())
        return jnp.tanh(x @ x) @ x

    compiled = jax.jit(function).lower(jnp.ones((64, 64))).compile()
    assert "calls back into Python" in replan(compiled, **OPTIONS).plan.reason


def test_an_optimal_plan_is_kept():
    compiled = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(jnp.ones((64, 64))).compile()
    result = replan(compiled, **OPTIONS)
    assert not result.plan.changed and result.plan.reason == "it is optimal" and result.compiled is compiled
    assert 0 < result.plan.lower_bound == result.plan.temporary_after == result.plan.temporary_before


def test_an_illegal_order_keeps_the_plan(caplog):
    def backwards(problem, seconds, bound_wanted):
        return SequenceOrder(order=tuple(reversed(range(len(problem.operators)))), peak=0, lower_bound=0)

    solvers = Solvers(order=backwards, addresses=SOLVERS.addresses)
    result = replan(programs.compiled("training_step"), seconds=1.0, solvers=solvers, min_temporary_bytes=1, tolerance=0.0)
    assert not result.plan.changed and "breaks a dependency" in result.plan.reason
    assert "breaks a dependency" in caplog.text


def test_a_failing_solver_keeps_the_plan(caplog):
    def fails(problem, seconds, bound_wanted):
        raise KeyError("a mistake")

    caplog.set_level(logging.DEBUG, logger="graphacc.replan")
    solvers = Solvers(order=fails, addresses=SOLVERS.addresses)
    result = replan(programs.compiled("training_step"), seconds=1.0, solvers=solvers, min_temporary_bytes=1, tolerance=0.0)
    assert not result.plan.changed and "KeyError" in result.plan.reason
    assert any(record.exc_info for record in caplog.records)


def test_overlapping_addresses_from_the_solver_are_compacted_away():
    """The solver's offsets only rank the values: a wrong answer costs memory, never correctness."""
    solvers = Solvers(order=SOLVERS.order, addresses=lambda problem, seconds: (0,) * len(problem.buffers))
    result = replan(programs.compiled("loops"), seconds=1.0, solvers=solvers, min_temporary_bytes=1, tolerance=0.0)
    want = programs.bits(programs.compiled("loops")(*programs.arguments("loops")))
    assert programs.bits(result.compiled(*programs.arguments("loops"))) == want


def test_a_plan_close_to_its_bound_is_kept():
    compiled = programs.compiled("training_step")
    result = replan(compiled, **OPTIONS | {"tolerance": 1e9})
    assert not result.plan.changed and "of the lower bound" in result.plan.reason and result.compiled is compiled
    assert result.plan.map_before is not None and result.plan.map_after is None


# --- several schedules ---


def test_candidates_report_against_the_first():
    low, high = programs.compiled("branches"), programs.compiled("training_step")
    first, second = Candidate(compiled=high, schedule="a"), Candidate(compiled=low, schedule="b")
    result = replan_best(first, [lambda: second], **{**OPTIONS, "seconds": 60.0})
    assert result.plan.schedule == "b"
    assert result.plan.temporary_before == high.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("seconds, min_temporary_bytes", [(60.0, 1 << 20), (9.0, 1)], ids=["small", "no time"])
def test_another_schedule_is_not_compiled_where_it_does_not_pay(seconds, min_temporary_bytes):
    def never():
        raise AssertionError("compiled again")

    first = Candidate(compiled=programs.compiled("training_step"), schedule="a", seconds=9.0)
    result = replan_best(first, [never], solvers=SOLVERS, seconds=seconds, min_temporary_bytes=min_temporary_bytes)
    assert result.plan.schedule == "a"


# --- damaged and unknown input ---


def plan(data: bytes):
    return plan_bytes(data, library=compat.xla_library(), solvers=SOLVERS, seconds=0.1)


def test_truncated_executables_are_refused():
    data = programs.serialized("branches")
    rng = random.Random(0)
    for length in [0, 1, *rng.sample(range(len(data)), 20)]:
        with pytest.raises(NotUnderstood):
            plan(data[:length])


def test_truncated_messages_inside_a_whole_envelope_are_refused():
    envelope = open_envelope(programs.serialized("branches"))
    rng = random.Random(1)
    for length in rng.sample(range(len(envelope.executable)), 20):
        with pytest.raises((NotUnderstood, VerificationError)):
            plan(envelope.with_executable(envelope.executable[:length]))


@pytest.mark.parametrize("part", ["thunk_sequence", "buffer_assignment"])
def test_flipped_bits_never_give_an_unknown_error(part):
    """Where the damage leaves a program that can be read, it is another program; else the answer is one of ours."""
    envelope = open_envelope(programs.serialized("training_step"))
    message_class = read_schema(compat.xla_library()).message_class("xla.cpu.CompilationResultProto")
    message = message_class.FromString(envelope.executable)
    content = getattr(message, part).SerializeToString(deterministic=True)
    start = envelope.executable.find(content[:200])
    assert start > 0
    rng = random.Random(2)
    num_refused = 0
    for _ in range(100):
        damaged = bytearray(envelope.executable)
        damaged[start + rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        try:
            plan(envelope.with_executable(bytes(damaged)))
        except GraphAccError:
            num_refused += 1
    assert num_refused > 10


def change(name: str, edit) -> bytes:
    """A program's bytes after an edit of its message."""
    envelope = open_envelope(programs.serialized(name))
    message = read_schema(compat.xla_library()).message_class("xla.cpu.CompilationResultProto").FromString(envelope.executable)
    edit(message)
    return envelope.with_executable(message.SerializeToString(deterministic=True))


def first_kernel(message):
    return next(t for t in message.thunk_sequence.thunks if t.HasField("kernel_thunk")).kernel_thunk


def unknown_thunk(message):
    message.thunk_sequence.thunks[0].ClearField(message.thunk_sequence.thunks[0].WhichOneof("impl"))


def unsupported_thunk(message):
    message.thunk_sequence.thunks[0].xnn_fusion_thunk.SetInParent()


def out_of_bounds(message):
    first_kernel(message).results_buffers[0].slice.offset = 1 << 40


def unknown_allocation(message):
    first_kernel(message).results_buffers[0].slice.buffer_allocation_index = 999


def no_resource(message):
    message.thunk_sequence.thunk_resources.add().thunk_indices.append(999)


def two_arenas(message):
    allocations = message.buffer_assignment.buffer_allocations
    for allocation in allocations:
        allocation.is_entry_computation_parameter = allocation.is_constant = allocation.maybe_live_out = False


def unknown_field(message):
    message.thunk_sequence.thunks[0].MergeFromString(b"\xc2\x3e\x01z")


def lost_code(message):
    del message.object_files[:]


def reversed_thunks(message):
    thunks = [type(t).FromString(t.SerializeToString()) for t in message.thunk_sequence.thunks]
    del message.thunk_sequence.thunks[:]
    message.thunk_sequence.thunks.extend(reversed(thunks))


def other_name(message):
    for thunk in message.thunk_sequence.thunks:
        thunk.info.op_name = "other"


@pytest.mark.parametrize(
    "edit, says",
    [
        (unknown_thunk, "unknown thunk None"),
        (unsupported_thunk, "unknown thunk xnn_fusion_thunk"),
        (out_of_bounds, "bytes \\[1099511627776"),
        (unknown_allocation, "no such allocation"),
        (no_resource, "names thunk 999"),
        (two_arenas, "arenas of temporaries"),
        (unknown_field, "fields that its schema does not know"),
        (lost_code, "lost its code"),
        (reversed_thunks, "nothing has written"),
        (other_name, "matches 0 buffers"),
    ],
)
def test_what_is_not_understood_is_named(edit, says):
    with pytest.raises(NotUnderstood, match=says):
        plan(change("training_step", edit))


# --- with the planner core ---


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_the_core_reaches_its_lower_bound(name):
    """Order and addresses are proved optimal together; values with holes included (`loops`, `branches`)."""
    compiled = programs.compiled(name)
    result = replan(compiled, serialized=programs.serialized(name), seconds=8.0, min_temporary_bytes=1, tolerance=0.0)
    programs.require_planned(result.plan)
    assert result.plan.temporary_after <= 1.01 * result.plan.lower_bound or name == "library_calls"  # one of its loops has a wide gap
    want = programs.bits(compiled(*programs.arguments(name)))
    assert programs.bits(result.compiled(*programs.arguments(name))) == want
