"""The graph of a model of which only some layers of a run were traced, made whole: copies of a layer's nodes for the layers between.

    traced:  first . second . third . . . . . . . . last                 (forward; a layer's backward nodes stand in the opposite order)
    whole:   first . second . third . copy . copy . last

The second and the third layer must have equal nodes, one by one: operator, constants, phase, source line and value. An operand of the third is then one of its own,
shared by both, of the layer before (where the second's is of the first, the third's is the same of the second), or of the layer behind (where the second's is one of
the third). That says what each copy reads, and what the third and the last layer read with the copies between them. It is the scan that the layers are, unrolled.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from graphacc._compat.torch_ import new_graph
from graphacc.capture.equal_layers import Run
from graphacc.errors import GraphError
from graphacc.graph import CHECKPOINT, Checkpointed, Input, Kind, Output, Phase, StepGraph, copy_node
from graphacc.ops.facts import OpKind, of_kind

_RANDOM = of_kind(OpKind.RANDOM)
_STREAM = 1  # place of a random operator's number among its arguments
_REGION = re.compile(r"^(checkpoint )(\d+)$")

Key = tuple[Kind, str]


class Unequal(GraphError):
    """The traced layers of a run are not what copies can be made of."""


def unrolled(step: StepGraph, run: Run, names: Mapping[Key, str]) -> StepGraph:
    """The step with all layers of the run.

    Args:
        step: a trace in which the layers `run.copied` hand on what they get.
        names: name of the placeholder of every parameter, buffer, ... of the whole model, by kind and target, in their order.

    Raises:
        Unequal: the layers that were traced do not show what the others do.
    """
    return _Unrolling(step, run, names).result()


class _Unrolling:
    def __init__(self, step: StepGraph, run: Run, names: Mapping[Key, str]):
        self.step, self.run, self.names = step, run, names
        _, second, third, _ = run.traced
        self._prefix = third + "."
        self.inputs = dict(zip(step.placeholders, step.inputs))
        self.owner = self._owners()
        self.own = {path: self._inputs_of(path) for path in (second, third)}  # name in the layer and kind -> placeholder
        self.twins, self.nodes = ([node for node in step.graph.nodes if node.op == "call_function" and self.owner[node] == path] for path in (second, third))
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.twin_index = {node: i for i, node in enumerate(self.twins)}
        self.num_streams = 0  # of one layer
        self.num_regions = 0
        self.missing_regions = 0  # numbers that the copied layers did not take in the trace
        self.reads: list[list[tuple[str, typing.Any]]] = []  # of each node of the third layer, its operands: what kind, and which
        self._compare()
        self._check_readers()

    def _owners(self) -> dict[fx.Node, str | None]:
        """Node -> the layer that it belongs to, by its module; where it has none (a cast of a parameter, the backward of a custom operator) by what it reads."""
        traced = self.run.traced
        owners: dict[fx.Node, str | None] = {}
        for node in self.step.graph.nodes:
            path = self.inputs[node].target if node in self.inputs else node.meta.get("module_path", "")
            owners[node] = next((layer for layer in traced if path == layer or path.startswith(layer + ".")), None)
            if node.op == "call_function" and not path:
                found = [layer for layer in traced if any(owners[operand] == layer for operand in node.all_input_nodes)]
                if found:
                    owners[node] = found[0] if node.meta["phase"] is Phase.BACKWARD else found[-1]
        return owners

    def _inputs_of(self, path: str) -> dict[tuple[Kind, str], fx.Node]:
        found = {}
        for node, item in self.inputs.items():
            if item.kind in (Kind.PARAM, Kind.BUFFER) and item.target.startswith(path + "."):
                found[item.kind, item.target.removeprefix(path + ".")] = node
        return found

    # ---- the two layers that show what the others do

    def _compare(self) -> None:
        second, third = self.run.traced[1:3]
        _require(len(self.twins) == len(self.nodes), f"{second} has {len(self.twins)} nodes, {third} has {len(self.nodes)}")
        _require(self.own[second].keys() == self.own[third].keys(), f"{second} and {third} have other parameters or buffers")
        streams: set[int] = set()
        regions: set[int] = set()
        for twin, node in zip(self.twins, self.nodes):
            _require(self._text(twin, second) == self._text(node, third), f"{twin.name} of {second} is not like {node.name} of {third}")
            if node.target in _RANDOM:
                _require(node.meta["phase"] is Phase.FORWARD, f"{node.name} draws random numbers in backward")
                streams.add(_stream(node) - _stream(twin))
            if CHECKPOINT in node.meta:
                regions.add(_region(node) - _region(twin))
            operands = list(zip(_operands(twin), _operands(node), strict=True))
            self.reads.append([self._kind_of(a, b) for a, b in operands])
        _require(len(streams) <= 1 and len(regions) <= 1, f"random numbers or checkpoints of {second} and {third} are numbered otherwise")
        self.num_streams, self.num_regions = max(streams, default=0), max(regions, default=0)
        self._count_regions()

    def _count_regions(self) -> None:
        """Whether checkpoints behind the copied layers have their numbers already: a function around a layer's call was checkpointed, if not that of the layer."""
        third, last = ({_region(node) for node, owner in self.owner.items() if owner == path and CHECKPOINT in node.meta} for path in self.run.traced[2:])
        self._last_region, taken = max(third, default=0), len(self.run.copied) * self.num_regions
        if third:
            behind = min(last, default=0) - min(third) - self.num_regions
            _require(behind in (0, taken), "checkpoints of the last layer are numbered otherwise")
            self.missing_regions = taken - behind

    def _text(self, node: fx.Node, path: str) -> tuple:
        """What must be the same for two layers' nodes: all but operands, the numbers of random operators and of checkpoints."""
        arguments: typing.Any = fx.map_arg((node.args, node.kwargs), lambda operand: None)
        if node.target in _RANDOM:
            arguments = ([argument for i, argument in enumerate(arguments[0]) if i != _STREAM], arguments[1])
        mark = node.meta.get(CHECKPOINT)
        own = node.meta["module_path"].removeprefix(path)
        return node.target, repr(arguments), own, node.meta["phase"], node.meta["stack_trace"], mark and mark.saved, _forms(node.meta["val"])

    def _kind_of(self, a: fx.Node, b: fx.Node) -> tuple[str, typing.Any]:
        """What an operand of the third layer is, `b`, by what it is in the second, `a`."""
        second, third = self.run.traced[1:3]
        if b in self.index and a in self.twin_index and self.index[b] == self.twin_index[a]:
            return "own", self.index[b]
        if b in self.twin_index and a not in self.index and a not in self.twin_index:
            return "before", self.twin_index[b]
        if a in self.index and b not in self.index and b not in self.twin_index:
            return "behind", self.index[a]
        if a is b and b not in self.index and b not in self.twin_index:
            return "shared", b
        for key, node in self.own[third].items():
            if node is b and self.own[second][key] is a:
                return "parameter", key
        raise Unequal(f"{b.name} in {third} ({self.owner[b]}) is not what {a.name} ({self.owner[a]}) is in {second}")

    def _check_readers(self) -> None:
        """Nobody but its neighbours reads values of a layer, and its results belong to its own parameters and buffers."""
        first, second, third, last = self.run.traced
        may_read = {second: {first, second, third}, third: {second, third, last}}
        results: dict[str | None, dict[tuple[Kind, str], fx.Node]] = {**self._results()}
        for node in (*self.twins, *self.nodes):
            for user in node.users:
                if user.op == "output":
                    _require(node in results.get(self.owner[node], {}).values(), f"{node.name} of {self.owner[node]} is a result of the step")
                else:
                    _require(self.owner[user] in may_read[self.owner[node] or ""], f"{user.name} of {self.owner[user]} reads {node.name} of {self.owner[node]}")
        for path in (second, third):
            for node in self.own[path].values():
                _require(all(self.owner[user] == path or user.op == "output" for user in node.users), f"a parameter of {path} is read elsewhere")
        pairs = results.get(second, {}), results.get(third, {})
        _require(pairs[0].keys() == pairs[1].keys(), f"{second} and {third} have other results")
        for key, node in pairs[1].items():
            _require(node in self.index and self.index[node] == self.twin_index.get(pairs[0][key]), f"the results {key} of {second} and {third} are not alike")

    def _results(self) -> dict[str, dict[tuple[Kind, str], fx.Node]]:
        """Path of the second or third layer -> kind and name in the layer -> the node that is its gradient or new value."""
        found: dict[str, dict[tuple[Kind, str], fx.Node]] = {}
        for item, node in zip(self.step.outputs, self.step.results):
            for path in self.run.traced[1:3]:
                if item.kind in (Kind.GRAD, Kind.BUFFER) and item.target.startswith(path + "."):
                    found.setdefault(path, {})[item.kind, item.target.removeprefix(path + ".")] = node
        return found

    # ---- the whole graph

    def result(self) -> StepGraph:
        self.graph = new_graph()
        self.images: dict[fx.Node, fx.Node] = {}  # traced node -> its node in the whole graph
        self.copies: dict[tuple[str, int], fx.Node] = {}  # layer and place among the third's nodes -> its copy
        self.own_copies: dict[tuple[str, Kind, str], fx.Node] = {}
        inputs = self._write_inputs()
        self._last_stream = max((_stream(node) for node in self.nodes if node.target in _RANDOM), default=None)
        for node in self._in_order():
            if isinstance(node, tuple):
                self._write_copy(*node)
            else:
                self._write(node)
        outputs = self._write_outputs()
        result = StepGraph(graph=self.graph, inputs=inputs, outputs=outputs, constants=self.step.constants)
        try:
            result.verify()
        except (GraphError, RuntimeError) as error:
            raise Unequal(f"the copies of {self.run.traced[2]} do not fit together: {error}") from error
        return result

    def _write_inputs(self) -> tuple[Input, ...]:
        traced = {(item.kind, item.target): node for node, item in self.inputs.items()}
        third = self.run.traced[2]
        found: list[Input] = []
        for (kind, target), name in self.names.items():
            if (kind, target) in traced:
                found.append(self._write_input(traced.pop((kind, target)), name))
                continue
            path = next((path for path in self.run.copied if target.startswith(path + ".")), None)
            if path is None:
                continue  # of a layer of another run
            key = kind, target.removeprefix(path + ".")
            _require(key in self.own[third], f"{target} has nothing like it in {third}")
            model = self.own[third][key]
            node = self.own_copies[path, *key] = self.graph.placeholder(name)
            node.meta.update(model.meta)
            found.append(dataclasses.replace(self.inputs[model], name=node.name, target=target, aliases=()))
            _require(not self.inputs[model].aliases, f"{target} has several names")
        return (*found, *(self._write_input(node, node.name) for node in traced.values()))

    def _write_input(self, node: fx.Node, name: str) -> Input:
        self.images[node] = copy = self.graph.placeholder(name)
        copy.meta.update(node.meta)
        return dataclasses.replace(self.inputs[node], name=copy.name)

    def _in_order(self) -> Iterator[fx.Node | tuple[str, int]]:
        """The calls of the whole graph: nodes of the trace, and (layer, place) of copies."""
        order = {node: i for i, node in enumerate(self.step.graph.nodes)}
        segments = _segments(self.nodes, order)
        _require([len(part) for part in segments] == [len(part) for part in _segments(self.twins, order)], "the layers' nodes are not in equal pieces")
        begins = {part[0]: part for part in segments}
        for node in self.step.graph.nodes:
            if node.op != "call_function":
                continue
            if node in begins:
                places = [self.index[each] for each in begins[node]]
                copied = [[(path, place) for place in places] for path in self.run.copied]
                if order[self.twins[places[0]]] < order[node]:  # forward
                    yield from begins[node]
                    yield from (each for part in copied for each in part)
                else:
                    yield from (each for part in reversed(copied) for each in part)
                    yield from begins[node]
            elif node not in self.index:
                yield node

    def _write(self, node: fx.Node) -> None:
        """A traced node; what the third and the last layer read of each other is now of the copies between them."""
        last = self.run.traced[3]
        if node in self.index:
            wanted = iter(self.reads[self.index[node]])
            copy = copy_node(self.graph, node, lambda old: self._operand(next(wanted), 0, old), renumber=True)
        elif self.owner[node] == last:
            copy = copy_node(self.graph, node, lambda old: self.copies[self.run.copied[-1], self.index[old]] if old in self.index else self._image(old), renumber=True)
        else:
            copy = copy_node(self.graph, node, self._image, renumber=True)
        later = self._last_stream is not None and node.target in _RANDOM and _stream(node) > self._last_stream
        if later:
            _add_to_stream(copy, self.num_streams * len(self.run.copied))
        if CHECKPOINT in node.meta and _region(node) > self._last_region:
            _renumber(copy, self.missing_regions)
        self.images[node] = copy

    def _write_copy(self, path: str, place: int) -> None:
        node, number = self.nodes[place], 1 + self.run.copied.index(path)
        wanted = iter(self.reads[place])
        copy = copy_node(self.graph, node, lambda old: self._operand(next(wanted), number, old), renumber=True)
        if node.meta["module_path"]:
            copy.meta["module_path"] = path + node.meta["module_path"].removeprefix(self.run.traced[2])
        if node.target in _RANDOM:
            _add_to_stream(copy, number * self.num_streams)
        if CHECKPOINT in node.meta:
            _renumber(copy, number * self.num_regions)
        self.copies[path, place] = copy

    def _operand(self, read: tuple[str, typing.Any], number: int, old: fx.Node) -> fx.Node:
        """What copy `number` of the third layer reads (0: the third layer itself) where that was traced with `old`."""
        kind, what = read
        if kind == "parameter":
            return self.own_copies[self.run.copied[number - 1], *what] if number else self._image(old)
        if kind == "shared":
            return self._image(old)
        moved = number + {"own": 0, "before": -1, "behind": 1}[kind]
        if moved < 0 or moved > len(self.run.copied):  # the second layer, or the last one
            return self._image(old)
        return self._made(self.images, self.nodes[what]) if moved == 0 else self._made(self.copies, (self.run.copied[moved - 1], what))

    def _image(self, node: fx.Node) -> fx.Node:
        return self._made(self.images, node)

    def _made(self, table: dict, key: object) -> fx.Node:
        _require(key in table, f"{key} is read before it is made")
        return table[key]

    def _write_outputs(self) -> tuple[Output, ...]:
        places = {key: i for i, key in enumerate(self.names)}
        results = self._results().get(self.run.traced[2], {})
        made = [(item, self._image(node)) for item, node in zip(self.step.outputs, self.step.results)]
        models = {(item.kind, item.target): item for item in self.step.outputs}
        for path in self.run.copied:
            for (kind, name), node in results.items():
                item = dataclasses.replace(models[kind, self._prefix + name], target=f"{path}.{name}")
                made.append((item, self.copies[path, self.index[node]]))
        kinds = list(dict.fromkeys(item.kind for item in self.step.outputs))
        state = {Kind.GRAD: Kind.PARAM}
        made.sort(key=lambda pair: (kinds.index(pair[0].kind), places.get((state.get(pair[0].kind, pair[0].kind), pair[0].target), -1)))
        self.graph.output(tuple(node for _, node in made))
        return tuple(item for item, _ in made)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unequal(otherwise)


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _stream(node: fx.Node) -> int:
    return typing.cast("int", node.args[_STREAM])


def _add_to_stream(node: fx.Node, number: int) -> None:
    node.args = (*node.args[:_STREAM], _stream(node) + number, *node.args[_STREAM + 1 :])


def _region(node: fx.Node) -> int:
    found = _REGION.match(node.meta[CHECKPOINT].region)
    if found is None:
        raise Unequal(f"{node.name} has the checkpoint {node.meta[CHECKPOINT].region!r}, which has no number")
    return int(found[2])


def _renumber(node: fx.Node, number: int) -> None:
    node.meta[CHECKPOINT] = Checkpointed(region=f"checkpoint {_region(node) + number}", saved=node.meta[CHECKPOINT].saved)


def _forms(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    return [_forms(each) for each in value] if isinstance(value, (tuple, list)) else value


def _segments(nodes: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """The nodes in pieces that stand side by side."""
    found: list[list[fx.Node]] = []
    for node in nodes:
        if found and order[node] == order[found[-1][-1]] + 1:
            found[-1].append(node)
        else:
            found.append([node])
    return found
