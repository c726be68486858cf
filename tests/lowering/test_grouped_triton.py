"""The kernels of experts' products for CUDA, in plain JAX against fp64, and what XLA makes of them for a GPU that is not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from selection import with_matrix

from graphacc.lowering.rules import grouped_triton

CASES = {
    "sizes that no block divides": (300, 70, 130, [10, 10, 200, 300]),
    "rows that are no one's": (256, 64, 128, [0, 100, 180, 200]),
    "one block of rows with many groups": (50, 32, 48, [1, 2, 9, 9, 20, 31, 40, 50]),
    "fewer rows than a block": (7, 16, 16, [3, 3, 7]),
    "no rows at all for anyone": (200, 129, 65, [0, 0]),
}


def reference(x, weight, grad, ends):
    """The product, and the gradient of the weights, in fp64."""
    x, weight, grad = (np.asarray(array, np.float64) for array in (x, weight, grad))
    product, outer, start = np.zeros((x.shape[0], weight.shape[2])), np.zeros(weight.shape), 0
    for group, end in enumerate(ends):
        product[start:end] = x[start:end] @ weight[group]
        outer[group] = x[start:end].T @ grad[start:end]
        start = end
    return product, outer


FIRST = next(iter(CASES))


@pytest.mark.parametrize(
    "case, dtype",
    with_matrix([*((case, "float32") for case in CASES), (FIRST, "bfloat16")], [(FIRST, "bfloat16"), ("fewer rows than a block", "float32")]),
)
def test_each_row_is_multiplied_by_its_own_matrix(case, dtype):
    rows, depth, columns, ends = CASES[case]
    rng = np.random.default_rng(0)
    x, weight, grad = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, depth), (len(ends), depth, columns), (rows, columns)))
    x, grad = (array.at[ends[-1] :].set(np.nan) for array in (x, grad))  # rows beyond the last end are not read
    product, outer = reference(x.at[ends[-1] :].set(0), weight, grad.at[ends[-1] :].set(0), ends)
    told = dict(precision=lax.Precision.HIGHEST, interpret=True)
    found = [
        grouped_triton.grouped(x, weight, jnp.asarray(ends), transposed=False, **told),
        grouped_triton.grouped(x, weight, jnp.asarray(ends), transposed=True, **told),
        grouped_triton.grouped_outer(x, grad, jnp.asarray(ends), **told),
    ]
    tolerance = 2e-6 if dtype == "float32" else 2.0**-8
    for got, want in zip(found, (product, product, outer)):
        assert got.dtype == dtype
        assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * max(1.0, np.abs(want).max())


def test_sizes_of_zero():
    ends = jnp.zeros(2, jnp.int32)
    told = dict(precision=lax.Precision.HIGHEST)
    assert grouped_triton.grouped(jnp.zeros((0, 4)), jnp.zeros((2, 4, 8)), ends, transposed=False, **told).shape == (0, 8)
    assert not np.asarray(grouped_triton.grouped_outer(jnp.ones((0, 4)), jnp.ones((0, 8)), ends, **told)).any()


def test_no_product_on_cuda_is_dense_over_all_experts():
    """A step of experts with its gradients, compiled for an H100: kernels alone, and no array of rows by experts."""
    from graphacc._compat import jax_ as compat

    if compat.cuda_library() is None:
        pytest.skip("JAX's CUDA plugin is not installed")
    from graphacc.lowering.rules import matmul
    from graphacc.runtime.absent import absent_mesh
    from graphacc.strategy import Strategy

    device = absent_mesh(Strategy(), "h100", 1).devices.flat[0]

    def step(x, weight, grad, ends):
        return matmul.grouped_dot(x, weight, ends), matmul.grouped_dot(grad, weight.mT, ends), matmul.grouped_outer(x, grad, ends)

    shapes = ((512, 96), np.float32), ((8, 96, 160), np.float32), ((512, 160), np.float32), ((8,), np.int32)
    told = [jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device)) for shape, dtype in shapes]
    compiled = jax.jit(step).trace(*told).lower(lowering_platforms=("cuda",)).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert "gemm" not in text and f"[512,{8 * 96}]" not in text and "[512,8,96]" not in text
