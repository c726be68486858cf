"""Pictures of plain pixels with a few characters of text, written as PNG without another library."""

import os
import pathlib
import struct
import zlib

import numpy as np

Colour = tuple[int, int, int]

_FONT = {
    "0": "111101101101111", "1": "010110010010111", "2": "111001111100111", "3": "111001111001111", "4": "101101111001001",
    "5": "111100111001111", "6": "111100111101111", "7": "111001001010010", "8": "111101111101111", "9": "111101111001111",
    "a": "000111001111111", "b": "100100111101111", "c": "000000111100111", "d": "001001111101111", "e": "111101111100111",
    "f": "011100111100100", "g": "111101111001111", "h": "100100111101101", "i": "010000010010010", "j": "001000001101111",
    "k": "100101110101101", "l": "110010010010111", "m": "000111111101101", "n": "000000111101101", "o": "000000111101111",
    "p": "111101111100100", "q": "111101111001001", "r": "000000111100100", "s": "011100111001110", "t": "010111010010011",
    "u": "000000101101111", "v": "000101101101010", "w": "000101101111111", "x": "000101010010101", "y": "101101111001111",
    "z": "000111010100111", "%": "101001010100101", ".": "000000000000010", ",": "000000000010100", "-": "000000111000000",
    ":": "000010000010000", "=": "000111000111000", " ": "000000000000000",
}  # fmt: skip
"""Five rows of three pixels per character, row by row."""


class Canvas:
    """An image that is drawn with rectangles and text; (0, 0) is the upper left corner."""

    def __init__(self, width: int, height: int, background: Colour = (255, 255, 255)):
        self.pixels = np.full((height, width, 3), background, np.uint8)  # [rows, columns, RGB]

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """Fill a rectangle, at least one pixel wide and high."""
        x, y = round(left), round(top)
        self.pixels[y : max(round(bottom), y + 1), x : max(round(right), x + 1)] = colour

    def text(self, left: float, top: float, text: str, colour: Colour = (0, 0, 0), scale: int = 2) -> None:
        """Write lower-case text; characters without a glyph leave a gap."""
        x, y = round(left), round(top)
        for character in text.lower():
            bits = np.array([int(bit) for bit in _FONT.get(character, _FONT[" "])]).reshape(5, 3)
            mask = np.kron(bits, np.ones((scale, scale), int)).astype(bool)
            area = self.pixels[y : y + 5 * scale, x : x + 3 * scale]
            area[mask[: area.shape[0], : area.shape[1]]] = colour
            x += 4 * scale

    def save(self, path: str | os.PathLike) -> None:
        """Write the image as PNG."""
        height, width, _ = self.pixels.shape
        raw = b"".join(b"\0" + row.tobytes() for row in self.pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw)) + _chunk(b"IEND", b"")
        pathlib.Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def text_width(text: str, scale: int = 2) -> int:
    """Pixels that a text takes."""
    return 4 * scale * len(text)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
