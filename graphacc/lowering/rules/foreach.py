"""The list forms of pointwise operators, `aten._foreach_*`: the plain operator's rule for every element of the list."""

import functools

from graphacc.lowering.registry import find, register

# foreach name -> plain operator, per overload of the foreach operator.
_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
_BINARY = {
    "add": {"Scalar": "add.Scalar", "List": "add.Tensor", "ScalarList": "add.Scalar", "Tensor": "add.Tensor"},
    "sub": {"Scalar": "sub.Scalar", "List": "sub.Tensor", "ScalarList": "sub.Scalar"},
    "mul": {"Scalar": "mul.Scalar", "List": "mul.Tensor", "ScalarList": "mul.Scalar", "Tensor": "mul.Tensor"},
    "div": {"Scalar": "div.Scalar", "List": "div.Tensor", "ScalarList": "div.Scalar", "Tensor": "div.Tensor"},
    "pow": {
        "Scalar": "pow.Tensor_Scalar",
        "List": "pow.Tensor_Tensor",
        "ScalarList": "pow.Tensor_Scalar",
        "ScalarAndTensor": "pow.Scalar",
    },
    "maximum": {"Scalar": "clamp_min.default", "List": "maximum.default", "ScalarList": "clamp_min.default"},
    "minimum": {"Scalar": "clamp_max.default", "List": "minimum.default", "ScalarList": "clamp_max.default"},
    "clamp_min": {"Scalar": "clamp_min.default", "List": "maximum.default", "ScalarList": "clamp_min.default"},
    "clamp_max": {"Scalar": "clamp_max.default", "List": "minimum.default", "ScalarList": "clamp_max.default"},
    "lerp": {"Scalar": "lerp.Scalar", "List": "lerp.Tensor", "ScalarList": "lerp.Scalar"},
    "addcmul": {"Scalar": "addcmul.default", "ScalarList": "addcmul.default", "Tensor": "addcmul.default"},
    "addcdiv": {"Scalar": "addcdiv.default", "ScalarList": "addcdiv.default", "Tensor": "addcdiv.default"},
    "copy": {"default": "copy.default"},
    "norm": {"Scalar": "norm.Scalar"},
    "zero": {"default": "zeros_like.default"},
}


def _pick(value, index):
    return value[index] if isinstance(value, (list, tuple)) else value


def _each(plain, ctx, *args, **kwargs):
    """Lists hand out one element each, everything else goes to every call."""
    rule = find(f"aten.{plain}")
    return tuple(rule(ctx.element(i), *(_pick(arg, i) for arg in args), **kwargs) for i in range(len(ctx.val)))


def _each_with_value(plain, ctx, x, a, b, value=1):
    """addcmul and addcdiv: the factor is a number, a list of numbers or a 1-d tensor."""
    rule = find(f"aten.{plain}")
    per_element = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1
    return tuple(rule(ctx.element(i), x[i], a[i], b[i], value=value[i] if per_element else value) for i in range(len(ctx.val)))


for _name in _UNARY:
    register(f"aten._foreach_{_name}.default")(functools.partial(_each, f"{_name}.default"))
for _name, _overloads in _BINARY.items():
    for _overload, _plain in _overloads.items():
        _rule = _each_with_value if _name.startswith("addc") else _each
        register(f"aten._foreach_{_name}.{_overload}")(functools.partial(_rule, _plain))
