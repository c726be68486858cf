"""The timeline of an update on the host (`Strategy.offload`): the program, the arrival of its gradients, and the update beside them."""

import dataclasses
import os

from graphacc.loop.offload import Offload
from graphacc.report.png import Canvas

_WIDTH, _ROW, _GAP, _MARGIN, _LABEL = 1400, 26, 6, 16, 110
_COLOURS = {"program": (120, 170, 225), "gradients": (240, 190, 110), "update": (150, 205, 130)}
_TICK = 2  # pixels of an arrival


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateBar:
    """The program, the arrival of gradients on the host (of no length), or the optimizer's work on those that had arrived."""

    part: str  # "program", "gradients" or "update"
    start: float  # seconds since the step was asked for
    end: float
    size_bytes: int = 0  # of gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateTimeline:
    """One step whose update the host did."""

    bars: tuple[UpdateBar, ...]
    update_seconds: float  # what the optimizer took
    tail_seconds: float | None  # what was left to do when the program had ended; None: the update was delayed, beside the next step's program

    @property
    def hidden_share(self) -> float | None:
        """Share of the optimizer's time that the program hid."""
        if self.tail_seconds is None or not self.update_seconds:
            return None
        return 1 - min(self.tail_seconds / self.update_seconds, 1.0)


def update_timeline(offload: Offload, path: str | os.PathLike | None) -> UpdateTimeline:
    """The last update, drawn to a PNG file if `path` names one."""
    span = offload.spans[-1]
    bars = [] if span.program_end is None else [UpdateBar(part="program", start=0.0, end=span.program_end - span.start)]
    bars += [UpdateBar(part="gradients", start=seconds - span.start, end=seconds - span.start, size_bytes=size) for seconds, size in span.arrivals]
    bars += [UpdateBar(part="update", start=start - span.start, end=end - span.start) for start, end in span.updates]
    found = UpdateTimeline(bars=tuple(bars), update_seconds=span.update_seconds, tail_seconds=span.tail_seconds)
    if path is not None:
        _draw(found, span.end - span.start).save(path)
    return found


def _draw(found: UpdateTimeline, seconds: float) -> Canvas:
    canvas = Canvas(_WIDTH, 3 * _MARGIN + len(_COLOURS) * (_ROW + _GAP))
    tail = "delayed" if found.tail_seconds is None else f"{1e3 * found.tail_seconds:.1f} ms behind the program"
    canvas.text(_MARGIN, _MARGIN - 4, f"{1e3 * seconds:.1f} ms, update {1e3 * found.update_seconds:.1f} ms, {tail}")
    pixels = (_WIDTH - _LABEL - _MARGIN) / seconds
    for row, (part, colour) in enumerate(_COLOURS.items()):
        y = 2 * _MARGIN + row * (_ROW + _GAP)
        canvas.text(_MARGIN, y + _ROW // 2 - 5, part)
        canvas.rectangle(_LABEL, y, _WIDTH - _MARGIN, y + _ROW, (240, 240, 240))
        for bar in found.bars:
            if bar.part == part:
                left = _LABEL + bar.start * pixels
                canvas.rectangle(left, y, max(_LABEL + bar.end * pixels, left + _TICK), y + _ROW, colour)
    return canvas
