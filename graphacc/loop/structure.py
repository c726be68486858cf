"""The modules of a model, what they hold and what they do in a call, all of which the loop may exchange."""

import collections
import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class Structure:
    """The modules of a model, and which tensors they hold as parameters and buffers."""

    def __init__(self, model: nn.Module):
        self.modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        tables = [vars(module)[table] for module in self.modules for table in ("_modules", "_parameters", "_buffers")]
        self._tables = tables
        self._held = [value for table in tables for value in table.values()]
        self._sizes = [len(table) for table in tables]
        with torch._C.DisableTorchFunctionSubclass():
            named = (*model.named_parameters(), *model.named_buffers())
            self.sparse = next((name for name, tensor in named if tensor.layout is not torch.strided), None)
        self._counts = collections.Counter(map(id, self._held))

    def count(self, tensor: Tensor) -> int:
        """In how many places the modules hold a tensor."""
        return self._counts[id(tensor)]

    def is_current(self) -> bool:
        """Whether all of them are still there, and nothing else is."""
        now = itertools.chain.from_iterable(map(dict.values, self._tables))
        return list(map(len, self._tables)) == self._sizes and all(map(operator.is_, now, self._held))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """What the loop has exchanged for the time of a call (`torch.func.functional_call`) is as it was inside; tensors alone, not names that are new or gone."""
        places = [(table, name) for table in self._tables for name in table]
        if len(places) != len(self._held):
            yield
            return
        exchanged = [(table, name, table[name]) for (table, name), held in zip(places, self._held) if table[name] is not held]
        for (table, name), held in zip(places, self._held):
            table[name] = held
        try:
            yield
        finally:
            for table, name, given in exchanged:
                table[name] = given


def persistent_buffers(model: nn.Module) -> set[str]:
    """The buffers that a state_dict of a model has, under all their names, without running its hooks."""
    modules = model.named_modules(remove_duplicate=False)
    found = ((path, name, module) for path, module in modules for name, _ in module.named_buffers(recurse=False, remove_duplicate=False))
    return {f"{path}.{name}" if path else name for path, name, module in found if name not in getattr(module, "_non_persistent_buffers_set", ())}


def code_of(modules: Iterable[nn.Module]) -> tuple[tuple, tuple]:
    """The classes of modules, and what these do in a call: the loop may exchange both."""
    kinds = tuple(map(type, modules))
    return kinds, tuple(kind.forward for kind in dict.fromkeys(kinds))
