"""All ranks of a partitioned graph in one process, in lockstep: plain torch per rank, collectives over the list of ranks."""

import math
import operator

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.ops.mesh import split_group
from graphacc.runtime.reference import block, coordinates, join

collective, mesh_ops = torch.ops._c10d_functional, torch.ops.graphacc


def run_global(step: StepGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The unpartitioned graph on one device."""
    with torch.no_grad():
        return list(torch.fx.Interpreter(torch.nn.Module(), graph=step.graph).run(*inputs))


def simulate(step: StepGraph, mesh: dict[str, int], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Global outputs of a local graph; asserts that ranks agree about replicated outputs."""
    places = list(coordinates(mesh))
    env = [{} for _ in places]
    for node, item, x in zip(step.placeholders, step.inputs, inputs, strict=True):
        for values, at in zip(env, places):
            values[node] = block(terms(x, item.shape[: item.num_terms]), item.shards, at)
    last = {operand: node for node in step.graph.nodes for operand in node.all_input_nodes}
    with torch.no_grad():
        for node in step.graph.nodes:
            if node.op == "call_function":
                _run(node, env, places)
                for operand in node.all_input_nodes:
                    if last[operand] is node:
                        for values in env:
                            del values[operand]
    return [_collect([values[node] for values in env], item, places, mesh) for node, item in zip(step.results, step.outputs)]


def _run(node, env, places):
    arguments = [torch.fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in env]
    for rank, result in enumerate(_results(node.target, arguments, places)):
        expected = node.meta["val"]
        if isinstance(expected, torch.Tensor):
            assert tuple(result.shape) == tuple(expected.shape) and result.dtype == expected.dtype, (
                f"{node.format_node()}: {result.shape} {result.dtype}"
            )
        env[rank][node] = result


def _results(target, arguments, places):
    if target is collective.wait_tensor.default:
        return [args[0] for args, _ in arguments]
    if target in (
        collective.all_reduce.default,
        collective.all_gather_into_tensor.default,
        collective.reduce_scatter_tensor.default,
        collective.all_to_all_single.default,
    ):
        return [_collective(target, arguments, places, rank) for rank in range(len(places))]
    if target is mesh_ops.axis_index.default:
        return [torch.tensor(at[args[1]]) for (args, _), at in zip(arguments, places)]
    if target is mesh_ops.shard.default:
        return [_shard(*args, at) for (args, _), at in zip(arguments, places)]
    if target is mesh_ops.permute_ranks.default:
        return [_permuted(arguments, places, rank) for rank in range(len(places))]
    if target is torch.ops.aten.view.default:  # programs have no strides
        target = torch.ops.aten.reshape.default
    return [target(*args, **kwargs) for args, kwargs in arguments]


def _permuted(arguments, places, rank):
    _, targets, axis = arguments[rank][0]
    source = targets.index(places[rank][axis])
    (peer,) = [other for other, at in enumerate(places) if at == {**places[rank], axis: source}]
    return arguments[peer][0][0].clone()


def _collective(target, arguments, places, rank):
    args = arguments[rank][0]
    axis = args[-1]
    peers = [other for other, at in enumerate(places) if _line(axis, at) == _line(axis, places[rank])]
    tensors = [arguments[peer][0][0] for peer in peers]
    assert all(x.is_contiguous() for x in tensors), "collectives need contiguous tensors"
    if target is collective.all_gather_into_tensor.default:
        return torch.cat(tensors)
    if target is collective.all_to_all_single.default:
        return torch.cat([x.chunk(len(peers))[peers.index(rank)] for x in tensors])
    reduce = {"sum": operator.add, "max": torch.maximum, "min": torch.minimum}[args[1]]
    total = tensors[0]
    for x in tensors[1:]:
        total = reduce(total, x)
    return total.clone() if target is collective.all_reduce.default else total.chunk(len(peers))[peers.index(rank)].clone()


def _line(group, at):
    """What the ranks of a group have in common."""
    axis, kind, size = split_group(group)
    return {**at, axis: {"": 0, "/": at[axis] // max(size, 1), "%": at[axis] % max(size, 1)}[kind]}


def _shard(x, dim, outer, size, group, at):
    axis, kind, number = split_group(group)
    place = {"": at[axis], "/": at[axis] % max(number, 1), "%": at[axis] // max(number, 1)}[kind]
    return x.unflatten(dim, (outer, size, -1)).select(dim + 1, place).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def _collect(blocks, item, places, mesh):
    axes = {shard.axis for shard in item.shards}
    for at, part in zip(places, blocks):
        first = places.index({axis: place if axis in axes else 0 for axis, place in at.items()})
        assert torch.equal(part.nan_to_num(), blocks[first].nan_to_num()), f"ranks disagree about {item.kind.value} {item.target}"
    return join(blocks, item.shape, item.shards, mesh).sum(tuple(range(item.num_terms))) if item.num_terms else join(blocks, item.shape, item.shards, mesh)


def terms(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """A gradient as a sum over dims in front: a half, a quarter, ..., which add up exactly."""
    for size in reversed(sizes):
        shares = [0.5 ** min(i + 1, size - 1) for i in range(size)]
        x = torch.stack([x * share for share in shares])
    return x


def num_devices(mesh: dict[str, int]) -> int:
    return math.prod(mesh.values())
