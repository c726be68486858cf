"""The lowerings of graphacc::flash_attention, both against the operator itself: XLA custom calls, and blocks of keys in a scan."""

import jax
import pytest
import torch
from helpers_lowering import check_lowering, run_lowered, step_graph, to_array

import graphacc.lowering
from graphacc._compat.jax_ import x64
from graphacc.lowering.rules import flash_attention as rules
from graphacc.ops.flash_attention import EmptyRows
from graphacc.ops.flash_form import Form

ops = torch.ops.graphacc
SEGMENTS = torch.randint(0, 3, (2, 70)).int(), torch.randint(0, 2, (2, 90)).int()
RANDOM = torch.tensor([2**32 - 5, 77]), torch.tensor([1, 0, 3, 5])


@pytest.fixture(params=["custom call", "blocks"])
def form(request, monkeypatch):
    """The lowering of the CPU, or that of the other platforms with blocks of 32 keys."""
    if request.param == "blocks":
        monkeypatch.setattr(rules, "BLOCK", 32)
        monkeypatch.setattr(rules, "_form", lambda platform, call: Form.BLOCKWISE)
    return request.param


def both(options, bias_grad):
    """Forward and backward as one function; the last tensor is the bias, if there is one."""

    def run(q, k, v, grad, *rest):
        *segments, key, start = rest[:4]
        bias = rest[4] if len(rest) > 4 else None
        inputs = (q, k, v, bias, *segments, key, start)
        out, lse = ops.flash_attention(*inputs, *options)
        grads = ops.flash_attention_backward(grad, *inputs, out, lse, *options, bias_grad)
        return out, lse, *grads

    return run


def tensors(dtype, bias=None):
    shapes = [(2, 4, 70, 40), (2, 2, 90, 40), (2, 2, 90, 24), (2, 4, 70, 24)]
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    return [*made, *SEGMENTS, *RANDOM, *([] if bias is None else [torch.randn(bias).to(dtype)])]


@pytest.mark.parametrize(
    ("dtype", "bias", "rows"),
    [
        (torch.float32, None, EmptyRows.ZEROS),
        (torch.float32, (4, 70, 90), EmptyRows.UNIFORM),
        (torch.float32, (2, 1, 1, 90), EmptyRows.UNIFORM_CONSTANT),
        (torch.bfloat16, (4, 70, 90), EmptyRows.UNIFORM_CONSTANT),
    ],
    ids=str,
)
@pytest.mark.default_cases("custom call-torch.float32-None-0", "blocks-torch.float32-None-0")
def test_all_options(form, dtype, bias, rows):
    options = (10, 20, 0.3, int(rows), 0.25 if rows else 0.0, 3, [4, 4, 80, 100])
    check_lowering(both(options, bias is not None), *tensors(dtype, bias))


def test_fp64():
    options = (-1, 0, 0.3, 0, 0.0, 0, [])
    check_lowering(both(options, True), *tensors(torch.float64, (4, 70, 90)))


def test_plain_attention(form):
    """No option at all; a bias of one column for all keys."""

    def run(q, k, v, b):
        return ops.flash_attention(q, k, v, b, None, None, None, None, -1, -1, 0.3, 0, 0.0, 0, [])

    check_lowering(run, torch.randn(1, 2, 33, 32), torch.randn(1, 2, 65, 32), torch.randn(1, 2, 65, 32), torch.randn(1, 2, 33, 1))


def _stablehlo(platform, length):
    def run(q, k, v, grad):
        options = (-1, 0, 0.1, 0, 0.0, 0, [])
        out, lse = ops.flash_attention(q, k, v, *[None] * 5, *options)
        return out, *ops.flash_attention_backward(grad, q, k, v, *[None] * 5, out, lse, *options, False)[:3]

    made = [torch.randn(1, 2, length, 32) for _ in range(4)]
    with x64():
        traced = jax.jit(graphacc.lowering.lower(step_graph(run, *made))).trace(*map(to_array, made))
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_chooses_the_form():
    cpu, cuda = _stablehlo("cpu", 1100), _stablehlo("cuda", 1100)
    assert cpu.count("@gacc_flash_forward") == cpu.count("@gacc_flash_backward") == 1 and "stablehlo.while" not in cpu
    assert "gacc_flash" not in cuda and cuda.count("stablehlo.while") == 3  # forward, backward, and large sums again
    assert "1100x1100" not in cpu + cuda, "no tensor has both lengths"


def test_a_refused_call_is_an_error_of_the_program():
    """The custom call checks what it is given; a wrong call must not read beyond its arrays."""
    results = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 3, 4, 32), (1, 3, 4))]
    run = jax.ffi.ffi_call("gacc_flash_forward", results)
    check_lowering(lambda x: ops.flash_attention(x, x, x, *[None] * 5, -1, -1, 1.0, 0, 0.0, 0, [])[0], torch.randn(1, 2, 4, 32))
    q, kv, none = jax.numpy.zeros((1, 3, 4, 32)), jax.numpy.zeros((1, 2, 4, 32)), [jax.numpy.zeros(0, t) for t in ("f4", "i4", "i4")]
    with x64():
        numbers = [jax.numpy.zeros(0, "i8")] * 2
        attributes = rules._attributes(rules._Call(q, kv, kv, *[None] * 5, -1, -1, 1.0, 0, 0.0, 0, ()))
        with pytest.raises(Exception, match="heads is no multiple of kv_heads"):
            jax.block_until_ready(run(q, kv, kv, *none, *numbers, **attributes))


def test_results_do_not_depend_on_how_often_it_runs():
    def run(q, k, v):
        return ops.flash_attention(q, k, v, *[None] * 5, -1, 0, 0.3, 0, 0.0, 0, [])

    made = [torch.randn(2, 4, 130, 32) for _ in range(3)]
    step = step_graph(run, *made)
    first, second = run_lowered(step, *made), run_lowered(step, *made)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
