"""The whole pipeline as one list."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from graphacc.errors import StrategyError
from graphacc.graph import Kind, Phase, StepGraph, local_shape
from graphacc.passes.attention import ATTACH_ATTENTION
from graphacc.passes.batch import DATA_AXES, batch_dims_along, check_batch, split_axes
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.communication import (
    RELEASE_GRADIENTS,
    SCATTER_FIRST,
    Frozen,
    Quantization,
    bucket_pass,
    prefetch_pass,
    quantized_gather_pass,
    quantized_scatter_pass,
    secondary_partition_pass,
)
from graphacc.passes.communication.buckets import MAX_BYTES
from graphacc.passes.experts import ATTACH_EXPERTS, ORDER_ROWS, expert_parallel_pass, find_experts
from graphacc.passes.join_products import JOIN_PRODUCTS
from graphacc.passes.loss_chunks import chunk_pass, mark_heads_pass, needs_chunks
from graphacc.passes.narrow import NARROW_PARAMETERS
from graphacc.passes.one_hot import SUM_ONE_HOTS
from graphacc.passes.partition import AxisPlan, assign
from graphacc.passes.partition.axis import axis_pass
from graphacc.passes.partition.placement import Shard
from graphacc.passes.partition.regather import regather_pass
from graphacc.passes.partition.regroup import REGROUP_SUMS
from graphacc.passes.partition.ring import hindrances
from graphacc.passes.partition.tensor_parallel import find_tensor_parallel, sequence_split, tensor_parallel_layouts
from graphacc.passes.partition.zero import batch_splits, split_before, state_split, zero_layouts
from graphacc.passes.remat import needs_remat, remat_pass
from graphacc.passes.runner import Pass
from graphacc.passes.stages import mark_pass, mark_update_pass, owner_of
from graphacc.passes.stream import stream_pass
from graphacc.passes.widen import WIDEN_GRADIENTS
from graphacc.strategy.axes import CP, DP, EP, FSDP, TP
from graphacc.strategy.spec import Strategy


def build_pipeline(
    step: StepGraph,
    strategy: Strategy,
    *,
    batch_dims: Mapping[str, int | None],
    splits: Mapping[str, Shard] | None = None,
    homes: Mapping[str, int] = MappingProxyType({}),
    experts: Collection[str] | None = None,
    frozen: Collection[str] = (),
    streams: bool = False,
    whole_sequences: bool = False,
) -> list[Pass]:
    """The passes that turn a captured graph into the program of one device of `strategy`.

    Args:
        step: the captured graph, with global shapes. Only its signature is read.
        batch_dims: target of every BATCH input -> the dim that is split over the data axes that divide it, or None. Any choice
            gives the same results; `default_batch_dims` makes a good one.
        splits: parameter -> its split along `tp`; None finds them in `step`, which then needs a forward part.
        homes: parameter -> the pipeline stage where earlier programs keep it.
        experts: the parameters that `ep` splits; None finds them in `step`, which then needs a forward part.
        frozen: parameters that nothing trains.
        streams: gradients leave for the host as they are made.
        whole_sequences: where `cp` divides no sequence of the batch, all its ranks compute the whole ones, instead of an error.

    Raises:
        StrategyError: `batch_dims` does not fit the signature, or a number of heads does not divide.
    """
    check_batch(step, batch_dims)
    axes = split_axes(step, strategy, batch_dims)
    along = {axis: batch_dims_along(axis, axes, batch_dims) for axis in DATA_AXES}
    passes = [DEAD_CODE, COMMON_SUBEXPRESSIONS, SUM_ONE_HOTS, ATTACH_ATTENTION, ATTACH_EXPERTS]
    if not strategy.sequence_parallel:  # where tokens are gathered for their experts before they are copied
        passes.append(ORDER_ROWS)
    if strategy.offload is not None:
        passes.append(NARROW_PARAMETERS)
    is_update = not any(node.meta.get("phase") is Phase.FORWARD for node in step.graph.nodes)
    if strategy.pp > 1 and not is_update:
        passes.append(mark_pass(strategy, homes))
    in_chunks = needs_chunks(step, strategy.loss_chunks)
    if in_chunks:
        passes.append(mark_heads_pass(strategy.loss_chunks))
    first, passes = passes, []
    stage = strategy.zero_stage if strategy.offload is None or not strategy.zero_stage else max(strategy.zero_stage, 2)  # gradients leave for the host as it updates them, sharded
    spread = () if strategy.ep == 1 else find_experts(step) if experts is None else experts
    if strategy.zero_stage == 3:
        alone = max(MAX_BYTES, (strategy.bucket_mb or 0) * 1e6)  # what shares no bucket with other weights, which would stay with it
        head_bytes = alone * strategy.tp if strategy.pp == 1 else math.inf  # between a pipeline's programs nothing stays gathered
        passes.append(regather_pass(spread if strategy.zero_ranks_of_experts == 1 else (), head_bytes))
    if strategy.tp > 1:
        splits = find_tensor_parallel(step, strategy.tp, {}).splits if splits is None else splits
        passes += [REGROUP_SUMS, tensor_parallel_pass(strategy, splits, batch_dims)]
    if strategy.cp > 1:
        passes.append(context_parallel_pass(step, strategy, batch_dims, whole_sequences, experts=spread, stage=stage))
    if strategy.ep > 1:
        passes.append(expert_parallel_pass(step, strategy, spread, along[EP], stage))
    if strategy.fsdp > 1:
        quantization = Quantization(
            weights=strategy.quantized_weights, gradients=strategy.quantized_gradients, min_size=strategy.quant_min_size
        )
        passes.append(partition_pass(FSDP, strategy.fsdp, stage, along[FSDP], quantization, strategy.reduces_narrow, sums_late=FSDP in strategy.late_axes))
    if stage and strategy.tp > 1:
        passes.append(SCATTER_FIRST)
    if strategy.dp > 1:
        passes.append(partition_pass(DP, strategy.dp, 0, along[DP], reduce_narrow=strategy.reduces_narrow, sums_late=DP in strategy.late_axes))
    if in_chunks:
        passes.append(chunk_pass(strategy.loss_chunks))
    passes.append(WIDEN_GRADIENTS)
    if strategy.pp > 1 and is_update:
        passes.append(mark_update_pass(homes))
    passes += _messages(strategy, stage, frozen, has_partitions=any(item.decide is not None for item in passes))
    passes += [JOIN_PRODUCTS, DEAD_CODE, COMMON_SUBEXPRESSIONS]
    if needs_remat(step, strategy):
        first.append(remat_pass(strategy, passes))
    return [*first, *passes, *([stream_pass(strategy)] if streams else [])]


def _messages(strategy: Strategy, stage: int, frozen: Collection[str], *, has_partitions: bool) -> list[Pass]:
    """What becomes of the moves that the partitions have made.

    Args:
        stage: ZeRO's, as of the partitions.
        frozen: as of `build_pipeline`.
    """
    passes: list[Pass] = []
    if strategy.quantized_weights:
        kept = Frozen(names=frozenset(frozen) if strategy.pp == 1 else frozenset(), bits=strategy.frozen_bits)
        passes.append(quantized_gather_pass(strategy.quant_block, kept))
    if strategy.hpz > 1:
        passes.append(secondary_partition_pass(strategy.hpz))
    if strategy.bucket_mb != 0 and has_partitions:
        passes.append(bucket_pass(None if strategy.bucket_mb is None else round(strategy.bucket_mb * 1e6), multiple=strategy.quant_block))
        if strategy.zero_stage == 3:
            passes.append(prefetch_pass(strategy.prefetch))
    if ((stage and strategy.bucket_mb != 0) or strategy.tp > 1 or strategy.cp > 1) and strategy.schedule != "zb-h1":
        passes.append(RELEASE_GRADIENTS)
    if strategy.quantized_gradients:
        passes.append(quantized_scatter_pass(strategy.quant_block, strategy.node_ranks))
    return passes


def partition_pass(
    axis: str,
    num_ranks: int,
    stage: int,
    batch_dims: Mapping[str, int | None],
    quantization: Quantization = Quantization(),
    reduce_narrow: bool = False,
    sums_late: bool = False,
) -> Pass:
    """The partition along one data axis.

    Args:
        sums_late: gradients of several runs add up on each rank, and are summed over the ranks by the program that reads them (`Strategy.late_axes`).
    """

    def decide(step: StepGraph) -> AxisPlan:
        layouts = zero_layouts(step, stage, batch_splits(step, batch_dims), lambda shape: state_split(shape, num_ranks), sums_late=sums_late)
        plan = assign(step, axis, num_ranks, layouts.inputs, layouts.outputs, layouts.state, reduce_narrow=reduce_narrow, sums_late=sums_late)
        return quantization.of(plan, step)

    return axis_pass(axis, num_ranks, decide, key=(stage, tuple(batch_dims.items()), quantization, reduce_narrow, sums_late))


def tensor_parallel_pass(strategy: Strategy, splits: Mapping[str, Shard], batch_dims: Mapping[str, int | None]) -> Pass:
    """The partition along `tp`, with sequence parallelism if the strategy asks for it."""

    def decide(step: StepGraph) -> AxisPlan:
        return tensor_parallel_plan(step, strategy, splits, batch_dims)

    key = strategy.sequence_parallel, tuple(splits.items()), tuple(batch_dims.items())
    return axis_pass(TP, strategy.tp, decide, key=key)


def tensor_parallel_plan(step: StepGraph, strategy: Strategy, splits: Mapping[str, Shard], batch_dims: Mapping[str, int | None]) -> AxisPlan:
    """What the partition along `tp` decides."""
    resolve = _sequence_split(step, strategy, batch_dims)
    layouts = tensor_parallel_layouts(
        step, _with_replicas(step, splits), resolve, num_ranks=strategy.tp, sequence_parallel=strategy.sequence_parallel
    )
    return assign(step, TP, strategy.tp, layouts.inputs, layouts.outputs, lambda shape: None, layouts.model_parallel, layouts.pins)


def context_parallel_pass(
    step: StepGraph, strategy: Strategy, batch_dims: Mapping[str, int | None], whole_sequences: bool = False, *, experts: Collection[str], stage: int
) -> Pass:
    """The partition along `cp`: the sequence is split through the whole model.

    Attention exchanges the sequence's split for one of the heads and back, by all-to-all (Jacobs et al., "DeepSpeed Ulysses",
    2023). With sequence parallelism along `tp`, every block of `tp` is split over `cp`.

    Args:
        whole_sequences: a batch none of whose sequences divide is computed by every rank, with a note, instead of refused.
        experts: the parameters that `ep` splits.
        stage: of ZeRO: what it splits over `fsdp` is split over `cp` too.

    Raises:
        StrategyError: no batch input has a sequence that divides.
    """
    outer = strategy.tp if strategy.sequence_parallel else 1
    whole = ()
    try:
        splits = sequence_inputs(step, strategy.cp, outer, batch_dims)
    except StrategyError as error:
        if not whole_sequences:
            raise
        splits, whole = {}, (f"every device of cp computes whole sequences: {error}",)

    def decide(step: StepGraph) -> AxisPlan:
        names = {item.name: splits[item.target] for item in step.inputs if item.kind is Kind.BATCH and item.target in splits}
        shapes = {local_shape(item.shape, item.shards) for item in step.inputs if item.kind is Kind.PARAM and item.target in experts}

        def split(shape: tuple[int, ...]) -> Shard | None:
            if shape in shapes:
                return split_before(shape, strategy.cp, strategy.zero_ranks_of_experts // strategy.cp, kept=1)
            return split_before(shape, strategy.cp, strategy.zero_ranks // strategy.cp)

        layouts = zero_layouts(step, stage, names, split)
        hindered = hindrances(step, strategy.cp) if strategy.context == "ring" else {}
        for node in step.graph.nodes:
            if node.target in FLASH:
                node.meta["context"] = "ulysses" if node in hindered else strategy.context
        pins = sequence_lookups(step, strategy.cp, outer, batch_dims)
        notes = tuple(
            f"{node.meta.get('module_path') or node.name}: this attention exchanges heads instead of going around the ring: {why}"
            for node, why in hindered.items()
            if node.meta["phase"] is Phase.FORWARD
        )
        plan = assign(step, CP, strategy.cp, layouts.inputs, layouts.outputs, layouts.state, pins=pins, reduce_narrow=strategy.reduces_narrow)
        return dataclasses.replace(plan, notes=(*whole, *notes))

    key = strategy.context, outer, tuple(batch_dims.items()), strategy.reduces_narrow, bool(whole), stage, strategy.zero_ranks, strategy.ep, tuple(sorted(experts))
    return axis_pass(CP, strategy.cp, decide, key=key)


def sequence_inputs(step: StepGraph, num_ranks: int, outer: int, batch_dims: Mapping[str, int | None]) -> dict[str, Shard]:
    """The batch inputs of tokens, [B, T] or [B, T, D] (or [T, B] where the batch is dim 1), and the split of their sequence."""
    splits, sizes = {}, {}
    for item in step.inputs:
        if item.kind is Kind.BATCH and len(item.shape) in (2, 3) and batch_dims[item.target] in (0, 1):
            dim = 1 - batch_dims[item.target]
            sizes[item.target] = item.shape[dim]
            if item.shape[dim] % (num_ranks * outer) == 0:
                splits[item.target] = Shard(dim, outer)
    if not splits and any(dim is not None for dim in batch_dims.values()):
        raise StrategyError(
            f"cp={num_ranks} splits the sequence of the batch, but no batch input has a sequence that "
            f"{num_ranks * outer} divides (lengths: {sizes or 'none'}): pad the batch to a multiple, or choose another cp"
        )
    return splits


def sequence_lookups(step: StepGraph, num_ranks: int, outer: int, batch_dims: Mapping[str, int | None]) -> dict[str, Shard]:
    """Tokens that the model makes itself out of the batch (a decoder's shifted labels), split like the batch's."""
    shapes = {
        (item.shape[0], item.shape[1]) for item in step.inputs if item.kind is Kind.BATCH and batch_dims[item.target] == 0 and len(item.shape) == 2
    }
    found = {}
    for node in step.graph.nodes:
        indices = node.args[1] if node.target is torch.ops.aten.embedding.default else None
        if indices is not None and indices.op == "call_function":
            shape = tuple(indices.meta["val"].shape)
            if shape in shapes and shape[1] % (num_ranks * outer) == 0:
                found[indices.name] = Shard(1, outer)
    return found


def _with_replicas(step: StepGraph, splits: Mapping[str, Shard]) -> dict[str, Shard]:
    """A replica of a parameter on another pipeline stage is split like the parameter."""
    targets = [item.target for item in step.inputs if item.kind is Kind.PARAM]
    return {**splits, **{target: splits[owner_of(target)] for target in targets if owner_of(target) in splits}}


def _sequence_split(step: StepGraph, strategy: Strategy, batch_dims: Mapping[str, int | None]):
    sizes = [item.shape[0] for item in step.inputs if item.kind is Kind.BATCH and batch_dims.get(item.target) == 0]
    if not strategy.sequence_parallel or not sizes:
        return lambda shape: None
    return sequence_split(sizes[0], strategy.tp)


FLASH = (torch.ops.graphacc.flash_attention.default, torch.ops.graphacc.flash_attention_backward.default)
