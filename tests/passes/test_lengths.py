"""A padded and masked graph gives what the graph of the real length gives, whatever the padding holds; where it cannot, it is refused.

Legend: B batch, T sequence, D features.
"""




import pytest
import torch
import torch.nn.functional as F
import zoo
from capture.capturing import batch_values, joint_of, key, model_values, path, run
from tolerances import assert_close
from torch import nn

from graphacc.graph import Kind
from graphacc.passes.lengths import Length, Masked, length_input, mask_lengths

B, P, D = 2, 16, 8
LENGTHS = (16, 15, 9, 3)


def cut(kwargs: dict, dims: dict, length: int) -> dict:
    return {name: value.narrow(dims[name], 0, length + value.shape[dims[name]] - P).contiguous() if name in dims else value for name, value in kwargs.items()}


def masked_of(model: nn.Module, kwargs: dict, dims: dict) -> Masked:
    """The program of a batch of length P for all shorter ones."""
    inputs = {}
    for name, dim in dims.items():
        layout: list[Length | None] = [None] * kwargs[name].dim()
        layout[dim] = Length(symbol=0, offset=kwargs[name].shape[dim] - P)
        inputs[path(name)] = tuple(layout)
    return mask_lengths(joint_of(model, kwargs), [joint_of(model, cut(kwargs, dims, P - 1))], inputs, [P])


def check(model: nn.Module, kwargs: dict, dims: dict, lengths=LENGTHS) -> Masked:
    """Loss, gradients and buffers at every length against the graph of that length; the padding is garbage, NaN where it can be.

    Args:
        kwargs: a batch of length P.
        dims: tensor of the batch -> the dim that grows.
    """
    masked = masked_of(model, kwargs, dims)
    before = model_values(model, masked.step) | key()
    for length in lengths:
        real = cut(kwargs, dims, length)
        single = joint_of(model, real)
        expected = run(single, before | model_values(model, single) | batch_values(real))
        padded = dict(kwargs)
        for name, dim in dims.items():
            if kwargs[name].is_floating_point():
                padded[name] = kwargs[name].clone()
                padded[name].narrow(dim, length + kwargs[name].shape[dim] - P, P - length).fill_(float("nan"))
        got = run(masked.step, before | batch_values(padded) | {(Kind.BATCH, length_input(0)): torch.tensor(length)})
        assert got.keys() == expected.keys()
        noise = 1e-2 * max(float(value.abs().max()) for (kind, _), value in expected.items() if kind is Kind.GRAD)  # gradients that are rounding alone, as of a key's bias
        for name, value in expected.items():
            if float(value.abs().max()) < noise:
                value, got[name] = value + noise, got[name] + noise
            assert_close(got[name], value, what=f"{name} at length {length}")
    return masked


def tokens(*shape: int, high: int = 64) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.default_cases("gpt2")
def test_causal_language_models(name):
    model, _ = zoo.MODELS[name]()
    ids = tokens(B, P)
    labels = ids.clone()
    labels[0, :4] = -100
    check(model, {"input_ids": ids, "labels": labels}, {"input_ids": 1, "labels": 1})


@pytest.mark.matrix
def test_an_encoder_with_a_mask():
    model, _ = zoo.MODELS["bert"]()
    mask = torch.ones(B, P, dtype=torch.int64)
    mask[1, 2:] = 0
    check(model, {"input_ids": tokens(B, P), "attention_mask": mask, "labels": tokens(B, P)}, {"input_ids": 1, "attention_mask": 1, "labels": 1})


class Attention(nn.Module):
    """One layer in plain products and a softmax, with dropout, a convolution in front and the first place's features behind."""

    def __init__(self, causal: bool):
        super().__init__()
        self.conv, self.project, self.out, self.causal = nn.Conv1d(D, D, 3, padding=1), nn.Linear(D, 3 * D), nn.Linear(D, 4), causal
        self.table = nn.Parameter(torch.randn(5, D))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(x.shape[0] * x.shape[1] // B, dtype=torch.int64).expand(B, -1).t().reshape(-1) % 5
        flat = x.transpose(0, 1).reshape(-1, D)  # [T * B, D]
        constant = F.embedding(tokens, self.table).sum() + (flat @ self.table.t()).sum()  # their gradients are constants along the flattened sequence
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.project(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / D**0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        found = F.dropout(scores.softmax(-1), 0.3) @ v
        found = F.dropout(found.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None], 0.1)
        first, mean, most = self.out(found[:, 0]), self.out(found.mean(1)), self.out(found.amax(1))
        return F.mse_loss(self.out(found), target) + (first * mean * most).sum() / x.shape[1] + found[:, 1:].square().mean() + constant / 50


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.default_cases("True")
def test_own_attention_with_dropout_and_reductions(causal):
    torch.manual_seed(0)
    batch = {"x": torch.randn(B, P, D), "target": torch.randn(B, P, 4)}
    check(Attention(causal), batch, {"x": 1, "target": 1})
