"""Rules of normalisation, pooling and resampling.

Legend: N samples, C channels.
"""

from graphacc.passes.partition.placement import REPLICATE, Partial
from graphacc.passes.partition.rules import Call, Dims, Labels, Plan, replicate, rule, split_of


def _leading(rank: int, count: int) -> Labels:
    return [i if i < count else None for i in range(rank)]


@rule("aten.native_layer_norm.default")
def _layer_norm(call: Call) -> Dims:
    """Input, output, mean and rstd share the leading dims."""
    rank = len(call.shape("input"))
    labels = _leading(rank, rank - len(call["normalized_shape"]))
    return Dims({"input": labels}, [labels] * 3)


@rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(call: Call) -> Dims:
    rank, normalized = len(call.shape("input")), len(call["normalized_shape"])
    labels = _leading(rank, rank - normalized)
    whole = [None] * normalized
    operands = {name: labels for name in ("grad_out", "input", "mean", "rstd")}
    return Dims(operands, [labels, whole, whole], reduce=dict.fromkeys(range(rank - normalized), "sum"))


_RECURSION: dict[str, Labels] = {name: [None, "n", None] for name in ("grad", "emitted", "alphas")}
_RECURSION |= {"first": ["n", None], "skips": ["n", None], "active": [None, "n"]}


@rule("graphacc.ctc_forward.default")
def _ctc_forward(call: Call) -> Dims:
    """Every sample by itself; frames and labels stay together."""
    return Dims({name: _RECURSION[name] for name in ("first", "emitted", "skips", "active")}, [_RECURSION["emitted"]])


@rule("graphacc.ctc_backward.default")
def _ctc_backward(call: Call) -> Dims:
    return Dims(_RECURSION, [_RECURSION["first"], _RECURSION["emitted"]])


_STEPS: dict[str, Labels] = {name: [None, "n", None] for name in ("gates", "grad", "outputs", "cells", "kept")}
_STEPS |= {name: ["n", None] for name in ("hidden", "cell", "grad_cell")} | {"active": [None, "n"]}


@rule("graphacc.recurrence.default")
def _recurrence(call: Call) -> Dims:
    """Every sample by itself; steps and features stay together."""
    operands = {operand.name: _STEPS[operand.name] for operand in call.operands if operand.name in _STEPS}
    return Dims(operands, [_STEPS["outputs"], _STEPS["cell"], _STEPS["cells"], _STEPS["kept"]])


@rule("graphacc.recurrence_backward.default")
def _recurrence_backward(call: Call) -> Dims:
    operands = {operand.name: _STEPS[operand.name] for operand in call.operands if operand.name in _STEPS}
    return Dims(operands, [_STEPS["gates"], _STEPS["hidden"], _STEPS["cell"]])


@rule("aten.native_group_norm.default")
def _group_norm(call: Call) -> Plan:
    """The argument N is the local number of samples."""
    split = split_of(call, "input")
    if split is None or split.dim != 0 or split.padding or split.outer > 1:
        return replicate(call, "only samples can stay split in a group norm")
    required = tuple(split if operand.name == "input" else REPLICATE for operand in call.operands)
    return Plan(required, split, {"N": call["N"] // call.num_ranks})


@rule("aten.native_group_norm_backward.default")
def _group_norm_backward(call: Call) -> Plan:
    split = split_of(call, "input")
    if split is None or split.dim != 0 or split.padding or split.outer > 1:
        return replicate(call, "only samples can stay split in a group norm")
    whole = ("weight",)
    required = tuple(REPLICATE if operand.name in whole else split for operand in call.operands)
    return Plan(required, (split, Partial(), Partial()), {"N": call["N"] // call.num_ranks})


# Operators that treat every sample and channel by itself, and the number of spatial dims of each.
_SPATIAL = {
    1: "aten.reflection_pad1d.default aten.reflection_pad1d_backward.default aten.replication_pad1d.default "
    "aten.replication_pad1d_backward.default aten.upsample_linear1d.default",
    2: "aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default aten.avg_pool2d.default "
    "aten.avg_pool2d_backward.default aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default "
    "aten.adaptive_max_pool2d.default aten.adaptive_max_pool2d_backward.default aten.reflection_pad2d.default "
    "aten.reflection_pad2d_backward.default aten.replication_pad2d.default aten.replication_pad2d_backward.default "
    "aten.upsample_bilinear2d.default aten.upsample_bicubic2d.default aten._upsample_bilinear2d_aa.default "
    "aten._upsample_bicubic2d_aa.default aten.max_unpool2d.default",
    3: "aten.max_pool3d_with_indices.default aten.max_pool3d_with_indices_backward.default aten.avg_pool3d.default "
    "aten.avg_pool3d_backward.default aten._adaptive_avg_pool3d.default aten._adaptive_avg_pool3d_backward.default "
    "aten.upsample_trilinear3d.default",
}


def _planewise(num_spatial: int):
    def planes(call: Call) -> Dims:
        operands = {operand.name: _leading(len(operand.shape), len(operand.shape) - num_spatial) for operand in call.operands}
        results = [_leading(len(value.shape), len(value.shape) - num_spatial) for value in call.results]
        return Dims(operands, results)

    return planes


for _num_spatial, _names in _SPATIAL.items():
    rule(_names)(_planewise(_num_spatial))


@rule(
    "aten.upsample_nearest1d_backward.default aten.upsample_linear1d_backward.default "
    "aten._upsample_bilinear2d_aa_backward.default aten._upsample_bicubic2d_aa_backward.default "
    "aten.upsample_nearest2d_backward.default aten.upsample_bilinear2d_backward.default aten.upsample_bicubic2d_backward.default "
    "aten.upsample_nearest3d_backward.default aten.upsample_trilinear3d_backward.default"
)
def _upsample_backward(call: Call) -> Dims:
    labels = _leading(len(call["input_size"]), 2)
    return Dims({"grad_output": labels}, [labels], size="input_size")


@rule(
    "aten.grid_sampler_2d.default aten.grid_sampler_2d_backward.default aten.im2col.default aten.col2im.default "
    "aten.grid_sampler_3d.default aten.grid_sampler_3d_backward.default aten.channel_shuffle.default "
    "aten.pixel_shuffle.default aten.pixel_unshuffle.default"
)
def _samplewise(call: Call) -> Dims:
    results = [_leading(1 if value is None else len(value.shape), 1) for value in call.results]
    return Dims({operand.name: _leading(len(operand.shape), 1) for operand in call.operands}, results)
