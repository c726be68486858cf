"""What a program is, as text that processes compare before they compile it (see `graphacc.runtime.agreement`)."""

import collections
import hashlib
from collections.abc import Mapping

import torch
from torch.utils import _pytree as pytree

from graphacc.graph import Input, Kind, Output
from graphacc.hlo import HloStep
from graphacc.loop.build import Step

_SECTIONS = {Kind.PARAM: "model", Kind.BUFFER: "model", Kind.BATCH: "batch"}

_OUTSIDE = "code outside of the model's modules"


def describe(kind: str, step: Step, settings: Mapping[str, object], parts: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, str]]:
    """Section -> name -> value, the section in which a difference says most first.

    Args:
        settings: name -> what the user chose, with a text that is the same in every process.
        parts: batch input -> (dim, number of processes) where each passes an equal part; of the others it passes all.
    """
    found: dict[str, dict[str, str]] = {section: {} for section in ("settings", "program", "model", "batch", "other", "operators")}
    found["settings"] = {name: str(value) for name, value in settings.items()}
    found["program"]["program"] = kind
    for item in step.inputs:
        name = item.target if item.kind is Kind.BATCH else f"{item.kind.value} {item.target!r}"
        found[_SECTIONS.get(item.kind, "other")][name] = _type(item, parts.get(item.target))
    found["other"] |= {f"output {item.kind.value} {item.target!r}": _type(item) for item in step.outputs}
    found["operators"] = _operators(step)
    return found


def label(description: Mapping[str, Mapping[str, str]], digest: str) -> str:
    """A short text for one line."""
    batch = ", ".join(f"{name} {value}" for name, value in description["batch"].items())
    return f"the {description['program']['program']} program {digest[:6]}" + f" ({batch})" * bool(batch)


def _type(item: Input | Output, part: tuple[int, int] | None = None) -> str:
    """
    Examples:
        >>> _type(Output(kind=Kind.LOSS, target="loss", shape=(2, 3), dtype=torch.int64))
        'int64[2, 3]'
    """
    shape = list(item.shape)
    if part is not None:
        dim, count = part
        shape[dim] //= count
    return f"{str(item.dtype).removeprefix('torch.')}{shape}"


def _operators(step: Step) -> dict[str, str]:
    """Module -> number and digest of its operators, with their arguments by distance; of a captured HLO only the number."""
    if isinstance(step, HloStep):
        return {"the captured code": f"{step.num_operators} instructions"}
    counts: collections.Counter[str] = collections.Counter()
    hashes: dict[str, "hashlib._Hash"] = collections.defaultdict(hashlib.sha256)
    numbers = {node: number for number, node in enumerate(step.graph.nodes)}
    for node, number in numbers.items():
        where = f"module {node.meta['module_path']!r}" if node.meta.get("module_path") else _OUTSIDE
        arguments = pytree.tree_map_only(torch.fx.Node, lambda other: number - numbers[other], (node.args, node.kwargs))
        target = "" if node.op == "placeholder" else node.target
        counts[where] += 1
        hashes[where].update(f"{node.op} {target} {arguments}\n".encode())
    ordered = sorted(counts, key=_OUTSIDE.__eq__)  # what differs in a module says more
    return {where: f"{counts[where]} operators (digest {hashes[where].hexdigest()[:8]})" for where in ordered}
