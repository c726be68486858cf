"""Functions that are written in others: values and gradients of torch's own."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close

from graphacc.capture.functions import embedding_bag
from graphacc.errors import CaptureError

EQUAL = torch.tensor([[3, 3, 3], [0, 3, 5], [6, 6, 2], [1, 4, 0]])  # the first bag is all padding where 3 is padding
FLAT, STARTS = torch.tensor([3, 1, 0, 5, 5, 2, 3, 6, 4, 4, 1]), torch.tensor([0, 2, 2, 5, 11])  # an empty bag, and one at the end


@pytest.mark.parametrize("mode, padding", list(itertools.product(("sum", "mean", "max"), (None, 3, -4))))
@pytest.mark.parametrize("form", ["equal", "offsets", "last_offset"])
def test_embedding_bag(form, mode, padding):
    arguments = dict(mode=mode, padding_idx=padding, include_last_offset=form == "last_offset")
    input, offsets = (EQUAL, None) if form == "equal" else (FLAT, STARTS)
    check(input, offsets, [torch.randn(7, 4)], lambda weight: arguments)


@pytest.mark.parametrize("form", ["equal", "offsets"])
def test_weighted_embedding_bag(form):
    input, offsets = (EQUAL, None) if form == "equal" else (FLAT, STARTS)
    check(input, offsets, [torch.randn(7, 4), torch.rand(input.shape)], lambda _, p: dict(mode="sum", per_sample_weights=p))


def check(input, offsets, tensors, keywords):
    results = []
    for function in (embedding_bag, F.embedding_bag):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = function(input, leaves[0], offsets, **keywords(*leaves))
        results.append([out, *torch.autograd.grad(out, leaves, torch.arange(out.numel()).reshape(out.shape) / 10)])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected)


def test_embedding_bag_refuses_what_torch_refuses():
    weight = torch.randn(7, 4)
    for input, offsets, more in (
        (EQUAL, STARTS, {}),
        (FLAT, None, {}),
        (EQUAL, None, dict(mode="product")),
        (EQUAL, None, dict(mode="mean", per_sample_weights=torch.rand(EQUAL.shape))),
        (EQUAL, None, dict(mode="sum", per_sample_weights=torch.rand(2, 3))),
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            F.embedding_bag(input, weight, offsets, **more)
        with pytest.raises(ValueError, match="do not go together"):
            embedding_bag(input, weight, offsets, **more)
    with pytest.raises(CaptureError, match="scale_grad_by_freq"):
        embedding_bag(EQUAL, weight, scale_grad_by_freq=True)
