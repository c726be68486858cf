"""Promises: tensors that stand for values which a compiled program has yet to compute.

A torch function on a promise is recorded on its tape and gives new promises, with shapes and dtypes from fake tensors.
A function that needs the value itself (``item``, ``print``, ``bool``) makes the engine run what is needed. What cannot be
recorded is run by PyTorch on values: where gradients have to flow through it, the tape's calls are run by PyTorch first, so that
the values are ordinary results of autograd (see `ByPyTorch.run`).
"""

import functools
import itertools
import sys
import typing
import weakref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import SEES_APPLY, applied_functions, output_of_function
from graphacc.errors import CaptureError, LoopError
from graphacc.loop import managed, trees

if typing.TYPE_CHECKING:
    from graphacc.loop.tape import Tape


class NotRecorded(Exception):
    """A call that cannot be part of a recording; the message says why."""


_READS_VALUE = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__repr__,
        Tensor.__format__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__bool__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__contains__,
        Tensor.__reduce_ex__,
        Tensor.__deepcopy__,
        Tensor.__dlpack__,
        Tensor.untyped_storage,
        Tensor.data_ptr,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    }
)


_GIVES_MEMORY = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage, Tensor.data_ptr})
"""Those that give access to the memory."""

_NEEDS_AUTOGRAD = frozenset(
    {
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.retain_grad,
        torch.autograd.grad,
    }
)
"""Functions that work on autograd's own graph."""


_DRAWS_LIKE = frozenset({torch.rand_like, torch.randn_like, torch.randint_like})
"""Functions that draw numbers and look at shape, dtype and device alone: what the loop draws is PyTorch's."""

_FLAG, _NODE, _LEAF = (typing.cast(typing.Any, getattr(Tensor, name)) for name in ("requires_grad", "grad_fn", "is_leaf"))

_GRAD_FLAG = frozenset({Tensor.requires_grad_, _FLAG.__set__})
"""They make a tensor a leaf of autograd's own graph."""

_SHOWS_GRAPH = _GRAD_FLAG | frozenset(
    {_FLAG.__get__, _NODE.__get__, _LEAF.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.backward, torch.autograd.grad}
)
"""Functions by which the loop sees whether there is a way back from a tensor."""


_ATTRIBUTES = ("requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim")
_WITHOUT_GRADIENT = frozenset({Tensor.data.__get__, Tensor.data.__set__, Tensor.detach, *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)})


class Promise(Tensor):
    """A tensor whose value a tape holds, or will hold once a program has run.

    For autograd's own graph it is a leaf. Only a torch.autograd.Function that the loop applies comes there, as it calls no torch
    function: see `_record_applied` and `_gradient_from_autograd`.
    """

    tape: "Tape"
    _output: int | None = None  # the index, if it is known as a result of a torch.autograd.Function that the loop has applied

    @staticmethod
    def __new__(cls, tape: "Tape", index: int):
        fake = tape.values[index]
        self = Tensor._make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad
        )
        if fake.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(functools.partial(_gradient_from_autograd, tape, index))
        self.bind(tape, index)
        return self

    def __init__(self, tape: "Tape", index: int):
        super().__init__()

    @classmethod
    def take_over(cls, tensor: Tensor) -> Tensor:
        """Make a plain tensor, under whatever names the loop has it, a promise that `bind` has to follow; returns another tensor with what it was.

        Raises:
            RuntimeError: something in C++ or a weak reference holds the tensor.
        """
        with torch._C.DisableTorchFunctionSubclass():
            other = Tensor._make_wrapper_subclass(cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            torch.utils.swap_tensors(tensor, other)
        return other

    def as_subclass(self, cls: type) -> Tensor:
        """As `Tensor.as_subclass`, which calls no torch function."""
        return typing.cast(Tensor, run_function(_as_subclass, (self, cls), {}))

    def bind(self, tape: "Tape", index: int) -> None:
        """Stand for a value of `tape`."""
        self.tape = tape
        self._index = index
        tape.promises[index] = weakref.ref(self)

    @property
    def index(self) -> int:
        """Of the value on the tape."""
        if SEES_APPLY and not self.tape.applied:
            return self._index
        results = self.tape.applied.get(self._index)
        if (results is not None or not SEES_APPLY) and self._index != self._output and (output := output_of_function(self)) is not None:
            if results is None:
                raise LoopError(
                    f"a torch.autograd.Function was applied to results of the model, of which torch {torch.__version__} does not say with which arguments: apply it in the model's "
                    "forward, or let its forward be a plain function whose first argument is the context"
                )
            self.tape.promises.pop(self._index)
            self.bind(self.tape, results[output])
            self._output = self._index
        return self._index

    @property
    def requires_gradient(self) -> bool:
        """Whether a gradient flows back from here into a recording, which is open or has a way back besides that of its backward."""
        tape, index = self.tape, self.index
        if tape.is_eager or not tape.values[index].requires_grad:
            return False
        return not tape.closed if tape.backward_at is None else tape.engine.ways_back.remains(tape, index)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return run_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = to_values(args, kwargs or {})
        return func(*args, **kwargs)


trees.are_leaves(Promise)


def run_function(func, args: tuple, kwargs: dict):
    """Run a torch function some of whose arguments are promises or managed tensors: record it, or run it on values."""
    if func in _DRAWS_LIKE:
        like, *rest = args or (kwargs.pop("input"),)
        if isinstance(like, Promise) and not like.tape.engine.programs.local_batch:  # there a program draws for the rows of all processes
            fake = like.tape.values[like.index]
            return func(torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device), *rest, **kwargs)
        args = like, *rest
    leaves, spec = trees.flatten_call(args, kwargs)
    if func in _WITHOUT_GRADIENT or func in _SHOWS_GRAPH:
        _check_inputs_of_backward(args[0])
    if args and type(args[0]) is Promise and (tape := args[0].tape).goes_on and (followed := tape.follow(func, leaves, spec)) is not None:
        return followed
    tapes = open_tapes(func, leaves)
    if not tapes:
        _keep_way_back(func, leaves)
        if func is Tensor.backward:
            _check_way_back(args[0])
        elif func in _NEEDS_AUTOGRAD:
            _check_hooked(func, args, kwargs)
        return run_on_values(func, args, kwargs)
    if tapes[-1].engine.capturing:
        raise CaptureError(f"the model's code reads a result of an earlier call ({getattr(func, '__name__', func)}) that no attribute of a module holds")
    if func in _READS_VALUE:
        result = run_on_values(func, args, kwargs)
        if func in _GIVES_MEMORY and isinstance(args[0], Promise):
            args[0].tape.give_out(args[0].index)
        return result
    if func is Tensor.grad.__get__:
        return None  # a result of the model, whose gradient nobody asked to keep
    if func in _GRAD_FLAG and isinstance(args[0], Promise) and args[0].tape.values[args[0].index].requires_grad and all((*args[1:], *kwargs.values())):
        return args[0]  # it does already
    try:
        if func is Tensor.backward:
            return args[0].tape.backward(*args, **kwargs)
        tape = _recording_tape(func, leaves, tapes)
        applied = None if torch.is_grad_enabled() else _record_applied(tape, leaves)
        if applied is None and not SEES_APPLY and func is Tensor.view_as and args[0] is args[1] and not torch.is_grad_enabled():
            raise NotRecorded("a torch.autograd.Function gives back its argument")  # `apply` makes this view when the forward has ended
        result = tape.record(func, args, kwargs, flattened=(leaves, spec))
    except NotRecorded as reason:
        return _by_pytorch(func, args, kwargs, tapes, str(reason))
    if applied is not None:
        made = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Promise) and all(leaf is not other for other in leaves))
        tape.applied |= {leaf.index: applied for leaf in made}
    return result


def _record_applied(tape: "Tape", leaves: list) -> "tuple[int | None, ...] | None":
    """Record a torch.autograd.Function as one call, when its forward, which autograd runs without gradients, makes a first result.

    Without this only the operators of its forward would be on the tape, and no gradient.

    Returns:
        The values of its results, which those that its forward returns stand for; None outside of one.

    Raises:
        NotRecorded: torch does not say with which arguments it is applied.
    """
    promises = [leaf for leaf in leaves if isinstance(leaf, Promise) and leaf.tape is tape]
    inside = next((tape.applied[leaf.index] for leaf in promises if leaf.index in tape.applied), None)
    if inside is not None or not any(leaf.requires_gradient for leaf in promises):
        return inside
    for applied in applied_functions():
        if applied.call is None:
            raise NotRecorded("a torch.autograd.Function is applied to it whose arguments are not known")
        function, args, kwargs = applied.call
        given = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Promise) and leaf.tape is tape and leaf.requires_gradient for leaf in given):
            if tape.applied_frame is applied.frame:
                return tape.applied_results
            with torch.enable_grad():
                result = _recording_tape(function.apply, given, [tape]).record(function.apply, args, kwargs)
            results = result if isinstance(result, tuple) else (result,)
            tape.applied_frame, tape.applied_results = applied.frame, tuple(leaf.index if isinstance(leaf, Promise) else None for leaf in results)
            return tape.applied_results
    return None


def _gradient_from_autograd(tape: "Tape", index: int, gradient: Tensor) -> None:
    """A gradient for a promise comes from autograd's own graph: PyTorch runs the tape's calls, and the gradient flows on through those."""
    if isinstance(gradient, Promise):
        gradient = gradient.tape.value(gradient.index)
    is_start = _is_start(tape, index)
    if not tape.closed or (tape.backward_at is not None and tape.engine.ways_back.remains(tape, index)):
        what = "torch.autograd.backward() begins at" if is_start else "a torch.autograd.Function gives a gradient to"
        tape.engine.by_pytorch.run(tape, f"{what} a result of the model")
    if not tape.is_eager:
        raise _no_way_back(tape, index)
    value = tape.value(index)
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if value.requires_grad:
                value.backward(gradient, retain_graph=True)
        except RuntimeError as error:
            if is_start:
                raise
            raise LoopError(
                "backward() went through the model before the gradient of a torch.autograd.Function that the loop applied to its result was there: "
                "apply the Function in the model's forward, or give it a result that nothing else uses"
            ) from error


def _check_inputs_of_backward(tensor: Tensor) -> None:
    """Refuse ``torch.autograd.backward(tensors, inputs=...)``, which calls no torch function: autograd would go on the way to `inputs` alone, which does not lead through promises.

    Raises:
        LoopError: it looks at a promise, before it begins.
    """
    frame, depth = sys._getframe(3), 0  # behind `run_function` and `Promise.__torch_function__`
    while frame is not None and depth < 2:
        if frame.f_code is torch.autograd.backward.__code__:
            if frame.f_locals["inputs"] is not None and any(tensor is leaf for leaf in pytree.tree_leaves(frame.f_locals["tensors"])):
                raise LoopError(
                    "torch.autograd.backward(tensors, inputs=...) over a result of a compiled model cannot be followed: call loss.backward(inputs=...) on the sum of the losses, or "
                    "torch.autograd.grad(losses, inputs)"
                )
            return
        frame, depth = frame.f_back, depth + 1


def _is_start(tape: "Tape", index: int) -> bool:
    """Whether ``torch.autograd.backward(tensors)``, which the caller runs in, begins at a value."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    given = pytree.tree_leaves(frame.f_locals["tensors"]) if frame is not None else []
    return any(isinstance(leaf, Promise) and leaf.tape is tape and leaf.index == index for leaf in given)


def _recording_tape(func, leaves: list, tapes: "list[Tape]") -> "Tape":
    """The newest open recording, if no gradient has to flow into another."""
    if func in _NEEDS_AUTOGRAD or func in _GRAD_FLAG:
        raise NotRecorded("it works on autograd's own graph")
    if func is _as_subclass:
        raise NotRecorded("its result is no plain tensor")
    tape = tapes[-1]
    if torch.is_grad_enabled() and any(isinstance(leaf, Promise) and leaf.tape is not tape and leaf.requires_gradient for leaf in leaves):
        raise NotRecorded("it joins results of calls that were recorded separately")
    return tape


def _by_pytorch(func, args: tuple, kwargs: dict, tapes: "list[Tape]", reason: str):
    leaves = trees.leaves((args, kwargs))
    flows = torch.is_grad_enabled() and func not in _WITHOUT_GRADIENT and any(
        leaf.requires_gradient if isinstance(leaf, Promise) else managed.handle_of(leaf) is not None and leaf.requires_grad for leaf in leaves
    )
    overwritten = trees.leaves(managed.written_by_name(func, args, kwargs))
    flows = flows or func in _NEEDS_AUTOGRAD or func in _GRAD_FLAG or func is Tensor.backward
    _keep_way_back(func, leaves)
    begins = args[0] if func is Tensor.backward and isinstance(args[0], Promise) else None
    for tape in tapes:
        apart = begins is not None and begins.tape is tape and tape.backward_at is None and tape.engine.ways_back.others_remain(tape, begins.index)
        if func in _NEEDS_AUTOGRAD or apart:
            tape.engine.by_pytorch.run(tape, f"{getattr(func, '__name__', 'a function')}: {reason}")
        elif (flows and tape.backward_at is None) or func is Tensor.backward:
            tape.engine.by_pytorch.make_differentiable(tape, f"{getattr(func, '__name__', 'a function')}: {reason}")
        elif any(isinstance(leaf, Promise) and leaf.tape is tape for leaf in overwritten):
            tape.engine.by_pytorch.finish(tape, f"{getattr(func, '__name__', 'a function')}: {reason}")
    return run_on_values(func, args, kwargs)


def _check_hooked(func, args: tuple, kwargs: dict) -> None:
    looked_at = args[:1]
    if func is torch.autograd.grad:
        looked_at = kwargs["inputs"] if "inputs" in kwargs else args[1] if len(args) > 1 else ()
    for leaf in pytree.tree_leaves(looked_at):
        if isinstance(leaf, Promise) and leaf.tape.region is not None:
            leaf.tape.region.check_hooked(leaf.index, getattr(func, "__name__", "looking at a gradient"))


def _keep_way_back(func, leaves: list) -> None:
    """Before a function whose gradient flows on: recordings that have had their backward, and from whose values there is another way back, become ordinary results of autograd."""
    if not torch.is_grad_enabled() or func in _WITHOUT_GRADIENT or func in _READS_VALUE:
        return
    for leaf in leaves:
        if isinstance(leaf, Promise) and leaf.tape.backward_at is not None and leaf.requires_gradient:
            leaf.tape.engine.by_pytorch.run(leaf.tape, f"{getattr(func, '__name__', 'a function')}: it goes another way back than the backward() of the recording")


def _check_way_back(loss: Tensor) -> None:
    if isinstance(loss, Promise) and not loss.tape.is_eager and loss.tape.values[loss.index].requires_grad:
        raise _no_way_back(loss.tape, loss.index)


def _no_way_back(tape: "Tape", index: int) -> Exception:
    """Why there is no backward() through a value of a recording that has ended."""
    if tape.overwritten is not None:
        return written_too_early(tape.overwritten)
    if tape.backward_at is not None and tape.engine.ways_back.is_open(tape, index) is False:
        return freed()
    return LoopError(
        "backward() comes to a result of a model call after an optimizer's step, which has run: the parameters that the call was made with are gone, with which PyTorch would go "
        "back (or raise an error, where the step changed what autograd saved). Call backward() before the step, call the model again, or add the losses and call backward() once"
    )


def freed() -> RuntimeError:
    return RuntimeError(
        "Trying to backward through the graph a second time: PyTorch has freed what the first backward() saved; say retain_graph=True there, call the model again, or add the "
        "losses and call backward() once"
    )


def written_too_early(name: str) -> LoopError:
    return LoopError(
        f"{name!r} was written between the model's call and backward() or optimizer.step(), but the compiled step runs the call "
        "only then: write parameters and buffers before the call or after the step"
    )


def open_tapes(func, leaves: list) -> "list[Tape]":
    """The recordings that a function on these leaves may belong to, oldest first.

    One of parameters alone belongs there for its gradient. Without one, as that of ``p.detach()``, it is run on values: what it gives may be the parameter's own memory.
    So is one that changes a parameter itself, as ``p.requires_grad_(False)``.
    """
    tapes = {leaf.tape.serial: leaf.tape for leaf in itertools.compress(leaves, map(isinstance, leaves, itertools.repeat(Promise))) if not leaf.tape.closed}
    if tapes:
        return [tapes[serial] for serial in sorted(tapes)] if len(tapes) > 1 else list(tapes.values())
    if not torch.is_grad_enabled() or func in _WITHOUT_GRADIENT or managed.writes_by_name(func):
        return []
    for leaf in leaves:
        handle = managed.handle_of(leaf)
        if handle is not None and handle.trains and handle.engine.records(handle):
            return [handle.engine.tape]
    return []


def run_on_values(func, args: tuple, kwargs: dict):
    """Let PyTorch run a function on values, which it may write into."""
    args, kwargs = managed.settled(args, kwargs)
    managed.prepare(func, args, kwargs)
    if func in _SHOWS_GRAPH:
        args, kwargs = trees.map_only(Promise, _value_in_graph, (args, kwargs))
    args, kwargs = managed.plain_while_capturing(func, *to_values(args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _as_subclass(tensor: Tensor, cls: type) -> Tensor:
    return tensor.as_subclass(cls)


def to_values(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same arguments with values in the place of promises."""
    return trees.map_only(Promise, _value, (args, kwargs))


def _value(promise: Promise) -> Tensor:
    tape, index = promise.tape, promise.index
    value = tape.value(index)
    if (tape.overwritten is not None or index in tape.without_way_back) and torch.is_grad_enabled() and tape.values[index].requires_grad and not tape.is_eager:
        return without_way_back(tape, index, value)
    return value


def _value_in_graph(promise: Promise) -> Tensor:
    """A value as autograd has it: one that requires a gradient has a node, also where no backward() can go through it any more."""
    tape, index = promise.tape, promise.index
    value = tape.value(index)
    if tape.values[index].requires_grad and not tape.is_eager and not torch.is_inference_mode_enabled():
        return without_way_back(tape, index, value)
    return value


def without_way_back(tape: "Tape", index: int, value: Tensor) -> Tensor:
    """A value as a result of autograd through which no backward() goes."""
    anchor = torch.empty(0, requires_grad=True)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return typing.cast(Tensor, _WithoutWayBack.apply(anchor, [value], tape, index))


class _WithoutWayBack(torch.autograd.Function):
    """Says in backward why there is no way back."""

    @staticmethod
    def forward(ctx, anchor: Tensor, held: list[Tensor], tape: "Tape", index: int) -> Tensor:
        ctx.why = _no_way_back(tape, index)
        return held[0].data  # no view, into which PyTorch would let nobody write

    @staticmethod
    def backward(ctx, gradient: Tensor):
        raise ctx.why
