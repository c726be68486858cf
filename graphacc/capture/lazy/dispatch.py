"""What happens to an operator while a step is recorded as lazy tensors.

torch_xla records most operators by itself. The mode here sees each one first, after autograd and without mutation, and

- puts it on the XLA device: what the model makes "on the CPU" is part of the step too,
- draws random numbers from the step's key, with the same streams as the FX capture (torch_xla's own would depend on its seed),
- promotes dtypes and reads empty lists of dims as torch does: torch_xla lets a float64 number of shape [] widen a whole float32
  tensor, and reduces no dim where torch reduces all,
- keeps attention and shardings whole, as custom calls (`whole`),
- answers a question for a value that no input of the step has a part in, and refuses any other.
"""

import contextlib
import functools

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphacc._compat.torch_ import annotation, python_body
from graphacc.capture.cleanup import called_for_effect
from graphacc.capture.decompositions import decompositions
from graphacc.capture.lazy import xla
from graphacc.capture.lazy.rewrites import Rewrites
from graphacc.capture.lazy.whole import WholeCalls
from graphacc.capture.lazy.written_out import is_wrong, replacement, written_out
from graphacc.capture.randomness import Streams
from graphacc.errors import CaptureError
from graphacc.hlo import Draw

aten = torch.ops.aten

_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.item.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
_REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction, aten.std.correction,
        aten.var_mean.correction, aten.std_mean.correction, aten.nansum.default, aten.linalg_vector_norm.default,
        aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype,
    }
)  # fmt: skip
_LIFTS = (aten.lift.default, aten.lift_fresh.default)  # where a new tensor of the model's begins
_DRAWS = {torch.ops.graphacc.random_bits.default: torch.int64, torch.ops.graphacc.random_uniform.default: torch.float32}
_BUILT_IN = ("aten", "prims")
_BACKENDS = ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class ValueNeeded(RuntimeError):
    """The code asks for a value that depends on an input of the step; the words "data-dependent" give the remedy."""


class NotRecorded(RuntimeError):
    """torch_xla has no form of an operator as HLO."""


class LazyMode(TorchDispatchMode):
    """Records operators on lazy tensors.

    Args:
        inputs: the placeholders of the step.
        key: the one of the random key, int64[2]; without one, random numbers are torch_xla's own.
        first_stream: number of the first random stream.
    """

    def __init__(self, inputs: list[Tensor], key: Tensor | None, first_stream: int = 0):
        super().__init__()
        self.device = inputs[0].device
        self._inputs = {xla.leaf_id(tensor) for tensor in inputs}
        self._key = None if key is None else xla.tensor_id(key)
        self.streams = Streams(_inner(key), first_stream) if key is not None else None
        self._random = {} if self.streams is None else self.streams.table()
        self.drawn: dict[int, Draw] = {}  # identity of a placeholder -> the random numbers that it stands for
        self.whole = WholeCalls(self.drawn, None if key is None else _inner(key))
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inside = func not in _LIFTS and any(map(_is_inner, tensors))
        func = _copying(func) if inside or (tensors and not any(map(_is_lazy, tensors))) else func
        if func in _READS or (func is aten._to_copy.default and _to_host(args, kwargs)):
            return self._read(func, args, kwargs or {})
        if _is_check(func):  # torch_xla drops it
            raise called_for_effect(func, annotation().get("stack_trace", ""))
        _check_target(func, args)
        args, kwargs = self._on_device(func, args, dict(kwargs or {}))
        args, kwargs = _over_all_dims(args, kwargs, func) if func in _REDUCTIONS else (args, kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.whole.note(func, args)
        if func in self._random:
            with self:
                result = self._random[func](*args, **_without_device(kwargs))
        elif func in _DRAWS and xla.tensor_id(args[0]) == self._key and args[-1] is None:
            result = self._draw(func, *args)
        elif (record := self.whole.recorder(func)) is not None:
            with self:
                result = record(*args, **kwargs)
        elif _has_dynamic_shape(func, args, kwargs):
            result = self._dynamic(func, args, kwargs, given)
        elif func in written_out() or not _has_form(func) or is_wrong(func, args, kwargs):
            result = self._without_form(func, args, kwargs, given)
        elif (body := _body(func)) is not None:
            with self, Rewrites(), _functionalizing():
                result = body(*pytree.tree_map_only(Tensor, _functional, args), **pytree.tree_map_only(Tensor, _functional, kwargs))
                pytree.tree_map_only(Tensor, _synced, result)
        else:
            try:
                result = _record(func, _promoted(func, args, given), kwargs)
                result = _apart(result) if inside else result
            except NotRecorded:
                result = self._without_form(func, args, kwargs, given)
        return pytree.tree_map_only(Tensor, _inner if inside else _functional, result)

    def _on_device(self, func, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        args, kwargs = pytree.tree_map_only(Tensor, self._moved_tensor, (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = self.device
            kwargs.pop("pin_memory", None)
        return args, kwargs

    def _moved_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of the host as a constant of the step."""
        if tensor.device.type == xla.DEVICE:
            return tensor
        if id(tensor) not in self._moved:
            _check_foreign(tensor)
            with torch._C.DisableTorchFunctionSubclass():
                self._moved[id(tensor)] = tensor, _inner(xla.from_host(tensor.detach()))
        return self._moved[id(tensor)][1]

    def moved(self) -> list[Tensor]:
        """The tensors of the host that became constants."""
        return [tensor for tensor, _ in self._moved.values()]

    def _draw(self, func, key: Tensor, stream: int, size: list[int], *_whole) -> Tensor:
        """A placeholder for random numbers: their rounds, recorded one by one, would take XLA minutes to compile."""
        result = xla.placeholder(size, _DRAWS[func])
        self._inputs.add(xla.leaf_id(result))
        self.drawn[xla.leaf_id(result)] = Draw(str(func), stream, tuple(size))
        return result

    def known(self, tensors: list[Tensor]) -> bool:
        """Whether no input of the step, and no random number, has a part in the values of `tensors`."""
        return not {*self._inputs, xla.seed_id()} & set(xla.leaves(tensors)[0])

    def _read(self, func, args: tuple, kwargs: dict) -> object:
        given = [arg for arg in args if isinstance(arg, Tensor) and arg.device.type == xla.DEVICE]
        if not self.known(given):
            raise ValueNeeded(f"{func} reads a data-dependent value of a tensor of shape {list(given[0].shape)}")
        with xla.executing():
            return func(*pytree.tree_map_only(Tensor, xla.to_host, args), **kwargs)

    def _by_value(self, func, args: tuple, kwargs: dict, given: list[Tensor], why: str) -> object:
        """Run an operator on values that are known while recording; its result is a constant."""
        if not self.known(given):
            raise NotRecorded(why)
        with xla.executing():
            args, kwargs = pytree.tree_map_only(Tensor, xla.to_host, (args, kwargs))
            result = func(*args, **({**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs))
            return pytree.tree_map_only(Tensor, xla.from_host, result)

    def _dynamic(self, func, args: tuple, kwargs: dict, given: list[Tensor]) -> object:
        """An operator with a boolean index, or whose result's shape depends on values: ``x[mask] = number`` is a where."""
        if func is aten.index_put.default:
            with self:
                result = decompositions()[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._by_value(func, args, kwargs, given, f"a shape in {func} depends on the values of a tensor (dynamic shape)")

    def _without_form(self, func, args: tuple, kwargs: dict, given: list[Tensor]) -> object:
        """An operator that torch_xla would compute on the host, or otherwise than torch: written in others, or on known values."""
        if (function := replacement(func, args, kwargs)) is not None:
            with self:
                result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if given and not self.known(given) and (result := self.whole.lowered(func, args, kwargs)) is not NotImplemented:
            return result
        return self._by_value(func, args, kwargs, given, f"torch_xla has no HLO for {func}")


_AS_REAL = frozenset({aten.view_as_real.default, aten.view_as_real_copy.default})
"""torch_xla notes their result with the complex tensor's number of dims, so that a permutation of it ends the process."""


def _record(func, args: tuple, kwargs: dict) -> object:
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if "Unexpected execution" not in str(error):
            raise
        raise NotRecorded(f"torch_xla computes {func} on the host for these arguments") from error
    return torch.view_copy(result, result.shape) if func in _AS_REAL else result


@functools.cache
def _is_check(func) -> bool:
    """Whether an operator gives and writes nothing, so that it can only look at values."""
    schema = func._schema
    return func.namespace == "aten" and not schema.returns and not schema.is_mutable and func is not aten._propagate_xla_data.default


@functools.cache
def _copying(func):
    """The operator that copies what a view shows: torch_xla makes views of tensors without the wrapper by strides, where dims of
    size 1 are confused, and the wrapper around a view of a constant does not know that it is conjugated.
    """
    packet = getattr(aten, f"{func._schema.name.removeprefix('aten::')}_copy", None) if func.is_view else None
    return getattr(packet, func._overloadname, func) if packet is not None else func


def _apart(result: object) -> object:
    """Several results as nodes of their own: index_select and embedding end the process where the index is the second result of a sort."""
    if not isinstance(result, tuple):
        return result
    return tuple(x if i == 0 or not isinstance(x, Tensor) else torch.view_copy(x, x.shape) for i, x in enumerate(result))


def _over_all_dims(args: tuple, kwargs: dict, func) -> tuple[tuple, dict]:
    """The arguments of a reduction, in which an empty list of dims, to torch all of them and to torch_xla none, is all of them."""
    place, argument = next((i, argument) for i, argument in enumerate(func._schema.arguments) if argument.name == "dim")
    dims = args[place] if place < len(args) else kwargs.get("dim", argument.default_value)
    if dims != []:
        return args, kwargs
    every = list(range(args[0].dim()))
    if place < len(args):
        return (*args[:place], every, *args[place + 1 :]), kwargs
    return args, {**kwargs, "dim": every}


def _has_dynamic_shape(func, args: tuple, kwargs: dict) -> bool:
    if func in _INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _to_host(args: tuple, kwargs: dict | None) -> bool:
    """Whether an `_to_copy` brings a lazy tensor to the host, as C++ code does that goes on to read its memory."""
    device = (kwargs or {}).get("device")
    return device is not None and device.type == "cpu" and args[0].device.type == xla.DEVICE


def _check_target(func, args: tuple) -> None:
    if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].device.type != xla.DEVICE:
        raise NotRecorded(f"{func} writes into a tensor of the host, of shape {list(args[0].shape)}, which is no part of the step")


def _body(func):
    """The code of a custom operator, to be recorded in its place."""
    return None if func.namespace in _BUILT_IN or func._schema.is_mutable else python_body(func)


@contextlib.contextmanager
def _functionalizing():
    """Writes into tensors are followed, as in code of the model, also where an operator is being recorded."""
    key = torch._C.DispatchKey.Functionalize
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def _synced(tensor: Tensor) -> None:
    """Take what was written into views of a tensor into its own value."""
    if tensor.device.type == xla.DEVICE and not _is_inner(tensor):
        torch._sync(tensor)


def _has_form(func) -> bool:
    if func.namespace not in _BUILT_IN:
        return True  # a custom operator
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in _BACKENDS)


def _promoted(func, args: tuple, given: list[Tensor]) -> tuple:
    """Numbers of shape [] cast to the dtype in which torch would compute."""
    if torch.Tag.pointwise not in func.tags or len({tensor.dtype for tensor in given}) < 2:
        return args
    common = _common_dtype(given)
    return tuple(arg.to(common) if isinstance(arg, Tensor) and arg.dim() == 0 and arg.dtype != torch.bool else arg for arg in args)


def _common_dtype(tensors: list[Tensor]) -> torch.dtype:
    """What torch.result_type gives for any number of tensors."""
    whole = [tensor.dtype for tensor in tensors if tensor.dim() > 0]
    numbers = [tensor.dtype for tensor in tensors if tensor.dim() == 0]
    if not whole or not numbers:
        return functools.reduce(torch.promote_types, whole or numbers)
    first, second = functools.reduce(torch.promote_types, whole), functools.reduce(torch.promote_types, numbers)
    return torch.result_type(torch.empty(1, dtype=first, device="meta"), torch.empty((), dtype=second, device="meta"))


def _check_foreign(tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise CaptureError(
            f"the model uses a tensor of shape {list(tensor.shape)} that requires a gradient but is no registered parameter: a captured "
            "step trains registered parameters only. Make it an nn.Parameter attribute of a submodule"
        )


def _without_device(kwargs: dict) -> dict:
    return {name: value for name, value in kwargs.items() if name != "device"}


def _is_lazy(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == xla.DEVICE


def _is_inner(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == xla.DEVICE and not torch._is_functional_tensor(leaf)


def _inner(tensor: Tensor) -> Tensor:
    """The lazy tensor behind the wrapper that keeps track of its views."""
    return torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor


def _functional(tensor: Tensor) -> Tensor:
    """A lazy tensor with that wrapper: without it a write into a view of the tensor would be lost, silently."""
    return torch._to_functional_tensor(tensor) if _is_inner(tensor) else tensor
