"""Functions that are written in others: values and gradients of torch's own."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from capturing import batch_values, joint_of, key, model_values, operators, run
from tolerances import assert_close
from torch import Tensor, nn

import graphacc
from graphacc.capture.functions import embedding_bag
from graphacc.errors import CaptureError
from graphacc.graph import Kind

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


@pytest.mark.parametrize("form", ["equal", "offsets"])
@pytest.mark.parametrize("padding", [None, 3])
def test_the_first_of_equal_rows_has_the_gradient_of_a_bag(form, padding):
    """Also where the maximum is 0, as that of an empty bag."""
    input, offsets = (EQUAL, None) if form == "equal" else (FLAT, STARTS)
    check(input, offsets, [torch.randint(-2, 1, (7, 4)).float()], lambda weight: dict(mode="max", padding_idx=padding))


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


class Recurrent(nn.Module):
    """An LSTM on a batch that needs no gradient, with states that come and go."""

    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, **options)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        out, (last_h, last_c) = self.lstm(x, (h, c))
        assert last_h.shape == h.shape and last_c.shape == c.shape
        return out.pow(2).sum() + last_h.sum() + last_c.sin().sum()


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"proj_size": 3}, {"bias": False}], ids=str)
@pytest.mark.default_cases("{}")
def test_lstm(options):
    model = Recurrent(**options)
    count = 4 if options.get("bidirectional") else 2
    batch = {"x": torch.randn(5, 3, 4), "h": torch.randn(count, 3, options.get("proj_size", 6)), "c": torch.randn(count, 3, 6)}
    step = joint_of(model, batch)
    assert not any("mkldnn" in name for name in operators(step))
    got = run(step, model_values(model, step) | batch_values(batch) | key())
    loss = model(**batch)
    loss.backward()
    assert_close(got[Kind.LOSS, "loss"], loss.detach())
    for name, parameter in model.named_parameters():
        assert_close(got[Kind.GRAD, name], parameter.grad)


WRITES = {
    "a row for all": lambda z, mask, token, scalar: z.__setitem__(mask, token),
    "with a dim of one": lambda z, mask, token, scalar: z.__setitem__(mask, token[None]),
    "a number": lambda z, mask, token, scalar: z.__setitem__(mask, scalar),
    "of elements": lambda z, mask, token, scalar: z.__setitem__(z > 0, scalar),
    "with a slice behind": lambda z, mask, token, scalar: z.__setitem__((mask, slice(None)), token),
    "index_put_": lambda z, mask, token, scalar: z.index_put_((mask,), token),
    "into a view": lambda z, mask, token, scalar: z[:, 2:].__setitem__(mask[:, 2:], token),
}


class Masked(nn.Module):
    """Masked positions get a learned token, as in BEiT and wav2vec."""

    def __init__(self, write):
        super().__init__()
        self.write, self.first, self.last = write, nn.Linear(8, 16), nn.Linear(16, 4)
        self.token, self.scalar = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(()))

    def forward(self, x, mask):
        z = self.first(x).clone()
        self.write(z, mask, self.token, self.scalar)
        return self.last(z)


@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_written_through_a_mask_is_compiled(write):
    def losses(model):
        optimizer, generator, found = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1), []
        for _ in range(3):
            x, mask = torch.randn(2, 10, 8, generator=generator), torch.rand(2, 10, generator=generator) > 0.6
            loss = model(x, mask).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    plain = Masked(WRITES[write])
    compiled = graphacc.compile(copy.deepcopy(plain), devices=1, capture="fx", fast_compile=True)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    assert "PyTorch" not in str(compiled.explain())
