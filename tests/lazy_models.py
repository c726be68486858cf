"""Models for the tests of lazy capture."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import HIDDEN, SEQ, Output, ScaledSquare

import graphacc


class DepthSchedule(nn.Module):
    """A residual network whose branches are scaled by a schedule, which its forward computes with torch and reads as numbers.

    The numbers depend on no input, but a trace on fake tensors has no values at all: torch.export does not get past ``tolist``.
    """

    def __init__(self, layers: int = 3, width: int = HIDDEN):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        for layer, scale in zip(self.layers, self.scales()):
            if scale > 0.6:  # control flow on a value that is known without the batch
                x = x + scale * ScaledSquare.apply(layer(x))
        logits = self.head(self.norm(x))
        return Output(F.cross_entropy(logits, labels), logits)


    def scales(self):
        return torch.linspace(1.0, 0.5, len(self.layers)).tolist()


class NumpySchedule(DepthSchedule):
    """The same, read as an array: the FX capture answers ``tolist``, and does not get past ``numpy``."""

    def scales(self):
        return torch.linspace(1.0, 0.5, len(self.layers)).cpu().numpy().tolist()


class ReadsBatch(nn.Module):
    """Control flow on a value of the batch: no fixed program can follow it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.linear(x)
        if logits.mean() > 0:  # the line that the message names
            logits = logits * 2
        return Output(F.cross_entropy(logits, labels), logits)


class Views(nn.Module):
    """In-place writes into views, buffers that are mutated and re-assigned, and control flow on shapes and modes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.zeros(HIDDEN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(HIDDEN))
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = self.linear(x)
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
            self.calls += 1
            self.last = hidden.detach().amax(0)
        mixed = torch.zeros(hidden.shape)
        mixed[:, ::2] = hidden[:, ::2]
        mixed[:, 1::2] += hidden[:, 1::2].flip(1)
        mixed.view(-1)[:3].mul_(2.0)
        mixed[hidden > 1.5] = 0.5
        padding = torch.full((x.shape[0], 2), 0.1)
        padding[0].fill_(0.3)
        if x.shape[0] > 4:
            mixed = mixed + padding.sum(1, keepdim=True)
        logits = self.head(mixed + 0.1 * self.seen)
        return Output(F.cross_entropy(logits, labels), logits)


class Dropouts(nn.Module):
    """Random numbers by Python functions, by C++ code of torch's own (LSTM), and written in place."""

    def __init__(self, p: float = 0.4, recurrent: bool = True):
        super().__init__()
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, dropout=p, batch_first=True) if recurrent else None
        self.attention = nn.MultiheadAttention(HIDDEN, 4, dropout=p, batch_first=True)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = x if self.lstm is None else self.lstm(x)[0]
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        noise = torch.empty_like(hidden).uniform_(-0.1, 0.1)
        logits = self.head(self.dropout(hidden) + noise)[:, -1]
        return Output(F.cross_entropy(logits, labels), logits)


class GroupedAttention(nn.Module):
    """Attention with 2 key heads, by torch's function or by our own, under one of several masks."""

    def __init__(self, heads: int, mask: str, bias: bool, own: bool, dropout: float):
        super().__init__()
        size = HIDDEN // heads
        self.heads, self.mask, self.own, self.dropout = heads, mask, own, dropout
        self.q, self.k, self.v = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * size), nn.Linear(HIDDEN, 2 * size)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.bias = nn.Parameter(torch.randn(1, heads, 1, SEQ)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (heads, -1)).transpose(1, 2) for layer, heads in ((self.q, self.heads), (self.k, 2), (self.v, 2)))
        seen = x[..., 0] < 1.0  # [B, S]
        if self.own:
            mixed = graphacc.flash_attention(q, k, v, causal=True, window=5, bias=self.bias, dropout=self.dropout, segment_ids=seen.long())
        else:
            mask = self.bias
            if self.mask == "bool":
                mask = seen[:, None, None] & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
            elif self.mask == "finite":
                mask = torch.where(seen[:, None, None], 0.0, torch.finfo(x.dtype).min)
            mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=mask is None, enable_gqa=self.heads != 2)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Attends(nn.Module):
    """One attention and a head."""

    def __init__(self, heads: int = 4, mask: str = "", bias: bool = False, own: bool = False, dropout: float = 0.0):
        super().__init__()
        self.attention = GroupedAttention(heads, mask, bias, own, dropout)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.attention(x))[:, -1]
        return Output(F.cross_entropy(logits, labels), logits)


def vectors(seed: int, batch_size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return dict(x=torch.randn(batch_size, HIDDEN, generator=generator), labels=torch.randint(0, 4, (batch_size,), generator=generator))


def sequences(seed: int, batch_size: int = 8, length: int = SEQ) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, length, HIDDEN, generator=generator)
    return dict(x=x, labels=torch.randint(0, 4, (batch_size,), generator=generator))
