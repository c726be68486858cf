"""Which code and objects are the user's own, and the names that code uses."""

import builtins
import dis
import functools
import sys
import types

from torch import nn

from graphacc.capture.source import is_user_file


def names_of(code: types.CodeType | None) -> set[str]:
    """The global names and attributes in a function's code, and in that of functions inside it."""
    if code is None:
        return set()
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names


@functools.cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    """The global names, and no attributes, in a function's code, and in that of functions inside it."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(names.union(*(globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))))


@functools.cache
def asks_for_types(code: types.CodeType) -> bool:
    """Whether a function's code, or that of a function inside it, uses `type` for something else than ``type(self)``."""
    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname not in ("PUSH_NULL", "PRECALL", "CACHE")]
    for instruction, argument, call in zip(found, (*found[1:], None), (*found[2:], None, None)):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type":
            if argument is None or call is None or argument.argval != "self" or call.opname not in ("CALL", "CALL_FUNCTION"):
                return True
    return any(asks_for_types(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))


@functools.cache
def texts_of(code: types.CodeType) -> frozenset[str]:
    """The names and texts in a function's code, and in that of functions inside it."""
    inside = [texts_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset({*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}.union(*inside))


def is_own_file(filename: str) -> bool:
    """Whether code is the user's own, and not an installed library's, whose global state is taken as fixed."""
    return is_user_file(filename) and "site-packages" not in filename


def is_own_module(module: types.ModuleType) -> bool:
    filename = getattr(module, "__file__", None)
    return getattr(module, "__spec__", None) is None if filename is None else is_own_file(filename)  # the user's code may make a module without a file


def is_library_object(owner: object) -> bool:
    if owner is None or isinstance(owner, (dict, type, types.FunctionType, nn.Module)):
        return False
    filename = getattr(sys.modules.get(type(owner).__module__), "__file__", None)
    return filename is not None and "site-packages" in filename


def is_user_class(cls: type) -> bool:
    if cls.__module__ == builtins.__name__ or not cls.__flags__ & (1 << 9):  # a type that Python code made
        return False
    module = sys.modules.get(cls.__module__)
    filename = getattr(module, "__file__", None)
    return cls.__module__ == "__main__" or (filename is not None and is_user_file(filename))
