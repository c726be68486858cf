"""What a call of the model would return, found by running it on lazy tensors."""

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import compiling, decided_branches
from graphacc.capture import objects
from graphacc.capture.attention import whole_attention
from graphacc.capture.borrow import borrowed
from graphacc.capture.diagnose import explained
from graphacc.capture.functions import WrittenOut
from graphacc.capture.lazy import xla
from graphacc.capture.lazy.dispatch import LazyMode
from graphacc.capture.lazy.rewrites import Rewrites
from graphacc.capture.tracing import KEY


def infer_call(
    model: nn.Module, tensors: Mapping[str, Tensor], args: tuple, kwargs: dict, fake: Callable[[Tensor], Tensor], watching: contextlib.AbstractContextManager
):
    """The result of ``model(*args, **kwargs)`` with the right shapes and dtypes; the model stays as it is.

    Args:
        tensors: every parameter and buffer under all its names; only shape, dtype and requires_grad are read, as of the
            tensors in `args` and `kwargs`. A tied tensor is one object.
        fake: makes the tensor of the result from one on the meta device.
        watching: a mode that sees the operators as the model calls them.

    Returns:
        The result, and (args, kwargs) as the model has left them, in which a tensor that was given is itself.

    Raises:
        CaptureError: the model cannot be recorded; names the user's line.
    """
    with explained(f"the model {type(model).__name__}"), xla.tracing(), contextlib.ExitStack() as stack:
        lazy = {id(x): _placeholder(x) for x in pytree.tree_leaves((dict(tensors), args, kwargs)) if isinstance(x, Tensor)}
        given = {id(lazy[id(x)]): x for x in pytree.tree_leaves((dict(tensors), args, kwargs)) if isinstance(x, Tensor)}
        key = xla.placeholder(KEY.shape, KEY.dtype)
        for context in (borrowed(model), compiling(), whole_attention(), WrittenOut()):
            stack.enter_context(context)
        stack.enter_context(decided_branches(packed_sequences="position_ids" in kwargs))
        stack.enter_context(LazyMode([*lazy.values(), key], key))
        stack.enter_context(Rewrites())
        stack.enter_context(watching)
        own = {name: lazy[id(x)] for name, x in tensors.items()}
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: lazy[id(x)], (args, kwargs))
        result = torch.func.functional_call(model, own, args, kwargs)
    return objects.map_only(Tensor, lambda x: given[id(x)] if id(x) in given else _described(x, fake), (result, (args, kwargs)))


def _placeholder(like: Tensor) -> Tensor:
    return xla.placeholder(like.shape, like.dtype).requires_grad_(like.requires_grad)


def _described(lazy: Tensor, fake: Callable[[Tensor], Tensor]) -> Tensor:
    meta = torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta")
    return fake(meta).requires_grad_(lazy.requires_grad)
