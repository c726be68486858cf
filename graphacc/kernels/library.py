"""Finds and loads libgraphacc_cpu, the shared library that the install builds from `csrc/`.

Nothing is loaded at import. ``GRAPHACC_ISA`` is read here and nowhere else, at the first use.
"""

import ctypes
import functools
import os
import pathlib
import threading

import graphacc
from graphacc.errors import GraphAccError

FILE_NAME = "libgraphacc_cpu.so"
ABI_VERSION = 8
REMEDY = "run `pip install .` (or `pip install -e .` to develop) in the source tree"


class NativeLibraryError(GraphAccError, ImportError):
    """The native library is missing, of another version, or asked for kernels that this CPU does not run."""


@functools.cache
def load() -> ctypes.CDLL:
    """The native library, loaded once per process.

    Raises:
        NativeLibraryError: it was not built, or was built from other sources than the installed Python code.
    """
    path = find()
    library = ctypes.CDLL(str(path))
    library.gacc_last_error.restype = ctypes.c_char_p
    library.gacc_isa_name.restype = ctypes.c_char_p
    version = library.gacc_abi_version()
    if version != ABI_VERSION:
        raise NativeLibraryError(f"{path} has ABI version {version}, this graphacc needs {ABI_VERSION}: {REMEDY}")
    return library


def find() -> pathlib.Path:
    """Where the native library is.

    Raises:
        NativeLibraryError: it was not built.
    """
    candidates = [pathlib.Path(folder) / "lib" / FILE_NAME for folder in dict.fromkeys(graphacc.__path__)]
    for path in candidates:
        if path.exists():
            return path
    looked = ", ".join(map(str, candidates))
    raise NativeLibraryError(f"{FILE_NAME} was not found (looked at {looked}). It is built by the install: {REMEDY}")


def call(function: str, *args) -> None:
    """Call a C function that returns 0 or -1; ValueError with the library's own message after -1."""
    library = load()
    if getattr(library, function)(*args) != 0:
        raise ValueError(f"{function}: {library.gacc_last_error().decode()}")


_REGISTERING = threading.Lock()


def register_xla_target(name: str) -> None:
    """Tell JAX about the custom call `name` on the CPU, once per process, at the first lowering that needs it."""
    with _REGISTERING:  # a program may be loaded in a thread of its own
        _register_xla_target(name)


@functools.cache
def _register_xla_target(name: str) -> None:
    import jax

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(load(), f"{name}_ffi")), platform="cpu")


@functools.cache
def available_isas() -> dict[str, int]:
    """The instruction sets that this library and this CPU both have, name to number, slowest first."""
    library = load()
    numbers = range(library.gacc_isa_count())
    return {library.gacc_isa_name(i).decode(): i for i in numbers if library.gacc_isa_available(i)}


@functools.cache
def default_isa() -> str:
    """The fastest available instruction set, or the one that the environment variable GRAPHACC_ISA names."""
    available = list(available_isas())
    wanted = os.environ.get("GRAPHACC_ISA", available[-1])
    if wanted not in available:
        raise NativeLibraryError(
            f"GRAPHACC_ISA={wanted!r} is not available: this build on this CPU has {available}. Unset it or name one of these."
        )
    return wanted
