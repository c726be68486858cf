"""Pictures of address plans: live bytes over time, and below it the address map (time to the right, address upwards).

A PNG of plain pixels, or a self-contained HTML page with an SVG per plan that names the buffer under the pointer.
"""

import html
import pathlib
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from graphacc.errors import PlanError
from graphacc.passes.memory.problem import AddressProblem

WIDTH, LIVE_HEIGHT, MAP_HEIGHT, MARGIN = 1200, 160, 600, 12
BACKGROUND, LIVE_COLOUR, BOUND_COLOUR = (255, 255, 255), (120, 150, 190), (200, 40, 40)


def save_picture(path: str | pathlib.Path, problem: AddressProblem, plans: Mapping[str, Sequence[int]]) -> None:
    """Draw plans of one problem below each other, to one scale.

    Args:
        path: ends in .png or .html.
        problem: what was planned.
        plans: title -> offsets in bytes.

    Raises:
        PlanError: the path has another ending.
    """
    writers = {".png": _png, ".html": _html}
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in writers:
        raise PlanError(f"picture {str(path)!r}: the name must end in {' or '.join(writers)}")
    pathlib.Path(path).write_bytes(writers[suffix](_Scale(problem, plans), problem, plans))


class _Scale:
    """From time and bytes to pixels."""

    def __init__(self, problem: AddressProblem, plans: Mapping[str, Sequence[int]]):
        buffers = problem.buffers
        self.start = min((b.lower for b in buffers), default=0)
        self.end = max((b.upper for b in buffers), default=1)
        ends = (offset + b.size for offsets in plans.values() for b, offset in zip(buffers, offsets, strict=True))
        self.height = max(ends, default=1)
        self.times = sorted({t for b in buffers for t in (b.lower, b.upper)})
        change = dict.fromkeys(self.times, 0)
        for b in buffers:
            change[b.lower] += b.size
            change[b.upper] -= b.size
        self.live = np.cumsum([change[t] for t in self.times]).tolist()  # from each time to the next

    def x(self, time: int) -> float:
        return (time - self.start) * WIDTH / (self.end - self.start)

    def y(self, size: int, panel: int) -> float:
        """Pixels above the panel's lower edge."""
        return size * panel / self.height


def _colour(index: int) -> tuple[int, int, int]:
    hashed = (index * 2654435761) & 0xFFFFFFFF
    return 70 + hashed % 150, 70 + (hashed >> 8) % 150, 70 + (hashed >> 16) % 150


def _png(scale: _Scale, problem: AddressProblem, plans: Mapping[str, Sequence[int]]) -> bytes:
    panels = [_live_pixels(scale)] + [_map_pixels(scale, problem, offsets) for offsets in plans.values()]
    rows = []
    for panel in panels:
        rows += [panel, np.full((MARGIN, WIDTH, 3), BACKGROUND, np.uint8)]
    image = np.concatenate(rows)
    raw = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _live_pixels(scale: _Scale) -> np.ndarray:
    image = np.full((LIVE_HEIGHT, WIDTH, 3), BACKGROUND, np.uint8)
    for left, right, live in zip(scale.times, scale.times[1:], scale.live, strict=False):
        _fill(image, scale.x(left), scale.x(right), 0, scale.y(live, LIVE_HEIGHT), LIVE_COLOUR)
    _fill(image, 0, WIDTH, scale.y(max(scale.live, default=0), LIVE_HEIGHT) - 1, 0, BOUND_COLOUR)
    return image


def _map_pixels(scale: _Scale, problem: AddressProblem, offsets: Sequence[int]) -> np.ndarray:
    image = np.full((MAP_HEIGHT, WIDTH, 3), BACKGROUND, np.uint8)
    for i, (b, offset) in enumerate(zip(problem.buffers, offsets, strict=True)):
        low, high = scale.y(offset, MAP_HEIGHT), scale.y(offset + b.size, MAP_HEIGHT)
        _fill(image, scale.x(b.lower), scale.x(b.upper), low, high, _colour(i))
    return image


def _fill(image: np.ndarray, left: float, right: float, low: float, high: float, colour: tuple[int, int, int]) -> None:
    """Fill a rectangle, given from the lower edge of the image; it is at least one pixel wide and high."""
    bottom = image.shape[0] - int(low)
    top = min(image.shape[0] - round(high), bottom - 1)
    image[max(top, 0) : bottom, int(left) : max(round(right), int(left) + 1)] = colour


def _html(scale: _Scale, problem: AddressProblem, plans: Mapping[str, Sequence[int]]) -> bytes:
    sections = [f"<h2>live bytes, at most {max(scale.live, default=0):,}</h2>", _svg(LIVE_HEIGHT, _live_shapes(scale))]
    for title, offsets in plans.items():
        height = max((o + b.size for b, o in zip(problem.buffers, offsets, strict=True)), default=0)
        sections.append(f"<h2>{html.escape(title)}: {height:,} bytes</h2>")
        sections.append(_svg(MAP_HEIGHT, _map_shapes(scale, problem, offsets)))
    style = "body{font:14px sans-serif;margin:24px}svg{border:1px solid #ccc}rect:hover{stroke:#000}"
    page = f"<!doctype html><meta charset='utf-8'><title>Memory plan</title><style>{style}</style>" + "\n".join(sections)
    return page.encode()


def _svg(height: int, shapes: list[str]) -> str:
    return f"<svg width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>" + "".join(shapes) + "</svg>"


def _live_shapes(scale: _Scale) -> list[str]:
    return [
        _rect(scale.x(left), scale.x(right), 0, scale.y(live, LIVE_HEIGHT), LIVE_HEIGHT, LIVE_COLOUR, f"{live:,} bytes at {left}")
        for left, right, live in zip(scale.times, scale.times[1:], scale.live, strict=False)
    ]


def _map_shapes(scale: _Scale, problem: AddressProblem, offsets: Sequence[int]) -> list[str]:
    shapes = []
    for i, (b, offset) in enumerate(zip(problem.buffers, offsets, strict=True)):
        low, high = scale.y(offset, MAP_HEIGHT), scale.y(offset + b.size, MAP_HEIGHT)
        text = f"{b.name}: [{offset:,}, {offset + b.size:,}) bytes, lives in [{b.lower}, {b.upper})"
        shapes.append(_rect(scale.x(b.lower), scale.x(b.upper), low, high, MAP_HEIGHT, _colour(i), text))
    return shapes


def _rect(left: float, right: float, low: float, high: float, panel: int, colour: tuple[int, int, int], text: str) -> str:
    place = f"x='{left:.2f}' y='{panel - high:.2f}' width='{right - left:.2f}' height='{high - low:.2f}'"
    return f"<rect {place} fill='rgb{colour}'><title>{html.escape(text)}</title></rect>"
