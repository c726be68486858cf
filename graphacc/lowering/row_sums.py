"""The largest element of every row, and the sum of exp(x - largest): what a cross-entropy makes of its logits, which read them once on the CPU.

XLA:CPU writes the logits of a bf16 model out in fp32 for the maximum, as bytes to look for NaN, and exp(x - largest) in fp32 for the sum: more memory traffic
than the loss itself, and arrays of [tokens, vocabulary] for it. Here a custom call (csrc/ffi/rows.cc) reads the logits in their own dtype. With a split
vocabulary the maximum is exchanged between two such calls. Other platforms, where XLA fuses the reductions, get the same formula.

Legend: N rows, C columns.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from graphacc.kernels.library import register_xla_target
from graphacc.lowering.extremes import largest

LEAST_ELEMENTS = 1 << 16
"""Of an array: below, a call costs more than it saves."""

_HALF = (torch.bfloat16, torch.float16)
_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_EXCHANGES = ("_c10d_functional.wait_tensor.default", *_RESHAPES)


@dataclasses.dataclass(frozen=True, eq=False)
class RowSums:
    """``amax(x)`` and ``sum(exp(x - amax(x)))`` along the last dim."""

    source: torch.fx.Node  # x, or what it was widened from
    largest: torch.fx.Node  # the amax
    subtracted: torch.fx.Node  # what is subtracted: the amax itself, or the largest one of all ranks
    total: torch.fx.Node  # the sum

    @property
    def nodes(self) -> tuple[torch.fx.Node, ...]:
        """Those whose values `run` gives."""
        return self.largest, self.total

    def reads(self, node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        """What `run` needs for one of the nodes."""
        return (self.source, self.subtracted) if node is self.total else (self.source,)

    def run(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> dict[torch.fx.Node, jax.Array]:
        """Values of `node`, and of the other one where both come from one call."""
        x = env[self.source].reshape(-1, env[self.source].shape[-1])
        found: dict[torch.fx.Node, Any]
        if node is self.total:
            found = {node: lax.platform_dependent(x, env[self.subtracted].reshape(-1), cpu=_exponentials_on_cpu, default=_exponentials)}
        elif self.subtracted is self.largest:
            found = dict(zip(self.nodes, lax.platform_dependent(x, cpu=_sums_on_cpu, default=_sums)))
        else:
            found = {node: lax.platform_dependent(x, cpu=_largest_on_cpu, default=_largest)}
        return {node: value.reshape(node.meta["val"].shape) for node, value in found.items()}


def find(graph: torch.fx.Graph) -> dict[torch.fx.Node, RowSums]:
    """By their nodes."""
    found = {}
    for node in graph.nodes:
        if (sums := _match(node)) is not None and not any(part in found for part in sums.nodes):
            found |= dict.fromkeys(sums.nodes, sums)
    return found


def _match(total: torch.fx.Node) -> RowSums | None:
    exp = _operand(total, "aten.sum.dim_IntList")
    difference = _operand(exp, "aten.exp.default")
    x = _operand(difference, "aten.sub.Tensor")
    if total.kwargs or exp is None or difference is None or x is None or difference.kwargs or set(exp.users) != {total}:
        return None
    subtracted, value = _arguments(difference)[1], x.meta["val"]
    if value.dtype is not torch.float32 or value.ndim == 0 or value.numel() < LEAST_ELEMENTS or not _is_over_rows(total, value.ndim):
        return None
    if not isinstance(subtracted, torch.fx.Node) or subtracted.meta["val"].shape != (*value.shape[:-1], 1):
        return None
    peak = subtracted
    while str(peak.target) in _EXCHANGES or _is_max_of_ranks(peak):
        peak = _arguments(peak)[0]
    if _operand(peak, "aten.amax.default") is not x or not _is_over_rows(peak, value.ndim):
        return None
    return RowSums(_narrow(x), peak, subtracted, total)


def _arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    return node.args


def _operand(node: object, target: str) -> torch.fx.Node | None:
    """What a node of an operator works on; None for a node of another one."""
    found = _arguments(node)[0] if isinstance(node, torch.fx.Node) and str(node.target) == target else None
    return found if isinstance(found, torch.fx.Node) else None


def _is_over_rows(node: torch.fx.Node, ndim: int) -> bool:
    """Whether a reduction is along the last dim, which stays with size 1."""
    dims, *keepdim = _arguments(node)[1:]
    return isinstance(dims, (list, tuple)) and [dim % ndim for dim in dims] == [ndim - 1] and keepdim == [True]


def _is_max_of_ranks(node: torch.fx.Node) -> bool:
    return str(node.target) == "_c10d_functional.all_reduce.default" and _arguments(node)[1] == "max"


def _narrow(x: torch.fx.Node) -> torch.fx.Node:
    """The array of half precision with the same rows that `x` was widened from, or `x`."""
    node, columns = x, x.meta["val"].shape[-1]
    while str(node.target) in _RESHAPES and _arguments(node)[0].meta["val"].shape[-1:] == (columns,):
        node = _arguments(node)[0]
    widened = _operand(node, "aten._to_copy.default")
    return widened if widened is not None and widened.meta["val"].dtype in _HALF else x


def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = _largest(x)
    return found, _exponentials(x, found)


def _largest(x: jax.Array) -> jax.Array:
    return largest(x.astype(jnp.float32), (1,))


def _exponentials(x: jax.Array, subtracted: jax.Array) -> jax.Array:
    return jnp.exp(x.astype(jnp.float32) - subtracted[:, None]).sum(1)


def _sums_on_cpu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    first, second = _call("gacc_row_sums", x.shape[0], 2)(x)
    return first, second


def _largest_on_cpu(x: jax.Array) -> jax.Array:
    return _call("gacc_row_largest", x.shape[0], 1)(x)[0]


def _exponentials_on_cpu(x: jax.Array, subtracted: jax.Array) -> jax.Array:
    return _call("gacc_row_exponentials", x.shape[0], 1)(x, subtracted)[0]


def _call(name: str, size: int, count: int):
    register_xla_target(name)
    return jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct((size,), jnp.float32)] * count)
