"""Compiling and planning together, and the cache that keeps both."""

import json

import jax
import programs
import pytest
from greedy import SOLVERS

from graphacc._compat import jax_ as compat
from graphacc.runtime import compile_cache
from graphacc.runtime.compile_cache import CompileCache
from graphacc.runtime.replan import compile_and_replan, replan
from graphacc.runtime.replan.compiling import compile_cached, has_nested_collectives
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.figures import MemoryPlan
from graphacc.runtime.replan.planner import Solvers, plan_bytes

OPTIONS = dict(seconds=60.0, solvers=SOLVERS, min_temporary_bytes=1, tolerance=0.0)


def never(problem, seconds):
    raise AssertionError("planned although the cache has it")


def build(name: str, folder, **options):
    """As a new process would: nothing is left of earlier compilations but the folder."""
    jax.clear_caches()
    jitted, arguments = programs.PROGRAMS[name]()
    return compile_and_replan(jitted.lower(*arguments), cache=CompileCache(folder), **{**OPTIONS, **options})


def bits(name: str, compiled) -> list[bytes]:
    return programs.bits(compiled(*programs.arguments(name)))


def test_the_lowest_of_several_schedules_is_kept():
    jitted, arguments = programs.PROGRAMS["training_step"]()
    lowered = jitted.lower(*arguments)
    result = compile_and_replan(lowered, **OPTIONS)
    schedules = ("MEMORY_OPTIMIZED", "DEFAULT")
    alone = {schedule: compile_and_replan(lowered, schedules=[schedule], **OPTIONS) for schedule in schedules}
    lowest = min(schedules, key=lambda schedule: alone[schedule].plan.temporary_after)
    assert result.plan.schedule == lowest
    assert result.plan.temporary_after == alone[lowest].plan.temporary_after
    assert result.plan.temporary_before == alone["MEMORY_OPTIMIZED"].plan.temporary_before
    assert bits("training_step", result.compiled) == bits("training_step", lowered.compile())


@pytest.mark.parametrize("name", ["training_step", "collectives", "library_calls"])
@pytest.mark.default_cases("training_step")
def test_a_planned_program_comes_from_the_cache_as_it_was(name, tmp_path):
    first = build(name, tmp_path)
    programs.require_planned(first.plan)
    assert not first.plan.from_cache
    want = [bits(name, first.compiled) for _ in range(3)]
    second = build(name, tmp_path, solvers=Solvers(order=never, addresses=never))
    assert second.plan.from_cache and second.plan.changed
    assert second.plan.temporary_after == first.plan.temporary_after == second.compiled.memory_analysis().temp_size_in_bytes
    assert second.plan.map_after == first.plan.map_after and second.plan.map_before == first.plan.map_before
    assert [bits(name, second.compiled) for _ in range(3)] == want
    assert len(list(tmp_path.iterdir())) == 1


def test_a_program_that_keeps_its_plan_comes_from_the_cache_too(tmp_path):
    first = build("branches", tmp_path, min_temporary_bytes=1 << 30)
    second = build("branches", tmp_path, solvers=Solvers(order=never, addresses=never))
    assert second.plan.from_cache and not second.plan.changed and second.plan.reason == first.plan.reason
    assert bits("branches", second.compiled) == bits("branches", first.compiled)


@pytest.mark.parametrize("note", ["", "{}", '{"format": 1}', '{"format": 1, "temporary_after": 3}', "[1]"])
@pytest.mark.default_cases('{"format": 1}', '{"format": 1, "temporary_after": 3}', "[1]")
def test_a_note_of_another_program_is_not_believed(note, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(MemoryPlan, "to_json", lambda plan: note)
        first = build("training_step", tmp_path)
    again = build("training_step", tmp_path)
    assert not again.plan.from_cache and again.plan.temporary_before == again.plan.temporary_after == first.plan.temporary_after


def test_another_budget_is_another_entry(tmp_path):
    build("training_step", tmp_path)
    assert not build("training_step", tmp_path, seconds=1.0).plan.from_cache


def test_a_program_of_several_processes_has_one_schedule_and_an_entry_of_its_own(tmp_path):
    build("training_step", tmp_path, schedules=["MEMORY_OPTIMIZED"])
    first, second = (build("training_step", tmp_path, shared=True, schedules=["MEMORY_OPTIMIZED", "no such one"]) for _ in range(2))
    assert first.plan.changed and first.plan.schedule == "MEMORY_OPTIMIZED"
    assert (first.plan.from_cache, second.plan.from_cache) == (False, True)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.default_cases("True-False", "False-True")
def test_collectives_in_loops_stay_as_xla_compiled_them(inside, shared, tmp_path):
    """Loaded from bytes they would lose their order: a random program with a sum in a scan and a scatter behind it hung."""
    function, arguments = programs.loop_over_devices(inside)
    found = compile_and_replan(function.lower(*arguments), shared=shared, cache=CompileCache(tmp_path / "planned"), **OPTIONS)
    assert has_nested_collectives(found.compiled.as_text()) is inside
    assert found.plan.changed is not inside and ("its loops or branches hold collectives" in found.plan.reason) is inside
    assert found.plan.temporary_after == found.compiled.memory_analysis().temp_size_in_bytes
    jax.clear_caches()
    compile_cached(function.lower(*arguments), {}, CompileCache(tmp_path / "compiled"))
    assert [len(list((tmp_path / name).glob("*"))) for name in ("planned", "compiled")] == ([0, 0] if inside else [1, 1])


def test_collectives_in_loops_are_refused_by_the_reader():
    function, arguments = programs.loop_over_devices(True)
    serialized = compat.serialize(function.lower(*arguments).compile())
    with pytest.raises(NotUnderstood, match="holds collectives, whose order is lost"):
        plan_bytes(serialized, library=compat.xla_library(), solvers=SOLVERS, seconds=0.2)


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:20], lambda d: b"", lambda d: d[:500] + b"x" + d[501:]])
@pytest.mark.default_cases("<lambda>3", "<lambda>1")
def test_damaged_entries_are_compiled_and_planned_again(damage, tmp_path):
    first = build("training_step", tmp_path)
    programs.require_planned(first.plan)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    again = build("training_step", tmp_path)
    assert again.plan.changed and not again.plan.from_cache
    assert again.plan.temporary_after == first.plan.temporary_after
    assert build("training_step", tmp_path).plan.from_cache


def break_executable(path) -> None:
    """Of an entry whose checksum and note are right, the executable is half of one."""
    note, _, entry = compile_cache._unpack(path.read_bytes()).partition(b"\n")
    executable = compat.cached_executable(entry)
    path.write_bytes(compile_cache._pack(note + b"\n" + compat.cache_entry(executable[: len(executable) // 2], 0.0)))


def test_an_entry_that_jax_cannot_load_is_compiled_and_planned_again(tmp_path):
    first = build("training_step", tmp_path)
    programs.require_planned(first.plan)
    break_executable(*tmp_path.iterdir())
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        again = build("training_step", tmp_path)
    assert again.plan.changed and not again.plan.from_cache
    assert bits("training_step", again.compiled) == bits("training_step", first.compiled)
    assert build("training_step", tmp_path).plan.from_cache


def test_an_entry_that_jax_cannot_load_is_compiled_again_with_xlas_plan(tmp_path):
    jitted, arguments = programs.PROGRAMS["training_step"]()

    def from_cache() -> bool:
        jax.clear_caches()
        return compile_cached(jitted.lower(*arguments), {}, CompileCache(tmp_path))[1]

    assert [from_cache(), from_cache()] == [False, True]
    break_executable(*tmp_path.iterdir())
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert not from_cache()
    assert from_cache()


def test_a_cache_of_jax_that_the_user_has_set_does_not_come_between(tmp_path):
    """A program that JAX loads from there has lost its code, and could not be planned."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    jitted, arguments = programs.PROGRAMS["branches"]()
    lowered = jitted.lower(*arguments)
    try:
        for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
            jax.config.update(name, value)
        for _ in range(2):
            assert compile_and_replan(lowered, **OPTIONS).plan.changed
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_plan_survives_json():
    plan = replan(programs.compiled("loops"), solvers=SOLVERS, min_temporary_bytes=1, tolerance=0.0).plan
    text = plan.to_json()
    assert "\n" not in text
    again = MemoryPlan.from_json(text)
    assert again.from_cache
    assert json.loads(again.to_json()) == json.loads(text) | {"from_cache": True}


def test_maps_say_where_every_value_lies():
    plan = replan(programs.compiled("loops"), solvers=SOLVERS, min_temporary_bytes=1, tolerance=0.0).plan
    for map, size in ((plan.map_before, plan.temporary_before), (plan.map_after, plan.temporary_after)):
        assert max(b.offset + b.size for b in map.buffers) <= size
        for i, a in enumerate(map.buffers):
            for b in map.buffers[:i]:
                apart_in_time = a.upper <= b.lower or b.upper <= a.lower
                assert apart_in_time or a.offset + a.size <= b.offset or b.offset + b.size <= a.offset, (a, b)


def test_the_summary_says_what_was_done():
    figures = dict(temporary_before=3_000_000, temporary_after=2_000_000, lower_bound=1_900_000, seconds=0.5)
    planned = MemoryPlan(changed=True, reason="", **figures)
    assert planned.summary() == "temporary memory 3.0 -> 2.0 MB (lower bound 1.9 MB), 0.5 s"
    kept = MemoryPlan(changed=False, reason="it is small", **figures | dict(temporary_after=3_000_000, lower_bound=0))
    assert kept.summary() == "temporary memory 3.0 MB, 0.5 s; XLA's plan kept: it is small"
    assert not planned.is_optimal and not kept.is_optimal
