"""Compile a function and plan its memory, or find both done in the compile cache.

An entry of the cache is the planned executable in JAX's own format, with the plan's figures in front: JAX loads it like any
other, so a warm start neither compiles nor plans. It is written when the planned executable has been proved and loaded.
"""

import functools
import time
from collections.abc import Mapping, Sequence

import jax

from graphacc._compat import jax_ as compat
from graphacc.runtime.compile_cache import CompileCache, PlannedStore
from graphacc.runtime.replan.api import Candidate, ReplanResult, replan_best
from graphacc.runtime.replan.figures import FORMAT, MemoryPlan

CPU_SCHEDULES = ("MEMORY_OPTIMIZED", "DEFAULT")
SCHEDULER_OPTION = "xla_cpu_scheduler_type"
SCHEDULE_PREFIX = "CPU_SCHEDULER_TYPE_"

CompilerOptions = Mapping[str, str | bool | int | float]


def compile_and_replan(
    lowered: jax.stages.Lowered,
    *,
    compiler_options: CompilerOptions | None = None,
    schedules: Sequence[str] = CPU_SCHEDULES,
    cache: CompileCache | None = None,
    seconds: float = 5.0,
    **options,
) -> ReplanResult:
    """Compile with those of XLA:CPU's schedules that the budget allows, plan each, and keep the lowest.

    XLA:CPU's default schedule is made for concurrency; its memory-optimised one is mostly, not always, the better start.

    Args:
        lowered: from ``jax.jit(...).lower(...)``.
        compiler_options: for every compilation; a scheduler named here is replaced by those of `schedules`.
        schedules: values of ``xla_cpu_scheduler_type`` without their prefix, the most promising first.
        cache: where planned programs are kept between processes.
        seconds: budget for planning, and for compiling again.
        **options: of `replan_best`.
    """
    store = PlannedStore(cache, f"planned {FORMAT} {seconds} {' '.join(schedules)}")
    compile = functools.partial(_compile, lowered, compiler_options or {})
    first = compile(schedules[0], store)
    found = None if store.note is None else _plan_of(first.compiled, store.note)
    if found is not None:
        return ReplanResult(compiled=first.compiled, serialized=None, plan=found)
    others = [functools.partial(compile, schedule, PlannedStore(None, "")) for schedule in schedules[1:]]
    best = replan_best(first, others, seconds=seconds, **options)
    if store.entry is not None and best.serialized is not None:
        store.keep(compat.with_cached_executable(store.entry, best.serialized), best.plan.to_json())
    return best


def _compile(lowered: jax.stages.Lowered, compiler_options: CompilerOptions, schedule: str, store: PlannedStore) -> Candidate:
    """One compilation, with the bytes that JAX writes to a cache."""
    start = time.monotonic()
    with compat.persistent_cache(store):
        compiled = lowered.compile(compiler_options={**compiler_options, SCHEDULER_OPTION: SCHEDULE_PREFIX + schedule})
    return Candidate(
        compiled=compiled,
        schedule=schedule,
        seconds=time.monotonic() - start,
        serialized=None if store.entry is None else compat.cached_executable(store.entry),
    )


def _plan_of(compiled: jax.stages.Compiled, note: str) -> MemoryPlan | None:
    """The plan that came from the cache; None where it is not that of the program that JAX loaded, or compiled after all."""
    try:
        plan = MemoryPlan.from_json(note)
    except (ValueError, KeyError, TypeError):
        return None
    return plan if compiled.memory_analysis().temp_size_in_bytes == plan.temporary_after else None
