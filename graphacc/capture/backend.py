"""The ways to capture: the model, the loss and the optimizer are the same code, what records it differs."""

import dataclasses
from collections.abc import Callable

from graphacc.capture.stitch import joined
from graphacc.capture.tracing import trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What records a program, and what joins two recordings."""

    name: str  # "fx" or "lazy"
    trace: Callable  # see graphacc.capture.tracing.trace
    joined: Callable  # see graphacc.capture.stitch.joined
    device_type: str  # of the tensors that stand for the inputs
    replicates: bool  # an optimizer is recorded for one parameter of a kind, and copied for the others


FX = Backend(name="fx", trace=trace, joined=joined, device_type="cpu", replicates=True)
"""ATen operators in a torch.fx graph: a StepGraph."""
