"""Rows on their way to experts, along an axis that splits them.

What happens between `sort_rows` and `unsort_rows` happens to every row by itself, or adds up over the rows of an expert, so the
rows need not stand in the order of one device. Every rank sorts its own. Such a tensor is split along its rows in an *order* of the ranks'
own (`Order`), and only operators that treat every row alike take it as it is; for others it is brought into the tensor's order again, which is
always right and is reported.

Along an axis that spreads experts, a rank sorts the rows of its own experts instead: every rank puts its rows into one bucket per
rank, the buckets are exchanged (Lepikhin et al., "GShard", 2020, section 3.2), and what arrives is sorted by expert. Shapes are static,
so a bucket has room for all rows of a rank, or for as many as the capacity factor says.
"""

import dataclasses

import torch
import torch.fx

from graphacc.passes.partition.emit import Emitter
from graphacc.passes.partition.placement import Order, Shard
from graphacc.passes.partition.rules import ExpertParallel

aten, ops = torch.ops.aten, torch.ops.graphacc
_BACK = {"sent": "received", "received": "sent"}


def num_experts(ids: torch.fx.Node) -> int | None:
    """The number of experts that these ids name; None if nothing counts the rows of each."""
    counts = {user.args[1] for user in ids.users if user.target is ops.expert_offsets.default}
    return counts.pop() if len(counts) == 1 else None


def spreads(experts: ExpertParallel | None, ids: torch.fx.Node, num_ranks: int) -> bool:
    """Rows with these ids go to the ranks of their experts."""
    return experts is not None and (num_experts(ids) or 1) % num_ranks == 0


def sorted_split(ids: torch.fx.Node, num_ranks: int, experts: ExpertParallel | None) -> Shard:
    """How rows lie that the ranks have sorted by `ids`, which are split."""
    size, padding = ids.meta["val"].numel(), 0
    if spreads(experts, ids, num_ranks):
        padding = num_ranks * num_ranks * experts.capacity(size // num_ranks, num_ranks) - size
    return Shard(0, padding=padding, order=Order("sorted", ids))


def sent_split(ids: torch.fx.Node) -> Shard:
    """How the buckets [N, C, ...] lie that every rank made of its own rows."""
    return Shard(1, order=Order("sent", ids))


def exchanged(split: Shard) -> Shard:
    """Buckets after they were exchanged over another axis: back, they are where they were."""
    return dataclasses.replace(split, order=Order(_BACK[split.order.kind], split.order.ids))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a rank sends and receives."""

    received: torch.fx.Node  # ids [N, C] of the rows that arrive, from the rank's first expert on; free places are beyond its last
    offsets: torch.fx.Node  # of the rank's experts among these
    per_rank: int  # experts
    capacity: int


def exchange(build: Emitter, experts: ExpertParallel, ids: torch.fx.Node, local: torch.fx.Node) -> Exchange:
    """Who sends what to whom, by `ids` whose part on this rank is `local`; made once."""
    if ids not in build.exchanges:
        total, ranks = num_experts(ids), build.num_ranks
        per_rank, capacity = total // ranks, experts.capacity(local.meta["val"].shape[0], ranks)
        received = build.exchange(build.call(ops.bucket_rows.default, local, local, per_rank, ranks, capacity, total))
        first = build.call(aten.mul.Scalar, build.axis_index(), per_rank)
        first = build.call(aten._to_copy.default, first, dtype=local.meta["val"].dtype)
        received = build.call(aten.sub.Tensor, received, first)
        offsets = build.call(ops.expert_offsets.default, received, per_rank)
        build.exchanges[ids] = Exchange(received, offsets, per_rank, capacity)
    return build.exchanges[ids]


def sort(build: Emitter, experts: ExpertParallel | None, ids: torch.fx.Node, local: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
    """The rank's part of rows sorted by `ids`, of `rows` that lie as `local`, its part of the ids."""
    if not spreads(experts, ids, build.num_ranks):
        return build.call(ops.sort_rows.default, rows, local)
    plan = exchange(build, experts, ids, local)
    buckets = build.call(ops.bucket_rows.default, rows, local, plan.per_rank, build.num_ranks, plan.capacity, 0)
    return build.call(ops.sort_rows.default, build.exchange(buckets), plan.received)


def unsort(build: Emitter, experts: ExpertParallel | None, ids: torch.fx.Node, local: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
    """The inverse of `sort`."""
    if not spreads(experts, ids, build.num_ranks):
        return build.call(ops.unsort_rows.default, rows, local)
    plan = exchange(build, experts, ids, local)
    buckets = build.exchange(build.call(ops.unsort_rows.default, rows, plan.received))
    return build.call(ops.unbucket_rows.default, buckets, local, plan.per_rank)
