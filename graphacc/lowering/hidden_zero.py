"""An order between computations that XLA cannot take away: a zero that it cannot know to be one."""

import jax.numpy as jnp
from jax import lax

from graphacc.lowering.fence import computed_once


def with_hidden_zero(x, dependency):
    """`x`, into which a zero is xor-ed that XLA cannot know to be zero, computed from one element of `dependency`.

    n * (n + 1) is even for every n, also where it overflows. The bits of `x` stay as they are.
    """
    word = _bits(dependency.reshape(-1)[:1])[0]
    zero = computed_once(word * (word + 1) & 1)  # else every fusion that reads `x` computes it, and `dependency` stays in memory for them all
    if x.dtype == jnp.bool_:
        return x ^ (zero != 0)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(with_hidden_zero(x.real, dependency), x.imag)
    bits = _bits(x)
    return lax.bitcast_convert_type(bits ^ zero.astype(bits.dtype), x.dtype)


def _bits(x):
    """The bits of `x`, of a complex number those of its real part, as unsigned integers of its width."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = x.real
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize])
