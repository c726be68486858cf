"""Objects with tensors in them that a model returns: dataclasses, attrs classes and the user's own plain classes, seen as what they hold.

`torch.utils._pytree` sees into containers and registered classes only, and to register somebody else's class would change it for the whole process. Here an
object is wrapped in `_Opened`, which is registered; what is made of its tree is an object of the same class with the same attributes.
"""

import collections
import dataclasses
import sys
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc.capture.python_state import NAMESPACES
from graphacc.capture.source import is_user_file

_DEPTH = 4  # of objects in objects
_CONTAINERS = (*NAMESPACES, collections.UserDict, collections.UserList, collections.ChainMap)  # such as transformers' BatchEncoding


class _Opened:
    """Stands for an object in a tree."""

    def __init__(self, value: object, depth: int):
        self.value = value
        self.depth = depth


def flatten(tree: object) -> tuple[list, pytree.TreeSpec]:
    """`pytree.tree_flatten`, which also sees into objects; `pytree.tree_unflatten` makes new ones of the same classes."""
    return pytree.tree_flatten(_opened(tree, _DEPTH))


def map_only(kind: type, function: Callable, tree: object):
    """`pytree.tree_map_only`, which also sees into objects."""
    leaves, spec = flatten(tree)
    return pytree.tree_unflatten([function(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], spec)


def _opened(tree: object, depth: int) -> object:
    leaves, spec = pytree.tree_flatten(tree)
    found = [_Opened(leaf, depth - 1) if depth and _is_record(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(found, spec) if any(isinstance(leaf, _Opened) for leaf in found) else tree


def _is_record(value: object) -> bool:
    """Whether an object is what its attributes are."""
    cls = type(value)
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or hasattr(cls, "__next__") or cls.__reduce_ex__ is not object.__reduce_ex__:
        return False
    if not (dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__") or issubclass(cls, _CONTAINERS) or _is_own(cls)):
        return False
    try:
        cls.__new__(cls) if cls in NAMESPACES else object.__new__(cls)
    except TypeError:  # of a class that builds on a built-in one
        return False
    return True


def _is_own(cls: type) -> bool:
    """Whether a class is the user's own, and not an installed library's, such as a cache of keys and values."""
    filename = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or (filename is not None and is_user_file(filename) and "site-packages" not in filename)


def _attributes(value: object) -> dict[str, object]:
    slots = [slot for cls in type(value).__mro__ for slot in vars(cls).get("__slots__", ()) if slot not in ("__dict__", "__weakref__")]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _flatten(opened: _Opened) -> tuple[list, tuple]:
    attributes = _attributes(opened.value)
    return [_opened(value, opened.depth) for value in attributes.values()], (type(opened.value), tuple(attributes))


def _unflatten(values, context: tuple) -> object:
    cls, names = context
    made = cls.__new__(cls) if cls in NAMESPACES else object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Opened, _flatten, _unflatten)
