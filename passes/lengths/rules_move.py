"""Rules of operators that work element by element, or move elements."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.edit import shape_of
from graphacc.passes.lengths.layout import Layout, regrouped
from graphacc.passes.lengths.mask import Masking, rule
from graphacc.passes.lengths.operands import arguments, dim_of, joined_layouts, known, operands, require

aten, ops, prims = torch.ops.aten, torch.ops.graphacc, torch.ops.prims

_ARITHMETIC = ("add", "sub", "mul", "div")

@rule("pointwise", *of_kind(OpKind.SAME, OpKind.CAST), prims.div.default)
def _pointwise(masking: Masking, node: Any) -> Layout:
    """Numbers that count elements are those of the real length."""
    layout = joined_layouts([masking.layout(x) for x in operands(node)])
    if numbers := masking.numbers(node):
        floating = all(x.meta["val"].is_floating_point() for x in operands(node))
        require(node.target.overloadpacket.__name__ in _ARITHMETIC and floating and not node.kwargs and max(numbers) < len(node.args), "a number in it depends on the length")
        node.target = node.target.overloadpacket.Tensor
        node.args = tuple(masking.number(numbers[i]) if i in numbers else arg for i, arg in enumerate(node.args))
    return layout


# Places that move


@rule(*of_kind(OpKind.RESHAPE))
def _reshape(masking: Masking, node: Any) -> Layout:
    x = node.args[0]
    shape, wanted = shape_of(node), masking.wanted(node)
    layout = regrouped(shape_of(x), masking.layout(x), shape, wanted)
    return layout


@rule(aten.expand.default)
def _expand(masking: Masking, node: Any) -> Layout:
    return joined_layouts([masking.layout(node.args[0]), _constants(masking, node)])


def _constants(masking: Masking, node: Any) -> Layout:
    """Of a result whose elements do not depend on their place."""
    return masking.wanted(node)


@rule(*of_kind(OpKind.FILL))
def _fill(masking: Masking, node: Any) -> Layout:
    """A fill that is a number of elements becomes that number."""
    sizes = {place for place in masking.varying[node].numbers if place < len(pytree.tree_leaves(node.args[0] if node.args else ()))}
    if masking.varying[node].numbers.keys() - sizes:
        require(node.target is aten.full.default and not node.args[0], "the number that it is filled with depends on the length")
        (number,) = masking.numbers(node).values()
        require(number.numerator is None or node.meta["val"].is_floating_point(), "the number that it is filled with depends on the length")
        edit = masking.editor(node)
        found = edit(aten._to_copy.default, masking.number(number), dtype=node.meta["val"].dtype)
        node.target, node.args, node.kwargs = aten.alias.default, (found,), {}
    return _constants(masking, node)


@rule(*of_kind(OpKind.COUNT))
def _arange(masking: Masking, node: Any) -> Layout:
    (length,) = masking.wanted(node)
    start = 0 if node.target is aten.arange.default else 1
    moved = masking.varying[node].numbers.keys() - {start}
    require(not moved and (length is None or length.factor == 1), "it counts to a multiple of the length")
    return (None if length is None else length.known(),)


@rule(*of_kind(OpKind.PERMUTE))
def _permute(masking: Masking, node: Any) -> Layout:
    layout = list(masking.layout(node.args[0]))
    if node.target is aten.permute.default:
        return tuple(layout[dim] for dim in node.args[1])
    one, other = (0, 1) if node.target is aten.t.default else (node.args[1], node.args[2])
    if layout[1:]:
        layout[one], layout[other] = layout[other], layout[one]
    return tuple(layout)


@rule(*of_kind(OpKind.SQUEEZE))
def _squeeze(masking: Masking, node: Any) -> Layout:
    return regrouped(shape_of(node.args[0]), masking.layout(node.args[0]), shape_of(node), masking.wanted(node))


@rule(aten.slice.Tensor)
def _slice(masking: Masking, node: Any) -> Layout:
    """Elements from a fixed start on."""
    x, dim, start, _, step = arguments(node)
    layout: list[Any] = list(masking.layout(x))
    dim = dim_of(dim, len(layout))
    taken: Any = masking.wanted(node)[dim]
    before: Any = layout[dim]
    if taken is None and before is None:
        require(not masking.varying[node].numbers, "its bounds depend on the length")
        return tuple(layout)
    fixed = step == 1 and masking.number_at(node, 2) is None and ((start or 0) >= 0 or before is None)
    require(fixed and (before is None or before.factor == 1), "it does not begin at a fixed place of the sequence")
    if taken is None:  # a part of fixed size, which every length of these captures has
        layout[dim] = None
    else:
        require(taken.factor == 1 and (before is None or (start or 0) + taken.offset <= before.offset), "it ends behind the sequence")
        layout[dim] = taken.known()
    return tuple(layout)


@rule(aten.select.int)
def _select(masking: Masking, node: Any) -> Layout:
    x, dim, index = node.args
    layout: list[Any] = list(masking.layout(x))
    dim = dim_of(dim, len(layout))
    if layout[dim] is not None:
        fixed = not masking.varying[node].numbers and index >= 0 and layout[dim].outer == 1 and layout[dim].inner == 1
        require(fixed, "it takes a place that is counted from the sequence's end: gather it by an index from the batch")
    return tuple(layout[:dim] + layout[dim + 1 :])


@rule(aten.slice_scatter.default)
def _slice_scatter(masking: Masking, node: Any) -> Layout:
    """A slice that is replaced up to the sequence's end, or has a fixed size."""
    x, part, dim, start, _, step = arguments(node)
    layout: list[Any] = list(masking.layout(x))
    given: list[Any] = list(masking.layout(part))
    dim, start = dim_of(dim, len(layout)), start or 0
    if layout[dim] is not None or given[dim] is not None:
        fixed = step == 1 and start >= 0 and masking.number_at(node, 3) is None and layout[dim] is not None and layout[dim].factor == 1
        require(fixed and (given[dim] is None or start + given[dim].offset == layout[dim].offset), "it replaces a part that does not end with the sequence")
    given[dim] = None
    return joined_layouts([tuple(layout), tuple(given)])


@rule(aten.select_scatter.default)
def _select_scatter(masking: Masking, node: Any) -> Layout:
    x, part, dim, index = node.args
    layout: Any = masking.layout(x)
    given = list(masking.layout(part))
    dim = dim_of(dim, len(layout))
    require(layout[dim] is None or (index >= 0 and layout[dim].factor == 1 and not masking.varying[node].numbers), "it replaces a place that is counted from the sequence's end")
    return joined_layouts([layout, (*given[:dim], None, *given[dim:])])


@rule(aten.flip.default)
def _flip(masking: Masking, node: Any) -> Layout:
    """Places are counted from the real end."""
    x, dims = node.args
    layout: Any = masking.layout(x)
    grown = [dim for dim in (dim_of(dim, len(layout)) for dim in dims) if layout[dim] is not None]
    require(all(layout[dim].factor == 1 for dim in grown), "it turns a flattened sequence")
    if grown:
        edit = masking.editor(node)
        fixed = [dim for dim in dims if dim_of(dim, len(layout)) not in grown]
        x = edit(aten.flip.default, x, fixed) if fixed else x
        for dim in grown:
            place = edit(aten.arange.start_step, 0, shape_of(x)[dim])
            turned = edit(aten.sub.Tensor, edit(aten.sub.Tensor, masking.number(masking.count(layout[dim])), 1), place)
            index = edit(aten.where.self, masking.valid(layout[dim]), turned, place)
            x = edit(aten.index.Tensor, x, [*[None] * dim, index])
        node.target, node.args, node.kwargs = aten.alias.default, (x,), {}
    return layout


@rule(aten.cat.default)
def _cat(masking: Masking, node: Any) -> Layout:
    """Along a length only the last operand may grow."""
    parts, dim = arguments(node)
    layouts: list[list[Any]] = [list(masking.layout(part)) for part in parts]
    dim = dim_of(dim, len(layouts[0]))
    along: list[Any] = [layout[dim] for layout in layouts]
    require(not any(along[:-1]), "something is joined behind a sequence that is padded")
    require(along[-1] is None or along[-1].factor == 1, "a flattened sequence is joined with something")
    for layout in layouts:
        layout[dim] = None
    found = list(joined_layouts([tuple(layout) for layout in layouts]))
    wanted: Any = masking.wanted(node)[dim]
    found[dim] = None if wanted is None else wanted.known()
    return tuple(found)


@rule(aten.constant_pad_nd.default)
def _pad(masking: Masking, node: Any) -> Layout:
    """What stands behind the real length is the number that PyTorch pads with."""
    x, pads, value = arguments(node)
    layout: list[Any] = list(masking.layout(x))
    rank = len(shape_of(x))
    right = {1 + i for i in range(1, len(pads), 2)}  # places of the numbers behind, which may fill up to a fixed size
    require(masking.varying[node].numbers.keys() <= right, "its padding depends on the length")
    dims = [rank - 1 - i // 2 for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    grown = [dim for dim in dims if layout[dim] is not None]
    require(all(layout[dim].factor == 1 for dim in grown), "a flattened sequence is padded")
    if grown:
        node.args = (masking.masked(node, x, value, grown), *node.args[1:])
    sizes = known(masking.wanted(node))
    return tuple(sizes[dim] if dim in dims else item for dim, item in enumerate(layout))
