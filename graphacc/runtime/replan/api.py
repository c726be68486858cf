"""`replan`: memory planning of a compiled function, with XLA's own plan wherever ours is not certain."""

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence

import jax

from graphacc._compat import jax_ as compat
from graphacc.runtime.replan.cache import PlanCache
from graphacc.runtime.replan.errors import NotUnderstood, VerificationError
from graphacc.runtime.replan.planner import PlannedBytes, Solvers, plan_bytes

MIN_TEMPORARY_BYTES = 1 << 20  # a smaller arena is not worth a plan
CPU_SCHEDULES = ("DEFAULT", "MEMORY_OPTIMIZED")

_logger = logging.getLogger("graphacc.replan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplanResult:
    """A compiled function with the best memory plan that is proved right."""

    compiled: jax.stages.Compiled  # to run: a planned copy, or what was given
    changed: bool  # whether it is a planned copy
    reason: str  # why XLA's plan was kept; empty where it was not
    temporary_before: int  # bytes of XLA's arena of temporaries
    temporary_after: int
    lower_bound: int  # bytes; no plan that keeps these thunks' dependencies and in-place updates needs less. 0: unknown
    seconds: float  # from reading to loading
    schedule: str = ""  # XLA's schedule that the plan starts from, where several were tried
    serialized: bytes | None = None  # the planned executable: a loaded one cannot be serialised again

    @property
    def is_optimal(self) -> bool:
        """Whether the bound proves that nothing better exists."""
        return bool(self.lower_bound) and self.temporary_after <= self.lower_bound

    def summary(self) -> str:
        """One line for the user."""
        mb = 1e6
        line = f"temporary memory {self.temporary_before / mb:.1f} -> {self.temporary_after / mb:.1f} MB"
        if self.lower_bound:
            line += f" (lower bound {self.lower_bound / mb:.1f} MB)"
        line += f" in {self.seconds:.1f} s"
        return line if self.changed else f"{line}; XLA's plan kept: {self.reason}"


def replan(
    compiled: jax.stages.Compiled,
    *,
    seconds: float = 5.0,
    threads: int = 1,
    solvers: Solvers | None = None,
    cache: PlanCache | None = None,
    serialized: bytes | None = None,
    min_temporary_bytes: int = MIN_TEMPORARY_BYTES,
) -> ReplanResult:
    """Plan the temporaries of a compiled function again: order of operations and addresses.

    Results stay bit for bit the same: every rewrite is proved before it is loaded. Works on XLA:CPU, on one device or many
    (donated inputs, `shard_map`, collectives). Anything that is not fully understood keeps XLA's plan, and is logged once.

    Args:
        compiled: from ``jax.jit(...).lower(...).compile()`` in this process, not yet run (jaxlib 0.10.2 cannot serialise a sort
            that has run).
        seconds: budget of the solvers.
        threads: for the solvers.
        solvers: another planner core than `graphacc.passes.memory`.
        cache: where plans are kept between processes.
        serialized: the bytes of `compiled`, where they are at hand. Needed where it was loaded from them: jaxlib loses the code
            of a loaded executable when it serialises it again.
        min_temporary_bytes: arenas below this keep XLA's plan.

    Returns:
        The function to run, and the figures.
    """
    start = time.monotonic()
    before = compiled.memory_analysis().temp_size_in_bytes if _is_cpu(compiled) else 0
    kept = functools.partial(_kept, compiled, before, start)
    reason = _reason_to_keep(compiled, before, min_temporary_bytes)
    if reason:
        return kept(reason, log=False)
    try:
        planned = _plan(serialized or compat.serialize(compiled), seconds, solvers or _core_solvers(threads), cache)
        if planned.serialized is None:
            return dataclasses.replace(kept("no lower plan was found", log=False), lower_bound=planned.lower_bound)
        executable = _load(planned, compiled)
    except (NotUnderstood, VerificationError) as error:
        return kept(str(error), log=True)
    except Exception as error:  # a mistake of ours, or jaxlib refuses to load: training goes on with XLA's plan
        _logger.debug("planning failed", exc_info=True)
        return kept(f"{type(error).__name__}: {error}", log=True)
    return ReplanResult(
        compiled=compat.with_executable(compiled, executable),
        changed=True,
        reason="",
        temporary_before=planned.temporary_before,
        temporary_after=planned.temporary_after,
        lower_bound=planned.lower_bound,
        seconds=time.monotonic() - start,
        serialized=planned.serialized,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One compilation of a function, out of several that compute the same."""

    compiled: jax.stages.Compiled
    schedule: str  # XLA's schedule that it was compiled with
    serialized: bytes | None = None  # what it was loaded from, if it came from a cache


def replan_best(candidates: Sequence[Candidate], *, seconds: float = 5.0, **options) -> ReplanResult:
    """Plan several compilations of one function, and keep the lowest.

    Args:
        candidates: the first is the one whose temporaries are reported as `temporary_before`.
        seconds: budget of the solvers, for all candidates together.
        **options: of `replan`.
    """
    start = time.monotonic()
    results = [
        dataclasses.replace(
            replan(c.compiled, seconds=seconds / len(candidates), serialized=c.serialized, **options), schedule=c.schedule
        )
        for c in candidates
    ]
    best = min(results, key=lambda result: result.temporary_after)
    before = results[0].temporary_before
    return dataclasses.replace(best, temporary_before=before, seconds=time.monotonic() - start)


def compile_and_replan(
    lowered: jax.stages.Lowered,
    *,
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
    schedules: Sequence[str] = CPU_SCHEDULES,
    min_temporary_bytes: int = MIN_TEMPORARY_BYTES,
    **options,
) -> ReplanResult:
    """Compile with those of XLA:CPU's schedules that may help, plan each, and keep the lowest.

    XLA:CPU's default schedule is made for concurrency; its memory-optimised one is often, not always, the better start.

    Args:
        lowered: from ``jax.jit(...).lower(...)``.
        compiler_options: for every compilation; a scheduler named here is replaced by those of `schedules`.
        schedules: values of ``xla_cpu_scheduler_type`` without their prefix. Only the first is compiled where its temporaries
            are below `min_temporary_bytes`.
        min_temporary_bytes: see `replan`.
        **options: of `replan_best`.
    """
    start = time.monotonic()
    candidates = []
    for schedule in schedules:
        chosen = {**(compiler_options or {}), "xla_cpu_scheduler_type": f"CPU_SCHEDULER_TYPE_{schedule}"}
        compiled = lowered.compile(compiler_options=chosen)
        candidates.append(Candidate(compiled=compiled, schedule=schedule))
        if not _is_cpu(compiled) or compiled.memory_analysis().temp_size_in_bytes < min_temporary_bytes:
            break
    best = replan_best(candidates, min_temporary_bytes=min_temporary_bytes, **options)
    return dataclasses.replace(best, seconds=time.monotonic() - start)


def _plan(serialized: bytes, seconds: float, solvers: Solvers, cache: PlanCache | None) -> PlannedBytes:
    options = f"seconds={seconds}"
    found = cache.load(serialized, options) if cache else None
    if found is None:
        found = plan_bytes(serialized, library=compat.xla_library(), solvers=solvers, seconds=seconds)
        if cache:
            cache.store(serialized, options, found)
    return found


def _load(planned: PlannedBytes, compiled: jax.stages.Compiled):
    """Load the planned executable; XLA must see the arena that was planned."""
    executable = compat.load_executable(planned.serialized, compiled)
    reported = executable.get_compiled_memory_stats().temp_size_in_bytes
    if reported != planned.temporary_after:
        raise NotUnderstood(f"XLA reports {reported} bytes of temporaries for a plan of {planned.temporary_after}")
    return executable


def _core_solvers(threads: int) -> Solvers:
    from graphacc.runtime.replan.solvers import core_solvers  # OR-Tools is loaded when a plan is made, not before

    return core_solvers(threads)


def _is_cpu(compiled: jax.stages.Compiled) -> bool:
    return compat.can_replace_executable(compiled) and compat.platform(compiled) == "cpu"


def _reason_to_keep(compiled: jax.stages.Compiled, before: int, min_temporary_bytes: int) -> str:
    if not compat.can_replace_executable(compiled):
        return "the function was not compiled in this process"
    if not _is_cpu(compiled):
        return f"planning of executables for {compat.platform(compiled)} is not supported"
    if compat.has_host_callbacks(compiled):
        return "the program calls back into Python, and cannot be loaded from bytes"
    if before < min_temporary_bytes:
        return f"its {before} bytes of temporaries are below {min_temporary_bytes}"
    return ""


def _kept(compiled: jax.stages.Compiled, before: int, start: float, reason: str, *, log: bool) -> ReplanResult:
    if log:
        _log_once(reason)
    return ReplanResult(
        compiled=compiled,
        changed=False,
        reason=reason,
        temporary_before=before,
        temporary_after=before,
        lower_bound=0,
        seconds=time.monotonic() - start,
    )


@functools.cache
def _log_once(reason: str) -> None:
    _logger.warning("XLA's memory plan is kept: %s", reason)
