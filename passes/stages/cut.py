"""A graph becomes several: one per segment, which pass values on to each other.

Every call that is not free has a `Place`. A value that another segment reads leaves its own as an output of kind CROSS and
enters the other one as an input. Whatever a value's layout on the mesh is, it crosses as what it is on each device: the global
shape that the signature gives has dim 0 multiplied by the number of devices, split over all manual axes. Numbers (tensors of
one element) that go the same way cross together, as one vector.

An input that an output replaces is read by the segment that gives the output, and, before it, by earlier ones; later ones get
the old value from it.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
import torch.fx

from graphacc._compat.torch_ import new_graph
from graphacc.errors import StrategyError
from graphacc.graph import Input, Kind, MeshShard, Output, StepGraph
from graphacc.passes.edit import infer
from graphacc.passes.stages.values import free_values

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """Where and when a segment runs; segments are in this order."""

    order: int  # no value goes to a smaller one
    stage: int
    part: str  # "F", "B" or "W" of a chunk, "U" of an update
    index: int  # the chunk, or the level of an update

    def __str__(self) -> str:
        return f"U{self.index} of stage {self.stage}" if self.part == "U" else f"{self.part}{self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """The program of one stage for one part of a step."""

    place: Place
    step: StepGraph  # has inputs and outputs of kind CROSS


def cut(step: StepGraph, places: Mapping[torch.fx.Node, Place], axes: Mapping[str, int]) -> list[Segment]:
    """Cut a graph into its segments, in their order.

    Args:
        step: local along `axes`; it is not changed.
        places: of every call that is not free, and of free ones that are results.
        axes: manual mesh axes of a stage's devices -> size, outermost first.

    Raises:
        StrategyError: a buffer is read by an earlier stage than the one that writes it.
    """
    return _Cutter(step, places, axes).run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parcel:
    """What crosses as one array: one value, or several numbers."""

    source: Place
    readers: tuple[Place, ...]
    nodes: tuple[torch.fx.Node, ...]

    @property
    def is_vector(self) -> bool:
        """Whether it stands for numbers."""
        return self.nodes[0].meta["val"].numel() == 1


class _Cutter:
    def __init__(self, step: StepGraph, places: Mapping[torch.fx.Node, Place], axes: Mapping[str, int]):
        self.step, self.places = step, places
        self.shards = tuple(MeshShard(axis=axis, size=size, dim=0) for axis, size in axes.items() if size > 1)
        self.num_devices = math.prod(shard.size for shard in self.shards)
        self.free = free_values(step)
        self.order = {node: i for i, node in enumerate(step.graph.nodes)}
        self.signature = dict(zip(step.placeholders, step.inputs))
        self.writers = {step.placeholders[i]: self._result_place(out) for out, i in step.donations().items()}

    def _result_place(self, index: int) -> Place:
        return self.places[self.step.results[index]]

    def run(self) -> list[Segment]:
        members: dict[Place, list[torch.fx.Node]] = {place: [] for place in sorted(set(self.places.values()))}
        for node, place in self.places.items():
            members[place].append(node)
        needed = {place: self._needed(nodes) for place, nodes in members.items()}
        crossing = {
            place: sorted((n for n in nodes if self._enters(n, place)), key=self.order.get) for place, nodes in needed.items()
        }
        readers: dict[torch.fx.Node, list[Place]] = collections.defaultdict(list)
        for place, nodes in crossing.items():
            for node in nodes:
                readers[node].append(place)
        parcels = self._parcels(readers)
        return [
            self._write(
                place,
                needed[place],
                [parcel for parcel in parcels if place in parcel.readers],
                [parcel for parcel in parcels if parcel.source == place],
            )
            for place in members
        ]

    def _parcels(self, readers: Mapping[torch.fx.Node, list[Place]]) -> list["_Parcel"]:
        """What crosses, in the order of the graph; numbers with one dtype, source and set of readers together."""
        groups: dict[tuple, list[torch.fx.Node]] = collections.defaultdict(list)
        for node in sorted(readers, key=self.order.get):
            value, source, to = node.meta["val"], self._source(node), tuple(readers[node])
            groups[(source, to, value.dtype) if value.numel() == 1 else (source, to, node)].append(node)
        return [_Parcel(source=key[0], readers=key[1], nodes=tuple(nodes)) for key, nodes in groups.items()]

    def _needed(self, nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
        """The calls, the free values that they read, and whatever comes from outside."""
        found, stack = set(nodes), list(nodes)
        while stack:
            for operand in stack.pop().all_input_nodes:
                if operand not in found:
                    found.add(operand)
                    if operand in self.free:
                        stack.append(operand)
        return found

    def _source(self, node: torch.fx.Node) -> Place:
        return self.writers[node] if node.op == "placeholder" else self.places[node]

    def _enters(self, node: torch.fx.Node, place: Place) -> bool:
        """Whether a value comes to `place` from another segment."""
        if node.op == "placeholder":
            return node in self.writers and self._is_stale(node, place)
        return node in self.places and self.places[node] != place and node not in self.free

    def _is_stale(self, node: torch.fx.Node, place: Place) -> bool:
        """Whether `place` must get an input's old value from the segment that replaces it."""
        writer = self.writers[node]
        if place.order < writer.order and writer.part != "U" and self.signature[node].kind is Kind.BUFFER:
            raise StrategyError(
                f"buffer {self.signature[node].target!r} is read by chunk {place.index} of the pipeline and written by chunk "
                f"{writer.index}, so that a microbatch would see a value of another one: pin the modules that use it to one "
                "chunk with the strategy's field stages"
            )
        return place.order > writer.order

    def _write(self, place: Place, needed: set, received: list["_Parcel"], sent: list["_Parcel"]) -> Segment:
        writer = _Writer(self)
        entering = {node for parcel in received for node in parcel.nodes}
        leaving = {node for parcel in sent for node in parcel.nodes}
        for node, item in self.signature.items():
            if node in needed - entering or node in leaving:
                writer.take(node, item)
        for parcel in received:
            writer.receive(parcel)
        for parcel in received:
            writer.unpack(parcel)
        for node in sorted(needed - entering, key=self.order.get):
            if node.op == "call_function":
                writer.copy(node)
        results = [(out, node) for out, node in zip(self.step.outputs, self.step.results) if self.places.get(node) == place]
        for out, node in results:
            writer.give(node, out)
        for parcel in sent:
            writer.send(parcel)
        return Segment(place=place, step=writer.finish())

    def crossing_item(self, parcel: "_Parcel") -> Output:
        value = parcel.nodes[0].meta["val"]
        local = (len(parcel.nodes),) if parcel.is_vector else tuple(value.shape)
        shape = (local[0] * self.num_devices, *local[1:])
        return Output(kind=Kind.CROSS, target=parcel.nodes[0].name, shape=shape, dtype=value.dtype, shards=self.shards)


class _Writer:
    """Writes the graph of one segment."""

    def __init__(self, cutter: _Cutter):
        self.cutter = cutter
        self.graph = new_graph()
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.inputs: list[Input] = []
        self.outputs: list[tuple[Output, torch.fx.Node]] = []

    def take(self, node: torch.fx.Node, item: Input) -> None:
        """An input of the whole graph."""
        self.copies[node] = new = self.graph.node_copy(node)
        self.inputs.append(dataclasses.replace(item, name=new.name))

    def copy(self, node: torch.fx.Node) -> None:
        self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def receive(self, parcel: _Parcel) -> None:
        """A placeholder for what another segment sends."""
        out, first = self.cutter.crossing_item(parcel), parcel.nodes[0]
        self.copies[first] = new = self.graph.placeholder(first.name)
        new.meta = dict(first.meta)
        if parcel.is_vector:
            with torch.no_grad():
                new.meta["val"] = first.meta["val"].reshape(1).repeat(len(parcel.nodes))
        self.inputs.append(
            Input(name=new.name, kind=out.kind, target=out.target, shape=out.shape, dtype=out.dtype, shards=out.shards)
        )

    def unpack(self, parcel: _Parcel) -> None:
        """The numbers of a vector that has been received."""
        if parcel.is_vector:
            vector = self.copies[parcel.nodes[0]]
            for i, node in enumerate(parcel.nodes):
                number = self._call(aten.slice.Tensor, vector, 0, i, i + 1)
                self.copies[node] = self._call(aten.view.default, number, list(node.meta["val"].shape))

    def give(self, node: torch.fx.Node, out: Output) -> None:
        """A result of the whole graph."""
        self.outputs.append((out, self.copies[node]))

    def send(self, parcel: _Parcel) -> None:
        """A value, or numbers, for other segments."""
        new = self.copies[parcel.nodes[0]]
        if parcel.is_vector:
            parts = [self._call(aten.view.default, self.copies[node], [1]) for node in parcel.nodes]
            new = parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts)
        self.outputs.append((self.cutter.crossing_item(parcel), new))

    def _call(self, target, source: torch.fx.Node | list[torch.fx.Node], *args) -> torch.fx.Node:
        new = self.graph.call_function(target, (source, *args))
        first = source[0] if isinstance(source, list) else source
        new.meta = {**first.meta, "val": infer(target, (source, *args), {})}
        return new

    def finish(self) -> StepGraph:
        self.graph.output(tuple(node for _, node in self.outputs))
        step = StepGraph(
            graph=self.graph,
            inputs=tuple(self.inputs),
            outputs=tuple(out for out, _ in self.outputs),
            constants={
                item.target: self.cutter.step.constants[item.target]
                for item in self.inputs
                if item.target in self.cutter.step.constants
            },
        )
        step.verify()
        return step
