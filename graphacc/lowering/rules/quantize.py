"""Blockwise quantisation; the arithmetic is that of `graphacc.ops.quantize`, bit for bit."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.lowering.dtypes import to_jax
from graphacc.lowering.registry import register
from graphacc.ops.quantize import INFINITY_BITS, SCALE_BYTES, SMALLEST, code_limit


@register("graphacc.quantize_blocks.default")
def _quantize_blocks(ctx, x, bits, block):
    n = x.shape[-1]
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -n % block)])
    rows = x.reshape(*x.shape[:-1], -1, block)
    magnitudes = lax.bitcast_convert_type(rows, jnp.int32) & np.int32(0x7FFFFFFF)
    top = jnp.max(magnitudes, axis=-1, keepdims=True)
    largest = lax.bitcast_convert_type(top, jnp.float32)
    raised = lax.bitcast_convert_type(largest * np.float32(1 / code_limit(bits)), jnp.int32) + np.int32(0xFFFF)
    scales = lax.bitcast_convert_type(raised & np.int32(-0x10000), jnp.float32)
    scales = jnp.where(largest < np.float32(SMALLEST), np.float32(1), scales)
    scales = jnp.where(top >= INFINITY_BITS, np.float32(np.nan), scales)
    codes = jnp.round(rows / scales)
    codes = jnp.where(codes == codes, codes, np.float32(0)).astype(jnp.int8)
    if bits == 4:
        low, high = codes[..., : block // 2], codes[..., block // 2 :]
        codes = (low & np.int8(15)) | (high << np.int8(4))
    codes = lax.bitcast_convert_type(codes, jnp.uint8)
    scales = lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint8)  # [..., blocks, 1, 2]
    return jnp.concatenate([codes.reshape(*x.shape[:-1], -1), scales.reshape(*x.shape[:-1], -1)], axis=-1)


def _values(message, n, bits, block):
    blocks = -(-n // block)
    size, shape = blocks * block * bits // 8, message.shape[:-1]
    codes = lax.bitcast_convert_type(message[..., :size], jnp.int8).reshape(*shape, blocks, -1)
    if bits == 4:
        codes = jnp.concatenate([(codes << np.int8(4)) >> np.int8(4), codes >> np.int8(4)], axis=-1)
    scales = lax.bitcast_convert_type(message[..., size:].reshape(*shape, blocks, SCALE_BYTES), jnp.bfloat16)
    values = codes.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
    return values.reshape(*shape, -1)[..., :n]


@register("graphacc.dequantize_blocks.default")
def _dequantize_blocks(ctx, message, n, bits, block, dtype):
    return _values(message, n, bits, block).astype(to_jax(dtype))


@register("graphacc.dequantize_sum.default")
def _dequantize_sum(ctx, messages, n, bits, block, dtype):
    total = _values(messages[0], n, bits, block)
    for i in range(1, messages.shape[0]):
        total = total + _values(messages[i], n, bits, block)
    return total.astype(to_jax(dtype))
