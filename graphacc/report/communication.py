"""What a compiled program communicates: every collective that XLA kept, with its bytes and its mesh axes.

It is read out of the optimised HLO and its schedule (`schedule.py`), so that it says what runs, not what was meant. Between the start and the end of
a collective on a GPU other operations run, which hide it; on CPU nothing does.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from torch import nn

from graphacc.errors import GraphAccError
from graphacc.loop.module import is_compiled
from graphacc.report.schedule import array_bytes, kind_of, read_module

_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\})")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the compiled program."""

    name: str  # of the instruction
    kind: str  # one of `schedule.KINDS`
    axes: tuple[str, ...]  # the mesh axes that its groups span
    group: tuple[int, ...]  # places of the first group's devices in the mesh
    tensor_bytes: tuple[int, ...]  # of each whole tensor on one device: reduced, gathered, before it is scattered, or exchanged
    module: str  # the module's path, "" if unknown
    spans: int = 0  # operations that compute while it is on its way; 0: it is exposed, as all are on CPU
    spanned_bytes: int = 0  # that these write: what there is to hide behind

    @property
    def group_size(self) -> int:
        return len(self.group)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors; XLA combines collectives of several."""
        return sum(self.tensor_bytes)

    @property
    def exposed_bytes(self) -> int:
        """Bytes for which the device waits with nothing to do."""
        return 0 if self.spans else self.size_bytes

    @property
    def traffic_bytes(self) -> int:
        """Bytes that one device sends with a ring algorithm: 2 (n-1)/n of an all-reduce, (n-1)/n of the others, a permute once."""
        share = 1.0 if self.kind == "collective-permute" else (self.group_size - 1) / self.group_size
        return round(self.size_bytes * share * (2 if self.kind == "all-reduce" else 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """The collectives of one program (or of all stages of a pipeline's), in the order of the program."""

    collectives: tuple[Collective, ...]

    def select(self, kind: str | None = None, axis: str | None = None, min_bytes: int = 0) -> "Communication":
        """Those of one kind, along one mesh axis, of at least `min_bytes`."""
        chosen = (
            item
            for item in self.collectives
            if kind in (None, item.kind) and (axis is None or axis in item.axes) and item.size_bytes >= min_bytes
        )
        return Communication(collectives=tuple(chosen))

    @property
    def count(self) -> int:
        return len(self.collectives)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.collectives)

    @property
    def traffic_bytes(self) -> int:
        return sum(item.traffic_bytes for item in self.collectives)

    @property
    def exposed_bytes(self) -> int:
        return sum(item.exposed_bytes for item in self.collectives)

    def __str__(self) -> str:
        """A table by axis and kind."""
        groups: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
        for item in self.collectives:
            groups["+".join(item.axes), item.kind].append(item)
        rows = [("axes", "collective", "count", "MB", "MB sent per device", "MB exposed")]
        for (axes, kind), items in sorted(groups.items()):
            part = Communication(collectives=tuple(items))
            rows.append((axes, kind, str(part.count), f"{part.size_bytes / 1e6:.3f}", f"{part.traffic_bytes / 1e6:.3f}", f"{part.exposed_bytes / 1e6:.3f}"))
        rows.append(("all", "", str(self.count), *(f"{size / 1e6:.3f}" for size in (self.size_bytes, self.traffic_bytes, self.exposed_bytes))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def communication(step: nn.Module | Callable) -> Communication:
    """The collectives of a model's training step, per device, as compiled.

    Args:
        step: a compiled model that has made a step, or a function of `graphacc.train_step`. Of a model that accumulates, the
            programs of a backward and of an update count once each; of a pipeline, those of all stages, without the transfers
            between stages.

    Raises:
        GraphAccError: nothing has been compiled yet.
    """
    model = step if isinstance(step, nn.Module) else getattr(step, "model", None)
    if model is None or not is_compiled(model):
        raise GraphAccError(f"communication takes a compiled model or a train_step function, got {type(step).__name__}")
    programs = [compiled.program for compiled in model.programs if compiled.kind.split()[0] in ("step", "grad", "update")]
    if not programs:
        raise GraphAccError("no training program has been compiled yet: run a step first")
    found = [item for program in programs for item in read_collectives(program.hlo_text(), program.mesh)]
    return Communication(collectives=tuple(found))


def read_collectives(hlo: str, mesh: jax.sharding.Mesh) -> Iterable[Collective]:
    """The collectives in the text of an optimised HLO module whose partitions are the devices of `mesh`, in order."""
    for computation in read_module(hlo).values():
        for item in computation:
            kind = kind_of(item)
            group = _group(item.text, mesh.size) if kind is not None else [0]
            if kind is None or len(group) == 1:
                continue
            sizes = array_bytes(computation.done(item).shape)
            if kind == "all-to-all" and len(sizes) == len(group):  # one tensor, in a tuple of its blocks
                sizes = [sum(sizes)]
            name, spanned = _NAME.search(item.text), computation.between(item)
            yield Collective(
                name=item.name,
                kind=kind,
                axes=_axes(group, mesh),
                group=tuple(group),
                tensor_bytes=tuple(size * (len(group) if kind == "reduce-scatter" else 1) for size in sizes),
                module=_module(name[1]) if name else "",
                spans=len(spanned),
                spanned_bytes=sum(size for other in spanned for size in array_bytes(other.shape)),
            )


def _group(line: str, num_devices: int) -> list[int]:
    """The first group of positions that communicate; of a permute the first of the longest, as a rank may send to itself."""
    if (pairs := _PAIRS.search(line)) is not None:
        edges = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])}
        return max((_path(start, edges) for start in edges), key=len)
    match = _GROUPS.search(line)
    if match is None or match[1] == "{{}}":
        return list(range(num_devices))
    if match[1].startswith("{"):
        return [int(number) for number in match[1][2:].split("}")[0].split(",") if number]
    return list(_iota_groups(match[1])[0])


def _path(start: int, edges: Mapping[int, int]) -> list[int]:
    """Where what one position sends would go, sent on and on."""
    path, at = [start], edges[start]
    while at not in path and at in edges:
        path, at = [*path, at], edges[at]
    return path if at in path else [*path, at]


def _iota_groups(text: str) -> np.ndarray:
    """The groups that "[4,2]<=[2,4]T(1,0)" stands for, one per row."""
    shape, rest = text.split("<=")
    dims, _, order = rest.partition("T")
    numbers = [int(size) for size in re.findall(r"\d+", dims)]
    positions = np.arange(math.prod(numbers)).reshape(numbers)
    if order:
        positions = positions.transpose([int(axis) for axis in re.findall(r"\d+", order)])
    return positions.reshape([int(size) for size in re.findall(r"\d+", shape)])


def _axes(group: list[int], mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    places = np.array(np.unravel_index(np.array(group), mesh.devices.shape))
    return tuple(axis for axis, place in zip(mesh.axis_names, places) if len(set(place.tolist())) > 1)


def _module(name: str) -> str:
    """The module's path in an operation's name: "jit(step)/shard_map/model.layers.0/all_gather" -> "model.layers.0"."""
    parts = [part for part in name.split("/") if not part.startswith(("jit(", "shard_map", "pjit"))]
    return parts[0] if len(parts) > 1 else ""
