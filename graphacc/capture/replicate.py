"""One traced update per kind of parameter, copied for all parameters of that kind.

torch's own optimizers update every parameter by itself in their single-tensor form, so two parameters of one group with equal
shapes and state have the same operators; most work element by element, and then the shapes may differ. Tracing one parameter and
copying its nodes makes capture time independent of a model's depth.

Numbers of the state, such as the count of steps, that are equal for all parameters of a kind stay equal where the step changes them by themselves alone: they
are one input and one output, and what follows from them (bias corrections) is computed once: of AdamW's 20 operators for a parameter, 10.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from graphacc._compat.torch_ import new_graph
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


def replicated(step: StepGraph, representatives: Mapping[str, str], shapes: Mapping[str, Sequence[int]], *, joins_numbers: bool = False) -> StepGraph:
    """Copy the nodes of every parameter of `step` for all the parameters that it represents.

    Args:
        step: an update graph of some parameters, in which none depends on another.
        representatives: parameter -> the parameter of `step` that stands for it, in the order of the result.
        shapes: parameter -> its shape, which may differ from that of its representative where `step` is elementwise (`is_elementwise`).
        joins_numbers: numbers of the state are equal for all parameters with one representative (see `_common_numbers`).
    """
    graph = new_graph()
    common = _common_numbers(step) if joins_numbers else frozenset()
    owners = _owners(step, common)
    names = fx.graph._Namespace()
    copies: dict[tuple[str, fx.Node], fx.Node] = {}
    inputs: list[Input] = []
    others = {name: (shapes[standing], shapes[name]) for name, standing in representatives.items() if shapes[name] != shapes[standing]}
    values: dict[tuple, torch.Tensor] = {}
    members: dict[str, list[str]] = {}
    for name, representative in representatives.items():
        members.setdefault(representative, []).append(name)

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
        for item, node, name in _assigned(step.inputs, step.placeholders, kind, representatives, owners):
            target = name + item.target.removeprefix(owner(item)) if name else item.target
            copy = graph.placeholder(names.create_name(f"{kind.value}_{target}", None))
            copy.meta.update(node.meta)
            copies[name, node] = reshape(copy, name)
            others_of = [other + item.target.removeprefix(owner(item)) for other in members[owner(item)][1:]] if item.target in common else ()
            inputs.append(dataclasses.replace(item, target=target, name=copy.name, shape=shape(name, item.shape), aliases=(*item.aliases, *others_of)))

    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    for name, representative in {"": "", **representatives}.items():
        for node in (node for node in calls if owners[node] == representative):
            copy = copy_node(graph, node, lambda arg: copies[name if owners[arg] else "", arg], renumber=True)
            copies[name, node] = reshape(copy, name)

    outputs, results = [], []
    for name, representative in representatives.items():
        for item, node in zip(step.outputs, step.results):
            if owner(item) == representative and (name == representative or item.target not in common):
                target = name + item.target.removeprefix(representative)
                outputs.append(dataclasses.replace(item, target=target, shape=shape(name, item.shape)))
                results.append(copies[name if owners[node] else "", node])
    graph.output(tuple(results))
    result = StepGraph(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs), constants=step.constants)
    result.verify()
    return result


def _owners(step: StepGraph, common: Collection[str] = ()) -> dict[fx.Node, str]:
    """Node -> the parameter that it belongs to, "" for what all share.

    Args:
        common: targets of the states that several parameters share.
    """
    owners = {node: "" if item.kind is Kind.STATE and item.target in common else owner(item) for node, item in zip(step.placeholders, step.inputs)}
    for node in step.graph.nodes:
        if node.op == "call_function":
            found = {owners[arg] for arg in node.all_input_nodes} - {""}
            assert len(found) <= 1, f"{node.name} joins the updates of {sorted(found)}"
            owners[node] = found.pop() if found else ""
    return owners


def _common_numbers(step: StepGraph) -> frozenset[str]:
    """Targets of the numbers in the state that follow from such numbers and hyperparameters alone: where they are equal before a step, they are equal behind it."""
    common = frozenset(item.target for item in step.inputs if item.kind is Kind.STATE and not item.shape)
    while True:
        owners = _owners(step, common)
        kept = frozenset(item.target for item, node in zip(step.outputs, step.results) if item.kind is Kind.STATE and item.target in common and not owners[node])
        if kept == common:
            return common
        common = kept


def _assigned(
    inputs: Sequence[Input], placeholders: Sequence[fx.Node], kind: Kind, representatives: Mapping[str, str], owners: Mapping[fx.Node, str]
) -> list[tuple[Input, fx.Node, str]]:
    """(input, placeholder, parameter) for every input of `kind` that the result has; parameter "" for what several share."""
    own = [(item, node) for item, node in zip(inputs, placeholders) if item.kind is kind]
    shared = [(item, node, "") for item, node in own if not owners[node]]
    return shared + [(item, node, name) for name, standing in representatives.items() for item, node in own if owners[node] == standing]
