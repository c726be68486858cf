"""torch_xla's private API, in one place. Tried with torch_xla 2.9.0, the last release, which loads with torch 2.9 alone.

In a capture torch_xla only traces: its tensors stand for data that it never gets, and nothing is executed but constants of the
model's code. Its import edits the environment, for its own client, which is started at once, and replaces functions and settings of
torch's (`_REPLACED`); then all of that is put back: the process belongs to the user.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from graphacc._compat.probes import CAPTURED_HLO, TRIED, has, why_off
from graphacc.errors import CaptureError

DEVICE = "xla"


def installed() -> bool:
    """Whether torch_xla is there; does not import it."""
    return importlib.util.find_spec("torch_xla") is not None


@functools.cache
def library() -> ModuleType:
    """torch_xla's extension module; the first call imports torch_xla and starts its CPU client (three seconds, 7 threads).

    If nobody else has imported it, nothing but `executing` may execute a graph from then on: to print a lazy tensor that was left
    over, as a debugger does with the locals of a failed capture, would end the process.

    Raises:
        CaptureError: torch_xla is missing, or does not fit torch.
    """
    if not has(CAPTURED_HLO):
        raise CaptureError(f"capture by lazy tensors is off: {why_off(CAPTURED_HLO)}; install a version with which it was tried ({TRIED})")
    only_ours = "torch_xla" not in sys.modules
    try:
        with _environment(PJRT_DEVICE="CPU"), _unchanged():
            import torch_xla

            placeholder((1,), torch.float32)
    except (ImportError, OSError, RuntimeError) as error:
        raise CaptureError(
            f"capture by lazy tensors needs torch_xla, which cannot be used here ({error}): install torch==2.9.1 and torch_xla==2.9.0 "
            '(pip install "graphacc[lazy]"), or choose capture="fx"'
        ) from error
    if only_ours:
        torch_xla._XLAC._set_allow_execution(False)
    return torch_xla._XLAC


@contextlib.contextmanager
def _environment(**defaults: str) -> Iterator[None]:
    """Variables that are set where they are not, for the time of the block; whatever the block changes is put back."""
    before = dict(os.environ)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


_REPLACED = (
    ("torch.nn", "GRU"),  # by one that scans
    ("torch.nn.utils", "clip_grad_norm_"),
    ("torch.distributed", "new_group"),
    ("torch._dynamo.config", "automatic_dynamic_shapes"),
    ("torch._dynamo.config", "specialize_float"),
    ("torch._functorch.config", "view_replay_for_aliased_outputs"),
)
"""What the import of torch_xla replaces for the whole process."""


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Whatever the block does to `_REPLACED`, to the filters of warnings and to the root logger's handlers is undone."""
    before = {(module, name): getattr(importlib.import_module(module), name) for module, name in _REPLACED}
    handlers = logging.root.handlers[:]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logging.root.handlers[:] = handlers
        for (module, name), value in before.items():
            setattr(sys.modules[module], name, value)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Numbers are constants of the graph, and nothing is executed, inside the block.

    Backward runs in this thread: autograd makes its threads, one per device that is known then, at the first backward of the
    process, which may have come before torch_xla was imported.
    """
    xla = library()
    inlines, executes = xla._get_xla_all_numbers_special_scalars(), xla._get_allow_execution()
    xla._set_xla_all_numbers_special_scalars(True)
    xla._set_allow_execution(False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        xla._set_xla_all_numbers_special_scalars(inlines)
        xla._set_allow_execution(executes)


@contextlib.contextmanager
def executing() -> Iterator[None]:
    """Lifts the ban of `tracing`. A graph that reads a placeholder must not be run: it would end the process."""
    xla = library()
    before = xla._get_allow_execution()
    xla._set_allow_execution(True)
    try:
        yield
    finally:
        xla._set_allow_execution(before)


def from_host(tensor: Tensor) -> Tensor:
    """A tensor of the host as a constant; torch_xla moves no imaginary parts in double precision."""
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_complex_copy(torch.view_as_real(tensor).to(DEVICE)) if tensor.dtype == torch.complex128 else tensor.to(DEVICE)


def to_host(tensor: Tensor) -> Tensor:
    """The value of a lazy tensor that depends on no placeholder; inside `executing`."""
    return torch.view_as_complex(torch.view_as_real_copy(tensor).cpu()) if tensor.dtype == torch.complex128 else tensor.cpu()


@functools.cache
def runtime_device() -> torch.device:
    """The device of torch_xla's own runtime, on which from now on everything is executed that is not traced here."""
    import torch_xla

    library()._set_allow_execution(True)
    return torch_xla.device()


def set_seed(seed: int) -> None:
    """Set the seed of torch_xla's own random numbers."""
    import torch_xla

    torch_xla.manual_seed(seed)


def run_recorded(tensors: Sequence[Tensor]) -> None:
    """Execute what torch_xla has recorded for the values of `tensors`, without waiting for it.

    Not ``torch_xla.sync()``: that also runs what is left over of a failed capture, whose placeholders would end the process.
    """
    library()._xla_sync_multi(list(tensors), [], False, True)


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without data or memory that becomes a parameter of the graph.

    It is a copy, in the graph, of the one without data: whatever wants its values (an operator that torch_xla computes on the host, a
    debugger) then has to execute the copy, which is forbidden, where reading the original would end the process.
    """
    from torch_xla.core.xla_builder import create_placeholder_tensor

    empty = create_placeholder_tensor(tuple(shape), dtype)
    return torch.view_copy(empty, empty.shape)


def custom_call(operands: Sequence[Tensor], target: str, results: Sequence[tuple[Sequence[int], torch.dtype]], config: str) -> list[Tensor]:
    """The results, of given shapes and dtypes, of a custom call that the graph makes and nobody here could execute."""
    shapes, dtypes = [list(shape) for shape, _ in results], [dtype for _, dtype in results]
    return library()._xla_custom_call(list(operands), target, shapes, dtypes, False, config, 0, {})


def tensor_id(tensor: Tensor) -> int:
    """Identity of a tensor, the same for the wrapper that keeps track of its views."""
    return library()._xla_get_tensor_id(tensor)


def leaf_id(placeholder: Tensor) -> int:
    """Identity of a placeholder in `leaves`."""
    ((found,), _) = leaves([placeholder])
    return found


def leaves(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The identities and tensors of what the values of `tensors` are computed from, in the order of the HLO's parameters."""
    return library()._get_tensors_xla_device_data_node(list(tensors))


def seed_id() -> int:
    """The identity of torch_xla's own random seed among `leaves`."""
    return library()._get_seed_info_id()


def hlo_proto(tensors: Sequence[Tensor]) -> bytes:
    """The graph of `tensors` as a serialised HloModuleProto, whose result is the tuple of their values."""
    return library()._get_xla_tensors_hlo_proto(list(tensors))
