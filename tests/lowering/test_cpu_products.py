"""Products by custom calls on the CPU, through the kernels themselves, whatever this CPU's gate says; the oracle is torch's product of each part."""

import copy

import jax
import numpy as np
import pytest
import torch
import zoo
from helpers_lowering import check_lowering, run_lowered, step_graph, to_array, to_tensor
from jax.sharding import PartitionSpec as P
from tolerances import RELATIVE, assert_close, relative_error
from training import batches_of, captured_once, compiled, train

import graphacc.lowering
from graphacc._compat.jax_ import x64
from graphacc.kernels import products
from graphacc.lowering.rules import cpu_products
from graphacc.runtime.devices import make_mesh, select_devices
from graphacc.strategy.spec import Strategy

pytestmark = pytest.mark.skipif(not products.available(), reason="this torch has no products in its C shim: XLA's own are used")
ops = torch.ops.graphacc
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def run(function, *tensors) -> torch.Tensor:
    with x64():
        return to_tensor(jax.jit(function)(*map(to_array, tensors)))


def text_of(step, *tensors) -> str:
    with x64():
        return jax.jit(graphacc.lowering.lower(step)).lower(*map(to_array, tensors)).compile().as_text()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.default_cases("dtype2")
def test_products(dtype):
    for shape in ((), (3,)):
        for m, k, n in ((300, 257, 130), (5, 7, 1), (64, 600, 900)):
            a, b = torch.randn(*shape, m, k).to(dtype), torch.randn(*shape, k, n).to(dtype)
            for form in range(4):
                got = run(lambda a, b, form=form: cpu_products.product(a, b, a_transposed=bool(form & 1), b_transposed=bool(form & 2)), a, b)
                assert_close(got, a @ b, what=f"{shape} {m} {k} {n} form {form}")


def grouped_by_loop(rows, weight, ends):
    out, start = rows.new_zeros(rows.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        out[start:end] = rows[start:end] @ weight[expert]
        start = end
    return out


def outer_by_loop(rows, grad, ends):
    starts = [0, *ends.tolist()]
    return torch.stack([rows[a:b].T @ grad[a:b] for a, b in zip(starts, ends.tolist(), strict=False)])


def routed(num_experts: int, num_rows: int) -> torch.Tensor:
    """Ends of unequal groups, some of them empty, with rows of nobody behind."""
    counts = torch.bincount(torch.randint(num_experts, (num_rows,)) ** 2 // num_experts, minlength=num_experts)
    return (counts.cumsum(0) - num_rows // 8).clamp(min=0).int()


@pytest.mark.parametrize("native", [True, False], ids=["in the dtype", "as fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.default_cases("dtype0-in the dtype", "dtype2-in the dtype")
def test_grouped_products(dtype, native, monkeypatch):
    if not native:
        monkeypatch.setattr(products, "is_native", lambda dtype: dtype.itemsize > 2)
    for experts, count, k, n in ((8, 500, 96, 160), (64, 700, 33, 70), (3, 40, 5, 1)):
        rows, weight, grad, ends = torch.randn(count, k).to(dtype), torch.randn(experts, k, n).to(dtype), torch.randn(count, n).to(dtype), routed(experts, count)
        expected = grouped_by_loop(rows, weight, ends)
        for transposed in (False, True):
            got = run(lambda *x, transposed=transposed: cpu_products.grouped(*x, transposed=transposed), rows, weight, ends)
            assert_close(got, expected)
        assert_close(run(cpu_products.grouped_outer, rows, grad, ends), outer_by_loop(rows, grad, ends))


def test_experts_call_the_kernel_and_read_weights_as_they_are():
    """The weights of transformers' experts are [E, N, K]; neither they nor their gradient are copied to be transposed."""
    rows, weight, grad, ends = torch.randn(96, 40), torch.randn(6, 48, 40), torch.randn(96, 48), routed(6, 96)

    def both(rows, weight, grad, ends):
        product = ops.grouped_mm(rows, weight.transpose(1, 2), ends)
        return product, ops.grouped_mm(grad, weight, ends), ops.grouped_mm_weight_grad(rows, grad, ends).transpose(1, 2)

    step = step_graph(both, rows, weight, grad, ends)
    text = text_of(step, rows, weight, grad, ends)
    assert text.count('custom_call_target="gacc_grouped"') == 2 and text.count('custom_call_target="gacc_grouped_outer"') == 1
    assert "transpose(" not in text and "ragged" not in text
    check_lowering(both, rows, weight, grad, ends, step=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_symbols_products_are_xlas(dtype, monkeypatch):
    monkeypatch.setattr(products, "available", lambda: False)
    rows, weight, ends = torch.randn(64, 128).to(dtype), torch.randn(4, 128, 96).to(dtype), routed(4, 64)

    def both(rows, weight, ends):
        return ops.grouped_mm(rows, weight, ends), rows @ weight[0]

    step = step_graph(both, rows, weight, ends)
    assert "gacc_" not in text_of(step, rows, weight, ends)
    check_lowering(both, rows, weight, ends, step=step)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jax.ffi.ffi_call("gacc_product", x)(x, x[:3], a_transposed=False, b_transposed=False), "shapes of a product do not fit"),
        (lambda x: jax.ffi.ffi_call("gacc_product", x)(x, x.astype(np.float64), a_transposed=False, b_transposed=False), "different dtypes"),
        (lambda x: jax.ffi.ffi_call("gacc_product", x.astype(int))(x.astype(int), x.astype(int), a_transposed=False, b_transposed=False), "take fp32"),
        (lambda x: jax.ffi.ffi_call("gacc_grouped", x)(x, x[None], np.zeros(2, np.int32), transposed=False), "shapes of a grouped product do not fit"),
        (lambda x: jax.ffi.ffi_call("gacc_grouped", x)(x, x[None], np.zeros(1, np.int64), transposed=False), "ends of groups must be int32"),
        (lambda x: jax.ffi.ffi_call("gacc_grouped_outer", x[None])(x, x[:2], np.zeros(1, np.int32)), "grouped outer product do not fit"),
    ],
)
def test_the_kernels_refuse_what_does_not_fit(call, message):
    for name in (products.PRODUCT, products.GROUPED, products.GROUPED_OUTER):
        cpu_products.register_xla_target(name)
    with x64(), pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(call)(np.zeros((4, 4), np.float32)))


def test_eight_devices_multiply_at_once_and_always_give_the_same_bits():
    mesh = make_mesh(Strategy(dp=8), select_devices(8))
    rows, weight, ends = torch.randn(8 * 200, 64), torch.randn(5, 64, 96), routed(5, 200)

    def local(rows, weight, ends):
        product = cpu_products.grouped(rows, weight, ends)
        return product, cpu_products.grouped_outer(rows, product, ends)[None]

    with x64():
        function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("dp"), P(), P()), out_specs=P("dp"), check_vma=False))
        results = [jax.tree.map(to_tensor, function(*map(to_array, (rows, weight, ends)))) for _ in range(10)]
    for part in range(8):
        mine = rows[200 * part : 200 * (part + 1)]
        expected = grouped_by_loop(mine, weight, ends)
        assert_close(results[0][0][200 * part : 200 * (part + 1)], expected)
        assert_close(results[0][1][part], outer_by_loop(mine, expected, ends))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_the_gate_of_products(monkeypatch):
    """Half dtypes, large enough, on a CPU that has instructions for them."""
    small, large = (jax.ShapeDtypeStruct((n, n), jax.numpy.bfloat16) for n in (32, 256))
    single = jax.ShapeDtypeStruct((256, 256), np.float32)
    monkeypatch.setattr(products, "is_native", lambda dtype: True)
    assert cpu_products.takes_product(large, large)
    assert not cpu_products.takes_product(small, small) and not cpu_products.takes_product(single, single)
    monkeypatch.setattr(products, "is_native", lambda dtype: dtype.itemsize > 2)
    assert not cpu_products.takes_product(large, large) and cpu_products.takes_groups(large, large)


def test_torchs_own_threads_are_as_they_were():
    threads = torch.get_num_threads()
    a, weight, ends = torch.randn(64, 64), torch.randn(2, 64, 64), torch.tensor([20, 64], dtype=torch.int32)
    step = step_graph(lambda a, weight, ends: ops.grouped_mm(a, weight, ends), a, weight, ends)
    run_lowered(step, a, weight, ends, jit=True)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_products_of_a_graph_call_the_kernel(dtype, monkeypatch):
    """With bias, in batches, and with transposed views, which are read as they are."""
    monkeypatch.setattr(products, "is_native", lambda dtype: True)
    x, weight, bias = torch.randn(128, 96).to(dtype), torch.randn(80, 96).to(dtype), torch.randn(80).to(dtype)
    batches, grad = torch.randn(2, 96, 128).to(dtype), torch.randn(128, 80).to(dtype)

    def several(x, weight, bias, batches, grad):
        return torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2), torch.bmm(x.expand(2, 128, 96), batches), grad.t() @ x, x[:4, :4] @ x[:4, :4].t()

    step = step_graph(several, x, weight, bias, batches, grad)
    text = text_of(step, x, weight, bias, batches, grad)
    assert text.count('custom_call_target="gacc_product"') == 3
    assert "transpose(" not in text
    check_lowering(several, x, weight, bias, batches, grad, step=step)


@pytest.mark.parametrize("strategy", [None, "fsdp=2"])
@pytest.mark.default_cases("None")
def test_a_bf16_step_trains_with_the_kernel(strategy, monkeypatch):
    """As with XLA's products, whose gradients are as exact, and as plain PyTorch in fp32."""
    monkeypatch.setattr(cpu_products, "LEAST_OPERATIONS", 0)
    model, batches = zoo.MODELS["gpt2"]()[0], batches_of("gpt2", 2)
    start, reference = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    expected, sgd = train(reference, batches, lambda model: torch.optim.SGD(model.parameters(), lr=0.05)), {}
    for native in (True, False):
        monkeypatch.setattr(products, "is_native", lambda dtype, native=native: native)
        trained = compiled(copy.deepcopy(model), strategy, precision="bf16")
        with captured_once("bf16 products"):
            losses = train(trained, batches, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
        assert losses == pytest.approx(expected, rel=2e-2)
        assert ("gacc_product" in trained.programs[0].program.hlo_text()) == native
        sgd[native] = trained.state_dict()
    for name, value in reference.state_dict().items():
        moved = value - start[name]
        errors = [relative_error(sgd[native][name] - start[name], moved) for native in (True, False)]
        assert errors[0] <= max(2 * errors[1], RELATIVE[torch.bfloat16]), f"{name}: {errors}"
