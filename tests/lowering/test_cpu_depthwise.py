"""Depthwise convolutions on the CPU, which are custom calls: every form and both gradients against torch in double precision."""

import re

import jax
import pytest
import torch
from helpers_lowering import run_lowered, step_graph, to_array
from selection import with_matrix
from tolerances import relative_error

import graphacc.lowering
from graphacc._compat.jax_ import x64

aten = torch.ops.aten
CALLS = ["gacc_depthwise", "gacc_depthwise_transposed", "gacc_depthwise_weight"]

# channels, image, filter, stride, padding, dilation, transposed, output padding
CASES = {
    "mobilenet": (32, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0)),
    "convnext": (48, (6, 6), (7, 7), (1, 1), (3, 3), (1, 1), False, (0, 0)),
    "stride 2": (72, (17, 17), (5, 5), (2, 2), (0, 0), (1, 1), False, (0, 0)),
    "a row of its own": (21, (8, 12), (3, 3), (2, 3), (1, 0), (2, 1), False, (0, 0)),
    "sequences, causal": (40, (19,), (4,), (1,), (3,), (1,), False, (0,)),
    "sequences, wide": (16, (31,), (5,), (1,), (8,), (4,), False, (0,)),
    "transposed": (24, (7, 5), (4, 4), (2, 2), (1, 1), (1, 1), True, (0, 1)),
    "a filter of one": (8, (5, 5), (1, 1), (2, 2), (0, 0), (1, 1), False, (0, 0)),
}
MORE = {
    "one row": (100, (1, 33), (1, 9), (1, 1), (0, 4), (1, 1), False, (0, 0)),
    "wider than the image": (5, (3, 3), (5, 5), (1, 1), (2, 2), (1, 1), False, (0, 0)),
    "sequences, transposed": (17, (9,), (3,), (3,), (0,), (2,), True, (2,)),
    "stride beyond the filter": (64, (12, 12), (2, 2), (3, 3), (0, 0), (1, 1), False, (0, 0)),
}


def both(stride, padding, dilation, transposed, output_padding, channels):
    told = (list(stride), list(padding), list(dilation), transposed, list(output_padding), channels)

    def run(x, weight, bias, grad):
        out = aten.convolution(x, weight, bias, *told)
        return out, *aten.convolution_backward(grad, x, weight, [channels], *told, [True, True, True])

    return run


def drawn(channels, image, size, stride, padding, dilation, transposed, output_padding, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, channels, *image), (channels, 1, *size), (channels,)))
    shape = aten.convolution(x, weight, bias, list(stride), list(padding), list(dilation), transposed, list(output_padding), channels).shape
    return x, weight, bias, torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", with_matrix([torch.float32, torch.bfloat16, torch.float16], [torch.float32]), ids=str)
@pytest.mark.parametrize("name", with_matrix([*CASES, *MORE], list(CASES)))
def test_results_and_gradients(name, dtype):
    case = (CASES | MORE)[name]
    tensors, run = drawn(*case, dtype=dtype), both(*case[3:], case[0])
    step = step_graph(run, *tensors)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(*map(to_array, tensors)).as_text()
    assert sorted(set(re.findall(r"custom_call @(\w+)", text)) & set(CALLS)) == CALLS and "stablehlo.convolution" not in text
    want = run(*(x.double() for x in tensors))
    bound = 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    for got, expected in zip(run_lowered(step, *tensors, jit=True), want):
        assert got.dtype is dtype and got.shape == expected.shape and relative_error(got.double(), expected) < bound


@pytest.mark.parametrize(("channels", "outputs", "dtype"), [(3, 3, torch.float32), (8, 16, torch.float32), (8, 8, torch.float64)])
def test_others_are_left_to_xla(channels, outputs, dtype):
    """Few channels, several filters for each, double precision."""
    x, weight = torch.randn(2, channels, 6, 6, dtype=dtype), torch.randn(outputs, 1, 3, 3, dtype=dtype)
    step = step_graph(lambda x, weight: aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], channels), x, weight)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(to_array(x), to_array(weight)).as_text()
    assert "stablehlo.convolution" in text and "gacc_depthwise" not in text


def test_other_platforms_have_their_own_kernels():
    tensors = drawn(*CASES["mobilenet"])
    step = step_graph(both(*CASES["mobilenet"][3:], 32), *tensors)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).trace(*map(to_array, tensors)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.convolution") == 3 and "gacc_depthwise" not in text
