"""The rules that turn one ATen operator into JAX: who may add one, and who has none.

A rule is kept under the overload's name ("aten.add.Tensor"), so a rule may name an operator that this version of
torch, or a library that is not imported, does not have.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from graphacc.lowering.dtypes import to_jax


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rule knows about the call that it lowers, besides its arguments."""

    node: torch.fx.Node  # the call; ``ctx.node.args[i].meta["val"]`` is an argument's fake value
    val: object  # the fake value of the result: a fake tensor, or a tuple or list of them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.val.shape)

    @property
    def dtype(self) -> np.dtype:
        return to_jax(self.val.dtype)

    def element(self, index: int) -> "Context":
        """The context of one tensor of a result that is a tuple or list."""
        return Context(self.node, self.val[index])


Rule = Callable[..., object]

_rules: dict[str, Rule] = {}
_reasons: dict[str, str] = {}


def register(*overloads: torch._ops.OpOverload | str) -> Callable[[Rule], Rule]:
    """Decorator: lower these operator overloads with the decorated function.

    The function is called as ``rule(ctx, *args, **kwargs)`` with the call's own arguments, where jax arrays stand for
    tensors (dtypes stay torch dtypes), while JAX traces with 64-bit types enabled. It returns a jax array, or a tuple for an
    operator that returns several; shape and dtype must be those of ``ctx.val``.

    Args:
        overloads: operator overloads, or their names ("aten.add.Tensor").

    Raises:
        TypeError: an argument is no overload, such as a packet (``torch.ops.mylib.scale``).
        ValueError: the overload has a rule already.

    Examples:
        An operator of your own (one that torch can decompose needs no rule)::

            @torch.library.custom_op("mylib::scale", mutates_args=())
            def scale(x: torch.Tensor, factor: float) -> torch.Tensor: ...

            @graphacc.lowering.register(torch.ops.mylib.scale.default)
            def _scale(ctx, x, factor):
                return (x * factor).astype(ctx.dtype)
    """
    names = [_name(overload) for overload in overloads]

    def add(rule: Rule) -> Rule:
        for name in names:
            if name in _rules:
                owner = f"{_rules[name].__module__}.{getattr(_rules[name], '__qualname__', 'a table')}"
                raise ValueError(f"{name} already has a lowering rule, of {owner}: an operator has one rule")
            _rules[name] = rule
        return rule

    return add


def refuse(reason: str, *overloads: str) -> None:
    """Say why these overloads cannot have a rule; the error about a missing rule repeats it."""
    for overload in overloads:
        assert overload not in _rules, f"{overload} has a rule and a reason to have none"
        _reasons[overload] = reason


def find(overload: torch._ops.OpOverload | str) -> Rule | None:
    return _rules.get(str(overload))


def reason(overload: torch._ops.OpOverload | str) -> str:
    """Why the overload cannot have a rule; "" where nothing is known against one."""
    return _reasons.get(str(overload), "")


def registered() -> frozenset[str]:
    """The names of all overloads that have a rule."""
    return frozenset(_rules)


def refused() -> dict[str, str]:
    """Overload -> why it cannot have a rule."""
    return dict(_reasons)


def _name(overload: torch._ops.OpOverload | str) -> str:
    name = str(overload)
    if not isinstance(overload, (str, torch._ops.OpOverload)) or len(name.split(".")) != 3:
        raise TypeError(f"register() takes operator overloads such as torch.ops.mylib.scale.default, got {overload!r}")
    return name
