"""A model that cannot be captured: the error names the user's line, the operation, the reason and the remedy."""

import pytest
import torch
from capturing import batch_of, joint_of
from torch import nn

from graphacc.capture import capture_joint
from graphacc.errors import CaptureError

X = torch.ones(8, 4)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        if x.sum() > 0:  # THE LINE
            return (x @ self.weight).sum()
        return self.weight.sum()


class Item(Branch):
    def forward(self, x):
        return (x @ self.weight).sum() * x.mean().item()  # THE LINE


class ToList(Branch):
    def forward(self, x):
        return (x @ self.weight).sum() * x[0].tolist()[0]  # THE LINE


class Mask(Branch):
    def forward(self, x):
        return (x[x[:, 0] > 0] @ self.weight).sum()  # THE LINE


class Nonzero(Branch):
    def forward(self, x):
        return (x @ self.weight).sum() * torch.nonzero(x).shape[0]  # THE LINE


class Numpy(Branch):
    def forward(self, x):
        return (x @ self.weight).sum() * float(x.numpy().sum())  # THE LINE


class Bug(Branch):
    def forward(self, x):
        return (x @ torch.ones(3, 3)).sum()  # THE LINE


class Nested(nn.Module):
    """The failing line is in a submodule, below torch's own code."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Identity(), Item())

    def forward(self, x):
        return self.net(x)


class WrittenRows(nn.Module):
    """Fails in backward, which asks how many rows were written."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        hidden = (x @ self.weight).relu()
        order = hidden.sum(1)
        hidden = hidden.clone()
        hidden[order > order.median()] = x[:4] @ self.weight  # THE LINE
        return hidden.tanh().sum()


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return torch.distributions.Normal(self.linear(x), 1.0).log_prob(x[:, :2]).sum()  # THE LINE


VALUE = "it needs the value of a tensor while the step is captured"
SHAPE = "the shape of its result depends on the values of a tensor"


@pytest.mark.parametrize(
    "model, operation, why",
    [
        (Branch, "aten._local_scalar_dense", VALUE),
        (Item, "aten._local_scalar_dense", VALUE),
        (ToList, "aten._local_scalar_dense", VALUE),
        (Nested, "aten._local_scalar_dense", VALUE),
        (Mask, "aten.nonzero", SHAPE),
        (Nonzero, "aten.nonzero", SHAPE),
        (WrittenRows, "aten.nonzero", SHAPE),
        (Numpy, "numpy", "it leaves torch"),
        (Gaussian, "the check of a distribution", "by values that follow from the model's parameters"),
        (Bug, "RuntimeError", "the code raised an error"),
    ],
)
def test_error_names_line_operation_reason_and_remedy(model, operation, why, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile, in another test of this process, sets it to False for good
    model = model()
    with pytest.raises(CaptureError) as caught:
        joint_of(model, {"x": X})
    message = str(caught.value)
    assert f"the model {type(model).__name__} cannot be captured" in message
    assert "test_capture_errors.py" in message and "# THE LINE" in message
    for part in (operation, why, "remedy: "):
        assert part in message


@pytest.mark.parametrize("model", [Branch, Mask, Bug])
def test_model_is_untouched_after_an_error(model):
    model = model()
    weight, copy, attributes = model.weight, model.weight.clone(), dict(vars(model))
    with pytest.raises(CaptureError):
        joint_of(model, {"x": X})
    assert model.weight is weight and torch.equal(weight, copy) and vars(model) == attributes
    if isinstance(model, Bug):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(X)
    else:
        assert model(X).requires_grad
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize(
    "forward, message",
    [
        (lambda m, leaves: (None, []), "the loss is None, not a tensor"),
        (lambda m, leaves: (leaves[0] @ m.weight, []), r"the loss has shape \[8, 4\], but only a scalar"),
        (lambda m, leaves: (leaves[0].sum(), []), "does not depend on any parameter that requires a gradient"),
        (
            lambda m, leaves: ((leaves[0] @ m.weight).sum().detach(), []),
            "does not depend on any parameter that requires a gradient",
        ),
    ],
)
def test_losses_that_cannot_be_differentiated(forward, message):
    with pytest.raises(CaptureError, match=message):
        capture_joint(Branch(), forward, batch_of({"x": X}))


def test_unknown_precision():
    with pytest.raises(CaptureError, match="precision='fp8' is unknown"):
        joint_of(Branch(), {"x": X}, precision="fp8")
