"""Gradients that add up over several runs of one program."""

import copy

import torch

from graphacc.graph import Input, Kind, Phase, StepGraph
from graphacc.passes.edit import Editor


def accumulating(joint: StepGraph) -> StepGraph:
    """The same step with every gradient added to an input of kind GRAD, which the sum replaces."""
    step = StepGraph(copy.deepcopy(joint.graph), joint.inputs, joint.outputs, joint.constants)
    graph, results, inputs = step.graph, list(step.results), list(step.inputs)
    last = step.placeholders[-1]
    for position in step.output_indices(Kind.GRAD):
        out, grad = step.outputs[position], results[position]
        with graph.inserting_after(last):
            last = graph.placeholder(f"grad_so_far_{position}")
        last.meta = {"val": grad.meta["val"], "phase": Phase.BACKWARD, "module_path": "", "stack_trace": ""}
        results[position] = Editor(graph, graph.output_node(), like=last)(torch.ops.aten.add.Tensor, last, grad)
        inputs.append(Input(name=last.name, kind=Kind.GRAD, target=out.target, shape=out.shape, dtype=out.dtype, shards=out.shards))
    graph.output_node().args = (tuple(results),)
    step.inputs = tuple(inputs)
    step.verify()
    return step
