"""Finding routing: a sort of expert ids, what is looked up and put back by its order, and the counts of every expert's rows.

Legend: M rows, N tokens, k experts of a token (M = N * k), E experts.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import fx

from graphacc.graph import StepGraph
from graphacc.ops.facts import OpKind, facts, of_kind
from graphacc.passes.edit import Editor, items, shape_of
from graphacc.passes.partition.constants import is_zero
from graphacc.passes.runner import Log

aten, ops = torch.ops.aten, torch.ops.graphacc
Make = Callable[[Editor], fx.Node]
_CASTS = of_kind(OpKind.SAME, OpKind.CAST)
_SORTS = (aten.sort.default, aten.sort.stable)
_LOOKUPS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)


@dataclasses.dataclass
class Routing:
    """One sort of expert ids, and what the values that are made with its order become."""

    node: fx.Node  # the sort
    ids: fx.Node  # [M]
    replace: list[tuple[fx.Node, Make]] = dataclasses.field(default_factory=list)
    num_experts: int | None = None
    unknown: str = ""  # why it stays as it is


def find_routing(node: fx.Node) -> Routing | None:
    """What is made with the order of a sort; None if `node` is no sort of expert ids."""
    if not _sorts_ids(node):
        return None
    routing = Routing(node, node.args[0])
    parts = items(node)
    for user in [*(parts[0].users if 0 in parts else ()), *routing.ids.users]:
        _read_counts(routing, user)
    if 1 not in parts or routing.num_experts is None:
        return None
    if 0 in parts:
        routing.replace.append((parts[0], lambda build: build(ops.sort_rows.default, routing.ids, routing.ids)))
    for user in parts[1].users:
        _read_use(routing, parts[1], user)
    return routing


def _sorts_ids(node: fx.Node) -> bool:
    if node.target not in _SORTS:
        return False
    value, schema = node.args[0].meta["val"], [argument.name for argument in node.target._schema.arguments]
    descending = node.kwargs.get("descending", dict(zip(schema, node.args)).get("descending", False))
    integer = not value.dtype.is_floating_point and value.dtype != torch.bool
    return value.dim() == 1 and integer and not descending


def _read_counts(routing: Routing, node: fx.Node) -> None:
    """``cumsum(histc(ids, E, 0, E - 1))``: where each expert's rows end."""
    node = _through_casts(node)
    if node is None or node.target is not aten.histc.default:
        return
    bins, low, high = [*node.args, *[0] * 3][1:4]
    for user in node.users:
        total = _through_casts(user)
        if (low, high) == (0, bins - 1) and total is not None and total.target is aten.cumsum.default and total.args[1] in (0, -1):
            _note_counts(routing, total, bins)


def _note_counts(routing: Routing, node: fx.Node, num_experts: int) -> None:
    if routing.num_experts not in (None, num_experts):
        routing.unknown = f"its ids are counted for {routing.num_experts} experts and for {num_experts}"
    routing.num_experts = num_experts
    dtype = node.meta["val"].dtype

    def make(build: Editor) -> fx.Node:
        offsets = build(ops.expert_offsets.default, routing.ids, num_experts)
        return offsets if dtype == torch.int32 else build(aten._to_copy.default, offsets, dtype=dtype)

    routing.replace.append((node, make))


def _through_casts(node: fx.Node) -> fx.Node | None:
    """The node behind casts that have one user each."""
    while node.target in _CASTS:
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
    return node


def _read_use(routing: Routing, order: fx.Node, node: fx.Node) -> None:
    """One use of the sort's order."""
    if (inverse := _inverse(node, order)) is not None:
        for user in inverse.users:
            if not _read_inverse(routing, inverse, user):
                _give_up(routing, user)
    elif (copies := _divisor(node, order)) is not None:
        for user in node.users:
            if not _read_rows(routing, node, user, copies):
                _give_up(routing, user)
    elif not _read_rows(routing, order, node, 1):
        _give_up(routing, node)


def _give_up(routing: Routing, node: fx.Node) -> None:
    routing.unknown = routing.unknown or f"{node.name} ({node.target}) uses its order in a way that is not known"


def _divisor(node: fx.Node, order: fx.Node) -> int | None:
    """The k of ``order // k``."""
    floors = node.target is aten.floor_divide.default or (
        node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") in ("floor", "trunc")
    )
    return node.args[1] if floors and node.args[0] is order and isinstance(node.args[1], int) and node.args[1] > 0 else None


def _inverse(node: fx.Node, order: fx.Node) -> fx.Node | None:
    """The inverse of a permutation: ``inverse[order] = arange(M)``, or its own sort."""
    if node.target in _PUTS and _indices(node) == [order] and not _accumulates(node):
        counts = facts(node.args[2].target).kind is OpKind.COUNT
        size = order.meta["val"].shape[0]
        bounds = {1: (0, *node.args[2].args, 1), 2: (*node.args[2].args, 1), 3: node.args[2].args} if counts else {}
        right = counts and tuple(bounds[len(node.args[2].args)]) == (0, size, 1)
        return node if right and shape_of(node) == [size] and len(shape_of(node.args[2])) == 1 else None
    if _sorts_ids(node) and node.args[0] is order and list(items(node)) == [1]:
        return items(node)[1]
    return None


def _indices(node: fx.Node) -> list:
    return list(node.args[1]) if isinstance(node.args[1], (list, tuple)) else [node.args[1]]


def _looks_up(node: fx.Node, index: fx.Node) -> bool:
    """``x[index]`` along dim 0."""
    if node.target is aten.index_select.default:
        return node.args[1] == 0 and node.args[2] is index
    return node.target in _LOOKUPS and _indices(node) == [index] and node.args[0] is not index


def _accumulates(node: fx.Node) -> bool:
    return bool(node.args[3]) if len(node.args) > 3 else bool(node.kwargs.get("accumulate", False))


def _puts(node: fx.Node, index: fx.Node, *, all_rows: bool) -> bool:
    """``zeros[index] += rows``, whole rows; or ``x[index] = rows``, where `index` names every row of `x` once."""
    if node.target not in _PUTS or _indices(node) != [index] or node.args[2] is index or node.args[0] is index:
        return False
    rows = [shape_of(index)[0], *shape_of(node)[1:]]
    adds = is_zero(node.args[0]) if _accumulates(node) else all_rows
    return shape_of(node.args[2]) == rows and adds


def _adds(node: fx.Node, index: fx.Node) -> bool:
    """``x.index_add(0, index, rows)``."""
    return node.target is aten.index_add.default and node.args[1] == 0 and node.args[2] is index and node.kwargs.get("alpha", 1) == 1


def _read_rows(routing: Routing, index: fx.Node, node: fx.Node, copies: int) -> bool:
    """``x[index]`` sorts rows, every one `copies` times, and ``zeros[index] += rows`` puts them back and adds the copies up."""
    num_rows = shape_of(routing.ids)[0]
    if _looks_up(node, index) and shape_of(node.args[0])[0] * copies == num_rows:
        routing.replace.append((node, lambda build: build(ops.sort_rows.default, _repeated(build, node.args[0], copies), routing.ids)))
        return True
    if shape_of(node)[:1] != [num_rows // copies] or num_rows % copies:
        return False
    if _puts(node, index, all_rows=copies == 1):
        routing.replace.append((node, lambda build: _put_back(build, node.args[2], routing.ids, copies)))
        return True
    if _adds(node, index):

        def add(build: Editor) -> fx.Node:
            total = _put_back(build, node.args[3], routing.ids, copies)
            return total if is_zero(node.args[0]) else build(aten.add.Tensor, node.args[0], total)

        routing.replace.append((node, add))
        return True
    return False


def _read_inverse(routing: Routing, inverse: fx.Node, node: fx.Node) -> bool:
    """``rows[inverse]`` puts rows back, and ``zeros[inverse] += rows``, its gradient, sorts them."""
    size = shape_of(routing.ids)[0]
    if _looks_up(node, inverse) and shape_of(node.args[0])[0] == size:
        routing.replace.append((node, lambda build: build(ops.unsort_rows.default, node.args[0], routing.ids)))
        return True
    if _puts(node, inverse, all_rows=True) and shape_of(node)[0] == size:
        routing.replace.append((node, lambda build: build(ops.sort_rows.default, node.args[2], routing.ids)))
        return True
    return False


def _repeated(build: Editor, x: fx.Node, copies: int) -> fx.Node:
    """[N, ...] -> [N * copies, ...], every row `copies` times in a row."""
    if copies == 1:
        return x
    rows, *rest = shape_of(x)
    wide = build(aten.expand.default, build(aten.unsqueeze.default, x, 1), [rows, copies, *rest])
    return build.view(wide, [rows * copies, *rest])


def _put_back(build: Editor, rows: fx.Node, ids: fx.Node, copies: int) -> fx.Node:
    """Sorted [M, ...] -> [N, ...], the sum over the copies of every row."""
    rows = build(ops.unsort_rows.default, rows, ids)
    if copies == 1:
        return rows
    size, *rest = shape_of(rows)
    return build(aten.sum.dim_IntList, build(aten.view.default, rows, [size // copies, copies, *rest]), [1])


# Products


def rewrite_products(step: StepGraph, log: Log) -> Iterator[fx.Node]:
    """Grouped products with the counts of a routing become graphacc's, in whatever form they are; gives those that were left."""
    for node in list(step.graph.nodes):
        form = PRODUCTS.get(str(node.target))
        if form is None:
            continue
        offsets = node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None)
        counts = offsets
        while isinstance(counts, fx.Node) and counts.target in _CASTS:
            counts = counts.args[0]
        known = isinstance(counts, fx.Node) and counts.target is ops.expert_offsets.default
        if known and form(Editor(step.graph, node), node, counts):
            log.rewrote()
        else:
            yield node


def _forward(build: Editor, node: fx.Node, offsets: fx.Node) -> bool:
    _replace(node, build(ops.grouped_mm.default, node.args[0], node.args[1], offsets))
    return True


def _backward(build: Editor, node: fx.Node, offsets: fx.Node) -> bool:
    """(rows, weight, offsets, grad) -> the gradients of the rows and of the weight."""
    rows, weight, _, grad = node.args
    for index, item in items(node).items():
        if index == 0:
            new = build(ops.grouped_mm.default, grad, build(aten.permute.default, weight, [0, 2, 1]), offsets)
        else:
            new = build(ops.grouped_mm_weight_grad.default, rows, grad, offsets)
        _replace(item, new)
    return True


def _native(build: Editor, node: fx.Node, offsets: fx.Node) -> bool:
    """torch's own: rows and a matrix each; or columns and rows, which is the gradient of the matrices."""
    a, b = node.args[:2]
    value, others = a.meta["val"], [*node.args[3:], *(node.kwargs.get(name) for name in ("bias", "out_dtype"))]
    if any(other not in (None, value.dtype) for other in others) or value.dim() != 2 or node.meta["val"].dtype != value.dtype:
        return False
    if b.meta["val"].dim() == 3:
        _replace(node, build(ops.grouped_mm.default, a, b, offsets))
    else:
        _replace(node, build(ops.grouped_mm_weight_grad.default, build(aten.t.default, a), b, offsets))
    return True


def _replace(old: fx.Node, new: fx.Node) -> None:
    assert new.meta["val"].shape == old.meta["val"].shape and new.meta["val"].dtype == old.meta["val"].dtype, f"{old.name}"
    old.replace_all_uses_with(new)


PRODUCTS = {
    "transformers.grouped_mm_fallback.default": _forward,
    "transformers.grouped_mm_fallback_backward.default": _backward,
    "aten._grouped_mm.default": _native,
}
