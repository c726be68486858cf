"""From a Python function to a StepGraph: one functional trace on fake tensors, cleaned up and signed."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, fx

from graphacc._compat.torch_ import fake_mode, flex_attention_operators, trace_functional
from graphacc.capture.cleanup import rebuilt
from graphacc.capture.decompositions import decompositions
from graphacc.capture.diagnose import explained
from graphacc.capture.guards import quiet_failures
from graphacc.capture.randomness import Streams
from graphacc.capture.source import SourceMode
from graphacc.errors import CaptureError
from graphacc.graph import Input, Kind, Output, Phase, StepGraph
from graphacc.ops.facts import draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """An input to be: everything of its `Input` but the name, and the strides of its example."""

    kind: Kind
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None  # None: contiguous
    aliases: tuple[str, ...] = ()

    @classmethod
    def like(cls, kind: Kind, target: str, tensor: Tensor, aliases: tuple[str, ...] = ()) -> "Slot":
        """The slot of a real tensor, of which only shape, dtype and strides are read."""
        stride = tensor.stride() if tensor.layout == torch.strided else None
        return cls(kind=kind, target=target, shape=tuple(tensor.shape), dtype=tensor.dtype, stride=stride, aliases=aliases)

    def fake(self) -> Tensor:
        """A fake tensor on the CPU: the program is written for one device, wherever the real tensor is."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


KEY = Slot(kind=Kind.KEY, target="key", shape=(2,), dtype=torch.int64)

Results = list[tuple[Kind, str, Tensor]]
"""Kind, target and traced tensor of every output."""


def trace(
    slots: Sequence[Slot],
    program: Callable[[list[Tensor]], Results],
    *,
    source: SourceMode,
    what: str,
    constants: str,
    first_stream: int = 0,
    replaced: Mapping[int, str] = MappingProxyType({}),
) -> StepGraph:
    """Trace `program`, which maps one tensor per slot to its results, into a verified StepGraph.

    Buffers and parameters that `program` returns as it got them are no outputs.

    Args:
        slots: the inputs; the one of kind KEY feeds the random operators.
        source: notes where every operator comes from, and its phase.
        what: names the traced thing in errors, as in "the model".
        constants: prefix of the targets of tensors that the trace lifts.
        first_stream: number of the first random stream.
        replaced: id -> name of tensors that `program` replaces where it found them, and must not read.

    Raises:
        CaptureError: `program` cannot be traced; the message names the user's line.
    """
    signature: list[tuple[Kind, str]] = []

    def flat_program(*tensors: Tensor) -> list[Tensor]:
        source.reset()
        with source:
            results = program(list(tensors))
        signature.extend((kind, target) for kind, target, _ in results)
        return [tensor for _, _, tensor in results]

    with fake_mode():
        fakes = [slot.fake() for slot in slots]
        table = decompositions() | flex_attention_operators()
        numbering = contextlib.nullcontext()
        for slot, fake in zip(slots, fakes):
            if slot.kind is Kind.KEY:
                streams = Streams(fake, first_stream)
                table.update(streams.table())
                numbering = streams.numbering()
        with explained(what), quiet_failures(), numbering:
            module = trace_functional(flat_program, fakes, table)
    graph, lifted = rebuilt(module, unique_names(slots), source.phase, replaced)
    return _signed(graph, slots, signature, lifted, constants)


def unique_names(slots: Sequence[Slot]) -> list[str]:
    """One name per slot, made of its kind and target."""
    names = fx.graph._Namespace()
    return [names.create_name(f"{slot.kind.value}_{slot.target}", None) for slot in slots]


def _signed(
    graph: fx.Graph, slots: Sequence[Slot], signature: Sequence[tuple[Kind, str]], lifted: dict[str, Tensor], prefix: str
) -> StepGraph:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    own = {(slot.kind, slot.target): node for slot, node in zip(slots, placeholders)}
    for slot, node in zip(slots, placeholders):
        if slot.kind is Kind.GRAD:  # the backward made it
            node.meta["phase"] = Phase.BACKWARD
    inputs = [_input(node, slot) for node, slot in zip(placeholders, slots)]
    constants = {}
    for node in placeholders[len(slots) :]:
        value, target = lifted[node.name], f"{prefix}.{len(constants)}"
        constants[target] = value
        inputs.append(Input(name=node.name, kind=Kind.BUFFER, target=target, shape=tuple(value.shape), dtype=value.dtype))

    output_node = graph.output_node()
    held = {key: node for key, node in own.items() if key[0] in (Kind.BUFFER, Kind.PARAM)}
    changed = [(node, key) for node, key in zip(output_node.args[0], signature) if held.get(key) is not node]
    output_node.args = (tuple(node for node, _ in changed),)
    graph.eliminate_dead_code()
    _check_random(graph)
    step = StepGraph(
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(_output(node, kind, target) for node, (kind, target) in changed),
        constants=constants,
    )
    step.verify()
    return step


def _input(node: fx.Node, slot: Slot) -> Input:
    return Input(name=node.name, kind=slot.kind, target=slot.target, shape=slot.shape, dtype=slot.dtype, aliases=slot.aliases)


def _output(node: fx.Node, kind: Kind, target: str) -> Output:
    value = node.meta["val"]
    return Output(kind=kind, target=target, shape=tuple(value.shape), dtype=value.dtype)


def _check_random(graph: fx.Graph) -> None:
    """Refuse random operators that no stream stands for: their numbers would be the same at every step, or differ by device."""
    left = [node for node in graph.nodes if _is_random(node.target)]
    if left:
        listing = "\n".join(f"  {node.target}\n{node.meta['stack_trace']}" for node in left)
        raise CaptureError(
            f"{len(left)} random operator(s) have no form that depends on the step's key alone:\n{listing}"
            "  remedy: write them with torch.rand, randn, randint, bernoulli, normal_, exponential_ or dropout."
        )


def _is_random(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and draws(target)
