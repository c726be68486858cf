"""Chunks one after the other: a loop whose body holds the values of one chunk alone."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from graphacc.lowering.dtypes import to_jax
from graphacc.lowering.interpret import run_graph
from graphacc.lowering.registry import register
from graphacc.ops.chunked import MAX, MIN, SUM, Split, read


@register("graphacc.chunked.default")
def _chunked(ctx, split, whole, body):
    loop = read(body)
    kept = [k for k, how in enumerate(loop.results) if not isinstance(how, Split)]

    def one(so_far, chunk):
        values: Any = run_graph(loop.graph, (*chunk, *whole))
        parts = [value for value, how in zip(values, loop.results) if isinstance(how, Split)]
        return [_combined(before, values[k], loop.results[k]) for before, k in zip(so_far, kept)], parts

    start = [_neutral(loop.results[k], ctx.element(k).shape, to_jax(loop.accumulates_in(k))) for k in kept]
    numbers = jnp.arange(loop.chunks, dtype=jnp.int64)
    combined, parts = lax.scan(one, start, (numbers, *(_apart(x, at, loop.chunks) for x, at in zip(split, loop.splits, strict=True))))
    left, stacked = iter(combined), iter(parts)
    found = []
    for k, how in enumerate(loop.results):
        inner = ctx.element(k)
        found.append(_together(next(stacked), how, inner.shape) if isinstance(how, Split) else next(left).astype(inner.dtype))
    return tuple(found)


def _apart(x, at, chunks):
    """[..., outer * C * rest, ...] -> [C, ..., outer * rest, ...]."""
    blocks = jnp.moveaxis(x.reshape(at.blocks(x.shape, chunks)), at.dim + 1, 0)
    return blocks.reshape(chunks, *at.local(x.shape, chunks))


def _together(parts, at, shape):
    """The inverse of `_apart`."""
    chunks, *local = parts.shape
    blocks = parts.reshape(chunks, *local[: at.dim], at.outer, local[at.dim] // at.outer, *local[at.dim + 1 :])
    return jnp.moveaxis(blocks, 0, at.dim + 1).reshape(shape)


def _neutral(how, shape, dtype):
    if how not in (MAX, MIN):
        return jnp.zeros(shape, dtype)
    lowest, highest = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.floating) else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return jnp.full(shape, lowest if how == MAX else highest, dtype)


def _combined(before, value, how):
    value = value.astype(before.dtype)
    if how == SUM:
        return before + value
    return {MAX: jnp.maximum, MIN: jnp.minimum}[how](before, value) if how in (MAX, MIN) else value
