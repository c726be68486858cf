"""Programs found by their graphs: where an equal graph was compiled before, its executable is loaded without lowering the graph again.

JAX's key of a program is a digest of what was lowered, and to lower a deep model's step takes as long as to load its executable. So an entry of the compile cache is
also noted under a digest of all that lowering reads (`digest_of`):

- of every node: operator, arguments, the places of its operands; shape, dtype and strides of its value; the module that profiles name
- inputs and outputs: kind, target, shape, dtype, shards, codes; the mesh, its axes and devices
- the sources of lowering and of what it imports, and the native library; the versions of Python, torch, jax, jaxlib, numpy and ml_dtypes
- torch's precision of products, JAX's settings, APIs that are off (`_compat.probes`), and environment variables of JAX, XLA and our own

and under the key that JAX makes for a *stub*, a program with the same inputs, outputs and donations that computes nothing: version and flags of XLA, compile
options, devices. The executable is what JAX is given where it compiles the stub, which has the program's trees and shardings. Values are no part of a program: constants of a trace are inputs.

Not found this way are graphs with a rule of the user's own (`graphacc.lowering.register`) or with arguments that are no plain values, and programs with custom calls
to other libraries than ours, which JAX sets up while it lowers (LAPACK).
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import operator
import os
import pathlib
import platform
import typing
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from torch import Tensor, fx

from graphacc import _compat, graph, kernels, lowering, ops, strategy
from graphacc._compat import jax_ as compat
from graphacc._compat import probes
from graphacc.graph import StepGraph
from graphacc.kernels import library
from graphacc.ops.chunked import body_of
from graphacc.runtime.compile_cache import CompileCache
from graphacc.runtime.replan.loading import whole_module

log = logging.getLogger("graphacc")

FORMAT = 1

MAX_AHEAD = 4
"""Programs of one run that the next one loads ahead: those of its first steps."""

_VARIABLES = ("GRAPHACC_", "JAX_", "XLA_")
_PLAIN = (int, bool, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_OWN_CALLS = "gacc_"
_CALLS_OF_XLA = frozenset({"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A program that was found by its graph."""

    compiled: jax.stages.Compiled
    note: str  # the line that is kept with it
    temp_bytes: int  # as XLA counts them; 0 without a note
    module: bytes | None  # see `whole_module`


class Shortcut:
    """Where the executable of one graph is noted."""

    def __init__(self, cache: CompileCache, digest: str, stub: jax.stages.Lowered, mesh: Mesh, options: Mapping[str, typing.Any], variant: str):
        """
        Args:
            digest: of the graph, see `digest_of`.
            stub: a program with the graph's inputs, outputs and donations, for the mesh.
            options: of the compilation.
            variant: everything else that the executable depends on.
        """
        self._cache, self._stub, self._mesh = cache, stub, mesh
        found = _key_of(stub, options)
        self.key = None if found is None else f"lowered {FORMAT} {digest} {found} {variant}"

    def load(self, ahead: "Ahead | None" = None) -> "Found | None":
        """What is noted; None where it is not there, or cannot be loaded.

        Args:
            ahead: may have loaded it already.
        """
        if self.key is None:
            return None
        try:
            loaded = None if ahead is None else ahead.take(self.key)
            loaded = loaded or _load(self._cache, self.key, self._mesh)
            if loaded is None:
                return None
            return Found(compiled=compat.compiled_as(self._stub, loaded.executable), note=loaded.note, temp_bytes=loaded.temp_bytes, module=whole_module(loaded.serialized))
        except Exception as error:  # the graph is lowered, and its program compiled if need be
            log.info("graphacc: a program is not loaded by its graph: %s: %s", type(error).__name__, str(error).partition("\n")[0])
            return None

    def keep(self, entry: str, lowered: jax.stages.Lowered) -> None:
        """Note where the program is kept that the graph was lowered to.

        Args:
            entry: its key in the cache.
        """
        calls = compat.custom_calls(lowered)
        ours = sorted(name for name in calls if name.startswith(_OWN_CALLS))
        if self.key is not None and calls <= {*ours, *_CALLS_OF_XLA} and not compat.has_lifted_constants(lowered):
            self._cache.put(self.key, json.dumps({"entry": entry, "calls": ours}).encode())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    executable: typing.Any  # a LoadedExecutable
    serialized: bytes
    note: str
    temp_bytes: int


def _load(cache: CompileCache, key: str, mesh: Mesh) -> _Loaded | None:
    """The executable that a shortcut's key leads to, on the devices of its mesh; None: it is not there."""
    content = cache.get(key)
    known = {} if content is None else json.loads(content)
    entry = cache.get(known["entry"]) if known else None
    if entry is None:
        return None
    note, _, packed = entry.partition(b"\n")
    for name in known["calls"]:
        library.register_xla_target(name)
    serialized = compat.cached_executable(packed)
    executable = compat.load_executable_on(serialized, mesh)
    temp_bytes = executable.get_compiled_memory_stats().temp_size_in_bytes if note else 0  # XLA goes through the whole program: not in the thread of a capture
    return _Loaded(executable=executable, serialized=serialized, note=note.decode(), temp_bytes=temp_bytes)


class Ahead:
    """Loads, in a thread beside the capture of a step, what an earlier run that looked the same from outside has loaded or compiled.

    That is a guess, and decides nothing: a program is used where its own graph leads to it (`Shortcut.load`). An executable that was loaded in vain is let go.
    """

    def __init__(self, cache: CompileCache, looks: object, mesh: Mesh):
        """
        Args:
            looks: what is known of a run before its capture, such as forms of parameters and batch; told apart by its `repr`.
        """
        self._cache = cache
        devices = {device.id: device for device in mesh.devices.flat}
        self._key = f"ahead {FORMAT} {hashlib.sha256(repr((_surroundings(), _devices(mesh), looks)).encode()).hexdigest()}"
        self._known = [(key, ids) for key, ids in _uses_in(cache.get(self._key)) if devices.keys() >= set(ids)]
        self._used: list[tuple[str, list[int]]] = []
        self._loads: dict[str, concurrent.futures.Future[_Loaded | None]] = {}
        if self._known:
            thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="graphacc-ahead")
            for key, ids in self._known:
                self._loads[key] = thread.submit(_load, cache, key, Mesh(np.array([devices[each] for each in ids]), "devices"))
            thread.shutdown(wait=False)

    def take(self, key: str) -> _Loaded | None:
        """The executable of a shortcut's key, if it was loaded ahead: waits for it. What was guessed before it is let go."""
        found = self._loads.pop(key, None)
        try:
            return None if found is None else found.result()
        except Exception as error:
            log.info("graphacc: a program is not loaded ahead: %s: %s", type(error).__name__, str(error).partition("\n")[0])
            return None

    def note(self, key: str, mesh: Mesh) -> None:
        """This run uses the program of a shortcut's key, on all or some of its devices (those of a pipeline's stage)."""
        self._used = [*self._used, (key, [device.id for device in mesh.devices.flat])][:MAX_AHEAD]
        if self._known[: len(self._used)] != self._used:
            self._known = list(self._used)
            self._cache.put(self._key, json.dumps(self._known).encode())
            for load in self._loads.values():
                load.cancel()
            self._loads.clear()


def _uses_in(content: bytes | None) -> list[tuple[str, list[int]]]:
    """What an entry of `Ahead` holds: shortcuts' keys, each with the ids of the devices of its program; nothing where it is damaged."""
    try:
        found = [] if content is None else json.loads(content)
    except ValueError:
        return []
    return [(key, ids) for key, ids in found] if isinstance(found, list) and all(map(_is_use, found)) else []


def _is_use(value: object) -> bool:
    match value:
        case [str(), [_, *_] as ids]:
            return all(isinstance(each, int) for each in ids)
    return False


class _Asked(BaseException):
    """JAX has asked for a program; no `Exception`, which JAX would take for a cache that cannot be read."""


class _Probe:
    """Takes the place of JAX's cache, and ends the compilation when it is asked for the program."""

    _path = "memory"  # JAX's log messages read this name

    def get(self, key: str) -> None:
        raise _Asked(key)

    def missed(self) -> None:
        pass


def _key_of(lowered: jax.stages.Lowered, options: Mapping[str, typing.Any]) -> str | None:
    """JAX's key of a program; None where it does not ask for one."""
    try:
        with compat.persistent_cache(_Probe()):
            lowered.compile(compiler_options=dict(options))
    except _Asked as asked:
        return str(asked)
    return None


def digest_of(step: StepGraph, mesh: Mesh) -> str | None:
    """A digest of all that lowering a graph for a mesh reads; None where that cannot be said."""
    try:
        lines = [_line(node, number) for number, node in _numbered(step.graph)]
    except _Unknown as reason:
        log.debug("graphacc: a program is not found by its graph: %s", reason)
        return None
    found = hashlib.sha256(repr((_surroundings(), tuple(mesh.shape.items()), _devices(mesh), step.inputs, step.outputs)).encode())
    found.update("\n".join(lines).encode())
    return found.hexdigest()


def _devices(mesh: Mesh) -> list[tuple]:
    return [(device.platform, device.device_kind, device.id, device.process_index) for device in mesh.devices.flat]


class _Unknown(Exception):
    pass


Numbers = Mapping[fx.Node, int]


def _numbered(graph: fx.Graph) -> list[tuple[Numbers, fx.Node]]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    targets = {node.target for node in numbers if node.op == "call_function"}
    targets |= {target for node in numbers if (body := body_of(node)) is not None for target in body.targets}
    foreign = {str(target) for target in targets - {operator.getitem}} - lowering.OWN_RULES
    if foreign:
        raise _Unknown(f"the rules of {sorted(foreign)} are not ours")
    return [(numbers, node) for node in numbers]


def _line(node: fx.Node, numbers: Numbers) -> str:
    if node.op not in ("placeholder", "call_function", "output"):
        raise _Unknown(f"{node.name} is a {node.op}")
    target = node.target if node.op == "call_function" else node.op
    arguments = (node.args, node.kwargs) if node.op != "placeholder" else ()
    where = node.meta.get("module_path") or node.name
    return f"{target} {_text(arguments, numbers)} {_form(node.meta.get('val'))} {where}"


def _text(value: typing.Any, numbers: Numbers) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        opening = "[" if isinstance(value, list) else "("
        return opening + ",".join([_text(each, numbers) for each in value]) + ")"
    if isinstance(value, dict):
        return "{" + ",".join([f"{key!r}:{_text(each, numbers)}" for key, each in value.items()]) + "}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    raise _Unknown(f"an argument is a {type(value).__name__}")


def _form(value: typing.Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(map(_form, value)) + ")"
    if type(value) in _PLAIN:
        return repr(value)
    raise _Unknown(f"a value is a {type(value).__name__}")


def _surroundings() -> tuple:
    """What lowering reads besides the graph."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    return _sources(), torch.get_float32_matmul_precision(), compat.settings(), probes.switched_off(), variables


@functools.cache
def _sources() -> tuple:
    """The versions of what lowering runs, and digests of our own part of it."""
    versions = [platform.python_version(), *(importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "numpy", "ml_dtypes"))]
    folders = [pathlib.Path(__file__).parent, *(pathlib.Path(str(module.__file__)).parent for module in (lowering, ops, kernels, strategy, _compat))]
    files = [*(path for folder in folders for path in folder.rglob("*.py")), pathlib.Path(str(graph.__file__))]
    digest = hashlib.sha256()
    for path in [*sorted(files), *_native()]:
        digest.update(f"{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return *versions, digest.hexdigest()


def _native() -> Sequence[pathlib.Path]:
    try:
        return [library.find()]
    except library.NativeLibraryError:
        return []
