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
import math
import operator
import os
import pathlib
import platform
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
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

FORMAT = 2

MAX_TRIAL_BYTES = 256 * 2**20
"""Inputs and temporaries of a program that runs on zeros while a step is captured (`Ahead`)."""

MAX_AHEAD = 4
"""Programs of one run that the next one loads ahead: those of its first steps."""

_VARIABLES = ("GRAPHACC_", "JAX_", "XLA_")
_PLAIN = frozenset({int, bool, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format})
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
        contents = compat.contents(lowered)
        ours = sorted(name for name in contents.custom_calls if name.startswith(_OWN_CALLS))
        if self.key is not None and contents.custom_calls <= {*ours, *_CALLS_OF_XLA} and not compat.has_lifted_constants(lowered):
            inputs = [(info.shape, info.dtype.name) for info in jax.tree.leaves(lowered.args_info)] if contents.can_run_on_zeros else None
            self._cache.put(self.key, json.dumps({"entry": entry, "calls": ours, "inputs": inputs}).encode())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    executable: typing.Any  # a LoadedExecutable
    serialized: bytes
    note: str
    temp_bytes: int
    inputs: list[tuple[list[int], str]] | None  # (shape, dtype); None: it is not to run on zeros


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
    return _Loaded(executable=executable, serialized=serialized, note=note.decode(), temp_bytes=temp_bytes, inputs=known["inputs"])


def _try_on_zeros(loaded: _Loaded | None, mesh: Mesh) -> None:
    """Run a small program of one CPU once, in vain: the first run is the slow one."""
    device, *others = mesh.devices.flat
    if loaded is None or loaded.inputs is None or device.platform != "cpu" or others:
        return
    num_bytes = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in loaded.inputs)
    if num_bytes + loaded.temp_bytes <= MAX_TRIAL_BYTES:
        compat.run_on_zeros(loaded.executable, loaded.inputs, device)


class Ahead:
    """Loads, in a thread beside the capture of a step, what an earlier run that looked the same from outside has loaded or compiled.

    That is a guess, and decides nothing: a program is used where its own graph leads to it (`Shortcut.load`). An executable that was loaded in vain is let go.

    The first of them also runs once on zeros, if it is small: XLA:CPU makes the kernels of its matrix products (YNNPACK) when a program runs for the first time, which took
    0.65 s of the 0.8 s of a first step of 1,208 products. Programs of several devices do not: two of them at a time could wait for each other in their collectives.
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
        self._trials: list[concurrent.futures.Future[None]] = []
        if self._known:
            thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="graphacc-ahead")
            for key, ids in self._known:
                on = Mesh(np.array([devices[each] for each in ids]), "devices")
                load = self._loads[key] = thread.submit(_load, cache, key, on)
                if not self._trials:
                    self._trials.append(thread.submit(lambda load=load, on=on: _try_on_zeros(load.result(), on)))
            thread.shutdown(wait=False)

    def take(self, key: str) -> _Loaded | None:
        """The executable of a shortcut's key, if it was loaded ahead: waits for it. No program runs on zeros behind this."""
        found = self._loads.pop(key, None)
        try:
            self._end_trials()
            return None if found is None else found.result()
        except Exception as error:
            log.info("graphacc: a program is not loaded ahead: %s: %s", type(error).__name__, str(error).partition("\n")[0])
            return None

    def _end_trials(self) -> None:
        for trial in self._trials:
            if not trial.cancel() and (error := trial.exception()) is not None:
                log.info("graphacc: a program does not run on zeros: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        self._trials.clear()

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
        _check_rules(step.graph)
        texts = _Lines(step.graph)
        lines = [texts.of(node) for node in step.graph.nodes]
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


def _check_rules(graph: fx.Graph) -> None:
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    targets |= {target for node in graph.nodes if (body := body_of(node)) is not None for target in body.targets}
    foreign = {str(target) for target in targets - {operator.getitem}} - lowering.OWN_RULES
    if foreign:
        raise _Unknown(f"the rules of {sorted(foreign)} are not ours")


class _Lines:
    """Nodes as text: their operands by number, in the order of the graph."""

    def __init__(self, graph: fx.Graph):
        self._numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
        self._forms: dict[int, str] = {}  # identity of a value, which nodes share -> its form
        self._targets: dict[object, str] = {}

    def of(self, node: fx.Node) -> str:
        if node.op not in ("placeholder", "call_function", "output"):
            raise _Unknown(f"{node.name} is a {node.op}")
        target = node.target if node.op == "call_function" else node.op
        text = self._targets.get(target)
        if text is None:
            text = self._targets[target] = str(target)
        value = node.meta.get("val")
        form = self._forms.get(id(value))
        if form is None:
            form = self._forms[id(value)] = _form(value)
        arguments = f"({self._text(node.args)},{self._text(node.kwargs)})" if node.op != "placeholder" else "()"
        return f"{text} {arguments} {form} {node.meta.get('module_path') or node.name}"

    def _text(self, value: typing.Any) -> str:
        kind = type(value)
        if kind is fx.Node:
            return self._numbers[value]
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            parts = ",".join([self._text(each) for each in value])
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        if isinstance(value, dict):
            return "{" + ",".join([f"{key!r}:{self._text(each)}" for key, each in value.items()]) + "}"
        if isinstance(value, slice):
            return f"slice{self._text((value.start, value.stop, value.step))}"
        raise _Unknown(f"an argument is a {kind.__name__}")


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
