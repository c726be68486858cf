"""Values that are compared with elements of themselves: ``x == x.amax(-1)``, which is also the gradient of amax, or ``x < x.topk(k)[0][-1]``.

XLA computes a cheap value again in each fusion that reads it, and LLVM contracts products and sums there into fused multiply-adds, in one
fusion and not in the other: the maximum of ``a - 1.1 * b`` then is equal to none of its elements, and a gradient is lost or doubled (jaxlib
0.10.2 on CPU). Such a value is computed once.
"""

import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import torch
import torch.fx

from graphacc.lowering.fence import computed_once
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind

_COMPARISONS = frozenset(f"aten.{name}.Tensor" for name in ("eq", "ne", "ge", "gt", "le", "lt"))
_KEEPING = {str(target) for target in of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.EXPAND, OpKind.PART, OpKind.LOOKUP)} | {
    f"aten.{name}"
    for name in (
        "abs.default flip.default linalg_vector_norm.default amax.default amin.default max.default min.default max.dim min.dim aminmax.default "
        "topk.default sort.default sort.stable kthvalue.default median.default median.dim nanmedian.default nanmedian.dim mode.default "
        "cummax.default cummin.default max_pool2d_with_indices.default max_pool3d_with_indices.default"
    ).split()
}
"""Operators whose results are elements of their first argument, or the absolute values of them."""


def compared_with_themselves(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The computed values of a graph that some comparison reads on both sides."""
    found = set()
    for node in graph.nodes:
        if str(node.target) in _COMPARISONS:
            left, right = (set(_sources(side)) if isinstance(side, torch.fx.Node) else set() for side in node.args[:2])
            found |= {source for source in left & right if source.op == "call_function" and isinstance(source.meta.get("val"), torch.Tensor)}
    return found


def _sources(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A value and those that its elements are taken from."""
    stack: list = [node]
    while stack:
        node = stack.pop()
        yield node
        if node.target is operator.getitem or str(node.target) in _KEEPING:
            stack.append(node.args[0])
        elif str(node.target) == "aten.where.self":  # such as padding that is put out of the way
            stack += [operand for operand in node.args[1:] if isinstance(operand, torch.fx.Node)]


def settled(x: jax.Array) -> jax.Array:
    """`x` as an array that is computed once and read by all; integers are exact wherever they are computed."""
    return computed_once(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
