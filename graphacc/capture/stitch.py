"""Two StepGraphs become one: the joint graph's results feed the update graph."""

import dataclasses

import torch
from torch import fx

from graphacc._compat.torch_ import new_graph
from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, Output, StepGraph, copy_node, stands_for

_Key = tuple[Kind, str]


def stitch(joint: StepGraph, update: StepGraph) -> StepGraph:
    """The whole step: forward, backward and update in one graph.

    An input of `update` is wired, by kind and target, to the joint graph's output of that name (gradients, values of the user),
    else to the joint graph's input (parameters, batch, key), else it becomes an input of the step.

    Returns:
        A graph with inputs PARAM, BUFFER, BATCH, KEY, STATE and HYPER, and outputs LOSS, USER, BUFFER, PARAM and STATE.
        Gradients are internal. Parameters without a gradient are no outputs.

    Raises:
        GraphError: `update` reads a gradient that `joint` does not give, or a tensor of another shape or dtype.
    """
    _check_gradients(joint, update)
    return joined(joint, update)


def joined(first: StepGraph, second: StepGraph) -> StepGraph:
    """Both graphs as one; gradients that `first` gives are internal.

    A value of the user is widened or narrowed to what `second` reads: under precision="bf16" the loop was promised PyTorch's dtype.

    Raises:
        GraphError: `second` reads a tensor of another shape, or another tensor of another dtype, than `first` has.
    """
    _check_wiring(first, second)
    graph = new_graph()
    inputs: list[Input] = []
    sources: dict[_Key, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    known = _keys(first.inputs) | _keys(first.outputs)
    outside = [item for item in second.inputs if _key(item) not in known]
    for step, items in ((first, first.inputs), (second, outside)):
        placeholders = dict(zip(map(_key, step.inputs), step.placeholders))
        for item in items:
            old = placeholders[_key(item)]
            node = copies[old] = sources[_key(item)] = copy_node(graph, old, copies.__getitem__)
            inputs.append(dataclasses.replace(item, name=node.name))

    _copy_calls(first, graph, copies)
    made = [(out, copies[node]) for out, node in zip(first.outputs, first.results)]
    sources |= {_key(out): node for out, node in made if out.kind is not Kind.BUFFER}
    copies.update({node: _as_promised(graph, sources[_key(item)], item) for node, item in zip(second.placeholders, second.inputs)})
    _copy_calls(second, graph, copies, renumber=True)
    made = [(out, node) for out, node in made if out.kind is not Kind.GRAD]
    made += [(out, copies[node]) for out, node in zip(second.outputs, second.results)]
    graph.output(tuple(node for _, node in made))
    graph.eliminate_dead_code()
    step = StepGraph(
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(out for out, _ in made),
        constants=first.constants | second.constants,
    )
    step.verify()
    return step


def _as_promised(graph: fx.Graph, node: fx.Node, item: Input) -> fx.Node:
    value = node.meta["val"]
    if item.kind is not Kind.USER or value.dtype == item.dtype:
        return node
    made = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": item.dtype})
    made.meta = node.meta | {"val": value.to(item.dtype)}
    return made


def _key(item: Input | Output) -> _Key:
    return item.kind, item.target


def _keys(items: tuple[Input, ...] | tuple[Output, ...]) -> set[_Key]:
    return {_key(item) for item in items}


def _check_gradients(joint: StepGraph, update: StepGraph) -> None:
    given = _keys(joint.inputs) | _keys(joint.outputs)
    missing = [item.target for item in update.inputs if item.kind in (Kind.GRAD, Kind.PARAM) and _key(item) not in given]
    if missing:
        raise GraphError(
            f"the update reads {missing}, which the joint graph does not give: capture it for the gradients that the joint "
            f"graph has"
        )


def _check_wiring(first: StepGraph, second: StepGraph) -> None:
    given = {_key(item): item for item in (*first.inputs, *first.outputs)}
    for item in second.inputs:
        source = given.get(_key(item), item)
        if not stands_for(source, item):
            raise GraphError(
                f"the second graph reads {item.kind.value} {item.target!r} as {item.dtype}{list(item.shape)}, "
                f"the first gives {source.dtype}{list(source.shape)}"
            )


def _copy_calls(step: StepGraph, graph: fx.Graph, copies: dict[fx.Node, fx.Node], *, renumber: bool = False) -> None:
    for node in step.graph.nodes:
        if node.op == "call_function":
            copies[node] = copy_node(graph, node, copies.__getitem__, renumber=renumber)
