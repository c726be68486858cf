"""Parameters whose exact values are on the host are kept on the devices in the dtype that the program computes in."""

import dataclasses

import torch

from graphacc.graph import Kind, StepGraph
from graphacc.passes.runner import Log, Pass

CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def narrow_parameters(step: StepGraph, log: Log) -> StepGraph:
    """A parameter that a program reads only through casts to one narrower dtype becomes an input of that dtype."""
    inputs = list(step.inputs)
    for index, (node, item) in enumerate(zip(step.placeholders, step.inputs)):
        if item.kind is not Kind.PARAM or node in step.results:
            continue
        casts = [user for user in node.users if user.target in CASTS]
        dtypes = {user.meta["val"].dtype for user in casts}
        if len(casts) < len(node.users) or len(dtypes) != 1 or (dtype := dtypes.pop()).itemsize >= item.dtype.itemsize:
            continue
        for cast in casts:
            cast.replace_all_uses_with(node)
            step.graph.erase_node(cast)
            log.rewrote()
        node.meta["val"] = node.meta["val"].to(dtype)
        inputs[index] = dataclasses.replace(item, dtype=dtype)
    step.inputs = tuple(inputs)
    return step


NARROW_PARAMETERS = Pass(name="narrow-parameters", exact=True, run=narrow_parameters)
