"""Tie orders: which of the items that can lie equally low goes first. Arrays of item indices, first to last."""

import random

import numpy as np

from graphacc.passes.memory.addresses.packing import Packing

KEYS = ("TWA", "TAW", "WTA", "WAT", "ATW", "AWT")
"""T: the largest load that the item lives through. W: its lifetime. A: lifetime * size. Large first."""


def static_orders(packing: Packing) -> list[np.ndarray]:
    """One order for each of KEYS."""
    keys = {
        "T": _largest_load(packing),
        "W": packing.lifetime.astype(np.float64),
        "A": packing.lifetime.astype(np.float64) * packing.size,
    }
    return [np.lexsort([-keys[k] for k in reversed(name)]) for name in KEYS]


def perturbed(order: np.ndarray, spread: float, rng: random.Random) -> np.ndarray:
    """The order with every item moved by a random distance of up to `spread` * n positions."""
    n = len(order)
    moves = np.random.default_rng(rng.getrandbits(63)).triangular(-1, 0, 1, size=n) if spread else np.zeros(n)
    return order[np.argsort(np.arange(n) + spread * n * moves, kind="stable")]


def _largest_load(packing: Packing) -> np.ndarray:
    return np.array([packing.load[a:b].max() for a, b in zip(packing.first, packing.last, strict=True)], np.float64)
