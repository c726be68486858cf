"""``type(x)`` in the user's code while it is captured: the class that a tensor has without a capture, and not that of what stands for it."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn


class _Builtin(type):
    """The class of `Shown`, which is called, asked and compared as the builtin is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Shown:  # a class of classes that the user's code makes
            return super().__call__(*args, **kwargs)
        return _class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, type)

    def __eq__(cls, other: object) -> bool:
        return other is type or other is cls

    def __hash__(cls) -> int:
        return hash(type)


class Shown(type, metaclass=_Builtin):
    """Stands for the builtin `type` among the global variables of the user's files."""


class ShownTypes:
    """The files of the user whose code asks for types."""

    def __init__(self) -> None:
        self._files: dict[int, dict[str, Any]] = {}  # their global variables
        self._depth = 0  # of captures in captures

    def add(self, variables: dict[str, Any]) -> None:
        """Code of a file asks for types; from now on, if it is captured."""
        self._files[id(variables)] = variables
        if self._depth:
            variables.setdefault("type", Shown)

    @staticmethod
    def hide(variables: dict[str, Any]) -> bool:
        """A file's variables are as the user knows them, until `add`; whether they were not."""
        return variables.get("type") is Shown and bool(variables.pop("type"))

    def __enter__(self) -> None:
        self._depth += 1
        for variables in self._files.values():
            variables.setdefault("type", Shown)

    def __exit__(self, *_: Hashable) -> None:
        self._depth -= 1
        for variables in self._files.values() if not self._depth else ():
            self.hide(variables)


def _class_of(value: object) -> type:
    if isinstance(value, nn.Parameter):
        return nn.Parameter
    found = type(value)
    return Tensor if isinstance(value, Tensor) and found.__module__.startswith("torch._subclasses.") else found
