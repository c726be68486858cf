"""Seconds of kernels and of collectives on a `Hardware`.

Both take numbers or arrays, and give alike, so that many candidates cost a few array operations.

A kernel takes as long as its arithmetic or its memory, whichever is slower (the roofline of Williams, Waterman and Patterson, 2009), and
the launch. A collective over a group of n ranks takes

    meeting + sum over levels (steps over the level's links * their latency) + bytes received / bandwidth

with bytes as in `planning.received_bytes`. A ring over u units of n/u ranks each makes u - 1 of its n - 1 steps between units and
the others inside (NCCL, src/graph/tuning.cc). The n/u ranks of a unit reach outside over their own links, all at once, so that a
ring's bandwidth is that of its slowest level: one rank in each host has one NIC, eight have eight.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from graphacc.costs.hardware import Chip, Hardware
from graphacc.costs.work import Work
from graphacc.errors import StrategyError

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def compute_seconds(flops, dims, size_bytes, dtype: str, chip: Chip, attends: bool | Sequence[bool] = False):
    """Seconds of kernels.

    Args:
        flops: of each kernel; number or array [...].
        dims: (m, k, n) of its product, [..., 3]; None: none of them is one, or they are as efficient as the largest.
        size_bytes: read and written, [...].
        dtype: of the products, "fp32" or "bf16".
        attends: whether each is a fused attention, [...].

    Returns:
        [...]; 0 where there is neither arithmetic nor memory, as for a view.
    """
    smallest = math.inf if dims is None else np.min(np.asarray(dims), axis=-1)
    arithmetic = np.asarray(flops) / (chip.peak_flops(dtype) * chip.efficiency(smallest) * np.where(attends, chip.attention_efficiency, 1.0))
    memory = np.asarray(size_bytes) / chip.stream_rate(size_bytes)
    seconds = np.maximum(arithmetic, memory)
    return np.where(seconds > 0, seconds + chip.launch_seconds, 0.0)[()]


def work_seconds(works: Iterable[Work], chip: Chip) -> np.ndarray:
    """`compute_seconds` of each work in a list, such as ``kernels(step).values()``."""
    works = list(works)
    seconds = np.zeros(len(works))
    for dtype in {work.dtype for work in works}:
        chosen = [i for i, work in enumerate(works) if work.dtype == dtype]
        dims = [works[i].dims or (math.inf,) * 3 for i in chosen]
        sizes, attends = [works[i].size_bytes for i in chosen], [works[i].attends for i in chosen]
        seconds[chosen] = compute_seconds([works[i].flops * works[i].padding for i in chosen], dims, sizes, dtype, chip, attends)
    launched = np.array([not work.shares_kernel for work in works], bool)
    return np.where(launched, seconds, np.maximum(seconds - chip.launch_seconds, 0.0))


def collective_seconds(kind: str, size_bytes, hardware: Hardware, group: tuple[int, ...]):
    """Seconds of a collective that all groups run at the same time.

    Args:
        kind: one of `COLLECTIVES`.
        size_bytes: number or array [...], with the meaning of `Move.size_bytes`: of the whole tensor where it is gathered, reduced, or
            before it is scattered; of one rank's part for "all_to_all" and "permute".
        group: as of `Hardware.group`.

    Returns:
        [...]; 0 for a group of one rank.

    Raises:
        StrategyError: another kind.
    """
    latency, per_byte = collective_terms(kind, hardware, group)
    return latency + np.asarray(size_bytes)[()] * per_byte


@functools.lru_cache(maxsize=4096)
def collective_terms(kind: str, hardware: Hardware, group: tuple[int, ...]) -> tuple[float, float]:
    """(seconds of latency, seconds per byte) of `collective_seconds`."""
    if not group or group[-1] == 1:
        return 0.0, 0.0
    counts = list(zip(collective_counts(kind, group, shared_memory=hardware.shared_cores > 0), hardware.levels, strict=True))
    latency = dict(hardware.collective_meetings).get(kind, hardware.meeting_seconds) + sum(steps * level.latency_seconds for (steps, _), level in counts)
    reached = dict(hardware.collective_shares).get(kind, 1.0)
    return latency, max(share / level.bandwidth for (_, share), level in counts) / reached


def collective_counts(kind: str, group: tuple[int, ...], *, shared_memory: bool = False) -> list[tuple[float, float]]:
    """For each level: steps over its links, one after the other; and bytes over one chip's links, as a share of `size_bytes`.

    An all-reduce receives twice what a gather does; its steps are those of a tree up and down, which NCCL takes where latency matters.

    Args:
        shared_memory: of virtual devices, which copy their own part too: all of `size_bytes`, not (n - 1) / n. All ranks of a group meet there,
            also those that pass something to the next one alone.
    """
    if kind not in COLLECTIVES:
        raise StrategyError(f"collective {kind!r} is unknown: choose one of {', '.join(COLLECTIVES)}")
    num_ranks, below = group[-1], 1
    received = 1.0 if shared_memory else (num_ranks - 1) / num_ranks
    counts = []
    for within in group:
        units = within / below  # of the level below that the group spans, in a unit of this one
        crosses = within > below
        if kind == "permute" and not shared_memory:
            counts.append((0.0 if within < num_ranks or not crosses else 1.0, float(crosses)))
        elif kind == "all_to_all":
            share = received if shared_memory else (within - below) / num_ranks
            counts.append((num_ranks / below - num_ranks / within, share))
        else:
            both = kind == "all_reduce"
            steps = 2 * math.log2(units) if both else num_ranks / below - num_ranks / within
            counts.append((steps, crosses * (1 + both) * received / below))
        below = within
    return counts
