"""Python values that can change while they stay the same objects: whether they have, what they held, and giving it back."""

import argparse
import array
import collections
import collections.abc
import contextvars
import ctypes
import dataclasses
import enum
import functools
import gc
import hashlib
import logging
import multiprocessing.queues
import queue
import random
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from graphacc.capture.numbers import Number
from graphacc.capture.source import is_user_file

PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice)
CONTAINERS = (list, dict, set, tuple, frozenset, collections.deque)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
BYTES = (bytearray, array.array, memoryview, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
VIEWS = (
    *(*BYTES, contextvars.ContextVar, threading.local, threading.Event, type(threading.Lock())),
    *(logging.Logger, weakref.ref, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
)
"""What is looked into by `_seen_in`; libraries' mappings and lists are, too."""
METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
MUTABLE = (*CONTAINERS, *NAMESPACES, *VIEWS, *METHODS, collections.abc.Mapping, collections.abc.MutableSequence, functools.partial, numpy.ndarray, Tensor)
"""What can change while it stays the same object."""
REFILLED = (list, dict, set, collections.deque, *NAMESPACES, numpy.ndarray, *BYTES, threading.local, threading.Event, contextvars.ContextVar)  # those of them that can be put back
CONSUMED = (
    *(Iterator, torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator),
    *(queue.Queue, queue.SimpleQueue, multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue),
)
"""What gives something else each time it is asked."""
LONGEST = 4096
"""Items of a library's mapping or list that are looked through in every step."""
NESTED = 8  # of containers in containers that are looked into


def snapshot(value: object, depth: int = NESTED) -> Hashable:
    """A hashable value that is equal where a capture would read the same."""
    if isinstance(value, Tensor):
        return "tensor", id(value), version_of(value), _memory(value)
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    if type(value) is Number:
        return Same(value)
    if isinstance(value, (float, numpy.generic)):
        return float if isinstance(value, float) else type(value), repr(value.item() if isinstance(value, numpy.generic) else value)  # NaN equals itself, 0.0 is not -0.0
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return "array", value.dtype.str, value.shape, hashlib.blake2b(numpy.ascontiguousarray(value).data, digest_size=16).digest()
    if isinstance(value, METHODS):
        owner, name = owner_of(value), Same(value.__func__) if isinstance(value, types.MethodType) else value.__name__
        return Same(value) if owner is value else ("method", snapshot(owner, depth - 1) if depth else Same(owner), name)
    if isinstance(value, NAMESPACES):
        value = vars(value)
    if isinstance(value, functools.partial):
        value = value.func, value.args, value.keywords
    if isinstance(value, CONTAINERS) and depth:
        items = value.items() if isinstance(value, dict) else [(None, item) for item in value]
        return type(value), len(value), tuple((snapshot(key, depth - 1), snapshot(item, depth - 1)) for key, item in items)
    if isinstance(value, MUTABLE) and depth and (seen := _seen_in(value)) is not None:
        return Same(value), snapshot(seen, depth - 1)
    return Same(value)


def is_fixed(value: object) -> bool:
    """Whether a value reads the same as long as it is the same object, though its type is among `MUTABLE`."""
    if isinstance(value, METHODS):
        owner = owner_of(value)
        return owner is value or not isinstance(owner, MUTABLE) or is_fixed(owner)
    return isinstance(value, (tuple, frozenset)) and all(not isinstance(item, MUTABLE) or is_fixed(item) for item in value)


def owner_of(value: Any) -> Any:
    """The object whose method a value is; the value itself where it is none."""
    owner = getattr(value, "__self__", None) if isinstance(value, METHODS) else None
    return value if owner is None or isinstance(owner, types.ModuleType) else owner


def version_of(tensor: Tensor) -> int:
    """A tensor's version counter; those of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _memory(value: Tensor) -> tuple[int, int]:
    """Where a tensor's values are, and their check sum: ``x.data = y`` and ``x.data.mul_(2)`` change it without another version, as does a NumPy array with the same memory."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.device.type != "cpu":
        return 0, 0
    try:
        start, storage = value.data_ptr(), value.untyped_storage()
        length = value.numel() * value.element_size()
        if not value.is_contiguous():
            start, length = storage.data_ptr(), storage.nbytes()
        if not length or storage.nbytes() < length:  # it has been given up
            return start, 0
        return start, zlib.crc32((ctypes.c_char * length).from_address(start))
    except RuntimeError:
        return 0, 0  # one inside a transform of torch.func


def _seen_in(value: Any) -> object:
    """What reading an object gives; None where that is not known."""
    if isinstance(value, BYTES):
        return bytes(value)
    if isinstance(value, weakref.ref):
        return value() is not None
    if isinstance(value, (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return [id(item) for item in value]  # without keeping them alive
    if isinstance(value, threading.Event):
        return value.is_set()
    if isinstance(value, type(threading.Lock())):
        return value.locked()
    if isinstance(value, logging.Logger):
        return value.getEffectiveLevel(), value.disabled
    if isinstance(value, contextvars.ContextVar):
        return value.get(None)
    if isinstance(value, threading.local):
        return vars(value)
    if isinstance(value, torch.optim.Optimizer):
        return [{name: setting for name, setting in group.items() if name != "params"} for group in value.param_groups]
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return {name: item for name, item in vars(value).items() if isinstance(item, (PLAIN, list))}
    if not is_library_class(type(value)) or len(value) > LONGEST:
        return None  # the attributes of a user's class are noted as they are read
    return dict(value.items()) if isinstance(value, collections.abc.Mapping) else list(value)


@functools.cache
def is_library_class(cls: type) -> bool:
    """Whether a class is Python's own or of an installed library."""
    filename = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ != "__main__" and (filename is None or not is_user_file(filename) or "site-packages" in filename)


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """An object that is equal to itself alone; it is kept alive, so that no other gets its id."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def contents_of(values: Iterable, depth: int = NESTED) -> Iterator[tuple[Any, Any]]:
    """(container, copy) of what can be put back among values, and in them."""
    for value in map(owner_of, values):
        if isinstance(value, REFILLED):
            yield value, copy_of(value)
        if isinstance(value, (*CONTAINERS, *NAMESPACES, functools.partial)) and depth > 1:
            inside = [*value.args, value.keywords] if isinstance(value, functools.partial) else vars(value) if isinstance(value, NAMESPACES) else value
            yield from contents_of(inside.values() if isinstance(inside, dict) else inside, depth - 1)


def leaves_of(values: Iterable, depth: int = NESTED) -> Iterator[object]:
    """Values, and of containers what they hold, of methods what they belong to."""
    for value in map(owner_of, values):
        if isinstance(value, functools.partial):
            value = value.func, value.args, value.keywords
        if isinstance(value, NAMESPACES):
            value = vars(value)
        if isinstance(value, CONTAINERS) and depth:
            yield from leaves_of([*value.keys(), *value.values()] if isinstance(value, dict) else value, depth - 1)
        else:
            yield value


def kept_by_cache(function: Any) -> tuple[list, list]:
    """Arguments and results that a function under ``functools.lru_cache`` keeps."""
    inside = [item for item in gc.get_referents(function) if item is not vars(function)]
    table = next(item for item in reversed(inside) if type(item) is dict)
    if not any(type(link).__name__ == "_lru_list_elem" for link in table.values()):  # without a bound it has the results themselves
        return list(table.keys()), list(table.values())
    others, results = collections.Counter(map(id, (table, function.__wrapped__, *table.keys()))), []
    for item in inside:
        if others[id(item)]:
            others[id(item)] -= 1
        elif not isinstance(item, type) and type(item) is not object:  # its own marks
            results.append(item)
    return list(table.keys()), results


def copy_of(container: Any) -> Any:
    """What a container holds, without its own class."""
    if isinstance(container, numpy.ndarray):
        return container.copy()
    if isinstance(container, BYTES):
        return bytes(container)
    if isinstance(container, (threading.Event, contextvars.ContextVar)):
        return (container.is_set() if isinstance(container, threading.Event) else container.get(None),)
    if isinstance(container, (*NAMESPACES, threading.local)):
        return dict(vars(container))
    return dict(container) if isinstance(container, dict) else set(container) if isinstance(container, set) else list(container)


def refill(container: Any, content: Any) -> None:
    """Give a container what it held; nothing is written into one that still holds it, which may forbid that (a config that is frozen)."""
    if _holds(container, content):
        return
    if isinstance(container, numpy.ndarray):
        container[...] = content
        return
    if isinstance(container, BYTES):
        _refill_bytes(container, content)
        return
    if isinstance(container, contextvars.ContextVar):
        container.set(*content)
        return
    if isinstance(container, threading.Event):
        container.set() if content[0] else container.clear()
        return
    if isinstance(container, (*NAMESPACES, threading.local)):
        container = vars(container)
    kind: Any = next(kind for kind in (list, collections.deque, collections.OrderedDict, dict, set) if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, collections.deque) else kind.update)(container, content)


def _refill_bytes(container: Any, content: bytes) -> None:
    if isinstance(container, bytearray):
        container[:] = content
    elif isinstance(container, memoryview):
        (container if container.format == "B" else container.cast("B"))[:] = content
    elif isinstance(container, array.array):
        container[:] = array.array(container.typecode, content)
    else:
        ctypes.memmove(ctypes.addressof(container), content, len(content))


def _holds(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects of a copy, in its order."""
    if isinstance(container, numpy.ndarray):
        return snapshot(container) == snapshot(content)
    if isinstance(container, (*BYTES, threading.Event, contextvars.ContextVar)):
        return copy_of(container) == content
    if isinstance(container, set):
        return container == content
    now, before = (list(x.items()) if isinstance(x, dict) else [(None, item) for item in x] for x in (copy_of(container), content))
    return len(now) == len(before) and all(key == other and x is y for (key, x), (other, y) in zip(now, before))
