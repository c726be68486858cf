"""Pictures of memory plans: live bytes over time, and the address map (time to the right, address upwards).

A PNG of plain pixels, or a self-contained HTML page that names the buffer under the pointer and lists what lives at the peak.
"""

import dataclasses
import html
import pathlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from graphacc.errors import PlanError
from graphacc.passes.memory.problem import AddressProblem, LiveBuffer

WIDTH, LIVE_HEIGHT, MAP_HEIGHT, MARGIN = 1200, 160, 600, 12
BACKGROUND, LIVE_COLOUR, BOUND_COLOUR = (255, 255, 255), (120, 150, 190), (200, 40, 40)
NUM_LISTED = 12  # largest buffers at the peak

Colour = tuple[int, int, int]


def save_picture(path: str | pathlib.Path, problem: AddressProblem, plans: Mapping[str, Sequence[int]]) -> None:
    """Draw plans of one problem below each other, to one scale.

    Args:
        path: ends in .png or .html.
        problem: what was planned.
        plans: title -> offsets in bytes.

    Raises:
        PlanError: the path has another ending.
    """
    placed = {title: _place(problem, offsets) for title, offsets in plans.items()}
    scale = _Scale([problem.buffers, *placed.values()])
    panels = [_live_panel(scale, "", problem.buffers, None)]
    panels += [_map_panel(scale, title, buffers) for title, buffers in placed.items()]
    _write(path, panels)


def save_plans(path: str | pathlib.Path, plans: Mapping[str, AddressProblem], *, lower_bound: int | None = None) -> None:
    """Draw plans of different orders below each other, to one scale: live bytes and address map of each.

    Args:
        path: ends in .png or .html.
        plans: title -> buffers that all have their offsets.
        lower_bound: bytes, drawn as a line over the live bytes.

    Raises:
        PlanError: the path has another ending.
    """
    scale = _Scale([plan.buffers for plan in plans.values()])
    panels = []
    for title, plan in plans.items():
        panels += [_live_panel(scale, f"{title}: ", plan.buffers, lower_bound), _map_panel(scale, title, plan.buffers)]
    _write(path, panels)


def _place(problem: AddressProblem, offsets: Sequence[int]) -> tuple[LiveBuffer, ...]:
    return tuple(dataclasses.replace(b, offset=offset) for b, offset in zip(problem.buffers, offsets, strict=True))


# --- panels: rectangles in pixels, from the lower left corner ---


@dataclasses.dataclass(frozen=True)
class _Rectangle:
    left: float
    right: float
    low: float
    high: float
    colour: Colour
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    height: int
    shapes: list[_Rectangle]
    rows: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)  # of the table below it


class _Scale:
    """From time and bytes to pixels."""

    def __init__(self, plans: Sequence[Sequence[LiveBuffer]]):
        buffers = [b for plan in plans for b in plan]
        self.start = min((b.lower for b in buffers), default=0)
        self.end = max((b.upper for b in buffers), default=1)
        self.height = max((_end(b) for b in buffers), default=1)

    def x(self, time: int) -> float:
        return (time - self.start) * WIDTH / (self.end - self.start)

    def y(self, size: int, panel: int) -> float:
        """Pixels above the panel's lower edge."""
        return size * panel / self.height


def _end(buffer: LiveBuffer) -> int:
    return (buffer.offset or 0) + buffer.size


def _live(buffers: Sequence[LiveBuffer]) -> list[tuple[int, int, int]]:
    """(from, until, bytes that live in between) for all stretches of time."""
    change: dict[int, int] = {}
    for b in buffers:
        change[b.lower] = change.get(b.lower, 0) + b.size
        change[b.upper] = change.get(b.upper, 0) - b.size
    times = sorted(change)
    live = np.cumsum([change[t] for t in times]).tolist()
    return list(zip(times, times[1:], live, strict=False))


def _live_panel(scale: _Scale, prefix: str, buffers: Sequence[LiveBuffer], lower_bound: int | None) -> _Panel:
    stretches = _live(buffers)
    time, _, peak = max(stretches, key=lambda stretch: stretch[2], default=(0, 0, 0))
    shapes = [
        _Rectangle(scale.x(left), scale.x(right), 0, scale.y(live, LIVE_HEIGHT), LIVE_COLOUR, f"{live:,} bytes at {left}")
        for left, right, live in stretches
    ]
    line = scale.y(peak if lower_bound is None else lower_bound, LIVE_HEIGHT)
    text = f"peak: {peak:,} bytes" if lower_bound is None else f"lower bound: {lower_bound:,} bytes"
    shapes.append(_Rectangle(0, WIDTH, line - 1, line, BOUND_COLOUR, text))
    largest = sorted((b for b in buffers if b.lower <= time < b.upper), key=lambda b: -b.size)[:NUM_LISTED]
    rows = [(b.name, f"{b.size:,}", f"[{b.lower}, {b.upper})") for b in largest]
    return _Panel(title=f"{prefix}live bytes, at most {peak:,}", height=LIVE_HEIGHT, shapes=shapes, rows=rows)


def _map_panel(scale: _Scale, title: str, buffers: Sequence[LiveBuffer]) -> _Panel:
    shapes = []
    for i, b in enumerate(buffers):
        low, high = scale.y(b.offset, MAP_HEIGHT), scale.y(_end(b), MAP_HEIGHT)
        text = f"{b.name}: [{b.offset:,}, {_end(b):,}) bytes, lives in [{b.lower}, {b.upper})"
        shapes.append(_Rectangle(scale.x(b.lower), scale.x(b.upper), low, high, _colour(i), text))
    height = max(map(_end, buffers), default=0)
    return _Panel(title=f"{title}: {height:,} bytes", height=MAP_HEIGHT, shapes=shapes)


def _colour(index: int) -> Colour:
    hashed = (index * 2654435761) & 0xFFFFFFFF
    return 70 + hashed % 150, 70 + (hashed >> 8) % 150, 70 + (hashed >> 16) % 150


# --- files ---


def _write(path: str | pathlib.Path, panels: Sequence[_Panel]) -> None:
    writers = {".png": _png, ".html": _html}
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in writers:
        raise PlanError(f"picture {str(path)!r}: the name must end in {' or '.join(writers)}")
    pathlib.Path(path).write_bytes(writers[suffix](panels))


def _png(panels: Sequence[_Panel]) -> bytes:
    rows = []
    for panel in panels:
        rows += [_pixels(panel), np.full((MARGIN, WIDTH, 3), BACKGROUND, np.uint8)]
    image = np.concatenate(rows)
    raw = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _pixels(panel: _Panel) -> np.ndarray:
    image = np.full((panel.height, WIDTH, 3), BACKGROUND, np.uint8)
    for shape in panel.shapes:
        _fill(image, shape)
    return image


def _fill(image: np.ndarray, shape: _Rectangle) -> None:
    """Fill a rectangle; it is at least one pixel wide and high."""
    bottom = image.shape[0] - max(int(shape.low), 0)
    top = min(image.shape[0] - round(shape.high), bottom - 1)
    image[max(top, 0) : bottom, int(shape.left) : max(round(shape.right), int(shape.left) + 1)] = shape.colour


def _html(panels: Sequence[_Panel]) -> bytes:
    sections = [line for panel in panels for line in _section(panel)]
    style = (
        "body{font:14px sans-serif;margin:24px}svg{border:1px solid #ccc}rect:hover{stroke:#000}"
        "td{padding:0 12px 0 0}td+td{text-align:right}"
    )
    page = f"<!doctype html><meta charset='utf-8'><title>Memory plan</title><style>{style}</style>" + "\n".join(sections)
    return page.encode()


def _section(panel: _Panel) -> Iterator[str]:
    yield f"<h2>{html.escape(panel.title)}</h2>"
    shapes = "".join(_rect(panel.height, shape) for shape in panel.shapes)
    yield f"<svg width='{WIDTH}' height='{panel.height}' viewBox='0 0 {WIDTH} {panel.height}'>{shapes}</svg>"
    if panel.rows:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in panel.rows)
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        yield f"<details><summary>the largest at the peak</summary><table>{table}</table></details>"


def _rect(panel: int, shape: _Rectangle) -> str:
    place = f"x='{shape.left:.2f}' y='{panel - shape.high:.2f}'"
    size = f"width='{shape.right - shape.left:.2f}' height='{shape.high - shape.low:.2f}'"
    return f"<rect {place} {size} fill='rgb{shape.colour}'><title>{html.escape(shape.text)}</title></rect>"
