"""Shapes and dtypes of recorded calls, by running them on fake tensors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphacc._compat.torch_ import compiling, decided_branches, new_fake_mode, own_saved_tensors
from graphacc.capture import objects
from graphacc.capture.borrow import Tags, TensorsNow, structure_kept, substitute
from graphacc.capture.diagnose import explained
from graphacc.capture.functions import WrittenOut
from graphacc.capture.guards import counts_nothing
from graphacc.capture.lazy import infer_call
from graphacc.capture.python_state import version_of
from graphacc.capture.randomness import DrawsNoted
from graphacc.capture.recurrent import check_unpacked
from graphacc.capture.source import calling_line
from graphacc.errors import CaptureError, ParameterWritten
from graphacc.graph import Kind
from graphacc.loop import columns, trees
from graphacc.loop.arguments import refill
from graphacc.loop.decisions import Recorder, memory_of, written_by
from graphacc.loop.managed import Handle, handle_of
from graphacc.loop.promise import NotRecorded
from graphacc.loop.tape import Param


class Fakes:
    """One fake tensor per managed tensor, and a mode in which calls give fake results.

    Args:
        knows: whether a tensor that the model's code finds somewhere else is guarded, so that it may be a constant.
    """

    def __init__(self, model: nn.Module, handles: dict[str, Handle], knows: Callable[[Tensor], bool]):
        self.model = model
        self.handles = handles
        self._mode = new_fake_mode(allow_non_fake_inputs=True)
        self._knows = knows
        self._managed: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._last_gradients: tuple[tuple[Sequence[Handle], list[columns.Form]], list[Tensor]] | None = None  # of which parameters, and their forms
        self._names: dict[int, str] = {}  # memory of a fake parameter or buffer -> its name
        self.drew = False  # whether the last call drew random numbers

    def of(self, value: "Tensor | Param") -> Tensor:
        """The fake tensor of a real tensor, a parameter's name, or of a fake tensor itself."""
        if isinstance(value, Param):
            return self._of_handle(self.handles[value.name])
        if isinstance(value, FakeTensor):
            return value
        with torch._C.DisableTorchFunctionSubclass():
            return self._mode.from_tensor(value.detach())

    def gradient_of(self, handle: Handle) -> Tensor:
        """The fake tensor that stands for a parameter's gradient."""
        like = self._of_handle(handle)
        fake = self._gradients.get(handle.name)
        if fake is None or (fake.shape, fake.dtype) != (like.shape, like.dtype):
            fake = self._gradients[handle.name] = self._like(like)  # of memory of its own
        return fake

    def gradients_of(self, handles: Sequence[Handle]) -> list[Tensor]:
        """`gradient_of` each; found again at once for the same parameters of the same forms."""
        looked_at = handles, columns.forms(handles)
        if self._last_gradients is None or self._last_gradients[0] != looked_at:
            self._last_gradients = looked_at, list(map(self.gradient_of, handles))
        return self._last_gradients[1]

    def run(self, function: Callable, args: tuple, kwargs: dict, recorder: Recorder | None):
        """Call a function on fake tensors; the result's tensors are fake, and nothing real is touched."""
        with self._mode, compiling(), WrittenOut(), recorder or contextlib.nullcontext(), self._watched(None):
            result = function(*args, **kwargs)
        check_unpacked(trees.leaves(result))
        return result

    @contextlib.contextmanager
    def _watched(self, knows: Callable[[Tensor], bool] | None) -> Iterator[None]:
        with DrawsNoted() as draws, _Constants(knows), own_saved_tensors():
            yield
        self.drew = draws.found

    def call_model(self, path: str, args: tuple, kwargs: dict, recorder: Recorder | None):
        """Call the model, or the submodule at `path`, in its present mode, on fake tensors; they stay in its tables, which the caller restores.

        Raises:
            CaptureError: its code asks for a tensor's values, or changes what the model is made of; names the line.
            ParameterWritten: its code writes into parameters.
        """
        packed = "position_ids" in kwargs
        substitute(self.model, {id(handle.tensor): self._of_handle(handle) for handle in self.handles.values()})
        branches, answers = decided_branches(packed_sequences=packed, checkpointed=lambda policy: counts_nothing(self.model)), recorder or contextlib.nullcontext()
        writes = _Writes({name: self._of_handle(handle) for name, handle in self.handles.items() if handle.kind is Kind.PARAM})
        memory, kept = [(name, fake, memory_of(fake)) for name, fake in self.of_buffers()], structure_kept(self.model)
        tags = Tags(leaf for leaf in (*pytree.tree_leaves((args, kwargs)), *map(self._of_handle, self.handles.values())) if isinstance(leaf, Tensor))
        try:
            with self._mode, compiling(), branches, WrittenOut(), explained(_name(self.model, path)), kept, answers, writes, self._watched(self._knows):
                result = self.model.get_submodule(path)(*args, **kwargs)
            tags.check_kept(leaf for leaf in objects.flatten((result, args, kwargs))[0] if isinstance(leaf, Tensor))
            if moved := [name for name, fake, before in memory if memory_of(fake) != before]:
                for name in moved:
                    self._managed.pop(name)
                raise CaptureError(f"the forward sets .data of the buffer {moved[0]!r}: write into it (copy_), or assign to the attribute of the module")
            return result
        except ParameterWritten as error:
            for name in error.names:
                self._managed.pop(name, None)  # it may have another's memory now
            raise

    def call_model_lazily(self, attributes: Mapping[str, Tensor], placed: Callable, check: Callable, args: tuple, kwargs: dict):
        """The same, with the model's code running on lazy tensors, which follow code that fake tensors cannot.

        Args:
            attributes, placed, check: of `infer_call`.

        Raises:
            CaptureError: it cannot be recorded; names the line.
            NotRecorded: it writes into its arguments.
            ParameterWritten: it writes into parameters.
        """
        watching = self._watched(self._knows)
        result, after, written = infer_call(self.model, self.model_tensors(), attributes, args, kwargs, fake=self._like, watching=watching, placed=placed, check=check)
        if names := {name: "" for name, handle in self.handles.items() if handle.kind is Kind.PARAM and any(self._of_handle(handle) is tensor for tensor in written)}:
            raise ParameterWritten(names, "")
        if labels := [label for label, held in attributes.items() if any(held is tensor for tensor in written)]:
            raise CaptureError(f"the forward writes into the tensor {labels[0]}, which lazy tensors do not follow: assign a new tensor to it, or register it as a buffer")
        if arguments := [leaf for leaf in pytree.tree_leaves((args, kwargs)) if any(leaf is tensor for tensor in written)]:
            raise NotRecorded(f"it writes into a tensor of shape {list(arguments[0].shape)} that is not part of the recording")
        refill((args, kwargs), after)
        return result

    def _like(self, meta: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu")

    def buffers(self) -> list[tuple[int, int]]:
        """The buffers in the model's tables, by identity and version counter: another list where a call on fakes changed one."""
        held = (buffer for module in self.model.modules() for buffer in module._buffers.values() if buffer is not None)
        with torch._C.DisableTorchFunctionSubclass():
            return [(id(self._of_handle(handle_of(buffer))) if handle_of(buffer) else id(buffer), self._version(buffer)) for buffer in held]

    def owner(self, fake: Tensor) -> Handle | None:
        """The parameter or buffer whose memory a result on fake tensors has: it is a view of it."""
        if len(self._names) != len(self._managed):
            self._names = {memory_of(own): name for name, own in self._managed.items()}
        name = self._names.get(memory_of(fake))
        own = None if name is None else self._managed.get(name)
        return self.handles.get(name) if own is not None and name is not None and memory_of(own) == memory_of(fake) else None

    def replaced_buffers(self) -> frozenset[str]:
        """The buffers in whose place a call on fakes has put other tensors, which are in the model's tables."""
        now = TensorsNow(self.model)
        return frozenset(name for name, fake in self.of_buffers() if now.get(name) is not fake and handle_of(now.get(name)) is None)

    def of_buffers(self) -> list[tuple[str, Tensor]]:
        """The fake tensor of every buffer, by name."""
        return [(name, self._of_handle(handle)) for name, handle in self.handles.items() if handle.kind is Kind.BUFFER]

    def _version(self, buffer: Tensor) -> int:
        handle = handle_of(buffer)
        return self._of_handle(handle)._version if handle else buffer._version

    def model_tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer of the model under all its names, fake; a tied tensor is one fake."""
        named = (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False))
        return {name: self._of_handle(tensor._graphacc_handle) for name, tensor in named}

    def _of_handle(self, handle: Handle) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = handle.tensor
            fake = self._managed.get(handle.name)
            if fake is None or fake.requires_grad != tensor.requires_grad or (fake.shape, fake.dtype) != (tensor.shape, tensor.dtype):
                fake = self._mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
                self._managed[handle.name] = fake
                self._names.clear()
            return fake


class _Constants(TorchDispatchMode):
    """Refuses tensors with values that nothing guards, and writes into any.

    Args:
        knows: whether a tensor is guarded; None: tensors with values are no part of the recording.
    """

    def __init__(self, knows: Callable[[Tensor], bool] | None):
        super().__init__()
        self._knows = knows
        self._known: dict[int, tuple[Tensor, int]] = {}  # identity -> a tensor, its version counter

    def __exit__(self, failure, *rest):
        super().__exit__(failure, *rest)
        if failure is None and (written := [tensor for tensor, version in self._known.values() if version_of(tensor) != version]):
            raise _written_into(written[0], "through a view or its .data")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # PyTorch asks twice for each operator, and the modes below would all be called
        kwargs = kwargs or {}
        real = () if func in _LIFTS else [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and _is_real(leaf)]
        if real and self._knows is None:
            raise NotRecorded(f"it uses a tensor of shape {list(real[0].shape)} that is no argument")
        for tensor in real:
            if any(tensor is written for written in written_by(func, args, kwargs)):
                raise _written_into(tensor, func._schema.name.removeprefix("aten::"))
            if id(tensor) not in self._known:
                if tensor.requires_grad and torch.is_grad_enabled():
                    raise CaptureError(
                        f"the model uses a tensor of shape {list(tensor.shape)} that requires a gradient but is no registered parameter: a captured "
                        "step trains registered parameters only. Make it an nn.Parameter attribute of a submodule"
                    )
                if tensor.untyped_storage().resizable() and self._knows is not None and not self._knows(tensor):  # NumPy's memory is that of an array, which is guarded
                    raise CaptureError(
                        f"the model uses a tensor of shape {list(tensor.shape)} that it has neither as a parameter, a buffer or an attribute nor as a variable, so that "
                        "nobody sees when it changes: register it with register_buffer, or pass it to the model"
                    )
                self._known[id(tensor)] = tensor, version_of(tensor)
        return func(*args, **kwargs)


def _written_into(tensor: Tensor, how: str) -> CaptureError:
    return CaptureError(
        f"the forward writes into a tensor of shape {list(tensor.shape)} ({how}) that is no buffer of the model: a captured step "
        "keeps only buffers and parameters from one step to the next. Register it with register_buffer"
    )


_LIFTS = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)  # of a tensor that is made inside


def _is_real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type not in ("xla", "meta")


class _Writes(TorchDispatchMode):
    """Raises `ParameterWritten` at its end if the memory of a parameter was written inside, or replaced (``parameter.data = ...``)."""

    def __init__(self, parameters: dict[str, Tensor]):
        super().__init__()
        self._parameters = [(name, fake, memory_of(fake)) for name, fake in parameters.items()]
        self._names = {memory: name for name, _, memory in self._parameters}
        self._written: dict[str, str] = {}  # name -> the user's line

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            if (name := self._names.get(memory_of(tensor))) is not None:
                self._written.setdefault(name, calling_line() or "")
        return func(*args, **kwargs)

    def __exit__(self, failure, *rest):
        super().__exit__(failure, *rest)
        replaced = {name: "" for name, fake, memory in self._parameters if memory_of(fake) != memory}
        if failure is None and (written := self._written | replaced):
            raise ParameterWritten(written, next(filter(None, written.values()), ""))


def _name(model: nn.Module, path: str) -> str:
    return f"the submodule {path} ({type(model.get_submodule(path)).__name__})" if path else f"the model {type(model).__name__}"
