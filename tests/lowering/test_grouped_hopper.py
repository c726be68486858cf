"""The kernels of experts' products for Hopper GPUs: their tiles on any machine, the kernels in Mosaic's interpreter, and on a GPU where there is one."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_grouped_triton import reference

from graphacc._compat import jax_ as compat
from graphacc.lowering.rules import grouped_hopper

CASES = {
    "groups that begin anywhere, and rows that are no one's": (512, 128, 256, [130, 200, 201, 405]),
    "empty groups, and columns that blocks of 256 do not divide": (256, 128, 384, [0, 100, 100, 256]),
    "a few rows of one group": (128, 128, 128, [3]),
}


@pytest.mark.parametrize("seed", range(6))
def test_tiles_cover_each_group_once(seed):
    rng = np.random.default_rng(seed)
    size, groups = int(rng.integers(16, 200)) * grouped_hopper.ALIGNED, int(rng.integers(1, 40))
    ends = np.sort(rng.integers(0, size + 1, groups))
    group, first, low, high, count = map(np.asarray, grouped_hopper.tiles_of_groups(jnp.asarray(ends), size, 128))
    covered = np.full(size, -1)
    for g, begin, start, end in list(zip(group, first, low, high))[: count[0]]:
        assert begin % grouped_hopper.ALIGNED == 0
        assert 0 <= begin <= size - 128
        assert 0 <= start < end <= 128
        assert (covered[begin + start : begin + end] == -1).all()
        covered[begin + start : begin + end] = g
    assert (covered == np.searchsorted(ends, np.arange(size), side="right")).all()  # of no one: the number of groups


def products(case: str, dtype, **told) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the kernels give, and what they should."""
    rows, depth, columns, ends = CASES[case]
    rng = np.random.default_rng(0)
    x, weight, grad = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, depth), (len(ends), depth, columns), (rows, columns)))
    product, outer = reference(x.at[ends[-1] :].set(0), weight, grad, ends)
    x, grad = (array.at[ends[-1] :].set(np.nan) for array in (x, grad))  # rows beyond the last end are not read
    at = jnp.asarray(ends, jnp.int32)
    found = (
        grouped_hopper.grouped(x, weight, at, transposed=False, **told),
        grouped_hopper.grouped(x, weight, at, transposed=True, **told),
        grouped_hopper.grouped_outer(x, grad, at, **told),
    )
    assert all(array.dtype == dtype for array in found)
    return [(np.asarray(got, np.float64), want) for got, want in zip(found, (product, product, outer))]


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no interpreter for such kernels that ends")
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_multiplied_by_its_own_matrix(case, capfd):
    dtype = "float16" if CASES[case][0] == 128 else "bfloat16"
    for got, want in products(case, dtype, interpret=plgpu.InterpretGPUParams(detect_races=True)):
        assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max()
    assert "RACE" not in capfd.readouterr().out


def test_infinities_of_one_expert_stay_out_of_others():
    """Rows that a block reads of the next group are set to zero in both factors, as 0 times infinity is no number."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("this JAX has no interpreter for such kernels that ends")
    x, grad = (jnp.ones((128, 128), jnp.bfloat16).at[70:].set(np.inf) for _ in range(2))
    found = grouped_hopper.grouped_outer(x, grad, jnp.asarray([70, 128]), interpret=plgpu.InterpretGPUParams())
    assert (found[0] == 70).all()
    assert jnp.isinf(found[1]).all()


def test_a_step_in_bf16_compiled_for_an_h100_calls_them():
    if compat.cuda_library() is None:
        pytest.skip("JAX's CUDA plugin is not installed")
    from graphacc.lowering.rules import matmul
    from graphacc.runtime.absent import absent_mesh
    from graphacc.strategy import Strategy

    device = absent_mesh(Strategy(), "h100", 1).devices.flat[0]

    def step(x, weight, grad, ends):
        return matmul.grouped_dot(x, weight, ends), matmul.grouped_dot(grad, weight.mT, ends), matmul.grouped_outer(x, grad, ends)

    def calls(rows: int, depth: int, columns: int, groups: int = 4) -> tuple[int, int]:
        shapes = ((rows, depth), jnp.bfloat16), ((groups, depth, columns), jnp.bfloat16), ((rows, columns), jnp.bfloat16), ((groups,), np.int32)
        told = [jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device)) for shape, dtype in shapes]
        text = jax.jit(step).trace(*told).lower(lowering_platforms=("cuda",)).compile().as_text()
        return text.count('custom_call_target="mosaic_gpu'), text.count('custom_call_target="__gpu$xla.gpu.triton"')

    assert calls(512, 128, 256) == (3, 0)
    assert calls(512, 96, 160) == (0, 3)  # sizes that their blocks do not divide
    assert calls(512, 128, 256, groups=8) == (0, 3)  # few rows for each


@pytest.mark.gpu
@pytest.mark.skipif(not compat.accelerator_present(), reason="no GPU")
def test_on_a_gpu():
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def main() -> None:
    """Both kinds of kernels on the device, many shapes."""
    from graphacc.lowering.rules import grouped_triton

    CASES.update({"many small groups": (2048, 256, 384, list(range(20, 2048, 40))), "several groups": (1000, 640, 1024, [7, 400, 400, 901])})
    for case in CASES:
        for dtype in ("bfloat16", "float16"):
            for got, want in products(case, dtype):
                assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max(), (case, dtype)
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((300, 70), (4, 70, 130)))
    got = np.asarray(grouped_triton.grouped(x, weight, jnp.asarray([10, 10, 200, 300]), transposed=False, precision=lax.Precision.DEFAULT), np.float64)
    want, _ = reference(x, weight, jnp.zeros((300, 130)), [10, 10, 200, 300])
    assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max()


if __name__ == "__main__":
    main()
