"""The rules of `mask`, one for each kind of operator. Layouts are of padded tensors; see `mask`."""

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphacc.ops.facts import OpKind, of_kind
from graphacc.passes.edit import Editor, shape_of
from graphacc.passes.lengths.layout import Layout, Length, joined, regrouped
from graphacc.passes.lengths.mask import Masking, joined_layouts, rule

aten, ops, prims = torch.ops.aten, torch.ops.graphacc, torch.ops.prims

_OF_TENSORS = {aten.mul.Scalar: aten.mul.Tensor, aten.div.Scalar: aten.div.Tensor, aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor}
_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _require(condition: object, why: str) -> None:
    if not condition:
        raise ValueError(why)


def _operands(node: fx.Node) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


# Element by element


@rule("pointwise", *of_kind(OpKind.SAME, OpKind.CAST), prims.div.default)
def _pointwise(masking: Masking, node: fx.Node) -> Layout:
    """Numbers that count elements are those of the real length."""
    layout = joined_layouts([masking.layout(x) for x in _operands(node)])
    if numbers := masking.numbers(node):
        node.target = _OF_TENSORS.get(node.target, node.target)  # type: ignore[call-overload]  (a target may be text)
        floating = all(x.meta["val"].is_floating_point() for x in _operands(node))
        _require(node.target in _ARITHMETIC and floating and not node.kwargs and max(numbers) < len(node.args), "a number in it depends on the length")
        node.args = tuple(masking.number(numbers[i]) if i in numbers else arg for i, arg in enumerate(node.args))
    return layout


# Places that move


@rule(*of_kind(OpKind.RESHAPE))
def _reshape(masking: Masking, node: fx.Node) -> Layout:
    x = node.args[0]
    shape, wanted = shape_of(node), masking.wanted(node)
    layout = regrouped(shape_of(x), masking.layout(x), shape, wanted)
    return layout


@rule(aten.expand.default)
def _expand(masking: Masking, node: fx.Node) -> Layout:
    return joined_layouts([masking.layout(node.args[0]), _constants(masking, node)])


def _constants(masking: Masking, node: fx.Node) -> Layout:
    """Of a result whose elements do not depend on their place."""
    return masking.wanted(node)


@rule(*of_kind(OpKind.FILL))
def _fill(masking: Masking, node: fx.Node) -> Layout:
    """A fill that is a number of elements becomes that number."""
    sizes = {place for place in masking.varying[node].numbers if place < len(pytree.tree_leaves(node.args[0] if node.args else ()))}
    if masking.varying[node].numbers.keys() - sizes:
        _require(node.target is aten.full.default and not node.args[0], "the number that it is filled with depends on the length")
        (number,) = masking.numbers(node).values()
        _require(number.numerator is None or node.meta["val"].is_floating_point(), "the number that it is filled with depends on the length")
        edit = masking.editor(node)
        found = edit(aten._to_copy.default, masking.number(number), dtype=node.meta["val"].dtype)
        node.target, node.args, node.kwargs = aten.alias.default, (found,), {}
    return _constants(masking, node)


@rule(*of_kind(OpKind.COUNT))
def _arange(masking: Masking, node: fx.Node) -> Layout:
    (length,) = masking.wanted(node)
    start = 0 if node.target is aten.arange.default else 1
    moved = masking.varying[node].numbers.keys() - {start}
    _require(not moved and (length is None or length.factor == 1), "it counts to a multiple of the length")
    return (None if length is None else length.known(),)


@rule(*of_kind(OpKind.PERMUTE))
def _permute(masking: Masking, node: fx.Node) -> Layout:
    layout = list(masking.layout(node.args[0]))
    if node.target is aten.permute.default:
        return tuple(layout[dim] for dim in node.args[1])
    one, other = (0, 1) if node.target is aten.t.default else (node.args[1], node.args[2])
    if layout[1:]:
        layout[one], layout[other] = layout[other], layout[one]
    return tuple(layout)


@rule(*of_kind(OpKind.SQUEEZE))
def _squeeze(masking: Masking, node: fx.Node) -> Layout:
    return regrouped(shape_of(node.args[0]), masking.layout(node.args[0]), shape_of(node), masking.wanted(node))


@rule(aten.slice.Tensor)
def _slice(masking: Masking, node: fx.Node) -> Layout:
    """Elements from a fixed start on."""
    x, dim, start, end, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])
    layout = list(masking.layout(x))
    dim = _dim(dim, len(layout))
    taken, before = masking.wanted(node)[dim], layout[dim]
    if taken is None and before is None:
        _require(not masking.varying[node].numbers, "its bounds depend on the length")
        return tuple(layout)
    fixed = step == 1 and masking.number_at(node, 2) is None and ((start or 0) >= 0 or before is None)
    _require(fixed and (before is None or before.factor == 1), "it does not begin at a fixed place of the sequence")
    if taken is None:  # a part of fixed size, which every length of these captures has
        layout[dim] = None
    else:
        _require(taken.factor == 1 and (before is None or (start or 0) + taken.offset <= before.offset), "it ends behind the sequence")
        layout[dim] = taken.known()
    return tuple(layout)


@rule(aten.select.int)
def _select(masking: Masking, node: fx.Node) -> Layout:
    x, dim, index = node.args
    layout = list(masking.layout(x))
    dim = _dim(dim, len(layout))
    if layout[dim] is not None:
        fixed = not masking.varying[node].numbers and index >= 0 and layout[dim].outer == 1 and layout[dim].inner == 1
        _require(fixed, "it takes a place that is counted from the sequence's end: gather it by an index from the batch")
    return tuple(layout[:dim] + layout[dim + 1 :])


@rule(aten.slice_scatter.default)
def _slice_scatter(masking: Masking, node: fx.Node) -> Layout:
    """A slice that is replaced up to the sequence's end, or has a fixed size."""
    x, part, dim, start, _, step = (*node.args, *(0, None, None, 1)[len(node.args) - 2 :])
    layout, given = list(masking.layout(x)), list(masking.layout(part))
    dim, start = _dim(dim, len(layout)), start or 0
    whole, taken = layout[dim], given[dim]
    if whole is not None or taken is not None:
        fixed = step == 1 and start >= 0 and masking.number_at(node, 3) is None and whole is not None and whole.factor == 1
        _require(fixed and (taken is None or start + taken.offset == whole.offset), "it replaces a part that does not end with the sequence")
    given[dim] = None
    return joined_layouts([tuple(layout), tuple(given)])


@rule(aten.select_scatter.default)
def _select_scatter(masking: Masking, node: fx.Node) -> Layout:
    x, part, dim, index = node.args
    layout, given = masking.layout(x), list(masking.layout(part))
    dim = _dim(dim, len(layout))
    _require(layout[dim] is None or (index >= 0 and layout[dim].factor == 1 and not masking.varying[node].numbers), "it replaces a place that is counted from the sequence's end")
    return joined_layouts([layout, (*given[:dim], None, *given[dim:])])


@rule(aten.flip.default)
def _flip(masking: Masking, node: fx.Node) -> Layout:
    """Places are counted from the real end."""
    x, dims = node.args
    layout = masking.layout(x)
    grown = [dim for dim in (_dim(dim, len(layout)) for dim in dims) if layout[dim] is not None]
    _require(all(layout[dim].factor == 1 for dim in grown), "it turns a flattened sequence")
    if grown:
        edit = masking.editor(node)
        fixed = [dim for dim in dims if _dim(dim, len(layout)) not in grown]
        x = edit(aten.flip.default, x, fixed) if fixed else x
        for dim in grown:
            place = edit(aten.arange.start_step, 0, shape_of(x)[dim])
            turned = edit(aten.sub.Tensor, edit(aten.sub.Tensor, masking.number(masking.count(layout[dim])), 1), place)
            index = edit(aten.where.self, masking.valid(layout[dim]), turned, place)
            x = edit(aten.index.Tensor, x, [*[None] * dim, index])
        node.target, node.args, node.kwargs = aten.alias.default, (x,), {}
    return layout


@rule(aten.cat.default)
def _cat(masking: Masking, node: fx.Node) -> Layout:
    """Along a length only the last operand may grow."""
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    layouts = [list(masking.layout(part)) for part in parts]
    dim = _dim(dim, len(layouts[0]))
    along = [layout[dim] for layout in layouts]
    _require(not any(along[:-1]), "something is joined behind a sequence that is padded")
    _require(along[-1] is None or along[-1].factor == 1, "a flattened sequence is joined with something")
    for layout in layouts:
        layout[dim] = None
    found = list(joined_layouts([tuple(layout) for layout in layouts]))
    wanted = masking.wanted(node)[dim]
    found[dim] = None if wanted is None else wanted.known()
    return tuple(found)


@rule(aten.constant_pad_nd.default)
def _pad(masking: Masking, node: fx.Node) -> Layout:
    """What stands behind the real length is the number that PyTorch pads with."""
    x, pads, value = (*node.args, 0)[:3]
    layout, rank = list(masking.layout(x)), len(shape_of(x))
    right = {1 + i for i in range(1, len(pads), 2)}  # places of the numbers behind, which may fill up to a fixed size
    _require(masking.varying[node].numbers.keys() <= right, "its padding depends on the length")
    dims = [rank - 1 - i // 2 for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    grown = [dim for dim in dims if layout[dim] is not None]
    _require(all(layout[dim].factor == 1 for dim in grown), "a flattened sequence is padded")
    if grown:
        node.args = (masking.masked(node, x, value, grown), *node.args[1:])
    sizes = _known(masking.wanted(node))
    return tuple(sizes[dim] if dim in dims else item for dim, item in enumerate(layout))


# Sums and the like


_NEUTRAL = {aten.sum.dim_IntList: 0, aten.sum.default: 0, aten.mean.dim: 0, aten.mean.default: 0, aten.any.dim: 0, aten.any.dims: 0, aten.any.default: 0,
            aten.all.dim: 1, aten.all.dims: 1, aten.all.default: 1, aten.prod.dim_int: 1, aten.prod.default: 1, aten.amax.default: -1, aten.amin.default: 1}  # fmt: skip
"""What does not change the result; of extremes the sign of the infinity."""

_EXTREMES = {aten.amax.default, aten.amin.default}


@rule(*_NEUTRAL)
def _reduce(masking: Masking, node: fx.Node) -> Layout:
    x = node.args[0]
    layout, rank = masking.layout(x), len(shape_of(x))
    dims = node.args[1] if len(node.args) > 1 else None
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    dims = {_dim(dim, rank) for dim in dims}
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


def _mean(masking: Masking, node: fx.Node, dims: Sequence[int], grown: Sequence[int], kept: bool) -> None:
    """A sum, divided by the number of elements at the real length."""
    x, edit = node.args[0], masking.editor(node)
    layout, fixed = masking.layout(x), 1
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
def _cumulative(masking: Masking, node: fx.Node) -> Layout:
    """A place reads those before it."""
    layout = masking.layout(node.args[0])
    length = layout[_dim(node.args[1], len(layout))] if layout else None
    _require(length is None or length.outer == 1, "it runs over several sequences that were flattened")
    return layout


# Products


@rule(aten.mm.default, aten.bmm.default)
def _product(masking: Masking, node: fx.Node) -> Layout:
    a, b = node.args
    left, right = masking.layout(a), masking.layout(b)
    batch = joined_layouts([left[:-2], right[:-2]])
    if joined(left[-1], right[-2]) is not None:
        node.args = (masking.masked(node, a, 0, [len(left) - 1]), masking.masked(node, b, 0, [len(right) - 2]))
    return (*batch, left[-2], right[-1])


@rule(aten.convolution.default)
def _convolution(masking: Masking, node: fx.Node) -> Layout:
    """x [N, C, *], along a length with stride 1: what it reads behind the end is the zeros that PyTorch pads with."""
    x, weight, bias, stride, _, _, transposed, _, _ = node.args
    layout = masking.layout(x)
    _check_convolution(layout, stride, transposed, masking, node)
    node.args = (masking.masked(node, x, 0, range(2, len(layout))), *node.args[1:])
    return (layout[0], None, *_known(masking.wanted(node)[2:]))


@rule(aten.convolution_backward.default)
def _convolution_backward(masking: Masking, node: fx.Node) -> list[Layout]:
    grad, x, weight, _, stride, _, _, transposed, _, _, _ = node.args
    layout = masking.layout(x)
    _check_convolution(layout, stride, transposed, masking, node)
    node.args = (masking.masked(node, grad), masking.masked(node, x), *node.args[2:])
    return [layout, (None,) * len(shape_of(weight)), (None,)]


def _check_convolution(layout: Layout, stride: Sequence[int], transposed: bool, masking: Masking, node: fx.Node) -> None:
    grown = [dim for dim in range(2, len(layout)) if layout[dim] is not None]
    _require(not masking.varying[node].numbers and layout[1] is None, "a number in it depends on the length")
    _require(not transposed and all(stride[dim - 2] == 1 and layout[dim].factor == 1 for dim in grown), "only a convolution with stride 1 gives the same for a padded sequence")


def _known(layout: Layout) -> Layout:
    return tuple(None if item is None else item.known() for item in layout)


# Look-ups


@rule(aten.embedding.default)
def _embedding(masking: Masking, node: fx.Node) -> Layout:
    weight, indices = node.args[:2]
    _require(not any(masking.layout(weight)), "its rows grow with the length")
    return (*masking.layout(indices), None)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(masking: Masking, node: fx.Node) -> Layout:
    grad, _, _, _, by_frequency = node.args
    _require(not by_frequency, "scale_grad_by_freq counts padding")
    layout = masking.layout(grad)
    node.args = (masking.masked(node, grad, 0, range(len(layout) - 1)), *node.args[1:])
    return (None, layout[-1])


@rule(aten.gather.default)
def _gather(masking: Masking, node: fx.Node) -> Layout:
    x, dim, index = node.args[:3]
    source, layout = list(masking.layout(x)), masking.layout(index)
    if source:
        dim = _dim(dim, len(source))
        _require(source[dim] is None or source[dim].factor == 1, "it gathers from a flattened sequence")
        source[dim] = None
    return joined_layouts([layout, tuple(item if layout[i] is not None else None for i, item in enumerate(source))])


@rule(aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
def _scatter(masking: Masking, node: fx.Node) -> Layout:
    """Along another dim than a length: a place of the padding writes to places of the padding."""
    x, dim, index, source = node.args[:4]
    layouts = [list(masking.layout(value)) for value in (x, index, source) if isinstance(value, fx.Node)]
    dim = _dim(dim, len(layouts[0]))
    _require(not any(layout[dim] for layout in layouts), "it writes to places of the sequence that are computed")
    return joined_layouts([tuple(layout) for layout in layouts])


@rule(aten.index.Tensor)
def _index(masking: Masking, node: fx.Node) -> Layout:
    x, indices = node.args
    node.args = (x, _counted_from_start(masking, node, x, indices))
    return _indexed(masking.layout(x), indices, masking)


@rule(aten.index_put.default)
def _index_put(masking: Masking, node: fx.Node) -> Layout:
    """Padding adds zeros, wherever its index points."""
    x, indices, values = node.args[:3]
    grown = any(any(masking.layout(index)) for index in indices if index is not None)
    _require(not grown or (len(node.args) > 3 and node.args[3]), "padding would overwrite elements")
    target = _indexed(masking.layout(x), indices, masking)
    if grown:
        _require(len(masking.layout(values)) == len(target), "its values are broadcast")
        values = masking.masked(node, values)
    node.args = (x, _counted_from_start(masking, node, x, indices), values, *node.args[3:])
    return masking.layout(x)


def _indexed(layout: Layout, indices: Sequence[fx.Node | None], masking: Masking) -> Layout:
    """The layout of ``x[indices]``."""
    used = [i for i, index in enumerate(indices) if index is not None]
    _require(all(layout[i] is None or layout[i].factor == 1 for i in used), "it reads a flattened sequence by its places")
    found = joined_layouts([masking.layout(indices[i]) for i in used])
    rest = [layout[i] for i in range(len(layout)) if i not in used]
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    return (*rest[:first], *found, *rest[first:])


def _counted_from_start(masking: Masking, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> list[fx.Node | None]:
    """Indices of a dim that grows, those from its end counted from the real one."""
    found, edit = list(indices), masking.editor(node)
    for i, index in enumerate(indices):
        length = masking.layout(x)[i]
        if index is None:
            continue
        _require(index.meta["val"].dtype not in (torch.bool, torch.uint8), "it selects by a mask")
        if length is None or _is_count(index):
            continue
        real = masking.number(masking.count(length))
        found[i] = edit(aten.where.self, edit(aten.lt.Scalar, index, 0), edit(aten.add.Tensor, index, real), index)
    return found


def _is_count(node: fx.Node) -> bool:
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
def _random(masking: Masking, node: fx.Node) -> Layout:
    """Every element gets the number that it has in the tensor of the real length."""
    key, stream, size, _, start = node.args
    layout = _known(masking.wanted(node))
    if not any(layout):
        return layout
    _require(start is None and all(item is None or item.factor == 1 for item in layout), "random numbers of a flattened sequence are counted in another order")
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


# Attention, q [B, H, T, D], k [B, G, S, D], v [B, G, S, E]


@rule(ops.sdpa.default)
def _attention(masking: Masking, node: fx.Node) -> list[Layout]:
    """Keys of padding are hidden; queries of padding give anything, and their keys and values are zero, so that all is finite."""
    layout = _hide(masking, node, 0)
    return [layout, layout[:3]]


@rule(ops.sdpa_backward.default)
def _attention_backward(masking: Masking, node: fx.Node) -> list[Layout]:
    """Without a gradient of their results, queries of padding give none to keys and values."""
    grad, _, k, v = node.args[:4]
    layouts = [masking.layout(x) for x in node.args[1:4]]
    _hide(masking, node, 1)
    node.args = (masking.masked(node, grad, 0, [2]), *node.args[1:])
    return layouts


@rule(ops.flash_attention.default)
def _flash_attention(masking: Masking, node: fx.Node) -> list[Layout]:
    """The same with a bias that takes a gradient; keys of padding are a segment of their own."""
    _hide_flash(masking, node, 0, node.args[8:])
    q, v = node.args[0], node.args[2]
    return [(*masking.layout(q)[:3], masking.layout(v)[3]), masking.layout(q)[:3]]


@rule(ops.flash_attention_backward.default)
def _flash_attention_backward(masking: Masking, node: fx.Node) -> list[Layout]:
    layouts = [masking.layout(x) if x is not None else (None,) for x in node.args[1:5]]
    _hide_flash(masking, node, 1, node.args[11:])
    node.args = (masking.masked(node, node.args[0], 0, [2]), *node.args[1:])
    return layouts


def _hide_flash(masking: Masking, node: fx.Node, at: int, options: Sequence) -> None:
    """Mask the operands that stand at `at` and behind; `options` begin with the band, the scale, empty rows and dropout."""
    q, k, v, bias, q_segments, kv_segments = node.args[at : at + 6]
    _require(not options[4] and not masking.varying[node].numbers, "its dropout counts the places of the padded sequence")
    _require(not any(masking.layout(x)[dim] for x in (q, k, v) for dim in (0, 1, 3)), "heads or batch grow with the length")
    if (keys := masking.layout(k)[2]) is not None:
        if (q_segments, kv_segments, k) not in masking.hidden_segments:
            masking.hidden_segments[q_segments, kv_segments, k] = _segments(masking, node, q, k, q_segments, kv_segments, keys)
        q_segments, kv_segments = masking.hidden_segments[q_segments, kv_segments, k]
    args = [masking.masked(node, x, 0, [2]) for x in (q, k, v)]
    bias = bias if bias is None else masking.masked(node, bias)
    node.args = (*node.args[:at], *args, bias, q_segments, kv_segments, *node.args[at + 6 :])


def _segments(masking: Masking, node: fx.Node, q: fx.Node, k: fx.Node, of_queries: fx.Node | None, of_keys: fx.Node | None, keys: Length) -> tuple[fx.Node, fx.Node]:
    """[B, T] and [B, S]: those of the attention, with another one for keys behind the real length."""
    edit = masking.editor(node)
    if of_queries is None or of_keys is None:
        of_queries, of_keys = (edit(aten.full.default, [shape_of(x)[0], shape_of(x)[2]], 0, dtype=torch.int32) for x in (q, k))
    own = edit(aten.full.default, [], torch.iinfo(torch.int32).min, dtype=torch.int32)
    return of_queries, edit(aten.where.self, masking.valid_in(edit, {1: keys}, 2), of_keys, own)


def _hide(masking: Masking, node: fx.Node, at: int) -> Layout:
    """Mask the operands of an attention that stand at `at` and behind, and return the layout of its output."""
    q, k, v, mask, dropout, causal = node.args[at : at + 6]
    queries, keys = masking.layout(q)[2], masking.layout(k)[2]
    layout = (*masking.layout(q)[:3], masking.layout(v)[3])
    _require(not any(masking.layout(x)[dim] for x in (q, k, v) for dim in (0, 1, 3)), "heads or batch grow with the length")
    if keys is not None and not (causal and mask is None and queries == keys):
        if (mask, keys) not in masking.hidden:
            masking.hidden[mask, keys] = _hidden(masking, masking.editor(node), mask, keys)
        mask = masking.hidden[mask, keys]
    args = [masking.masked(node, x, 0, [2]) for x in (q, k, v)]
    node.args = (*node.args[:at], *args, mask, *node.args[at + 4 :])
    return layout


def _hidden(masking: Masking, edit: Editor, mask: fx.Node | None, keys: Length) -> fx.Node:
    """A mask that also hides the keys behind the real length."""
    valid = masking.valid_in(edit, {3: keys}, 4)
    if mask is None:
        return valid
    if mask.meta["val"].dtype is torch.bool:
        return edit(aten.bitwise_and.Tensor, mask, valid)
    low = edit(aten.full.default, [], float("-inf"), dtype=mask.meta["val"].dtype)
    return edit(aten.where.self, valid, mask, low)


@rule(operator.getitem)
def _getitem(masking: Masking, node: fx.Node) -> Layout:
    return masking.layouts(node.args[0])[node.args[1]]
