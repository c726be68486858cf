"""ZeRO as placements: which inputs and outputs of a step are split over the `fsdp` axis.

Stage 1 splits the optimizer's state, stage 2 gradients too, stage 3 parameters too (Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC'20, section 5). The batch is split in every stage. Inside
one whole step stages 1 and 2 give the same program: a gradient is scattered as soon as it exists.
"""

import dataclasses
from collections.abc import Mapping

from graphacc.graph import Input, Kind, Output, StepGraph, local_shape
from graphacc.passes.partition.assign import Layout
from graphacc.passes.partition.placement import REPLICATE, Placement, Shard

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


def zero_layouts(step: StepGraph, num_ranks: int, stage: int, batch_dims: Mapping[str, int | None]) -> Layouts:
    """Placements along `fsdp` for ZeRO `stage` 1, 2 or 3; along an axis of replicas for stage 0."""
    owners = {item.target: item.shape for item in step.inputs if item.kind is Kind.PARAM}
    trained = {
        local_shape(item.shape, item.shards)
        for item in step.inputs
        if item.kind is Kind.GRAD or (item.kind is Kind.PARAM and item.trainable)
    }

    def place(item: Input | Output) -> Placement | None:
        if not stage or stage < _FROM_STAGE.get(item.kind, 4):
            return None
        if item.kind is Kind.STATE and item.shape != owners.get(item.target.rpartition("/")[0]):
            return None
        return state_split(local_shape(item.shape, item.shards), num_ranks)

    inputs = {item.name: split for item in step.inputs if (split := place(item)) is not None}
    inputs.update(_batch_splits(step, batch_dims))
    outputs = {(item.kind, item.target): place(item) or REPLICATE for item in step.outputs if item.kind is Kind.GRAD}
    return Layouts(
        inputs=inputs, outputs=outputs, state=lambda shape: state_split(shape, num_ranks) if stage and shape in trained else None
    )


def _batch_splits(step: StepGraph, batch_dims: Mapping[str, int | None]) -> dict[str, Shard]:
    batch = [item for item in step.inputs if item.kind is Kind.BATCH]
    return {item.name: Shard(dim) for item in batch if (dim := batch_dims[item.target]) is not None}
