import logging
import random

import jax
import jax.numpy as jnp
import pytest

import programs
from greedy import SOLVERS
from graphacc._compat import jax_ as compat
from graphacc.errors import GraphAccError
from graphacc.runtime.replan import (
    Candidate,
    NotUnderstood,
    PlanCache,
    VerificationError,
    api,
    compile_and_replan,
    replan,
    replan_best,
)
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.ordering import SequenceOrder
from graphacc.runtime.replan.planner import Solvers, plan_bytes
from graphacc.runtime.replan.schema import read_schema

OPTIONS = dict(seconds=1.0, solvers=SOLVERS, min_temporary_bytes=1)


@pytest.fixture(autouse=True)
def _log_afresh():
    api._log_once.cache_clear()


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_planned_programs_give_the_same_bits(name):
    compiled = programs.compiled(name)
    result = replan(compiled, serialized=programs.serialized(name), **OPTIONS)
    assert result.changed, result.reason
    assert result.lower_bound <= result.temporary_after < result.temporary_before
    assert result.temporary_after == result.compiled.memory_analysis().temp_size_in_bytes
    assert result.temporary_before == compiled.memory_analysis().temp_size_in_bytes
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
    planned = replan(programs.compiled("training_step"), **OPTIONS).compiled
    for _ in range(2):
        result = replan(planned, **OPTIONS)
        assert not result.changed and result.compiled is planned
        assert "lost its code" in result.reason
    assert [r.name for r in caplog.records] == ["graphacc.replan"]  # once


def test_the_planned_bytes_load_again_with_the_bytes_that_a_program_was_loaded_from():
    compiled = programs.compiled("branches")
    serialized = compat.serialize(compiled)
    loaded = compat.with_executable(compiled, compat.load_executable(serialized, compiled))
    result = replan(loaded, serialized=serialized, **OPTIONS)
    assert result.changed
    want = programs.bits(compiled(*programs.arguments("branches")))
    assert programs.bits(result.compiled(*programs.arguments("branches"))) == want


class Store(dict):
    """JAX's persistent compilation cache, in memory."""

    _path = "memory"

    def put(self, key, value):
        self[key] = value


def test_programs_from_the_compile_cache_are_planned_from_its_bytes():
    store = Store()
    jitted, arguments = programs.PROGRAMS["branches"]()
    for _ in range(2):
        with compat.persistent_cache(store):
            compiled = jitted.lower(*arguments).compile()
        jax.clear_caches()
    (entry,) = store.values()
    assert "lost its code" in replan(compiled, **OPTIONS).reason
    result = replan(compiled, serialized=compat.cached_executable(entry), **OPTIONS)
    assert result.changed
    want = programs.bits(compiled(*programs.arguments("branches")))
    assert programs.bits(result.compiled(*programs.arguments("branches"))) == want


def test_a_sort_that_has_run_keeps_the_plan(caplog):
    jitted, arguments = programs.PROGRAMS["library_calls"]()
    compiled = jitted.lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    result = replan(compiled, **OPTIONS)
    assert not result.changed and "not serializable" in result.reason
    assert replan(compiled, serialized=programs.serialized("library_calls"), **OPTIONS).changed


def test_small_programs_keep_their_plan_silently(caplog):
    result = replan(programs.compiled("training_step"), seconds=1.0, solvers=SOLVERS)
    assert not result.changed and "below 1048576" in result.reason and not caplog.records


def test_host_callbacks_keep_the_plan():
    def function(x):
        jax.debug.callback(lambda y: None, x.sum())
        return jnp.tanh(x @ x) @ x

    compiled = jax.jit(function).lower(jnp.ones((64, 64))).compile()
    assert "calls back into Python" in replan(compiled, **OPTIONS).reason


def test_a_plan_that_is_no_better_keeps_the_plan():
    compiled = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(jnp.ones((64, 64))).compile()
    result = replan(compiled, **OPTIONS)
    assert not result.changed and result.reason == "no lower plan was found" and result.compiled is compiled
    assert 0 < result.lower_bound <= result.temporary_after == result.temporary_before


def test_an_illegal_order_keeps_the_plan(caplog):
    def backwards(problem, seconds):
        return SequenceOrder(order=tuple(reversed(range(len(problem.operators)))), peak=0, lower_bound=0)

    solvers = Solvers(order=backwards, addresses=SOLVERS.addresses)
    result = replan(programs.compiled("training_step"), seconds=1.0, solvers=solvers, min_temporary_bytes=1)
    assert not result.changed and "breaks a dependency" in result.reason
    assert "breaks a dependency" in caplog.text


def test_a_failing_solver_keeps_the_plan(caplog):
    def fails(problem, seconds):
        raise KeyError("a mistake")

    caplog.set_level(logging.DEBUG, logger="graphacc.replan")
    solvers = Solvers(order=fails, addresses=SOLVERS.addresses)
    result = replan(programs.compiled("training_step"), seconds=1.0, solvers=solvers, min_temporary_bytes=1)
    assert not result.changed and "KeyError" in result.reason
    assert any(record.exc_info for record in caplog.records)


def test_overlapping_addresses_from_the_solver_are_compacted_away():
    """The solver's offsets only rank the values: a wrong answer costs memory, never correctness."""
    solvers = Solvers(order=SOLVERS.order, addresses=lambda problem, seconds: (0,) * len(problem.buffers))
    result = replan(programs.compiled("loops"), seconds=1.0, solvers=solvers, min_temporary_bytes=1)
    want = programs.bits(programs.compiled("loops")(*programs.arguments("loops")))
    assert programs.bits(result.compiled(*programs.arguments("loops"))) == want


# --- several schedules ---


def test_the_lowest_of_several_schedules_is_kept():
    jitted, arguments = programs.PROGRAMS["training_step"]()
    lowered = jitted.lower(*arguments)
    result = compile_and_replan(lowered, **OPTIONS)
    default = replan(lowered.compile(), **OPTIONS)
    assert result.schedule in ("DEFAULT", "MEMORY_OPTIMIZED")
    assert result.temporary_after <= default.temporary_after
    assert result.temporary_before == default.temporary_before
    want = programs.bits(lowered.compile()(*arguments))
    assert programs.bits(result.compiled(*programs.arguments("training_step"))) == want


def test_candidates_report_against_the_first():
    low, high = programs.compiled("branches"), programs.compiled("training_step")
    result = replan_best([Candidate(compiled=high, schedule="a"), Candidate(compiled=low, schedule="b")], **OPTIONS)
    assert result.schedule == "b"
    assert result.temporary_before == high.memory_analysis().temp_size_in_bytes


# --- the cache ---


def test_plans_are_kept_between_calls(tmp_path):
    cache = PlanCache(tmp_path / "plans")
    compiled = programs.compiled("training_step")
    first = replan(compiled, cache=cache, **OPTIONS)
    (entry,) = cache.folder.iterdir()

    def never(problem, seconds):
        raise AssertionError("planned although the cache has it")

    second = replan(compiled, seconds=1.0, solvers=Solvers(order=never, addresses=never), cache=cache, min_temporary_bytes=1)
    assert second.serialized == first.serialized and second.lower_bound == first.lower_bound
    assert list(cache.folder.iterdir()) == [entry]


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:20], lambda d: b"", lambda d: d[:500] + b"x" + d[501:]])
def test_damaged_entries_are_planned_again(tmp_path, damage):
    cache = PlanCache(tmp_path)
    compiled = programs.compiled("training_step")
    first = replan(compiled, cache=cache, **OPTIONS)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert replan(compiled, cache=cache, **OPTIONS).serialized == first.serialized
    assert replan(compiled, cache=cache, **OPTIONS).changed


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
    result = replan(compiled, serialized=programs.serialized(name), seconds=8.0, min_temporary_bytes=1)
    assert result.changed, result.reason
    assert result.temporary_after <= 1.01 * result.lower_bound or name == "library_calls"  # one of its loops has a wide gap
    want = programs.bits(compiled(*programs.arguments(name)))
    assert programs.bits(result.compiled(*programs.arguments(name))) == want
