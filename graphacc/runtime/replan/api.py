"""`replan`: memory planning of a compiled function, with XLA's own plan wherever ours is not certain."""

import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Sequence

import jax

from graphacc._compat import jax_ as compat
from graphacc.runtime.replan.errors import NotUnderstood, VerificationError
from graphacc.runtime.replan.figures import MemoryPlan
from graphacc.runtime.replan.planner import PlannedBytes, Solvers, plan_bytes

MIN_TEMPORARY_BYTES = 1 << 20  # a smaller arena is not worth a plan
TOLERANCE = 0.01  # nor is one that is above its lower bound by this share at most

_logger = logging.getLogger("graphacc.replan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplanResult:
    """A compiled function with the best memory plan that is proved right."""

    compiled: jax.stages.Compiled  # to run: a planned copy, or what was given
    serialized: bytes | None  # its bytes, where they are known: a loaded executable cannot be serialised again
    plan: MemoryPlan
    entry: str | None = None  # key of the compile cache's entry that holds it; None: it is not kept
    module: bytes | None = None  # of a function that was loaded without the bodies of kernels, see `loading.whole_module`


def replan(
    compiled: jax.stages.Compiled,
    *,
    seconds: float = 5.0,
    threads: int = 1,
    solvers: Solvers | None = None,
    serialized: bytes | None = None,
    min_temporary_bytes: int = MIN_TEMPORARY_BYTES,
    tolerance: float = TOLERANCE,
    free_collectives: bool = False,
) -> ReplanResult:
    """Plan the temporaries of a compiled function again: order of operations and addresses.

    Results stay bit for bit the same: every rewrite is proved before it is loaded. Works on XLA:CPU and XLA:CUDA, on one device or
    many (donated inputs, `shard_map`, collectives); planned CUDA programs are proved, but none has run on a GPU yet. Anything that
    is not fully understood keeps XLA's plan, and is logged once.

    Args:
        compiled: from ``jax.jit(...).lower(...).compile()`` in this process, not yet run (jaxlib 0.10.2 cannot serialise a sort
            that has run).
        seconds: budget of the solvers.
        threads: for the solvers.
        solvers: another planner core than `graphacc.passes.memory`.
        serialized: the bytes of `compiled`, where they are at hand. Needed where it was loaded from them: jaxlib loses the code
            of a loaded executable when it serialises it again.
        min_temporary_bytes: arenas below this keep XLA's plan.
        tolerance: and those that are above the lower bound by at most this share of it.
        free_collectives: collectives need not keep XLA's order, as all devices run this executable (see `plan_bytes`).

    Returns:
        The function to run, and the figures.
    """
    start = time.monotonic()
    library = compat.library_of(compiled) if compat.can_replace_executable(compiled) else None
    before = 0 if library is None else compiled.memory_analysis().temp_size_in_bytes
    kept = functools.partial(_kept, compiled, serialized, before, start)
    reason = _reason_to_keep(compiled, library, before, min_temporary_bytes)
    if reason:
        return kept(reason, log=False)
    try:
        planned = plan_bytes(
            serialized or compat.serialize(compiled),
            library=library,
            solvers=solvers or _core_solvers(threads),
            seconds=seconds,
            tolerance=tolerance,
            free_collectives=free_collectives,
        )
        if planned.serialized is None:
            figures = dict(lower_bound=planned.lower_bound, map_before=planned.map_before)
            return kept(_no_better(planned, tolerance), log=False, **figures)
        replaced = compat.with_executable(compiled, _load(planned, compiled))
    except (NotUnderstood, VerificationError) as error:
        return kept(str(error), log=True)
    except Exception as error:  # a mistake of ours, or jaxlib refuses to load: training goes on with XLA's plan
        _logger.debug("planning failed", exc_info=True)
        return kept(f"{type(error).__name__}: {error}", log=True)
    plan = MemoryPlan(
        changed=True,
        reason="",
        temporary_before=planned.temporary_before,
        temporary_after=planned.temporary_after,
        lower_bound=planned.lower_bound,
        seconds=time.monotonic() - start,
        map_before=planned.map_before,
        map_after=planned.map_after,
    )
    return ReplanResult(compiled=replaced, serialized=planned.serialized, plan=plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One compilation of a function, out of several that compute the same."""

    compiled: jax.stages.Compiled
    schedule: str  # XLA's schedule that it was compiled with
    seconds: float = 0.0  # that compiling took
    serialized: bytes | None = None  # its bytes, where they are at hand


def replan_best(
    first: Candidate,
    others: Sequence[Callable[[], Candidate]] = (),
    *,
    seconds: float = 5.0,
    min_temporary_bytes: int = MIN_TEMPORARY_BYTES,
    **options,
) -> ReplanResult:
    """Plan several compilations of one function, and keep the lowest.

    The first is planned in any case. Another one is made as long as the budget covers what the first took, compilation and
    planning: on training steps the second of XLA:CPU's schedules gains at most 2 %, and rarely.

    Args:
        first: its temporaries are reported as `temporary_before`.
        others: compile the function with XLA's other schedules.
        seconds: budget for the solvers and for the compilations of `others`.
        min_temporary_bytes: see `replan`. Where the first has less, there are no others.
        **options: of `replan`.
    """
    start = time.monotonic()
    options["min_temporary_bytes"] = min_temporary_bytes
    results = [_replan_candidate(first, seconds, options)]
    before = results[0].plan.temporary_before
    estimate = first.seconds + results[0].plan.seconds
    for compile in others if before >= min_temporary_bytes else ():
        if time.monotonic() - start + estimate > seconds:
            break
        candidate = compile()
        results.append(_replan_candidate(candidate, seconds - (time.monotonic() - start), options))
    best = min(results, key=lambda result: result.plan.temporary_after)
    plan = dataclasses.replace(best.plan, temporary_before=before, seconds=time.monotonic() - start)
    return dataclasses.replace(best, plan=plan)


def _replan_candidate(candidate: Candidate, seconds: float, options: dict) -> ReplanResult:
    found = replan(candidate.compiled, serialized=candidate.serialized, seconds=max(0.0, seconds), **options)
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, schedule=candidate.schedule))


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


def _reason_to_keep(
    compiled: jax.stages.Compiled, library: pathlib.Path | None, before: int, min_temporary_bytes: int
) -> str:
    if not compat.can_replace_executable(compiled):
        return "the function was not compiled in this process"
    if library is None:
        return f"planning of executables for {compat.platform(compiled)} is not supported"
    if compat.has_host_callbacks(compiled):
        return "the program calls back into Python, and cannot be loaded from bytes"
    if before < min_temporary_bytes:
        return f"its {before} bytes of temporaries are below {min_temporary_bytes}"
    return ""


def _no_better(planned: PlannedBytes, tolerance: float) -> str:
    if planned.temporary_before <= planned.lower_bound:
        return "it is optimal"
    if planned.temporary_before <= (1 + tolerance) * planned.lower_bound:
        return f"it is within {tolerance:.0%} of the lower bound"
    return "no lower plan was found"


def _kept(
    compiled: jax.stages.Compiled, serialized: bytes | None, before: int, start: float, reason: str, *, log: bool, **found
) -> ReplanResult:
    if log:
        _log_once(reason)
    fields = {"lower_bound": 0, "temporary_before": before, "temporary_after": before, **found}
    plan = MemoryPlan(changed=False, reason=reason, seconds=time.monotonic() - start, **fields)
    return ReplanResult(compiled=compiled, serialized=serialized, plan=plan)


@functools.cache
def _log_once(reason: str) -> None:
    _logger.warning("XLA's memory plan is kept: %s", reason)
