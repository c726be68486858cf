"""Random instances of static addresses in the families of MiniMalloc's: 1024 x 1024 KiB of time and addresses, cut into buffers.

150 to 460 buffers, of which on average 12 to 36 live together (as in the eight of them that we have: 154 to 454, and 12 to 36).
Every instance fits its capacity, because it was cut out of it; nothing of that cutting is left in it.
"""

import random

from graphacc.passes.memory.problem import AddressProblem, LiveBuffer

GRID, UNIT = 1024, 1024
CAPACITY = GRID * UNIT
Piece = tuple[int, int, int, int]  # first time, last time (exclusive), first address, last address (exclusive)

FAMILIES = {
    "mixed": "pieces of any size and no waste, cut straight through",
    "pinwheel": "the same with a third of the cuts as pinwheels, which no straight cuts take apart",
    "holes": "mixed, and up to a tenth of the pieces left out: the load varies, and is the whole capacity in places",
    "even": "pieces of about the same size, a quarter of them left out",
    "slack": "pinwheel under a capacity that is 0.9 % above what was cut",
}


def generate(family: str, seed: int) -> AddressProblem:
    """The instance of a family with this seed.

    Raises:
        ValueError: there is no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    rng = random.Random(f"{family} {seed}")
    height = GRID - 9 if family == "slack" else GRID
    pieces: list[Piece] = [(0, GRID, 0, height)]
    num_buffers, num_live = rng.randint(150, 460), rng.uniform(12, 36)
    while len(pieces) < num_buffers:
        live = sum(right - left for left, right, _, _ in pieces) / GRID
        stacked = 0.8 if live < num_live * (len(pieces) / num_buffers) ** 0.5 else 0.2
        piece = max(pieces, key=_area) if family == "even" else rng.choices(pieces, [_area(p) ** 0.4 for p in pieces])[0]
        pieces.remove(piece)
        pieces += _cut(piece, rng, 1 / 3 if family in ("pinwheel", "slack") else 0.0, stacked, 0.3 if family == "even" else 0.02)
    rng.shuffle(pieces)
    left_out = {"holes": rng.uniform(0.02, 0.1), "even": 0.25}.get(family, 0.0)
    pieces = pieces[: round(len(pieces) * (1 - left_out))]
    buffers = (LiveBuffer(name=str(i), lower=p[0] * UNIT, upper=p[1] * UNIT, size=(p[3] - p[2]) * UNIT) for i, p in enumerate(pieces))
    return AddressProblem(buffers=tuple(buffers), capacity=CAPACITY)


def _area(piece: Piece) -> int:
    return (piece[1] - piece[0]) * (piece[3] - piece[2])


def _cut(piece: Piece, rng: random.Random, pinwheels: float, stacked: float, margin: float) -> list[Piece]:
    """Two pieces, or the five of a pinwheel.

    Args:
        pinwheels: the share of pinwheels.
        stacked: of the other cuts, the share that makes two buffers that live together.
        margin: the least share of a side that a cut leaves.
    """
    left, right, low, high = piece
    width, height = right - left, high - low
    if width < 4 and height < 4:
        return [piece]
    if min(width, height) >= 12 and rng.random() < pinwheels:
        a, b = sorted(rng.sample(range(left + 1, right), 2))
        c, d = sorted(rng.sample(range(low + 1, high), 2))
        return [(left, b, low, c), (b, right, low, d), (a, right, d, high), (left, a, c, high), (a, b, c, d)]
    if width < 4 or (height >= 4 and rng.random() < stacked):
        at = low + min(max(1, round(height * rng.uniform(margin, 1 - margin))), height - 1)
        return [(left, right, low, at), (left, right, at, high)]
    at = left + min(max(1, round(width * rng.uniform(margin, 1 - margin))), width - 1)
    return [(left, at, low, high), (at, right, low, high)]
