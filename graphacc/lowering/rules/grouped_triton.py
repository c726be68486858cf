"""The products of a mixture's experts on CUDA, as Pallas kernels for Triton: each row is multiplied by its own expert's matrix alone.

XLA:CUDA expands a ragged dot into one dense product over all experts, G times the work; cuDNN's and cuBLAS's grouped products are not reachable from
the XLA of jaxlib 0.11, and JAX's library has kernels for Hopper alone, which want sizes that their blocks divide.

The tiles are those of MegaBlocks (arXiv 2211.15841): a tile of rows belongs to one group, so a block of rows in which groups meet is computed once
for each of them, and stores only that group's rows. How many tiles there are is known when the program is compiled: a block of rows for each
BLOCK_ROWS rows, and one more for each group.

Legend: S rows, G groups, K and N the sizes of the products.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from graphacc._compat.jax_ import x32
from graphacc.lowering.dtypes import cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """What one kernel instance computes, and how."""

    rows: int
    columns: int
    depth: int  # of one step of the loop
    warps: int
    stages: int


HALF = Blocks(rows=128, columns=256, depth=64, warps=8, stages=3)
"""Of bf16 and fp16. The quickest of eight on an H200 with 16,384 rows and matrices [1024, 4096]: 516, 490 and 538 TFLOP/s in the product, the gradient of
the rows and that of the weights with 8 experts, 360, 393 and 315 with 64 (JAX's kernels for Hopper at their best 528, 599 and 610; 333, 386 and 273). In the
gradient of the weights `rows` are of K, and `depth` rows of the batch."""
SINGLE = Blocks(rows=64, columns=64, depth=32, warps=4, stages=3)


def _blocks(dtype, columns: int) -> Blocks:
    if np.dtype(dtype).itemsize > 2:
        return SINGLE
    return HALF if columns > HALF.columns // 2 else dataclasses.replace(HALF, columns=HALF.columns // 2)


def _dot(a, b, precision):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=np.float32)


def _indices(block, size: int):
    """The indices of a block."""
    return block * np.int32(size) + lax.iota(np.int32, size)


def _load(ref, first, second, rows: int | None, columns: int | None, more=None, of=()):
    """The elements [*of, first, second]; 0 beyond a matrix's sizes, where those are no multiple of the blocks (else they are None), and where `more` of the rows is False."""
    masks = [None if rows is None else (first < rows)[:, None], None if columns is None else (second < columns)[None, :], None if more is None else more[:, None]]
    masks = [jnp.broadcast_to(mask, (first.size, second.size)) for mask in masks if mask is not None]
    at = ref.at[(*of, first[:, None], second[None, :])]
    return plgpu.load(at, mask=functools.reduce(jnp.logical_and, masks), other=0.0) if masks else plgpu.load(at)


def _bound(size: int, block: int) -> int | None:
    return size if size % block else None


def _product_kernel(blocks: Blocks, transposed: bool, precision, group, block, low, high, x, w, out):
    tile = pl.program_id(1)
    depth, columns = x.shape[1], out.shape[1]
    expert, first, last = group[tile], low[tile], high[tile]
    rows, at = _indices(block[tile], blocks.rows), _indices(pl.program_id(0), blocks.columns)
    mine = (rows >= first) & (rows < last)
    inside = lax.min(rows, np.int32(x.shape[0] - 1))  # what other groups' rows give is not stored: a mask on what is loaded takes up to 1.7 times as long
    of = (lax.min(expert, np.int32(w.shape[0] - 1)),)
    across = _bound(columns, blocks.columns)

    def step(i, sums):
        inner = _indices(i, blocks.depth)
        within = _bound(depth, blocks.depth)
        left = _load(x, inside, inner, None, within)
        right = _load(w, at, inner, across, within, of=of).T if transposed else _load(w, inner, at, within, across, of=of)
        return sums + _dot(left, right, precision)

    steps = jnp.where((expert < w.shape[0]) & (first < last), np.int32(pl.cdiv(depth, blocks.depth)), np.int32(0))
    sums = lax.fori_loop(np.int32(0), steps, step, jnp.zeros((blocks.rows, blocks.columns), np.float32))
    stored = jnp.broadcast_to(mine[:, None], sums.shape)
    if across is not None:
        stored &= jnp.broadcast_to((at < across)[None, :], sums.shape)
    plgpu.store(out.at[rows[:, None], at[None, :]], sums.astype(out.dtype), mask=stored)


def grouped(x, weight, ends, *, transposed: bool, precision, interpret: bool = False):
    """[S, K] in groups of rows that end at `ends`, times each group's [G, K, N] -> [S, N]; rows beyond the last end give 0.

    Args:
        transposed: `weight` is read as [G, N, K], as the array behind a transposed view stands in memory.
        interpret: run the kernel in plain JAX, on any platform.
    """
    (size, _), (groups, _, columns) = x.shape, weight.shape
    blocks = _blocks(x.dtype, columns)
    if 0 in (size, columns):
        return jnp.zeros((size, columns), x.dtype)
    with x32():
        ends = jnp.clip(ends.astype(np.int32), 0, size)
        ends = jnp.concatenate([ends, np.full(1, size, np.int32)])  # one group more: the rows that are no one's
        starts = jnp.concatenate([np.zeros(1, np.int32), ends[:-1]])
        first = starts // blocks.rows
        counts = jnp.where(ends > starts, (ends - 1) // blocks.rows - first + 1, 0)
        after = jnp.cumsum(counts, dtype=np.int32)
        tiles = pl.cdiv(size, blocks.rows) + groups
        number = lax.iota(np.int32, tiles)
        group = jnp.minimum((number[:, None] >= after[None, :]).sum(1, dtype=np.int32), groups)
        block = jnp.minimum(first[group] + number - (after - counts)[group], pl.cdiv(size, blocks.rows) - 1)
        some = number < after[-1]
        low, high = jnp.where(some, starts[group], 0), jnp.where(some, ends[group], 0)
        return pl.pallas_call(
            functools.partial(_product_kernel, blocks, transposed, precision),
            grid=(pl.cdiv(columns, blocks.columns), tiles),
            out_shape=jax.ShapeDtypeStruct((size, columns), x.dtype),
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
            name="graphacc_grouped",
        )(group, block, low, high, x, weight.mT if transposed else weight)


def _outer_kernel(blocks: Blocks, precision, starts, ends, x, grad, out):
    expert = pl.program_id(2)
    first, last = starts[expert], ends[expert]
    above, at = _indices(pl.program_id(1), blocks.rows), _indices(pl.program_id(0), blocks.columns)
    within, across = _bound(out.shape[1], blocks.rows), _bound(out.shape[2], blocks.columns)

    def step(i, sums):
        rows = first + _indices(i, blocks.depth)
        mine = rows < last
        left, right = _load(x, rows, above, None, within, mine), _load(grad, rows, at, None, across, mine)
        return sums + _dot(left.T, right, precision)

    steps = lax.div(last - first + np.int32(blocks.depth - 1), np.int32(blocks.depth))
    sums = lax.fori_loop(np.int32(0), steps, step, jnp.zeros((blocks.rows, blocks.columns), np.float32))
    masks = [None if within is None else (above < within)[:, None], None if across is None else (at < across)[None, :]]
    masks = [jnp.broadcast_to(mask, sums.shape) for mask in masks if mask is not None]
    stored = functools.reduce(jnp.logical_and, masks) if masks else None
    plgpu.store(out.at[expert, above[:, None], at[None, :]], sums.astype(out.dtype), mask=stored)


def grouped_outer(x, grad, ends, *, precision, interpret: bool = False):
    """The weight gradient of `grouped`: [S, K], [S, N] -> [G, K, N]."""
    blocks, (groups,) = _blocks(x.dtype, grad.shape[1]), ends.shape
    shape = (groups, x.shape[1], grad.shape[1])
    if 0 in (x.shape[0], *shape):
        return jnp.zeros(shape, x.dtype)
    with x32():
        ends = jnp.clip(ends.astype(np.int32), 0, x.shape[0])
        starts = jnp.concatenate([np.zeros(1, np.int32), ends[:-1]])
        return pl.pallas_call(
            functools.partial(_outer_kernel, blocks, precision),
            grid=(pl.cdiv(shape[2], blocks.columns), pl.cdiv(shape[1], blocks.rows), groups),
            out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
            name="graphacc_grouped_outer",
        )(starts, ends, x, cast(grad, x.dtype))
