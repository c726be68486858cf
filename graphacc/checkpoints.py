"""Checkpoints of a compiled model and its optimizer: sharded, atomic, and loadable under any other strategy; and weights from safetensors files.

The files are `graphacc.runtime.checkpoint`'s. A checkpoint holds the parameters and buffers under their original names, the extra state of modules
(``get_extra_state``), the optimizer's state per parameter, the settings of the optimizer's groups, the place in the random numbers, and what the user adds.
It does not depend on the mesh that wrote it.
"""

import collections
import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from graphacc.errors import CheckpointError
from graphacc.graph import Kind
from graphacc.loop.engine import Engine
from graphacc.loop.module import engine_of
from graphacc.loop.optimizers import Binding, OtherState
from graphacc.runtime import checkpoint, checkpoint_values, weight_files
from graphacc.runtime.checkpoint import Saving
from graphacc.runtime.layout import Index, numpy_dtype, whole

FORMAT = 2
"""1 had no extra state of modules, no class of the optimizer, no state besides tensors, and tensors among the settings of groups as numbers."""


def save_checkpoint(
    directory: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict | None = None,
    asynchronous: bool = False,
    staging_mb: float | None = None,
) -> Saving:
    """Write the state of a compiled model, and of its optimizer, to `directory`, at once or not at all; every process writes its own shards.

    Args:
        directory: replaced if it holds a checkpoint; a crash at any moment leaves the old one or the new one.
        extra: anything that JSON can hold, such as a scheduler's state or the epoch; `load_checkpoint` returns it.
        asynchronous: go on when this process's shards are copied to the host; a thread writes them to the disk, and the checkpoint is there when all
            processes have written. At most one save goes on: the next save or load waits for it, and so does Python's end.
        staging_mb: of those copies, at most, per process (MB of 1e6 bytes); the rest is handed to the file system before this returns. Default: no bound.

    Returns:
        The save: ``wait()`` waits until the checkpoint is there, and raises what has failed; without it the next save or load raises that. ``done``.

    Raises:
        CheckpointError: `directory` holds something else, `extra` is no JSON, or a module's extra state, or the optimizer's state, holds what is neither a
            tensor, a number, text nor None, nor a dict, list or tuple of such: nothing is unpickled from a checkpoint.
    """
    engine = engine_of(model)
    engine.keys.begin()
    values: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {"format": FORMAT, "seed": engine.keys.seed, "counter": engine.keys.counter, "steps": engine.steps, "extra": extra or {}}
    metadata["extra_state"] = _extra_state(engine.model, values)
    if optimizer is not None:
        binding = engine.binding_of(optimizer)
        metadata |= {"optimizer": binding.kind, "groups": _groups(optimizer, values), "group_names": _group_names(engine, optimizer)}
        metadata |= {"names": list(binding.names), "state": _other_state(engine, binding, values)}
    tensors = {f"model/{name}": engine.current(handle) for name, handle in engine.handles.items() if engine.is_saved(handle)}
    if optimizer is not None:
        tensors |= {f"optimizer/{target}": value for target, value in engine.current_optimizer_state(binding).items()}
    tensors |= values
    aliases = {f"model/{alias}": f"model/{name}" for alias, name in engine.aliases().items()}
    staging = None if staging_mb is None else round(staging_mb * 1e6)
    return checkpoint.save(directory, tensors, metadata, aliases=aliases, asynchronous=asynchronous, staging_bytes=staging)


def load_checkpoint(directory: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Continue exactly from a checkpoint, whatever strategy and device count wrote it.

    As with ``load_state_dict``, gradients stay: after a backward whose step is not wanted, call ``optimizer.zero_grad()``. The settings of the optimizer's groups
    are the saved ones. ``set_extra_state`` of modules is called at the end; what it raises is raised.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: there is none, it is truncated or damaged, or it is of another model or optimizer (every
            difference is listed). Nothing is changed then.
    """
    engine = engine_of(model)
    checkpoint.finish_saving()
    metadata = checkpoint.read_metadata(directory)
    if metadata.get("format") not in range(1, FORMAT + 1):
        raise CheckpointError(f"{directory}: format {metadata.get('format')!r} is none of 1 to {FORMAT}, those that this version reads")
    handles = {f"model/{name}": handle for name, handle in engine.handles.items() if engine.is_saved(handle)}
    wanted = {name: (handle.form, engine.blocks(handle.kind, handle.name, *handle.form)) for name, handle in handles.items()}
    index = checkpoint.read_index(directory)
    wanted |= {name: (form, [whole(form[0])]) for name, form in index.items() if name.startswith(_VALUES if optimizer is not None else f"{_VALUES}extra_state/")}
    extra_state, differences = metadata.get("extra_state"), []
    if extra_state is not None:
        differences = _other_extra_state(engine.model, extra_state)
    binding, groups = None, []
    if optimizer is not None:
        if "groups" not in metadata:
            raise CheckpointError(f"{directory} was saved without an optimizer: load it without one, or save it with save_checkpoint(..., optimizer)")
        binding = engine.binding_of(optimizer)
        differences += _other_optimizer(binding, metadata)
        if not differences:
            wanted |= _wanted_state(directory, index, engine, binding, metadata)
            groups = _saved_groups(directory, engine, binding, metadata)
    ignored = ("optimizer/", _VALUES) if binding is None or differences else ()
    reader = checkpoint.open_checked(directory, wanted, ignore_extra=ignored, differences=differences)

    def read(name: str) -> np.ndarray:
        return reader.read(name, whole(reader.entry(name).shape))

    own = {path: checkpoint_values.decode(value, read) for path, value in (extra_state or {}).items()}
    settings = [{name: checkpoint_values.decode(value, read) for name, value in group.items()} for group in groups]
    others: Any = checkpoint_values.decode(metadata.get("state"), read) if binding is not None else None
    for name, handle in handles.items():
        engine.load(handle, functools.partial(reader.read, name))
    if binding is not None:
        states = {name: form for name, (form, _) in wanted.items() if name.startswith("optimizer/")}
        engine.load_optimizer_state(
            binding,
            {name.removeprefix("optimizer/"): (*form, functools.partial(reader.read, name)) for name, form in states.items()},
            OtherState(*(others or ({}, {}, {}))),
        )
        for group, saved in zip(binding.optimizer.param_groups, settings, strict=True):
            group.update({name: _as_before(value, group.get(name)) if metadata["format"] == 1 else value for name, value in saved.items()})
    engine.restart(seed=metadata["seed"], counter=metadata["counter"], steps=metadata["steps"])
    for path, value in own.items():
        engine.model.get_submodule(path).set_extra_state(value)
    return metadata["extra"]


class IncompatibleKeys(NamedTuple):
    """What `load_safetensors` has found in only one of model and files."""

    missing_keys: list[str]  # of the model
    unexpected_keys: list[str]  # in the files


def load_safetensors(
    model: nn.Module, path: str | os.PathLike, *, strict: bool = True, rename: Callable[[str], str] | None = None
) -> IncompatibleKeys:
    """Load the weights of a compiled model from safetensors files: every process reads the slices that its devices hold, and nothing else.

    The model may have been made on the meta device; then no process ever holds it whole. Values are cast to the model's dtypes, as ``load_state_dict`` does.

    Args:
        path: a file, a directory with ``model.safetensors``, or one with ``model.safetensors.index.json`` and the files that it names (a sharded
            checkpoint of Hugging Face).
        strict: every parameter and persistent buffer has to be in the files (a tied one under any of its names), and nothing else.
        rename: name in the model -> name in the files, where they differ: ``lambda name: name.removeprefix("transformer.")``.

    Returns:
        Names that are in only one of them; with `strict` there are none.

    Raises:
        CheckpointError: the files are missing or damaged, or shapes or, with `strict`, names differ (all are listed). Nothing is changed then.
    """
    engine = engine_of(model)
    weights, names = weight_files.open_weights(os.fspath(path)), collections.defaultdict(list)
    for name, first in ({name: name for name in engine.handles} | engine.aliases()).items():
        names[first].append(name if rename is None else rename(name))
    saved = {name: handle for name, handle in engine.handles.items() if engine.is_saved(handle)}
    found = {name: next((key for key in names[name] if key in weights), None) for name in saved}
    known = {key for keys in names.values() for key in keys}
    keys = IncompatibleKeys([name for name, key in found.items() if key is None], [key for key in weights if key not in known])
    problems = [f"missing: {name} {list(saved[name].form[0])}" for name in keys.missing_keys] + [f"unexpected: {key}" for key in keys.unexpected_keys]
    shapes = {name: weights[key].shape for name, key in found.items() if key is not None}
    different = [f"different: {name} is {list(shape)} in the files, {list(saved[name].form[0])} here" for name, shape in shapes.items() if shape != saved[name].form[0]]
    if different or (strict and problems):
        raise CheckpointError(_other_weights(path, different + (problems if strict else [])))
    for name, key in found.items():
        if key is not None:
            engine.load(saved[name], functools.partial(weights[key].read, dtype=numpy_dtype(saved[name].form[1])))
    return keys


def _other_weights(path: str | os.PathLike, problems: list[str], shown: int = 40) -> str:
    lines = [f"the weights at {os.fspath(path)} are of another model; {len(problems)} differences:", *(f"  {problem}" for problem in problems[:shown])]
    lines += [f"  ... and {len(problems) - shown} more"] if len(problems) > shown else []
    lines.append("Give the names that the files have by rename=, load what both have with strict=False, or load other files.")
    return "\n".join(lines)


_VALUES = "values/"
"""What the names of tensors within Python values begin with."""


def _extra_state(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, object]:
    """The extra state of every module that has some, by its path, as JSON can hold it.

    Raises:
        CheckpointError: JSON and tensors cannot hold it.
    """
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_own(module, "get_extra_state"):
            try:
                found[path] = checkpoint_values.encode(module.get_extra_state(), f"{_VALUES}extra_state", values)
            except TypeError as error:
                raise CheckpointError(
                    f"the extra state of {f'the module {path!r}' if path else 'the model'} ({type(module).__name__}.get_extra_state()) holds {error}: a checkpoint holds "
                    "tensors, numbers, text, None, and dicts, lists and tuples of them; let get_extra_state() give such, or save with torch.save(model.state_dict(), ...)"
                ) from error
    return found


def _is_own(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(nn.Module, method)


def _other_extra_state(model: nn.Module, saved: dict[str, object]) -> list[str]:
    """How a checkpoint's extra state is that of another model, by the rules of ``load_state_dict``."""
    wanted = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False) if _is_own(module, "set_extra_state")}
    missing = [f"missing: the extra state of {path or 'the model'} ({name})" for path, name in wanted.items() if path not in saved]
    return missing + [f"unexpected: the extra state of {path or 'the model'}" for path in saved if path not in wanted]


def _other_optimizer(binding: Binding, metadata: dict) -> list[str]:
    """How a checkpoint's optimizer is another one; format 1 tells by the names of numbers among its settings."""
    saved = metadata.get("optimizer")
    if saved is not None:
        return [] if saved == binding.kind else [f"different: the optimizer is {saved} in the checkpoint, {binding.kind} here"]
    missing = sorted({name for name in binding.number_settings() for group in metadata["groups"] if name not in group})
    return [f"missing: {name}, a setting of {binding.kind}, in the groups of the checkpoint's optimizer" for name in missing]


def _other_state(engine: Engine, binding: Binding, values: dict[str, torch.Tensor]) -> object:
    """The optimizer's state besides tensors of parameters, as JSON can hold it.

    Raises:
        CheckpointError: JSON and tensors cannot hold it.
    """
    found = engine.other_optimizer_state(binding)
    try:
        return checkpoint_values.encode((found.parameters, found.keys, found.kinds), f"{_VALUES}state", values)
    except TypeError as error:
        raise CheckpointError(
            f"the state of {type(binding.optimizer).__name__} holds {error}: a checkpoint holds tensors, numbers, text, None, and dicts, lists and tuples of them; let its "
            "step keep such, or save with torch.save(optimizer.state_dict(), ...)"
        ) from error


def _groups(optimizer: torch.optim.Optimizer, values: dict[str, torch.Tensor]) -> list[dict]:
    """The settings of every parameter group, but for those that JSON and tensors cannot hold (functions, say), which the constructor gives."""
    groups = []
    for group in optimizer.param_groups:
        found = {}
        for name, value in group.items():
            if name != "params":
                with contextlib.suppress(TypeError):
                    found[name] = checkpoint_values.encode(value, f"{_VALUES}groups", values)
        groups.append(found)
    return groups


def _as_before(value: object, present: object) -> object:
    """A setting of format 1, where tuples were lists, and tensors numbers."""
    if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(present, value)
    return tuple(value) if isinstance(present, tuple) and isinstance(value, list) else value


def _group_names(engine: Engine, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of every parameter group's parameters."""
    names = {id(handle.tensor): name for name, handle in engine.handles.items()}
    return [[names[id(parameter)] for parameter in group["params"] if id(parameter) in names] for group in optimizer.param_groups]


def _saved_groups(directory, engine: Engine, binding: Binding, metadata: dict) -> list[dict]:
    """The saved settings of the optimizer's groups, in their order now: a group is known by the names of its parameters.

    Raises:
        CheckpointError: the parameters are grouped otherwise.
    """
    saved = metadata["groups"]
    if "group_names" not in metadata:  # written before groups had names
        return saved
    left: list[frozenset[str] | None] = [frozenset(names) for names in metadata["group_names"]]
    found = []
    for position, names in enumerate(_group_names(engine, binding.optimizer)):
        if frozenset(names) not in left:
            raise CheckpointError(
                f"{directory}: no parameter group of its optimizer holds just the parameters of group {position} of this one "
                f"({', '.join(names) or 'none'}): make the groups as when it was saved, in any order: "
                f"{'; '.join(', '.join(names) for names in metadata['group_names'])}"
            )
        match = left.index(frozenset(names))
        left[match] = None
        found.append(saved[match])
    return found


def _wanted_state(directory, index: dict[str, checkpoint.Form], engine: Engine, binding: Binding, metadata: dict) -> dict[str, tuple[checkpoint.Form, Iterable[Index]]]:
    if sorted(metadata["names"]) != sorted(binding.names) or len(metadata["groups"]) != len(binding.optimizer.param_groups):
        missing = sorted(set(metadata["names"]) ^ set(binding.names))
        raise CheckpointError(
            f"{directory}: its optimizer has {len(metadata['groups'])} groups and {len(metadata['names'])} parameters, this one "
            f"{len(binding.optimizer.param_groups)} and {len(binding.names)}; in only one of them: {', '.join(missing) or 'none'}"
        )
    states = {name: form for name, form in index.items() if name.startswith("optimizer/")}
    return {name: (form, engine.blocks(Kind.STATE, name.removeprefix("optimizer/"), *form)) for name, form in states.items()}


__all__ = ["IncompatibleKeys", "load_checkpoint", "load_safetensors", "save_checkpoint"]
