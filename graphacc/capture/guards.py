"""What a trace watches for in the user's code, because the captured step would silently compute something else."""

import contextlib
import functools
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphacc._compat.torch_ import patched, unwrapped, without_modes
from graphacc.capture.source import is_user_file
from graphacc.errors import CaptureError

_IN_PLACE_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


class ForeignWrites(TorchFunctionMode):
    """Refuses writes into real tensors (neither fake nor lazy): a tensor that is neither parameter, buffer nor made in the forward.

    It also answers ``torch.rand([]) < 0``: layer drop of transformers' models, switched off.
    """

    def __init__(self):
        super().__init__()
        self._draws: dict[int, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if _writes(name) and args and type(unwrapped(args[0])) in (Tensor, nn.Parameter) and args[0].device.type != "xla":
            raise CaptureError(
                f"the forward writes into a tensor of shape {list(args[0].shape)} ({name}) that is no buffer of the model: a "
                f"captured step "
                "keeps only buffers and parameters from one step to the next. Register it with register_buffer."
            )
        if name in ("lt", "__lt__") and id(args[0]) in self._draws and not isinstance(args[1], Tensor) and args[1] <= 0:
            return False
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self._draws[id(result)] = result
        return result


def _writes(name: str) -> bool:
    return name in ("__setitem__", *_IN_PLACE_OPERATORS) or (
        name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    )


@contextlib.contextmanager
def watched_attributes(model: nn.Module, replaced: dict[int, str]) -> Iterator[None]:
    """Note plain attributes that the block changes, which no captured step can do.

    Tensors that it replaces are added to `replaced` as id -> dotted name: one that the block also reads is state of the
    model. A number that it changes keeps its present value in every step, which a warning says.
    """
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    yield
    for path, module in model.named_modules():
        after = vars(module)
        for name, value in before.get(path, {}).items():
            label = f"{path}.{name}" if path else name
            if isinstance(value, Tensor) and after.get(name) is not value:
                replaced[id(value)] = label
            elif type(value) in (int, float) and after.get(name) != value:
                warnings.warn(
                    f"the forward changes attribute {label!r} from {value!r} to {after.get(name)!r}; a captured step computes "
                    f"with "
                    f"{value!r} always. What must change from step to step belongs in a buffer (register_buffer).",
                    stacklevel=2,
                )


@contextlib.contextmanager
def written_once(model: nn.Module) -> Iterator[None]:
    """Warn where a function that plain torch would run twice, since it is checkpointed, writes into buffers."""
    before = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
    yield
    written = [name for name, buffer in model.named_buffers() if before.get(name) != (id(buffer), buffer._version)]
    if written and torch.is_grad_enabled():
        warnings.warn(
            f"a function given to torch.utils.checkpoint writes buffer(s) {', '.join(written)}: plain PyTorch runs it again in backward and "
            "writes them twice per step, a captured step writes them once, so they differ, and so does a loss that depends on them. For the "
            "same numbers keep what writes buffers (batch norm, spectral norm) out of the checkpointed part",
            stacklevel=2,
        )


class RunsTwice(CaptureError):
    """PyTorch runs a part of the model twice, which neither a program of the model nor one of the part does."""


@contextlib.contextmanager
def counts_nothing(model: nn.Module) -> Iterator[None]:
    """Refuse a function that is checkpointed and writes numbers of modules, which plain torch's second run finds as the first has left them.

    Raises:
        RunsTwice: it does.
    """
    before = [(name, module, dict(vars(module))) for name, module in model.named_modules()]
    yield
    for name, module, held in before if torch.is_grad_enabled() else ():
        if changed := [key for key, value in vars(module).items() if isinstance(value, (int, float, str)) and value is not held.get(key)]:
            raise RunsTwice(
                f"a function given to torch.utils.checkpoint writes {f'{name}.' if name else ''}{changed[0]}: plain PyTorch runs it again in backward, with what the first run "
                "has left, and a captured step runs it once; keep what counts out of the checkpointed part"
            )


def _torch_state() -> bytes:
    with without_modes(), torch._C.DisableTorchFunction():
        return torch.default_generator.get_state().numpy().tobytes()


def _refused(name: str) -> Callable:
    original, thread = getattr(torch.random, name), threading.get_ident()

    @functools.wraps(original)
    def called(*args, **kwargs):
        if threading.get_ident() != thread or not is_user_file(sys._getframe(1).f_code.co_filename):  # such as torch's own checkpoints, which keep the generator as it was
            return original(*args, **kwargs)
        raise CaptureError(f"the forward calls torch.{name}, and a program does not draw from torch's generator: set it in the loop, or draw outside of the model and pass the numbers in")

    called.refused = True  # type: ignore[attr-defined]
    return called


_SEEDS = ("manual_seed", "seed", "get_rng_state", "set_rng_state", "fork_rng")


@contextlib.contextmanager
def no_python_randomness() -> Iterator[None]:
    """Refuse code that draws from the generators of Python or NumPy: its choice would be the same in every step. Nor does it seed torch's, which a program does not draw from."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state() if numpy else (), _torch_state()
    drawn = []
    try:
        refused = {name: _refused(name) for name in _SEEDS if not hasattr(getattr(torch.random, name), "refused")}  # captures in captures refuse once
        with patched(torch, **refused), patched(torch.random, **refused):
            yield
    finally:  # PyTorch's own run, or the next capture, draws them again
        if random.getstate() != python_state:
            random.setstate(python_state)
            drawn.append("Python's random module")
        if numpy and any(not numpy.array_equal(now, before) for now, before in zip(numpy.random.get_state(), numpy_state, strict=True)):
            numpy.random.set_state(numpy_state)
            drawn.append("numpy.random")
        if threading.active_count() == 1 and _torch_state() != torch_state:  # another thread may draw its batches
            with without_modes(), torch._C.DisableTorchFunction():
                torch.default_generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
            drawn.append("torch's generator by itself, or seeds it,")
    if drawn:
        raise CaptureError(_PYTHON_RANDOM.format(drawn[0]))


_PYTHON_RANDOM = (
    "the forward draws from {}: the captured step would repeat that one draw in every step. Draw with torch (torch.rand, "
    "torch.randint), "
    "whose operators become part of the step, or draw outside of the model and pass the result in"
)


@contextlib.contextmanager
def dense_gradients(model: nn.Module) -> Iterator[None]:
    """Embeddings with ``sparse=True`` give dense gradients inside the block: the same numbers, zeros written out."""
    sparse = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse]
    for module in sparse:
        module.sparse = False
    try:
        yield
    finally:
        for module in sparse:
            module.sparse = True


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Keep torch from logging the traceback of an error that is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
