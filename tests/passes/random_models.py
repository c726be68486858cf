"""Random models: each is a list of layers drawn from a seed, whose step is partitioned and run rank by rank, and compared with the step as it was captured.

    PYTHONPATH=tests python tests/passes/random_models.py COUNT FIRST_SEED [STRATEGY ...]

runs many, each under the strategies (without: under four drawn from `STRATEGIES`), prints those that differ or that end with an error that is not ours, and fails
if there is one. Everything is computed in float64, so that rounding hides nothing.

Layers read earlier values of the shapes that they take, and are mostly what models are made of: products, norms, attention in several forms, convolutions along
the tokens, recurrences in place of them, reductions, lookups, gates, and views between all of these, of sizes that strategies do not divide as well as of those that they do.
"""

import copy
import dataclasses
import math
import random
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from simulate import run_global, simulate
from tolerances import relative_error
from torch import nn
from zoo_steps import build, partitioned

from graphacc.errors import GraphAccError
from graphacc.strategy import Strategy

BATCH, CLASSES = 8, 8
STRATEGIES = [
    "dp=8", "fsdp=8", "fsdp=8,zero=1", "dp=2,fsdp=4,zero=2", "fsdp=4,bucket_mb=0", "dp=3", "fsdp=3",
    "tp=2", "tp=4", "tp=8", "tp=2,fsdp=2", "tp=2,fsdp=2,zero=1", "dp=2,tp=4,sequence_parallel=True", "tp=2,sequence_parallel=True,fsdp=2", "tp=3", "tp=3,sequence_parallel=True",
    "cp=2", "cp=4", "cp=3", "fsdp=2,cp=2", "cp=2,context=ring", "cp=4,context=ring,dp=2", "tp=2,cp=2", "fsdp=2,tp=2,cp=2,sequence_parallel=True", "cp=4,zero=3", "tp=2,cp=2,context=ring,zero=1",
]  # fmt: skip
TOLERANCE = 1e-8


@dataclasses.dataclass
class Value:
    """A value of the model: its shape, and what its dims are, of "b" samples, "t" tokens, "d" features, "c" channels, "h" and "w" their places."""

    index: int
    kinds: str
    shape: tuple[int, ...]


class Layer(nn.Module):
    """A function of some values with parameters of its own."""

    def __init__(self, function: Callable, reads: list[int], **parts: nn.Module | nn.Parameter):
        super().__init__()
        self.function, self.reads = function, reads
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *values):
        return self.function(self, *values)


class RandomModel(nn.Module):
    """Layers in their order, and a loss of the last values."""

    def __init__(self, layers: list[Layer], ends: list[Callable]):
        super().__init__()
        self.layers, self.ends = nn.ModuleList(layers), ends

    def forward(self, ids, x, labels):
        values = [ids, x]
        for layer in self.layers:
            values.append(layer(*(values[i] for i in layer.reads)))
        return Output(sum(end(values, labels) for end in self.ends))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class Drawn:
    """A model while it is drawn."""

    def __init__(self, seed: int):
        self.choose = random.Random(seed)
        self.tokens = self.choose.choice([8, 8, 16, 12, 6, 9])
        self.width = self.choose.choice([8, 16, 16, 24, 12, 10])
        self.vocabulary = self.choose.choice([32, 24, 30, 17])
        self.values = [Value(0, "bt", (BATCH, self.tokens)), Value(1, "btd", (BATCH, self.tokens, self.width))]
        self.layers: list[Layer] = []
        self.linears: list[nn.Linear] = []

    def add(self, kinds: str, shape: tuple[int, ...], function: Callable, reads: list[Value], **parts) -> Value:
        self.layers.append(Layer(function, [value.index for value in reads], **parts))
        self.values.append(Value(len(self.values), kinds, tuple(shape)))
        return self.values[-1]

    def any(self, kinds: str, shape: tuple[int, ...] | None = None) -> Value | None:
        """A value of these dims (and shape), later ones rather than earlier ones."""
        found = [value for value in self.values if value.kinds == kinds and value.index and (shape is None or value.shape == shape)]
        return None if not found else found[-1] if self.choose.random() < 0.6 else self.choose.choice(found)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


# ---- layers of values [B, T, D]


def linear(m: Drawn, x: Value) -> None:
    wanted = m.choose.choice([m.width, m.width, 2 * m.width, 4 * m.width, 10, CLASSES])
    alike = [one for one in m.linears if one.in_features == x.shape[-1]]
    if alike and m.choose.random() < 0.2:
        part = m.choose.choice(alike)  # one module twice
    else:
        m.linears.append(part := nn.Linear(x.shape[-1], wanted, bias=m.choose.random() < 0.7))
    m.add(x.kinds, (*x.shape[:-1], part.out_features), lambda self, x: self.part(x), [x], part=part)


def transposed(m: Drawn, x: Value) -> None:
    """Back by the weight of another product, as tied embeddings do."""
    alike = [one for one in m.linears if one.out_features == x.shape[-1]]
    if alike:
        part = m.choose.choice(alike)
        m.add(x.kinds, (*x.shape[:-1], part.in_features), lambda self, x: F.linear(x, self.part.weight.t()), [x], part=part)


def norm(m: Drawn, x: Value) -> None:
    kind = m.choose.choice(["layer", "rms", "l2", "own"])
    if kind == "layer":
        m.add(x.kinds, x.shape, lambda self, x: self.part(x), [x], part=nn.LayerNorm(x.shape[-1]))
    elif kind == "rms":
        m.add(x.kinds, x.shape, lambda self, x: self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3), [x], scale=parameter(x.shape[-1]))
    elif kind == "l2":
        m.add(x.kinds, x.shape, lambda self, x: F.normalize(x, dim=-1, eps=1e-2), [x])
    else:
        dims = m.choose.choice([(-1,), (-2, -1), (1,)])
        m.add(x.kinds, x.shape, lambda self, x: (x - x.mean(dims, keepdim=True)) / (x.var(dims, keepdim=True) + 0.1).sqrt(), [x])


def pointwise(m: Drawn, x: Value) -> None:
    function = m.choose.choice([torch.tanh, F.gelu, F.silu, F.softplus, torch.sigmoid, torch.sin, torch.square, lambda x: F.gelu(x, approximate="tanh"), lambda x: x.clamp(-1.0, 1.0), F.relu])
    m.add(x.kinds, x.shape, lambda self, x: function(x), [x])


def residual(m: Drawn, x: Value) -> None:
    other = m.any(x.kinds, x.shape)
    if other is not None and other.index != x.index:
        function = m.choose.choice([torch.add, torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: torch.where(a > 0, a, b)])
        m.add(x.kinds, x.shape, lambda self, a, b: function(a, b), [x, other])


def gate(m: Drawn, x: Value) -> None:
    if x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        split = m.choose.choice([lambda x: x.chunk(2, -1), lambda x: x.split(half, -1), lambda x: (x[..., :half], x[..., half:]), lambda x: x.unflatten(-1, (2, half)).unbind(-2), lambda x: (x[..., ::2], x[..., 1::2])])

        def function(self, x):
            a, b = split(x)
            return a * torch.sigmoid(b)

        m.add(x.kinds, (*x.shape[:-1], half), function, [x])


def positions(m: Drawn, x: Value) -> None:
    shape = m.choose.choice([x.shape[1:], (x.shape[1], 1), (1, 1, x.shape[2]), (x.shape[2],)])
    m.add(x.kinds, x.shape, lambda self, x: x + self.table, [x], table=parameter(*shape))


def embedded(m: Drawn, x: Value) -> None:
    table = nn.Embedding(m.vocabulary, m.width)
    kind = m.choose.choice(["module", "indexed", "one hot"])

    def function(self, ids):
        if kind == "module":
            return self.table(ids)
        if kind == "indexed":
            return self.table.weight[ids]
        return F.one_hot(ids, self.table.num_embeddings).to(self.table.weight.dtype) @ self.table.weight

    m.add("btd", (BATCH, m.tokens, m.width), function, [m.values[0]], table=table)


def attention(m: Drawn, x: Value) -> None:
    """Self attention or cross attention, written in several ways."""
    heads = m.choose.choice([h for h in (1, 2, 3, 4, 5, 8) if m.width % h == 0])
    groups = m.choose.choice([g for g in (1, 2, 4) if heads % g == 0])  # of queries that share a key
    size, length = m.width // heads, x.shape[1]
    other = x if m.choose.random() < 0.8 else (m.any("btd") or x)
    causal, form, fused = other.shape[1] == length and m.choose.random() < 0.7, m.choose.choice(["sdpa", "sdpa", "written", "einsum", "masked"]), m.choose.random() < 0.3 and other is x
    parts = dict(out=nn.Linear(m.width, m.width, bias=m.choose.random() < 0.5))
    if fused:
        parts |= dict(qkv=nn.Linear(x.shape[-1], (heads + 2 * heads // groups) * size))
    else:
        parts |= dict(q=nn.Linear(x.shape[-1], m.width), k=nn.Linear(other.shape[-1], heads // groups * size), v=nn.Linear(other.shape[-1], heads // groups * size, bias=False))
    rotary = m.choose.random() < 0.4 and size % 2 == 0

    def turned(x):
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.arange(1, size // 2 + 1, dtype=x.dtype) / size
        angles = torch.cat([angles, angles], -1)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def function(self, x, y):
        if fused:
            q, k, v = self.qkv(x).split([heads * size, heads // groups * size, heads // groups * size], -1)
        else:
            q, k, v = self.q(x), self.k(y), self.v(y)
        q, k, v = (z.view(*z.shape[:2], -1, size).transpose(1, 2) for z in (q, k, v))
        if rotary:
            q, k = turned(q), turned(k)
        if groups > 1:
            k, v = (z.repeat_interleave(groups, 1) if form != "written" else z[:, :, None].expand(-1, -1, groups, -1, -1).reshape(z.shape[0], -1, *z.shape[2:]) for z in (k, v))
        if form == "sdpa":
            z = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
            if form == "masked":
                z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            else:
                scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / size**0.5 if form == "einsum" else q @ k.transpose(-1, -2) * size**-0.5
                scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
                z = torch.softmax(scores, -1) @ v
        return self.out(z.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    m.add("btd", (BATCH, length, m.width), function, [x, other], **parts)


def along_tokens(m: Drawn, x: Value) -> None:
    """What mixes tokens: shifts, sums so far, convolutions, a recurrence."""
    length, width = x.shape[1:]
    kind = m.choose.choice(["cumsum", "roll", "flip", "shift", "conv", "depthwise", "lstm", "gru", "pool", "product", "softmax", "permuted", "cummax", "token first"])
    parts: dict = {}
    if kind in ("conv", "depthwise"):
        parts = dict(part=nn.Conv1d(width, width, 3, padding=1, groups=width if kind == "depthwise" else 1))
    elif kind in ("lstm", "gru"):
        parts = dict(part=(nn.LSTM if kind == "lstm" else nn.GRU)(width, m.width, batch_first=True))
    elif kind in ("product", "token first"):
        parts = dict(part=nn.Linear(length, length))
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))

    def function(self, x):
        if kind == "cumsum":
            return x.cumsum(1) / length
        if kind == "roll":
            return x.roll(1, 1)
        if kind == "flip":
            return x.flip(1)
        if kind == "shift":
            return F.pad(x, (0, 0, 1, 0))[:, :-1] + x
        if kind in ("conv", "depthwise"):
            return self.part(x.transpose(1, 2)).transpose(1, 2)
        if kind in ("lstm", "gru"):
            return self.part(x)[0]
        if kind == "pool":
            return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)
        if kind == "product":
            return self.part(x.transpose(1, 2)).transpose(1, 2)
        if kind == "softmax":
            return x.softmax(1) * x
        if kind == "permuted":
            return x[:, order]
        if kind == "cummax":
            return x.cummax(1).values
        return self.part(x.permute(2, 0, 1)).permute(1, 2, 0)

    m.add(x.kinds, (*x.shape[:2], m.width if kind in ("lstm", "gru") else width), function, [x], **parts)


def longer(m: Drawn, x: Value) -> None:
    """A learned token in front, or fewer tokens."""
    length, width = x.shape[1:]
    kind = m.choose.choice(["cat", "cut", "every second", "joined", "mean of two"])
    if kind == "cat":
        m.add(x.kinds, (BATCH, length + 1, width), lambda self, x: torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1), [x], token=parameter(1, 1, width))
    elif kind == "cut":
        m.add(x.kinds, (BATCH, length - 1, width), lambda self, x: x[:, 1:], [x])
    elif kind == "every second":
        m.add(x.kinds, (BATCH, -(-length // 2), width), lambda self, x: x[:, ::2], [x])
    elif length % 2 == 0 and kind == "joined":
        m.add(x.kinds, (BATCH, length // 2, 2 * width), lambda self, x: x.reshape(x.shape[0], length // 2, 2 * width), [x])
    elif length % 2 == 0:
        m.add(x.kinds, (BATCH, length // 2, width), lambda self, x: x.unflatten(1, (length // 2, 2)).mean(2), [x])


def flat(m: Drawn, x: Value) -> None:
    """Rows of all samples together."""
    wanted = m.choose.choice([m.width, CLASSES])
    part = nn.Linear(x.shape[-1], wanted)
    form = m.choose.choice(["view", "flatten", "einsum", "baddbmm"])

    def function(self, x):
        if form == "view":
            return self.part(x.reshape(-1, x.shape[-1])).view(*x.shape[:2], -1)
        if form == "flatten":
            return self.part(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if form == "einsum":
            return torch.einsum("btd,od->bto", x, self.part.weight) + self.part.bias
        return torch.baddbmm(self.part.bias, x, self.part.weight.t().expand(x.shape[0], -1, -1))

    m.add(x.kinds, (*x.shape[:2], wanted), function, [x], part=part)


def experts(m: Drawn, x: Value) -> None:
    """A mixture of all of a few experts, by one product with a dim of experts."""
    count = m.choose.choice([2, 4, 8, 3])

    def function(self, x):
        shares = self.router(x).softmax(-1)
        hidden = F.gelu(torch.einsum("btd,edf->btef", x, self.first))
        return torch.einsum("btef,efd,bte->btd", hidden, self.second, shares)

    m.add(x.kinds, x.shape, function, [x], router=nn.Linear(x.shape[-1], count), first=parameter(count, x.shape[-1], 8), second=parameter(count, 8, x.shape[-1]))


def over_features(m: Drawn, x: Value) -> None:
    width = x.shape[-1]
    function, wanted = m.choose.choice([
        (lambda x: x.softmax(-1), width), (lambda x: x.log_softmax(-1), width), (lambda x: x.flip(-1), width), (lambda x: x.roll(2, -1), width),
        (lambda x: torch.cat([x, -x], -1), 2 * width), (lambda x: x.sort(-1).values, width), (lambda x: x.topk(2, -1).values, 2), (lambda x: x.cumsum(-1) / width, width),
        (lambda x: x.logsumexp(-1, keepdim=True) + x, width), (lambda x: x * x.amax(-1, keepdim=True), width), (lambda x: F.pad(x, (0, 2)), width + 2), (lambda x: x.norm(dim=-1, keepdim=True) + x, width),
        (lambda x: x.repeat(1, 1, 2), 2 * width), (lambda x: x.repeat_interleave(2, -1), 2 * width), (lambda x: x[..., 1:], width - 1), (lambda x: torch.stack([x, x.square()], -1).flatten(-2), 2 * width),
    ])  # fmt: skip
    m.add(x.kinds, (*x.shape[:2], wanted), lambda self, x: function(x), [x])


def pooled(m: Drawn, x: Value) -> None:
    """[B, T, D] -> [B, D]."""
    kind = m.choose.choice(["mean", "max", "last", "weighted", "flat", "first and last", "masked"])
    parts: dict = dict(score=nn.Linear(x.shape[-1], 1)) if kind == "weighted" else {}
    width = {"flat": x.shape[1] * x.shape[2], "first and last": 2 * x.shape[2]}.get(kind, x.shape[2])

    def function(self, x):
        if kind == "mean":
            return x.mean(1)
        if kind == "max":
            return x.max(1).values
        if kind == "last":
            return x[:, -1]
        if kind == "weighted":
            return (self.score(x).softmax(1) * x).sum(1)
        if kind == "flat":
            return x.flatten(1)
        if kind == "first and last":
            return torch.cat([x[:, 0], x[:, -1]], -1)
        mask = x[..., :1] > 0
        return (x * mask).sum(1) / (mask.sum(1) + 1)

    m.add("bd", (BATCH, width), function, [x], **parts)


def of_tokens(m: Drawn, x: Value) -> None:
    """[B, T, D] by what a table says of each token, or by its number."""
    if x.shape[1] != m.tokens:
        return
    kind = m.choose.choice(["scale", "masked", "where", "scatter", "gather"])
    parts: dict = dict(table=nn.Embedding(m.vocabulary, x.shape[-1] if kind != "scale" else 1)) if kind in ("scale", "where") else {}

    def function(self, x, ids):
        if kind == "scale":
            return x * self.table(ids)
        if kind == "masked":
            return x.masked_fill((ids % 3 == 0)[..., None], 0.5)
        if kind == "where":
            return torch.where((ids % 2 == 0)[..., None], x, self.table(ids))
        if kind == "scatter":
            return x + torch.zeros_like(x).scatter_add(1, (ids % x.shape[1])[..., None].expand_as(x), x)
        return x.gather(1, (ids % x.shape[1])[..., None].expand_as(x))

    m.add(x.kinds, x.shape, function, [x, m.values[0]], **parts)


# ---- layers of values [B, D]


def of_rows(m: Drawn, x: Value) -> None:
    width = x.shape[-1]
    kind = m.choose.choice(["linear", "norm", "scores", "batch norm", "centred", "outer", "spread", "group norm"])
    if kind == "linear":
        m.add("bd", (BATCH, m.width), lambda self, x: self.part(x), [x], part=nn.Linear(width, m.width))
    elif kind == "norm":
        m.add("bd", x.shape, lambda self, x: self.part(x), [x], part=nn.LayerNorm(width))
    elif kind == "scores":  # between samples, as in a contrastive loss
        m.add("bd", (BATCH, BATCH), lambda self, x: F.normalize(x, dim=-1, eps=1e-2) @ F.normalize(x, dim=-1, eps=1e-2).t() * 3, [x])
    elif kind == "batch norm":
        m.add("bd", x.shape, lambda self, x: self.part(x), [x], part=nn.BatchNorm1d(width, eps=0.1))
    elif kind == "centred":
        m.add("bd", x.shape, lambda self, x: x - x.mean(0), [x])
    elif kind == "outer":
        m.add("btd", (BATCH, width, width), lambda self, x: x[:, :, None] * x[:, None, :], [x])
    elif kind == "spread":
        m.add("btd", (BATCH, m.tokens, width), lambda self, x: x[:, None].expand(-1, m.tokens, -1) * self.table, [x], table=parameter(m.tokens, width))
    elif width % 2 == 0:
        m.add("bd", x.shape, lambda self, x: self.part(x), [x], part=nn.GroupNorm(2, width, eps=0.1))


# ---- maps [B, C, H, W]


def as_map(m: Drawn, x: Value) -> None:
    """[B, T, D] -> [B, D, T, 1] or with tokens as rows and columns."""
    length, width = x.shape[1:]
    columns = m.choose.choice([n for n in (1, 2, 3, 4) if length % n == 0])
    m.add("bchw", (BATCH, width, length // columns, columns), lambda self, x: x.transpose(1, 2).reshape(x.shape[0], width, length // columns, columns), [x])


def of_map(m: Drawn, x: Value) -> None:
    _, channels, height, columns = x.shape
    kind = m.choose.choice(["conv", "strided", "group norm", "batch norm", "up", "pool", "adaptive", "back", "scaled", "relu", "max"])
    if kind == "conv":
        groups = m.choose.choice([1, 1, 2]) if channels % 2 == 0 else 1
        m.add("bchw", x.shape, lambda self, x: self.part(x), [x], part=nn.Conv2d(channels, channels, 3, padding=1, groups=groups))
    elif kind == "strided":
        m.add("bchw", (BATCH, 8, -(-height // 2), -(-columns // 2)), lambda self, x: self.part(x), [x], part=nn.Conv2d(channels, 8, 3, 2, 1))
    elif kind == "group norm" and channels % 2 == 0:
        m.add("bchw", x.shape, lambda self, x: self.part(x), [x], part=nn.GroupNorm(2, channels, eps=0.1))
    elif kind == "batch norm":
        m.add("bchw", x.shape, lambda self, x: self.part(x), [x], part=nn.BatchNorm2d(channels, eps=0.1))
    elif kind == "up":
        mode = m.choose.choice(["nearest", "bilinear"])
        m.add("bchw", (BATCH, channels, 2 * height, 2 * columns), lambda self, x: F.interpolate(x, scale_factor=2, mode=mode), [x])
    elif kind == "pool" and height > 1 and columns > 1:
        m.add("bchw", (BATCH, channels, height // 2, columns // 2), lambda self, x: F.avg_pool2d(x, 2), [x])
    elif kind == "max":
        m.add("bchw", x.shape, lambda self, x: F.max_pool2d(x, 3, 1, 1), [x])
    elif kind == "adaptive":
        m.add("bd", (BATCH, channels), lambda self, x: F.adaptive_avg_pool2d(x, 1).flatten(1), [x])
    elif kind == "back":
        m.add("btd", (BATCH, height * columns, channels), lambda self, x: x.flatten(2).transpose(1, 2), [x])
    elif kind == "scaled":
        m.add("bchw", x.shape, lambda self, x: x * torch.sigmoid(self.part(x.mean((2, 3))))[:, :, None, None], [x], part=nn.Linear(channels, channels))
    else:
        m.add("bchw", x.shape, lambda self, x: F.relu(x), [x])


OF_TOKENS = [linear] * 4 + [attention] * 4 + [norm] * 2 + [pointwise, residual, residual, gate, positions, embedded, along_tokens, along_tokens, longer, flat, experts, over_features, over_features, pooled, pooled, of_tokens, of_tokens, transposed, as_map]  # fmt: skip


def draw(seed: int) -> RandomModel:
    """The model of a seed, in float64."""
    torch.manual_seed(seed)
    m = Drawn(seed)
    m.add("btd", (BATCH, m.tokens, m.width), lambda self, ids: self.part(ids), [m.values[0]], part=nn.Embedding(m.vocabulary, m.width))
    count = m.choose.randint(3, 14)
    while len(m.layers) < count:
        kinds = m.choose.choice(["btd", "btd", "btd", "bd", "bchw"])
        x = m.any(kinds)
        if x is None or math.prod(x.shape) > 20_000:
            continue
        m.choose.choice({"btd": OF_TOKENS, "bd": [of_rows], "bchw": [of_map]}[kinds])(m, x)
    return RandomModel(m.layers, [end_of(m, value) for value in m.choose.sample(m.values[-3:], m.choose.choice([1, 1, 2]))]).double()


def end_of(m: Drawn, value: Value) -> Callable:
    """A part of the loss."""
    index, kind = value.index, m.choose.choice(["square", "entropy", "entropy", "entropy with ignored", "deviation"])

    def end(values, labels):
        x = values[index]
        if x.dim() == 4:
            return x.flatten(2).square().mean()
        if kind == "square":
            return x.square().mean()
        if kind == "deviation":
            return (x - x.mean()).abs().sum() / x.numel()
        wanted = labels[:, : x.shape[1]] if x.dim() == 3 else labels[:, 0]
        wanted = F.pad(wanted, (0, x.shape[1] - wanted.shape[1])) if x.dim() == 3 else wanted
        wanted = wanted % x.shape[-1]
        if kind == "entropy with ignored":
            wanted = wanted.masked_fill(wanted % 3 == 0, -100)
        return F.cross_entropy(x.flatten(0, -2), wanted.flatten())

    return end


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_of(model: RandomModel, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = Drawn(seed)
    ids = torch.randint(drawn.vocabulary, (BATCH, drawn.tokens), generator=generator)
    labels = torch.randint(1000, (BATCH, drawn.tokens), generator=generator)
    return {"ids": ids, "x": torch.randn(BATCH, drawn.tokens, drawn.width, generator=generator, dtype=torch.float64), "labels": labels}


def strategies_of(seed: int) -> list[str]:
    return random.Random(seed).sample(STRATEGIES, 4)


def compare(seed: int, strategies: list[str] | None = None) -> dict[str, str]:
    """Strategy -> "equal", "refused: ..." or "WRONG: ..."."""
    model = draw(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = batch_of(model, seed)
        if not copy.deepcopy(model)(**batch).loss.requires_grad:
            return {}
        try:
            case = build(model, batch, sgd)
        except GraphAccError as error:
            return {"": f"refused: {type(error).__name__}: {str(error)[:300]}"}
        step = case.step
        inputs = [step.constants.get(item.target, case.values.get((item.kind, item.target))).to(item.dtype) for item in step.inputs]
        expected = run_global(step, inputs)
        found = {}
        for strategy in strategies or strategies_of(seed):
            try:
                result, _ = partitioned(step, strategy)
                got = simulate(result, Strategy.parse(strategy).mesh, inputs)
            except GraphAccError as error:
                found[strategy] = f"refused: {type(error).__name__}: {str(error)[:300]}"
                continue
            except Exception as error:  # what it is, is the finding
                found[strategy] = f"WRONG: {type(error).__name__}: {str(error)[:500]}"
                continue
            found[strategy] = "equal"
            for x, y, item in zip(got, expected, result.outputs, strict=True):
                error = relative_error(x, y)
                if not (error <= TOLERANCE or torch.allclose(x.double(), y.double(), rtol=0, atol=1e-11)):
                    found[strategy] = f"WRONG: {item.kind.value} {item.target}: relative error {error:.3g}"
                    break
        return found


def main(count: int, first: int, *strategies: str) -> None:
    kinds: dict[str, int] = {}
    for seed in range(first, first + count):
        for strategy, result in compare(seed, list(strategies) or None).items():
            kind = result.partition(":")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
            if kind != "equal":
                print(seed, strategy, result, flush=True)
    print(kinds)
    if "WRONG" in kinds:
        sys.exit(1)


if __name__ == "__main__":
    import logging

    logging.getLogger("graphacc").setLevel(logging.ERROR)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
