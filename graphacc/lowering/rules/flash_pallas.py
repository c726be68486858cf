"""graphacc::flash_attention as Pallas kernels for TPU, for the calls that `graphacc.ops.flash_form` gives them.

JAX's library has two such kernels. Neither does the operator: one repeats grouped heads and has no windows, the other takes its masks as
arrays of the host; both want lengths that their blocks divide, and their backward is not to be had apart from their forward.

The tiling is that of arXiv 2307.08691: a block of queries stays while blocks of keys pass by (forward, and the gradient of the
queries), or a block of keys stays while queries pass by, those of all heads of its group (gradients of keys and values). Only blocks
that see each other are walked over, so a window costs what it shows. Scores are computed transposed, [N, M]: what belongs to a query
(maximum, sum, log-sum-exp, segment) is then a row over lanes, stored without padding, and only the output is transposed, once per block.

Lengths that no block divides are padded: a padded query has a gradient of 0 and adds nothing, a padded key is hidden.

Legend: B batch, H query heads, G key/value heads, R = H / G, T query length, S key length, M queries and N keys per block, D head size,
E value head size.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from graphacc._compat.jax_ import x32
from graphacc.lowering.rules.matmul import precision
from graphacc.ops.flash_form import Described

BLOCK = 512  # most queries, and most keys, per block
_LANES = 128
_SAME_DIM1, _SAME_DIM0, _PLAIN = ((1,), (1,)), ((0,), (0,)), ((1,), (0,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """One side of the scores in blocks that stay (x), the other in blocks that pass by (y)."""

    x_block: int
    y_block: int
    x_blocks: int
    y_blocks: int
    before: int  # position x sees y in [x - before, x + after]; negative is no bound
    after: int

    def seen(self, i):
        """First and last block of y that block `i` of x sees; none if first > last."""
        start, stop = i * np.int32(self.x_block), i * np.int32(self.x_block) + np.int32(self.x_block - 1)
        first, last = np.int32(0), np.int32(self.y_blocks - 1)
        if self.before >= 0:
            first = lax.div(lax.max(start - np.int32(self.before), np.int32(0)), np.int32(self.y_block))
        if self.after >= 0:
            last = lax.min(lax.div(stop + np.int32(self.after), np.int32(self.y_block)), last)
        return first, last

    @property
    def steps(self) -> int:
        """Blocks of y that one block of x sees at most."""
        if self.before < 0 or self.after < 0:
            return self.y_blocks
        positions = self.x_block + self.before + self.after
        return min(self.y_blocks, (positions - 2) // self.y_block + 2)

    def passing(self, i, step):
        """The block of y at a step; it stays the last one when there is nothing more to see, so that nothing is fetched."""
        first, last = self.seen(i)
        return jnp.minimum(first + step, last)

    def runs(self, i, step):
        first, last = self.seen(i)
        return first + step <= last


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """One attention without its arrays."""

    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    left: int  # query t sees keys t - left <= s <= t + right; negative is no bound
    right: int
    scale: float
    interpret: bool

    @classmethod
    def of(cls, call, described: Described, interpret: bool) -> "_Plan":
        same = {name: getattr(described, name) for name in ("heads", "kv_heads", "q_len", "kv_len", "left", "right")}
        return cls(**same, scale=call.scale, interpret=interpret)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def q_tile(self) -> tuple[int, int]:
        """Queries per block, and blocks."""
        return _cut(self.q_len)

    @property
    def kv_tile(self) -> tuple[int, int]:
        return _cut(self.kv_len)

    def over_keys(self) -> Tiles:
        """Queries stay, keys pass by."""
        (x, xs), (y, ys) = self.q_tile, self.kv_tile
        return Tiles(x_block=x, y_block=y, x_blocks=xs, y_blocks=ys, before=self.left, after=self.right)

    def over_queries(self) -> Tiles:
        """Keys stay, queries pass by."""
        (x, xs), (y, ys) = self.kv_tile, self.q_tile
        return Tiles(x_block=x, y_block=y, x_blocks=xs, y_blocks=ys, before=self.right, after=self.left)

    def rows(self, x):
        """A number per query, [..., T], as [..., 1, T] with whole blocks."""
        return _padded(x[..., None, :], -1, self.q_tile)

    def queries(self, x):
        """[B, H, T, .] with whole blocks."""
        return _padded(x, 2, self.q_tile)

    def keys(self, x):
        """[B, G, S, .] with whole blocks."""
        return _padded(x, 2, self.kv_tile)

    def segments(self, call) -> list:
        """Of the queries [B, 1, T] and of the keys [B, S, 1], with whole blocks; nothing if there are none."""
        if call.q_segments is None:
            return []
        return [self.rows(call.q_segments), _padded(call.kv_segments[..., None], 1, self.kv_tile)]


def _cut(length: int) -> tuple[int, int]:
    """Size and number of blocks, of equal size and whole lanes, as few as `BLOCK` allows."""
    blocks = -(-length // BLOCK)
    size = -(-length // (blocks * _LANES)) * _LANES
    return size, -(-length // size)


def _padded(x, dim, tile):
    size, blocks = tile
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, size * blocks - x.shape[dim])
    return jnp.pad(x, padding) if padding[dim][1] else x


# Inside the kernels


def _dot(a, b, dims):
    """In fp32; bf16 operands have nothing to gain from more passes."""
    exact = a.dtype == jnp.float32 and precision() != lax.Precision.DEFAULT
    chosen = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (dims, ((), ())), precision=chosen, preferred_element_type=jnp.float32)


def _scores(plan, q, k, segments, query_block, key_block):
    """[N, M], hidden positions at -inf."""
    scores = _dot(k, q, _SAME_DIM1) * np.float32(plan.scale)
    (m, _), (n, blocks) = plan.q_tile, plan.kv_tile
    keys = key_block * np.int32(n) + lax.broadcasted_iota(np.int32, (n, m), 0)
    ahead = keys - (query_block * np.int32(m) + lax.broadcasted_iota(np.int32, (n, m), 1))
    seen = []
    if n * blocks != plan.kv_len:
        seen.append(keys < np.int32(plan.kv_len))
    if plan.left >= 0:
        seen.append(ahead >= np.int32(-plan.left))
    if plan.right >= 0:
        seen.append(ahead <= np.int32(plan.right))
    if segments:
        of_queries, of_keys = segments
        seen.append(of_keys[...] == of_queries[...])
    return jnp.where(functools.reduce(jnp.logical_and, seen), scores, np.float32(-np.inf)) if seen else scores


def _forward_kernel(plan, tiles, q, k, v, *refs):
    *segments, out, lse, largest, total, sums = refs
    block, step = pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        largest[...] = jnp.full(largest.shape, -np.inf, np.float32)
        total[...] = jnp.zeros(total.shape, np.float32)
        sums[...] = jnp.zeros(sums.shape, np.float32)

    @pl.when(tiles.runs(block, step))
    def _():
        scores = _scores(plan, q[...], k[...], segments, block, tiles.passing(block, step))
        now = jnp.maximum(largest[...], jnp.max(scores, axis=0, keepdims=True))
        base = jnp.where(now == -np.inf, np.float32(0), now)
        weights = jnp.exp(scores - base)
        factor = jnp.exp(largest[...] - base)
        largest[...] = now
        total[...] = total[...] * factor + jnp.sum(weights, axis=0, keepdims=True)
        sums[...] = sums[...] * factor + _dot(v[...], weights.astype(v.dtype), _SAME_DIM0)

    @pl.when(step == tiles.steps - 1)
    def _():
        empty = total[...] == 0
        divisor = jnp.where(empty, np.float32(1), total[...])
        out[...] = (sums[...] / divisor).T.astype(out.dtype)
        lse[...] = jnp.where(empty, np.float32(-np.inf), jnp.log(divisor) + largest[...])


def _weights(plan, q, k, lse, norm, segments, query_block, key_block):
    """Probabilities [N, M] again, from the log-sum-exp [1, M]."""
    base = jnp.where(lse == -np.inf, np.float32(0), lse)
    return jnp.exp(_scores(plan, q, k, segments, query_block, key_block) - base) * norm


def _grad_scores(plan, weights, v, grad, delta, dtype):
    return (weights * (_dot(v, grad, _SAME_DIM1) - delta) * np.float32(plan.scale)).astype(dtype)


def _queries_kernel(plan, tiles, q, k, v, grad, lse, norm, delta, *refs):
    *segments, grad_q, sums = refs
    block, step = pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros(sums.shape, np.float32)

    @pl.when(tiles.runs(block, step))
    def _():
        weights = _weights(plan, q[...], k[...], lse[...], norm[...], segments, block, tiles.passing(block, step))
        grad_s = _grad_scores(plan, weights, v[...], grad[...], delta[...], k.dtype)
        sums[...] += _dot(grad_s, k[...], _SAME_DIM0)

    @pl.when(step == tiles.steps - 1)
    def _():
        grad_q[...] = sums[...].astype(grad_q.dtype)


def _keys_kernel(plan, tiles, q, k, v, grad, lse, norm, delta, *refs):
    *segments, grad_k, grad_v, sums_k, sums_v = refs
    block, head, step = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((head == 0) & (step == 0))
    def _():
        sums_k[...] = jnp.zeros(sums_k.shape, np.float32)
        sums_v[...] = jnp.zeros(sums_v.shape, np.float32)

    @pl.when(tiles.runs(block, step))
    def _():
        weights = _weights(plan, q[...], k[...], lse[...], norm[...], segments, tiles.passing(block, step), block)
        sums_v[...] += _dot(weights.astype(grad.dtype), grad[...], _PLAIN)
        sums_k[...] += _dot(_grad_scores(plan, weights, v[...], grad[...], delta[...], q.dtype), q[...], _PLAIN)

    @pl.when((head == plan.group - 1) & (step == tiles.steps - 1))
    def _():
        grad_k[...] = sums_k[...].astype(grad_k.dtype)
        grad_v[...] = sums_v[...].astype(grad_v.dtype)


# The calls


@dataclasses.dataclass(frozen=True)
class _Specs:
    """Blocks of the arrays, for a grid whose positions `place` maps to (batch, query head, key head, query block, key block)."""

    plan: _Plan
    place: Callable[..., tuple]

    def _spec(self, shape, at):
        return pl.BlockSpec(shape, lambda *grid: at(*self.place(*grid)))

    def queries(self, x):
        return self._spec((None, None, self.plan.q_tile[0], x.shape[-1]), lambda b, h, g, i, j: (b, h, i, np.int32(0)))

    def keys(self, x):
        return self._spec((None, None, self.plan.kv_tile[0], x.shape[-1]), lambda b, h, g, i, j: (b, g, j, np.int32(0)))

    def rows(self):
        return self._spec((None, None, 1, self.plan.q_tile[0]), lambda b, h, g, i, j: (b, h, np.int32(0), i))

    def segments(self, call):
        if call.q_segments is None:
            return []
        return [
            self._spec((None, 1, self.plan.q_tile[0]), lambda b, h, g, i, j: (b, np.int32(0), i)),
            self._spec((None, self.plan.kv_tile[0], 1), lambda b, h, g, i, j: (b, j, np.int32(0))),
        ]


def _run(plan, kernel, tiles, grid, sequential, operands, in_specs, results, out_specs, scratch, name):
    """The kernel over a grid whose last `sequential` dims run in order."""
    order = ("parallel",) * (len(grid) - sequential) + ("arbitrary",) * sequential
    return pl.pallas_call(
        functools.partial(kernel, plan, tiles),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=results,
        scratch_shapes=[pltpu.VMEM(shape, np.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        interpret=plan.interpret,
        name=name,
    )(*operands)


def _over_keys(plan, batch):
    """Tiles, grid and specs where a block of queries stays."""
    tiles, group = plan.over_keys(), np.int32(plan.group)
    specs = _Specs(plan, lambda b, h, i, step: (b, h, lax.div(h, group), i, tiles.passing(i, step)))
    return tiles, (batch, plan.heads, tiles.x_blocks, tiles.steps), specs


def _over_queries(plan, batch):
    """Tiles, grid and specs where a block of keys stays, and the queries of all heads of its group pass by."""
    tiles, group = plan.over_queries(), np.int32(plan.group)
    specs = _Specs(plan, lambda b, g, j, r, step: (b, g * group + r, g, tiles.passing(j, step), j))
    return tiles, (batch, plan.kv_heads, tiles.x_blocks, plan.group, tiles.steps), specs


def forward(call, described: Described, *, interpret: bool = False):
    """Output [B, H, T, E] in q's dtype and log-sum-exp [B, H, T] in fp32; rows without a key give 0 and -inf.

    Args:
        call: the arguments of graphacc::flash_attention.
        described: the same call, with its band.
        interpret: run the kernels in plain JAX, on any platform.
    """
    plan = _Plan.of(call, described, interpret)
    with x32():
        q, k, v = plan.queries(call.q), plan.keys(call.k), plan.keys(call.v)
        tiles, grid, specs = _over_keys(plan, q.shape[0])
        m, e = plan.q_tile[0], v.shape[-1]
        out = jax.ShapeDtypeStruct((*q.shape[:-1], e), q.dtype)
        rows = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), np.float32)
        in_specs = [specs.queries(q), specs.keys(k), specs.keys(v), *specs.segments(call)]
        operands, out_specs = [q, k, v, *plan.segments(call)], [specs.queries(out), specs.rows()]
        scratch = [(1, m), (1, m), (e, m)]
        name = "gacc_flash_forward"
        out, lse = _run(plan, _forward_kernel, tiles, grid, 1, operands, in_specs, [out, rows], out_specs, scratch, name)
    return out[:, :, : plan.q_len], lse[:, :, 0, : plan.q_len]


def backward(call, described: Described, grad, out, lse, norm, *, interpret: bool = False):
    """Gradients of q, k and v in their shapes and dtypes, without what rows without a key add to them.

    Args:
        grad, out: [B, H, T, E] in q's dtype.
        lse: [B, H, T] in fp32.
        norm: [B, H, T] in fp32, factors on the probabilities.
    """
    plan = _Plan.of(call, described, interpret)
    with x32():
        q, k, v, grad_out = plan.queries(call.q), plan.keys(call.k), plan.keys(call.v), plan.queries(grad)
        delta = jnp.sum(grad.astype(np.float32) * out.astype(np.float32), axis=-1)
        operands = [q, k, v, grad_out, *map(plan.rows, (lse, norm, delta)), *plan.segments(call)]

        def run(kernel, layout, sequential, of, results, scratch, name):
            tiles, grid, specs = layout(plan, q.shape[0])
            in_specs = [specs.queries(q), specs.keys(k), specs.keys(v), specs.queries(grad_out), *[specs.rows()] * 3]
            in_specs += specs.segments(call)
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
            out_specs = [of(specs)(x) for x in results]
            return _run(plan, kernel, tiles, grid, sequential, operands, in_specs, shapes, out_specs, scratch, name)

        (m, _), (n, _), d, e = plan.q_tile, plan.kv_tile, q.shape[-1], v.shape[-1]
        (grad_q,) = run(_queries_kernel, _over_keys, 1, lambda s: s.queries, [q], [(m, d)], "gacc_flash_backward_queries")
        grad_k, grad_v = run(_keys_kernel, _over_queries, 2, lambda s: s.keys, [k, v], [(n, d), (n, e)], "gacc_flash_backward_keys")
    return grad_q[:, :, : plan.q_len], grad_k[:, :, : plan.kv_len], grad_v[:, :, : plan.kv_len]


# Rows without a key that get the mean of all values. Their probability 1 / S does not depend on the scores, so sums over the keys
# have a closed form, and no block needs to be walked over for them.


def with_mean(out, lse, call):
    """The output [B, H, T, E] with the mean of the values in the rows without a key."""
    mean = jnp.mean(call.v.astype(np.float32), axis=2, keepdims=True)
    mean = jnp.repeat(mean, call.q.shape[1] // call.v.shape[1], axis=1)
    return jnp.where((lse == -np.inf)[..., None], mean.astype(out.dtype), out)


def with_mean_grads(grads, grad, lse, call):
    """The gradients of q, k and v with what the rows without a key add to them."""
    empty = lse == -np.inf

    def add(grads):
        groups, keys = call.k.shape[1], call.k.shape[2]
        q, grad_out, k, v = (x.astype(np.float32) for x in (call.q, jnp.where(empty[..., None], grad, 0), call.k, call.v))
        q, grad_out = (x.reshape(x.shape[0], groups, -1, *x.shape[2:]) for x in (q, grad_out))  # [B, G, R, T, .]
        off_v, off_k = (x - jnp.mean(x, axis=2, keepdims=True) for x in (v, k))
        share = np.float32(1 / keys)
        product = functools.partial(jnp.einsum, precision=precision())
        grad_q = product("bgrte,bgse,bgsd->bgrtd", grad_out, off_v, off_k, optimize=[(1, 2), (0, 1)]) * share * np.float32(call.scale)
        grad_k = product("bgse,bgrte,bgrtd->bgsd", off_v, grad_out, q, optimize=[(1, 2), (0, 1)]) * share * np.float32(call.scale)
        grad_v = jnp.broadcast_to(jnp.sum(grad_out, axis=(2, 3))[:, :, None] * share, v.shape)
        added = (grad_q.reshape(call.q.shape), grad_k, grad_v)
        return tuple((x.astype(np.float32) + y).astype(x.dtype) for x, y in zip(grads, added))

    return lax.cond(jnp.any(empty), add, lambda grads: grads, tuple(grads))
