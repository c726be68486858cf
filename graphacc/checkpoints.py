"""Checkpoints of a compiled model and its optimizer: sharded, atomic, and loadable under any other strategy; and weights from safetensors files.

The files are `graphacc.runtime.checkpoint`'s. A checkpoint holds the parameters and buffers under their original names,
the optimizer's state per parameter, the settings of the optimizer's groups, the place in the random numbers, and what
the user adds. It does not depend on the mesh that wrote it.
"""

import collections
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from graphacc.errors import CheckpointError
from graphacc.graph import Kind
from graphacc.loop.engine import Engine
from graphacc.loop.module import engine_of
from graphacc.loop.optimizers import Binding
from graphacc.runtime import checkpoint, weight_files
from graphacc.runtime.checkpoint import Saving
from graphacc.runtime.layout import Index, numpy_dtype

FORMAT = 1


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
        CheckpointError: `directory` holds something else, or `extra` is no JSON.
    """
    engine = engine_of(model)
    tensors = {name: engine.current(handle) for name, handle in engine.handles.items() if engine.is_saved(handle)}
    tensors = {f"model/{name}": value for name, value in tensors.items()}
    metadata: dict[str, Any] = {"format": FORMAT, "seed": engine.keys.seed, "counter": engine.keys.counter, "steps": engine.steps, "extra": extra or {}}
    if optimizer is not None:
        binding = engine.binding_of(optimizer)
        tensors |= {f"optimizer/{target}": value for target, value in engine.current_optimizer_state(binding).items()}
        metadata["groups"] = _groups(optimizer)
        metadata["group_names"] = _group_names(engine, optimizer)
        metadata["names"] = list(binding.names)
    aliases = {f"model/{alias}": f"model/{name}" for alias, name in engine.aliases().items()}
    staging = None if staging_mb is None else round(staging_mb * 1e6)
    return checkpoint.save(directory, tensors, metadata, aliases=aliases, asynchronous=asynchronous, staging_bytes=staging)


def load_checkpoint(directory: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Continue exactly from a checkpoint, whatever strategy and device count wrote it.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: there is none, it is truncated or damaged, or it is of another model or optimizer (every
            difference is listed). Nothing is changed then.
    """
    engine = engine_of(model)
    checkpoint.finish_saving()
    metadata = checkpoint.read_metadata(directory)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{directory}: format {metadata.get('format')!r} is not {FORMAT}, the one that this version reads")
    handles = {f"model/{name}": handle for name, handle in engine.handles.items() if engine.is_saved(handle)}
    wanted = {name: (handle.form, engine.blocks(handle.kind, handle.name, *handle.form)) for name, handle in handles.items()}
    binding, groups = None, []
    if optimizer is not None:
        if "groups" not in metadata:
            raise CheckpointError(f"{directory} was saved without an optimizer: load it without one, or save it with save_checkpoint(..., optimizer)")
        binding = engine.binding_of(optimizer)
        wanted |= _wanted_state(directory, engine, binding, metadata)
        groups = _saved_groups(directory, engine, binding, metadata)
    reader = checkpoint.open_checked(directory, wanted, ignore_extra=() if optimizer is not None else ("optimizer/",))
    for name, handle in handles.items():
        engine.load(handle, functools.partial(reader.read, name))
    if binding is not None:
        states = {name: form for name, (form, _) in wanted.items() if name.startswith("optimizer/")}
        engine.load_optimizer_state(
            binding, {name.removeprefix("optimizer/"): (*form, functools.partial(reader.read, name)) for name, form in states.items()}
        )
        for group, saved in zip(binding.optimizer.param_groups, groups, strict=True):
            group.update({name: tuple(value) if isinstance(group.get(name), tuple) else value for name, value in saved.items()})
    engine.restart(seed=metadata["seed"], counter=metadata["counter"], steps=metadata["steps"])
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


def _groups(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The settings of every parameter group that JSON can hold."""
    plain = (int, float, str, bool, type(None), list, tuple)
    groups = []
    for group in optimizer.param_groups:
        values = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items() if name != "params"}
        groups.append({name: value for name, value in values.items() if isinstance(value, plain)})
    return groups


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


def _wanted_state(directory, engine: Engine, binding: Binding, metadata: dict) -> dict[str, tuple[checkpoint.Form, Iterable[Index]]]:
    if sorted(metadata["names"]) != sorted(binding.names) or len(metadata["groups"]) != len(binding.optimizer.param_groups):
        missing = sorted(set(metadata["names"]) ^ set(binding.names))
        raise CheckpointError(
            f"{directory}: its optimizer has {len(metadata['groups'])} groups and {len(metadata['names'])} parameters, this one "
            f"{len(binding.optimizer.param_groups)} and {len(binding.names)}; in only one of them: {', '.join(missing) or 'none'}"
        )
    saved = checkpoint.read_index(directory)
    states = {name: form for name, form in saved.items() if name.startswith("optimizer/")}
    return {name: (form, engine.blocks(Kind.STATE, name.removeprefix("optimizer/"), *form)) for name, form in states.items()}


__all__ = ["IncompatibleKeys", "load_checkpoint", "load_safetensors", "save_checkpoint"]
