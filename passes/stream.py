"""Gradients that leave for the host as they are made, in the place of outputs that hold all of them until the program ends."""

import torch

from graphacc.errors import GraphError
from graphacc.graph import Input, Kind, MeshShard, Output, Phase, StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.runner import Log, Pass
from graphacc.strategy.spec import Strategy

STREAM, SENT = "stream", "sent"
"""Targets of the input that names the stream of a run to every device, int64 [devices, 2], and of the output that says what was sent, uint8 [devices * gradients]."""

GRADIENT = "gradient"
"""Entry of the `meta` of a call that sends: the Output that the gradient would have been."""

SEND = torch.ops.graphacc.send_to_host.default


def stream_pass(strategy: Strategy) -> Pass:
    """The pass; behind all others, on the program of one rank."""
    shards = tuple(MeshShard(axis=axis, size=size, dim=0) for axis, size in strategy.mesh.items())

    def run(step: StepGraph, log: Log) -> StepGraph:
        return _stream(step, log, shards, strategy.num_devices)

    return Pass(name="stream-gradients", exact=True, run=run, verify=_verify)


def sent_gradients(step: StepGraph) -> tuple[Output, ...]:
    """The gradients that a program sends to the host, by their slot."""
    found = {node.args[2]: node.meta[GRADIENT] for node in step.graph.nodes if node.target is SEND}
    return tuple(found[slot] for slot in range(len(found)))


def _stream(step: StepGraph, log: Log, shards: tuple[MeshShard, ...], num_devices: int) -> StepGraph:
    step = step.copy()  # another program of the same graph may keep its gradients
    graph, results, places = step.graph, step.results, step.output_indices(Kind.GRAD)
    if not places:
        return step
    with graph.inserting_after(step.placeholders[-1]):
        stream = graph.placeholder(STREAM)
    stream.meta.update(val=step.placeholders[0].meta["val"].new_empty((1, 2), dtype=torch.int64), phase=Phase.BACKWARD, module_path="", stack_trace="")
    following = {node: after for node, after in zip(graph.nodes, list(graph.nodes)[1:])}
    sent = []
    for slot, place in enumerate(places):
        gradient = results[place]
        before = following[stream if gradient.op == "placeholder" else gradient]
        sent.append(Editor(graph, before, like=gradient, meta={GRADIENT: step.outputs[place]})(SEND, gradient, stream, slot))
        log.rewrote()
    last = graph.output_node()
    joined = Editor(graph, last, like=sent[-1], without=(GRADIENT,))(torch.ops.aten.cat.default, sent)
    kept = [i for i in range(len(results)) if i not in set(places)]
    last.args = ((*(results[i] for i in kept), joined),)
    item = Output(kind=Kind.STREAM, target=SENT, shape=(num_devices * len(sent),), dtype=torch.uint8, shards=shards)
    step.outputs = (*(step.outputs[i] for i in kept), item)
    step.inputs = (*step.inputs, Input(name=stream.name, kind=Kind.STREAM, target=STREAM, shape=(num_devices, 2), dtype=torch.int64, shards=shards))
    return step


def _verify(step: StepGraph) -> None:
    slots = [node.args[2] for node in step.graph.nodes if node.target is SEND]
    if step.output_indices(Kind.GRAD) or len(set(slots)) != len(slots) or set(slots) != set(range(len(slots))):
        raise GraphError(f"a program that sends its gradients returns none, and sends each once: slots {slots}")
