"""Small step graphs traced with make_fx, for tests that need no capture."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphacc.graph import Input, Kind, Output, Phase, StepGraph


def trace(
    function, inputs: list[tuple[Kind, str, torch.Tensor]], outputs: list[tuple[Kind, str]], phase=Phase.FORWARD, trainable=True
) -> StepGraph:
    """`function` of the input tensors as a graph whose nodes all belong to `phase`."""
    tensors = [x for _, _, x in inputs]
    module = make_fx(function, tracing_mode="fake")(*tensors)
    for node in module.graph.nodes:
        if node.op == "output":
            node.args = (tuple(node.args[0]) if isinstance(node.args[0], (tuple, list)) else (node.args[0],),)
            continue
        assert node.op != "get_attr", f"{node} is a constant"
        node.meta = {"val": node.meta.get("val"), "phase": phase, "module_path": "", "stack_trace": ""}
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    signature = tuple(
        Input(
            name=name, kind=kind, target=target, shape=tuple(x.shape), dtype=x.dtype, trainable=kind is Kind.PARAM and trainable
        )
        for name, (kind, target, x) in zip(names, inputs)
    )
    values = [node.meta["val"] for node in module.graph.output_node().args[0]]
    results = tuple(
        Output(kind=kind, target=target, shape=tuple(x.shape), dtype=x.dtype)
        for (kind, target), x in zip(outputs, values, strict=True)
    )
    step = StepGraph(module.graph, signature, results)
    step.verify()
    return step
