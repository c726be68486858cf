"""ZeRO as placements: which inputs and outputs of a step are split over ranks that have the same weights, those of `fsdp`, of `cp` and of `ep`.

Stage 1 splits the optimizer's state, stage 2 gradients too, stage 3 parameters too (Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC'20, section 5). The batch is split in every stage. Inside
one whole step stages 1 and 2 give the same program: a gradient is scattered as soon as it exists.

Ranks of `cp` have other tokens of the same samples, and those of `ep` other experts, which `ep` splits in any case. All other weights are the same on them as well, and
are split over these axes before they are split over `fsdp` (torchtitan and Megatron-LM shard over all of them together). What travels over one axis is what the others leave:

    weight [n / cp / ep / fsdp]  ->  gather over fsdp [n / cp / ep]  ->  gather over ep [n / cp]  ->  gather over cp [n]
    gradient [n]  ->  reduce-scatter over cp [n / cp]  ->  over ep [n / cp / ep]  ->  over fsdp [n / cp / ep / fsdp]

That is as many bytes as over all in one message, and the ranks of `cp` and `ep`, which are neighbours, move most of them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import torch

from graphacc.graph import Input, Kind, Output, Phase, StepGraph, local_shape
from graphacc.ops.facts import LAYOUT_KINDS, of_kind
from graphacc.passes.partition.assign import Layout
from graphacc.passes.partition.placement import REPLICATE, Partial, Placement, Shard
from graphacc.strategy.axes import ZERO_AXES

_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
_PART = torch.ops.graphacc.shard.default
_LAYS_OUT = of_kind(*LAYOUT_KINDS) | {torch.ops._c10d_functional.wait_tensor.default, torch.ops.aten.constant_pad_nd.default, torch.ops.aten.clone.default}

_FROM_STAGE = {Kind.STATE: 1, Kind.GRAD: 2, Kind.PARAM: 3}  # the stage from which on a kind is split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """The placements that a partition starts from."""

    inputs: dict[str, Placement]  # by placeholder name
    outputs: dict[tuple[Kind, str], Placement]
    state: Layout


def state_split(shape: tuple[int, ...], num_ranks: int) -> Shard | None:
    """The split of a parameter's shape: a dim that divides (dim 0, else the largest), else the one padded least.

    Examples:
        >>> state_split((50257, 768), 8)
        Shard(dim=1, outer=1, padding=0)
        >>> state_split((3,), 2)
        Shard(dim=0, outer=1, padding=1)
    """
    if not shape or 0 in shape:
        return None
    padding = [-size % num_ranks for size in shape]
    clean = [dim for dim, count in enumerate(padding) if not count]
    if clean:
        return Shard(0 if clean[0] == 0 else max(clean, key=lambda dim: shape[dim]))
    dim = min(range(len(shape)), key=lambda dim: padding[dim] / shape[dim])
    return Shard(dim, padding=padding[dim])


@functools.lru_cache(maxsize=4096)
def split_before(shape: tuple[int, ...], num_ranks: int, behind: int, kept: int = 0) -> Shard | None:
    """The split of a shape over `num_ranks` that is split further over `behind` ranks, along the same dim where one divides both.

    Args:
        kept: so many dims in front are not split, unless there is no other.
    """
    rest = shape[kept:] or shape
    split = state_split(rest, num_ranks * behind)
    if split is None or split.padding:
        split = state_split(rest, num_ranks)
    return None if split is None else Shard(split.dim + len(shape) - len(rest), padding=split.padding)


def zero_layouts(step: StepGraph, stage: int, batch: Mapping[str, Placement], split: Layout, *, sums_late: bool = False) -> Layouts:
    """Placements for ZeRO `stage` 1, 2 or 3 along an axis; along one of replicas for stage 0.

    Args:
        batch: placeholder name -> the placement of what is split of the batch.
        split: that of a parameter's shape.
        sums_late: gradients that are given, and those that replace them, are every rank's own.
    """
    late = {(item.kind, item.target): Partial() for item in step.inputs if sums_late and item.kind is Kind.GRAD}
    owners = {item.target: item.shape for item in step.inputs if item.kind is Kind.PARAM}
    parts = [node for node in step.graph.nodes if _is_part_in_update(node)]
    trained = {tuple(node.meta["val"].shape) for node in parts if not any(map(_is_part_in_update, _reached(node)))}
    for node, item in zip(step.placeholders, step.inputs):
        whole = parts and (not any(shard.axis in ZERO_AXES for shard in item.shards) or any(map(_is_part_in_update, _reached(node))))
        if not whole and (item.kind is Kind.GRAD or (item.kind is Kind.PARAM and item.trainable)):
            trained.add(local_shape(item.shape, item.shards))

    def place(item: Input | Output) -> Placement | None:
        if not stage or stage < _FROM_STAGE.get(item.kind, 4):
            return None
        if item.kind is Kind.STATE and item.shape != owners.get(item.target.rpartition("/")[0]):
            return None
        return split(local_shape(item.shape, item.shards))

    inputs = {item.name: placed for item in step.inputs if (placed := late.get((item.kind, item.target)) or place(item)) is not None} | dict(batch)
    outputs = {(item.kind, item.target): late.get((item.kind, item.target)) or place(item) or REPLICATE for item in step.outputs if item.kind is Kind.GRAD}
    return Layouts(inputs=inputs, outputs=outputs, state=lambda shape: split(shape) if stage and shape in trained else None)


def _is_part_in_update(node: torch.fx.Node) -> bool:
    """Whether a call splits for the update alone, along an axis before this one: below ZeRO-3 parameters and gradients are whole, and not of the shapes of the state."""
    return (node.target is _SCATTER or (node.target is _PART and node.meta["phase"] is not Phase.FORWARD)) and node.args[-1] in ZERO_AXES


def _reached(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What reads a value, seen through padding and what only lays it out."""
    for user in node.users:
        if user.target in _LAYS_OUT:
            yield from _reached(user)
        elif user.op == "call_function":
            yield user


def batch_splits(step: StepGraph, batch_dims: Mapping[str, int | None]) -> dict[str, Placement]:
    """The samples, split along a data axis."""
    batch = [item for item in step.inputs if item.kind is Kind.BATCH]
    return {item.name: Shard(dim) for item in batch if (dim := batch_dims[item.target]) is not None}
