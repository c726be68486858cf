"""Code of torch's own that asks for values: BatchNorm over all batches, and nn.TransformerEncoder with padding in evaluation."""

import copy

import pytest
import torch
from tolerances import assert_close
from torch import nn
from training import check_both, compiled

from graphacc.capture import Batch, capture_forward

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

B, T, D = 2, 5, 8


# ---- BatchNorm


@pytest.mark.parametrize(("strategy", "capture"), [(None, "fx"), ("dp=8", "fx"), ("fsdp=8", "fx"), pytest.param(None, "lazy", marks=pytest.mark.lazy)])
def test_batch_norm_over_all_batches(strategy, capture):
    """momentum=None: the running statistics are averages over all batches."""
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2, momentum=None, affine=False))
    model = compiled(copy.deepcopy(reference), strategy, capture=capture)
    batches = [torch.randn(16, 8) for _ in range(4)]
    check_both(reference, model, lambda one, step: one(batches[step]).abs().mean(), steps=4)
    assert reference[1].num_batches_tracked == 4
    reference.eval(), model.eval()
    with torch.no_grad():
        assert_close(model(batches[0]) + 0, reference(batches[0]))
    assert not model._graphacc_engine.by_pytorch.counts


@pytest.mark.parametrize(
    ("norm", "x"),
    [(nn.BatchNorm1d(8, momentum=None, track_running_stats=False), torch.ones(16, 8)), (nn.BatchNorm2d(8, momentum=None).double(), torch.ones(4, 8, 2, 2).double())],
    ids=["without statistics", "float64"],
)
def test_other_batch_norms_over_all_batches(norm, x):
    reference = nn.Sequential(copy.deepcopy(norm))
    model = compiled(copy.deepcopy(reference), None, capture="fx")
    batches = [torch.randn_like(x) for _ in range(2)]
    check_both(reference, model, lambda one, step: one(batches[step]).abs().mean(), steps=2)


# ---- nn.TransformerEncoder


def encoder(norm: bool = False, **options) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(D) if norm else None, **options)


def padding(*lengths: int) -> torch.Tensor:
    """[B, T], True behind the end of each sequence."""
    return torch.arange(T) >= torch.tensor(lengths)[:, None]


UNALIGNED = torch.tensor([[True, False, False, True, True], [False, False, False, False, True]])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (padding(3, 5), {}),
        (padding(2, 0), {}),
        (padding(5, 5), {}),
        (UNALIGNED, {}),
        (UNALIGNED, dict(mask_check=False)),
        (padding(3, 5) * -1.0, {}),
        (padding(3, 5), dict(enable_nested_tensor=False)),
    ],
    ids=["padded", "empty", "whole", "unaligned", "unchecked", "number", "not nested"],
)
@pytest.mark.default_cases(
    "padded-False", "padded-True", "empty-False", "unaligned-False", "number-False", "not nested-True"
)
def test_encoder_in_evaluation(mask, options, norm):
    """Without gradients PyTorch converts to nested tensors, and gives zeros at padding."""
    reference = encoder(norm, **options).eval()
    model, x = compiled(copy.deepcopy(reference), None), torch.randn(B, T, D)
    with torch.no_grad():
        assert_close(model(x, src_key_padding_mask=mask) + 0, reference(x, src_key_padding_mask=mask))
    assert [program.kind for program in model.programs] == ["forward"] and not model._graphacc_engine.by_pytorch.counts


class Inside(nn.Module):
    """The encoder behind a layer that is trained."""

    def __init__(self):
        super().__init__()
        self.linear, self.encoder = nn.Linear(D, D), encoder()

    def forward(self, x, src_key_padding_mask=None):
        return self.encoder(self.linear(x), src_key_padding_mask=src_key_padding_mask)


@pytest.mark.parametrize("strategy", [None, "dp=2"])
@pytest.mark.parametrize("make", [encoder, Inside])
@pytest.mark.default_cases("Inside-dp=2")
def test_encoder_in_a_loop(make, strategy):
    """Training, and evaluation with gradients and without: only the latter converts."""
    reference = make()
    model = compiled(copy.deepcopy(reference), strategy)
    batches = [torch.randn(B, T, D) for _ in range(2)]
    check_both(reference, model, lambda one, step: one(batches[step], src_key_padding_mask=padding(3, 5)).abs().mean(), steps=2)
    reference.eval(), model.eval()
    for grad, mask in ((False, padding(3, 5)), (True, padding(5, 5)), (True, padding(3, 5)), (False, padding(4, 2)), (True, padding(4, 5))):
        with torch.set_grad_enabled(grad):
            got, expected = model(batches[0], src_key_padding_mask=mask), reference(batches[0], src_key_padding_mask=mask)
        assert_close(got.detach() + 0, expected.detach(), tolerance=1e-4)
    assert not model._graphacc_engine.by_pytorch.counts


class Frozen(nn.Module):
    """A head on an encoder in evaluation, whose weights are not trained."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder().requires_grad_(False).eval(), nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.encoder(x, src_key_padding_mask=padding(3, 5))).square().mean()


def test_a_frozen_encoder_converts_with_gradients_too():
    reference, x = Frozen(), torch.randn(B, T, D)
    model = compiled(copy.deepcopy(reference), None, capture="fx")
    check_both(reference, model, lambda one, step: one(x), steps=2)


def test_encoder_asks_the_setting_of_the_fast_path():
    reference = encoder().eval()
    model, x = compiled(copy.deepcopy(reference), None), torch.randn(B, T, D)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert_close(model(x, src_key_padding_mask=padding(3, 5)) + 0, reference(x, src_key_padding_mask=padding(3, 5)))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_classes_of_torch_are_as_before():
    forwards = nn.TransformerEncoder.forward, nn.BatchNorm1d.forward
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    capture_forward(model, lambda m, leaves: (None, [m(leaves[0])]), Batch(leaves=(torch.randn(4, 3),), paths=("args[0]",)))
    assert forwards == (nn.TransformerEncoder.forward, nn.BatchNorm1d.forward)
    assert "forward" not in vars(nn.BatchNorm1d) and vars(nn.TransformerEncoder)["forward"] is forwards[0]
