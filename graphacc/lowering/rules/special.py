"""Special functions, by table."""

import functools
import math

import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import cast
from graphacc.lowering.registry import register


def _in_float64(function):
    """XLA's float32 form of some functions misses torch's last digits; these operators are too rare for that to cost."""

    def compute(*args):
        return function(*(cast(x, np.float64) for x in args))

    return compute


def _digamma(x):
    # At 0 torch gives infinity of the opposite sign, at the other poles NaN.
    regular = _in_float64(special.digamma)(x)
    at_zero = -jnp.copysign(np.inf, cast(x, np.float64))
    return jnp.where(x == 0, at_zero, jnp.where((x < 0) & (x == jnp.floor(x)), np.nan, regular))


def _zeta(s, q):
    """Hurwitz zeta. jax's needs q > 0: the terms before that are added one by one."""

    def add_term(state):
        total, q = state
        return total + jnp.where(q <= 0, jnp.power(q, -s), 0), jnp.where(q <= 0, q + 1, q)

    s, q = jnp.broadcast_arrays(cast(s, np.float64), cast(q, np.float64))
    total, positive = lax.while_loop(lambda state: jnp.any(state[1] <= 0), add_term, (jnp.zeros_like(q), q))
    result = total + special.zeta(s, positive)
    pole = (q <= 0) & (q == jnp.floor(q))
    result = jnp.where(pole, np.inf, jnp.where((q <= 0) & (s != jnp.floor(s)), np.nan, result))
    return jnp.where(s == 1, np.inf, jnp.where(s < 1, np.nan, result))


def _entr(x):
    return jnp.where(jnp.isnan(x), x, special.entr(x))


_UNARY = {
    "digamma": _digamma,
    "erfinv": _in_float64(special.erfinv),
    "i0": _in_float64(special.i0),
    "lgamma": _in_float64(special.gammaln),
    "special_entr": _entr,
    "special_i0e": _in_float64(special.i0e),
    "special_i1": _in_float64(special.i1),
    "special_i1e": _in_float64(special.i1e),
    "special_log_ndtr": _in_float64(special.log_ndtr),
    "special_modified_bessel_i0": _in_float64(special.i0),
    "special_modified_bessel_i1": _in_float64(special.i1),
    "special_ndtri": _in_float64(special.ndtri),
}
_BINARY = {
    "igamma": _in_float64(special.gammainc),
    "igammac": _in_float64(special.gammaincc),
    "special_zeta": _zeta,
}


def _rule(function, ctx, *args):
    return cast(function(*(cast(x, ctx.dtype) for x in args)), ctx.dtype)


for _name, _function in {**_UNARY, **_BINARY}.items():
    register(f"aten.{_name}.default")(functools.partial(_rule, _function))


@register("aten.polygamma.default")
def _polygamma(ctx, n, x):
    x = cast(x, np.float64)
    if n == 0:
        return cast(_digamma(x), ctx.dtype)
    factor = (-1.0) ** (n + 1) * math.factorial(n)
    return cast(factor * _zeta(np.float64(n + 1), x), ctx.dtype)


@register("aten.logit.default")
def _logit(ctx, x, eps=None):
    x = cast(x, ctx.dtype)
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@register("aten.mvlgamma.default")
def _mvlgamma(ctx, x, p):
    return cast(special.multigammaln(cast(x, np.float64), p), ctx.dtype)
