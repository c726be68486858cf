"""flex_attention: captured as ATen operators, with its modifications of scores and its masks; what is not captured is run by PyTorch."""

import copy

import pytest
import torch
from selection import with_matrix
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from training import check_both, compiled

T, HEADS = 16, 2


def causal(b, h, i, j):
    return i >= j


def biased(score, b, h, i, j):
    return score - (i - j) * 0.1 * (h + 1)


class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(16, 16 + 16), nn.Linear(16, 4), how
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.register_buffer("document", torch.arange(T) // 5)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), T, 4, 8).transpose(1, 2).split((2, 1, 1), 1)
        return self.out(self.how(self, q, k, v).transpose(1, 2).flatten(2)).square().mean()


def plain(module, q, k, v):
    return flex_attention(q, k, v, enable_gqa=True)


def masked(module, q, k, v):
    return flex_attention(q, k, v, score_mod=biased, block_mask=create_block_mask(causal, None, None, T, T, device="cpu"), enable_gqa=True, scale=0.3)


def documents(module, q, k, v):
    """What the modifications read besides: a buffer, and a parameter, which gets its gradient."""
    mask = create_block_mask(lambda b, h, i, j: module.document[i] == module.document[j], None, None, T, T, device="cpu")
    out, lse = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * module.slopes[h], block_mask=mask, enable_gqa=True, return_lse=True)
    return out + lse[..., None] / 10


CASES = {f"{how.__name__}, {strategy}": (how, strategy) for how in (plain, masked, documents) for strategy in (None, "fsdp=4", "dp=2,tp=2")}


pytestmark = pytest.mark.filterwarnings("ignore")  # flex_attention warns that it is not under torch.compile


@pytest.fixture(autouse=True)
def trains_on_the_cpu():
    try:
        plain(None, *(torch.randn(1, heads, T, 8, requires_grad=True) for heads in (2, 1, 1)))
    except NotImplementedError as error:  # torch 2.15
        pytest.skip(str(error))


@pytest.mark.parametrize("case", with_matrix(CASES, ["masked, None", "documents, fsdp=4"]))
def test_captured(case):
    how, strategy = CASES[case]
    reference = Attention(how)
    model = compiled(copy.deepcopy(reference), strategy, capture="fx")
    batches = [torch.randn(8, T, 16) for _ in range(2)]
    check_both(reference, model, lambda one, step: one(batches[step]), steps=2)


class Decides(Attention):
    """Its own code follows a parameter, so PyTorch runs it, beside a capture that failed."""

    def forward(self, x):
        return super().forward(x) * (2.0 if self.slopes[0].item() > 0 else 1.0)


def test_run_by_pytorch():
    reference = Decides(masked)
    model = compiled(copy.deepcopy(reference), None)
    batches = [torch.randn(8, T, 16) for _ in range(2)]
    check_both(reference, model, lambda one, step: one(batches[step]), steps=2, by_pytorch=True)
