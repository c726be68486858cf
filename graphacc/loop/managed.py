"""Parameters and buffers whose current values live on the devices.

`manage` turns a model's own parameter and buffer objects into `Managed` ones, in place, so that optimizers and tied
modules that hold them stay right. A torch function that touches one first brings its host value up to date, so
reading is always exact; a write is seen by the version counter and uploaded before the next program runs.
"""

import contextlib
import functools
import sys
import typing
import weakref

import torch
from torch import Tensor, nn

from graphacc._compat.torch_ import outside_of_transforms, storage_users, swap_values, without_modes
from graphacc.capture.borrow import TensorsNow
from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.loop import columns, trees

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine
    from graphacc.loop.tape import Tape

_GRAD = typing.cast(typing.Any, Tensor.grad)

_ALIASING = frozenset(
    {
        Tensor.data.__get__,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.untyped_storage,
        Tensor.data_ptr,
        Tensor.__dlpack__,
        Tensor.share_memory_,  # to other processes
    }
)
"""Functions that give access to the memory without the version counter noticing a later write."""

_EXPOSING = _ALIASING | {Tensor.data.__set__}
"""The same, and what gives the tensor other memory."""


class Handle:
    """Where a managed tensor belongs, and how its host copy and its device copy stand."""

    def __init__(self, engine: "Engine", kind: Kind, name: str, tensor: Tensor):
        self.engine = engine
        self.kind = kind  # PARAM or BUFFER
        self.name = name
        self.tensor = tensor
        self.host_is_stale = False  # the device copy is newer
        self.writes = 0  # by functions that the loop called
        self._refreshes = 0  # steps of the version counter that were ours
        self.uploaded_version = -1  # version counter of the host copy that the device copy equals
        self.exposed = False  # the host memory can be written without the version counter noticing
        self.viewed = False  # a tensor that shares the host memory may be alive
        self._before: tuple[int, Tensor] | None = None  # a version, and what the memory held then, which an uncounted write has replaced
        self._watched: tuple[int, Tensor] | None = None  # the same of when it was last looked at, while it may be written without the version counter noticing
        self.differentiated = False  # the loop has used it in autograd's own graph
        self.frees_host = False  # the model was made on the meta device: the host copy has memory only while somebody needs it
        self.missing = False  # it has no value yet (see `graphacc.loop.deferred`)
        self._spent: SpentGradient | None = None  # what stands for a gradient that a step has consumed
        self.given_by: tuple[weakref.ref["Tape"], int] | None = None  # the recording of which `.grad` is a value, or was until a step consumed it, and which value
        self.grad: typing.Any = None  # the Tape whose backward gave the gradient, `SPENT`, `ZERO`, or None: `host_grad` has it

    @property
    def host_is_newer(self) -> bool:
        """The host copy was written since it was last equal to the device copy."""
        if self.host_is_stale:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return self.exposed or self.tensor._version != self.uploaded_version or self.is_shared

    @property
    def version(self) -> int:
        """A counter of the loop's own writes; the model's code writes buffers, too."""
        self.note_uncounted()
        return self._counted

    def note_uncounted(self) -> None:
        """Count a write through something that has access to the memory."""
        if self._watched is not None and not same_bits(self.host_value(), self._watched[1]):
            self._before = self._watched
            self.writes += 1
            self.watch_again()

    @property
    def _counted(self) -> int:
        """`version`, of the writes that are known."""
        if self.kind is Kind.BUFFER:
            return self.writes
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor._version - self._refreshes + self.writes

    def forget_writes(self, version: int) -> None:
        """The writes since `version` were not the loop's."""
        if self.kind is Kind.BUFFER:
            self.writes = version
        else:
            self._refreshes += self.version - version
        self.watch_again()

    def watch(self) -> None:
        """Something gets access to the memory that can write it uncounted: as long as it is alive, values are compared."""
        if self._watched is None:
            self._watched = self._counted, self.host_value().clone()
            self.engine.watched.add(self)

    def watch_again(self) -> None:
        """The memory was written, but not by the loop uncounted."""
        if self._watched is not None:
            self._watched = (self._counted, self.host_value().clone()) if self.has_alias else None
            if self._watched is None:
                self.engine.watched.discard(self)

    def knows(self, version: int) -> bool:
        """Whether the value that it had at an earlier version is that from before the last uncounted write."""
        return self._before is not None and self._before[0] == version

    @contextlib.contextmanager
    def as_before(self, version: int) -> "typing.Iterator[None]":
        """Inside, it has the value and the version from before the last uncounted write."""
        now, present = self.host_value().clone(), self.version
        assert self._before is not None and self.knows(version), f"{self.name!r} has no value of version {version}"
        self.overwrite(self._before[1])
        self.forget_writes(version)
        try:
            yield
        finally:
            self.overwrite(now)
            self.forget_writes(present)

    def mark_uploaded(self) -> None:
        """The device copy equals the host copy now."""
        with torch._C.DisableTorchFunctionSubclass():
            self.uploaded_version = self.tensor._version
        self.exposed = self.exposed and self.has_alias
        self.host_is_stale = False

    def mark_loaded(self) -> None:
        """The devices have got a value from elsewhere."""
        self.missing, self.exposed = False, False
        self.writes += 1
        self.mark_uploaded()
        self.mark_stale()

    def mark_stale(self) -> None:
        """The device copy was replaced. A tensor of the loop that shares the host memory sees the new value at once."""
        self.host_is_stale = True
        if self.is_shared:
            self.refresh()
        else:
            self.release()

    def release(self) -> None:
        """Give the memory of the host copy back, where that is wanted: the devices have the value, or nobody has."""
        if self.frees_host and not self.has_alias:
            self.host_is_stale = True
            with torch._C.DisableTorchFunctionSubclass():
                self.tensor.data = without_memory(self.tensor)

    def let_go(self) -> None:
        """The same after something has read the host copy, if the devices have the same value."""
        if not self.missing and not self.host_is_newer and self.uploaded_version >= 0:
            self.release()

    def allocate(self) -> None:
        """Give a host copy that was let go of its memory again; what was missing is about to be written."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.tensor.untyped_storage().nbytes() == 0:  # also one that NumPy has seen, which PyTorch does not resize
                self.tensor.data = torch.empty_strided(self.tensor.shape, self.tensor.stride(), dtype=self.tensor.dtype)
        if self.missing:
            self.missing = self.host_is_stale = False
            self.exposed = True

    @property
    def is_shared(self) -> bool:
        """Whether the loop holds a tensor, or an array, through which it can read and write the host memory without our knowledge."""
        self.viewed = self.viewed and self.has_alias
        return self.viewed

    @property
    def has_alias(self) -> bool:
        """Whether a tensor besides this one uses the host memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return storage_users(self.tensor) > 1

    @property
    def is_held(self) -> bool:
        """Whether something besides the model's modules holds this tensor, or its memory."""
        own = 1 + 2 * self.engine.structure.count(self.tensor)  # this handle's; the tables' and the structure's
        return self.has_alias or sys.getrefcount(self.tensor) - 1 > own

    def renew(self) -> None:
        """The model's code is about to put another tensor in the place of this buffer: who holds the present one keeps its value."""
        self.refresh()
        if self.missing:
            return
        held: typing.Any = self.tensor
        with torch._C.DisableTorchFunctionSubclass(), without_modes(), torch.inference_mode(False), torch.no_grad():
            renewed: typing.Any = held.detach().clone()
        for table in (module._buffers for module in self.engine.model.modules()):
            for name in [name for name, tensor in table.items() if tensor is held]:
                table[name] = renewed
        renewed.__class__ = ManagedBuffer
        renewed._graphacc_handle, held._graphacc_handle = self, None  # that is an ordinary tensor again
        self.tensor, self.viewed, self.exposed = renewed, False, True
        self.watch_again()

    @property
    def host_grad(self) -> Tensor | None:
        """The ordinary ``.grad``, which PyTorch's own autograd and assignments of the loop fill."""
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD.__get__(self.tensor)

    @host_grad.setter
    def host_grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.tensor, value)

    @property
    def spent(self) -> "SpentGradient":
        """What ``.grad`` gives for a gradient that a step has consumed."""
        if self._spent is None:
            self._spent = SpentGradient(self)
        return self._spent

    def forget_spent(self) -> None:
        """The parameter gets another shape or dtype."""
        self._spent = None

    @property
    def trains(self) -> bool:
        """Whether a backward gives it a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.requires_grad

    @property
    def accumulator_has_hooks(self) -> bool:
        """Whether autograd's node that accumulates the gradient has hooks, which run in PyTorch's own backward alone."""
        if not self.differentiated or not self.trains:
            return False
        with torch._C.DisableTorchFunctionSubclass(), without_modes(), torch.inference_mode(False):
            node = torch.autograd.graph.get_gradient_edge(self.tensor).node
        return _has_hooks(node.register_hook) or _has_hooks(node.register_prehook)

    @property
    def has_grad(self) -> bool:
        """Whether ``.grad`` is a gradient that an update would use."""
        return self.grad is not SPENT and (self.grad is not None or self.host_grad is not None)

    @property
    def form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(self.tensor.shape), self.tensor.dtype

    def zeros(self) -> Tensor:
        """A zero gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return torch.zeros_like(self.tensor.detach())

    def host_value(self) -> Tensor:
        """The host copy as an ordinary tensor that shares its memory."""
        with torch._C.DisableTorchFunctionSubclass(), without_modes():
            return self.tensor.detach()

    def overwrite(self, value: Tensor) -> None:
        """Write the host copy; the devices get it before the next program runs."""
        self.allocate()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.tensor.copy_(value)
        self.host_is_stale = False
        self.exposed = True
        self.watch_again()

    def refresh(self) -> None:
        """Bring the host copy up to date."""
        if not self.host_is_stale or self.engine.capturing:
            return
        with self.engine.lock:
            if self.missing:
                self.engine.deferred.read(self)
            if not self.host_is_stale:
                return
            self.allocate()
            with outside_of_transforms(), torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
                before = self.tensor._version
                self.tensor.copy_(self.engine.fetch(self))
                self._refreshes += self.tensor._version - before
            self.watch_again()
            self.mark_uploaded()

    def leave_name(self) -> None:
        """Before another name: the devices hold values, gradients and optimizer state by name, so what they have comes to the host."""
        self.refresh()
        if self.grad is not None and not isinstance(self.grad, _Mark):
            self.engine.gradients.settle(self)
        for binding in self.engine.bindings:
            self.engine.fetch_optimizer_state(binding)
            binding.state_on_device = False
        self.exposed = True


def _has_hooks(register: typing.Callable) -> bool:
    """Whether a node has hooks of the kind that `register` adds: one more is in the same dict as those."""
    own = register(lambda *_: None)
    try:
        return len(own.hooks_dict_ref()) > 1
    finally:
        own.remove()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one form hold the same values; a NaN is like itself."""
    return bool(torch.equal(one, other)) or bool(torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other))))


class _Mark:
    """Says what a gradient is without a tensor."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return f"<{self._text}>"


SPENT = _Mark("gradient consumed by the compiled step")
ZERO = _Mark("gradient set to zero")


class Versions:
    """The versions of parameters and buffers at one time."""

    def __init__(self, handles: dict[str, Handle]):
        self._handles, self._counts = handles.copy(), columns.counts(handles.values())

    @functools.cached_property
    def by_name(self) -> dict[str, int]:
        counts = zip(self._handles.items(), self._counts, strict=True)
        return {name: writes if handle.kind is Kind.BUFFER else steps - ours + writes for (name, handle), (steps, ours, writes) in counts}


class SpentGradient(Tensor):
    """What ``parameter.grad`` gives between a compiled step and ``zero_grad()``: it can be cleared, but not read."""

    handle: Handle

    @staticmethod
    def __new__(cls, handle: Handle):
        with torch._C.DisableTorchFunctionSubclass():
            like = handle.tensor
            self = Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        self.handle = handle
        return self

    def __init__(self, handle: Handle):
        super().__init__()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        leaves = trees.leaves((args, kwargs))
        spent = [leaf for leaf in leaves if isinstance(leaf, SpentGradient)]
        if func in _CLEARING:
            for gradient in spent:
                gradient.handle.engine.gradients.zero(gradient.handle)
            for other in leaves:
                if isinstance(other, Tensor) and not isinstance(other, SpentGradient):
                    other.zero_()
            return args[0]
        if func in _CONVERTING:  # `model.double()` converts gradients, too
            return None if func == Tensor.data.__set__ else args[0]
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = spent[0].handle.name
        raise LoopError(
            f"{name}.grad was read after optimizer.step(): the compiled step consumed the gradient; read or change gradients between "
            "loss.backward() and optimizer.step(), where reading them is recorded or runs the step in parts, or keep them with "
            "graphacc.compile(..., keep_gradients=True), which takes their memory and runs every step in two programs"
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise LoopError(f"{func} touches a gradient that the compiled step consumed: read gradients before optimizer.step()")


_CLEARING = frozenset({Tensor.zero_, torch._foreach_zero_})
_CONVERTING = frozenset({Tensor.to, Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.cpu, Tensor.data.__set__})
_GRAD_MODE = frozenset({Tensor.requires_grad_, typing.cast(typing.Any, Tensor.requires_grad).__set__})
"""Functions that say whether a tensor takes a gradient."""

_METADATA = _GRAD_MODE | frozenset(
    {
        Tensor.is_floating_point,
        Tensor.is_complex,
        torch._has_compatible_shallow_copy_type,
        Tensor.shape.__get__,
        Tensor.dtype.__get__,
        Tensor.device.__get__,
        Tensor.layout.__get__,
        Tensor.ndim.__get__,
        Tensor.is_sparse.__get__,
        Tensor.grad_fn.__get__,
        *(getattr(Tensor, name).__get__ for name in ("is_leaf", "retains_grad", "is_meta", "is_cpu", "is_cuda", "itemsize", "nbytes")),
        Tensor.element_size,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.storage_offset,
        Tensor.nelement,
        Tensor.requires_grad.__get__,
        Tensor.detach_,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
    }
)


_LIKE = frozenset({torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like})
"""Functions that look at shape, dtype and device alone."""

_FILLING = frozenset(
    {
        Tensor.copy_, Tensor.fill_, Tensor.zero_, Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_,
        Tensor.geometric_, Tensor.bernoulli_, torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.constant_, torch.nn.init.kaiming_uniform_,
        torch.nn.init.kaiming_normal_,
    }
)  # fmt: skip
"""Functions that write all of their first argument without reading it."""


def handle_of(tensor: object) -> Handle | None:
    return getattr(tensor, "_graphacc_handle", None) if isinstance(tensor, Managed) else None


class Managed(Tensor):
    """A tensor of the model whose current value lives on the devices."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _GRADIENT:
            return _GRADIENT[func](*args)
        from graphacc.loop.promise import run_function

        kwargs = kwargs or {}
        replaces = func in (Tensor.data.__set__, Tensor.set_) and len(args) > 1 and isinstance(args[1], Tensor)
        if replaces and _form(args[0]) != _form(args[1]) and (handle := handle_of(args[0])) is not None:
            handle.engine.before_another_form(handle)
        result = run_function(func, args, kwargs)
        results = (result,) if isinstance(result, Tensor) else trees.leaves(result)
        if any(type(leaf) is Tensor and leaf.grad_fn is not None for leaf in results):
            for handle in filter(None, map(handle_of, trees.leaves((args, kwargs)))):
                handle.differentiated = True
        if func is Tensor.detach and sys._getframe(1).f_code is _MAKES_PARAMETER:
            result.__class__ = type(args[0])  # what nn.Parameter(parameter) asks of a subclass; it belongs to no model yet
        return result

    def set_(self, *args, **kwargs):
        """The one method that writes and does not ask `__torch_function__` itself."""
        return self.__torch_function__(Tensor.set_, (type(self),), (self, *args), kwargs)

    def __deepcopy__(self, memo):
        """An ordinary tensor or parameter with the current value."""
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            value = self.detach().clone(memory_format=torch.preserve_format)
        copied = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        return ordinary(self).__reduce_ex__(protocol)


def ordinary(tensor: Managed) -> Tensor:
    """An ordinary tensor or parameter of the same memory, with the current value."""
    with torch.no_grad():
        value = tensor.detach()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


class ManagedParameter(Managed, nn.Parameter):
    """A parameter whose current value lives on the devices."""

    __torch_function__ = Managed.__torch_function__


class ManagedBuffer(Managed):
    """A buffer whose current value lives on the devices."""


def manage(engine: "Engine", model: nn.Module, handles: dict[str, Handle] | None = None) -> dict[str, Handle]:
    """Make every distinct parameter and buffer of `model` managed, in place.

    Args:
        handles: those of an earlier call. A tensor that has since been put in the place of one of them takes over its handle.

    Returns:
        First name -> handle, parameters first, in the model's own order; a tied tensor has one handle.

    Raises:
        LoopError: a tensor that is managed by another compiled model, of a class that cannot be managed, or on a device of torch_xla.
    """
    found: dict[str, Handle] = {}
    seen: set[int] = set()
    for kind, named, managed, plain in (
        (Kind.PARAM, model.named_parameters(), ManagedParameter, nn.Parameter),
        (Kind.BUFFER, model.named_buffers(), ManagedBuffer, Tensor),
    ):
        for name, tensor in named:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if handles is not None and (own := handle_of(tensor)) is not None and own.engine is engine:
                if own.name != name:
                    own.leave_name()
                    own.name = name
                found[name] = own
                continue
            if handle_of(tensor) is not None:
                raise LoopError(f"{name!r} belongs to a model that is already compiled: compile the outermost module once, not its parts")
            if type(tensor) not in (plain, managed):
                raise LoopError(
                    f"{name!r} is a {type(tensor).__name__}: only ordinary tensors and parameters can be moved to the devices; "
                    "replace it by a plain torch.nn.Parameter or torch.Tensor before graphacc.compile"
                )
            if tensor.device.type == "xla":
                raise LoopError(
                    f"{name!r} is on {tensor.device}, a device of torch_xla: a compiled model's tensors stay on the CPU, and its programs run on JAX's devices. transformers and "
                    "accelerate move models there where torch_xla is installed: import graphacc.integrations.transformers before them, or set USE_TORCH_XLA=0"
                )
            handle = found[name] = Handle(engine, kind, name, tensor)
            handle.exposed = handles is not None
            if tensor.is_meta:
                _move_from_meta(name, tensor)
                handle.missing = handle.host_is_stale = True
                handle.frees_host = engine.programs.offload is None
            else:
                handle.differentiated = kind is Kind.PARAM
                handle.differentiated = handle.accumulator_has_hooks
            tensor.__class__ = managed
            tensor._graphacc_handle = handle
    return found


def _move_from_meta(name: str, tensor: Tensor) -> None:
    """Make a tensor of the meta device one of the CPU, without memory, in place: optimizers and tied modules hold it.

    Raises:
        LoopError: something else refers to its memory.
    """
    try:
        swap_values(tensor, without_memory(tensor).requires_grad_(tensor.requires_grad))
    except RuntimeError as error:
        raise LoopError(
            f"{name!r} is on the meta device, and results that were computed with it refer to it ({str(error).partition(chr(10))[0]}): call graphacc.compile "
            "before the model is used"
        ) from error


def without_memory(like: Tensor) -> Tensor:
    """A CPU tensor of the same form whose memory is still to be allocated."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


def settled(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Let what was recorded have its effect on buffers that are read, and put those in their places by which PyTorch's run of the model replaced them meanwhile."""
    replaced = {}
    for leaf in trees.leaves((args, kwargs)):
        handle = handle_of(leaf) if isinstance(leaf, ManagedBuffer) else None
        if handle is not None and not handle.engine.capturing and not handle.engine.deferred.making:
            now = TensorsNow(handle.engine.model)
            was_current = now.get(handle.name) is leaf
            handle.engine.settle_buffers()
            if was_current and (found := now.get(handle.name)) is not None and found is not leaf:
                replaced[id(leaf)] = found
    return trees.map_only(ManagedBuffer, lambda leaf: replaced.get(id(leaf), leaf), (args, kwargs)) if replaced else (args, kwargs)


def prepare(func, args: tuple, kwargs: dict) -> None:
    """Before `func` runs on host values: bring its managed arguments up to date, and note whose memory it gives access to."""
    if func in _GRAD_MODE and (handle := handle_of(args[0])) is not None:
        handle.engine.grad_modes += 1
    if func in _METADATA or func in _LIKE:
        return  # a fetch from the devices in every step, for the first parameter's requires_grad alone
    exposes = func in _EXPOSING
    touched = []
    written = trees.leaves(written_by_name(func, args, kwargs))
    for leaf in trees.leaves((args, kwargs)):
        if (handle := handle_of(leaf)) is None or handle.engine.capturing:
            continue
        making = handle.engine.deferred.making
        if handle.kind is Kind.BUFFER and not making:
            handle.engine.settle_buffers()
        if handle.missing and func in _FILLING and leaf is (args[0] if args else kwargs.get("tensor")):
            handle.allocate()
        handle.refresh()
        touched.append(handle)
        writes = func not in _ALIASING and any(leaf is other for other in written)
        if func in _ALIASING and not making:
            handle.engine.before_exposure(handle)
        if writes and not making:
            handle.engine.before_write(handle)
        if writes or exposes:
            handle.engine.deferred.note_write(handle)
            handle.writes += writes
        elif torch.is_grad_enabled():
            handle.engine.deferred.note_read()
        handle.exposed = handle.exposed or writes or exposes or handle.kind is Kind.BUFFER  # `set_` and batch_norm write without counting versions
    for handle in touched:  # last: a program that ran above has found that nothing shares the memory yet
        handle.viewed = True


def writes_by_name(func) -> bool:
    """Whether a torch function may write into its arguments, by its name."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def written_by_name(func, args: tuple, kwargs: dict) -> object:
    """The arguments that a torch function may write into, by its name: the first one, but of those for optimizers and scalers."""
    if not writes_by_name(func):
        return ()
    several = not args or func.__name__.startswith(("_fused", "_amp"))
    return (args, kwargs) if several else args[:1]


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor")} | {"__setitem__", "__set__"}


def plain_while_capturing(func, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Fake tensor modes refuse tensor subclasses: while a graph is captured, operators get plain tensors."""
    if getattr(func, "__name__", "") == "__get__":
        return args, kwargs

    def plain(tensor: Managed) -> Tensor:
        handle = handle_of(tensor)
        return handle.host_value() if handle is not None and handle.engine.capturing else tensor

    return trees.map_only(Managed, plain, (args, kwargs))


def _get_grad(tensor: Tensor) -> Tensor | None:
    handle = getattr(tensor, "_graphacc_handle", None)
    if handle is not None:
        return handle.spent if handle.grad is SPENT else handle.engine.gradients.read(handle)
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(tensor)


def _form(tensor: Tensor) -> tuple:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype, tensor.shape


def _set_grad(tensor: Tensor, value: Tensor | None = None) -> None:
    handle = getattr(tensor, "_graphacc_handle", None)
    if handle is None or (value is None and handle.grad is SPENT):  # as `zero_grad()` finds all of them behind a step
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(tensor, value)
        if handle is not None:
            handle.grad = None
        return
    if value is not None and (tuple(value.shape) != tuple(tensor.shape) or value.dtype != tensor.dtype):
        raise LoopError(
            f"{handle.name}.grad: a gradient has its parameter's shape and dtype, {list(tensor.shape)} {tensor.dtype}, "
            f"not {list(value.shape)} {value.dtype}"
        )
    handle.engine.gradients.write(handle, value)


_MAKES_PARAMETER = nn.Parameter.__new__.__code__

trees.are_leaves(ManagedParameter, ManagedBuffer)

_GRADIENT = {_GRAD.__get__: _get_grad, _GRAD.__set__: _set_grad, _GRAD.__delete__: _set_grad}

Managed.grad = property(_get_grad, _set_grad, _set_grad)  # not by way of `__torch_function__`: an optimizer reads and clears all of them in every step
