"""Attention written out in products and a softmax: ``softmax(q kᵀ · scale + mask) v``, and autograd's backward of exactly that.

The forward is a chain from the first product to the second; the backward is walked along the same chain in the other direction.
Only if no value of the two is used by anything else, the products' operands are q, k and v, and the gradients that leave
the chain are those of these operands, whatever made them.

Legend: B batch, H heads, T queries, S keys, D and E head sizes; N is B * H where products have 3 dims.
"""

import dataclasses

import torch
from torch import fx

from graphacc.graph import Phase
from graphacc.ops.facts import OpKind, of_kind
from graphacc.ops.flash_attention import KERNEL_DTYPES
from graphacc.passes.attention.find import Attention, Dropout, Unmatched, kept_by, ungroup
from graphacc.passes.attention.masks import LOW, Masks
from graphacc.passes.edit import Editor, shape_of

aten = torch.ops.aten
_VIEWS = of_kind(OpKind.SAME, OpKind.RESHAPE) | {aten.expand.default}
_CAST = aten._to_copy.default
_FORM = "written out"


class _Differs(Exception):
    """The graph is not attention of this form; says where it differs."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """One link of the chain: `node` is made of `before` and perhaps `other`."""

    kind: str  # "view", "cast", "scale", "add", "where" or "drop"
    before: fx.Node
    node: fx.Node
    other: object = None


def match_written_out(exp: fx.Node, masks: Masks) -> Attention | Unmatched | None:
    """The attention whose softmax has this exponential; None if it is the exponential of something else."""
    if exp.meta["phase"] is not Phase.FORWARD:
        return None
    try:
        softmax = _softmax(exp)
        scores, first = _scores(softmax["scores"])
    except _Differs:
        return None  # a softmax, but no attention
    try:
        drops, second = _values(softmax["p"])
        return _match(exp, softmax, scores, first, drops, second, masks)
    except _Differs as reason:
        return Unmatched(exp, _FORM, str(reason))


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise _Differs(reason)


def _one(candidates: list[fx.Node], what: str) -> fx.Node:
    _require(len(candidates) == 1, f"{len(candidates)} nodes are {what}")
    return candidates[0]


def _numel(node: fx.Node) -> int:
    return node.meta["val"].numel()


def _users(node: fx.Node, target: object, phase: Phase) -> list[fx.Node]:
    return [user for user in node.users if user.target is target and user.meta["phase"] is phase]


# Forward


def _softmax(exp: fx.Node) -> dict[str, fx.Node]:
    """scores, amax, sub, exp, total and p of ``exp(scores - amax) / total``."""
    sub = exp.args[0]
    _require(sub.target is aten.sub.Tensor and isinstance(sub.args[1], fx.Node) and not sub.kwargs, "no softmax")
    scores, amax = sub.args
    rank = len(shape_of(scores))
    _require(amax.target is aten.amax.default and amax.args[0] is scores and rank in (3, 4), "no softmax")
    _require(list(amax.args[1]) in ([-1], [rank - 1]) and amax.args[2:] == (True,), "no softmax over the keys")
    p = _one([user for user in _users(exp, aten.div.Tensor, Phase.FORWARD) if user.args[0] is exp], "the softmax")
    total = p.args[1]
    _require(isinstance(total, fx.Node) and total.target is aten.sum.dim_IntList and total.args[0] is exp, "no softmax")
    return {"scores": scores, "amax": amax, "sub": sub, "exp": exp, "total": total, "p": p}


def _scores(node: fx.Node) -> tuple[list[_Step], fx.Node]:
    """The chain from the product q kᵀ to the scores, and that product."""
    steps = []
    while node.target is not aten.bmm.default:
        step = _score_step(node)
        steps.append(step)
        node = step.before
    return steps[::-1], node


def _score_step(node: fx.Node) -> _Step:
    if node.target in _VIEWS and _numel(node) == _numel(node.args[0]):
        return _Step("view", node.args[0], node)
    if node.target is _CAST:
        return _Step("cast", node.args[0], node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], (int, float)):
        factor = float(node.args[1])
        return _Step("scale", node.args[0], node, factor if node.target is aten.mul.Tensor else 1.0 / factor)
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
        for score, other in (node.args, node.args[::-1]):
            if _from_product(score):
                return _Step("add", score, node, other)
    if node.target is aten.where.self:
        for score in node.args[1:]:
            if _from_product(score):
                return _Step("where", score, node)
    raise _Differs("the scores do not come from a product")


def _from_product(node: fx.Node) -> bool:
    try:
        return bool(_scores(node))
    except (_Differs, AttributeError, IndexError):
        return False


def _values(p: fx.Node) -> tuple[list[_Step], fx.Node]:
    """The chain from the probabilities to the product with v, and that product."""
    steps, node = [], p
    while True:
        users = [user for user in node.users if user.op == "output" or user.meta["phase"] is Phase.FORWARD]
        user = _one(users, "users of the probabilities")
        if user.target is aten.bmm.default and user.args[0] is node:
            return steps, user
        steps.append(_value_step(node, user))
        node = user


def _value_step(node: fx.Node, user: fx.Node) -> _Step:
    if user.target in _VIEWS and _numel(user) == _numel(node):
        return _Step("view", node, user)
    if user.target is _CAST:
        return _Step("cast", node, user)
    if user.target is aten.mul.Tensor and user.args[0] is node:
        return _Step("drop", node, user, user.args[1])
    raise _Differs(f"the probabilities go through {user.target}")


# The match


def _match(exp, softmax, scores: list[_Step], first: fx.Node, drops: list[_Step], second: fx.Node, masks: Masks) -> Attention | Unmatched:
    batch, heads = _batch_and_heads([first, *(step.node for step in scores), softmax["p"]])
    q3, k3 = first.args
    v3 = second.args[1]
    dtype, other = (fx.map_arg(x, lambda node: node.meta["val"].dtype) for x in (q3, v3))
    _require(dtype in KERNEL_DTYPES, f"{dtype} has no kernel")
    _require(dtype == other, f"its products are in {dtype} and {other}")
    q_len, dim, kv_len = (*shape_of(q3)[1:], shape_of(k3)[2])
    build = Editor(exp.graph, second)
    scale, terms = _scale_and_terms(build, scores, batch, heads, masks)
    reading = masks.read(terms, q_len, kv_len, nan_rows=True)
    _require(not isinstance(reading, str), reading)
    dropout = _dropout(drops, [batch, heads, q_len, kv_len])
    interior = {first, *softmax.values(), *(step.node for step in scores), *(step.node for step in drops)}
    back = _backward(first, scores, softmax["p"], drops, second)
    if back is not None and back.grad_bias is not None:
        taken = [term for term in terms if shape_of(term) == shape_of(back.grad_bias)]
        _require(len(taken) == 1 and reading.bias == taken, "a bias takes a gradient beside another one")
    exits = {second} if back is None else {second, back.grad_q, back.grad_k, back.grad_v} | ({back.grad_bias} - {None})
    interior |= set() if back is None else back.interior
    for node in interior - exits:
        outside = [user.name for user in node.users if user not in interior and user not in exits]
        _require(not outside, f"its value {node.name} is used by {', '.join(outside)} as well")
    q, v = _four_dims(q3, [batch, heads, q_len, dim], build), _four_dims(v3, [batch, heads, *shape_of(v3)[1:]], build)
    k = _keys(k3, [batch, heads, kv_len, dim], build)
    return _attention(q, k, v, reading, scale, dropout, second, back)


def _attention(q, k, v, reading, scale, dropout, second, back) -> Attention:
    grads = {} if back is None else {0: back.grad_q, 1: back.grad_k, 2: back.grad_v}
    kinds = {0: "rows", 1: "columns", 2: "rows"}
    grouped = ungroup(k, v, grads.get(1), grads.get(2), transposed_k=True)
    if grouped is not None:
        k, v = grouped.k, grouped.v
        if back is not None:
            grads |= {1: grouped.grad_k, 2: grouped.grad_v}
            kinds |= {1: "whole", 2: "whole"}
    if back is not None and back.grad_bias is not None:
        grads[3], kinds[3] = back.grad_bias, "whole"

    def replace_out(build: Editor, out: fx.Node, _lse: fx.Node) -> None:
        second.replace_all_uses_with(build.view(out, shape_of(second)))

    def replace_grads(build: Editor, new: list[fx.Node]) -> None:
        for index, node in grads.items():
            value = build(aten.permute.default, new[index], [0, 1, 3, 2]) if kinds[index] == "columns" else new[index]
            node.replace_all_uses_with(build.view(value, shape_of(node)))

    return Attention(
        node=second,
        form=_FORM,
        q=q,
        k=k,
        v=v,
        mask=reading,
        scale=scale,
        dropout=dropout,
        backward=None if back is None else min(back.grad_p, back.grad_v),  # the first of the two
        make_grad=lambda build: _four_dims(back.grad, [*shape_of(q)[:3], shape_of(v)[3]], build),
        replace_out=replace_out,
        replace_grads=replace_grads,
        grad_bias=None if back is None else back.grad_bias,
    )


def _batch_and_heads(nodes: list[fx.Node]) -> tuple[int, int]:
    for node in nodes:
        if len(shape_of(node)) == 4:
            return tuple(shape_of(node)[:2])
    return shape_of(nodes[0])[0], 1


def _scale_and_terms(build: Editor, steps: list[_Step], batch: int, heads: int, masks: Masks) -> tuple[float, list[fx.Node]]:
    scale, terms = 1.0, []
    for step in steps:
        shape = shape_of(step.node)
        known = len(shape) == 3 or (len(shape) == 4 and tuple(shape[:2]) == (batch, heads))
        _require(known or step.kind not in ("add", "where"), f"a mask is applied to scores of shape {list(shape)}, where there are {batch} x {heads} heads")
        if step.kind == "scale":
            _require(not terms, "a mask is scaled with the scores")
            scale *= step.other
        elif step.kind == "add":
            shape = shape_of(step.other)
            if len(shape) == 3 and len(shape_of(step.node)) == 3:
                shape = [batch, heads, *shape[1:]] if shape[0] != 1 else [1, *shape]
            terms.append(build.view(step.other, shape))
        elif step.kind == "where":
            cond, yes, no = step.node.args
            low = masks.scalar(no if yes is step.before else yes)
            _require(low is not None and low <= LOW, "the scores are replaced by something else than a low number")
            terms.append(cond if yes is step.before else build(aten.logical_not.default, cond))
    return scale, terms


def _dropout(steps: list[_Step], scores: list[int]) -> Dropout:
    drops = [step.other for step in steps if step.kind == "drop"]
    if not drops:
        return Dropout()
    masks = [other for other in drops if isinstance(other, fx.Node)]
    _require(len(masks) == 1, "the probabilities are multiplied by several tensors")
    kept = masks[0].args[0] if masks[0].target is _CAST else masks[0]
    factor = 1.0
    for other in drops:
        factor *= 1.0 if isinstance(other, fx.Node) else other
    dropout = kept_by(kept, factor, scores)
    _require(dropout is not None, "the probabilities are multiplied by something else than dropout")
    return dropout


def _four_dims(node: fx.Node, shape: list[int], build: Editor) -> fx.Node:
    """`node` as a tensor of `shape`: what it is a view of, if that has this shape."""
    inner = node
    while inner.target in of_kind(OpKind.SAME, OpKind.RESHAPE):
        inner = inner.args[0]
        if shape_of(inner) == shape:
            return inner
    return build.view(node, shape)


def _keys(k3: fx.Node, shape: list[int], build: Editor) -> fx.Node:
    """k [B, H, S, D] of the product's second operand [N, D, S]."""
    if k3.target is aten.permute.default and list(k3.args[1]) == [0, 2, 1]:
        return _four_dims(k3.args[0], shape, build)
    turned = _four_dims(k3, [*shape[:2], shape[3], shape[2]], build)
    if turned.target is aten.permute.default and list(turned.args[1]) == [0, 1, 3, 2]:
        return turned.args[0]
    return build(aten.permute.default, turned, [0, 1, 3, 2])


# Backward


@dataclasses.dataclass(frozen=True)
class _Backward:
    grad: fx.Node  # of the second product, [N, T, E]
    grad_p: fx.Node  # the first node of the backward chain
    grad_q: fx.Node  # [N, T, D]
    grad_k: fx.Node  # of kᵀ, [N, D, S]
    grad_v: fx.Node  # [N, S, E]
    grad_bias: fx.Node | None
    interior: set[fx.Node]


def _backward(first, scores, p, drops, second) -> _Backward | None:
    p3, v3 = second.args
    grad_vs = [user for turned in _turned(p3) for user in _users(turned, aten.bmm.default, Phase.BACKWARD) if user.args[0] is turned]
    if not grad_vs and not any(user.meta.get("phase") is Phase.BACKWARD for user in p.users):
        return None
    grad_v = _one(grad_vs, "gradients of v")
    grad = grad_v.args[1]
    grad_p = _one(
        [user for turned in _turned(v3) for user in _users(turned, aten.bmm.default, Phase.BACKWARD) if user.args == (grad, turned)],
        "gradients of the probabilities",
    )
    interior = {grad_p, grad_v.args[0]}
    node = grad_p
    for step in reversed(drops):
        node = _undo(node, step, interior)
    node = _undo_softmax(node, p, interior)
    grad_bias, late = None, []
    for step in reversed(scores):
        if step.kind == "scale" and not any(_undoes(user, node, step) for user in node.users):
            late.append(step)  # baddbmm scales the gradients of its factors instead
        elif step.kind == "add":
            found = _bias_gradient(node, step, interior)
            _require(grad_bias is None or found is None, "several biases take a gradient")
            grad_bias = grad_bias or found
        else:
            node = _undo(node, step, interior)
    q3, k3 = first.args
    grad_q = _one([user for turned in _turned(k3) for user in node.users if user.args == (node, turned)], "gradients of q")
    grad_k = _one([user for turned in _turned(q3) for user in node.users if user.args == (turned, node)], "gradients of k")
    grad_q, grad_k = _scaled_late(grad_q, late, interior), _scaled_late(grad_k, late, interior)
    return _Backward(grad, grad_p, grad_q, grad_k, grad_v, grad_bias, interior)


def _scaled_late(grad: fx.Node, late: list[_Step], interior: set[fx.Node]) -> fx.Node:
    for step in late:
        interior.add(grad)
        scaled = [user for user in grad.users if user.target is step.node.target and user.args == (grad, step.node.args[1])]
        grad = _one(scaled, f"the gradient of scale {step.node.name}")
    return grad


def _turned(x: fx.Node) -> list[fx.Node]:
    """The transposes of a factor in the backward."""
    found = [user for user in x.users if user.target is aten.permute.default and list(user.args[1]) == [0, 2, 1]]
    if x.target is aten.permute.default and list(x.args[1]) == [0, 2, 1]:
        found.append(x.args[0])
    return found


def _undo(node: fx.Node, step: _Step, interior: set[fx.Node]) -> fx.Node:
    """The gradient of ``step.before`` made of the gradient of ``step.node``."""
    if step.kind == "drop" and not isinstance(step.other, fx.Node):
        return node  # dropout's backward multiplies once, by the mask with its factor
    new = _one([user for user in node.users if _undoes(user, node, step)], f"the gradient of {step.kind} {step.node.name}")
    interior.add(new)
    return new


def _undoes(user: fx.Node, node: fx.Node, step: _Step) -> bool:
    if shape_of(user) != shape_of(step.before):
        return False
    if step.kind == "view":
        return user.target in _VIEWS
    if step.kind == "cast":
        return user.target is _CAST and user.meta["val"].dtype == step.before.meta["val"].dtype
    if step.kind == "scale":
        return user.target is step.node.target and user.args == (node, step.node.args[1])
    if step.kind == "where":
        return user.target is aten.where.self and user.args[0] is step.node.args[0] and node in user.args[1:]
    return user.target is aten.mul.Tensor and user.args[0] is node and _is_scaled(user.args[1], step.other)


def _is_scaled(node: object, mask: fx.Node) -> bool:
    """``mask``, or ``mask * factor``."""
    return node is mask or (isinstance(node, fx.Node) and node.target is aten.mul.Tensor and node.args[0] is mask)


def _undo_softmax(node: fx.Node, p: fx.Node, interior: set[fx.Node]) -> fx.Node:
    """``product - p * sum(product)`` with ``product = grad * p``."""
    product = _one([user for user in node.users if user.target is aten.mul.Tensor and set(user.args) == {node, p}], "grad * p")
    total = _one(_users(product, aten.sum.dim_IntList, Phase.BACKWARD), "sums of grad * p")
    scaled = _one([user for user in total.users if user.target is aten.mul.Tensor and set(user.args) == {p, total}], "p * sum")
    differences = [user for user in product.users if user.target is aten.sub.Tensor and user.args == (product, scaled)]
    result = _one(differences, "the softmax's backward")
    interior |= {product, total, scaled, result}
    return result


def _bias_gradient(node: fx.Node, step: _Step, interior: set[fx.Node]) -> fx.Node | None:
    """The sum of the scores' gradient to the shape of what was added, if that takes a gradient."""
    wanted = shape_of(step.other)
    for found in [user for user in node.users if user.target is aten.sum.dim_IntList]:
        chain = []
        while shape_of(found) != wanted and len(found.users) == 1 and found.target in (aten.sum.dim_IntList, *_VIEWS):
            chain.append(found)
            found = next(iter(found.users))
        if shape_of(found) == wanted and found.target in (aten.sum.dim_IntList, *_VIEWS):
            interior.update(chain)
            return found
    return None
