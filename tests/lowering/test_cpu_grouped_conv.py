"""Convolutions in groups on the CPU, which are custom calls: every form and both gradients against torch in double precision."""

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
CALLS = ["gacc_grouped_conv", "gacc_grouped_conv_transposed", "gacc_grouped_conv_weight"]

# groups, image, filter, stride, padding, dilation, transposed, output padding; input and output channels of a group, if they are not 1
CASES = {
    "mobilenet": (32, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0)),
    "convnext": (48, (6, 6), (7, 7), (1, 1), (3, 3), (1, 1), False, (0, 0)),
    "stride 2": (72, (17, 17), (5, 5), (2, 2), (0, 0), (1, 1), False, (0, 0)),
    "a row of its own": (21, (8, 12), (3, 3), (2, 3), (1, 0), (2, 1), False, (0, 0)),
    "sequences, causal": (40, (19,), (4,), (1,), (3,), (1,), False, (0,)),
    "sequences, wide": (16, (31,), (5,), (1,), (8,), (4,), False, (0,)),
    "transposed": (24, (7, 5), (4, 4), (2, 2), (1, 1), (1, 1), True, (0, 1)),
    "resnext": (4, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 8, 8),
    "wider behind": (3, (8, 7), (3, 3), (2, 2), (1, 1), (1, 1), False, (0, 0), 12, 20),
    "transposed, in groups": (2, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), True, (1, 0), 20, 8),
    "a large image": (1, (17, 16), (3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 8, 24),
    "few channels": (3, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0)),
    "several filters for each": (8, (6, 7), (3, 3), (2, 1), (1, 1), (1, 1), False, (0, 0), 1, 2),
    "a filter of one": (8, (5, 5), (1, 1), (2, 2), (0, 0), (1, 1), False, (0, 0)),
}
MORE = {
    "one row": (100, (1, 33), (1, 9), (1, 1), (0, 4), (1, 1), False, (0, 0)),
    "wider than the image": (5, (3, 3), (5, 5), (1, 1), (2, 2), (1, 1), False, (0, 0)),
    "sequences, transposed": (17, (9,), (3,), (3,), (0,), (2,), True, (2,)),
    "shuffled": (8, (6, 6), (1, 1), (1, 1), (0, 0), (1, 1), False, (0, 0), 4, 16),
    "sequences in groups": (2, (18,), (3,), (1,), (2,), (2,), False, (0,), 36, 24),
    "stride beyond the filter": (64, (12, 12), (2, 2), (3, 3), (0, 0), (1, 1), False, (0, 0)),
}


def both(groups, stride, padding, dilation, transposed, output_padding, outputs):
    told = (list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)

    def run(x, weight, bias, grad):
        out = aten.convolution(x, weight, bias, *told)
        return out, *aten.convolution_backward(grad, x, weight, [outputs], *told, [True, True, True])

    return run


def drawn(groups, image, size, stride, padding, dilation, transposed, output_padding, inputs=1, outputs=1, dtype=torch.float32):
    """The function, and x, weight, bias and the result's gradient."""
    generator = torch.Generator().manual_seed(0)
    run = both(groups, stride, padding, dilation, transposed, output_padding, groups * outputs)
    filters = (groups * inputs, outputs, *size) if transposed else (groups * outputs, inputs, *size)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, groups * inputs, *image), filters, (groups * outputs,)))
    told = (list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)
    return run, x, weight, bias, torch.randn(aten.convolution(x, weight, bias, *told).shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", with_matrix([torch.float32, torch.bfloat16, torch.float16], [torch.float32]), ids=str)
@pytest.mark.parametrize("name", with_matrix([*CASES, *MORE], list(CASES)))
def test_results_and_gradients(name, dtype):
    run, *tensors = drawn(*(CASES | MORE)[name], dtype=dtype)
    step = step_graph(run, *tensors)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(*map(to_array, tensors)).as_text()
    assert sorted(set(re.findall(r"custom_call @(\w+)", text)) & set(CALLS)) == CALLS and "stablehlo.convolution" not in text
    want = run(*(x.double() for x in tensors))
    bound = 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    for got, expected in zip(run_lowered(step, *tensors, jit=True), want):
        assert got.dtype is dtype and got.shape == expected.shape and relative_error(got.double(), expected) < bound


@pytest.mark.parametrize(
    ("groups", "shape", "filters", "dtype"),
    [
        (8, (2, 8, 6, 6), (8, 1, 3, 3), torch.float64),
        (4, (2, 8, 4, 6, 6), (8, 2, 3, 3, 3), torch.float32),  # three spatial dims
        (1, (2, 8, 15, 16), (8, 8, 3, 3), torch.float32),  # a small image
        (1, (2, 8, 16, 16), (8, 8, 1, 1), torch.float32),  # a product
        (1, (2, 4, 16, 16), (6, 4, 3, 3), torch.float32),  # no whole vectors
    ],
)
def test_others_are_left_to_xla(groups, shape, filters, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(filters, dtype=dtype)
    ones = [1] * (x.dim() - 2)
    step = step_graph(lambda x, weight: aten.convolution(x, weight, None, ones, ones, ones, False, [0] * len(ones), groups), x, weight)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(to_array(x), to_array(weight)).as_text()
    assert "stablehlo.convolution" in text and "gacc_grouped_conv" not in text


def test_an_image_of_three_channels():
    """Its filters, but not its own gradient."""
    run, *tensors = drawn(1, (20, 20), (7, 7), (2, 2), (3, 3), (1, 1), False, (0, 0), 3, 16)
    step = step_graph(run, *tensors)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(*map(to_array, tensors)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == CALLS[::2] and text.count("stablehlo.convolution") == 1
    for got, expected in zip(run_lowered(step, *tensors, jit=True), run(*(x.double() for x in tensors))):
        assert relative_error(got.double(), expected) < 2e-6


def test_other_platforms_have_their_own_kernels():
    run, *tensors = drawn(*CASES["mobilenet"])
    step = step_graph(run, *tensors)
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).trace(*map(to_array, tensors)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.convolution") == 3 and "gacc_grouped_conv" not in text
