"""What the program of one device computes, moves and keeps: read out of its graph, once per kernel, as data that times follow from."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from graphacc.costs.hardware import Chip, Hardware
from graphacc.costs.memory import saved_for_backward
from graphacc.costs.seconds import collective_terms, work_seconds
from graphacc.costs.work import Work, kernels
from graphacc.graph import Kind, Phase, StepGraph
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, of_kind
from graphacc.passes.communication.buckets import MAX_BYTES
from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.regather import head_of
from graphacc.passes.stages.values import free_values, readers

_LOOKED_THROUGH = of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.ORDER)
"""What gathers follow behind."""
_REDUCTIONS = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default)
RETURNED = (Kind.LOSS, Kind.USER)
"""Outputs that the loop gets; the others replace inputs, or are gradients that the update consumes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """Collectives of one kind, along one axis or a part of it, of one role in one phase."""

    axis: str
    kind: str
    role: Role
    phase: Phase
    number: float  # how many there are in the whole graph; in a chunk of a pipeline, its share
    size_bytes: float  # of all of them together, each as `Move.size_bytes` says
    beside_seconds: float = 0.0  # of the kernels that run while these are on their way: attention, where keys go around a ring
    by_path: Mapping[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)  # module -> number, bytes and seconds beside of those that stand in it
    each: tuple[tuple[str, float, float], ...] = ()  # of gradients, in the order of the program: module, bytes of one, how many of it the whole graph has

    @property
    def whole_axis(self) -> str:
        """The mesh axis: "fsdp" also of "fsdp/4" and "fsdp%4", which are parts of it."""
        return self.axis.partition("/")[0].partition("%")[0]

    def times(self, factor: float, larger: float = 1.0) -> "Moved":
        """So many times as many of them, each so many times as large, as is what runs beside them."""
        number, size, beside = factor * self.number, factor * larger * self.size_bytes, factor * larger * self.beside_seconds
        return Moved(axis=self.axis, kind=self.kind, role=self.role, phase=self.phase, number=number, size_bytes=size, beside_seconds=beside)

    def beside(self, kernels: Sequence["Kernel"], seconds: Sequence[float]) -> "Moved":
        """With the seconds of these kernels, of each once, that run while they are on their way: those of the same modules."""
        if self.role is not Role.KEYS:
            return self
        run = {path: sum(kernel.count * time for kernel, time in zip(kernels, seconds) if (kernel.phase, kernel.path) == (self.phase, path)) for path in self.by_path}
        by_path = {path: (number, size, run[path]) for path, (number, size, _) in self.by_path.items()}
        return dataclasses.replace(self, by_path=by_path, beside_seconds=sum(run.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter on one device, before the data axes split it."""

    name: str
    size_bytes: int  # as it is kept
    travels_bytes: int  # as it is computed with: of a parameter that is cast to bf16 half of fp32's
    trained: bool
    gathers: int  # phases (forward, backward) that read it
    is_head: bool  # where these are one program, backward reads what forward has gathered (see `passes.partition.regather`)
    count: int  # parameters that it stands for
    shape: tuple[int, ...]
    gradient_is_strided: bool  # a view of what backward computes, such as its transpose
    is_of_experts: bool  # which `ep` splits, one matrix per expert; the others are the same on all its ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one kernel does, and how many of them the whole graph has."""

    phase: Phase
    work: Work
    count: int
    path: str  # of its module, "" outside of all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A result of the forward that the backward reads: what a pipeline keeps of every microbatch between its programs."""

    size_bytes: int
    count: int
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphCost:
    """The work of the program of one device."""

    kernels: tuple[Kernel, ...]
    kernel_seconds: tuple[float, ...]  # of each of them, once, on the chip that it was read for
    seconds: Mapping[Phase, float]  # of all kernels, one after the other
    moved: tuple[Moved, ...]
    weights: tuple[Weight, ...]
    other_bytes: int  # buffers, batch, and what is returned to the loop
    batch_bytes: int  # of these,
    returned_bytes: int  # which every microbatch has, and keeps until the step ends
    saved_bytes: int  # what forward leaves for backward, beyond one of each repeated layer
    held: tuple[Held, ...] = ()
    nodes: int

    def on(self, chip: Chip) -> "GraphCost":
        """The same program on another chip."""
        return dataclasses.replace(self, **_times(self.kernels, chip, self.moved))


def cost_of(step: StepGraph, hardware: Hardware, count: Callable[[torch.fx.Node], int] = lambda node: 1, experts: Collection[str] = ()) -> GraphCost:
    """Read the program of one device.

    Args:
        step: after the passes: shapes are those of one device.
        count: nodes that one stands for, where equal layers were left out.
        experts: the parameters that `ep` splits, or would.
    """
    found = tuple(Kernel(phase=node.meta["phase"], work=work, count=count(node), path=path_of(node)) for node, work in kernels(step, joins_parts_of=None if hardware.shared_cores else _moves_parameters).items())
    saved = sum((count(node) - 1) * size for node, size in saved_for_backward(step, cpu=hardware.shared_cores > 0).items())
    return GraphCost(
        kernels=found,
        **_times(found, hardware.chip, _moved(step, count)),
        weights=_weights(step, count, experts),
        other_bytes=sum(count(node) * value_bytes(node) for node in (*_arguments(step), *_returned(step))),
        batch_bytes=sum(count(node) * value_bytes(node) for node, item in zip(step.placeholders, step.inputs) if item.kind is Kind.BATCH),
        returned_bytes=sum(count(node) * value_bytes(node) for node in _returned(step)),
        saved_bytes=saved,
        held=tuple(Held(size_bytes=value_bytes(node), count=count(node), path=path_of(node)) for node in _held(step)),
        nodes=len(step.graph.nodes),
    )


def _moves_parameters(node: torch.fx.Node) -> bool:
    return "move" in node.meta and node.meta["move"].role in (Role.WEIGHT, Role.GRADIENT)


def path_of(node: torch.fx.Node) -> str:
    """The module of a call; of what stands outside of modules, that of its operand (a sum of a gradient over ranks), or of what reads it (a cast of a weight)."""
    made = node
    while made.op == "call_function" and not made.meta.get("module_path") and len(made.all_input_nodes) == 1:
        made = made.all_input_nodes[0]
    if made.op == "call_function":
        return made.meta.get("module_path") or ""
    while node.op == "call_function" and not node.meta.get("module_path") and node.users:
        node = next(iter(node.users))
    return node.meta.get("module_path") or ""


def _held(step: StepGraph) -> list[torch.fx.Node]:
    """The calls whose results cross to programs of the backward where forward and backward are not one."""
    free = free_values(step)
    calls = [node for node in step.graph.nodes if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD and node not in free]
    return [node for node in calls if isinstance(node.meta["val"], torch.Tensor) and any(user.meta["phase"] is Phase.BACKWARD for user in readers(node, free))]


def move_seconds(moved: Moved, mesh: Mapping[str, int], hardware: Hardware) -> float:
    """Time of these collectives, one after the other."""
    key = moved.kind, moved.axis, *mesh.items()
    terms = hardware.known_terms.get(key)
    if terms is None:
        terms = hardware.known_terms[key] = collective_terms(moved.kind, hardware, group_of(moved.axis, mesh, hardware))
    latency, per_byte = terms
    return moved.number * latency + moved.size_bytes * per_byte


def group_of(axis: str, mesh: Mapping[str, int], hardware: Hardware) -> tuple[int, ...]:
    """The group of an axis, or of the part of one: "fsdp/4" are 4 neighbours of fsdp, "fsdp%4" every fourth rank."""
    for sign in "/%":
        whole, found, inner = axis.partition(sign)
        if found:
            parts = {f"{whole}%": mesh[whole] // int(inner), f"{whole}/": int(inner)}
            split = {name: size for key, value in mesh.items() for name, size in (parts if key == whole else {key: value}).items()}
            return hardware.group(split, f"{whole}{sign}")
    return hardware.group(mesh, axis)


def _moved(step: StepGraph, count: Callable[[torch.fx.Node], int]) -> tuple[Moved, ...]:
    found: dict[tuple, dict[str, tuple[float, float, float]]] = {}
    each: dict[tuple, list[tuple[str, float, float]]] = {}
    for node in step.graph.nodes:
        move = node.meta.get("move")
        if move is not None and move.travels:
            key = move.axis, move.collective, move.role, move.phase
            by_path = found.setdefault(key, {})
            if move.role is Role.GRADIENT:
                each.setdefault(key, []).append((path_of(node), move.size_bytes, count(node)))
            number, size, _ = by_path.get(path_of(node), (0, 0, 0))
            by_path[path_of(node)] = number + count(node), size + count(node) * move.size_bytes, 0.0
    return tuple(
        Moved(
            axis=axis, kind=kind, role=role, phase=phase, by_path=by_path, each=tuple(each.get((axis, kind, role, phase), ())),
            number=sum(number for number, _, _ in by_path.values()), size_bytes=sum(size for _, size, _ in by_path.values()),
        )
        for (axis, kind, role, phase), by_path in found.items()
    )  # fmt: skip


def _weights(step: StepGraph, count: Callable[[torch.fx.Node], int], experts: Collection[str]) -> tuple[Weight, ...]:
    head = head_of(step, MAX_BYTES)
    strided = {item.target for node, item in zip(step.results, step.outputs) if item.kind is Kind.GRAD and _is_strided(node)}
    return tuple(
        _weight(node, item.target, item.trainable, count(node), item.target in strided, item.target in experts, item.target == head)
        for node, item in zip(step.placeholders, step.inputs)
        if item.kind is Kind.PARAM
    )


def _is_strided(gradient: torch.fx.Node) -> bool:
    """Before it is reduced over the data axes."""
    while gradient.target in _REDUCTIONS:
        gradient = gradient.all_input_nodes[0]
    return not gradient.meta["val"].is_contiguous()


def _weight(node: torch.fx.Node, name: str, trained: bool, count: int, gradient_is_strided: bool, is_of_experts: bool, is_head: bool) -> Weight:
    """Phases and dtype in which a parameter is read, behind casts and views."""
    phases: set[Phase] = set()
    travels, left = [], [node]
    while left:
        value = left.pop()
        for user in value.users:
            if user.op != "call_function":
                continue
            if user.target in _LOOKED_THROUGH:
                left.append(user)
            elif user.meta["phase"] is not Phase.UPDATE:
                phases.add(user.meta["phase"])
                travels.append(value.meta["val"].dtype.itemsize)
    kept = node.meta["val"]
    width = min(travels, default=kept.dtype.itemsize)
    return Weight(
        name=name,
        size_bytes=value_bytes(node),
        travels_bytes=kept.numel() * min(width, kept.dtype.itemsize),
        trained=trained,
        gathers=len(phases),
        is_head=is_head,
        count=count,
        shape=tuple(kept.shape),
        gradient_is_strided=gradient_is_strided,
        is_of_experts=is_of_experts,
    )


def _arguments(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node, item in zip(step.placeholders, step.inputs) if item.kind not in (Kind.PARAM, Kind.STATE, Kind.GRAD)]


def _returned(step: StepGraph) -> list[torch.fx.Node]:
    return [node for node, item in zip(step.results, step.outputs) if item.kind in RETURNED]


def value_bytes(node: torch.fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def _times(found: Sequence[Kernel], chip: Chip, moved: Sequence[Moved]) -> dict[str, Any]:
    """The fields of a `GraphCost` that follow from the chip."""
    times = tuple(map(float, work_seconds((kernel.work for kernel in found), chip)))
    seconds = dict.fromkeys(Phase, 0.0)
    for kernel, time in zip(found, times, strict=True):
        seconds[kernel.phase] += kernel.count * time
    return {"kernel_seconds": times, "seconds": seconds, "moved": tuple(item.beside(found, times) for item in moved)}
