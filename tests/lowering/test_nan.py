"""A NaN travels as in torch through every reduction and comparison, forward and backward, also where XLA fuses them.

Compiled with the options of a real step: XLA on CPU gives reductions of 4,096 elements and more to YNNPACK, whose max and min pass over
NaN, with what is computed element by element before them.
"""

import jax
import pytest
import torch
import torch.nn.functional as F
from helpers_lowering import step_graph, to_array, to_tensor
from tolerances import assert_close

import graphacc.lowering
from graphacc._compat.jax_ import x64
from graphacc.capture.decompositions import decompositions

REDUCTIONS = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max.dim": lambda x: tuple(x.max(-1)),
    "min.dim": lambda x: tuple(x.min(0)),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(),
    "aminmax": lambda x: tuple(torch.aminmax(x)),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, torch.inf),
    "smallest norm": lambda x: torch.linalg.vector_norm(x, -torch.inf, -1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(-1),
    "var": lambda x: x.var(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cummax": lambda x: tuple(x.cummax(-1)),
    "cummin": lambda x: tuple(x.cummin(-1)),
    "cumsum": lambda x: x.cumsum(0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "median": lambda x: x.median(-1)[0],
    "nanmedian": lambda x: x.nanmedian(-1)[0],
    "kthvalue": lambda x: x.kthvalue(3, -1)[0],
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(3)[0],
    "bottomk": lambda x: x.topk(3, largest=False)[0],
    "max_pool": lambda x: F.max_pool2d(x[None], 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x[None], 3),
    "scatter_amax": lambda x: torch.zeros_like(x).scatter_reduce(0, torch.zeros_like(x, dtype=torch.long), x, "amax"),
    "any": lambda x: x.any(-1),
    "isfinite": lambda x: x.isfinite().all(),
}
POINTWISE = {
    "identity": lambda x: x * 2,
    "relu": F.relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp(max=0),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "minimum": lambda x: torch.minimum(x, x.abs()),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "logsigmoid": F.logsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}
CONSUMERS = {"amax": lambda y: y.amax(-1), "amin": lambda y: y.amin(), "sum": lambda y: y.sum(-1), "mean": lambda y: y.mean()}
WITH_GRADIENTS = ("amax", "amin", "max", "min", "max.dim", "infinity norm", "logsumexp", "softmax", "cummax", "scatter_amax", "topk")


def check(function) -> None:
    """The lowered function, compiled as in a step, gives what torch gives for an x with a NaN, and for -x."""
    x = torch.randn(64, 96)
    x[1, 3] = torch.nan
    step = step_graph(function, x)
    with x64():
        compiled = jax.jit(graphacc.lowering.lower(step))
        for given in (x, -x):
            got = [to_tensor(y) for y in compiled(to_array(given))]
            expected = function(given)
            for mine, theirs in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
                assert_close(mine, theirs)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.default_cases("amax", "max.dim", "aminmax", "sum", "logsumexp", "cummin", "nanmedian", "bottomk", "any")
def test_reductions(name):
    check(REDUCTIONS[name])


@pytest.mark.parametrize("reduction", CONSUMERS)
@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.default_cases("maximum-amax", "maximum-amin", "maximum-sum", "maximum-mean", "softplus-amax", "softplus-amin", "softplus-sum", "softplus-mean", "elu-amax", "elu-amin", "elu-sum", "elu-mean")
def test_fused_with_what_comes_before(name, reduction):
    check(lambda x: CONSUMERS[reduction](POINTWISE[name](x)))


@pytest.mark.parametrize("name", WITH_GRADIENTS)
@pytest.mark.default_cases("amax", "max.dim", "cummax")
def test_gradients(name):
    """The gradient of a maximum is NaN along its whole dim: 0 / 0, where nothing is equal to NaN."""

    def gradient(x):
        x = x.detach().requires_grad_()
        result = REDUCTIONS[name](x)
        values = result[0] if isinstance(result, tuple) else result
        weights = torch.linspace(0.5, 1.5, values.numel()).reshape(values.shape)
        return torch.autograd.grad((values * weights).sum(), x)

    check(gradient)


WITH_BRANCHES = {
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardtanh of a maximum": lambda x: F.hardtanh(x).amax(-1),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "prod": lambda x: x.prod(-1),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "leaky_relu": F.leaky_relu,
    "heaviside": lambda x: torch.heaviside(x.detach(), x.detach().abs()) + x,
}


@pytest.mark.parametrize("name", WITH_BRANCHES)
@pytest.mark.default_cases("elu", "hardtanh", "huber", "heaviside")
def test_gradients_of_functions_with_branches(name):
    """In the graph of a step, where capture has taken operators apart; also at the places where the branches meet."""
    x = torch.randn(64, 96)
    x[1, 3], x[2, 2], x[3, 3] = torch.nan, torch.inf, -torch.inf
    x[0, :8] = torch.tensor([3.0, -3.0, 0.0, 1.0, -1.0, 6.0, 0.5, -0.5])

    def both(x):
        x = x.detach().requires_grad_()
        result = WITH_BRANCHES[name](x)
        return result.detach(), torch.autograd.grad((result * torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)).sum(), x)[0]

    step = step_graph(both, x, decompositions=decompositions())
    with x64():
        compiled = jax.jit(graphacc.lowering.lower(step))
        for given in (x, -x):
            for mine, theirs in zip(compiled(to_array(given)), both(given), strict=True):
                assert torch.allclose(to_tensor(mine), theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_mask_does_not_hide_what_is_not_finite():
    """0 * NaN and 0 * inf: XLA makes a product with a converted mask a select."""
    x = torch.tensor([torch.nan, torch.inf, 1.0, 2.0])
    for cast in (lambda x: x * (x < 2), lambda x: x * (x < 2).float(), lambda x: (x < 2).to(x.dtype) * x):
        step = step_graph(cast, x)
        with x64():
            (got,) = jax.jit(graphacc.lowering.lower(step))(to_array(x))
        assert_close(to_tensor(got), cast(x))
