"""Windows: items that do not live together and yet lie within a common height in every solution.

Take two sections s < t, the items K that live in both, an item u that lives in s and not in t, and an item v that lives in t and not in s.
K leaves gaps of height G = C - sum of K's sizes together, the same ones in s and in t. u lies in one gap, and so does v. If they lay in
different ones, these would have a height of size_u + size_v at least; so where size_u + size_v > G, both lie in the same gap, which is at
most G high: x_v + size_v - x_u <= G and x_u + size_u - x_v <= G. K is largest for the last section of u and the first of v.

With no room to spare the buffers that end at a time and those that begin there take each other's places, and this says which. Searches
infer the same of what is left to place where two sections meet (csrc/planner/address_state.cc, `infer_boundary`): what is wasted below makes G smaller.
"""

import dataclasses

import numpy as np

from graphacc.passes.memory.addresses.packing import Packing


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Pairs of items; arrays are int64[number of windows]."""

    first: np.ndarray
    second: np.ndarray
    height: np.ndarray  # units, that hold both in every solution

    def __len__(self) -> int:
        return len(self.height)


def windows_of(packing: Packing, capacity: np.ndarray) -> Windows:
    """All windows of a packing. O(sections * items) time.

    Args:
        capacity: units in which each section ends; see `Packing.limits`.
    """
    starting, ending = np.argsort(packing.first, kind="stable"), np.argsort(packing.last, kind="stable")
    starts = np.searchsorted(packing.first[starting], np.arange(packing.num_sections + 1))  # items before these start before the section
    ends = np.searchsorted(packing.last[ending], np.arange(packing.num_sections + 2))
    together = np.zeros(packing.num_sections, np.int64)  # sizes of the items that live in this section of the loop and in each later one
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for section in range(packing.num_sections):
        for item in starting[starts[section] : starts[section + 1]]:
            together[: packing.last[item]] += packing.size[item]
        before, after = ending[ends[section + 1] : ends[section + 2]], starting[starts[section + 1] :]
        height = np.maximum(capacity[section], capacity[packing.first[after]]) - together[packing.first[after]]
        i, j = np.nonzero(packing.size[before][:, None] + packing.size[after] > height)
        found.append((before[i], after[j], height[j]))
    first, second, height = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Windows(first=first, second=second, height=height)
