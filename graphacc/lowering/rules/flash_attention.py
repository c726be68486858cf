"""graphacc::flash_attention: on the CPU XLA custom calls of `csrc/`, elsewhere blocks of keys in a scan, both without a [T, S] array.

Legend: B batch, H query heads, G key/value heads, R = H / G query heads per key head, T query length, S key length, N keys
per block, D head size, E value head size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc.kernels import flash_attention as kernels
from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register
from graphacc.lowering.rules.matmul import dot
from graphacc.lowering.rules.random import _bits
from graphacc.ops.flash_attention import LARGE, EmptyRows

BLOCK = 512  # keys per step of the scan
_HEADS = ((0, 1), (0, 1))


@dataclasses.dataclass(frozen=True)
class _Call:
    """One attention: its arrays, and the options of graphacc.ops.flash_attention."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    q_segments: jax.Array | None
    kv_segments: jax.Array | None
    key: jax.Array | None
    start: jax.Array | None
    left: int
    right: int
    scale: float
    empty_rows: int
    dropout: float
    stream: int
    global_size: tuple[int, ...]


@register("graphacc.flash_attention.default")
def _flash(ctx, *args):
    call = _Call(*args[:-1], tuple(args[-1]))
    if call.q.dtype == np.float64:
        return _blockwise(call)
    return _by_platform(call, (), _native, _blockwise)


@register("graphacc.flash_attention_backward.default")
def _flash_backward(ctx, grad, *args):
    *inputs, start, out, lse = args[:10]
    *options, global_size, bias_grad = args[10:]
    call, more = _Call(*inputs, start, *options, tuple(global_size)), (grad, out, lse)

    def native(call, *more):
        return _native_backward(call, *more, bias_grad)

    def blockwise(call, *more):
        return _blockwise_backward(call, *more, bias_grad)

    return blockwise(call, *more) if call.q.dtype == np.float64 else _by_platform(call, more, native, blockwise)


def _by_platform(call, more, native, blockwise):
    """One of the two functions; JAX keeps the one of the platform that it compiles for."""
    names = [field.name for field in dataclasses.fields(_Call)[:8]]
    given = {name: getattr(call, name) for name in names if getattr(call, name) is not None}

    def over(function):
        return lambda arrays, more: function(dataclasses.replace(call, **arrays), *more)

    return lax.platform_dependent(given, more, cpu=over(native), default=over(blockwise))


# CPU


def _operands(call):
    """The operands of the custom calls; absent ones have no elements, and the bias has 4 dims."""
    kernels.register_xla_targets()
    absent = {name: jnp.zeros(0, dtype) for name, dtype in (("segments", np.int32), ("numbers", np.int64), ("bias", np.float32))}
    bias = absent["bias"]
    if call.bias is not None:
        bias = cast(call.bias, np.float32).reshape((1,) * (4 - call.bias.ndim) + call.bias.shape)
    segments = [absent["segments"] if ids is None else ids for ids in (call.q_segments, call.kv_segments)]
    numbers = [absent["numbers"] if x is None else cast(x, np.int64) for x in (call.key, call.start)]
    return [call.q, call.k, call.v, bias, *segments, *numbers]


def _attributes(call):
    return {
        "scale": np.float64(call.scale),
        "left": np.int64(call.left),
        "right": np.int64(call.right),
        "empty_rows": np.int64(call.empty_rows),
        "dropout": np.float64(call.dropout),
        "stream": np.int64(call.stream),
        "global_size": np.asarray(call.global_size, np.int64),
    }


def _native(call):
    out = jax.ShapeDtypeStruct((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype)
    lse = jax.ShapeDtypeStruct(call.q.shape[:-1], np.float32)
    return tuple(jax.ffi.ffi_call(kernels.FORWARD, (out, lse))(*_operands(call), **_attributes(call)))


def _native_backward(call, grad, out, lse, bias_grad):
    operands = _operands(call)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3]]
    results.append(jax.ShapeDtypeStruct(operands[3].shape if bias_grad else (0,), np.float32))
    grads = jax.ffi.ffi_call(kernels.BACKWARD, results)(grad, *operands, out, lse, **_attributes(call))
    return (*grads[:3], _like_bias(call, grads[3], bias_grad))


def _like_bias(call, grad, bias_grad):
    return cast(grad.reshape(call.bias.shape), call.bias.dtype) if bias_grad else jnp.zeros(0, call.q.dtype)


# Blocks of keys. Sums and maxima are kept over the blocks as in arXiv 2205.14135, algorithm 1.


def _group(x, groups):
    """[B, H, ...] -> [B, G, R, ...]."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The keys of a call in `count` blocks of `size`, the last one padded."""

    call: _Call
    size: int
    count: int

    @classmethod
    def of(cls, call):
        size = max(1, min(BLOCK, call.k.shape[2]))
        return cls(call, size, -(-call.k.shape[2] // size))

    def cut(self, x, dim):
        """`x` with its keys in blocks, as [count, ..., size, ...]; a dim of size 1 broadcasts and stays."""
        if x.shape[dim] == 1 and self.call.k.shape[2] != 1:
            return jnp.broadcast_to(x, (self.count, *x.shape))
        padding = [(0, 0)] * x.ndim
        padding[dim] = (0, self.size * self.count - x.shape[dim])
        x = jnp.pad(x, padding).reshape(*x.shape[:dim], self.count, self.size, *x.shape[dim + 1 :])
        return jnp.moveaxis(x, dim, 0)

    def joined(self, x, dim):
        """[count, ..., size, ...] -> [..., S, ...]."""
        x = jnp.moveaxis(x, 0, dim)
        return lax.slice_in_dim(x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :]), 0, self.call.k.shape[2], axis=dim)

    def scanned(self):
        """What the scan walks over: the number of the block, and its keys, values, bias and segments."""
        call = self.call
        parts = {"index": jnp.arange(self.count), "k": self.cut(call.k, 2), "v": self.cut(call.v, 2)}
        if call.bias is not None:
            bias = call.bias.reshape((1,) * (4 - call.bias.ndim) + call.bias.shape)
            parts["bias"] = self.cut(cast(bias, wide(call.q.dtype)), 3)
        if call.kv_segments is not None:
            parts["segments"] = self.cut(call.kv_segments, 1)
        return parts

    def scores(self, queries, part):
        """[B, G, R, T, N] in fp32 (fp64), masked positions at -inf."""
        call, dtype = self.call, wide(self.call.q.dtype)
        scores = dot(queries, part["k"], ((4,), (3,)), _HEADS, dtype) * np.asarray(call.scale, dtype)
        if call.bias is not None:
            scores = scores + _split_heads(part["bias"], call)
        return jnp.where(self.seen(part), scores, -np.inf)

    def seen(self, part):
        """bool, broadcastable to [B, 1, 1, T, N]."""
        call = self.call
        key = part["index"] * self.size + jnp.arange(self.size)
        ahead = key - jnp.arange(call.q.shape[2])[:, None]
        seen = jnp.broadcast_to(key < call.k.shape[2], ahead.shape)
        seen = seen if call.left < 0 else seen & (ahead >= -call.left)
        seen = seen if call.right < 0 else seen & (ahead <= call.right)
        if call.q_segments is None:
            return seen[None, None, None]
        return seen & (call.q_segments[:, None, None, :, None] == part["segments"][:, None, None, None, :])

    def kept(self, part):
        """[B, G, R, T, N]: 0 or 1 / (1 - p)."""
        call = self.call
        size = (*call.q.shape[:3], self.size)
        start = jnp.zeros(4, np.int64) if call.start is None else call.start
        start = start + jnp.asarray([0, 0, 0, 1], np.int64) * (part["index"] * self.size).astype(np.int64)
        bits = _bits(call.key, call.stream, size, call.global_size, start)
        uniform = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        factor = 1.0 / (1.0 - call.dropout) if call.dropout < 1.0 else 1.0
        return _group(jnp.where(uniform >= np.float32(call.dropout), np.float32(factor), np.float32(0)), call.k.shape[1])


def _split_heads(bias, call):
    """[B or 1, H or 1, T or 1, N or 1] -> [., G or 1, R or 1, ., .]."""
    return bias[:, :, None] if bias.shape[1] == 1 else _group(bias, call.k.shape[1])


def _blockwise(call):
    blocks, groups, dtype = _Blocks.of(call), call.k.shape[1], wide(call.q.dtype)
    queries = _group(call.q, groups)
    rows = queries.shape[:-1]

    def step(carry, part):
        largest, total, sums = carry
        scores = blocks.scores(queries, part)
        now = jnp.maximum(largest, jnp.max(scores, axis=-1))
        base = jnp.where(now == -np.inf, 0, now)
        weights = jnp.exp(scores - base[..., None])
        factor = jnp.exp(largest - base)
        total = total * factor + jnp.sum(weights, axis=-1)
        weights = weights * blocks.kept(part) if call.dropout else weights
        sums = sums * factor[..., None] + dot(cast(weights, call.v.dtype), part["v"], ((4,), (2,)), _HEADS, dtype)
        return (now, total, sums), None

    carry = jnp.full(rows, -np.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, call.v.shape[-1]), dtype)
    (largest, total, sums), _ = lax.scan(step, carry, blocks.scanned())
    out = sums / jnp.where(total == 0, 1, total)[..., None]
    if call.empty_rows != EmptyRows.ZEROS:
        out = jnp.where((total == 0)[..., None], _uniform(blocks, queries, dtype), out)
    lse = jnp.where(total == 0, -np.inf, jnp.log(total) + largest)
    return cast(out, call.q.dtype).reshape(*call.q.shape[:-1], -1), lse.reshape(call.q.shape[:-1])


def _uniform(blocks, queries, dtype):
    """The mean over all keys, [B, G, R, T, E] (or broadcastable to it without dropout)."""
    call = blocks.call
    if not call.dropout:
        return jnp.mean(cast(call.v, dtype), axis=2)[:, :, None, None]

    def step(sums, part):
        return sums + dot(cast(blocks.kept(part), dtype), cast(part["v"], dtype), ((4,), (2,)), _HEADS, dtype), None

    return lax.scan(step, jnp.zeros((*queries.shape[:-1], call.v.shape[-1]), dtype), blocks.scanned())[0] / call.k.shape[2]


def _blockwise_backward(call, grad, out, lse, bias_grad):
    blocks, groups, dtype = _Blocks.of(call), call.k.shape[1], wide(call.q.dtype)
    queries, grad, out, lse = (_group(x, groups) for x in (call.q, grad, out, lse))
    empty = (lse == -np.inf)[..., None]
    base = jnp.where(empty, 0, lse[..., None])
    delta = jnp.sum(cast(grad, dtype) * cast(out, dtype), axis=-1, keepdims=True)
    product = cast(grad, call.v.dtype)
    norm = _norms(blocks, queries, base)

    def step(grad_q, part):
        weights = jnp.exp(blocks.scores(queries, part) - base) * norm
        if call.empty_rows != EmptyRows.ZEROS:
            real = part["index"] * blocks.size + jnp.arange(blocks.size) < call.k.shape[2]
            weights = jnp.where(empty, jnp.where(real, np.asarray(1 / call.k.shape[2], dtype), 0), weights)
        kept = blocks.kept(part) if call.dropout else 1
        grad_v = dot(cast(weights * kept, call.v.dtype), product, ((2, 3), (2, 3)), _HEADS, dtype)
        grad_p = dot(product, part["v"], ((4,), (3,)), _HEADS, dtype) * kept
        grad_s = weights * (grad_p - delta)
        scaled = cast(grad_s * np.asarray(call.scale, dtype), call.q.dtype)
        grad_k = dot(scaled, queries, ((2, 3), (2, 3)), _HEADS, dtype)
        grad_q = grad_q + dot(scaled, part["k"], ((4,), (2,)), _HEADS, dtype)
        if not bias_grad:
            return grad_q, (grad_k, grad_v)
        constant = empty if call.empty_rows == EmptyRows.UNIFORM_CONSTANT else False
        return grad_q, (grad_k, grad_v, _to_bias(part["bias"], call, jnp.where(constant, 0, grad_s)))

    grad_q, (grad_k, grad_v, *grad_bias) = lax.scan(step, jnp.zeros(queries.shape, dtype), blocks.scanned())
    grads = [cast(grad_q, call.q.dtype).reshape(call.q.shape)]
    grads += [cast(blocks.joined(x, 2), call.q.dtype) for x in (grad_k, grad_v)]
    if not bias_grad:
        return (*grads, _like_bias(call, None, False))
    summed = call.bias.shape[-1:] == (1,) and call.k.shape[2] != 1
    total = jnp.sum(grad_bias[0], axis=0) if summed else blocks.joined(grad_bias[0], 3)
    return (*grads, _like_bias(call, total, True))


def _norms(blocks, queries, base):
    """[B, G, R, T, 1]: factors on the probabilities, for a log-sum-exp of large magnitude has lost digits (see the operator)."""
    large = jnp.abs(base) > LARGE

    def summed():
        def step(total, part):
            return total + jnp.sum(jnp.exp(blocks.scores(queries, part) - base), axis=-1, keepdims=True), None

        return lax.scan(step, jnp.zeros_like(base), blocks.scanned())[0]

    total = lax.cond(jnp.any(large), summed, lambda: jnp.ones_like(base))
    return jnp.where(large, 1 / total, 1)


def _to_bias(bias, call, grad_s):
    """Sum [B, G, R, T, N] over the dims along which the block of the bias broadcasts."""
    grad = grad_s.reshape(call.q.shape[0], call.q.shape[1], *grad_s.shape[3:])
    dims = [dim for dim in range(4) if bias.shape[dim] == 1 and grad.shape[dim] != 1]
    return jnp.sum(grad, axis=tuple(dims), keepdims=True) if dims else grad
