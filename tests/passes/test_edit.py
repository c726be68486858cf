"""What a graph's operators give, asked of PyTorch: complex tensors, whose conjugation and negation PyTorch defers and a graph does not."""

import contextlib
import copy

import pytest
import torch
import zoo
from selection import with_matrix
from torch import fx, nn
from training import check_both, compiled
from zoo_steps import partitioned, shared_case

from graphacc._compat.torch_ import fake_mode
from graphacc.errors import StrategyError
from graphacc.passes import edit
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


@pytest.mark.parametrize("name", with_matrix(zoo.MODELS, ["gpt2", "mixtral", "resnet"]))
def test_kernels_of_the_meta_device_describe_results_as_fake_tensors_do(name, monkeypatch):
    """Every question that partitioning asks, asked both ways."""
    by_kernel, count = edit._by_meta_kernel, 0

    def both(target, args, kwargs):
        nonlocal count
        found = by_kernel(target, args, kwargs)
        if found is not None:
            count += 1
            values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
            with fake_mode(), torch.no_grad():
                expected = target(*values, **named)
            for value in (found, expected):
                assert type(value).__name__ == "FakeTensor" and value.fake_mode is fake_mode()
            assert [getattr(found, field) for field in ("shape", "dtype", "device", "requires_grad")] == [getattr(expected, field) for field in ("shape", "dtype", "device", "requires_grad")], target
            strides = [[step for step, n in zip(value.stride(), value.shape) if n > 1] for value in (found, expected)]  # others say nothing
            assert strides[0] == strides[1] and found.storage_offset() == expected.storage_offset(), (target, args)
        return found

    monkeypatch.setattr(edit, "_by_meta_kernel", both)
    edit._answers.forget()
    step = shared_case(name)[0].step
    for strategy in ("fsdp=2,tp=2", "fsdp=2,cp=2", "dp=2,ep=2"):
        with contextlib.suppress(StrategyError):
            partitioned(step.copy(), strategy)
    assert count > 20
