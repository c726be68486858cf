"""Running a module's code on other tensors, and giving the module back exactly as it was."""

import contextlib
import dataclasses
import typing
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from graphacc._compat.torch_ import own_parametrization_cache, patched
from graphacc.errors import CaptureError

_GIVEN = "_graphacc_given"  # names of the attributes that a replacement has from what it replaces
_OF_FAKES = {"constant", "dispatch_keys", "fake_device", "fake_mode", "pytype", "real_tensor"}  # attributes of every fake tensor
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


@dataclasses.dataclass(frozen=True)
class Named:
    """A distinct parameter or buffer, the first name that it has in the model, and its other names."""

    name: str
    tensor: Tensor
    aliases: tuple[str, ...]


def distinct_parameters(model: nn.Module) -> list[Named]:
    """Every parameter once, in the order of ``model.named_parameters()``."""
    return _distinct(model.named_parameters(remove_duplicate=False))


def distinct_buffers(model: nn.Module) -> list[Named]:
    """Every buffer once, in the order of ``model.named_buffers()``."""
    return _distinct(model.named_buffers(remove_duplicate=False))


class TensorsNow:
    """The parameters and buffers of a module by name, as it has them when they are asked for: its code may replace a buffer."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.get(name)
        assert tensor is not None, f"{type(self._module).__name__} has no {name}"
        return tensor

    def get(self, name: str) -> Tensor | None:
        """None where the module has no such tensor any more."""
        path, _, attribute = name.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return None
        found = owner._parameters.get(attribute)
        return owner._buffers.get(attribute) if found is None else found


def _distinct(pairs: Iterator[tuple[str, Tensor]]) -> list[Named]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in pairs:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [Named(all_names[0], tensors[key], tuple(all_names[1:])) for key, all_names in names.items()]


@contextlib.contextmanager
def borrowed(model: nn.Module, *, hooks: bool = False):
    """Restore every attribute of every submodule at the end of the block, also after an exception.

    Args:
        hooks: restore the tables of hooks, too: transformers installs some at a model's first call, and notes that in an attribute.

    Tensors are put back by reference: nothing is copied, so the block must not write into the model's own tensors.

    Raises:
        CaptureError: a part of it is no module of Python.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"the submodule {path} is a {type(module).__name__}: TorchScript's code and tensors cannot be captured; use the module that it was made from"
            )
    tables = (*_TABLES, *_HOOKS, *_HOOK_OPTIONS) if hooks else _TABLES
    saved = [(module, dict(vars(module)), {table: vars(module)[table].copy() for table in tables if table in vars(module)}) for module in model.modules()]
    try:
        with own_parametrization_cache(), patched(nn.Module, to=_to):
            yield
    finally:
        for module, attributes, contents in saved:
            _restore(vars(module), attributes)
            for table, content in contents.items():
                refill(vars(module)[table], content)


_original_to = nn.Module.to


def _to(module: nn.Module, *args, **kwargs) -> nn.Module:
    """``module.to(dtype)`` in a forward, which most often changes nothing (transformers' routers), while other tensors are in the places of the module's own."""
    device, dtype, _, memory_format = typing.cast(typing.Any, torch._C)._nn._parse_to(*args, **kwargs)
    tensors = [*module.parameters(), *module.buffers()]
    is_same = all((device is None or device == x.device) and (dtype is None or dtype == x.dtype or not x.is_floating_point()) for x in tensors)
    return module if is_same and memory_format is None else _original_to(module, *args, **kwargs)


@contextlib.contextmanager
def structure_kept(model: nn.Module) -> Iterator[None]:
    """Refuse code that changes what a model is made of, which a program cannot do.

    Raises:
        CaptureError: a module, parameter or buffer is new or gone, trains where it did not or the other way round, or requires a gradient, or none any more.
    """
    before = _structure_of(model)
    yield
    after = _structure_of(model)
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        name = changed[0]
        what = "adds" if name not in before else "removes" if name not in after else "changes the mode, or requires_grad, of"
        raise CaptureError(f"the forward {what} {name}, which a compiled program does not do: PyTorch runs this call; do it before the loop to have all calls compiled")


class Tags:
    """The attributes that the user has given tensors."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._before = {id(tensor): (tensor, _tags_of(tensor)) for tensor in tensors}

    def check_kept(self, results: Iterable[Tensor]) -> None:
        """Neither these tensors nor results of the code have got one.

        Raises:
            CaptureError: a tensor has.
        """
        found: list[tuple[str, Tensor]] = []
        for tensor, before in (*self._before.values(), *((tensor, {}) for tensor in results if id(tensor) not in self._before)):
            for name, value in _tags_of(tensor).items():
                if before.get(name, before) is not value:
                    found.append((name, tensor))
                    delattr(tensor, name)
        if found:
            name, tensor = found[0]
            raise CaptureError(f"the forward sets the attribute {name!r} of a tensor of shape {list(tensor.shape)}, which a compiled program does not do: return it, too")


def _tags_of(tensor: Tensor) -> dict[str, object]:
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_") and name not in _OF_FAKES}


def _structure_of(model: nn.Module) -> dict[str, object]:
    """Of every module which it is and whether it trains, of every parameter whether it requires a gradient, and the buffers, by name."""
    found: dict[str, object] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found[f"the module {path!r}"] = id(module), module.training
        found |= {f"the parameter {prefix + name!r}": None if tensor is None else tensor.requires_grad for name, tensor in module._parameters.items()}
        found |= {f"the buffer {prefix + name!r}": name in module._non_persistent_buffers_set for name in module._buffers}
    return found


def _restore(current: dict, before: dict) -> None:
    for name in [name for name in current if name not in before]:
        del current[name]
    current.update(before)


def refill(table: dict | set, content: dict | set) -> None:
    table.clear()
    table.update(content)


def substitute(model: nn.Module, replacements: dict[int, Tensor]) -> None:
    """Put ``replacements[id(tensor)]`` in the place of every parameter and buffer that it names, under all its names, with the attributes that the user has set."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in replacements:
                    table[name] = replacement = replacements[id(tensor)]
                    if isinstance(tensor, nn.Parameter):
                        vars(replacement)["_is_param"] = True  # by which torch knows tensors of other classes as parameters
                    attributes, held = attributes_of(tensor), vars(replacement)
                    if attributes or _GIVEN in held:
                        for given in held.pop(_GIVEN, ()):
                            held.pop(given, None)
                        held.update(attributes, **{_GIVEN: tuple(attributes)})


def attributes_of(tensor: Tensor) -> dict[str, object]:
    """What the user has set on a parameter or buffer, such as ``weight._no_weight_decay``."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_graphacc") and name != "_is_param"}
