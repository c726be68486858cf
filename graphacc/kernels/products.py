"""Products on the CPU by torch's kernels (MKL, oneDNN), as custom calls on XLA's threads: what this process and this CPU have of them.

The calls find torch's stable C shim in the libtorch_cpu that is loaded; see `csrc/ffi/products.cc`.
"""

import functools

import numpy as np

from graphacc.kernels import library

PRODUCT, GROUPED, GROUPED_OUTER = "gacc_product", "gacc_grouped", "gacc_grouped_outer"
"""The XLA custom calls."""

DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4}
"""What can be multiplied, and its number in the C ABI."""


@functools.cache
def available() -> bool:
    """Whether the torch of this process has the products that the custom calls need."""
    return bool(library.load().gacc_has_products())


@functools.cache
def is_native(dtype: np.dtype) -> bool:
    """Whether this CPU has instructions for products of a dtype; without them torch's kernel is slower than fp32's on converted operands."""
    return dtype.name in DTYPES and bool(library.load().gacc_multiplies_natively(DTYPES[dtype.name]))
