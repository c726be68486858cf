"""What a failed capture says: the reason is the one that holds, not one that looks like it."""

import pytest
import torch
from torch import nn

from graphacc.capture import Batch, capture_joint
from graphacc.errors import CaptureError


class Inference(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.inference_mode():
            scale = self.linear(x).mean()
        return (self.linear(x) * scale.clone()).mean()


class ReadsValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).mean() * self.linear.bias.sum().item()


def refusal(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_joint(model, lambda module, leaves: (module(*leaves), []), Batch(leaves=(torch.randn(2, 4),), paths=("args[0]",)))
    return str(caught.value)


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch.fx follows it")
def test_inference_mode_is_named():
    said = refusal(Inference())
    assert "operation: torch.inference_mode()" in said and "write torch.no_grad() in its place" in said and "self.linear(x)" in said
    assert "NumPy" not in said and "weakref" not in said


def test_the_check_for_nan_of_anomaly_mode_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten(0), nn.Linear(8, 1))
    with torch.autograd.set_detect_anomaly(True):
        said = refusal(model)
        assert "set_detect_anomaly" in said and ".item()" not in said
        assert ".item()" in refusal(ReadsValue()), "the code's own reading of a value"
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        capture_joint(model, lambda module, leaves: (module(*leaves), []), Batch(leaves=(torch.randn(2, 4),), paths=("args[0]",)))
