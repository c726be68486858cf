"""Values that a model made on the meta device is still to get, and who makes them.

`managed.manage` gives every parameter and buffer on the meta device a host tensor without memory, and a handle that is `missing` a value. Values come
from files (`graphacc.load_safetensors`, `graphacc.load_checkpoint`), from the loop's own code (`nn.init`, ``model.init_weights()``), or, where something
that is missing is used, from here: the initialisers of the model's own modules run in the order in which constructors run them, with the random numbers
that torch's generator stood at in `graphacc.compile`. A value goes to the devices when the next one is written, and its host memory is free again: a
process holds its shards and one module.

What is guaranteed: parameters that ``reset_parameters()``, ``_reset_parameters()``, ``_init_weights(module)`` or ``init_weights()`` make are those of an
ordinary construction under the same seed, if constructors draw in the order of their submodules, each before its owner, and through these methods alone.
A tied weight has the value that its first owner gives it. What has a value already keeps it.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphacc.errors import LoopError
from graphacc.graph import Kind
from graphacc.loop.managed import handle_of
from graphacc.runtime.distributed import share

if TYPE_CHECKING:
    from graphacc.loop.engine import Engine
    from graphacc.loop.managed import Handle

log = logging.getLogger("graphacc")

SHOWN = 8
"""Names in a message."""


class Deferred:
    """The missing values of one model."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._generator = torch.get_rng_state()
        self._written: "Handle | None" = None  # the last one that the loop wrote, if nothing has computed with it since
        self._open: "set[Handle] | None" = None  # those that the initialiser which runs may write
        self._kept: "dict[Handle, Tensor | None]" = {}  # written by an initialiser that may not -> its value; None: the devices have it
        self._lent: "dict[Handle, int]" = {}  # got memory from an initialiser -> version counter then

    @property
    def making(self) -> bool:
        """An initialiser runs."""
        return self._open is not None

    @property
    def missing(self) -> bool:
        return any(handle.missing for handle in self.engine.handles.values())

    # ---- what the loop does with missing and with written values

    def note_write(self, handle: "Handle") -> None:
        """A value is about to be written on the host: the one that was written before goes to the devices.

        Under autograd none does: PyTorch's graph may hold a parameter that it has computed with.
        """
        if self._open is not None and handle not in self._open and handle not in self._kept:
            on_devices = handle.frees_host and not handle.host_is_newer and self.engine.programs.holds(handle.kind, handle.name)
            self._kept[handle] = None if on_devices else handle.host_value().clone()
        if torch.is_grad_enabled():
            self._written = None
        elif handle is not self._written:
            self.flush()
            self._written = handle

    def note_read(self) -> None:
        """PyTorch computes with what is on the host."""
        self._written = None

    def flush(self) -> None:
        """The value that was written last goes to the devices."""
        handle, self._written = self._written, None
        if handle is not None and self._is_set(handle):
            self._restore(handle)
            if handle.frees_host and handle.host_is_newer and not handle.has_alias and self.engine.programs.offload is None:
                self.engine.programs.load(handle.kind, handle.name, handle.host_value())
                handle.mark_uploaded()
                handle.release()

    def _restore(self, handle: "Handle") -> None:
        """Undo what an initialiser has written without being asked to."""
        if handle not in self._kept:
            return
        value = self._kept.pop(handle)
        if value is not None:
            handle.overwrite(value)
        else:
            handle.mark_uploaded()
            handle.release()

    def read(self, handle: "Handle") -> None:
        """Somebody looks at a missing value: it is made, or, if that is an initialiser, gets memory in which it is seen whether it is written."""
        if not self.making:
            return self.require([handle])
        handle.allocate()
        value = handle.host_value()
        if (mark := _mark(value.dtype)) is not None:
            value.fill_(mark)
        with torch._C.DisableTorchFunctionSubclass():
            self._lent[handle] = handle.tensor._version
        return None

    def _is_set(self, handle: "Handle") -> bool:
        """Whether a value is one: an initialiser has written all of it. Otherwise it is missing again."""
        if (version := self._lent.pop(handle, None)) is None:
            return True
        value, mark = handle.host_value(), _mark(handle.host_value().dtype)
        if mark is None:
            found = value._version != version
        else:
            found = not (value.isnan() if mark != mark else value == mark).any()
        if not found:
            handle.missing = handle.host_is_stale = True
            handle.release()
        return found

    # ---- making them

    def require(self, handles: "Iterable[Handle]") -> None:
        """See to it that these have values.

        Raises:
            LoopError: no initialiser makes one of them; names all such, and what to do.
        """
        wanted = [handle for handle in handles if handle.missing]
        if wanted:
            self._make({handle for handle in self.engine.handles.values() if handle.missing})
        if wanted := [handle for handle in wanted if handle.missing]:
            raise LoopError(_unmade(self.engine.model, wanted))

    def _make(self, missing: "set[Handle]") -> None:
        """Run the initialisers of all modules that have something missing."""
        owners, counts = _first_owners(self.engine.model), {}
        versions = {handle: handle.version for handle in self.engine.handles.values()}
        state = share(lambda: self._generator.numpy().tobytes().hex())
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
            for module, run, text in _initialisers(self.engine.model):
                if not any(handle in missing for handle in _within(module)):
                    continue
                others = {handle for handle, owner in owners.items() if owner is not module and handle in _own(module)}
                with self._writing(missing - others):
                    run()
                counts[text] = counts.get(text, 0) + 1
        for handle, version in versions.items():
            handle.forget_writes(version)
        if made := sum(not handle.missing for handle in missing):
            log.warning(
                "graphacc: %d parameters and buffers of the meta device were made by %s; what else constructors do to values is not repeated",
                made,
                ", ".join(f"{text} ({count} modules)" for text, count in counts.items()),
            )

    @contextlib.contextmanager
    def _writing(self, handles: "set[Handle]") -> Iterator[None]:
        """Inside, an initialiser runs that may write these; at the end they are on the devices, and others are as they were."""
        self.flush()
        self._open = handles
        try:
            yield
            self.flush()
            for handle in list(self._lent):
                self._is_set(handle)
            for handle in list(self._kept):
                self._restore(handle)
        finally:
            self._open = None


def _mark(dtype: torch.dtype) -> float | int | None:
    """What stands in memory that nobody has written yet; None: the dtype has no value to spare."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype is torch.bool else torch.iinfo(dtype).max


def _initialisers(model: nn.Module) -> "Iterator[tuple[nn.Module, Callable[[], object], str]]":
    """(module, its initialiser, what that is called), in the order of construction: submodules before their owner, whose scheme for all of them comes last."""
    done: set[nn.Module] = set()
    for module in _construction_order(model):
        run = next((run for name in ("reset_parameters", "_reset_parameters") if (run := _method(module, name, 0)) is not None), None)
        if run is not None:
            yield module, run, f"{run.__name__}()"
        if (scheme := _method(module, "_init_weights", 1)) is not None:
            for inner in _construction_order(module):
                if inner not in done:
                    yield inner, functools.partial(scheme, inner), f"{type(module).__name__}._init_weights(module)"
            done.update(module.modules())
    if not done and (run := _method(model, "init_weights", 0)) is not None:
        yield model, run, f"{type(model).__name__}.init_weights()"


def _construction_order(model: nn.Module) -> list[nn.Module]:
    """Every module once, after the modules that it holds."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found:
                visit(child)
        found[module] = None

    visit(model)
    return list(found)


def _method(module: nn.Module, name: str, num_required: int) -> Callable | None:
    """A method of a module, if it has to be given that many arguments."""
    method = getattr(module, name, None)
    if not inspect.ismethod(method):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in inspect.signature(method).parameters.values() if p.default is inspect.Parameter.empty and p.kind in kinds]
    return method if len(required) == num_required else None


def _own(module: nn.Module) -> "set[Handle]":
    tensors = (*module._parameters.values(), *module._buffers.values())
    return {handle for tensor in tensors if (handle := handle_of(tensor)) is not None}


def _within(module: nn.Module) -> "Iterator[Handle]":
    return (handle for inner in module.modules() for handle in _own(inner))


def _first_owners(model: nn.Module) -> "dict[Handle, nn.Module]":
    found: "dict[Handle, nn.Module]" = {}
    for module in _construction_order(model):
        for handle in _own(module):
            found.setdefault(handle, module)
    return found


def _unmade(model: nn.Module, handles: "list[Handle]") -> str:
    """Which values are missing and why, and what to do."""
    lines = [f"{len(handles)} values of a model that was made on the meta device are missing, and its modules have no method that makes them:"]
    for handle in handles[:SHOWN]:
        owner = model.get_submodule(handle.name.rpartition(".")[0])
        with torch._C.DisableTorchFunctionSubclass():
            lines.append(f"  {'parameter' if handle.kind is Kind.PARAM else 'buffer'} {handle.name} {list(handle.tensor.shape)} of {type(owner).__name__}")
    lines += [f"  ... and {len(handles) - SHOWN} more"] if len(handles) > SHOWN else []
    lines.append(
        "Load them (graphacc.load_safetensors, graphacc.load_checkpoint), write them (torch.nn.init, parameter.copy_(value), module.buffer = value), give the "
        "module a reset_parameters() that makes them, or make the model with its buffers on the CPU (accelerate.init_empty_weights)"
    )
    return "\n".join(lines)
