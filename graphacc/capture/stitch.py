"""Two StepGraphs become one: the joint graph's results feed the update graph."""

import dataclasses

from torch import fx, nn

from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, Output, StepGraph

_Key = tuple[Kind, str]


def stitch(joint: StepGraph, update: StepGraph) -> StepGraph:
    """The whole step: forward, backward and update in one graph.

    An input of `update` is wired, by kind and target, to the joint graph's output of that name (gradients, values of the user), else
    to the joint graph's input (parameters, batch, key), else it becomes an input of the step.

    Returns:
        A graph with inputs PARAM, BUFFER, BATCH, KEY, STATE and HYPER, and outputs LOSS, USER, BUFFER, PARAM and STATE.
        Gradients are internal. Parameters without a gradient are no outputs.

    Raises:
        GraphError: `update` reads a gradient that `joint` does not give, or a tensor of another shape or dtype.
    """
    graph = fx.Graph()
    outside = [item for item in update.inputs if _key(item) not in _keys(joint.inputs) and _key(item) not in _keys(joint.outputs)]
    _check_wiring(joint, update, outside)
    inputs: list[Input] = []
    sources: dict[_Key, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for step, items in ((joint, joint.inputs), (update, outside)):
        placeholders = dict(zip(map(_key, step.inputs), step.placeholders))
        for item in items:
            old = placeholders[_key(item)]
            node = copies[old] = sources[_key(item)] = graph.node_copy(old)
            inputs.append(dataclasses.replace(item, name=node.name))

    outputs = [out for out in joint.outputs if out.kind is not Kind.GRAD]
    _copy_calls(joint, graph, copies)
    results = [copies[node] for node, out in zip(joint.results, joint.outputs) if out.kind is not Kind.GRAD]
    sources |= {_key(out): copies[node] for node, out in zip(joint.results, joint.outputs) if out.kind is not Kind.BUFFER}

    copies.update({node: sources[_key(item)] for node, item in zip(update.placeholders, update.inputs)})
    _copy_calls(update, graph, copies)
    results += [copies[node] for node in update.results]
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    step = StepGraph(
        module=fx.GraphModule(nn.Module(), graph),
        inputs=tuple(inputs),
        outputs=(*outputs, *update.outputs),
        constants=joint.constants | update.constants,
    )
    step.verify()
    return step


def _key(item: Input | Output) -> _Key:
    return item.kind, item.target


def _keys(items: tuple[Input, ...] | tuple[Output, ...]) -> set[_Key]:
    return {_key(item) for item in items}


def _check_wiring(joint: StepGraph, update: StepGraph, outside: list[Input]) -> None:
    missing = [item.target for item in outside if item.kind in (Kind.GRAD, Kind.PARAM)]
    if missing:
        raise GraphError(f"the update reads {missing}, which the joint graph does not give: capture it for the gradients that the joint graph has")
    given = {_key(item): item for item in (*joint.inputs, *joint.outputs)}
    for item in update.inputs:
        source = given.get(_key(item), item)
        if (source.shape, source.dtype) != (item.shape, item.dtype):
            raise GraphError(
                f"the update reads {item.kind.value} {item.target!r} as {item.dtype}{list(item.shape)}, "
                f"the joint graph gives {source.dtype}{list(source.shape)}"
            )


def _copy_calls(step: StepGraph, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    for node in step.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
