"""A fence is no arithmetic, and no fusion reaches across it."""

import jax
import numpy as np
import pytest
import torch
from helpers_lowering import run_lowered, step_graph, to_array
from tolerances import assert_close

import graphacc.lowering
from graphacc._compat.jax_ import x64
from graphacc.lowering.fence import FENCE, REREADING, computed_once


@pytest.mark.parametrize("dtype", [np.float32, jax.numpy.bfloat16, np.int64, bool])
def test_a_fence_keeps_values_and_separates_fusions(dtype):
    x = np.arange(24).reshape(4, 6).astype(dtype)
    with x64():
        text = jax.jit(lambda x: computed_once(x * x) + x).lower(x).compile().as_text()
        result = jax.jit(lambda x: (computed_once(x * x), computed_once(x[:0])))(x)
    assert f'custom_call_target="{FENCE}"' in text
    assert np.array_equal(result[0], x * x) and result[1].shape == (0, 6)
    before, after = text[text.rindex("ENTRY") :].split(f'custom_call_target="{FENCE}"')
    assert "fusion(" in before or "multiply(" in before or "and(" in before
    assert "fusion(" in after or "add(" in after or "or(" in after


def test_the_operand_survives_where_it_is_read_later():
    def both(x):
        y = x * 3
        return computed_once(y) + y.sum(), y

    with x64():
        first, second = jax.jit(both)(np.arange(6.0))
    assert np.array_equal(first, np.arange(6.0) * 3 + 45) and np.array_equal(second, np.arange(6.0) * 3)


def test_the_gradient_of_max_pooling_reads_indices_from_memory():
    """And not a window for each element that it looks at: that is 9 times the work of a 3 x 3 window."""

    def gradient(x):
        x = x.detach().requires_grad_()
        y = torch.nn.functional.max_pool2d(x, 3, 2, 1)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    x = torch.randn(2, 3, 16, 16).half()
    step = step_graph(gradient, x)
    (got,) = run_lowered(step, x, jit=True)
    assert_close(got, gradient(x))
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(to_array(x)).compile().as_text()
    entry = text[text.rindex("ENTRY") :]
    root = next(line for line in entry.splitlines() if "ROOT" in line)
    assert entry.count(f'custom_call_target="{FENCE}"') >= 1 and "%arrays_0_" not in root, root


REREAD = {
    "avg_pool": lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1),
    "max_pool": lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1),
    "reflection": lambda x: torch.nn.functional.pad(x, (2, 2, 2, 2), mode="reflect"),
    "unfold": lambda x: torch.nn.functional.unfold(x, 3, padding=1),
}


@pytest.mark.parametrize("name", REREAD)
@pytest.mark.default_cases("avg_pool", "unfold")
def test_what_is_read_several_times_is_computed_once(name):
    """The transcendental before the operator, and the one in the gradient that comes back to it, are each in a fusion before a fence."""

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((REREAD[name](x.sin()) * 1.5).exp().sum(), x)[0]

    x = torch.randn(2, 3, 12, 12)
    step = step_graph(gradient, x)
    (got,) = run_lowered(step, x, jit=True)
    assert_close(got, gradient(x))
    with x64():
        text = jax.jit(graphacc.lowering.lower(step)).lower(to_array(x)).compile().as_text()
    assert text[text.rindex("ENTRY") :].count(f'custom_call_target="{FENCE}"') >= 2


def test_the_operators_exist():
    for name in REREADING:
        _, packet, overload = name.split(".")
        assert hasattr(getattr(torch.ops.aten, packet), overload), name
