"""Compile a function and plan its memory, or find both done in the compile cache.

An entry of the cache is the planned executable in JAX's own format, with the plan's figures in front: JAX loads it like any
other, so a warm start neither compiles nor plans. It is written when the planned executable has been proved and loaded.

Several processes that run one program plan it each for itself, and exchange nothing. Their plans may differ, and one of them may keep
XLA's, for failed planning or for time, or find its plan in its cache. For what one process computes does not depend on
the others' order of operations or addresses, but on the order of the collectives alone: Gloo's carry no tags, so a collective meets
those in the same place of the other processes' orders. This order is one for all:

- Equal programs get equal schedules: two processes were given the same thunks at the same addresses, byte for byte, by XLA (jaxlib
  0.10.2, CPU; their object code differs). So all start from the first of `schedules`, and try no other.
- A plan keeps the order of the collectives (`precedence`), which is proved of its bytes (`verify`).

In one process all devices run one executable, so that a plan may choose the order of the collectives as well: XLA's schedule puts many scatters of
gradients to the end, and whole gradients wait for them (under fsdp=8 with rematerialisation half of all temporaries).

At run time the collectives of one sequence of thunks wait for each other, as they share a communicator. In an executable that is
loaded from bytes every nested sequence has one of its own (XLA's ``ThunkSequenceSerDesProtobuf::FromProto``), so that a device may
come to a collective behind a loop before those in it: devices wait for each other for ever, or add up what does not belong together.
So a CPU program whose loops or branches hold collectives keeps the executable that XLA compiled, and goes into no cache.
"""

import contextlib
import dataclasses
import functools
import logging
import re
import time
from collections.abc import Mapping, Sequence

import jax

from graphacc._compat import jax_ as compat
from graphacc.runtime import progress
from graphacc.runtime.compile_cache import CompileCache, PlannedStore
from graphacc.runtime.replan.api import Candidate, ReplanResult, replan_best
from graphacc.runtime.replan.figures import FORMAT, MemoryPlan
from graphacc.runtime.replan.loading import quick_to_load, whole_module

log = logging.getLogger("graphacc")

CPU_SCHEDULES = ("MEMORY_OPTIMIZED", "DEFAULT")
SCHEDULER_OPTION = "xla_cpu_scheduler_type"
SCHEDULE_PREFIX = "CPU_SCHEDULER_TYPE_"

CompilerOptions = Mapping[str, str | bool | int | float]

_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)(-start)?\(")


def compile_and_replan(
    lowered: jax.stages.Lowered,
    *,
    compiler_options: CompilerOptions | None = None,
    schedules: Sequence[str] = CPU_SCHEDULES,
    shared: bool = False,
    cache: CompileCache | None = None,
    seconds: float = 5.0,
    **options,
) -> ReplanResult:
    """Compile with those of XLA:CPU's schedules that the budget allows, plan each, and keep the lowest.

    XLA:CPU's default schedule is made for concurrency; its memory-optimised one is mostly, not always, the better start.

    Args:
        lowered: from ``jax.jit(...).lower(...)``.
        compiler_options: for every compilation; a scheduler named here is replaced by those of `schedules`.
        schedules: values of ``xla_cpu_scheduler_type`` without their prefix, the most promising first; an empty one asks for none.
        shared: the program runs on devices of several processes, which all call this with the same: the first schedule alone is
            used, and collectives keep its order.
        cache: where planned programs are kept between processes.
        seconds: budget for planning, and for compiling again.
        **options: of `replan_best`.
    """
    schedules = schedules[:1] if shared else schedules
    store = PlannedStore(cache, f"planned {FORMAT} {seconds} {' '.join(schedules)}{' shared' * shared}")
    compile = functools.partial(_compile, lowered, compiler_options or {})
    first = compile(schedules[0], store)
    found = None if store.note is None else plan_of(first.compiled.memory_analysis().temp_size_in_bytes, store.note)
    module = None if store.entry is None else whole_module(compat.cached_executable(store.entry))
    if found is not None:
        return ReplanResult(compiled=first.compiled, serialized=None, plan=found, entry=store.key, module=module)
    if _loses_order(first.compiled):
        return _as_compiled(first, "its loops or branches hold collectives, whose order is lost where a program is loaded from bytes")
    others = [functools.partial(compile, schedule, PlannedStore(None, "")) for schedule in schedules[1:]]
    with progress.activity("plan of memory"):
        best = replan_best(first, others, seconds=seconds, free_collectives=not shared, **options)
    if cache is not None and best.serialized is not None:
        store.keep(compat.cache_entry(best.serialized, first.seconds), best.plan.to_json())
        best = dataclasses.replace(best, entry=store.key)
    if best.plan.changed and best.serialized is not None:
        module = whole_module(best.serialized)
    return dataclasses.replace(best, module=module)


def compile_cached(
    lowered: jax.stages.Lowered, compiler_options: CompilerOptions, cache: CompileCache | None
) -> tuple[jax.stages.Compiled, bool, str | None, bytes | None]:
    """Compile with XLA's plan, or find that in the cache.

    Returns:
        The program, whether it was found, the key of its entry in the cache (None: it is not kept), and its module where that is not the executable's (see `ReplanResult`).
    """
    store, start = PlannedStore(cache, "compiled"), time.monotonic()
    with compat.persistent_cache(store) if cache is not None else contextlib.nullcontext():
        compiled = lowered.compile(compiler_options=dict(compiler_options))
    seconds = time.monotonic() - start
    if store.entry is not None:
        return compiled, True, store.key, whole_module(compat.cached_executable(store.entry))
    serialized = None if cache is None or _loses_order(compiled) else _bytes_of(compiled)
    if serialized is None:
        return compiled, False, None, None
    store.keep(compat.cache_entry(serialized, seconds), "")
    return compiled, False, store.key, None


def _loses_order(compiled: jax.stages.Compiled) -> bool:
    """Whether collectives would lose their order if the program were loaded from bytes: see above."""
    several = compat.platform(compiled) == "cpu" and compat.num_devices(compiled) > 1
    return several and has_nested_collectives(compiled.as_text())


def has_nested_collectives(hlo: str) -> bool:
    """Whether a computation other than the entry holds a collective, in the text of an optimised HLO module."""
    nested, _, _ = hlo.partition("\nENTRY ")
    return _COLLECTIVE.search(nested) is not None


def _compile(lowered: jax.stages.Lowered, compiler_options: CompilerOptions, schedule: str, store: PlannedStore) -> Candidate:
    """One compilation, with its bytes unless it was loaded from some."""
    start = time.monotonic()
    options = {**compiler_options, SCHEDULER_OPTION: SCHEDULE_PREFIX + schedule} if schedule else compiler_options
    with compat.persistent_cache(store), progress.activity("compile"):
        compiled = lowered.compile(compiler_options=dict(options))
    seconds = time.monotonic() - start
    serialized = _bytes_of(compiled) if store.note is None else None
    return Candidate(compiled=compiled, schedule=schedule, seconds=seconds, serialized=serialized)


def _bytes_of(compiled: jax.stages.Compiled) -> bytes | None:
    """A compiled function's bytes, to be loaded from; None where XLA cannot serialise it. `replan` then tries again, and says why it does not plan."""
    try:
        serialized, library = None if compat.has_host_callbacks(compiled) else compat.serialize(compiled), compat.library_of(compiled)
        if serialized is None or library is None or not compat.can_read_modules():
            return serialized
        return quick_to_load(serialized, library)
    except jax.errors.JaxRuntimeError as error:
        log.info("graphacc: a program is not kept in the compile cache: %s", error)
        return None


def _as_compiled(candidate: Candidate, reason: str) -> ReplanResult:
    """XLA's executable and plan, without looking at them."""
    size = candidate.compiled.memory_analysis().temp_size_in_bytes
    figures = dict(temporary_before=size, temporary_after=size, lower_bound=0, seconds=0.0, schedule=candidate.schedule)
    return ReplanResult(compiled=candidate.compiled, serialized=None, plan=MemoryPlan(changed=False, reason=reason, **figures))


def plan_of(temp_bytes: int, note: str) -> MemoryPlan | None:
    """The plan that came from the cache; None where it is not that of the program that JAX loaded, or compiled after all, which has so many bytes of temporaries."""
    try:
        plan = MemoryPlan.from_json(note)
    except (ValueError, KeyError, TypeError):
        return None
    return plan if temp_bytes == plan.temporary_after else None
