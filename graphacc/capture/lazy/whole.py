"""Operators that stay whole in a recording: custom calls, of which the runtime makes kernels and shardings.

- Attention, by ``torch.nn.functional.scaled_dot_product_attention`` (graphacc::sdpa) or `graphacc.flash_attention`, forward and
  backward, always as graphacc::flash_attention. A bool mask becomes a bias of 0 and -inf.
- `graphacc.mark_sharding` of an activation, and of its gradient.

- An operator of torch's without a form as HLO that has a rule in `graphacc.lowering`, which then computes it as in the FX capture.

Attention that a model writes out in products and a softmax is recorded as it is written.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc._compat.jax_ import WHOLE_CALL
from graphacc._compat.torch_ import annotation, described
from graphacc.capture.lazy import xla
from graphacc.hlo import Draw, Operand, WholeCall
from graphacc.lowering.registry import find
from graphacc.ops.flash_attention import EmptyRows

ops, aten = torch.ops.graphacc, torch.ops.aten


class WholeCalls:
    """The operators of one recording that stay whole.

    Args:
        drawn: identity of a placeholder -> the random numbers that it stands for; filled while recording.
        key: the step's random key; None without one.
    """

    def __init__(self, drawn: Mapping[int, Draw], key: Tensor | None):
        self.calls: list[WholeCall] = []  # the number of a custom call is its place here
        self._drawn = drawn
        self._key = key
        self._probabilities: dict[int, float] = {}  # identity of a drawn placeholder -> what it was compared with
        self._modules: dict[int, str] = {}  # identity of a log-sum-exp -> the module of its attention

    def recorder(self, func) -> Callable | None:
        """The function that records an operator as a custom call; None for what is no operator of this kind."""
        return {
            ops.mark_sharding.default: self._mark_sharding,
            ops.sdpa.default: self._sdpa,
            ops.sdpa_backward.default: self._sdpa_backward,
            ops.flash_attention.default: self._flash,
            ops.flash_attention_backward.default: self._flash_backward,
        }.get(func)

    def note(self, func, args: tuple) -> None:
        """Remember with which probability random numbers are compared: a dropout mask reaches attention as a tensor."""
        if func is aten.ge.Scalar and (leaf := self._leaf(args[0])) is not None:
            self._probabilities.setdefault(leaf, float(args[1]))

    def _leaf(self, tensor: Tensor) -> int | None:
        """The drawn placeholder from which alone a tensor is computed."""
        ids, _ = xla.leaves([tensor])
        return ids[0] if len(ids) == 1 and ids[0] in self._drawn else None

    def _mark_sharding(self, x: Tensor, spec: str) -> Tensor:
        return self._record(ops.mark_sharding.default, (x, spec), annotation().get("module_path", ""))[0]

    def _sdpa(self, q, k, v, mask, dropout_mask, is_causal, scale) -> list[Tensor]:
        return self._flash(q, k, v, *self._said_as_flash(q, k, mask, dropout_mask, is_causal, scale))

    def _sdpa_backward(self, grad, q, k, v, mask, dropout_mask, out, lse, is_causal, scale) -> list[Tensor]:
        said = self._said_as_flash(q, k, mask, dropout_mask, is_causal, scale)
        return self._flash_backward(grad, q, k, v, *said[:5], out, lse, *said[5:], False)[:3]

    def _said_as_flash(self, q, k, mask, dropout_mask, is_causal, scale) -> tuple:
        """The arguments of graphacc::flash_attention behind q, k and v."""
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf)
        dropout, stream, key, size = 0.0, 0, None, ()
        if dropout_mask is not None:
            leaf = self._leaf(dropout_mask)
            assert leaf in self._probabilities, "graphacc::sdpa got a dropout mask that is no comparison of random numbers of the step"
            dropout, stream, key, size = self._probabilities[leaf], self._drawn[leaf].stream, self._key, (*q.shape[:3], k.shape[2])
        return mask, None, None, key, None, -1, 0 if is_causal else -1, scale, int(EmptyRows.ZEROS), dropout, stream, size

    def _flash(self, *args) -> list[Tensor]:
        module = annotation().get("module_path", "")
        out, lse = self._record(ops.flash_attention.default, args, module)
        self._modules[xla.tensor_id(lse)] = module
        return [out, lse]

    def _flash_backward(self, *args) -> list[Tensor]:
        lse = args[10]
        return self._record(ops.flash_attention_backward.default, args, self._modules[xla.tensor_id(lse)])

    def lowered(self, func, args: tuple, kwargs: dict) -> object:
        """Record an operator that has a rule in `graphacc.lowering`; NotImplemented where it has none."""
        if find(func) is None or func._schema.is_mutable or func.namespace == "graphacc":
            return NotImplemented
        recorded = iter([_with_shape(x) for x in self._record(func, args, annotation().get("module_path", ""), kwargs)])
        return pytree.tree_map_only(Tensor, lambda _: next(recorded), described(func, args, kwargs))

    def _record(self, func, args: tuple, module: str, kwargs: Mapping[str, object] = MappingProxyType({})) -> list[Tensor]:
        operands = [arg for arg in pytree.tree_leaves((args, dict(kwargs))) if isinstance(arg, Tensor)]
        results = tuple((tuple(x.shape), x.dtype) for x in pytree.tree_leaves(described(func, args, dict(kwargs))) if x is not None)
        self.calls.append(
            WholeCall(
                operator=str(func),
                arguments=tuple(_fixed(arg) for arg in args),
                keywords=tuple((name, _fixed(value)) for name, value in kwargs.items()),
                results=results,
                module_path=module,
                stack_trace=annotation().get("stack_trace", ""),
            )
        )
        return xla.custom_call(operands, WHOLE_CALL, results, str(len(self.calls) - 1))


def _with_shape(x: Tensor) -> Tensor:
    """The result of a custom call as a node that is told from the one of another call with the same operands: torch_xla remembers shapes of what follows by that."""
    return torch.view_copy(x, x.shape)


def _fixed(argument: object) -> object:
    if isinstance(argument, Tensor):
        return Operand(argument.dtype)
    return tuple(map(_fixed, argument)) if isinstance(argument, (list, tuple)) else argument
