"""Random operators become functions of the step's key: right distributions, other numbers for other keys, exact gradients."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from capturing import batch_of, joint_of, key, model_values, operators, run
from torch import nn

from graphacc.capture import capture_forward, capture_joint
from graphacc.errors import CaptureError
from graphacc.graph import Kind

X = torch.ones(64, 64)


class Applied(nn.Module):
    """Calls a function of (x, weight)."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def sample(function, counter=0):
    model, kwargs = Applied(function), {"x": X}
    step = capture_forward(model, lambda m, leaves: (None, [m(*leaves)]), batch_of(kwargs))
    return run(step, model_values(model, step) | {(Kind.BATCH, "kwargs['x']"): X} | key(counter))[Kind.USER, "0"]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_rate_and_scale(p):
    out = sample(lambda x, w: F.dropout(x, p))
    kept = out != 0
    assert abs(kept.float().mean().item() - (1 - p)) < 4 * (p * (1 - p) / X.numel()) ** 0.5
    assert torch.allclose(out[kept], torch.tensor(1 / (1 - p)))


def test_other_key_other_mask_same_key_same_mask():
    def drop(x, w):
        return F.dropout(x, 0.5)

    assert torch.equal(sample(drop, 1), sample(drop, 1))
    assert (sample(drop, 1) != sample(drop, 2)).float().mean() > 0.3


def test_operators_of_one_step_draw_different_numbers():
    assert (sample(lambda x, w: F.dropout(x, 0.5) - F.dropout(x, 0.5)) != 0).float().mean() > 0.3


@pytest.mark.parametrize(
    "draw, mean, variance",
    [
        (lambda x, w: torch.rand_like(x), 0.5, 1 / 12),
        (lambda x, w: torch.randn(64, 64), 0.0, 1.0),
        (lambda x, w: torch.empty(64, 64).normal_(3.0, 0.5), 3.0, 0.25),
        (lambda x, w: torch.normal(x * 2, x * 3), 2.0, 9.0),
        (lambda x, w: torch.empty(64, 64).uniform_(-1, 3), 1.0, 16 / 12),
        (lambda x, w: torch.empty(64, 64).exponential_(2.0), 0.5, 0.25),
        (lambda x, w: torch.randint(0, 10, (64, 64)).float(), 4.5, 99 / 12),
        (lambda x, w: torch.bernoulli(x * 0.2), 0.2, 0.16),
        (lambda x, w: torch.multinomial(x, 64, replacement=True).float(), 31.5, 4095 / 12),
        (lambda x, w: F.rrelu(x * 0 - 1, 0.2, 0.6, training=True), -0.4, 0.16 / 12),
    ],
)
def test_moments(draw, mean, variance):
    values = sample(draw).double()
    assert abs(values.mean().item() - mean) < 5 * (variance / values.numel()) ** 0.5
    assert abs(values.var().item() / variance - 1) < 0.15


def test_permutations():
    assert torch.equal(sample(lambda x, w: torch.randperm(1000)).sort()[0], torch.arange(1000))
    drawn = sample(lambda x, w: torch.multinomial(x, 64)).sort(dim=1)[0]
    assert torch.equal(drawn, torch.arange(64).expand(64, 64))


def dropped(x, w):
    return F.dropout(x @ w, 0.5).sum()


@pytest.mark.parametrize(
    "function",
    [
        dropped,
        lambda x, w: torch.utils.checkpoint.checkpoint(dropped, x, w, use_reentrant=False),
        lambda x, w: torch.utils.checkpoint.checkpoint(dropped, x, w, use_reentrant=True),
    ],
    ids=["plain", "checkpoint", "checkpoint reentrant"],
)
def test_gradient_uses_the_mask_of_the_forward(function):
    """sum(mask * (x w)) is linear in w: its value at w is <gradient, w>, if and only if both passes use one mask."""
    model = Applied(function)
    step = joint_of(model, {"x": torch.rand(64, 64)})
    got = run(step, model_values(model, step) | {(Kind.BATCH, "kwargs['x']"): torch.rand(64, 64)} | key(3))
    assert torch.allclose((got[Kind.GRAD, "weight"] * model.weight).sum(), got[Kind.LOSS, "loss"], rtol=1e-5)
    assert sum(str(n.target) == "graphacc.random_uniform.default" for n in step.graph.nodes) == 1


def test_attention_dropout_is_linear_in_the_values():
    q = torch.randn(2, 2, 8, 64)
    model = Applied(lambda x, w: F.scaled_dot_product_attention(q, q, x.view(2, 2, 8, 128)[..., :64] @ w, dropout_p=0.5).sum())
    kwargs = {"x": torch.rand(2, 2, 8, 128)}
    step = joint_of(model, kwargs)
    got = run(step, model_values(model, step) | {(Kind.BATCH, "kwargs['x']"): kwargs["x"]} | key(3))
    assert "graphacc.sdpa.default" in operators(step)
    assert torch.allclose((got[Kind.GRAD, "weight"] * model.weight).sum(), got[Kind.LOSS, "loss"], rtol=1e-4)


def test_unknown_random_operator_is_named_with_its_line():
    model = Applied(lambda x, w: (x @ w + torch.empty(64, 64).cauchy_()).sum())
    with pytest.raises(CaptureError, match=r"(?s)aten.cauchy.*test_randomness.py.*x @ w"):
        joint_of(model, {"x": X})


def test_python_randomness_is_refused():
    import random

    with pytest.raises(CaptureError, match="Python's random module"):
        joint_of(Applied(lambda x, w: (x @ w).sum() * random.random()), {"x": X})


def test_torch_generator_is_not_advanced():
    state = torch.get_rng_state()
    joint_of(Applied(dropped), {"x": X})
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_model_captures_without_dropout_in_evaluation():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).eval()
    step = capture_joint(model, lambda m, leaves: (m(*leaves).sum(), []), batch_of({"x": X}))
    assert "graphacc.random_uniform.default" not in operators(step)
    assert step.inputs[-1].kind is Kind.KEY
