"""The modules of a model, what they hold and what they do in a call, all of which the loop may exchange."""

import collections
import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from graphacc.capture.borrow import refill


class Structure:
    """The modules of a model, and which tensors they hold as parameters and buffers."""

    def __init__(self, model: nn.Module):
        self.modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._where = [(vars(module), table) for module in self.modules for table in ("_modules", "_parameters", "_buffers")]
        self._tables = tables = [attributes[table] for attributes, table in self._where]
        filled = [(*where, table) for where, table in zip(self._where, tables) if table]
        self._filled = tuple(zip(*filled)) if filled else ((), (), ())
        self._held = [value for table in tables for value in table.values()]
        self._names = [tuple(table) for table in tables]
        self._sizes = [len(table) for table in tables]
        with torch._C.DisableTorchFunctionSubclass():
            named = (*model.named_parameters(), *model.named_buffers())
            self.sparse = next((name for name, tensor in named if tensor.layout is not torch.strided), None)
        self._counts = collections.Counter(map(id, self._held))
        first = {id(value): index for index, value in reversed(list(enumerate(self._held))) if value is not None}
        self.places = tuple(self._names), tuple(first.get(id(value)) for value in self._held)  # equal where the same names hold the same thing several times

    def count(self, tensor: Tensor) -> int:
        """In how many places the modules hold a tensor."""
        return self._counts[id(tensor)]

    def is_current(self) -> bool:
        """Whether all of them are still there, and nothing else is."""
        attributes, names, tables = self._filled
        if not all(map(operator.is_, map(dict.__getitem__, attributes, names), tables)):
            return False  # ``del sequential[1]`` makes another table
        now = itertools.chain.from_iterable(map(dict.values, self._tables))
        return list(map(len, self._tables)) == self._sizes and all(map(operator.is_, now, self._held))

    @contextlib.contextmanager
    def restored(self, *, tensors: bool = True) -> Iterator[None]:
        """What the loop has exchanged, added or removed since (`torch.func.functional_call`, another layer) is as it was inside; modules alone without `tensors`."""
        if self.is_current():
            yield
            return
        held, exchanged = iter(self._held), []
        for (attributes, name), table, names in zip(self._where, self._tables, self._names):
            before, now = dict(zip(names, held)), attributes[name]
            if not tensors and name != "_modules":
                continue
            if now is not table or list(table) != list(names) or any(table[name] is not value for name, value in before.items()):
                exchanged.append((attributes, name, now, table, dict(table)))
                attributes[name] = table
                refill(table, before)
        try:
            yield
        finally:
            for attributes, name, now, table, given in exchanged:
                refill(table, given)
                attributes[name] = now


def persistent_buffers(model: nn.Module) -> set[str]:
    """The buffers that a state_dict of a model has, under all their names, without running its hooks."""
    modules = model.named_modules(remove_duplicate=False)
    found = ((path, name, module) for path, module in modules for name, _ in module.named_buffers(recurse=False, remove_duplicate=False))
    return {f"{path}.{name}" if path else name for path, name, module in found if name not in getattr(module, "_non_persistent_buffers_set", ())}


def code_of(modules: Iterable[nn.Module]) -> tuple[tuple, tuple]:
    """The classes of modules, and what these do in a call: the loop may exchange both."""
    kinds = tuple(map(type, modules))
    return kinds, tuple(kind.forward for kind in dict.fromkeys(kinds))
