"""The pointwise operators of torch's ``prims`` namespace: those of `aten` on operands of one dtype."""

import functools

from graphacc.lowering.registry import find, register

# prims name -> ATen overload, where the names differ.
_RENAMED = {
    "where": "where.self",
    "ne": "ne.Tensor",
    "real": "real.default",
    "erf_inv": "erfinv.default",
    "pow": "pow.Tensor_Tensor",
}
_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc exp exp2 expm1 floor imag isfinite lgamma "
    "log log10 log1p log2 neg reciprocal round rsqrt sign signbit sin sinh sqrt tan tanh trunc"
).split()
_BINARY_TENSOR = "add bitwise_and bitwise_or bitwise_xor eq fmod ge gt le lt mul remainder sub".split()
_BINARY_DEFAULT = "atan2 fmax fmin gcd hypot igamma igammac maximum minimum nextafter".split()


def _same_as(name, ctx, *args, **kwargs):
    return find(f"aten.{name}")(ctx, *args, **kwargs)


def _register():
    table = {name: f"{name}.default" for name in _UNARY + _BINARY_DEFAULT}
    table.update({name: f"{name}.Tensor" for name in _BINARY_TENSOR}, **_RENAMED)
    table.update(
        shift_left="bitwise_left_shift.Tensor",
        shift_right_arithmetic="bitwise_right_shift.Tensor",
        conj_physical="conj_physical.default",
    )
    table.update(
        bessel_i0="i0.default", bessel_i0e="special_i0e.default", bessel_i1="special_i1.default", bessel_i1e="special_i1e.default"
    )
    table.update(zeta="special_zeta.default", ndtri="special_ndtri.default")
    for name, aten in table.items():
        register(f"prims.{name}.default")(functools.partial(_same_as, aten))


_register()


@register("prims.div.default")
def _div(ctx, a, b):
    """Integers divide towards zero, unlike ATen's."""
    integer = getattr(ctx.dtype, "kind", "") in "iu"
    return find("aten.div.Tensor_mode")(ctx, a, b, rounding_mode="trunc" if integer else None)
