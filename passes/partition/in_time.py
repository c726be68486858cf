"""Parts that run one after the other instead of on ranks: the number of the part is an input of the program."""

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.ops.chunked import Split
from graphacc.passes.edit import Editor, infer, shape_of

aten, own = torch.ops.aten, torch.ops.graphacc


def number_parts(local: StepGraph, axis: str, count: int, name: str) -> torch.fx.Node:
    """Give the program of one rank of `axis` the rank's number as its first placeholder, int64 of shape []; it is not in the signature yet.

    What asks for the rank reads it, and what cuts a rank's part out of a tensor cuts by it.
    """
    graph = local.graph
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        number = graph.placeholder(name)
    number.meta.update(first.meta, val=infer(aten.full.default, ([], 0), {"dtype": torch.int64}))
    for node in list(graph.nodes):
        if node.target is own.axis_index.default and node.args[1] == axis:
            node.replace_all_uses_with(number)
            graph.erase_node(node)
        elif node.target is own.shard.default and node.args[4] == axis:
            x, dim, outer = node.args[:3]
            assert isinstance(x, torch.fx.Node) and isinstance(dim, int) and isinstance(outer, int), "graphacc::shard has other arguments"
            edit = Editor(graph, node)
            blocks = edit.view(x, Split(dim, outer).blocks(shape_of(x), count))
            part = edit(aten.index_select.default, blocks, dim + 1, edit.view(number, [1]))
            node.replace_all_uses_with(edit.view(part, shape_of(node)))
            graph.erase_node(node)
    return number
