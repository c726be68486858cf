"""Checkpoints of a compiled model and its optimizer: sharded, atomic, and loadable under any other strategy.

The files are `graphacc.runtime.checkpoint`'s. A checkpoint holds the parameters and buffers under their original names,
the optimizer's state per parameter, the settings of the optimizer's groups, the place in the random numbers, and what
the user adds. It does not depend on the mesh that wrote it.
"""

import os
from typing import Any

import torch
from torch import nn

from graphacc.errors import CheckpointError
from graphacc.graph import Kind
from graphacc.loop.engine import Engine
from graphacc.loop.module import engine_of
from graphacc.loop.optimizers import Binding
from graphacc.runtime import checkpoint

FORMAT = 1


def save_checkpoint(
    directory: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, extra: dict | None = None
) -> None:
    """Write the state of a compiled model, and of its optimizer, to `directory`, at once or not at all.

    Args:
        directory: replaced if it holds a checkpoint; a crash at any moment leaves the old one or the new one.
        extra: anything that JSON can hold, such as a scheduler's state or the epoch; `load_checkpoint` returns it.

    Raises:
        CheckpointError: `directory` holds something else, or `extra` is no JSON.
    """
    engine = engine_of(model)
    tensors = {name: engine.current(handle) for name, handle in engine.handles.items() if engine.is_saved(handle)}
    tensors = {f"model/{name}": value for name, value in tensors.items()}
    metadata: dict[str, Any] = {"format": FORMAT, "seed": engine.options.seed, "counter": engine.counter, "steps": engine.steps, "extra": extra or {}}
    if optimizer is not None:
        binding = engine.binding_of(optimizer)
        tensors |= {f"optimizer/{target}": value for target, value in engine.current_optimizer_state(binding).items()}
        metadata["groups"] = _groups(optimizer)
        metadata["group_names"] = _group_names(engine, optimizer)
        metadata["names"] = list(binding.names)
    aliases = {f"model/{alias}": f"model/{name}" for alias, name in engine.aliases().items()}
    checkpoint.save(directory, tensors, metadata, aliases=aliases)


def load_checkpoint(directory: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Continue exactly from a checkpoint, whatever strategy and device count wrote it.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: there is none, it is truncated or damaged, or it is of another model or optimizer (every
            difference is listed). Nothing is changed then.
    """
    engine = engine_of(model)
    metadata = checkpoint.read_metadata(directory)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{directory}: format {metadata.get('format')!r} is not {FORMAT}, the one that this version reads")
    wanted = {f"model/{name}": handle.host_value() for name, handle in engine.handles.items() if engine.is_saved(handle)}
    binding, groups = None, []
    if optimizer is not None:
        if "groups" not in metadata:
            raise CheckpointError(f"{directory} was saved without an optimizer: load it without one, or save it with save_checkpoint(..., optimizer)")
        binding = engine.binding_of(optimizer)
        wanted |= _wanted_state(directory, engine, binding, metadata)
        groups = _saved_groups(directory, engine, binding, metadata)
    loaded = checkpoint.load_host(directory, wanted, ignore_extra=() if optimizer is not None else ("optimizer/",))
    with torch.no_grad():
        for name, handle in engine.handles.items():
            if engine.is_saved(handle):
                handle.overwrite(loaded[f"model/{name}"])
    if binding is not None:
        _restore_optimizer(binding, engine, loaded, groups)
    engine.restart(seed=metadata["seed"], counter=metadata["counter"], steps=metadata["steps"])
    return metadata["extra"]


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


def _wanted_state(directory, engine: Engine, binding: Binding, metadata: dict) -> dict[str, torch.Tensor]:
    if sorted(metadata["names"]) != sorted(binding.names) or len(metadata["groups"]) != len(binding.optimizer.param_groups):
        missing = sorted(set(metadata["names"]) ^ set(binding.names))
        raise CheckpointError(
            f"{directory}: its optimizer has {len(metadata['groups'])} groups and {len(metadata['names'])} parameters, this one "
            f"{len(binding.optimizer.param_groups)} and {len(binding.names)}; in only one of them: {', '.join(missing) or 'none'}"
        )
    saved = checkpoint.read_index(directory)
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in saved.items() if name.startswith("optimizer/")}


def _restore_optimizer(binding: Binding, engine: Engine, loaded: dict[str, torch.Tensor], groups: list[dict]) -> None:
    optimizer = binding.optimizer
    optimizer.state.clear()
    for target, value in loaded.items():
        if not target.startswith("optimizer/"):
            continue
        name, _, key = target.removeprefix("optimizer/").rpartition("/")
        optimizer.state.setdefault(engine.handles[name].tensor, {})[key] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: tuple(value) if isinstance(group.get(name), tuple) else value for name, value in saved.items()})
    binding.state_on_device = False


__all__ = ["Kind", "load_checkpoint", "save_checkpoint"]
