"""Islands: a model whose own code cannot be captured is run by PyTorch, with the largest parts of it that can be captured compiled.

While PyTorch runs the model, calls of its children are intercepted. A child that can be captured runs as a compiled region (see
`graphacc.loop.regions`); one that cannot is run by PyTorch, and its children are intercepted in turn. So what PyTorch runs is the code
on the way down to what cannot be captured. Small modules are run by PyTorch, too: a compiled call would cost more.
"""

import contextlib
import threading
import typing
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import patched
from graphacc.errors import CaptureError, LoweringError
from graphacc.loop.promise import NotRecorded

MAX_SHAPES = 8
"""Different shapes of its arguments with which a part is compiled; with others PyTorch runs it. Shapes may depend on values there."""

_MANY = "its arguments had more than {} different shapes"

MIN_PARAMETERS = 1 << 16
"""A module without children and with fewer parameters is run by PyTorch."""

if typing.TYPE_CHECKING:
    from graphacc.loop.engine import Engine


class Islands:
    """Which modules of one model PyTorch runs, and the calls of their children while it does."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._split: dict[str, nn.Module] = {}  # modules that PyTorch runs, by path
        self._shapes: dict[str, set[tuple]] = {}
        self._why: dict[str, str] = {}
        self._parts: dict[int, str] = {}  # id -> path of modules whose calls are intercepted
        self._thread: int | None = None  # in which PyTorch runs the model now
        self._depth = 0  # of regions: the code of one runs as it is

    @contextlib.contextmanager
    def compiled_parts(self) -> Iterator[None]:
        """Inside, PyTorch runs the model, and what can be captured of it runs compiled."""
        if self._thread is not None:
            yield
            return
        self._split = {path: module for path, module in self._split.items() if self._is_at(path, module)}
        self._split.setdefault("", self.engine.model)
        self._find_parts()
        original = nn.Module.__call__
        self._thread = threading.get_ident()

        def call(module: nn.Module, *args, **kwargs):
            if self._depth or threading.get_ident() != self._thread or id(module) not in self._parts:
                return original(module, *args, **kwargs)
            path = self._parts[id(module)]
            if path in self._split:
                return self._by_pytorch(path, module, original, args, kwargs)
            return self._call(path, module, original, args, kwargs)

        try:
            with patched(nn.Module, __call__=call):
                yield
        finally:
            self._thread = None

    def _is_at(self, path: str, module: nn.Module) -> bool:
        try:
            return self.engine.model.get_submodule(path) is module
        except AttributeError:
            return False

    def _find_parts(self) -> None:
        self._parts = {}
        for path, module in self._split.items():
            for name, child in _called_children(module):
                child_path = f"{path}.{name}" if path else name
                if _is_worth_it(child):
                    self._parts[id(child)] = child_path

    def _call(self, path: str, module: nn.Module, original: Callable, args: tuple, kwargs: dict):
        engine = self.engine
        if hooked := next((name or path for name, inner in module.named_modules() if inner._backward_hooks or inner._backward_pre_hooks), None):
            return self._divide(path, module, f"it has a backward hook ({hooked})", original, args, kwargs)
        shapes = self._shapes.setdefault(path, set())
        if (key := _shapes(args, kwargs)) not in shapes and len(shapes) >= MAX_SHAPES:
            with engine.by_pytorch.noted(f"the submodule {path} ({type(module).__name__})", _MANY.format(MAX_SHAPES)):
                return original(module, *args, **kwargs)
        shapes.add(key)
        self._depth += 1
        try:
            return engine.call_part(path, args, kwargs)
        except NotRecorded as reason:
            why = str(reason)
        except (CaptureError, LoweringError) as error:
            if engine.options.capture != "auto":
                raise
            why = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
        finally:
            self._depth -= 1
        return self._divide(path, module, why, original, args, kwargs)

    def _divide(self, path: str, module: nn.Module, why: str, original: Callable, args: tuple, kwargs: dict):
        """From now on PyTorch runs a module, and what can be captured of its children is compiled."""
        self._split[path] = module
        self._find_parts()
        self._why[path] = why
        return self._by_pytorch(path, module, original, args, kwargs)

    def _by_pytorch(self, path: str, module: nn.Module, original: Callable, args: tuple, kwargs: dict):
        with self.engine.by_pytorch.noted(f"the submodule {path} ({type(module).__name__})", self._why[path]):
            return original(module, *args, **kwargs)


def _is_worth_it(module: nn.Module) -> bool:
    """Whether a compiled call can be faster than PyTorch's: it costs about a millisecond, and copies between host and devices."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    return bool(sizes) and (any(True for _ in module.children()) or sum(sizes) >= MIN_PARAMETERS)


def _shapes(args: tuple, kwargs: dict) -> tuple:
    return tuple((None if leaf.is_nested else tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module that are called; those of containers in the place of the containers."""
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if type(child).forward is nn.Module.forward or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", grandchild) for inner, grandchild in _called_children(child))
        else:
            yield name, child
