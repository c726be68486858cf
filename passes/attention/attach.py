"""The pass: every attention that is found, in whatever form, is read (`masks`) and written as graphacc::flash_attention.

Attention is found as graphacc::sdpa nodes, as graphacc::flash_attention nodes whose bias hides positions (capture makes these of
masks that take a gradient), and written out in products and a softmax (`written_out`).

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D and E head sizes.
"""

import dataclasses
import operator
from collections.abc import Iterator

import torch
from torch import fx

from graphacc.graph import StepGraph
from graphacc.passes.attention.find import Attention, Unmatched, match_flash, match_sdpa
from graphacc.passes.attention.masks import Kept, Masks
from graphacc.passes.attention.written_out import match_written_out
from graphacc.passes.cleanup import remove_dead_code
from graphacc.passes.edit import Editor, shape_of
from graphacc.passes.runner import Log, Pass

aten, ops = torch.ops.aten, torch.ops.graphacc


@dataclasses.dataclass(frozen=True)
class Attached:
    """One attention of the graph, and what became of it."""

    module_path: str
    form: str  # "sdpa", "flash_attention" or "written out"
    what: str  # what its mask says, or why it was left as it is
    attached: bool


@dataclasses.dataclass(frozen=True)
class AttentionReport:
    """Every attention of the graph, in its order."""

    found: tuple[Attached, ...]

    @property
    def missed(self) -> tuple[Attached, ...]:
        return tuple(item for item in self.found if not item.attached)

    def __str__(self) -> str:
        return "\n".join(
            f"  {'attached' if item.attached else 'left'}: {item.module_path or '(no module)'} ({item.form}): {item.what}"
            for item in self.found
        )


def attach_attention(step: StepGraph, log: Log) -> StepGraph:
    """Replace every attention that can be said as graphacc::flash_attention."""
    masks, found = Masks(step), []
    segments: dict[tuple, tuple[fx.Node, fx.Node]] = {}
    for match in _find(step, masks):
        if isinstance(match, Attention):
            _write(step, match, segments)
            log.rewrote()
            found.append(Attached(match.node.meta.get("module_path", ""), match.form, str(match.mask), True))
        else:
            found.append(Attached(match.node.meta.get("module_path", ""), match.form, match.reason, False))
    log.details = AttentionReport(tuple(found)) if found else None
    return remove_dead_code(step, Log())


ATTACH_ATTENTION = Pass(name="attach-attention", exact=False, optional=True, run=attach_attention)


def _find(step: StepGraph, masks: Masks) -> Iterator[Attention | Unmatched]:
    """Every attention in the order of the graph. The graph may be changed around a match before the next is asked for."""
    for node in list(step.graph.nodes):
        if node.target is ops.sdpa.default:
            yield match_sdpa(node, masks)
        elif node.target is ops.flash_attention.default:
            yield match_flash(node, masks)
        elif node.target is aten.exp.default and (match := match_written_out(node, masks)) is not None:
            yield match


def _write(step: StepGraph, match: Attention, segments: dict) -> None:
    build = Editor(step.graph, match.node)
    bias = _bias(build, match)
    tensors = [match.q, match.k, match.v, bias, *_segments(build, match, segments), match.dropout.key, None]
    mask = match.mask
    options = [mask.left, mask.right, match.scale, int(mask.empty_rows)]
    options += [match.dropout.p, match.dropout.stream, list(match.dropout.global_size)]
    forward = build(ops.flash_attention.default, *tensors, *options)
    out, lse = build(operator.getitem, forward, 0), build(operator.getitem, forward, 1)
    match.replace_out(build, out, lse)
    if match.backward is None:
        return
    build = Editor(step.graph, match.backward)
    grad = match.make_grad(build)
    backward = build(
        ops.flash_attention_backward.default, grad, *tensors, out, lse, *options, match.grad_bias is not None
    )
    grads = [build(operator.getitem, backward, index) for index in range(4 if match.grad_bias is not None else 3)]
    match.replace_grads(build, grads)


def _bias(build: Editor, match: Attention) -> fx.Node | None:
    """The sum of all biases, in fp32 where there are several."""
    parts = [_kept(build, item) if isinstance(item, Kept) else item for item in match.mask.bias]
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = build(aten.add.Tensor, total, part)
    shape = shape_of(total)
    return build.view(total, [*[1] * (4 - len(shape)), *shape]) if match.grad_bias is None else total


def _kept(build: Editor, item: Kept) -> fx.Node:
    seen = item.node if item.meta["val"].dtype == torch.bool else build(aten.eq.Scalar, item.node, 0)
    yes, no = (build(aten.full.default, [], value, dtype=torch.float32) for value in (0.0, float("-inf")))
    return build(aten.where.self, seen, no, yes) if item.negated else build(aten.where.self, seen, yes, no)


def _segments(build: Editor, match: Attention, cache: dict) -> tuple[fx.Node | None, fx.Node | None]:
    """int32 [B, T] and [B, S]; made once per mask."""
    mask, batch = match.mask, shape_of(match.q)[0]
    sizes = shape_of(match.q)[2], shape_of(match.k)[2]
    if not (mask.queries or mask.keys or mask.ids):
        return None, None
    key = (tuple(mask.queries), tuple(mask.keys), tuple(mask.ids), batch, *sizes)
    if key not in cache:
        if mask.ids:
            ids = mask.ids[0]
            cache[key] = tuple(_flat(build, node, batch, size) for node, size in zip(ids, sizes))
        else:  # seen: query 1 and key 1; a hidden query is 2, a hidden key 0
            queries = build(aten.full.default, [batch, sizes[0]], 1, dtype=torch.int32)
            if mask.queries:
                hidden = build(aten.bitwise_not.default, _all(build, mask.queries))
                queries = build(aten.add.Tensor, queries, _flat(build, hidden, batch, sizes[0]))
            keys = _all(build, mask.keys) if mask.keys else None
            cache[key] = queries, _flat(build, keys, batch, sizes[1]) if keys else build(
                aten.full.default, [batch, sizes[1]], 1, dtype=torch.int32
            )
    return cache[key]


def _all(build: Editor, nodes: list[fx.Node]) -> fx.Node:
    total = nodes[0]
    for node in nodes[1:]:
        total = build(aten.bitwise_and.Tensor, total, node)
    return total


def _flat(build: Editor, node: fx.Node, batch: int, size: int) -> fx.Node:
    """[B or 1, 1, 1, S] or [B or 1, 1, T, 1] -> int32 [B, size]."""
    shape = shape_of(node)
    rows = shape[0] if len(shape) == 4 else 1
    x = build.view(node, [rows, node.meta["val"].numel() // rows])
    if shape_of(x) != [batch, size]:
        x = build(aten.expand.default, x, [batch, size])
    return build(aten._to_copy.default, x, dtype=torch.int32)

