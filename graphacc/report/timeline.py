"""The timeline of a pipeline: what every stage did when, in a real run, below the schedule's ideal; and that of an update on the host."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from torch import nn

from graphacc.errors import LoopError, StrategyError
from graphacc.loop.module import engine_of
from graphacc.loop.pipelined import PipelinePrograms
from graphacc.report.png import Canvas, text_width
from graphacc.report.update_timeline import UpdateTimeline, update_timeline
from graphacc.strategy.schedules import Costs, Part, Schedule, simulate

WIDTH, ROW, GAP, MARGIN, LABEL = 1400, 26, 4, 16, 90
COLOURS = {"F": (120, 170, 225), "B": (150, 205, 130), "W": (240, 190, 110)}
_DARKER = 0.75  # of a colour, for every other chunk of a stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """One action of one stage."""

    stage: int
    part: str  # "F", "B" or "W"
    microbatch: int
    chunk: int
    start: float  # seconds, or units of cost
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """The bars of a run and of its ideal, and what they say."""

    schedule: str
    measured: tuple[Bar, ...]
    ideal: tuple[Bar, ...]  # the schedule with the mean times of the measured actions
    measured_bubble: float  # share of the stages' time between the first start and the last end in which they did nothing
    ideal_bubble: float


def timeline(model: nn.Module, path: str | os.PathLike | None = None) -> Timeline | UpdateTimeline:
    """Draw the pipeline's last recorded run, and above it the schedule as it would be if every action took its mean time.

    The first three runs of every program's forward and backward are recorded; they run as all others do, but are waited for.
    Without a pipeline, but with ``offload="optimizer"``: the last step's program, the arrival of its gradients on the host, and their update.

    Args:
        model: compiled with ``pp`` of at least 2, or with ``offload``, and trained for a step.
        path: of the PNG file to write; None writes none.

    Returns:
        The bars as data.

    Raises:
        StrategyError: the model has no pipeline, and no update on the host.
        LoopError: nothing has run yet.
    """
    programs = engine_of(model).programs
    if not isinstance(programs, PipelinePrograms) and programs.offload is not None:
        if not programs.offload.spans:
            raise LoopError("no update on the host is done yet: do a training step first (two, if it is delayed), then draw its timeline")
        return update_timeline(programs.offload, path)
    if not isinstance(programs, PipelinePrograms):
        raise StrategyError(f"strategy {str(programs.strategy)!r} has no pipeline to draw: set pp to at least 2, or offload='optimizer' for the update on the host")
    if not programs.spans:
        raise LoopError("the pipeline has not run yet: do a training step first, then draw its timeline")
    measured = tuple(
        Bar(
            stage=s.task.program.stage,
            part=s.task.program.part,
            microbatch=s.task.microbatch,
            chunk=s.task.program.index,
            start=s.start,
            end=s.end,
        )
        for s in programs.spans
    )
    ideal = _ideal(programs.schedule, measured)
    stages = programs.schedule.num_stages
    found = Timeline(
        schedule=programs.schedule.name,
        measured=measured,
        ideal=ideal,
        measured_bubble=_bubble(measured, stages),
        ideal_bubble=_bubble(ideal, stages),
    )
    if path is not None:
        _draw(found, stages).save(path)
    return found


def _ideal(schedule: Schedule, measured: Sequence[Bar]) -> tuple[Bar, ...]:
    times = _mean_times(measured)
    backward = times.get("B", 0.0)
    costs = Costs(
        forward=times["F"],
        backward=backward,
        weights=times.get("W", 0.0) if schedule.splits_backward else 0.0,
    )
    spans = simulate(schedule, costs).spans
    return tuple(
        Bar(stage=schedule.stage_of(a.chunk), part=a.part.value, microbatch=a.microbatch, chunk=a.chunk, start=start, end=end)
        for a, (start, end) in spans.items()
        if a.part is Part.FORWARD or end > start
    )


def _mean_times(bars: Sequence[Bar]) -> Mapping[str, float]:
    parts: dict[str, list[float]] = {}
    for bar in bars:
        parts.setdefault(bar.part, []).append(bar.end - bar.start)
    return {part: sum(times) / len(times) for part, times in parts.items()}


def _bubble(bars: Sequence[Bar], num_stages: int) -> float:
    span = max(bar.end for bar in bars) - min(bar.start for bar in bars)
    return 1 - sum(bar.end - bar.start for bar in bars) / (span * num_stages) if span else 0.0


def _draw(found: Timeline, num_stages: int) -> Canvas:
    """Two panels to one scale: the ideal above, the measured run below."""
    panel = 2 * MARGIN + num_stages * (ROW + GAP)
    canvas = Canvas(WIDTH, 2 * panel + MARGIN)
    begins = [min(bar.start for bar in bars) for bars in (found.ideal, found.measured)]
    length = max(max(bar.end for bar in bars) - begin for bars, begin in zip((found.ideal, found.measured), begins))
    titles = (
        f"{found.schedule} ideal, bubble {found.ideal_bubble:.1%}",
        f"measured, bubble {found.measured_bubble:.1%}, {1e3 * length:.2f} ms",
    )
    for i, (bars, title, begin) in enumerate(zip((found.ideal, found.measured), titles, begins)):
        top = i * panel + MARGIN
        canvas.text(MARGIN, top - 4, title)
        _draw_panel(canvas, bars, num_stages, top + MARGIN, (WIDTH - LABEL - MARGIN) / length, begin)
    return canvas


def _draw_panel(canvas: Canvas, bars: Sequence[Bar], num_stages: int, top: int, pixels: float, begin: float) -> None:
    """One row per stage; `pixels` are those of one unit of time."""
    for stage in range(num_stages):
        y = top + stage * (ROW + GAP)
        canvas.text(MARGIN, y + ROW // 2 - 5, f"stage {stage}")
        canvas.rectangle(LABEL, y, WIDTH - MARGIN, y + ROW, (240, 240, 240))
    for bar in bars:
        y, colour = top + bar.stage * (ROW + GAP), COLOURS[bar.part]
        if (bar.chunk // num_stages) % 2:
            colour = tuple(int(_DARKER * value) for value in colour)
        left, right = LABEL + (bar.start - begin) * pixels, LABEL + (bar.end - begin) * pixels
        canvas.rectangle(left, y, right, y + ROW, tuple(int(0.6 * value) for value in colour))
        canvas.rectangle(left + 1, y + 1, max(right - 1, left + 1), y + ROW - 1, colour)
        label = f"{bar.part}{bar.microbatch}"
        if right - left > text_width(label):
            canvas.text(left + 3, y + ROW // 2 - 5, label)
