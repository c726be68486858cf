"""Rules of look-ups and random numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.edit import Editor
from graphacc.passes.lengths.layout import Layout
from graphacc.passes.lengths.mask import Masking, rule
from graphacc.passes.lengths.operands import dim_of, joined_layouts, known, require

aten, ops, prims = torch.ops.aten, torch.ops.graphacc, torch.ops.prims

@rule(aten.embedding.default)
def _embedding(masking: Masking, node: Any) -> Layout:
    weight, indices = node.args[:2]
    require(not any(masking.layout(weight)), "its rows grow with the length")
    return (*masking.layout(indices), None)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(masking: Masking, node: Any) -> Layout:
    grad, indices, _, _, by_frequency = node.args
    require(not by_frequency, "scale_grad_by_freq counts padding")
    layout = joined_layouts([masking.layout(grad), (*masking.layout(indices), None)])
    node.args = (masking.masked(node, grad, 0, range(len(layout) - 1), layout), *node.args[1:])
    return (None, layout[-1])


@rule(aten.gather.default)
def _gather(masking: Masking, node: Any) -> Layout:
    x, dim, index = node.args[:3]
    source: list[Any] = list(masking.layout(x))
    layout = masking.layout(index)
    if source:
        dim = dim_of(dim, len(source))
        require(source[dim] is None or source[dim].factor == 1, "it gathers from a flattened sequence")
        source[dim] = None
    return joined_layouts([layout, tuple(item if layout[i] is not None else None for i, item in enumerate(source))])


@rule(aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
def _scatter(masking: Masking, node: Any) -> Layout:
    """Along another dim than a length: a place of the padding writes to places of the padding."""
    x, dim, index, source = node.args[:4]
    layouts = [list(masking.layout(value)) for value in (x, index, source) if isinstance(value, fx.Node)]
    dim = dim_of(dim, len(layouts[0]))
    require(not any(layout[dim] for layout in layouts), "it writes to places of the sequence that are computed")
    return joined_layouts([tuple(layout) for layout in layouts])


@rule(aten.index.Tensor)
def _index(masking: Masking, node: Any) -> Layout:
    x, indices = node.args
    node.args = (x, _counted_from_start(masking, node, x, indices))
    return _indexed(masking.layout(x), indices, masking)


@rule(aten.index_put.default)
def _index_put(masking: Masking, node: Any) -> Layout:
    """Padding adds zeros, wherever its index points."""
    x, indices, values = node.args[:3]
    grown = any(any(masking.layout(index)) for index in indices if index is not None)
    require(not grown or (len(node.args) > 3 and node.args[3]), "padding would overwrite elements")
    target = _indexed(masking.layout(x), indices, masking)
    if grown:
        require(len(masking.layout(values)) == len(target), "its values are broadcast")
        values = masking.masked(node, values, layout=joined_layouts([masking.layout(values), target]))
    node.args = (x, _counted_from_start(masking, node, x, indices), values, *node.args[3:])
    return masking.layout(x)


def _indexed(layout: Any, indices: Sequence[Any], masking: Masking) -> Layout:
    """The layout of ``x[indices]``."""
    used = [i for i, index in enumerate(indices) if index is not None]
    require(all(layout[i] is None or layout[i].factor == 1 for i in used), "it reads a flattened sequence by its places")
    found = joined_layouts([masking.layout(indices[i]) for i in used])
    rest = [layout[i] for i in range(len(layout)) if i not in used]
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    return (*rest[:first], *found, *rest[first:])


def _counted_from_start(masking: Masking, node: Any, x: fx.Node, indices: Sequence[Any]) -> list:
    """Indices of a dim that grows, those from its end counted from the real one."""
    found, edit = list(indices), masking.editor(node)
    for i, index in enumerate(indices):
        length = masking.layout(x)[i]
        if index is None:
            continue
        require(index.meta["val"].dtype not in (torch.bool, torch.uint8), "it selects by a mask")
        if length is None or _is_count(index):
            continue
        real = masking.number(masking.count(length))
        found[i] = edit(aten.where.self, edit(aten.lt.Scalar, index, 0), edit(aten.add.Tensor, index, real), index)
    return found


def _is_count(node: Any) -> bool:
    """Whether it is made of an arange from 0 on without a change of values."""
    while node.op == "call_function":
        if node.target in of_kind(OpKind.COUNT):
            return node.target is aten.arange.default or node.args[0] >= 0
        plain = node.target in of_kind(OpKind.SAME, OpKind.SQUEEZE, OpKind.RESHAPE, OpKind.EXPAND)
        if not plain and not (node.target is aten.add.Tensor and node.args[1] == 0):
            return False
        node = node.args[0]
    return False


# Random numbers


@rule(*of_kind(OpKind.RANDOM))
def _random(masking: Masking, node: Any) -> Layout:
    """Every element gets the number that it has in the tensor of the real length."""
    key, stream, size, _, start = node.args
    layout: Any = known(masking.wanted(node))
    if not any(layout):
        return layout
    require(start is None and all(item is None or item.factor == 1 for item in layout), "random numbers of a flattened sequence are counted in another order")
    edit = masking.editor(node)
    index = _real_index(masking, edit, size, layout)
    words = [edit(aten.select.int, key, 0, i) for i in (0, 1)]
    target = {ops.random_uniform.default: ops.random_uniform_at.default, ops.random_bits.default: ops.random_bits_at.default}[node.target]
    node.target, node.args = target, (*words, index, stream)
    return layout


def _real_index(masking: Masking, edit: Editor, size: Sequence[int], layout: Layout) -> fx.Node:
    """Row-major index of every element in the tensor of the real lengths; int64."""
    index, fixed, grown = None, 1, None  # the stride is fixed * grown
    for dim in reversed(range(len(size))):
        position = edit(aten.arange.start_step, 0, size[dim])
        if fixed != 1:
            position = edit(aten.mul.Tensor, position, fixed)
        if grown is not None:
            position = edit(aten.mul.Tensor, position, grown)
        position = edit.view(position, [size[dim] if i == dim else 1 for i in range(len(size))])
        index = position if index is None else edit(aten.add.Tensor, position, index)
        if (length := layout[dim]) is None:
            fixed *= size[dim]
        else:
            number = masking.number(masking.count(length))
            grown = number if grown is None else edit(aten.mul.Tensor, grown, number)
    assert index is not None, "a number without dims has no length"
    return index
