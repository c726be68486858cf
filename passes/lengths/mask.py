"""The rewriting: what stands behind the real length of a padded tensor is masked before an operator would take it into a result.

A value of the padded program *agrees* with the unpadded program's if its elements at the places of the unpadded ones (`Layout`) are equal;
what stands elsewhere is anything. The rules (`rules_*.py`) keep this, operator by operator: they follow where the places go, replace what an
operator would read from elsewhere (by zero before a sum, -inf before a maximum), and make numbers that count elements depend on the
length, which is an input of the program. An operator without a rule that a length reaches is refused. So the loss, the gradients and the
buffers, which have no dim that grows, are those of the unpadded program, and results that have one are cut to their length.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphacc.graph import Input, Kind, StepGraph
from graphacc.passes.edit import Editor, shape_of
from graphacc.passes.lengths.compare import Affine, LengthRefused, Varying, varying, where
from graphacc.passes.lengths.layout import Layout, Length

aten = torch.ops.aten

Rule = Callable[["Masking", Any], "Layout | list[Layout]"]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register the rule of operators: it may rewrite the node's operands, and returns the layout of the result (or a list of those)."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in RULES, f"{target} has two rules"
            RULES[target] = function
        return function

    return register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked:
    """A program for every length up to the one that it was captured at."""

    step: StepGraph
    results: Mapping[str, Layout]  # target of a USER output -> its layout


def length_input(symbol: int) -> str:
    """Target of the BATCH input that is a length."""
    return f"length {symbol}"


def mask_lengths(step: StepGraph, others: Sequence[StepGraph], inputs: Mapping[str, Layout], lengths: Sequence[int]) -> Masked:
    """The program of `step`, captured at `lengths`, for every batch that is padded to these lengths.

    Args:
        others: captures of the same code at the same lengths but for one each, which is one less.
        inputs: target of a BATCH input that grows with lengths -> its layout.

    Raises:
        LengthRefused: padding would reach a result; names the operator and the user's line.
    """
    step = step.copy()
    masking = Masking(step, varying(step, others, lengths), inputs, lengths)
    for node in list(step.graph.nodes):
        if node.op == "placeholder":
            masking.note_input(node)
        elif node.op == "call_function":
            masking.visit(node)
    found: dict[str, Layout] = {}
    for item, node in zip(step.outputs, step.results):
        layout = masking.layout(node)
        if item.kind is Kind.USER:
            found[item.target] = layout
        elif any(layout):
            raise LengthRefused(f"the {item.kind.value} {item.target!r} of shape {list(item.shape)} grows with the length")
    step.graph.eliminate_dead_code()
    step.verify()
    return Masked(step=step, results=found)


class Masking:
    """Goes through one graph in order."""

    def __init__(self, step: StepGraph, varying: Mapping[fx.Node, Varying], inputs: Mapping[str, Layout], lengths: Sequence[int]):
        self.step, self.varying, self.inputs, self.lengths = step, dict(varying), inputs, lengths
        self._layouts: dict[fx.Node, Layout | list[Layout]] = {}
        self._masked: dict[tuple, fx.Node] = {}
        self._valid: dict[Length, fx.Node] = {}
        self._numbers: dict[Affine, fx.Node] = {}
        self.hidden: dict[tuple, fx.Node] = {}  # (mask, length of the keys) of an attention -> its mask with padding hidden
        self.hidden_segments: dict[tuple, tuple[fx.Node, fx.Node]] = {}  # (segments of queries and keys, keys) -> segments that hide padding
        self._targets = {item.name: item for item in step.inputs}
        self.first = next(node for node in step.graph.nodes if node.op == "call_function")  # constants of lengths stand in front of it
        self._lengths = [self._add_length(symbol) for symbol in range(len(lengths))]

    def _add_length(self, symbol: int) -> fx.Node:
        graph, last = self.step.graph, self.step.placeholders[-1]
        key = next(node for node in self.step.placeholders if self._targets[node.name].kind is Kind.KEY)
        with graph.inserting_after(last):
            node = graph.placeholder(f"batch_length_{symbol}")
        node.meta = {name: value for name, value in last.meta.items() if name != "val"} | {"val": key.meta["val"].new_empty(())}
        item = Input(name=node.name, kind=Kind.BATCH, target=length_input(symbol), shape=(), dtype=torch.int64)
        self.step.inputs = (*self.step.inputs, item)
        self._layouts[node] = ()
        return node

    # ---- what rules ask

    def layout(self, node: fx.Node) -> Layout:
        found = self._layouts[node]
        assert isinstance(found, tuple), f"{node.name} gives several tensors"
        return found

    def layouts(self, node: fx.Node) -> list[Layout]:
        found = self._layouts[node]
        assert isinstance(found, list), f"{node.name} gives one tensor"
        return found

    def wanted(self, node: fx.Node, index: int = 0) -> Layout:
        """What the sizes of a result say about its layout; which reading is open."""
        sizes = self.varying[node].shapes[index]
        return tuple(None if size is None else Length(symbol=size.symbol, offset=size.constant // size.factor, factor=size.factor, inner=None) for size in sizes)

    def number_at(self, node: fx.Node, index: int) -> Affine | str | None:
        """How the positional argument `index`, a number, depends on a length."""
        before = len(pytree.tree_leaves(tuple(node.args[:index])))
        return self.varying[node].numbers.get(before)

    def editor(self, node: fx.Node) -> Editor:
        return Editor(self.step.graph, node)

    def refuse(self, node: fx.Node, why: str) -> LengthRefused:
        return LengthRefused(f"{node.target}: {why}{where(node)}")

    def number(self, value: Affine) -> fx.Node:
        """The number at the real length: int64, or float64 if it is a quotient."""
        if value not in self._numbers:
            edit = self.editor(self.first)
            found = self._lengths[value.symbol]
            if value.factor != 1:
                found = edit(aten.mul.Tensor, found, value.factor)
            if value.constant:
                found = edit(aten.add.Tensor, found, value.constant)
            if value.numerator is not None:
                found = edit(aten.div.Tensor, edit(aten.full.default, [], value.numerator, dtype=torch.float64), found)
            self._numbers[value] = found
        return self._numbers[value]

    def numbers(self, node: fx.Node) -> dict[int, Affine]:
        """The numbers among the flattened arguments that depend on a length.

        Raises:
            ValueError: one does so in a way that cannot be computed.
        """
        found: dict[int, Affine] = {}
        for place, number in self.varying[node].numbers.items():
            if isinstance(number, str):
                raise ValueError(f"a number in it depends on the length, but is no multiple of it: {number}")
            found[place] = number
        return found

    def count(self, length: Length) -> Affine:
        """The number of places along a dim."""
        return Affine(symbol=length.symbol, factor=length.factor, constant=length.factor * length.offset)

    def valid(self, length: Length) -> fx.Node:
        """bool, one-dimensional: which places along a dim are of the unpadded tensor."""
        length = length.known()
        if length not in self._valid:
            edit = self.editor(self.first)
            middle = self.lengths[length.symbol] + length.offset
            real = self.number(Affine(symbol=length.symbol, factor=1, constant=length.offset))
            found = edit(aten.lt.Tensor, edit(aten.arange.start_step, 0, middle), real)
            if length.factor > 1:
                found = edit(aten.expand.default, edit(aten.view.default, found, [1, middle, 1]), [length.outer, middle, length.inner])
                found = edit(aten.view.default, edit(aten.clone.default, found, memory_format=torch.contiguous_format), [length.factor * middle])
            self._valid[length] = found
        return self._valid[length]

    def valid_in(self, edit: Editor, dims: Mapping[int, Length], rank: int) -> fx.Node:
        """The same for several dims of a tensor together, to be broadcast."""
        found = None
        for dim, length in dims.items():
            valid = self.valid(length)
            shape = [1] * rank
            shape[dim] = valid.meta["val"].shape[0]
            valid = edit.view(valid, shape)
            found = valid if found is None else edit(aten.bitwise_and.Tensor, found, valid)
        assert found is not None, "no dim is masked"
        return found

    def masked(self, user: fx.Node, x: fx.Node, fill: float | bool = 0, dims: Sequence[int] | None = None, layout: Layout | None = None) -> fx.Node:
        """`x` with a number behind the real lengths along `dims` (all that grow).

        Args:
            layout: which reading to take where those of `x` are open, for an operator that pairs its places with another operand's.
        """
        layout = self.layout(x) if layout is None else layout
        chosen = {dim: length.known() for dim, length in enumerate(layout) if length is not None and (dims is None or dim in dims)}
        if not chosen:
            return x
        key = x, tuple(chosen.items()), repr(fill)
        if key not in self._masked:
            edit, dtype = self.editor(user), x.meta["val"].dtype
            other = edit(aten.full.default, [], float(fill) if dtype.is_floating_point else fill, dtype=dtype)
            self._masked[key] = edit(aten.where.self, self.valid_in(edit, chosen, len(shape_of(x))), x, other)
            self._layouts[self._masked[key]] = self.layout(x)
        return self._masked[key]

    # ---- the way through the graph

    def note_input(self, node: fx.Node) -> None:
        if node in self._layouts:
            return
        layout = self.inputs.get(self._targets[node.name].target) if self._targets[node.name].kind is Kind.BATCH else None
        layout = (None,) * len(self.wanted(node)) if layout is None else layout
        self._check(node, layout, self.wanted(node))
        self._layouts[node] = layout

    def visit(self, node: fx.Node) -> None:
        assert callable(node.target), f"{node.name} is no call"
        used = RULES.get(node.target)
        tags = getattr(node.target, "tags", ())
        if used is None and torch.Tag.pointwise in tags:
            used = RULES["pointwise"]
        if used is None:
            found = self._untouched(node)
        else:
            try:
                found = used(self, node)
            except ValueError as error:
                raise self.refuse(node, str(error)) from error
        values, layouts = (node.meta["val"], found) if isinstance(found, list) else ([node.meta["val"]], [found])
        made = [layout for layout, value in zip(layouts, values, strict=True) if isinstance(value, torch.Tensor)]
        for index, layout in enumerate(made):
            self._check(node, layout, self.wanted(node, index))
        self._layouts[node] = found

    def _untouched(self, node: fx.Node) -> "Layout | list[Layout]":
        """An operator without a rule: nothing in it may depend on a length."""
        reached = any(any(layout) for operand in node.all_input_nodes for layout in self._all(operand))
        shapes = self.varying[node].shapes
        if reached or self.varying[node].numbers or any(size for shape in shapes for size in shape):
            raise self.refuse(node, "there is no rule that keeps padding from its results: pad the batches yourself, or leave bucket_lengths out")
        if isinstance(node.meta["val"], torch.Tensor):
            return (None,) * len(shapes[0])
        return [(None,) * value.dim() if isinstance(value, torch.Tensor) else () for value in node.meta["val"]]

    def _all(self, node: fx.Node) -> list[Layout]:
        found = self._layouts[node]
        return found if isinstance(found, list) else [found]

    def _check(self, node: fx.Node, layout: Layout, wanted: Layout) -> None:
        """Our rules and PyTorch's sizes must say the same."""
        said = [None if item is None else (item.symbol, item.offset, item.factor) for item in layout]
        if said != [None if item is None else (item.symbol, item.offset, item.factor) for item in wanted]:
            raise self.refuse(node, f"which places of its result of shape {shape_of(node) if isinstance(node.meta['val'], torch.Tensor) else '...'} are padding is not known")
