"""Capture by PyTorch/XLA's lazy tensors: the model's own code runs on tensors that record HLO, and nothing is executed.

It follows what torch.fx cannot: every tensor is an ordinary torch.Tensor with views, mutation and autograd in C++. It gives an
`HloStep`, which has no operators of torch's any more: passes on StepGraphs do not apply to it.
"""

from graphacc.capture.backend import Backend
from graphacc.capture.lazy.dispatch import ValueNeeded
from graphacc.capture.lazy.shapes import infer_call
from graphacc.capture.lazy.trace import trace
from graphacc.capture.lazy.xla import DEVICE, installed
from graphacc.hlo import joined

LAZY = Backend(name="lazy", trace=trace, joined=joined, device_type=DEVICE, replicates=False)
"""HLO, recorded by lazy tensors: an HloStep."""

__all__ = ["LAZY", "ValueNeeded", "infer_call", "installed"]
