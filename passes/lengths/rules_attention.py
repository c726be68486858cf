"""Rules of attention. Legend: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E]."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphacc.passes.edit import Editor, shape_of
from graphacc.passes.lengths.layout import Layout, Length
from graphacc.passes.lengths.mask import Masking, rule
from graphacc.passes.lengths.operands import require

aten, ops, prims = torch.ops.aten, torch.ops.graphacc, torch.ops.prims

@rule(ops.sdpa.default)
def _attention(masking: Masking, node: Any) -> list[Layout]:
    """Keys of padding are hidden; queries of padding give anything, and their keys and values are zero, so that all is finite."""
    layout = _hide(masking, node, 0)
    return [layout, layout[:3]]


@rule(ops.sdpa_backward.default)
def _attention_backward(masking: Masking, node: Any) -> list[Layout]:
    """Without a gradient of their results, queries of padding give none to keys and values."""
    grad, *inputs = node.args[:4]
    layouts = [masking.layout(x) for x in inputs]
    _hide(masking, node, 1)
    node.args = (masking.masked(node, grad, 0, [2]), *node.args[1:])
    return layouts


@rule(ops.flash_attention.default)
def _flash_attention(masking: Masking, node: Any) -> list[Layout]:
    """The same with a bias that takes a gradient; keys of padding are a segment of their own."""
    _hide_flash(masking, node, 0, node.args[8:])
    q, v = node.args[0], node.args[2]
    return [(*masking.layout(q)[:3], masking.layout(v)[3]), masking.layout(q)[:3]]


@rule(ops.flash_attention_backward.default)
def _flash_attention_backward(masking: Masking, node: Any) -> list[Layout]:
    layouts = [masking.layout(x) if x is not None else (None,) for x in node.args[1:5]]
    _hide_flash(masking, node, 1, node.args[11:])
    node.args = (masking.masked(node, node.args[0], 0, [2]), *node.args[1:])
    return layouts


def _hide_flash(masking: Masking, node: Any, at: int, options: Sequence) -> None:
    """Mask the operands that stand at `at` and behind; `options` begin with the band, the scale, empty rows and dropout."""
    q, k, v, bias, q_segments, kv_segments = node.args[at : at + 6]
    require(not options[4] and not masking.varying[node].numbers, "its dropout counts the places of the padded sequence")
    require(not any(masking.layout(x)[dim] for x in (q, k, v) for dim in (0, 1, 3)), "heads or batch grow with the length")
    if (keys := masking.layout(k)[2]) is not None:
        if (q_segments, kv_segments, k) not in masking.hidden_segments:
            masking.hidden_segments[q_segments, kv_segments, k] = _segments(masking, node, q, k, q_segments, kv_segments, keys)
        q_segments, kv_segments = masking.hidden_segments[q_segments, kv_segments, k]
    args = [masking.masked(node, x, 0, [2]) for x in (q, k, v)]
    bias = bias if bias is None else masking.masked(node, bias)
    node.args = (*node.args[:at], *args, bias, q_segments, kv_segments, *node.args[at + 6 :])


def _segments(masking: Masking, node: Any, q: fx.Node, k: fx.Node, of_queries: fx.Node | None, of_keys: fx.Node | None, keys: Length) -> tuple[fx.Node, fx.Node]:
    """[B, T] and [B, S]: those of the attention, with another one for keys behind the real length."""
    edit = masking.editor(node)
    if of_queries is None or of_keys is None:
        of_queries, of_keys = (edit(aten.full.default, [shape_of(x)[0], shape_of(x)[2]], 0, dtype=torch.int32) for x in (q, k))
    own = edit(aten.full.default, [], torch.iinfo(torch.int32).min, dtype=torch.int32)
    return of_queries, edit(aten.where.self, masking.valid_in(edit, {1: keys}, 2), of_keys, own)


def _hide(masking: Masking, node: Any, at: int) -> Layout:
    """Mask the operands of an attention that stand at `at` and behind, and return the layout of its output."""
    q, k, v, mask, _, causal = node.args[at : at + 6]
    queries, keys = masking.layout(q)[2], masking.layout(k)[2]
    layout = (*masking.layout(q)[:3], masking.layout(v)[3])
    require(all(length is None or length.factor == 1 for length in (queries, keys)), "its sequence is flattened")
    require(not any(masking.layout(x)[dim] for x in (q, k, v) for dim in (0, 1, 3)), "heads or batch grow with the length")
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
def _getitem(masking: Masking, node: Any) -> Layout:
    return masking.layouts(node.args[0])[node.args[1]]
