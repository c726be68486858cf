"""One traced update per kind of parameter, copied for all parameters of that kind.

torch's own optimizers update every parameter by itself in their single-tensor form, so two parameters of one group with equal
shapes and state have the same operators; most work element by element, and then the shapes may differ. Tracing one parameter and
copying its nodes makes capture time independent of a model's depth.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from graphacc.graph import Input, Kind, Output, StepGraph, copy_node
from graphacc.ops.facts import OpKind, is_pointwise, of_kind

_OWNED = (Kind.PARAM, Kind.GRAD, Kind.STATE)


def owner(item: Input | Output) -> str:
    """The parameter that an input or output of an update graph belongs to ("" for hyperparameters)."""
    if item.kind is Kind.STATE:
        return item.target.rpartition("/")[0]
    return item.target if item.kind in _OWNED else ""


def is_elementwise(step: StepGraph) -> bool:
    """Whether every value of an update graph has its parameter's shape or none, by operators that work element by element.

    Such operators compute the same for another shape, as long as it has dims.
    """
    shapes = {item.target: item.shape for item in step.inputs if item.kind is Kind.PARAM}
    elementwise = of_kind(OpKind.SAME, OpKind.CAST, OpKind.FILL) | {torch.ops.aten.view.dtype}
    return all(
        node.meta["val"].shape in ((), shapes.get(name, ())) and (node.op == "placeholder" or node.target in elementwise or is_pointwise(node.target))
        for node, name in _owners(step).items()
    )


def replicated(step: StepGraph, representatives: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> StepGraph:
    """Copy the nodes of every parameter of `step` for all the parameters that it represents.

    Args:
        step: an update graph of some parameters, in which none depends on another.
        representatives: parameter -> the parameter of `step` that stands for it, in the order of the result.
        shapes: parameter -> its shape, which may differ from that of its representative where `step` is elementwise (`is_elementwise`).
    """
    graph = fx.Graph()
    owners = _owners(step)
    names = fx.graph._Namespace()
    copies: dict[tuple[str, fx.Node], fx.Node] = {}
    inputs: list[Input] = []
    others = {name: (shapes[standing], shapes[name]) for name, standing in representatives.items() if shapes[name] != shapes[standing]}
    values: dict[tuple, torch.Tensor] = {}

    def shape(name: str, of_representative: Sequence[int]) -> tuple[int, ...]:
        old, new = others.get(name, (None, ()))
        return tuple(new if of_representative == old else of_representative)

    def reshape(copy: fx.Node, name: str) -> fx.Node:
        value = copy.meta["val"]
        wanted = shape(name, value.shape)
        if wanted != value.shape:
            if (wanted, value.dtype) not in values:
                values[wanted, value.dtype] = value.new_empty(wanted)
            copy.meta["val"] = values[wanted, value.dtype]
        return copy

    for kind in (*_OWNED, Kind.HYPER, Kind.KEY, Kind.BUFFER):
        for item, node, name in _assigned(step.inputs, step.placeholders, kind, representatives):
            target = name + item.target.removeprefix(owner(item)) if name else item.target
            copy = graph.placeholder(names.create_name(f"{kind.value}_{target}", None))
            copy.meta = dict(node.meta)
            copies[name, node] = reshape(copy, name)
            inputs.append(dataclasses.replace(item, target=target, name=copy.name, shape=shape(name, item.shape)))

    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    for name, representative in {"": "", **representatives}.items():
        for node in (node for node in calls if owners[node] == representative):
            copy = copy_node(graph, node, lambda arg: copies[name if owners[arg] else "", arg], renumber=True)
            copies[name, node] = reshape(copy, name)

    outputs, results = [], []
    for name, representative in representatives.items():
        for item, node in zip(step.outputs, step.results):
            if owner(item) == representative:
                target = name + item.target.removeprefix(representative)
                outputs.append(dataclasses.replace(item, target=target, shape=shape(name, item.shape)))
                results.append(copies[name if owners[node] else "", node])
    graph.output(tuple(results))
    result = StepGraph(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs), constants=step.constants)
    result.verify()
    return result


def _owners(step: StepGraph) -> dict[fx.Node, str]:
    """Node -> the parameter that it belongs to, "" for what all share."""
    owners = {node: owner(item) for node, item in zip(step.placeholders, step.inputs)}
    for node in step.graph.nodes:
        if node.op == "call_function":
            found = {owners[arg] for arg in node.all_input_nodes} - {""}
            assert len(found) <= 1, f"{node.name} joins the updates of {sorted(found)}"
            owners[node] = found.pop() if found else ""
    return owners


def _assigned(
    inputs: Sequence[Input], placeholders: Sequence[fx.Node], kind: Kind, representatives: Mapping[str, str]
) -> list[tuple[Input, fx.Node, str]]:
    """(input, placeholder, parameter) for every input of `kind` that the result has."""
    own = [(item, node) for item, node in zip(inputs, placeholders) if item.kind is kind]
    if kind not in _OWNED:
        return [(item, node, "") for item, node in own]
    return [(item, node, name) for name, standing in representatives.items() for item, node in own if owner(item) == standing]
