"""StepGraph: one training step, or a part of it, as a functional torch.fx graph of ATen operators with a signature.

The graph has one placeholder per `Input` and one flat output tuple with one node per `Output`, in the same order. It
is functional: no operator mutates an argument, so a new parameter is an output that replaces an input of the same
kind and target. Before any partitioning every shape is global. A pass that makes the graph manual along a mesh axis
turns the shapes inside into local ones and records the layout of every input and output in its `shards`.

Every node carries these entries in ``node.meta``:

- ``val``: the fake value (a fake tensor, or a tuple or list of them), with the shape and dtype in this graph;
- ``phase``: the `Phase` that it belongs to;
- ``module_path``: the dotted path of the submodule that it came from ("" where there is none);
- ``stack_trace``: the user's source lines, as torch recorded them ("" where there are none).

A call of the forward inside of ``torch.utils.checkpoint`` has a `Checkpointed` as ``meta[CHECKPOINT]``. A pass marks by ``meta[CHUNKED]`` what a loop over
chunks of tokens is to hold.
"""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable

import torch
import torch.fx

from graphacc._compat.torch_ import new_graph
from graphacc.errors import GraphError


class Phase(enum.Enum):
    """The part of the step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"

    __hash__ = object.__hash__  # quick: an enum's own hashes the name, in Python


class Kind(enum.Enum):
    """What an input or an output of a StepGraph is."""

    PARAM = "param"
    BUFFER = "buffer"  # a buffer of the model, or a tensor that the trace lifted (see StepGraph.constants)
    STATE = "state"  # one tensor of the optimizer's state of one parameter, or a number that several have in common; target "<parameter>/<name>"
    GRAD = "grad"  # a gradient; target is the parameter's name
    BATCH = "batch"  # a tensor of the user's batch; target is its path in the call
    HYPER = "hyper"  # a number of a parameter group, float64, 0-d; target "<group index>/<name>"
    KEY = "key"  # the random key of this step: int64[2] holding two 32-bit words (seed, counter)
    LOSS = "loss"  # output only: the loss, 0-d
    USER = "user"  # output only: a tensor that the user's loop still holds; target is its index
    STREAM = "stream"  # of gradients that leave for the host while the program runs; see `graphacc.passes.stream`
    CROSS = "cross"  # a value that one program of a pipeline passes to another; target is the node that made it

    __hash__ = object.__hash__  # Enum's own is Python code, and every step looks up each of its values by kind and name


CHECKPOINT = "checkpoint"
"""Entry of ``node.meta``: the `Checkpointed` of a call that the user's model checkpoints."""


CHUNKED = "chunked"
"""Entry of ``node.meta``: the call is to be part of a loop over chunks of tokens; of the product that gives the logits, which of its arguments has the tokens."""


FILLED = "filled"
"""Entry of ``node.meta`` of a grouped product over `ep`: the share of its rows that are there where experts get equally many; the others are room for routing that is not even, and not computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointed:
    """What ``torch.utils.checkpoint`` says about a call of the forward."""

    region: str  # the same for all calls of one checkpointed function
    saved: bool = False  # the user's policy keeps its results for backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShard:
    """One dim of a tensor, read as [outer, size, rest], is split along one mesh axis: a rank holds [outer, 1, rest], flattened.

    With `outer` 1 the blocks are contiguous. A fused query-key-value projection that is split by heads has `outer` 3.
    """

    axis: str  # name of the mesh axis
    size: int  # number of ranks on that axis
    dim: int  # dim of the tensor, non-negative
    outer: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """A tensor that is kept as the messages of its ranks' parts (`graphacc.ops.quantize`): [size of each shard, ..., bytes]."""

    shape: tuple[int, ...]  # of the tensor, global, without padding
    shards: tuple[MeshShard, ...]  # of the tensor
    bits: int
    block: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """One placeholder of a StepGraph."""

    name: str  # name of the placeholder node
    kind: Kind
    target: str  # the parameter's first name, the batch leaf's path, ...: see Kind
    shape: tuple[int, ...]  # global shape, without padding
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()  # the other names of a tied parameter or buffer; of a STATE, the targets of other parameters that have the same number
    trainable: bool = False  # parameters only: it receives a gradient
    shards: tuple[MeshShard, ...] = ()  # major to minor where two axes split the same dim
    num_terms: int = 0  # of GRAD: so many dims in front, each split over one axis, stand for ranks: the gradient is the sum over them
    codes: Codes | None = None  # parameters that nothing changes: the program reads codes, which `shape`, `dtype` and `shards` describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One element of the flat output of a StepGraph."""

    kind: Kind
    target: str
    shape: tuple[int, ...]  # global shape, without padding
    dtype: torch.dtype
    shards: tuple[MeshShard, ...] = ()
    num_terms: int = 0  # as of an Input


def local_shape(shape: Iterable[int], shards: Iterable[MeshShard]) -> tuple[int, ...]:
    """The shape of one device's part of a tensor of global `shape`; dims that do not divide are padded up.

    Examples:
        >>> local_shape((10, 4), [MeshShard(axis="fsdp", size=8, dim=0)])
        (2, 4)
    """
    local = list(shape)
    for shard in shards:
        local[shard.dim] = -(-local[shard.dim] // shard.size)
    return tuple(local)


def padded_shape(shape: Iterable[int], shards: Iterable[MeshShard]) -> tuple[int, ...]:
    """The global shape as it is stored: every sharded dim padded up so that all its blocks are equal (see runtime/layout.py)."""
    shards = tuple(shards)
    padded = list(local_shape(shape, shards))
    for shard in shards:
        padded[shard.dim] *= shard.size
    return tuple(padded)


@dataclasses.dataclass
class StepGraph:
    """A functional graph of a training step (or a part of it) and its signature."""

    graph: torch.fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # target of a BUFFER input -> its fixed value

    @property
    def placeholders(self) -> list[torch.fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[torch.fx.Node, ...]:
        """The nodes that the graph returns, one per output."""
        return tuple(self.graph.output_node().args[0])

    def input_indices(self, *kinds: Kind) -> list[int]:
        return [i for i, item in enumerate(self.inputs) if item.kind in kinds]

    def output_indices(self, *kinds: Kind) -> list[int]:
        return [i for i, item in enumerate(self.outputs) if item.kind in kinds]

    def donations(self) -> dict[int, int]:
        """Output index -> index of the input that it replaces (same kind and target)."""
        by_key = {(item.kind, item.target): i for i, item in enumerate(self.inputs)}
        return {i: by_key[key] for i, out in enumerate(self.outputs) if (key := (out.kind, out.target)) in by_key}

    def copy(self) -> "StepGraph":
        """The same step in a graph of its own; fake values and constants are shared."""
        graph, copies = new_graph(), {}
        for node in self.graph.nodes:
            if node.op == "output":
                graph.output(torch.fx.map_arg(node.args[0], copies.__getitem__))
                graph.output_node().meta = dict(node.meta)
            else:
                copies[node] = copy_node(graph, node, copies.__getitem__)
        return StepGraph(graph, self.inputs, self.outputs, self.constants)

    def verify(self) -> None:
        """Check every invariant of this class.

        Raises:
            GraphError: names the node or the signature entry, the values and the rule that it breaks.
        """
        _verify_order(self.graph)
        _verify_inputs(self)
        _verify_outputs(self)
        for node in self.graph.nodes:
            _verify_node(node)


def stands_for(given: Input | Output, read: Input) -> bool:
    """Whether a tensor that one graph gives is what another reads; a value of the user may have another floating dtype (under precision="bf16", PyTorch's was promised)."""
    widened = read.kind is Kind.USER and given.dtype.is_floating_point and read.dtype.is_floating_point
    return given.shape == read.shape and (given.dtype == read.dtype or widened)


def copy_node(graph: torch.fx.Graph, node: torch.fx.Node, operand: Callable[[torch.fx.Node], torch.fx.Node], *, renumber: bool = False) -> torch.fx.Node:
    """`graph.node_copy(node, operand)`, for graphs of many nodes.

    Args:
        renumber: the name gets the next number that is free. fx tries all numbers from 1 on where the node's own is taken: quadratic in a model's depth.
    """
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
    name = node.name
    if renumber:
        base, _, number = name.rpartition("_")
        name = base if base and number.isdecimal() else name
    copy = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    copy.meta.update(node.meta)  # `node_copy` assigns it, and fx then looks the node up again
    return copy


def _verify_order(graph: torch.fx.Graph) -> None:
    """Names are unique, and every operand is a node of the graph in front of its reader; `Graph.lint` takes three times as long."""
    seen, names = set(), set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            operand = next(operand for operand in node.all_input_nodes if operand not in seen)
            where = "stands behind it" if operand.graph is graph and operand in set(graph.nodes) else "is no node of this graph"
            raise GraphError(f"node {node.name!r} reads {operand.name!r}, which {where}: operands come before what reads them")
        if node.name in names:
            raise GraphError(f"two nodes are named {node.name!r}")
        seen.add(node)
        names.add(node.name)


def _verify_inputs(step: StepGraph) -> None:
    placeholders = step.placeholders
    if len(placeholders) != len(step.inputs):
        raise GraphError(f"the graph has {len(placeholders)} placeholders but its signature lists {len(step.inputs)} inputs")
    seen: dict[tuple[Kind, str], str] = {}
    owners: dict[str, str] = {}
    for node, item in zip(placeholders, step.inputs):
        if node.name != item.name:
            raise GraphError(f"placeholder {node.name!r} stands where the signature names {item.name!r}")
        key = (item.kind, item.target)
        if key in seen:
            raise GraphError(
                f"inputs {seen[key]!r} and {item.name!r} are both {item.kind.value} {item.target!r}: a tied tensor is one input with aliases"
            )
        seen[key] = item.name
        if item.kind in (Kind.PARAM, Kind.BUFFER):
            for alias in (item.target, *item.aliases):
                if (owner := owners.setdefault(alias, item.name)) != item.name:
                    raise GraphError(f"{alias!r} names both {owner!r} and {item.name!r}: every name belongs to one input")
        _verify_layout(f"input {item.name!r}", node, item)


def _verify_outputs(step: StepGraph) -> None:
    result = step.graph.output_node().args[0]
    if not isinstance(result, (tuple, list)) or not all(isinstance(node, torch.fx.Node) for node in result):
        raise GraphError(f"the output must be a flat tuple of nodes, got {result!r}")
    if len(result) != len(step.outputs):
        raise GraphError(f"the graph returns {len(result)} values but its signature lists {len(step.outputs)} outputs")
    by_key = {(item.kind, item.target): item for item in step.inputs}
    seen = set()
    for node, item in zip(result, step.outputs):
        label = f"output {item.kind.value} {item.target!r}"
        if (item.kind, item.target) in seen:
            raise GraphError(f"{label} is listed twice")
        seen.add((item.kind, item.target))
        _verify_layout(label, node, item)
        replaced = by_key.get((item.kind, item.target))
        if replaced is not None and (replaced.shape, replaced.dtype, replaced.shards) != (item.shape, item.dtype, item.shards):
            raise GraphError(
                f"{label} replaces input {replaced.name!r} but differs: {item.shape} {item.dtype} {item.shards} "
                f"against {replaced.shape} {replaced.dtype} {replaced.shards}"
            )


def _verify_layout(label: str, node: torch.fx.Node, item: Input | Output) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise GraphError(f"{label}: node {node.name!r} has no fake tensor in meta['val'], got {value!r}")
    expected = local_shape(item.shape, item.shards)
    if tuple(value.shape) != expected or value.dtype != item.dtype:
        raise GraphError(
            f"{label}: node {node.name!r} is {value.dtype}{list(value.shape)}, the signature says {item.dtype}{list(expected)} "
            f"(global {list(item.shape)}, shards {item.shards})"
        )


def _verify_node(node: torch.fx.Node) -> None:
    if node.op == "output":
        return
    if node.op not in ("placeholder", "call_function"):
        raise GraphError(f"node {node.name!r} is a {node.op}: a StepGraph holds placeholders, operator calls and one output")
    if "val" not in node.meta:
        raise GraphError(f"node {node.name!r} ({node.target}) has no meta['val']")
    if not isinstance(node.meta.get("phase"), Phase):
        raise GraphError(f"node {node.name!r} ({node.target}) has no phase: meta['phase'] is {node.meta.get('phase')!r}")
    if node.op == "call_function" and node.target is not operator.getitem:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise GraphError(f"node {node.name!r} calls {node.target!r}: only operator overloads and operator.getitem are allowed")
        if _mutates(node.target):
            raise GraphError(f"node {node.name!r} calls {node.target}, which mutates its argument: a StepGraph is functional")


@functools.cache
def _mutates(target: torch._ops.OpOverload) -> bool:
    return target._schema.is_mutable
