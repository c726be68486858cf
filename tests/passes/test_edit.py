"""What a graph's operators give, asked of PyTorch: complex tensors, whose conjugation and negation PyTorch defers and a graph does not."""

import copy

import pytest
import torch
from torch import nn
from training import check_both, compiled

from graphacc._compat.torch_ import fake_mode
from graphacc.passes.edit import infer

aten = torch.ops.aten


class Conjugated(nn.Module):
    """Complex products with adjoints, of activations and of weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        w = torch.view_as_complex(self.linear.weight.reshape(8, 4, 2))
        z = torch.view_as_complex(self.linear(x).reshape(-1, 4, 2))
        y = z @ w.mH  # [B, 8]
        return y.abs().mean() + (y.conj().real * y.imag).mean() + torch.view_as_real(y.conj().resolve_conj()).square().mean() + (z.mH @ y).abs().square().mean() / 64


@pytest.mark.parametrize("strategy", ["dp=8", "fsdp=8", "fsdp=2,tp=4"])
@pytest.mark.default_cases("dp=8", "fsdp=8")
def test_conjugated_tensors_on_several_devices(strategy):
    reference = Conjugated()
    model = compiled(copy.deepcopy(reference), strategy)
    batches = [torch.randn(16, 8) for _ in range(2)]
    check_both(reference, model, lambda one, step: one(batches[step]), steps=2)


class Spectral(nn.Module):
    """Complex parameters, each gathered behind the other's use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / 4) for shape in ((8, 16), (16, 8)))

    def forward(self, x):
        z = torch.einsum("bi,io->bo", torch.fft.fft(x), self.first)
        return torch.fft.ifft(torch.einsum("bi,io->bo", z, self.second)).abs().square().mean()


@pytest.mark.parametrize("strategy", ["fsdp=4", "fsdp=8,zero=3"])
@pytest.mark.default_cases("fsdp=4")
def test_complex_parameters_are_gathered(strategy):
    reference = Spectral()
    model = compiled(copy.deepcopy(reference), strategy, capture="fx")
    batches = [torch.randn(16, 8) for _ in range(2)]
    check_both(reference, model, lambda one, step: one(batches[step]), steps=2)


def test_what_an_operator_gives_has_its_values_in_memory():
    with fake_mode():
        z = torch.empty(4, 3, dtype=torch.complex64)
    for target, args in ((aten._conj.default, (z,)), (aten.permute.default, (z.conj(), [1, 0])), (aten.split.Tensor, (z.conj(), 2)), (aten.imag.default, (z.conj(),))):
        found = infer(target, args, {})
        for value in found if isinstance(found, (list, tuple)) else (found,):
            assert not value.is_conj() and not value.is_neg(), target
    assert infer(aten.view_as_real.default, (infer(aten._conj.default, (z,), {}),), {}).shape == (4, 3, 2)
