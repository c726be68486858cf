"""Addresses: offsets for buffers with known live ranges, in an arena that is as low as possible.

Given half-open live ranges, sizes s_i and fixed offsets for some, choose offsets x_i such that, for every two buffers that
live at the same time, x_i + s_i <= x_j or x_j + s_j <= x_i. Minimise max(x_i + s_i), or decide whether it can be <= C.

Search space. Pushing buffers down until each lies on 0, on a fixed buffer or on another keeps a solution valid; so only such
canonical solutions matter, and they can be built from the bottom. A node knows a lower bound m_i of each unplaced offset, and takes a
buffer b that nothing unplaced can lie below (m_j + s_j > m_b for all that live with it). Either b lies at m_b (`place`: all
that live with it are raised to m_b + s_b), or above it (`skip`). Which b, says the rule (`native.Rule`): the one with the smallest m_b, ties by
the tie order; or the lowest of the section in which the fewest buffers can be the lowest, as in an exact cover (Knuth, "Dancing links", 2000):
four of the seven of MiniMalloc's instances in our tests take 160 to 420 nodes so. Inference (csrc/planner/address_state.cc):

- floor: in a section (a maximal set of buffers that live together) with unplaced size R, min m_i + R <= C.
- first: if only one unplaced buffer of a section has m_i <= C - R, it is the lowest, and the others lie above it.
- support: a skipped b must be held up by an unplaced neighbour j with m_j < m_b + s_b; so m_b rises to the least m_j + s_j.
- deadline: one of those neighbours must be placed below m_b + s_b, or b could have been pushed down.
- windows: where what lives on across a time leaves little room, what ends there and what begins there lie close to each other (`windows`).
- parts: where no unplaced buffer crosses a time, the two sides are solved one after the other; the rule RENEWED renews the tie order in each: buffers of
  the sections with the most left to place first.
- failed: what is left of a part, with the same bounds and deadlines, is not searched again once it has failed.

The road of one solve: `packing` (alignment, units, sections, bound) -> `native.skyline` under several `orders` ->
`portfolio` (depth-first searches and beams for a target height), or `repair` where the problem is too large for that.
Ideas: TelaMalloc (ASPLOS 2023), MiniMalloc (ASPLOS 2023 vol. 4).
"""

from graphacc.passes.memory.addresses.baseline import best_fit
from graphacc.passes.memory.addresses.solve import solve_addresses

__all__ = ["best_fit", "solve_addresses"]
