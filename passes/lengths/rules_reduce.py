"""Rules of sums, extremes, products and convolutions."""

from collections.abc import Sequence
from typing import Any

import torch

from graphacc.passes.edit import shape_of
from graphacc.passes.lengths.layout import Layout, joined
from graphacc.passes.lengths.mask import Masking, rule
from graphacc.passes.lengths.operands import arguments, dim_of, joined_layouts, known, require

aten, ops, prims = torch.ops.aten, torch.ops.graphacc, torch.ops.prims

_NEUTRAL = {aten.sum.dim_IntList: 0, aten.sum.default: 0, aten.mean.dim: 0, aten.mean.default: 0, aten.any.dim: 0, aten.any.dims: 0, aten.any.default: 0,
            aten.all.dim: 1, aten.all.dims: 1, aten.all.default: 1, aten.prod.dim_int: 1, aten.prod.default: 1, aten.amax.default: -1, aten.amin.default: 1}  # fmt: skip
"""What does not change the result; of extremes the sign of the infinity."""

_EXTREMES = {aten.amax.default, aten.amin.default}


@rule(*_NEUTRAL)
def _reduce(masking: Masking, node: Any) -> Layout:
    x = node.args[0]
    layout, rank = masking.layout(x), len(shape_of(x))
    dims = node.args[1] if len(node.args) > 1 else None
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    dims = {dim_of(dim, rank) for dim in dims}
    kept = len(shape_of(node)) == rank and rank > 0
    grown = [dim for dim in sorted(dims) if rank and layout[dim] is not None]
    if grown:
        fill: float = _NEUTRAL[node.target]
        if node.target in _EXTREMES:
            dtype = x.meta["val"].dtype
            fill = fill * float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min
        x = masking.masked(node, x, fill, grown)
        node.args = (x, *node.args[1:])
        if node.target in (aten.mean.dim, aten.mean.default):
            _mean(masking, node, sorted(dims), grown, kept)
    return tuple(None if dim in dims else item for dim, item in enumerate(layout) if kept or dim not in dims)


def _mean(masking: Masking, node: Any, dims: Sequence[int], grown: Sequence[int], kept: bool) -> None:
    """A sum, divided by the number of elements at the real length."""
    x, edit = node.args[0], masking.editor(node)
    layout: Any = masking.layout(x)
    fixed = 1
    for dim in dims:
        fixed *= 1 if dim in grown else shape_of(x)[dim]
    total = edit(aten.sum.dim_IntList, x, list(dims), kept, **node.kwargs)
    number = masking.number(masking.count(layout[grown[0]]))
    for dim in grown[1:]:
        number = edit(aten.mul.Tensor, number, masking.number(masking.count(layout[dim])))
    if fixed != 1:
        number = edit(aten.mul.Tensor, number, fixed)
    node.target, node.args, node.kwargs = aten.div.Tensor, (total, number), {}


@rule(aten.cumsum.default)
def _cumulative(masking: Masking, node: Any) -> Layout:
    """A place reads those before it."""
    layout: Any = masking.layout(node.args[0])
    length = layout[dim_of(node.args[1], len(layout))] if layout else None
    require(length is None or length.outer == 1, "it runs over several sequences that were flattened")
    return layout


@rule(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default)
def _along_another_dim(masking: Masking, node: Any) -> "Layout | list[Layout]":
    """What goes along one dim, if that is no length."""
    given: dict[str, Any] = dict(zip((item.name for item in node.target._schema.arguments), arguments(node)))
    dim: Any = given["dim"]
    layout = list(masking.layout(node.args[0]))
    place = -1 if dim is None else dim_of(dim, len(layout))
    require(layout and place >= 0 and layout[place] is None, "it goes along the sequence")
    if "keepdim" in given and not given["keepdim"]:
        del layout[place]
    return tuple(layout) if isinstance(node.meta["val"], torch.Tensor) else [tuple(layout)] * len(node.meta["val"])


# Products


@rule(aten.mm.default, aten.bmm.default)
def _product(masking: Masking, node: Any) -> Layout:
    a, b = node.args
    left, right = masking.layout(a), masking.layout(b)
    batch = joined_layouts([left[:-2], right[:-2]])
    if (length := joined(left[-1], right[-2])) is not None:
        rows = masking.masked(node, a, 0, [len(left) - 1], (*left[:-1], length))
        node.args = (rows, masking.masked(node, b, 0, [len(right) - 2], (*right[:-2], length, right[-1])))
    return (*batch, left[-2], right[-1])


@rule(aten.convolution.default)
def _convolution(masking: Masking, node: Any) -> Layout:
    """x [N, C, *], along a length with stride 1: what it reads behind the end is the zeros that PyTorch pads with."""
    x, _, _, stride, _, _, transposed, _, _ = node.args
    layout = masking.layout(x)
    _check_convolution(layout, stride, transposed, masking, node)
    node.args = (masking.masked(node, x, 0, range(2, len(layout))), *node.args[1:])
    return (layout[0], None, *known(masking.wanted(node)[2:]))


@rule(aten.convolution_backward.default)
def _convolution_backward(masking: Masking, node: Any) -> list[Layout]:
    grad, x, weight, _, stride, _, _, transposed, _, _, _ = node.args
    layout = masking.layout(x)
    _check_convolution(layout, stride, transposed, masking, node)
    given = masking.layout(grad)
    batch = joined(given[0], layout[0])
    node.args = (masking.masked(node, grad, layout=(batch, *given[1:])), masking.masked(node, x, layout=(batch, *layout[1:])), *node.args[2:])
    return [layout, (None,) * len(shape_of(weight)), (None,)]


def _check_convolution(layout: Any, stride: Sequence[int], transposed: bool, masking: Masking, node: Any) -> None:
    grown = [dim for dim in range(2, len(layout)) if layout[dim] is not None]
    require(not masking.varying[node].numbers and layout[1] is None, "a number in it depends on the length")
    require(not transposed and all(stride[dim - 2] == 1 and layout[dim].factor == 1 for dim in grown), "only a convolution with stride 1 gives the same for a padded sequence")
