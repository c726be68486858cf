"""Run a partitioned StepGraph in plain ``torch.distributed`` processes over Gloo: no XLA, no JAX.

The graph's collectives are torch's own functional ones with a mesh axis as the group name. So each process interprets
the graph as it stands, with one process group per line of ranks along every axis, registered under the axis's name, and per part of
such a line that the graph names ("fsdp/4").
"""

import dataclasses
import datetime
import functools
import importlib
import itertools
import math
import multiprocessing
import multiprocessing.connection
import operator
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc._compat.torch_ import defining_module, register_group, unregister_group
from graphacc.errors import GraphAccError
from graphacc.graph import MeshShard, StepGraph
from graphacc.ops.mesh import split_group, subgroups

Coordinates = dict[str, int]  # axis -> a rank's place on it


def run_reference(
    step: StepGraph, mesh: Mapping[str, int], inputs: Sequence[Tensor], *, timeout_seconds: float = 120.0
) -> list[Tensor]:
    """Run `step` once in ``prod(mesh.values())`` processes.

    Args:
        step: a graph that is local along every axis of `mesh`.
        mesh: axis -> number of ranks, outermost first.
        inputs: global tensors in the order of ``step.inputs``, on the CPU.
        timeout_seconds: for the whole run, start of the processes included.

    Returns:
        Global outputs in the order of ``step.outputs``.

    Raises:
        GraphAccError: a process failed (its traceback is in the message) or the time is up.
    """
    blocks = [[block(x, item.shards, at) for x, item in zip(inputs, step.inputs, strict=True)] for at in coordinates(mesh)]
    program = _write_program(step, mesh)
    results = _run_processes(program, blocks, timeout_seconds)
    return [join([result[i] for result in results], item.shape, item.shards, mesh) for i, item in enumerate(step.outputs)]


def coordinates(mesh: Mapping[str, int]) -> Iterator[Coordinates]:
    """The place of every rank on every axis, in the order of ranks: the first axis varies slowest."""
    for place in itertools.product(*(range(size) for size in mesh.values())):
        yield dict(zip(mesh, place))


def block(x: Tensor, shards: Sequence[MeshShard], at: Coordinates) -> Tensor:
    """The part of global tensor `x` that the rank at `at` holds, padded with zeros where a dim does not divide."""
    for shard in shards:
        size = -(-x.shape[shard.dim] // shard.size)
        behind = x.dim() - 1 - shard.dim
        padded = torch.nn.functional.pad(x, [0, 0] * behind + [0, size * shard.size - x.shape[shard.dim]])
        parts = padded.unflatten(shard.dim, (shard.outer, shard.size, size // shard.outer))
        x = parts.select(shard.dim + 1, at[shard.axis]).flatten(shard.dim, shard.dim + 1)
    return x.contiguous()


def join(blocks: Sequence[Tensor], shape: Sequence[int], shards: Sequence[MeshShard], mesh: Mapping[str, int]) -> Tensor:
    """The global tensor of `shape` out of every rank's block, in the order of ranks; the inverse of `block`."""
    by_place = {tuple(at.values()): part for at, part in zip(coordinates(mesh), blocks, strict=True)}
    return _join(by_place, dict.fromkeys(mesh, 0), tuple(shape), tuple(shards))


def _join(blocks: Mapping[tuple[int, ...], Tensor], at: Coordinates, shape: tuple[int, ...], shards: tuple[MeshShard, ...]) -> Tensor:
    if not shards:
        return blocks[tuple(at.values())]
    first, *rest = shards
    inner = list(shape)
    inner[first.dim] = -(-shape[first.dim] // first.size)
    parts = [_join(blocks, {**at, first.axis: i}, tuple(inner), tuple(rest)) for i in range(first.size)]
    stacked = torch.stack([part.unflatten(first.dim, (first.outer, -1)) for part in parts], first.dim + 1)
    return stacked.flatten(first.dim, first.dim + 2).narrow(first.dim, 0, shape[first.dim])


@dataclasses.dataclass(frozen=True)
class _Ref:
    """A value of the program, by name."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Instruction:
    result: str
    operator: str | None  # "namespace::name.overload"; None takes an element out of a tuple
    args: tuple
    kwargs: dict[str, Any]
    dead: tuple[str, ...]  # values that nothing reads any more


@dataclasses.dataclass(frozen=True)
class _Program:
    """A graph as plain data, which another process can read without tracing it again."""

    mesh: dict[str, int]
    imports: tuple[str, ...]  # modules that register its operators
    inputs: tuple[str, ...]
    instructions: tuple[_Instruction, ...]
    outputs: tuple[str, ...]


def _write_program(step: StepGraph, mesh: Mapping[str, int]) -> _Program:
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    operators = [node.target for node in calls if node.target is not operator.getitem]
    last = {operand: node for node in calls for operand in (*node.all_input_nodes, node)}
    kept, dead = set(step.results), {}
    for operand, node in last.items():
        if operand not in kept:
            dead.setdefault(node, []).append(operand.name)
    return _Program(
        mesh=dict(mesh),
        imports=tuple(sorted({name for target in operators if (name := defining_module(target)) is not None})),
        inputs=tuple(node.name for node in step.placeholders),
        instructions=tuple(_write_instruction(node, tuple(dead.get(node, ()))) for node in calls),
        outputs=tuple(node.name for node in step.results),
    )


def _write_instruction(node: torch.fx.Node, dead: tuple[str, ...]) -> _Instruction:
    args, kwargs = torch.fx.node.map_aggregate(
        (node.args, node.kwargs), lambda x: _Ref(x.name) if isinstance(x, torch.fx.Node) else x
    )
    name = None if node.target is operator.getitem else f"{node.target._schema.name}.{node.target._overloadname}"
    return _Instruction(node.name, name, _plain(args), _plain(kwargs), dead)


def _plain(value: Any) -> Any:
    """fx's immutable lists and dicts as Python's own."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _execute(program: _Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    values: dict[str, Any] = dict(zip(program.inputs, inputs, strict=True))

    def read(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [read(item) for item in x]
        return values[x.name] if isinstance(x, _Ref) else x

    for step in program.instructions:
        args, kwargs = read(step.args), {name: read(x) for name, x in step.kwargs.items()}
        values[step.result] = args[0][args[1]] if step.operator is None else _find_operator(step.operator)(*args, **kwargs)
        for name in step.dead:
            del values[name]
    return [values[name] for name in program.outputs]


@functools.cache
def _find_operator(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _run_processes(program: _Program, blocks: list[list[Tensor]], timeout_seconds: float) -> list[list[Tensor]]:
    """Start one process per list of blocks and collect the results in the order of ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in blocks]
        workers = [
            context.Process(
                target=_work, args=(rank, len(blocks), f"file://{folder}/rendezvous", timeout_seconds, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for worker in workers:
                worker.start()
            for (ours, theirs), inputs in zip(pipes, blocks):
                theirs.close()
                ours.send((program, [_pack(x) for x in inputs]))
            return _collect([ours for ours, _ in pipes], timeout_seconds)
        finally:
            _stop(workers)


def _collect(pipes: list[Any], timeout_seconds: float) -> list[list[Tensor]]:
    """One result per pipe; the first failure that is reported ends the wait."""
    results: dict[int, list[Tensor]] = {}
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_seconds)
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        left = (deadline - datetime.datetime.now()).total_seconds()
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(left, 0.0))
        if not ready:
            raise GraphAccError(
                f"ranks {sorted(waiting.values())} gave no result within {timeout_seconds} s: raise timeout_seconds "
                "if they are only slow"
            )
        for pipe in ready:
            results[waiting[pipe]] = _receive(pipe, waiting[pipe])
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Any, rank: int) -> list[Tensor]:
    try:
        result, failure = pipe.recv()
    except EOFError:
        raise GraphAccError(f"the process of rank {rank} died without a message") from None
    if failure is not None:
        raise GraphAccError(f"the process of rank {rank} failed:\n{failure}")
    return [_unpack(packed) for packed in result]


def _pack(x: Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    """A tensor as bytes, which outlive the process that made them."""
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), x.dtype, tuple(x.shape)


def _unpack(packed: tuple[bytes, torch.dtype, tuple[int, ...]]) -> Tensor:
    data, dtype, shape = packed
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _stop(workers: list[Any]) -> None:
    for worker in workers:
        if worker.pid is not None:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _work(rank: int, num_ranks: int, rendezvous: str, timeout_seconds: float, pipe: Any) -> None:
    """One process: interpret the program on this rank's blocks and send the result back."""
    try:
        program, packed = pipe.recv()
        torch.set_num_threads(1)
        for name in program.imports:
            importlib.import_module(name)
        timeout = datetime.timedelta(seconds=timeout_seconds)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=timeout)
        groups = _register_groups(program, rank, timeout)
        try:
            with torch.no_grad():
                outputs = _execute(program, [_unpack(x) for x in packed])
        finally:
            for axis in groups:
                unregister_group(axis)
        pipe.send(([_pack(x) for x in outputs], None))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise


def _register_groups(program: _Program, rank: int, timeout: datetime.timedelta) -> list[str]:
    """Register, under its name, the part of the ranks that differ from `rank` along one axis alone which every group of the program names."""
    mesh = program.mesh
    named = {arg for step in program.instructions for arg in step.args if isinstance(arg, str) and split_group(arg)[1]}
    names = [*mesh, *sorted(named)]
    ranks = torch.arange(math.prod(mesh.values())).view(*mesh.values())
    for name in names:
        axis, kind, size = split_group(name)
        members = subgroups(kind, size, mesh[axis]) if kind else [list(range(mesh[axis]))]
        for line in ranks.movedim(list(mesh).index(axis), -1).reshape(-1, mesh[axis]).tolist():
            for places in members:
                chosen = [line[place] for place in places]
                group = dist.new_group(chosen, timeout=timeout)
                if rank in chosen:
                    register_group(name, group)
    return names
