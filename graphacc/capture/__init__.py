"""Capture: nn.Module and optimizer in, StepGraph (or HloStep) out."""

from graphacc._compat.torch_ import PATCHING
from graphacc.capture.backend import FX, Backend
from graphacc.capture.model import Batch, ForwardFn, capture_forward, capture_joint, capture_vjp
from graphacc.capture.optimizer import hyperparameters, init_optimizer_state
from graphacc.capture.stitch import stitch
from graphacc.capture.update import Transform, capture_gradients, capture_update

__all__ = [
    "FX",
    "PATCHING",
    "Backend",
    "Batch",
    "ForwardFn",
    "Transform",
    "capture_forward",
    "capture_gradients",
    "capture_joint",
    "capture_update",
    "capture_vjp",
    "hyperparameters",
    "init_optimizer_state",
    "stitch",
]
