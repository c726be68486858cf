"""Products as custom calls to torch's kernels on the CPU: where XLA's own do more work than there is, or have no instructions for the dtype.

- A product by groups, which XLA:CPU expands to a product of every row with every group's matrix.
- bf16 and fp16, which XLA:CPU multiplies as fp32, on CPUs that have instructions for them. XLA's fp32 products are as fast as torch's.

A call that torch, the CPU or the dtype do not allow stays XLA's product. The calls are for programs of one device each (`jax.shard_map`): in one that XLA's
SPMD partitioner divides, a custom call would gather its operands. Lazily captured programs, the only ones it divides, do not come through here.

Legend: B batch, M, N rows and columns of a result, K contracted, G groups, S rows of all groups.
"""

import math

import jax
import numpy as np
import torch

from graphacc.kernels import products
from graphacc.kernels.library import register_xla_target
from graphacc.lowering.dtypes import cast

LEAST_OPERATIONS = 1e6  # of one matrix product: below, a call costs more than it saves
_HALF = ("bfloat16", "float16")


def takes_product(a, b) -> bool:
    """Whether `product` is faster than XLA's product of these, [(B), M, K] and [(B), K, N]."""
    if a.dtype != b.dtype or a.dtype.name not in _HALF or a.ndim not in (2, 3) or a.size == 0 or b.size == 0:
        return False
    operations = 2.0 * math.prod(a.shape[-2:]) * b.shape[-1]
    return operations >= LEAST_OPERATIONS and products.is_native(a.dtype) and products.available()


def takes_groups(*arrays) -> bool:
    """Whether `grouped` and `grouped_outer` can multiply these."""
    dtypes = {array.dtype for array in arrays}
    return len(dtypes) == 1 and arrays[0].dtype.name in products.DTYPES and products.available()


def is_transposed_view(node: object) -> bool:
    """Whether a tensor's last two dims stand in memory the other way round. Handing over the array behind it spares a copy."""
    val = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(val, torch.Tensor) or val.ndim < 2 or min(val.shape[-2:]) < 2:
        return False
    return val.stride()[-2:] == (1, val.shape[-2])


def product(a, b, *, a_transposed: bool = False, b_transposed: bool = False):
    """[(B), M, K] @ [(B), K, N] in their dtype, with fp32 sums; a transposed operand is read from its array with the last two dims swapped."""
    register_xla_target(products.PRODUCT)
    result = jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[-1]), a.dtype)
    a, b = (x.mT if swapped else x for x, swapped in ((a, a_transposed), (b, b_transposed)))
    return jax.ffi.ffi_call(products.PRODUCT, result)(a, b, a_transposed=a_transposed, b_transposed=b_transposed)


def grouped(rows, weight, ends, *, transposed: bool = False):
    """[S, K] in groups of rows that end at `ends`, times each group's [G, K, N] -> [S, N]; rows beyond the last end give 0."""
    register_xla_target(products.GROUPED)
    dtype, wide = rows.dtype, _multiplied_as(rows.dtype)
    result = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[2]), wide)
    weight = weight.mT if transposed else weight
    call = jax.ffi.ffi_call(products.GROUPED, result)
    return cast(call(cast(rows, wide), cast(weight, wide), ends.astype(np.int32), transposed=transposed), dtype)


def grouped_outer(rows, grad, ends):
    """The weight gradient of `grouped`: [S, K], [S, N] -> [G, K, N]."""
    register_xla_target(products.GROUPED_OUTER)
    dtype, wide = rows.dtype, _multiplied_as(rows.dtype)
    result = jax.ShapeDtypeStruct((ends.shape[0], rows.shape[1], grad.shape[1]), wide)
    return cast(jax.ffi.ffi_call(products.GROUPED_OUTER, result)(cast(rows, wide), cast(grad, wide), ends.astype(np.int32)), dtype)


def _multiplied_as(dtype: np.dtype) -> np.dtype:
    return dtype if products.is_native(dtype) else np.dtype(np.float32)
