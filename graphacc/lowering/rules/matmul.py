"""Matrix products as single dots. bf16 products accumulate in fp32.

On hardware with reduced-precision fp32 products (TF32, bf16 passes) the user's ``torch.set_float32_matmul_precision``
decides, as it does in torch: "highest", its default, keeps full fp32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from graphacc._compat import jax_ as compat
from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.extremes import largest
from graphacc.lowering.partitioned import is_partitioned
from graphacc.lowering.registry import register
from graphacc.lowering.rules import cpu_products
from graphacc.ops.facts import ALIGNED, is_packed_factor, is_read_transposed, padding_of_rows

_PRECISION = {"highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT}


def precision() -> lax.Precision:
    """What torch's own setting asks of fp32 products."""
    return _PRECISION[torch.get_float32_matmul_precision()]


def dot(a, b, contract, batch=((), ()), out_dtype=None):
    """``lax.dot_general`` over these (a dims, b dims), with fp32 accumulation for bf16 and fp16."""
    wanted = a.dtype if out_dtype is None else np.dtype(out_dtype)
    return lax.dot_general(a, b, (contract, batch), precision=precision(), preferred_element_type=wanted)


def _matmul(a, b, out_dtype=None):
    """[n, k] @ [k, m], or [batch, n, k] @ [batch, k, m]."""
    batch = tuple(range(a.ndim - 2))
    return dot(a, b, ((a.ndim - 1,), (b.ndim - 2,)), (batch, batch), out_dtype)


def _packed(platform, nodes, a):
    """`a` of a product of two matrices; on the CPU row by row in memory where it is a transposed view no larger than `b`, as in a weight's gradient xᵀ @ dy.

    XLA folds the transposition into its product, whose kernel then reads `a` against the grain: 1.1 to 1.9 times the time on
    AVX2, the more, the larger `b` is beside `a`.
    """
    return lax.optimization_barrier(a) if platform == "cpu" and is_packed_factor(*(node.meta["val"] for node in nodes)) else a


def padding(a, b, transposed) -> list[int]:
    """How far the dims n, k and m of a product [n, k] @ [k, m] in bf16 or fp16 are padded on GPUs.

    Tensor cores read rows of 16-byte multiples. Where the dim in which a factor or the result lies row by row is no multiple of 8, as the vocabulary of GPT-2 (50,257) is not, XLA
    and cuBLAS fall back to slower kernels: a head of 768 with its loss and both gradients, of 16,384 tokens, takes 15.4 ms on an H200, padded to 50,304 it takes 8.8. Padding and cutting
    become part of what makes a factor and reads the result.
    """
    sizes = [*a.shape, b.shape[-1]]
    if a.ndim != 2 or a.dtype != b.dtype or a.dtype.name not in ("bfloat16", "float16") or min(sizes) < ALIGNED:
        return [0, 0, 0]
    rows = {0 if transposed[0] else 1, 1 if transposed[1] else 2, 2}
    return [padding_of_rows(size) if dim in rows else 0 for dim, size in enumerate(sizes)]


def padded_product(a, b, transposed, added, dtype):
    """`_matmul` of [n, k] and [k, m] with `added` zeros in n, k and m, which its result does not have."""
    left, right = (
        _padded(x, widths, swapped) for x, widths, swapped in zip((a, b), (added[:2], added[1:]), transposed, strict=True)
    )
    return _matmul(left, right, dtype)[: a.shape[0], : b.shape[1]]


def _padded(x, widths, transposed):
    """A transposed view is padded as it lies in memory, so that XLA sees one array where another product pads the array itself."""
    return _padded(x.mT, widths[::-1], False).mT if transposed else jnp.pad(x, [(0, width) for width in widths])


def padded_rows(x):
    """[n, k] as a product pads it whose rows it are, see `padding`."""
    return _padded(x, [0, padding_of_rows(x.shape[1])], False)


PIECE = 8192
"""Length of the pieces that a product is summed from."""
PIECED_BYTES = 64_000_000
"""What both factors of a product that is summed from pieces take together, at least."""


def is_copied(a, b) -> bool:
    """Whether XLA:GPU copies large factors of this product in fp32: it divides a long k between multiprocessors, and pads where k is not a multiple of the parts."""
    length = a.shape[-1]
    return a.ndim == 2 and length > 2 * PIECE and length % 8 > 0 and a.nbytes + b.nbytes > PIECED_BYTES


def in_pieces(a, b, dtype):
    """`_matmul` of [n, k] and [k, m] as a loop over pieces of k, for GPUs: the gradient of logits times the weight of an odd vocabulary. Sums in fp32.

    The two padded copies are 360 MB of 1,640 in a step of GPT-2 12 x 768 under fsdp=8. A loop, because slices outside of one are made all at once;
    what it slices it copies if that is a transposed view.
    """
    count, rest = divmod(a.shape[1], PIECE)

    def add(i, total):
        left, right = lax.dynamic_slice_in_dim(a, i * PIECE, PIECE, 1), lax.dynamic_slice_in_dim(b, i * PIECE, PIECE, 0)
        return total + _matmul(left, right, wide(a.dtype))

    last = _matmul(a[:, -rest:], b[-rest:], wide(a.dtype))
    return cast(lax.fori_loop(0, count, add, last), dtype)


def _product(a, b, nodes, out_dtype=None, *, packed=False):
    """`_matmul` of the values of two nodes; on the CPU by a custom call where that is faster (`cpu_products`), which sums in fp32 and rounds once."""

    def on(platform, a, b):
        if platform == "cpu" and cpu_products.takes_product(a, b):
            return [cast(cpu_products.product(a, b, a_transposed=transposed[0], b_transposed=transposed[1]), dtype)]
        if platform == "cuda" and any(added := padding(a, b, transposed)):
            return [padded_product(a, b, transposed, added, dtype)]
        if platform == "cuda" and is_copied(a, b) and not any(transposed):
            return [in_pieces(a, b, dtype)]
        return [_matmul(_packed(platform, nodes, a) if packed else a, b, out_dtype)]

    if is_partitioned():
        return _matmul(a, b, out_dtype)
    transposed = [cpu_products.is_transposed_view(node) for node in nodes]
    dtype = np.dtype(a.dtype if out_dtype is None else out_dtype)
    result = jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[-1]), dtype)
    return compat.lowered_for_platform(on, [result], a, b)[0]


@register("aten.mm.default", "aten.bmm.default")
def mm(ctx, a, b):
    return _product(a, b, ctx.node.args[:2], packed=True)


@register("graphacc.wide_mm.default")
def _wide_mm(ctx, a, b):
    return _product(a, b, ctx.node.args[:2], np.float32, packed=True)


@register("aten.mm.dtype", "aten.bmm.dtype")
def _mm_dtype(ctx, a, b, out_dtype):
    return _matmul(a, b, ctx.dtype)


@register("aten.matmul.default")
def _general_matmul(ctx, a, b):
    return jnp.matmul(a, b, precision=precision())


@register("aten.linear.default")
def _linear(ctx, x, weight, bias=None):
    result = dot(x, weight, ((x.ndim - 1,), (1,)), out_dtype=wide(ctx.dtype))
    return cast(result if bias is None else result + bias, ctx.dtype)


@register("aten.mv.default", "aten.dot.default")
def _mv(ctx, a, b):
    return dot(a, b, ((a.ndim - 1,), (0,)))


@register("aten.vdot.default")
def _vdot(ctx, a, b):
    return dot(jnp.conj(a), b, ((0,), (0,)))


def _add_scaled(ctx, x, product, beta, alpha):
    """beta · x + alpha · product; a beta of 0 ignores `x`, even NaN in it."""
    product = product if alpha == 1 else product * np.asarray(alpha, product.dtype)
    if beta == 0:
        return jnp.broadcast_to(cast(product, ctx.dtype), ctx.shape)
    x = cast(x, product.dtype)
    return jnp.broadcast_to(cast((x if beta == 1 else x * np.asarray(beta, x.dtype)) + product, ctx.dtype), ctx.shape)


@register("aten.addmm.default", "aten.baddbmm.default")
def _addmm(ctx, x, a, b, *, beta=1, alpha=1):
    return _add_scaled(ctx, x, _product(a, b, ctx.node.args[1:3], wide(ctx.dtype)), beta, alpha)


@register("aten.addmv.default")
def _addmv(ctx, x, a, b, *, beta=1, alpha=1):
    return _add_scaled(ctx, x, dot(a, b, ((1,), (0,)), out_dtype=wide(ctx.dtype)), beta, alpha)


@register("aten.addbmm.default")
def _addbmm(ctx, x, a, b, *, beta=1, alpha=1):
    return _add_scaled(ctx, x, dot(a, b, ((0, 2), (0, 1)), out_dtype=wide(ctx.dtype)), beta, alpha)


@register("aten.addr.default")
def _addr(ctx, x, a, b, *, beta=1, alpha=1):
    a, b = cast(a, ctx.dtype), cast(b, ctx.dtype)
    if ctx.dtype == bool:
        product = a[:, None] & b[None, :] & bool(alpha)
        return jnp.broadcast_to(product | (x & bool(beta)), ctx.shape)
    return _add_scaled(ctx, x, a[:, None] * b[None, :], beta, alpha)


@register("aten._trilinear.default")
def _trilinear(ctx, a, b, c, expand1, expand2, expand3, sumdim, unroll_dim=1):
    a, b, c = (jnp.expand_dims(x, tuple(dims)) for x, dims in ((a, expand1), (b, expand2), (c, expand3)))
    ndim = a.ndim
    result = jnp.einsum(
        a, range(ndim), b, range(ndim), c, range(ndim), [d for d in range(ndim) if d not in sumdim], precision=precision()
    )
    return cast(result, ctx.dtype)


@register("aten._cdist_forward.default")
def _cdist(ctx, a, b, p, compute_mode=None):
    return _distance(jnp.abs(a[..., :, None, :] - b[..., None, :, :]), p)


@register("aten._pdist_forward.default")
def _pdist(ctx, x, p=2.0):
    rows, columns = np.triu_indices(x.shape[0], 1)
    return _distance(jnp.abs(x[rows] - x[columns]), p)


def _distance(difference, p):
    """The p-norm of the last dim of non-negative differences."""
    if difference.shape[-1] == 0:
        return jnp.zeros(difference.shape[:-1], difference.dtype)
    if p == 0:
        return jnp.sum((difference != 0).astype(difference.dtype), -1)
    if p == float("inf"):
        return largest(difference, (difference.ndim - 1,))
    return jnp.sqrt(jnp.sum(difference * difference, -1)) if p == 2 else jnp.power(jnp.sum(jnp.power(difference, p), -1), 1 / p)


def _kernels_of_groups(left, right, groups: int):
    """`grouped` and `grouped_outer` by our kernels for CUDA, for [S, K] arrays like `left` and [S, N] or [G, K, N] arrays like `right`; None where none take them.

    A program for a GPU that is not here is one for an H100 or H200 (graphacc/runtime/absent.py).
    """
    name = left.dtype.name
    if left.dtype != right.dtype or name not in ("float32", "bfloat16", "float16"):
        return None
    if name != "float32" and (compat.cuda_capability() or (9, 0))[0] == 9 and compat.has_mosaic_kernels():
        from graphacc.lowering.rules import grouped_hopper

        rows, depth = left.shape
        if grouped_hopper.takes(rows, depth, right.shape[-1], groups):
            return grouped_hopper.grouped, grouped_hopper.grouped_outer
    if not compat.has_triton_kernels():
        return None
    from graphacc.lowering.rules import grouped_triton

    return functools.partial(grouped_triton.grouped, precision=precision()), functools.partial(grouped_triton.grouped_outer, precision=precision())


def grouped_dot(x, weight, ends, weight_node=None):
    """[S, K] in groups of rows that end at `ends`, times each group's [G, K, N] -> [S, N]; rows beyond the last end give 0.

    `weight_node` is the node of `weight`, if it has one: where it is a transposed view the array behind it is read.
    """

    def on(platform, x, weight, ends):
        if platform == "cpu" and own and cpu_products.takes_groups(x, weight):
            return [cpu_products.grouped(x, weight, ends, transposed=cpu_products.is_transposed_view(weight_node))]
        if platform == "cuda" and own and (kernels := _kernels_of_groups(x, weight, ends.size)):
            return [kernels[0](x, weight, ends, transposed=cpu_products.is_transposed_view(weight_node))]
        sizes = jnp.diff(ends, prepend=np.zeros(1, np.int32))
        return [cast(lax.ragged_dot(x, weight, sizes, precision=precision(), preferred_element_type=wide(x.dtype)), x.dtype)]

    own, result = not is_partitioned(), jax.ShapeDtypeStruct((x.shape[0], weight.shape[2]), x.dtype)
    return compat.lowered_for_platform(on, [result], x, weight, ends.astype(np.int32))[0]


def grouped_outer(x, grad, ends, node=None):
    """The weight gradient of `grouped_dot`: [S, K], [S, N] -> [G, K, N]. `node` is the result's, if it has one: see `is_read_transposed`."""

    def on(platform, x, grad, ends):
        if platform == "cpu" and own and cpu_products.takes_groups(x, grad):
            swapped = is_read_transposed(node)
            return [cpu_products.grouped_outer(grad, x, ends).mT if swapped else cpu_products.grouped_outer(x, grad, ends)]
        if platform == "cuda" and own and (kernels := _kernels_of_groups(x, grad, ends.size)):
            return [kernels[1](grad, x, ends).mT if is_read_transposed(node) else kernels[1](x, grad, ends)]
        sizes = jnp.diff(ends, prepend=np.zeros(1, np.int32))
        dims = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        product = lax.ragged_dot_general(x, grad, sizes, dims, precision=precision(), preferred_element_type=wide(x.dtype))
        return [cast(product, x.dtype)]

    own, result = not is_partitioned(), jax.ShapeDtypeStruct((ends.shape[0], x.shape[1], grad.shape[1]), x.dtype)
    return compat.lowered_for_platform(on, [result], x, grad, ends.astype(np.int32))[0]


@register("transformers.grouped_mm_fallback.default")
def _grouped_mm_fallback(ctx, x, weight, offs):
    return grouped_dot(x, weight, offs, ctx.node.args[1])


@register("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_fallback_backward(ctx, x, weight, offs, grad):
    return grouped_dot(grad, jnp.swapaxes(weight, 1, 2), offs), grouped_outer(x, grad, offs)


@register("aten._grouped_mm.default")
def _grouped_mm(ctx, a, b, offs=None, bias=None, out_dtype=None):
    """2-d × 3-d: groups of rows; 3-d × 2-d: groups of columns; 2-d × 2-d: groups of the contracted dim."""
    if offs is None or (a.ndim, b.ndim) == (3, 3):
        result = _matmul(a, b)
    elif (a.ndim, b.ndim) == (2, 3):
        result = grouped_dot(a, b, offs, ctx.node.args[1])
    elif (a.ndim, b.ndim) == (2, 2):
        result = grouped_outer(a.T, b, offs, ctx.node)
    else:
        result = grouped_dot(b.T, jnp.swapaxes(a, 1, 2), offs).T
    return cast(result if bias is None else result + bias, ctx.dtype)
