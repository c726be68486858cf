"""Finding attention: what is read, and which values of the graph the new operators replace.

Legend: B batch, H query heads, G key/value heads, R = H / G, T queries, S keys, D head size.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import fx

from graphacc.ops.facts import OpKind, of_kind
from graphacc.ops.flash_attention import KERNEL_DTYPES, EmptyRows
from graphacc.passes.attention.masks import Masks, Reading
from graphacc.passes.edit import Editor, items, only_user, shape_of

aten, ops = torch.ops.aten, torch.ops.graphacc
_SUMMING = (aten.view.default, aten.sum.dim_IntList, aten.squeeze.dims, aten.clone.default, aten.permute.default)
_ALIKE = of_kind(OpKind.SAME)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of the probabilities by numbers of one stream."""

    key: fx.Node | None = None
    p: float = 0.0
    stream: int = 0
    global_size: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention. `q`, `k` and `v` have 4 dims, [batch, heads, length, head size]."""

    node: fx.Node  # of the forward: what is new stands before it
    form: str
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: Reading
    scale: float
    dropout: Dropout
    backward: fx.Node | None  # what is new of the backward stands before it
    make_grad: Callable[[Editor], fx.Node]  # the gradient of the output, [B, H, T, E]
    replace_out: Callable[[Editor, fx.Node, fx.Node], None]  # the output and the log-sum-exp have these values now
    replace_grads: Callable[[Editor, list[fx.Node]], None]  # the same for the gradients of q, k, v and the bias
    grad_bias: fx.Node | None = None  # the gradient of the only bias, if it takes one


@dataclasses.dataclass(frozen=True)
class Unmatched:
    """Something that looks like attention and stays as it is."""

    node: fx.Node
    form: str
    reason: str


def match_sdpa(node: fx.Node, masks: Masks) -> Attention | Unmatched:
    q, k, v, mask, dropout_mask, is_causal, scale = node.args
    dropout = Dropout() if dropout_mask is None else read_dropout(dropout_mask, q, k)
    if q.meta["val"].dtype not in KERNEL_DTYPES:
        return Unmatched(node, "sdpa", f"{q.meta['val'].dtype} has no kernel")
    if dropout is None:
        return Unmatched(node, "sdpa", "its dropout mask is not one of capture's random operators")
    reading = masks.read([] if mask is None else [mask], shape_of(q)[2], shape_of(k)[2], causal=is_causal)
    if isinstance(reading, str):
        return Unmatched(node, "sdpa", reading)
    results = items(node)
    backward = _backward_of(node, ops.sdpa_backward.default, 7)
    grads = {} if backward is None else items(backward)
    grouped = ungroup(k, v, grads.get(1), grads.get(2))
    if grouped is not None:
        k, v = grouped.k, grouped.v
        grads |= {1: grouped.grad_k, 2: grouped.grad_v}
    return Attention(
        node=node,
        form="sdpa",
        q=q,
        k=k,
        v=v,
        mask=reading,
        scale=scale,
        dropout=dropout,
        backward=backward,
        make_grad=lambda build: backward.args[0],
        replace_out=lambda build, *new: _replace(results, new),
        replace_grads=lambda build, new: _replace(grads, new),
    )


def match_flash(node: fx.Node, masks: Masks) -> Attention | Unmatched:
    """A bias that hides positions becomes bounds and segments; what is said already stays."""
    q, k, v, bias, q_segments, _, key, start, left, right, scale, _, p, stream, size = node.args
    unchanged = Unmatched(node, "flash_attention", "called by the model, and kept as it is")
    if bias is None or q_segments is not None or start is not None or q.meta["val"].dtype not in KERNEL_DTYPES:
        return unchanged
    reading = masks.read([bias], shape_of(q)[2], shape_of(k)[2])
    if isinstance(reading, str) or reading.bias == [bias]:
        return unchanged
    if (left, right) != (-1, -1) and reading.empty_rows != EmptyRows.ZEROS:
        return unchanged  # a row without a key is uniform over the keys in its bounds
    backward, results = _backward_of(node, ops.flash_attention_backward.default, 10), items(node)
    grads = {} if backward is None else items(backward)
    grad_bias = None
    if 3 in grads:
        grad_bias = _bias_gradient(grads[3], reading)
        if grad_bias is None:
            return dataclasses.replace(unchanged, reason="the gradient of its bias is used in a form that is not known")
        grads[3] = grad_bias
    reading.bound(left, right)
    return Attention(
        node=node,
        form="flash_attention",
        q=q,
        k=k,
        v=v,
        mask=reading,
        scale=scale,
        dropout=Dropout(key, p, stream, tuple(size)),
        backward=backward,
        make_grad=lambda build: backward.args[0],
        replace_out=lambda build, *new: _replace(results, new),
        replace_grads=lambda build, new: _replace(grads, new),
        grad_bias=grad_bias,
    )


def _bias_gradient(grad: fx.Node, reading: Reading) -> fx.Node | None:
    """The gradient of the bias inside ``where(seen, bias, low)``, expanded: ``sum(where(seen, grad, 0))``."""
    if len(reading.bias) != 1 or not isinstance(reading.bias[0], fx.Node):
        return None
    wanted, masked, node = shape_of(reading.bias[0]), False, grad
    while not (masked and shape_of(node) == wanted):
        user = only_user(node)
        if user is None:
            return None
        if user.target is aten.where.self and user.args[1] is node:
            masked = True
        elif user.target not in (*_ALIKE, aten.sum.dim_IntList) or user.args[0] is not node:
            return None
        node = user
    return node


def _backward_of(node: fx.Node, target: Callable, position: int) -> fx.Node | None:
    """The backward call that reads the log-sum-exp of a forward call, as its argument number `position`."""
    lse = items(node).get(1)
    found = [user for user in (() if lse is None else lse.users) if user.target is target and user.args[position] is lse]
    return found[0] if len(found) == 1 else None


def _replace(old: dict[int, fx.Node], new: list[fx.Node] | tuple[fx.Node, ...]) -> None:
    for index, node in old.items():
        node.replace_all_uses_with(new[index])


# Dropout


def read_dropout(mask: fx.Node, q: fx.Node, k: fx.Node) -> Dropout | None:
    """The dropout that a mask of 0 and 1 / (1 - p) stands for."""
    factor = 1.0
    while mask.target in (aten.div.Tensor, aten.mul.Tensor, *_ALIKE, *of_kind(OpKind.CAST)):
        if mask.target in (aten.div.Tensor, aten.mul.Tensor):
            if not isinstance(mask.args[1], (int, float)):
                return None
            factor = factor / mask.args[1] if mask.target is aten.div.Tensor else factor * mask.args[1]
        mask = mask.args[0]
    return kept_by(mask, factor, [*shape_of(q)[:3], shape_of(k)[2]])


def kept_by(kept: fx.Node, factor: float, scores: list[int]) -> Dropout | None:
    """The dropout of ``random_uniform >= p``, scaled by `factor`."""
    if kept.target is not aten.ge.Scalar or kept.args[0].target is not ops.random_uniform.default:
        return None
    p, (key, stream, size, global_size, start) = kept.args[1], kept.args[0].args
    if list(size) != scores or list(global_size) != scores or start is not None or not 0 < p < 1:
        return None
    return Dropout(key, p, stream, tuple(size)) if abs(factor * (1.0 - p) - 1.0) < 1e-6 else None


# Grouped heads


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Keys and values before their heads were repeated, and the gradients after they were summed."""

    k: fx.Node
    v: fx.Node
    grad_k: fx.Node | None
    grad_v: fx.Node | None


def ungroup(
    k: fx.Node, v: fx.Node, grad_k: fx.Node | None, grad_v: fx.Node | None, *, transposed_k: bool = False
) -> Grouped | None:
    """[B, H, S, D] that repeats [B, G, S, D], with the sum over the repetitions in the backward."""
    inner_k, inner_v = _unrepeated(k), _unrepeated(v)
    if inner_k is None or inner_v is None or shape_of(inner_k)[1] != shape_of(inner_v)[1]:
        return None
    summed_k, summed_v = _summed(grad_k, inner_k, transposed_k), _summed(grad_v, inner_v, False)
    if (grad_k is not None and summed_k is None) or (grad_v is not None and summed_v is None):
        return None
    return Grouped(inner_k, inner_v, summed_k, summed_v)


def _unrepeated(x: fx.Node) -> fx.Node | None:
    """The x of ``x.unsqueeze(2).expand(B, G, R, S, D).reshape(B, H, S, D)``."""
    if x.target is not aten.view.default:
        return None
    shape, node = shape_of(x), x.args[0]
    node = node.args[0] if node.target is aten.clone.default else node
    if node.target is not aten.expand.default or node.args[0].target is not aten.unsqueeze.default:
        return None
    wide, inner = shape_of(node), node.args[0].args[0]
    fits = len(wide) == 5 and node.args[0].args[1] in (2, -3) and len(shape_of(inner)) == 4
    groups = shape_of(inner)[1]
    return inner if fits and [wide[0], wide[1] * wide[2], *wide[3:]] == shape and wide[1] == groups else None


def _summed(grad: fx.Node | None, inner: fx.Node, transposed: bool) -> fx.Node | None:
    """The gradient with the shape of `inner`, where a sum over the repetitions is all that is made of `grad`."""
    node, summed, turned = grad, False, False
    while node is not None and not (summed and shape_of(node) == shape_of(inner)):
        user = only_user(node)
        if user is None or user.args[0] is not node or user.target not in _SUMMING:
            return None
        if user.target is aten.permute.default:
            if turned or not transposed or list(user.args[1]) != [0, 1, 3, 2]:
                return None
            turned = True
        if user.target is aten.sum.dim_IntList:
            if summed or list(user.args[1]) != [2] or len(shape_of(node)) != 5:
                return None
            summed = True
        node = user
    return node if turned == transposed else None
