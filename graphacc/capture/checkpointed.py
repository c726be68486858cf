"""What the user's model gives to torch.utils.checkpoint, as marks on the calls that are recorded there.

The function runs once, and its calls get a `Checkpointed`; `passes/remat` lets backward compute them again. Checkpointed functions inside of
another one belong to it. A policy (``create_selective_checkpoint_contexts``) is asked about every ATen operator, as PyTorch asks it; attention,
which is recorded whole, is kept where the policy keeps any of PyTorch's kernels for it.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphacc._compat.torch_ import annotate_nodes, annotation
from graphacc.capture.guards import written_once
from graphacc.graph import CHECKPOINT, Checkpointed

Policy = Callable[[object, tuple, dict], bool]
"""(operator, args, kwargs) -> whether its results are kept for backward."""

aten = torch.ops.aten
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


class Checkpoints:
    """The checkpointed functions of one capture.

    Args:
        model: its buffers are watched, since PyTorch would write them twice.
        marks: whether what is recorded can be marked; the backends that cannot do that keep everything, which is said.
    """

    def __init__(self, model: nn.Module, marks: bool):
        self.model, self.marks = model, marks
        self._count = 0

    @contextlib.contextmanager
    def __call__(self, policy: Policy | None) -> Iterator[None]:
        """A function that is given to torch.utils.checkpoint runs inside."""
        if not self.marks:
            warnings.warn(
                "torch.utils.checkpoint has no effect on a step that is captured by lazy tensors: what is kept for backward is XLA's choice",
                stacklevel=2,
            )
        with written_once(self.model):
            if not self.marks or CHECKPOINT in annotation():
                yield
                return
            mark = Checkpointed(region=f"checkpoint {self._count}")
            self._count += 1
            with _marked(mark), contextlib.nullcontext() if policy is None else _Asking(policy, mark.region):
                yield


@contextlib.contextmanager
def _marked(mark: Checkpointed) -> Iterator[None]:
    """Nodes traced in the block carry a mark; `SourceMode` hands it on."""
    annotate_nodes({**annotation(), CHECKPOINT: mark})
    try:
        yield
    finally:
        annotate_nodes({key: value for key, value in annotation().items() if key != CHECKPOINT})


class _Asking(TorchDispatchMode):
    """Marks what a policy keeps."""

    def __init__(self, policy: Policy, region: str):
        super().__init__()
        self.policy, self.region = policy, region

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = _ATTENTION if func is torch.ops.graphacc.sdpa.default else (func,)
        before = annotation()
        annotate_nodes({**before, CHECKPOINT: Checkpointed(region=self.region, saved=any(self.policy(item, args, kwargs) for item in asked))})
        try:
            return func(*args, **kwargs)
        finally:
            annotate_nodes(before)
