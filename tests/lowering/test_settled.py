"""A value that is compared with elements of itself is computed once: its maximum is equal to one of its elements, in every fusion."""

import pytest
import torch
from helpers_lowering import check_lowering, step_graph

from graphacc.lowering.settled import compared_with_themselves

OF_A_DIFFERENCE = {
    "amax": lambda d: d.amax(-1),
    "amin": lambda d: d.amin(1),
    "beside_padding": lambda d: d * (d == torch.where(torch.arange(4) < 3, d, -torch.inf).amax(-1, keepdim=True)),
    "of_all": lambda d: d.abs().max(),
    "absolute": lambda d: d.abs().amax(-1),
    "norm": lambda d: torch.linalg.vector_norm(d, torch.inf, -1),
    "one_hot": lambda d: d * (d == d.max(-1, keepdim=True)[0]),
    "largest": lambda d: torch.where(d < d.topk(2)[0][..., -1:], 0.0, d),
    "median": lambda d: torch.where(d >= d.median(-1, keepdim=True)[0], d, 0.0),
}


@pytest.mark.parametrize("name", OF_A_DIFFERENCE)
def test_a_product_in_a_difference(name):
    def gradient(x):
        x = x.detach().requires_grad_()
        result = OF_A_DIFFERENCE[name](x[:, :, None] - (x.flip(1) * 1.1)[:, None])
        return torch.autograd.grad((result * torch.linspace(0.3, 1.7, result.numel()).reshape(result.shape)).sum(), x)[0]

    check_lowering(gradient, torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0)))


def test_what_is_compared_with_something_else_stays_fused():
    x = torch.randn(8, 5)
    assert not compared_with_themselves(step_graph(lambda x: (x * 2).softmax(-1) + (x * 2 == x.flip(0).amax(-1, keepdim=True)), x).graph)
    assert len(compared_with_themselves(step_graph(lambda x: (x * 2).amax() == (x * 2), x).graph)) == 0  # two products
    y = lambda x: (lambda y: y == y.amax())(x * 2)  # noqa: E731
    assert len(compared_with_themselves(step_graph(y, x).graph)) == 1
