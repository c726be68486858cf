"""One traced update per kind of parameter, copied for all parameters of that kind.

torch's own optimizers update every parameter by itself in their single-tensor form, so two parameters of one group with equal
shapes and state have the same operators. Tracing one of them and copying its nodes makes capture time independent of a model's
depth.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from graphacc.graph import Input, Kind, Output, StepGraph, copy_node

_OWNED = (Kind.PARAM, Kind.GRAD, Kind.STATE)


def owner(item: Input | Output) -> str:
    """The parameter that an input or output of an update graph belongs to ("" for hyperparameters)."""
    if item.kind is Kind.STATE:
        return item.target.rpartition("/")[0]
    return item.target if item.kind in _OWNED else ""


def replicated(step: StepGraph, representatives: Mapping[str, str]) -> StepGraph:
    """Copy the nodes of every parameter of `step` for all the parameters that it represents.

    Args:
        step: an update graph of some parameters, in which none depends on another.
        representatives: parameter -> the parameter of `step` that stands for it, in the order of the result.
    """
    graph = fx.Graph()
    owners = _owners(step)
    names = fx.graph._Namespace()
    copies: dict[tuple[str, fx.Node], fx.Node] = {}
    inputs: list[Input] = []
    for kind in (*_OWNED, Kind.HYPER, Kind.KEY, Kind.BUFFER):
        for item, node, name in _assigned(step.inputs, step.placeholders, kind, representatives):
            target = name + item.target.removeprefix(owner(item)) if name else item.target
            copy = graph.placeholder(names.create_name(f"{kind.value}_{target}", None))
            copy.meta = dict(node.meta)
            copies[name, node] = copy
            inputs.append(dataclasses.replace(item, target=target, name=copy.name))

    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    for name, representative in {"": "", **representatives}.items():
        for node in (node for node in calls if owners[node] == representative):
            copies[name, node] = copy_node(graph, node, lambda arg: copies[name if owners[arg] else "", arg], renumber=True)

    outputs, results = [], []
    for name, representative in representatives.items():
        for item, node in zip(step.outputs, step.results):
            if owner(item) == representative:
                outputs.append(dataclasses.replace(item, target=name + item.target.removeprefix(representative)))
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
