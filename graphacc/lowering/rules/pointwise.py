"""Element-wise operators, mostly by table: the operands are cast to the result's dtype as torch's promotion says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast, is_float, result_type, wide
from graphacc.lowering.extremes import clip, maximum, minimum, relu
from graphacc.lowering.registry import register


def _sign(x):
    if not is_float(x):
        return x if x.dtype == bool else jnp.sign(x)
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), jnp.sign(x))  # torch: the sign of NaN is 0


def _sgn(x):
    return jnp.where(x == 0, 0, x / jnp.abs(x)) if jnp.iscomplexobj(x) else _sign(x)


def _angle(x):
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    angle = jnp.where(x < 0, np.pi, 0.0)
    return jnp.where(jnp.isnan(x), x, angle) if is_float(x) else angle


# aten name -> function; the operand is cast to the result's dtype first.
_UNARY = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu": lambda x: relu(x) if x.dtype != bool else x,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sgn": _sgn,
    "sign": _sign,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "frac": lambda x: x - jnp.trunc(x),
    "round": jnp.round,
    "trunc": jnp.trunc,
    "deg2rad": lambda x: x * (np.pi / 180.0),
    "rad2deg": lambda x: x * (180.0 / np.pi),
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "bitwise_not": jnp.bitwise_not,
    "conj_physical": jnp.conj,
    "_conj_physical": jnp.conj,
    "_conj": jnp.conj,
    "positive": lambda x: x,
}
# ... and these see the operand in its own dtype, as the result has another kind.
_UNARY_OTHER_KIND = {
    "abs": lambda x: x if x.dtype == bool else jnp.abs(x),
    "angle": _angle,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isneginf": jnp.isneginf,
    "isposinf": jnp.isposinf,
    "logical_not": jnp.logical_not,
    "signbit": lambda x: jnp.signbit(x) if is_float(x) else x < 0,
    "real": jnp.real,
    "imag": jnp.imag,
}


def _unary(function, ctx, x):
    """bf16 goes through fp32 and is rounded once, as in torch: XLA would round inside what it expands, such as sigmoid."""
    return cast(function(cast(x, wide(ctx.dtype))), ctx.dtype)


def _unary_other_kind(function, ctx, x):
    return cast(function(x), ctx.dtype)


def _register_table(table, rule, overload="default"):
    for name, function in table.items():
        register(f"aten.{name}.{overload}")(functools.partial(rule, function))


_register_table(_UNARY, _unary)
_register_table(_UNARY_OTHER_KIND, _unary_other_kind)


@register("aten.round.decimals")
def _round_decimals(ctx, x, *, decimals=0):
    ten = np.asarray(10.0 ** abs(decimals), x.dtype)
    return jnp.round(x * ten) / ten if decimals >= 0 else jnp.round(x / ten) * ten


def operands(ctx, *args):
    """The operands in the dtype to compute in: the result's, or fp32 where torch mixes a bf16 tensor with a number."""
    has_number = any(isinstance(x, (bool, int, float, complex)) for x in args)
    dtype = wide(ctx.dtype) if has_number else ctx.dtype
    return [cast(x, dtype) for x in args]


def trunc_div(a, b):
    """Division rounded towards zero, of integers or floats."""
    return jnp.trunc(a / b) if is_float(a) else lax.div(*jnp.broadcast_arrays(a, b))


def floor_div(a, b):
    """Division rounded down; for floats by the remainder, as torch and Python do it."""
    if not is_float(a):
        return jnp.floor_divide(a, b)
    remainder = jnp.fmod(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    rounded = jnp.floor(quotient)
    rounded = jnp.where(quotient - rounded > 0.5, rounded + 1, rounded)
    rounded = jnp.where(quotient != 0, rounded, jnp.copysign(jnp.zeros_like(a), a / b))
    return jnp.where(b == 0, a / b, rounded)


def _power(a, b):
    if is_float(a) or jnp.asarray(a).dtype == bool:
        return jnp.power(a, b)
    inverse = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(b % 2 == 0, 1, -1), 0)).astype(a.dtype)
    return jnp.where(b < 0, inverse, jnp.power(a, jnp.maximum(b, 0)))


def _heaviside(x, value):
    return (
        jnp.where(jnp.isnan(x), x, jnp.where(x == 0, value, (x > 0).astype(x.dtype))) if is_float(x) else jnp.heaviside(x, value)
    )


def _left_shift(a, b):
    return jnp.where((b < 0) | (b >= _bits(a)), 0, lax.shift_left(*jnp.broadcast_arrays(a, jnp.clip(b, 0, _bits(a) - 1))))


def _right_shift(a, b):
    outside = (b < 0) | (b >= _bits(a))
    if jnp.issubdtype(a.dtype, jnp.unsignedinteger):
        return jnp.where(outside, 0, lax.shift_right_logical(*jnp.broadcast_arrays(a, jnp.where(outside, 0, b).astype(a.dtype))))
    return lax.shift_right_arithmetic(*jnp.broadcast_arrays(a, jnp.where(outside, _bits(a) - 1, b).astype(a.dtype)))


def _gcd(a, b):
    """Euclid's algorithm as torch runs it: the least integer, whose absolute value is itself, ends it, too (in `jnp.gcd` it does not)."""
    a, b = jnp.broadcast_arrays(jnp.abs(a), jnp.abs(b))

    def step(state):
        a, b = state
        return jnp.where(a == 0, 0, lax.rem(b, jnp.where(a == 0, 1, a))), jnp.where(a == 0, b, a)

    return lax.while_loop(lambda state: (state[0] != 0).any(), step, (a, b))[1]


def _lcm(a, b):
    divisor = _gcd(a, b)
    return jnp.where(divisor == 0, 0, jnp.abs(lax.div(*jnp.broadcast_arrays(a, jnp.where(divisor == 0, 1, divisor))) * b))


def _bits(a):
    return np.asarray(jnp.iinfo(a.dtype).bits, a.dtype)


def _xlogy(x, y):
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log(y)))


# aten name -> function of two operands in the result's dtype.
_BINARY = {
    "atan2": jnp.arctan2,
    "copysign": jnp.copysign,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "fmod": lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)),
    "floor_divide": floor_div,
    "gcd": _gcd,
    "heaviside": _heaviside,
    "hypot": jnp.hypot,
    "lcm": _lcm,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "maximum": maximum,
    "minimum": minimum,
    "mul": jnp.multiply,
    "nextafter": jnp.nextafter,
    "pow": _power,
    "remainder": jnp.remainder,
    "xlogy": _xlogy,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": _left_shift,
    "bitwise_right_shift": _right_shift,
    "__lshift__": _left_shift,
    "__rshift__": _right_shift,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "special_xlog1py": lambda x, y: jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log1p(y))),
}
_COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
_LOGICAL = {"logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor}
_BINARY_OVERLOADS = {
    "copysign": ("Tensor", "Scalar"),
    "fmod": ("Tensor", "Scalar"),
    "floor_divide": ("default", "Scalar"),
    "mul": ("Tensor", "Scalar"),
    "pow": ("Tensor_Tensor",),
    "remainder": ("Tensor", "Scalar", "Scalar_Tensor"),
    "xlogy": ("Tensor", "Scalar_Self", "Scalar_Other"),
    "special_xlog1py": ("default", "self_scalar", "other_scalar"),
}


def _binary(function, ctx, a, b):
    return cast(function(*operands(ctx, a, b)), ctx.dtype)


def _compare(function, ctx, a, b):
    dtype = result_type(a, b)
    return function(cast(a, dtype), cast(b, dtype))


def _logical(function, ctx, a, b):
    return function(a, b)


def _overloads_of(name):
    if name.endswith("_shift"):
        return "Tensor", "Tensor_Scalar", "Scalar_Tensor"
    if name.startswith("bitwise_"):
        return "Tensor", "Scalar", "Scalar_Tensor"
    return ("Tensor", "Scalar") if name.startswith("__") else ("default",)


def _register_binary():
    for name, function in _BINARY.items():
        for overload in _BINARY_OVERLOADS.get(name, _overloads_of(name)):
            register(f"aten.{name}.{overload}")(functools.partial(_binary, function))
    for overload in ("Tensor", "Scalar"):
        _register_table(_COMPARISONS, _compare, overload)
    _register_table(_LOGICAL, _logical)


_register_binary()


def scaled(x, factor):
    """x · factor, in the dtype of `x`; `factor` is a number or a 0-d array."""
    return x if isinstance(factor, (bool, int, float)) and factor == 1 else x * cast(factor, x.dtype)


@register("aten.add.Tensor", "aten.add.Scalar")
def add(ctx, a, b, alpha=1):
    a, b = operands(ctx, a, b)
    return cast(jnp.add(a, scaled(b, alpha)), ctx.dtype)


@register("aten.sub.Tensor", "aten.sub.Scalar")
def sub(ctx, a, b, alpha=1):
    a, b = operands(ctx, a, b)
    return cast(jnp.subtract(a, scaled(b, alpha)), ctx.dtype)


@register("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(ctx, a, b, alpha=1):
    return sub(ctx, b, a, alpha)


@register("aten.div.Tensor", "aten.div.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.true_divide.Tensor")
def div(ctx, a, b, rounding_mode=None):
    a, b = operands(ctx, a, b)
    function = {None: jnp.true_divide, "trunc": trunc_div, "floor": floor_div}[rounding_mode]
    return cast(function(a, b), ctx.dtype)


_POWERS = {0.5: jnp.sqrt, -0.5: lax.rsqrt, -1.0: jnp.reciprocal, -2.0: lambda x: jnp.reciprocal(x * x)}


@register("aten.pow.Tensor_Scalar")
def _pow_tensor_scalar(ctx, x, exponent):
    x = cast(x, wide(ctx.dtype))
    if is_float(x) and exponent in _POWERS:
        result = _POWERS[exponent](x)
    elif x.dtype != bool and 0 <= exponent <= 8 and exponent == int(exponent):
        result = lax.integer_pow(x, int(exponent))
    else:
        result = _power(x, np.asarray(exponent, x.dtype))
    return cast(result, ctx.dtype)


@register("aten.pow.Scalar")
def _pow_scalar(ctx, base, exponent):
    exponent = cast(exponent, wide(ctx.dtype))
    return cast(_power(np.asarray(base, exponent.dtype), exponent), ctx.dtype)


@register("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def _where(ctx, condition, a, b):
    return jnp.where(condition.astype(bool), cast(a, ctx.dtype), cast(b, ctx.dtype))


@register("aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default", "aten.clip.Tensor")
def clamp(ctx, x, min=None, max=None):
    x = cast(x, ctx.dtype)
    if all(bound is None or isinstance(bound, (int, float)) for bound in (min, max)):
        return clip(x, min, max)
    x = x if min is None else maximum(x, cast(min, ctx.dtype))
    return x if max is None else minimum(x, cast(max, ctx.dtype))


@register("aten.hardtanh.default")
def _hardtanh(ctx, x, min_val=-1.0, max_val=1.0):
    return clamp(ctx, x, min_val, max_val)


@register("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _clamp_min(ctx, x, min):
    return clamp(ctx, x, min=min)


@register("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _clamp_max(ctx, x, max):
    return clamp(ctx, x, max=max)


@register("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(ctx, start, end, weight):
    start, end = (cast(x, wide(ctx.dtype)) for x in (start, end))
    difference = end - start
    if isinstance(weight, (int, float)):
        return cast(start + weight * difference if abs(weight) < 0.5 else end - difference * (1 - weight), ctx.dtype)
    weight = cast(weight, wide(ctx.dtype))
    result = jnp.where(jnp.abs(weight) < 0.5, start + weight * difference, end - difference * (1 - weight))
    return cast(result, ctx.dtype)


@register("aten.addcmul.default")
def addcmul(ctx, x, a, b, *, value=1):
    x, a, b = (cast(y, wide(ctx.dtype)) for y in (x, a, b))
    return cast(x + scaled(a, value) * b, ctx.dtype)  # in PyTorch's order


@register("aten.addcdiv.default")
def addcdiv(ctx, x, a, b, *, value=1):
    x, a, b = (cast(y, wide(ctx.dtype)) for y in (x, a, b))
    return cast(x + scaled(a, value) / b, ctx.dtype)


@register("aten.nan_to_num.default")
def _nan_to_num(ctx, x, nan=None, posinf=None, neginf=None):
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf) if is_float(x) else x


@register("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(ctx, x, mask, value):
    return jnp.where(mask, cast(value, ctx.dtype), cast(x, ctx.dtype))


@register("aten.complex.default")
def _complex(ctx, real, imag):
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@register("aten.polar.default")
def _polar(ctx, magnitude, angle):
    return lax.complex(*jnp.broadcast_arrays(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)))


@register("aten.frexp.Tensor")
def _frexp(ctx, x):
    mantissa, exponent = jnp.frexp(x)
    return mantissa, cast(exponent, np.int32)
