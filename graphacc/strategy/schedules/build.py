"""The schedules: GPipe, 1F1B, interleaved 1F1B and ZB-H1.

- ``gpipe``: all forwards, then all backwards (Huang et al., arXiv 1811.06965, section 2.3). Bubble (p-1)/(m+p-1); all m
  microbatches are live.
- ``1f1b``: after a warm-up, forward and backward alternate (Narayanan et al., PipeDream-2BW, arXiv 2006.09503; "1F1B" in
  Megatron-LM, arXiv 2104.04473, section 2.2.1). The same bubble; at most p - s microbatches are live on stage s.
- ``interleaved``: 1F1B over v chunks per stage (arXiv 2104.04473, section 2.2.2). The bubble's time is divided by v; there are
  more transfers.
- ``zb-h1``: 1F1B whose backward is split; the gradients of weights fill the bubble (Qi et al., "Zero Bubble Pipeline
  Parallelism", arXiv 2401.10241, section 2). With equal costs the bubble's time is a third; no stage holds more than p
  microbatches.
"""

from collections.abc import Callable, Iterator

from graphacc.errors import StrategyError
from graphacc.strategy.schedules.schedule import Action, Part, Schedule

F, B, W = Part.FORWARD, Part.BACKWARD, Part.WEIGHTS


def build_schedule(name: str, num_stages: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name` for a number of stages and microbatches.

    Args:
        name: one of `SCHEDULES`.
        chunks: chunks of the model per stage; more than one only for ``interleaved``.

    Raises:
        StrategyError: the name is unknown, or the numbers do not fit the schedule.
    """
    check_schedule(name, num_stages, num_microbatches, chunks)
    order = SCHEDULES[name]
    return Schedule(
        name=name,
        num_chunks=num_stages * chunks,
        num_microbatches=num_microbatches,
        stages=tuple(tuple(order(stage, num_stages, num_microbatches, chunks)) for stage in range(num_stages)),
        splits_backward=name == "zb-h1",
    )


def check_schedule(name: str, num_stages: int, num_microbatches: int, chunks: int = 1) -> None:
    """Check what `build_schedule` is given; arguments and errors are its own."""
    if name not in SCHEDULES:
        raise StrategyError(f"schedule={name!r} is unknown: choose one of {', '.join(SCHEDULES)}")
    if num_microbatches < num_stages:
        raise StrategyError(
            f"pp={num_stages} needs at least as many microbatches as stages to keep them busy, got "
            f"microbatches={num_microbatches}: set microbatches={num_stages} or more (each is a part of "
            "the batch), or use fewer stages"
        )
    if name == "interleaved" and num_microbatches % num_stages:
        raise StrategyError(
            f"schedule='interleaved' deals microbatches out in rounds of pp={num_stages}, which does not divide "
            f"microbatches={num_microbatches}: set microbatches to a multiple of {num_stages}, or schedule='1f1b'"
        )
    if name == "interleaved" and chunks < 2:
        raise StrategyError(
            "schedule='interleaved' needs several chunks of the model per stage: set chunks=2 or more, or schedule='1f1b'"
        )
    if name != "interleaved" and chunks != 1:
        raise StrategyError(
            f"chunks={chunks} is for schedule='interleaved' alone, the schedule is {name!r}: "
            "set schedule='interleaved' or chunks=1"
        )


def _gpipe(stage: int, num_stages: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    yield from (Action(F, i, stage) for i in range(num_microbatches))
    yield from (Action(B, i, stage) for i in range(num_microbatches))


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    warm_up = num_stages - 1 - stage
    yield from (Action(F, i, stage) for i in range(warm_up))
    for i in range(num_microbatches):
        if i + warm_up < num_microbatches:
            yield Action(F, i + warm_up, stage)
        yield Action(B, i, stage)


def _interleaved(stage: int, num_stages: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    """Microbatches go in rounds of `num_stages`: a round passes the stage's first chunk, then its second, and so on."""
    total = num_microbatches * chunks

    def action(part: Part, step: int) -> Action:
        turn, place = divmod(step, num_stages)
        turn, local = divmod(turn, chunks)
        local = local if part is F else chunks - 1 - local
        return Action(part, turn * num_stages + place, local * num_stages + stage)

    warm_up = min(2 * (num_stages - 1 - stage) + (chunks - 1) * num_stages, total)
    yield from (action(F, i) for i in range(warm_up))
    for i in range(total):
        if i + warm_up < total:
            yield action(F, i + warm_up)
        yield action(B, i)


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    """1F1B, whose W actions lag `stage` microbatches behind, so that every stage holds the same number."""
    lag = stage
    warm_up = num_stages - 1 - stage
    yield from (Action(F, i, stage) for i in range(warm_up))
    for i in range(num_microbatches):
        if i + warm_up < num_microbatches:
            yield Action(F, i + warm_up, stage)
        yield Action(B, i, stage)
        if i >= lag:
            yield Action(W, i - lag, stage)
    yield from (Action(W, i, stage) for i in range(max(num_microbatches - lag, 0), num_microbatches))


SCHEDULES: dict[str, Callable[..., Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
}
"""Name -> the actions of one stage, given (stage, num_stages, num_microbatches, chunks)."""
