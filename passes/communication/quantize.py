"""ZeRO++ along `fsdp`: weights travel as int8 (qwZ), gradients as int4 in two exchanges (qgZ).

After Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023; the arithmetic, its error and the
message are those of `graphacc.ops.quantize`. Both change numerics, so that nothing but the strategy's fields switches them on.

    gather of a weight (section 3.1)
        local part -> quantize -> gather of uint8 [ranks, message] -> dequantize

    scatter of a gradient (section 3.3), in n nodes of g ranks; rank = node * g + place
        [n * g, part] -> [g, n, part] -> quantize -> all-to-all in the node -> dequantize, sum over g -> [n, part]
        -> quantize -> all-to-all across nodes -> dequantize, sum over n -> [part]

A gradient is so quantised twice, and not once per hop of a ring. Inside one node, or with one rank in each, there is one exchange.

Every tensor has blocks of its own, none of which holds two ranks' parts, so that buckets change no bits. Small tensors
(`Strategy.quant_min_size`) and vectors (norms, biases) travel as they are: they are a thousandth of the bytes, and their errors hurt most.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.fx

from graphacc.graph import Phase, StepGraph
from graphacc.passes.communication.frozen import Frozen, KeptCodes
from graphacc.passes.edit import Editor
from graphacc.passes.partition.axis import verify_collectives
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.partition.plan import AxisPlan, Move, Role
from graphacc.passes.runner import Log, Pass

collective, own, aten = torch.ops._c10d_functional, torch.ops.graphacc, torch.ops.aten
GATHER, SCATTER, EXCHANGE = (
    collective.all_gather_into_tensor.default,
    collective.reduce_scatter_tensor.default,
    collective.all_to_all_single.default,
)
WEIGHT_BITS, GRADIENT_BITS = 8, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """What of an axis's moves is quantised."""

    weights: bool = False
    gradients: bool = False
    min_size: int = 1  # elements of a whole tensor from which on it is

    def of(self, plan: AxisPlan, step: StepGraph) -> AxisPlan:
        """The same plan, whose moves say in how many bits their elements travel."""
        if not (self.weights or self.gradients):
            return plan
        nodes = {node.name: node for node in step.graph.nodes}
        return dataclasses.replace(plan, moves=tuple(dataclasses.replace(move, bits=self._bits(move, nodes[move.value])) for move in plan.moves))

    def _bits(self, move: Move, node: torch.fx.Node) -> int | None:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dim() < 2 or value.numel() < self.min_size:
            return None
        if self.weights and (move.collective, move.role) == ("all_gather", Role.WEIGHT) and move.phase is not Phase.UPDATE:
            return WEIGHT_BITS
        if self.gradients and (move.collective, move.role) == ("reduce_scatter", Role.GRADIENT):
            return GRADIENT_BITS
        return None


@dataclasses.dataclass
class QuantizeReport:
    """What travels in fewer bits, and what does not."""

    what: str
    count: int = 0  # collectives
    bytes_before: int = 0  # whole tensors, of what is quantised
    bytes_after: int = 0  # their messages, scales and padding included, of one exchange
    exact: int = 0  # collectives of the same kind that stay as they are
    exact_bytes: int = 0
    kept: tuple[int, int, int, int] = (0, 0, 0, 0)  # weights kept as codes: how many, their bits, bytes on a rank before and after

    def __str__(self) -> str:
        count, bits, before, after = self.kept
        kept = f"; {count} weights that are not trained are kept as int{bits}: {after} bytes on a rank in the place of {before}" if count else ""
        return (
            f"{self.count} {self.what}: {self.bytes_before} bytes became {self.bytes_after}, scales and padding included; "
            f"{self.exact} of small tensors and vectors stay exact, {self.exact_bytes} bytes{kept}"
        )


def quantized_gather_pass(block: int, frozen: Frozen = Frozen()) -> Pass:
    """qwZ: gathers whose moves say `bits` carry codes; changes numerics within `graphacc.ops.quantize.error_bound`.

    Args:
        frozen: weights that are kept as codes, where nothing else reads them.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        log.details = report = QuantizeReport(f"gathers of weights as int{WEIGHT_BITS}")
        chosen = _chosen(step, GATHER, Role.WEIGHT, report)
        kept = KeptCodes(step, frozen, set(chosen), block)
        for node in chosen:
            arguments: Any = node.args
            source, ranks, group = arguments
            n, edit = source.meta["val"].numel(), Editor(step.graph, node)
            shape, dtype = list(node.meta["val"].shape), node.meta["val"].dtype
            message, bits = kept.message(edit, source), frozen.bits
            if message is None:
                message, bits = edit(own.quantize_blocks.default, edit.view(source, [n]), WEIGHT_BITS, block), WEIGHT_BITS
            gathered = _collective(edit, node, GATHER, message, ranks, group, bits=bits)
            messages = edit.view(gathered, [ranks, message.meta["val"].numel()])
            whole = edit(own.dequantize_blocks.default, messages, n, bits, block, dtype)
            _replace(step, node, edit.view(whole, shape))
            report.bytes_after += gathered.meta["val"].numel()
            log.rewrote()
        report.kept = kept.count, frozen.bits, kept.bytes_before, kept.bytes_after
        return kept.drop_parts()

    key = "quantized-gathers", block, frozen
    return Pass(name="quantized-gathers", exact=False, run=run, verify=verify_collectives, key=key)


def quantized_scatter_pass(block: int, node_ranks: int) -> Pass:
    """qgZ: scatters whose moves say `bits` become exchanges of codes; changes numerics.

    Args:
        node_ranks: ranks of one node, the group of the first exchange; 1 or all: there is one exchange alone.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        log.details = report = QuantizeReport(f"scatters of gradients as int{GRADIENT_BITS}")
        for node in _chosen(step, SCATTER, Role.GRADIENT, report):
            arguments: Any = node.args
            source, _, ranks, group = arguments
            edit = Editor(step.graph, node)
            parts = edit.view(source, [ranks, source.meta["val"].numel() // ranks])
            exchanges: list[tuple[int, str]] = [(ranks, group)]
            if 1 < node_ranks < ranks:
                nodes = ranks // node_ranks
                parts = edit(aten.permute.default, edit.view(parts, [nodes, node_ranks, parts.meta["val"].shape[1]]), [1, 0, 2])
                exchanges = [(node_ranks, f"{group}/{node_ranks}"), (nodes, f"{group}%{node_ranks}")]
            for i, (size, members) in enumerate(exchanges):
                dtype = node.meta["val"].dtype if i + 1 == len(exchanges) else torch.float32
                parts, count = _exchange_sum(edit, node, parts, size, members, block, dtype)
                report.bytes_after += 0 if i else count
            _replace(step, node, edit.view(parts, list(node.meta["val"].shape)))
            log.rewrote()
        return step

    key = "quantized-scatters", block, node_ranks
    return Pass(name="quantized-scatters", exact=False, run=run, verify=verify_collectives, key=key)


def _chosen(step: StepGraph, target: Any, role: Role, report: QuantizeReport) -> list[torch.fx.Node]:
    found = []
    for node in step.graph.nodes:
        move = node.meta.get("move")
        if node.target is not target or move is None or move.role is not role:
            continue
        if move.bits is None:
            report.exact, report.exact_bytes = report.exact + 1, report.exact_bytes + move.size_bytes
        else:
            report.count, report.bytes_before = report.count + 1, report.bytes_before + move.size_bytes
            found.append(node)
    return found


def _exchange_sum(
    edit: Editor, node: torch.fx.Node, parts: torch.fx.Node, ranks: int, group: str, block: int, dtype: torch.dtype
) -> tuple[torch.fx.Node, int]:
    """[ranks, ..., n], part i for rank i of the group -> [..., n], the sum of what all sent here; and the bytes of the message."""
    n = parts.meta["val"].shape[-1]
    messages = edit(own.quantize_blocks.default, parts, GRADIENT_BITS, block)
    shape = list(messages.meta["val"].shape)
    sizes = [1] * ranks
    received = _collective(edit, node, EXCHANGE, edit.view(messages, [ranks, math.prod(shape[1:])]), sizes, sizes, group, bits=GRADIENT_BITS)
    return edit(own.dequantize_sum.default, edit.view(received, shape), n, GRADIENT_BITS, block, dtype), math.prod(shape)


def _collective(edit: Editor, node: torch.fx.Node, target: Any, message: torch.fx.Node, *args: Any, bits: int) -> torch.fx.Node:
    """A collective that carries `message`, codes of `bits`, in the place of what `node` carries."""
    sent = edit(target, message, *args)
    value = sent.meta["val"]
    move, kind = node.meta["move"], "all_gather" if target is GATHER else "all_to_all"
    sent.meta["move"] = dataclasses.replace(move, axis=args[-1], collective=kind, bits=bits, size_bytes=size_bytes(tuple(value.shape), value.dtype))
    return edit(collective.wait_tensor.default, sent)


def _replace(step: StepGraph, node: torch.fx.Node, result: torch.fx.Node) -> None:
    (waited,) = node.users
    waited.replace_all_uses_with(result)
    step.graph.erase_node(waited)
    step.graph.erase_node(node)
