"""The products of a mixture's experts in bf16 and fp16 on Hopper GPUs (H100, H200), as Pallas kernels for Mosaic: what `grouped_triton` gives, faster.

Every multiprocessor runs one block of three warpgroups for the whole product, which goes from tile to tile of the result: one warpgroup copies blocks of
both factors to a ring in shared memory (TMA), two multiply them (wgmma), each half of a tile's rows. The ring does not stop between tiles, so the first
blocks of a tile arrive while the one before it is stored. (The persistent, warp-specialised kernel of CUTLASS 3 and of JAX's hopper_matmul_mgpu.)

TMA copies blocks that begin at multiples of 8 rows, and groups begin anywhere. So a group's blocks begin at the multiple of 8 at or below its first row.
In the product, what they read of other groups gives rows that are not stored; in the gradient of the weights, those rows are set to zero in both factors
before they are multiplied: another expert's infinities stay out.

On an H200, bf16, 16,384 rows and 8 matrices [1024, 4096], the product, the gradient of the rows and that of the weights take 0.25, 0.27 and 0.23 ms; by the
kernels for Triton 0.30, 0.29 and 0.28, by torch's grouped product (CUTLASS) 0.22, 0.23 and 0.21 in the same run. What limits is the second-level cache, of
which every step reads 48 KB for each multiprocessor: pairs of blocks that share one factor by TMA's multicast would read 32.

Legend: S rows, G groups, K and N the sizes of the products.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from graphacc._compat.jax_ import cuda_cores, x32
from graphacc.lowering.dtypes import cast

WARPGROUPS = 2  # that multiply
LOADS = WARPGROUPS  # the index of the one that copies
EDGE = 64  # rows and columns of a piece of the result on its way through shared memory
PIECES = (WARPGROUPS, 2, EDGE, EDGE)  # two for each, one written while the other is copied
ALIGNED = 8  # rows at whose multiples TMA's boxes begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """What one block of warpgroups computes at a time, and in which order."""

    rows: int = WARPGROUPS * EDGE
    columns: int = 256
    depth: int = 64  # of one step: columns of K, in the gradient of the weights rows of the batch
    stages: int  # of the ring
    width: int = 8  # columns of blocks that are computed together, so that the second-level cache holds their rows


def _blocks(columns: int, stages: int) -> Blocks:
    """`stages` as many as fit the shared memory beside what is stored, with blocks of the most columns."""
    return Blocks(stages=stages) if columns % Blocks.columns == 0 else Blocks(columns=128, stages=stages + 2)


def takes(rows: int, depth: int, columns: int, groups: int) -> bool:
    """Whether the kernels multiply matrices of these sizes well: blocks divide them, and a group has a block of rows on average."""
    return rows % ALIGNED == 0 and rows >= Blocks.rows * groups and depth % 128 == 0 and columns % 128 == 0


def _swizzled(shape: tuple[int, ...], dtype):
    """Shared memory of arrays [.., rows, columns] as wgmma reads it without conflicts."""
    size = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((ALIGNED, swizzle // size)), plgpu.SwizzleTransform(swizzle)))


def _over_tiles(blocks: Blocks, dtype, factors, stored, count, steps_of, copies, multiply, store) -> None:
    """The kernel around one product: this block's share of `count` tiles.

    Args:
        factors: the shapes of one step's blocks of both.
        stored: shared memory, handed to `store`.
        steps_of: tile -> how many steps it takes.
        copies: tile -> for each factor a function from a step to the block in global memory.
        multiply: (tile, step, warpgroup, blocks in shared memory, sums) starts a product that adds to the sums.
        store: (tile, warpgroup, sums [EDGE, columns], stored).
    """
    stages = jnp.int32(blocks.stages)

    @functools.partial(
        pl.run_scoped,
        ring=[_swizzled((blocks.stages, *shape), dtype) for shape in factors],
        filled=plgpu.Barrier(num_arrivals=len(factors), num_barriers=blocks.stages),
        read=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=blocks.stages),
        stored=stored,
        collective_axes="warpgroup",
    )
    def _(ring, filled, read, stored):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == LOADS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            @plgpu.nd_loop((count,), collective_axes="core", init_carry=jnp.int32(0))
            def so_far(told, carry):
                (tile,) = told.index
                sources = copies(tile)

                def step(number, done):
                    slot = lax.rem(done, stages)
                    pl.when(done >= stages)(lambda: plgpu.barrier_wait(read.at[slot]))
                    for source, blocks_of in zip(sources, ring, strict=True):
                        plgpu.copy_gmem_to_smem(source(number), blocks_of.at[slot], filled.at[slot])
                    return done + 1

                return lax.fori_loop(jnp.int32(0), steps_of(tile), step, carry)

            def wait(done, _):
                plgpu.barrier_wait(read.at[lax.rem(done, stages)])

            copied = typing.cast(jax.Array, so_far)
            lax.fori_loop(lax.max(copied - stages, jnp.int32(0)), copied, wait, None)  # nothing is on its way to this block's barriers when it ends

        @pl.when(warpgroup != LOADS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            @plgpu.nd_loop((count,), collective_axes="core", init_carry=jnp.int32(0))
            def _(told, carry):
                (tile,) = told.index
                steps = steps_of(tile)

                @functools.partial(pl.run_scoped, sums=plgpu.WGMMAAccumulatorRef((EDGE, blocks.columns), jnp.float32))
                def found(sums):
                    def release(done):
                        plgpu.barrier_arrive(read.at[lax.rem(done, stages)])

                    def step(number, done):
                        slot = lax.rem(done, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        multiply(tile, number, warpgroup, [blocks_of.at[slot] for blocks_of in ring], sums)
                        plgpu.wgmma_wait(1)  # the product before this one has read its blocks
                        pl.when(number > 0)(lambda: release(done - 1))
                        return done + 1

                    lax.fori_loop(jnp.int32(0), steps, step, carry)
                    plgpu.wgmma_wait(0)
                    pl.when(steps > 0)(lambda: release(carry + steps - 1))
                    return sums[...].astype(dtype)

                store(tile, warpgroup, found, stored)
                return carry + steps

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(pieces, warpgroup, values, at) -> None:
    """[EDGE, columns] to global memory, in pieces of EDGE columns; `at` gives the place of the piece that begins at a column."""
    for number, column in enumerate(range(0, values.shape[1], EDGE)):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pieces[warpgroup, number % 2] = values[:, column : column + EDGE]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(pieces.at[warpgroup, number % 2], at(column))


def _store_rows(pieces, warpgroup, values, low, high, at) -> None:
    """The same for rows from `low` to `high` alone, which begin anywhere; `at` gives the place of (first row, how many, first column).

    How many rows a copy has is part of the program: they are copied in lengths of powers of two, from memory that is not tiled by 8 rows.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, column in enumerate(range(0, values.shape[1], EDGE)):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pieces[warpgroup, number % 2] = values[:, column : column + EDGE]
        plgpu.commit_smem()
        row, length = low, EDGE // 2
        while length:

            @pl.when((high - low) & length != 0)
            def _(row=row, length=length, column=column, number=number):
                plgpu.copy_smem_to_gmem(pieces.at[warpgroup, number % 2, pl.ds(row, length)], at(row, length, column), commit_group=False)

            row = row + ((high - low) & length)
            length //= 2
        plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _call(kernel, shape: tuple[int, ...], dtype, interpret, scratch=()):
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=scratch,
        grid=(cuda_cores() if interpret is None else 2,),
        grid_names=("core",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )


def tiles_of_groups(ends, size: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Blocks of rows that cover all groups, and the rows that are no one's as one group more, number G.

    Args:
        ends: [G] where each group of rows ends.
        size: rows in all, a multiple of ALIGNED.
        block: rows of a block.

    Returns:
        For each block its group, its first row, and which of its rows, from the second to the third array, are the group's; [1] how many blocks there are.
    """
    ends = jnp.clip(ends.astype(np.int32), 0, size)
    ends = jnp.concatenate([ends, np.full(1, size, np.int32)])
    starts = jnp.concatenate([np.zeros(1, np.int32), ends[:-1]])
    begins = starts // ALIGNED * ALIGNED
    counts = jnp.where(ends > starts, (ends - begins + (block - 1)) // block, 0)
    after = jnp.cumsum(counts, dtype=np.int32)
    groups = ends.size
    number = lax.iota(np.int32, pl.cdiv(size + (ALIGNED - 1) * groups, block) + groups)
    group = jnp.minimum((number[:, None] >= after[None, :]).sum(1, dtype=np.int32), groups - 1)
    begin = begins[group] + (number - (after - counts)[group]) * block
    first = jnp.clip(begin, 0, size - block)
    return group, first, jnp.maximum(starts[group], begin) - first, jnp.minimum(ends[group], begin + block) - first, after[-1:]


@functools.partial(jax.jit, static_argnames=("transposed", "blocks", "interpret"))
def _grouped(x, weight, ends, *, transposed: bool, blocks: Blocks, interpret):
    (size, depth), groups, columns, dtype = x.shape, weight.shape[0], weight.shape[1 if transposed else 2], x.dtype
    across = columns // blocks.columns

    def kernel(group, first, low, high, count, x, w, out):
        def place(tile):
            return plgpu.planar_snake(tile, (count[0], across), 1, blocks.width)

        def steps_of(tile):
            return lax.select(group[place(tile)[0]] < groups, jnp.int32(depth // blocks.depth), jnp.int32(0))

        def copies(tile):
            block, number = place(tile)
            mine = w.at[lax.min(group[block], jnp.int32(groups - 1))]
            rows, at = pl.ds(pl.multiple_of(first[block], ALIGNED), blocks.rows), pl.ds(number * blocks.columns, blocks.columns)

            def within(step):
                return pl.ds(step * blocks.depth, blocks.depth)

            return [lambda step: x.at[rows, within(step)], lambda step: mine.at[at, within(step)] if transposed else mine.at[within(step), at]]

        def multiply(tile, step, warpgroup, factors, sums):
            left, right = factors
            plgpu.wgmma(sums, left.at[pl.ds(warpgroup * EDGE, EDGE)], right.T if transposed else right)

        def store(tile, warpgroup, values, stored):
            whole, partial = stored
            block, number = place(tile)
            begin, end = (jnp.clip(edge[block] - warpgroup * EDGE, 0, EDGE) for edge in (low, high))
            row, left = pl.multiple_of(first[block], ALIGNED) + warpgroup * EDGE, number * blocks.columns

            @pl.when(end - begin == EDGE)
            def _():
                _store(whole, warpgroup, values, lambda column: out.at[pl.ds(pl.multiple_of(row, ALIGNED), EDGE), pl.ds(left + column, EDGE)])

            @pl.when((end > begin) & (end - begin < EDGE))
            def _():
                _store_rows(partial, warpgroup, values, begin, end, lambda top, length, column: out.at[pl.ds(row + top, length), pl.ds(left + column, EDGE)])

        stored = [_swizzled(PIECES, dtype), plgpu.SMEM(PIECES, dtype)]
        factors = [(blocks.rows, blocks.depth), (blocks.columns, blocks.depth) if transposed else (blocks.depth, blocks.columns)]
        _over_tiles(blocks, dtype, factors, stored, count[0] * across, steps_of, copies, multiply, store)

    return _call(kernel, (size, columns), dtype, interpret)(*tiles_of_groups(ends, size, blocks.rows), x, weight)


def grouped(x, weight, ends, *, transposed: bool, interpret=None):
    """[S, K] in groups of rows that end at `ends`, times each group's [G, K, N] -> [S, N]; rows beyond the last end give 0.

    Args:
        transposed: `weight` is read as [G, N, K], as the array behind a transposed view stands in memory.
        interpret: parameters of Mosaic's interpreter, which runs the kernel without a GPU.
    """
    with x32():
        return _grouped(x, weight.mT if transposed else weight, ends, transposed=transposed, blocks=_blocks(weight.shape[2], stages=3), interpret=interpret)


@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def _grouped_outer(x, grad, ends, *, blocks: Blocks, interpret):
    (size, depth), columns, groups, dtype = x.shape, grad.shape[1], ends.shape[0], x.dtype
    down, across = depth // blocks.rows, columns // blocks.columns
    half = blocks.columns // WARPGROUPS

    def kernel(starts, ends, x, grad, out, cleared):
        def place(tile):
            of_group = jnp.int32(down * across)
            return lax.div(tile, of_group), *plgpu.planar_snake(lax.rem(tile, of_group), (down, across), 1, blocks.width)

        def begin(group):
            return lax.div(starts[group], jnp.int32(ALIGNED)) * ALIGNED

        def steps_of(tile):
            group, _, _ = place(tile)
            start, end = starts[group], ends[group]
            return lax.select(end > start, lax.div(end - begin(group) + (blocks.depth - 1), jnp.int32(blocks.depth)), jnp.int32(0))

        def copies(tile):
            group, above, number = place(tile)

            def rows(step):
                return pl.ds(pl.multiple_of(begin(group) + step * blocks.depth, ALIGNED), blocks.depth)

            return [
                lambda step: x.at[rows(step), pl.ds(above * blocks.rows, blocks.rows)],
                lambda step: grad.at[rows(step), pl.ds(number * blocks.columns, blocks.columns)],
            ]

        def multiply(tile, step, warpgroup, factors, sums):
            left, right = factors
            left = left.at[:, pl.ds(warpgroup * EDGE, EDGE)]
            group, _, _ = place(tile)
            first = begin(group) + step * blocks.depth
            low, high = starts[group] - first, ends[group] - first

            @pl.when((low > 0) | (high < blocks.depth))
            def _():
                for block in (left, right.at[:, pl.ds(warpgroup * half, half)]):  # both warpgroups multiply the right one: each clears a half
                    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, block.shape, 0), plgpu.Layout.WGMMA)
                    values = block[...]
                    block[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

            plgpu.wgmma(sums, left.T, right)

        def store(tile, warpgroup, values, pieces):
            group, above, number = place(tile)
            rows = pl.ds(above * blocks.rows + warpgroup * EDGE, EDGE)
            _store(pieces, warpgroup, values, lambda column: out.at[group, rows, pl.ds(number * blocks.columns + column, EDGE)])

        factors = [(blocks.depth, blocks.rows), (blocks.depth, blocks.columns)]
        _over_tiles(blocks, dtype, factors, _swizzled(PIECES, dtype), groups * down * across, steps_of, copies, multiply, store)

    ends = jnp.clip(ends.astype(np.int32), 0, size)
    starts = jnp.concatenate([np.zeros(1, np.int32), ends[:-1]])
    return _call(kernel, (groups, depth, columns), dtype, interpret, [plgpu.Barrier(num_arrivals=WARPGROUPS)])(starts, ends, x, grad)


def grouped_outer(x, grad, ends, *, interpret=None):
    """The weight gradient of `grouped`: [S, K], [S, N] -> [G, K, N]."""
    with x32():
        return _grouped_outer(x, cast(grad, x.dtype), ends, blocks=_blocks(grad.shape[1], stages=4), interpret=interpret)
