"""graphacc::flash_attention in the form that `graphacc.ops.flash_form` chooses: custom calls of the CPU, CUDA or TPU, or blocks of keys.

The CPU's calls and the blocks in a scan stand here; `flash_cudnn` and `flash_pallas` hold the others. None has a [T, S] array.

Legend: B batch, H query heads, G key/value heads, R = H / G query heads per key head, T query length, S key length, N keys
per block, D head size, E value head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphacc._compat import jax_ as compat
from graphacc.kernels import flash_attention as kernels
from graphacc.kernels.library import register_xla_target
from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.registry import register
from graphacc.lowering.rules import flash_cudnn
from graphacc.lowering.rules.matmul import dot
from graphacc.lowering.rules.random import _bits
from graphacc.ops.flash_attention import LARGE, EmptyRows
from graphacc.ops.flash_form import BLOCK, Described, Form, choose

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

    @property
    def described(self) -> Described:
        names = ("bias", "q_segments", "left", "right", "dropout")
        return Described.of(self.q, self.k, self.v, **{name: getattr(self, name) for name in names})


@register("graphacc.flash_attention.default")
def _flash(ctx, *args):
    call = _Call(*args[:-1], tuple(args[-1]))
    rows = call.q.shape[:-1]
    results = [jax.ShapeDtypeStruct((*rows, call.v.shape[-1]), call.q.dtype), jax.ShapeDtypeStruct(rows, wide(call.q.dtype))]
    return _by_platform(call, (), _FORWARD, results)


@register("graphacc.flash_attention_backward.default")
def _flash_backward(ctx, grad, *args):
    *inputs, start, out, lse = args[:10]
    *options, global_size, bias_grad = args[10:]
    call = _Call(*inputs, start, *options, tuple(global_size))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.q, call.k, call.v)]
    results.append(jax.ShapeDtypeStruct(call.bias.shape, call.bias.dtype) if bias_grad else jax.ShapeDtypeStruct((0,), call.q.dtype))
    forms = {form: functools.partial(function, bias_grad=bias_grad) for form, function in _BACKWARD.items()}
    return _by_platform(call, (grad, out, lse), forms, results)


def _by_platform(call, more, forms, results):
    """`results`, by the form for the platform that the program is lowered for."""
    names = [field.name for field in dataclasses.fields(_Call)[:8]]
    given = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    bare = dataclasses.replace(call, **dict.fromkeys(given))

    def chosen(platform, *arrays):
        here = dataclasses.replace(bare, **dict(zip(given, arrays)))
        return forms[_form(platform, here)](here, *arrays[len(given) :])

    return tuple(compat.lowered_for_platform(chosen, results, *given.values(), *more))


def _form(platform, call) -> Form:
    capability = compat.cuda_capability() if platform == "cuda" else None
    form = choose(platform, call.described, capability=capability).form
    lacking = {Form.CUDNN: compat.has_cudnn_attention, Form.PALLAS: compat.has_pallas}
    return Form.BLOCKWISE if form in lacking and not lacking[form]() else form


# CPU


def _operands(call):
    """The operands of the custom calls; absent ones have no elements, and the bias has 4 dims."""
    for name in (kernels.FORWARD, kernels.BACKWARD):
        register_xla_target(name)
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


# CUDA and TPU


def _cudnn(call):
    return flash_cudnn.forward(call.q, call.k, call.v, flash_cudnn.options(call.described, call.scale))


def _cudnn_backward(call, grad, out, lse, bias_grad):
    told = flash_cudnn.options(call.described, call.scale)
    return (*flash_cudnn.backward(grad, call.q, call.k, call.v, out, lse, told), _like_bias(call, None, bias_grad))


def _kernels():
    """The kernels for TPU; Pallas takes a third of a second to import, so only programs for TPU do."""
    from graphacc.lowering.rules import flash_pallas

    return flash_pallas


def _pallas(call, **how):
    out, lse = _kernels().forward(call, call.described, **how)
    return (out if call.empty_rows == EmptyRows.ZEROS else _kernels().with_mean(out, lse, call)), lse


def _pallas_backward(call, grad, out, lse, bias_grad, **how):
    queries = _group(call.q, call.k.shape[1])
    base = jnp.where(lse == -np.inf, 0, lse)
    norm = _norms(_Blocks.of(call), queries, _group(base, call.k.shape[1])[..., None]).reshape(lse.shape)
    grads = _kernels().backward(call, call.described, grad, out, lse, norm, **how)
    if call.empty_rows != EmptyRows.ZEROS:
        grads = _kernels().with_mean_grads(grads, grad, lse, call)
    return (*grads, _like_bias(call, None, bias_grad))


_FORWARD = {Form.CPU_KERNEL: _native, Form.CUDNN: _cudnn, Form.PALLAS: _pallas, Form.BLOCKWISE: _blockwise}
_BACKWARD = {
    Form.CPU_KERNEL: _native_backward,
    Form.CUDNN: _cudnn_backward,
    Form.PALLAS: _pallas_backward,
    Form.BLOCKWISE: _blockwise_backward,
}
