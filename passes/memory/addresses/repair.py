"""Lowers a packing that is too large to search as a whole, in two ways. What succeeds is kept, so the height never grows.

- `reorder`: skylines under slightly changed tie orders.
- `repair`: a large-neighbourhood search. Items that end highest are freed together with items that live within a window of
  time around them, all others are kept as fixed obstacles, and a short search decides whether the freed ones fit lower.
"""

import concurrent.futures
import random
import time

import numpy as np

from graphacc.passes.memory.addresses import native
from graphacc.passes.memory.addresses.native import Outcome, StopFlag
from graphacc.passes.memory.addresses.orders import perturbed, static_orders
from graphacc.passes.memory.addresses.packing import Packing, pack_ranges

ORDER_SPREADS = (0.0003, 0.001, 0.003)
MAX_FREE = 300
MIN_FREE = 8
NODES_PER_TRY = 4_000
LONG_SHARE = 0.01  # of all sections: items that live longer are not freed with a window
WINDOW_SHARES = (0.0, 0.002, 0.01, 0.03, 0.1)
"""How far the window reaches beyond the highest item, as a share of all sections."""


def reorder(
    packing: Packing, order: np.ndarray, offsets: np.ndarray, *, target: int, deadline: float, threads: int, seed: int = 0
) -> np.ndarray:
    """Improve the offsets of a skyline, and the tie order that made them, until the target (bytes) or the deadline.

    Returns:
        New offsets, at most as high as the given ones.
    """
    rng = random.Random(seed)
    best, height = (order, offsets), packing.height(offsets)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        while height > target and time.monotonic() < deadline:
            orders = [perturbed(best[0], rng.choice(ORDER_SPREADS), rng) for _ in range(threads)]
            for candidate in zip(orders, pool.map(lambda o: native.skyline(packing, o), orders), strict=True):
                if packing.height(candidate[1]) <= height:
                    best, height = candidate, packing.height(candidate[1])
    return best[1]


def repair(packing: Packing, offsets: np.ndarray, *, target: int, deadline: float, seed: int = 0) -> np.ndarray:
    """Lower offsets until the arena has `target` bytes, or until the deadline (of time.monotonic()).

    Returns:
        New offsets, at most as high as the given ones.
    """
    rng = random.Random(seed)
    offsets = _sink_long_lived(packing, offsets, target)
    with native.stop_at(deadline) as stop:
        while packing.height(offsets) > target and not stop.is_set():
            ends = np.where(packing.fixed < 0, offsets + packing.size, 0)
            peak = int(ends.max())
            highest = int(rng.choice(np.flatnonzero(ends == peak)))
            excess = peak - target // packing.unit
            wanted = peak - max(1, int(excess * rng.choice((0.01, 0.1, 0.5, 1.0))))
            _lower(packing, offsets, _free(packing, offsets, highest, rng), wanted, rng, stop)
    return offsets


def _sink_long_lived(packing: Packing, offsets: np.ndarray, target: int) -> np.ndarray:
    """Long-lived items above the target go to the bottom, which lifts the others by their sizes at most."""
    is_long = packing.last - packing.first > LONG_SHARE * packing.num_sections
    sunk = is_long & ((offsets + packing.size) * packing.unit > target)
    settled = native.settle(packing, np.lexsort([offsets, ~sunk]))
    return min(settled, offsets.copy(), key=packing.height)


def _free(packing: Packing, offsets: np.ndarray, highest: int, rng: random.Random) -> np.ndarray:
    """The items to free around one: all or the topmost of those that live within a window around it."""
    reach = int(rng.choice(WINDOW_SHARES) * packing.num_sections)
    low, high = packing.first[highest] - reach, packing.last[highest] + reach
    inside = (packing.first >= low) & (packing.last <= high) & (packing.fixed < 0)
    inside[highest] = True
    candidates = np.flatnonzero(inside)
    count = rng.randint(MIN_FREE, MAX_FREE)
    if len(candidates) <= count:
        return candidates
    centre = (packing.first[highest] + packing.last[highest]) / 2
    distance = np.abs((packing.first[candidates] + packing.last[candidates]) / 2 - centre)
    depth = offsets[highest] - offsets[candidates]
    key = distance if rng.random() < 0.5 else depth
    kept = candidates[np.argsort(key, kind="stable")[:count]]
    return kept if highest in kept else np.append(kept[:-1], highest)


def _lower(
    packing: Packing, offsets: np.ndarray, free: np.ndarray, target: int, rng: random.Random, stop: StopFlag
) -> bool:
    """Try to place the free items at or below the target (units), in place; False if the short search fails."""
    local, capacity = _subproblem(packing, offsets, free, target)
    order = perturbed(rng.choice(static_orders(local)), rng.choice((0.0, 0.05, 0.3)), rng)
    top = np.full(len(local), target) - local.size
    top[len(free):] = np.iinfo(np.int64).max
    outcome, found, _ = native.search(local, order, (top, capacity), NODES_PER_TRY, stop)
    if outcome is not Outcome.FOUND:
        return False
    offsets[free] = found[: len(free)]
    return True


def _subproblem(packing: Packing, offsets: np.ndarray, free: np.ndarray, target: int) -> tuple[Packing, np.ndarray]:
    """The free items, then the others that they meet, cut to the window and merged where they touch; with the capacities."""
    low, high = int(packing.first[free].min()), int(packing.last[free].max())
    kept = (packing.first < high) & (packing.last > low)
    kept[free] = False
    first, last, start, end = _merged(
        np.maximum(packing.first[kept], low), np.minimum(packing.last[kept], high), offsets[kept], (offsets + packing.size)[kept]
    )
    lower, upper = np.concatenate([packing.first[free], first]), np.concatenate([packing.last[free], last])
    local = pack_ranges(
        lower,
        upper,
        size=np.concatenate([packing.size[free], end - start]),
        padding=np.zeros(len(lower), np.int64),
        fixed=np.concatenate([np.full(len(free), -1), start]),
        lifetime=upper - lower,
        unit=packing.unit,
    )
    ends = np.concatenate([np.full(len(free), target), end])
    return local, local.largest_per_section(ends)


def _merged(first: np.ndarray, last: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rectangles, where those with the same sections that touch have become one."""
    order = np.lexsort([start, last, first])
    first, last, start, end = first[order], last[order], start[order], end[order]
    begins = np.ones(len(first), bool)
    begins[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1]) | (start[1:] != end[:-1])
    heads = np.flatnonzero(begins)
    tails = np.append(heads[1:], len(first)) - 1
    return first[heads], last[heads], start[heads], end[tails]
