"""Python arithmetic of an optimizer's step, carried out on traced float64 0-d tensors.

An optimizer reads its step count with ``.item()`` and computes bias corrections in Python's double precision. While a step is
traced such a read gives a float64 0-d tensor instead, so the same formulas end up in the graph with the same precision. What
Python cannot do with a tensor is replaced: scalar arguments (``alpha=``, ``value=``), ``min``, ``max`` and the `math` module.

A branch on a hyperparameter (``if weight_decay != 0``) is taken as the value at capture says; a branch on anything else
cannot be captured.
"""

import builtins
import contextlib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphacc._compat.torch_ import patched

_ARITHMETIC: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "true_divide": operator.truediv,
    "pow": operator.pow, "neg": operator.neg, "abs": abs, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "rsub": lambda a, b: b - a, "rpow": lambda a, b: b**a,
    "radd": operator.add, "rmul": operator.mul, "rdiv": lambda a, b: b / a, "rtruediv": lambda a, b: b / a,
    "truediv": operator.truediv,
}  # fmt: skip


_CONVERSIONS = ("__bool__", "__float__", "__int__", "__index__")


class ValueNeeded(RuntimeError):
    """Python needs the value of a traced number."""


class ScalarMode(TorchFunctionMode):
    """Lets a step's Python arithmetic run on tensors.

    Args:
        known: traced hyperparameters and the value that each has at capture, for branches.
    """

    def __init__(self, known: Iterable[tuple[Tensor, float]]):
        super().__init__()
        self._known = {id(tensor): (tensor, value) for tensor, value in known}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data and args[0].shape == args[1].shape:
            return args[0].copy_(args[1])  # `p.data = p.data - ...`: a parameter is a functional tensor here, whose memory is not its value
        if name == "item":
            return self._read(args[0], sys._getframe(1).f_code.co_name)
        result = _REWRITES.get(name.rstrip("_"), _unchanged)(func, name, args, kwargs)
        self._learn(name, args, kwargs, result)
        return result

    def _read(self, x: Tensor, reader: str) -> object:
        """``x.item()``; `reader` is the function that called it, which is ``__bool__`` and so on for conversions."""
        if reader not in _CONVERSIONS:
            return x.reshape(()).to(torch.float64 if x.is_floating_point() else torch.int64)
        if reader == "__bool__" and id(x) in self._known:
            return self._known[id(x)][1]
        raise ValueNeeded(f"data-dependent {reader} of a traced number")

    def _learn(self, name: str, args: tuple, kwargs: dict, result: object) -> None:
        """Keep the concrete value of arithmetic on known scalars."""
        function = _ARITHMETIC.get(name.strip("_"))
        if function is None or kwargs or not isinstance(result, Tensor):
            return
        values = [self._known.get(id(arg), (None, None))[1] if isinstance(arg, Tensor) else arg for arg in args]
        if name.endswith("__") or not name.endswith("_"):
            if all(isinstance(value, (int, float)) for value in values):
                self._known[id(result)] = (result, function(*values))


def _unchanged(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    return func(*args, **kwargs)


def _in_place(name: str, x: Tensor, value: Tensor) -> Tensor:
    return x.copy_(value) if name.endswith("_") else value


def _scaled_sum(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    """add and sub with a traced `alpha`."""
    alpha = kwargs.get("alpha")
    if not isinstance(alpha, Tensor):
        return func(*args, **kwargs)
    term = args[1] * alpha
    return _in_place(name, args[0], args[0] - term if name.startswith("sub") else args[0] + term)


def _scaled_product(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    """addcmul and addcdiv with a traced `value`."""
    value = kwargs.get("value")
    if not isinstance(value, Tensor):
        return func(*args, **kwargs)
    x, first, second = args
    term = value * first * second if name.startswith("addcmul") else value * first / second
    return _in_place(name, x, x + term)


def _interpolation(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    """lerp with a traced weight of another dtype."""
    x, end = args[:2]
    weight = args[2] if len(args) > 2 else kwargs["weight"]
    if not isinstance(weight, Tensor):
        return func(*args, **kwargs)
    return func(x, end, weight.to(x.dtype))


def _filling(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    """full and full_like with a traced value."""
    value = args[1] if len(args) > 1 else kwargs["fill_value"]
    if not isinstance(value, Tensor):
        return func(*args, **kwargs)
    kwargs.pop("fill_value", None)
    return func(args[0], 0.0, **kwargs).copy_(value)


def _raised(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    """square_: the in-place form is a composite that functionalisation refuses."""
    return args[0].copy_(args[0] * args[0]) if name == "square_" else func(*args, **kwargs)


_REWRITES = {
    "add": _scaled_sum, "sub": _scaled_sum, "addcmul": _scaled_product, "addcdiv": _scaled_product, "lerp": _interpolation,
    "full": _filling, "full_like": _filling, "square": _raised,
}  # fmt: skip


def _extremum(python: Callable, traced: Callable) -> Callable:
    """The builtin `min` or `max`, and `traced` where a tensor is among the values."""

    def call(*args, **kwargs):
        values = list(args[0]) if len(args) == 1 else list(args)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors:
            return python(values, **kwargs)
        wide = (value if isinstance(value, Tensor) else tensors[0].new_full((), value) for value in values)
        return functools.reduce(traced, wide)

    return call


class _Math:
    """The math module, whose functions also take tensors."""

    def __getattr__(self, name: str) -> object:
        original = getattr(math, name)
        traced = getattr(torch, name, None)
        if not callable(original) or traced is None:
            return original

        def call(*args):
            return traced(*args) if any(isinstance(arg, Tensor) for arg in args) else original(*args)

        return call


@contextlib.contextmanager
def traced_scalars(optimizer_class: type, known: Iterable[tuple[Tensor, float]]):
    """Inside the block, the step of `optimizer_class` computes its scalars on tensors."""
    steps = [inspect.unwrap(vars(base)["step"]) for base in optimizer_class.__mro__ if "step" in vars(base)]
    modules = {sys.modules[step.__globals__["__name__"]] for step in steps}
    minimum, maximum = _extremum(builtins.min, torch.minimum), _extremum(builtins.max, torch.maximum)
    with contextlib.ExitStack() as stack:
        for module in modules:
            replaced = {"min": minimum, "max": maximum} | ({"math": _Math()} if vars(module).get("math") is math else {})
            stack.enter_context(patched(module, **replaced))
        stack.enter_context(ScalarMode(known))
        yield
