"""Parameters that several stages use, such as GPT-2's embedding, which is its head too.

One stage owns the parameter and its optimizer state; every other one has a replica, which is an input of its own, with a
gradient of its own: "<parameter>@<stage>". The runtime copies the parameter to its replicas after every update, and adds the
replicas' gradients to the owner's before it. So every rewriting in between, such as the gathers of ZeRO-3, works on a stage's
own tensor, and neither weights nor their gradients are sent with every microbatch.
"""

import collections
import dataclasses

import torch
import torch.fx

from graphacc.graph import Input, Kind, Output, Phase, StepGraph
from graphacc.passes.edit import Editor
from graphacc.passes.stages.values import CASTS, SEGMENT, free_values, readers
from graphacc.strategy.spec import Strategy

aten = torch.ops.aten

MARK = "@"


def owner_of(target: str) -> str:
    """The parameter that a target stands for: itself, or the one that it is a replica of."""
    return target.partition(MARK)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contributions:
    """A gradient as a sum."""

    accumulator: torch.fx.Node | None  # the gradient so far, an input
    leaves: list[torch.fx.Node]  # what is added up, through additions and casts


def contributions(gradient: torch.fx.Node) -> Contributions:
    """Take a gradient apart into the terms that its uses contribute."""
    accumulator, stack, leaves = None, [gradient], []
    while stack:
        node = stack.pop()
        own = node is gradient or len(node.users) == 1
        if own and node.target in CASTS:
            stack.append(node.args[0])
        elif own and node.target is aten.add.Tensor and not node.kwargs and _same_shapes(node):
            stack.extend(reversed(node.args))
        elif node.op == "placeholder":
            accumulator = node
        else:
            leaves.append(node)
    return Contributions(accumulator=accumulator, leaves=leaves)


def _same_shapes(node: torch.fx.Node) -> bool:
    shape = node.meta["val"].shape
    return all(isinstance(operand, torch.fx.Node) and operand.meta["val"].shape == shape for operand in node.args)


def add_replicas(step: StepGraph, strategy: Strategy) -> int:
    """Give every parameter an input per stage that uses it, and its gradient an output; returns the number of replicas."""
    writer = _Writer(step, strategy)
    for node, item in list(zip(step.placeholders, step.inputs)):
        if item.kind is Kind.PARAM:
            writer.split(node, item)
    writer.finish()
    return writer.count


class _Writer:
    def __init__(self, step: StepGraph, strategy: Strategy):
        self.step, self.strategy = step, strategy
        self.free = free_values(step)
        self.inputs, self.outputs, self.results = list(step.inputs), list(step.outputs), list(step.results)
        self.last = step.placeholders[-1]
        self.count = 0

    def stage_of(self, node: torch.fx.Node) -> int:
        num_chunks, place = self.strategy.pp * self.strategy.chunks, node.meta[SEGMENT]
        return (place if place < num_chunks else 2 * num_chunks - 1 - place) % self.strategy.pp

    def split(self, node: torch.fx.Node, item: Input) -> None:
        used = {self.stage_of(reader) for reader in readers(node, self.free) if SEGMENT in reader.meta}
        if len(used) < 2:
            return
        position = next((i for i, out in enumerate(self.outputs) if (out.kind, out.target) == (Kind.GRAD, item.target)), None)
        terms = collections.defaultdict(list)
        parts = None if position is None else contributions(self.results[position])
        for leaf in [] if parts is None else parts.leaves:
            terms[self.stage_of(leaf)].append(leaf)
        owner = min(terms.keys() & used, default=min(used))
        for stage in sorted(used - {owner}):
            self._replicate(node, item, stage)
        if len(terms) > 1:
            out = self.outputs[position]
            self.results[position] = self._sum(terms.pop(owner), parts.accumulator, out)
            for stage in sorted(terms):
                self._add_gradient(out, stage, terms[stage], parts.accumulator)

    def _placeholder(self, like: torch.fx.Node, name: str) -> torch.fx.Node:
        with self.step.graph.inserting_after(self.last):
            self.last = self.step.graph.placeholder(name)
        self.last.meta = {key: value for key, value in like.meta.items() if key != SEGMENT}
        return self.last

    def _replicate(self, node: torch.fx.Node, item: Input, stage: int) -> None:
        replica = self._placeholder(node, f"{node.name}_on_{stage}")
        self.inputs.append(dataclasses.replace(item, name=replica.name, target=f"{item.target}{MARK}{stage}", aliases=()))
        self._redirect(node, replica, stage)
        self.count += 1

    def _redirect(self, old: torch.fx.Node, new: torch.fx.Node, stage: int) -> None:
        """Let what `stage` computes read `new` in the place of `old`; free values of it are written again."""
        for user in list(old.users):
            if user in self.free:
                if any(self.stage_of(reader) == stage for reader in readers(user, self.free)):
                    with self.step.graph.inserting_after(user):
                        copy = self.step.graph.node_copy(
                            user, lambda operand, new=new, old=old: new if operand is old else operand
                        )
                    self.free.add(copy)
                    self._redirect(user, copy, stage)
            elif user.op == "call_function" and self.stage_of(user) == stage:
                user.replace_input_with(old, new)

    def _add_gradient(self, out: Output, stage: int, terms: list[torch.fx.Node], accumulator: torch.fx.Node | None) -> None:
        replica = dataclasses.replace(out, target=f"{out.target}{MARK}{stage}")
        if accumulator is not None:
            accumulator = self._placeholder(accumulator, f"{accumulator.name}_on_{stage}")
            self.inputs.append(
                Input(name=accumulator.name, kind=Kind.GRAD, target=replica.target, shape=out.shape, dtype=out.dtype)
            )
        self.outputs.append(replica)
        self.results.append(self._sum(terms, accumulator, out))

    def _sum(self, terms: list[torch.fx.Node], accumulator: torch.fx.Node | None, out: Output) -> torch.fx.Node:
        """Add terms up, in the dtype of the gradient."""
        total = None
        for term in terms:
            term = term if term.meta["val"].dtype == out.dtype else self._call(aten._to_copy.default, term, dtype=out.dtype)
            total = term if total is None else self._call(aten.add.Tensor, total, term)
        return total if accumulator is None else self._call(aten.add.Tensor, accumulator, total)

    def _call(self, target, *args, **kwargs) -> torch.fx.Node:
        place = max(node.meta[SEGMENT] for node in args if SEGMENT in node.meta)
        meta = {"phase": Phase.BACKWARD, "module_path": "", "stack_trace": "", SEGMENT: place}
        return Editor(self.step.graph, self.step.graph.output_node(), meta=meta)(target, *args, **kwargs)

    def finish(self) -> None:
        graph = self.step.graph
        graph.output_node().args = (tuple(self.results),)
        graph.eliminate_dead_code()
        self.step.inputs, self.step.outputs = tuple(self.inputs), tuple(self.outputs)
