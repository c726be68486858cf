"""What a call of the model would return, found by running it on lazy tensors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import compiling, decided_branches
from graphacc.capture import objects
from graphacc.capture.attention import whole_attention
from graphacc.capture.borrow import Tags, borrowed, structure_kept
from graphacc.capture.diagnose import explained
from graphacc.capture.functions import WrittenOut
from graphacc.capture.guards import counts_nothing
from graphacc.capture.lazy import xla
from graphacc.capture.lazy.dispatch import LazyMode
from graphacc.capture.lazy.rewrites import Rewrites
from graphacc.capture.tracing import KEY
from graphacc.errors import CaptureError


def infer_call(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    attributes: Mapping[str, Tensor],
    args: tuple,
    kwargs: dict,
    *,
    fake: Callable[[Tensor], Tensor],
    watching: contextlib.AbstractContextManager,
    placed: Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager],
    check: Callable[[Mapping[str, object]], None],
):
    """The result of ``model(*args, **kwargs)`` with the right shapes and dtypes; the model keeps its tensors, and has the attributes that the call gives it.

    Args:
        tensors: every parameter and buffer under all its names; only shape, dtype and requires_grad are read, as of the
            tensors in `attributes`, `args` and `kwargs`. A tied tensor is one object.
        attributes: further tensors that modules hold, by label.
        fake: makes the tensor of the result from one on the meta device.
        watching: a mode that sees the operators as the model calls them.
        placed: gives the modules others in the place of `attributes` for a while, which it yields.
        check: looks at what they hold after the call.

    Returns:
        The result; (args, kwargs) as the model has left them, in which a tensor that was given is itself; and the tensors of all that it has written into.

    Raises:
        CaptureError: the model cannot be recorded; names the user's line.
    """
    with explained(f"the model {type(model).__name__}"), xla.tracing(), _counting_versions(), contextlib.ExitStack() as stack:
        leaves = [x for x in pytree.tree_leaves((dict(tensors), dict(attributes), args, kwargs)) if isinstance(x, Tensor)]
        lazy = {id(x): _placeholder(x) for x in leaves}
        given = {id(lazy[id(x)]): x for x in leaves}
        key = xla.placeholder(KEY.shape, KEY.dtype)
        for context in (borrowed(model), compiling(), whole_attention(), WrittenOut()):
            stack.enter_context(context)
        stack.enter_context(decided_branches(packed_sequences="position_ids" in kwargs, checkpointed=lambda policy: counts_nothing(model)))
        stack.enter_context(LazyMode([*lazy.values(), key], key))
        stack.enter_context(Rewrites())
        stack.enter_context(watching)
        own = {name: lazy[id(x)] for name, x in tensors.items()}
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: lazy[id(x)], (args, kwargs))
        held = stack.enter_context(placed({label: lazy[id(x)] for label, x in attributes.items()}))
        before = [(module, dict(vars(module))) for module in model.modules()]
        versions = [(tensor, tensor._version) for tensor in lazy.values()]
        tags = Tags(lazy.values())
        with structure_kept(model):
            result = torch.func.functional_call(model, own, args, kwargs)
        tags.check_kept(leaf for leaf in objects.flatten((result, args, kwargs))[0] if isinstance(leaf, Tensor))
        check(held)
        if changed := [name for name, tensor in own.items() if tensor.requires_grad != tensors[name].requires_grad]:
            raise CaptureError(f"the forward changes requires_grad of {changed[0]!r}, which a compiled program does not do: do it before the loop")
        written_into = [given[id(tensor)] for tensor, version in versions if tensor._version != version]
        deleted = [known.keys() - vars(module).keys() for module, known in before]
        written = [{name: value for name, value in vars(module).items() if value is not known.get(name, known)} for module, known in before]

    def described(tree: object):
        return objects.map_only(Tensor, lambda x: given[id(x)] if id(x) in given else _described(x, fake), tree)

    for (module, _), values, names in zip(before, written, deleted, strict=True):
        vars(module).update(described(values))
        for name in names:
            del vars(module)[name]
    return *described((result, (args, kwargs))), written_into


@contextlib.contextmanager
def _counting_versions() -> Iterator[None]:
    """Tensors made inside have version counters, which those of inference mode lack; nothing else changes."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):  # the first one switches gradients on
        yield


def _placeholder(like: Tensor) -> Tensor:
    return xla.placeholder(like.shape, like.dtype).requires_grad_(like.requires_grad)


def _described(lazy: Tensor, fake: Callable[[Tensor], Tensor]) -> Tensor:
    meta = torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta")
    return fake(meta).requires_grad_(lazy.requires_grad)
