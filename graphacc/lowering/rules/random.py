"""graphacc's counter-based random numbers, bit for bit those of `graphacc.ops.random`.

The rounds are written out in 32-bit words, so XLA fuses them with what uses the numbers: on the CPU 28 times as fast as jax's own
threefry primitive, whose loop keeps its words in memory.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.registry import refuse, register

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@jax.jit
def _threefry2x32(key, x0, x1):
    """Threefry-2x32 with 20 rounds on uint32 arrays; `key` is two 0-d words. Jitted: traced once per shape."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def _words(index):
    """The high and low 32 bits of an unsigned array; the high ones are constant zeros for a 32-bit array."""
    if index.dtype == np.uint32:
        return jnp.zeros_like(index), index
    return (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)


def _linear_index(size, global_size, start):
    """Row-major global index of every element of the block, uint32 where that is wide enough, else uint64."""
    dtype = np.dtype(np.uint32 if math.prod(global_size) <= _MASK else np.uint64)
    index = jnp.zeros(tuple(size), dtype)
    stride = 1
    for dim in reversed(range(len(size))):
        position = lax.broadcasted_iota(dtype, tuple(size), dim)
        if start is not None:
            position = position + start[dim].astype(dtype)
        index = index + position * np.asarray(stride, dtype)
        stride *= global_size[dim]
    return index


def _bits(key, stream, size, global_size, start):
    """uint32 array of shape `size`."""
    return _bits_at(key[0], key[1], _linear_index(size, global_size, start), stream)


def _bits_at(word0, word1, index, stream):
    """uint32 array of the shape of `index`, which is unsigned."""
    derived = _threefry2x32((word0.astype(np.uint32), word1.astype(np.uint32)), np.uint32(stream & _MASK), np.uint32(stream >> 32))
    high, low = _threefry2x32(derived, *_words(index))
    return high ^ low


@register("graphacc.random_bits.default")
def _random_bits(ctx, key, stream, size, global_size, start):
    return _bits(key, stream, size, global_size, start).astype(np.int64)


@register("graphacc.random_uniform.default")
def _random_uniform(ctx, key, stream, size, global_size, start):
    return _uniform(_bits(key, stream, size, global_size, start))


def _uniform(bits):
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


@register("graphacc.random_bits_at.default")
def _random_bits_at(ctx, word0, word1, index, stream):
    return _bits_at(word0, word1, index.astype(np.uint64), stream).astype(np.int64)


@register("graphacc.random_uniform_at.default")
def _random_uniform_at(ctx, word0, word1, index, stream):
    return _uniform(_bits_at(word0, word1, index.astype(np.uint64), stream))


refuse(
    "it draws from torch's global generator, which a compiled step does not have: capture turns the model's random operators "
    "into graphacc::random_uniform, so this one was added after it or has a form that capture does not know",
    "aten.rand.default",
    "aten.rand_like.default",
    "aten.randn.default",
    "aten.randn_like.default",
    "aten.randint.default",
    "aten.randint.low",
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
    "aten.randperm.default",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
    "aten.bernoulli.Tensor",
    "aten.cauchy.default",
    "aten.exponential.default",
    "aten.geometric.default",
    "aten.log_normal.default",
    "aten.multinomial.default",
    "aten.native_dropout.default",
    "aten.normal.Tensor_Tensor",
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
    "aten.normal.float_float",
    "aten.normal_functional.default",
    "aten.poisson.default",
    "aten.rrelu_with_noise_functional.default",
    "aten.uniform.default",
)
