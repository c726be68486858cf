"""Equal blocks of a step: of each class of consecutive equal ones a few are left, with the number of nodes that each node stands for.

    reduced = reduce_repeats(step)
    flops = sum(flops_of(node) * reduced.counts[node.name] for node in reduced.step.graph.nodes)

A block is what the numbered modules say ("transformer.h.3"): its forward and backward calls, its parameters, their states and updates.
Blocks are equal if their calls match one to one in operator, constants, operands inside of the block and shapes of the others, and if
every operand from outside is

- shared: the same value for both, or the same computation of the same values;
- handed on: a result of the block before for one, the same result of the block before that for the other (the residual stream);
- handed back: likewise of the block behind (its gradient).

So a run of equal blocks is a scan, and a shorter scan is a step of the same kind: the first block behind the dropped ones reads what
the last one before them hands on, and that one what the first one hands back. What is read elsewhere is read of every block (the terms of
an auxiliary loss, the norms of all gradients) or forbids the reduction; a value of a block that is left then takes the dropped one's place,
so that every shape stays. Where the blocks' values are summed up one by one, a sum's steps for the dropped blocks are left out with them.
Blocks that alternate (one of six with full attention) repeat in groups.

What a match leaves out changes no cost: the random stream of a dropout, which part of a shared value is read, the number of a parameter group.
"""

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from graphacc.graph import Input, Kind, Output, Phase, StepGraph

aten = torch.ops.aten

ORIGIN = "origin"
"""Entry of ``node.meta``: the name of the reduced step's call that one was made of, or for; passes keep it, names they give anew."""

T = TypeVar("T")
_MAX_PERIOD = 8  # blocks that repeat in a group
_MAX_DEPTH = 3  # of numbered modules in one another: stages of blocks
_NUMBERED = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_PARTS = frozenset({aten.slice.Tensor, aten.select.int, operator.getitem})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """Consecutive groups of blocks that are equal."""

    groups: tuple[tuple[str, ...], ...]  # paths of the modules, in the order of the program
    kept: tuple[tuple[str, ...], ...]  # those of them that are left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduced:
    """A step with few blocks that stands for one with many."""

    step: StepGraph
    counts: Mapping[str, int]  # node of `step` -> how many nodes of the whole step it stands for, itself included
    classes: tuple[Repeat, ...]
    notes: tuple[str, ...] = ()  # why neighbours are not in one class

    @functools.cached_property
    def blocks(self) -> dict[str, int]:
        """Module of each block that is left of a class -> how many blocks it stands for: for what passes add, which knows its module."""
        numbers = {path: 1 for item in self.classes for group in item.kept for path in group}
        for item in self.classes:
            numbers |= dict.fromkeys(item.kept[1], 1 + len(item.groups) - len(item.kept))
        return numbers

    def everywhere(self, found: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
        """What was found of parameters of `step`, of all these of the whole step: a dropped block has what the one has that stands for it."""
        stands_for = {path: other for item in self.classes for group in item.groups if group not in item.kept for path, other in zip(group, item.kept[1], strict=True)}
        result: dict[str, T] = {}
        for name in names:
            path = name
            while path and path not in stands_for:
                path = path.rpartition(".")[0]
            other = stands_for[path] + name[len(path) :] if path else name
            if other in found:
                result[name] = found[other]
        return result

    def of_depth(self, num_groups: int) -> "Reduced":
        """The same, standing for a step with so many equal groups of blocks: a model of three layers stands for one of a hundred.

        Raises:
            ValueError: the step has no equal blocks, or several classes of them, or fewer are asked for than are left.
        """
        if len(self.classes) != 1 or num_groups < len(self.classes[0].kept):
            raise ValueError(f"of_depth({num_groups}) of a step with {len(self.classes)} classes of equal blocks: there must be one, of no more blocks than are left")
        (found,) = self.classes
        kept = len(found.kept)
        longer = (num_groups - kept) / (len(found.groups) - kept)
        counts = {name: round(1 + (number - 1) * longer) for name, number in self.counts.items()}
        groups = (*found.kept[:-1], *(found.kept[-1:] * (num_groups - kept + 1)))
        return dataclasses.replace(self, counts=counts, classes=(dataclasses.replace(found, groups=groups),))

    def count(self, node: Node) -> int:
        """How many nodes one of a program that passes have made of the step stands for: calls by their module, or the call that they were made of or for; inputs by their name."""
        if node.op == "placeholder":
            return self.counts.get(node.name, 1)
        path = node.meta.get("module_path") or ""
        while path:
            if path in self.blocks:
                return self.blocks[path]
            path = path.rpartition(".")[0]
        if ORIGIN in node.meta:
            return self.counts.get(node.meta[ORIGIN], 1)
        if not node.meta.get("module_path") and len(node.all_input_nodes) == 1:  # the sum over ranks of a gradient that is cast outside of all modules
            return self.count(node.all_input_nodes[0])
        return 1


def reduce_repeats(step: StepGraph, keep: int = 2) -> Reduced:
    """Leave out all but `keep` of every class of consecutive equal blocks.

    A quantity that is a sum over the nodes of the captured step is the sum over those of the reduced one, times their counts. What passes
    add has the weight of its module (`Reduced.blocks`). What is linear in the depth and no sum follows from the steps of 2 and of 3
    blocks, where all classes are equally long. The memory of temporaries is so piece by piece: where few layers have their peak in
    another place than many, a larger `keep` comes closer.

    Args:
        step: a captured step, joint or whole, with global shapes. It is not changed.
        keep: blocks of every class that are left, at least 2: the first ones and the last. The second of them stands for the dropped ones.

    Returns:
        The reduced step, which passes take like any other. Without repeated blocks it is `step` itself, and every count is 1.
    """
    assert keep >= 2, f"keep={keep}: the first block and the last are always left, since what they read differs"
    counts = {node.name: 1 for node in step.graph.nodes if node.op != "output"}
    classes: list[Repeat] = []
    notes: list[str] = []
    settled: set[str] = set()
    for depth in range(1, _MAX_DEPTH + 1):
        blocks = _Blocks(step, functools.partial(_block_of, depth=depth, settled=settled))
        if not blocks.paths:
            break
        runs = list(_runs(blocks, keep))
        notes += _differences(blocks, runs)
        if runs:
            step, counts = _without(step, blocks, runs, keep, counts)
            classes += [run.repeat(blocks.paths, keep) for run in runs]
            settled.update(path for item in classes for group in item.groups for path in group)
    for node in step.graph.nodes if classes else ():
        if node.op == "call_function":
            node.meta[ORIGIN] = node.name
    return Reduced(step=step, counts=counts, classes=tuple(classes), notes=tuple(notes))


def _block_of(path: str, depth: int, settled: set[str]) -> str:
    """The numbered module at this depth that a path lies in: of "layers.2.blocks.5.attn" it is "layers.2", then "layers.2.blocks.5"."""
    found = [path[: number.end()] for number in _NUMBERED.finditer(path)][:depth]
    return found[-1] if len(found) == depth and not settled.intersection(found) else ""


class _Blocks:
    """The blocks of a step: which nodes belong to each, and what is the same outside of them."""

    def __init__(self, step: StepGraph, block_of: Callable[[str], str]):
        self.step = step
        self.paths: list[str] = []
        self.inputs = dict(zip(step.placeholders, step.inputs, strict=True))
        self.block: dict[Node, int] = {}  # node -> index in `paths`; nodes outside are left out
        self._place_calls(block_of)
        self._place_inputs()
        self._place_updates()
        self.nodes: list[list[Node]] = [[] for _ in self.paths]
        self.order: dict[Node, int] = {}
        for node in step.graph.nodes:
            self.order[node] = len(self.order)
            if node in self.block:
                self.nodes[self.block[node]].append(node)
        self.constants: list[torch.Tensor] = []
        self.sums: dict[Node, Node] = {}
        self._read_outputs()
        self.codes: dict[tuple, int] = {}
        self.groups: dict[tuple[int, int], _Group] = {}

    def _place_calls(self, block_of: Callable[[str], str]) -> None:
        """Calls of the model belong to the block of their module.

        Code of a module that has the blocks in it, such as the loss of a router, belongs to the block that it works for.
        """
        by_path: dict[str, int | None] = {}
        for node in self._calls(Phase.FORWARD):
            path = node.meta.get("module_path") or ""
            if path not in by_path:
                name = block_of(path)
                if name and name not in self.paths:
                    self.paths.append(name)
                by_path[path] = self.paths.index(name) if name else None
        around = {"", *(name[: dot.start()] for name in self.paths for dot in re.finditer(r"\.", name))}
        works_for: dict[Node, tuple[int, int]] = {}  # the first and the last block whose values it uses
        free = []
        for node in (*self._calls(Phase.FORWARD), *self._calls(Phase.BACKWARD)):
            path = node.meta.get("module_path") or ""
            if (number := by_path.get(path)) is not None:
                self.block[node] = number
                works_for[node] = number, number
            elif path in around:
                of = [works_for[x] for x in node.all_input_nodes if x in works_for]
                if node.meta["phase"] is Phase.BACKWARD:  # a gradient of all is used for one
                    of = [(first, last) for first, last in of if first == last]
                if of:
                    works_for[node] = min(first for first, _ in of), max(last for _, last in of)
                    free.append(node)
        for node in reversed(free):
            first, last = works_for[node]
            is_read = any(user in self.block for user in node.users)
            adds = node.target is aten.add.Tensor and node.meta["phase"] is Phase.FORWARD
            gives = node.meta["phase"] is Phase.FORWARD and not adds  # to a sum over blocks, for one
            gives = gives or all(user.op == "output" or user.meta["phase"] is Phase.UPDATE for user in node.users)  # a parameter's gradient
            if (is_read and (first == last or adds)) or (first == last and gives):
                self.block[node] = last

        self._place_casts(around)

    def _place_casts(self, around: set[str]) -> None:
        """What is computed of parameters alone, such as their casts to bf16, belongs to the only block that reads it."""
        of_inputs: set[Node] = {node for node, item in self.inputs.items() if item.kind in (Kind.PARAM, Kind.BUFFER)}
        casts = []
        for node in self._calls(Phase.FORWARD):
            if node not in self.block and (node.meta.get("module_path") or "") in around and node.all_input_nodes and of_inputs.issuperset(node.all_input_nodes):
                of_inputs.add(node)
                casts.append(node)
        for node in reversed(casts):
            of = {self.block.get(user) for user in node.users}
            if len(of) == 1 and (number := of.pop()) is not None:
                self.block[node] = number

    def _calls(self, phase: Phase) -> Iterator[Node]:
        return (node for node in self.step.graph.nodes if node.op == "call_function" and node.meta["phase"] is phase)

    def _place_inputs(self) -> None:
        """A parameter or buffer belongs to the only block that reads it, a gradient or state to that of its parameter."""
        owners: dict[str, int] = {}
        for node, item in self.inputs.items():
            if item.kind in (Kind.PARAM, Kind.BUFFER):
                of = {self.block[user] for user in node.users if user in self.block}
                if len(of) == 1:
                    self.block[node] = owners[item.target] = of.pop()
        for node, item in self.inputs.items():
            target = item.target.rpartition("/")[0] if item.kind is Kind.STATE else item.target
            if item.kind in (Kind.STATE, Kind.GRAD) and target in owners and not item.aliases:  # else it belongs to several parameters
                self.block[node] = owners[target]

    def _place_updates(self) -> None:
        for node in self._calls(Phase.UPDATE):
            of = {self.block[x] for x in node.all_input_nodes if x in self.block}
            if len(of) == 1:
                self.block[node] = of.pop()

    def _read_outputs(self) -> None:
        """Outputs by the input that they belong to, if it has a block, else by the node that gives them."""
        by_key = {(item.kind, item.target): node for node, item in self.inputs.items()}
        self.owners: list[Node] = []
        self.outputs: dict[Node, list[tuple[Output, Node]]] = {}
        for item, node in zip(self.step.outputs, self.step.results, strict=True):
            owner = by_key.get((Kind.PARAM if item.kind is Kind.GRAD else item.kind, item.target), node)
            self.owners.append(owner if owner in self.block else node)
            self.outputs.setdefault(self.owners[-1], []).append((item, node))

    @functools.cached_property
    def numbers(self) -> dict[Node, int]:
        """Equal numbers for equal computations outside of blocks, for every other node its own."""
        numbers: dict[Node, int] = {}
        known: dict[Any, int] = {}
        for node in self.step.graph.nodes:
            key: Any = node
            if node in self.inputs and self.inputs[node].kind is Kind.HYPER:
                key = Kind.HYPER, self.inputs[node].target.rpartition("/")[2]
            elif node.op == "call_function" and node not in self.block:
                key = _call_key(node, lambda x: (numbers[x],), is_shared=lambda base: True)
            numbers[node] = known.setdefault(key, len(known))
        return numbers

    def group(self, first: int, size: int) -> "_Group":
        """The blocks `first` ... `first + size - 1` as one."""
        if (first, size) not in self.groups:
            nodes = [node for block in self.nodes[first : first + size] for node in block]
            places = {node: i for i, node in enumerate(nodes)}
            slots: dict[Node, int] = {}

            def operand(node: Node) -> tuple[int, ...]:
                return (places[node],) if node in places else (-1 - slots.setdefault(node, len(slots)),)

            calls = tuple(self._key(node, operand, places) for node in nodes)
            key = calls, tuple(map(_description, slots))
            code = self.codes.setdefault(key, len(self.codes))
            self.groups[first, size] = _Group(nodes=nodes, places=places, externals=list(slots), code=code)
        return self.groups[first, size]

    def _key(self, node: Node, operand: Callable[[Node], tuple[int, ...]], places: Mapping[Node, int]) -> tuple:
        outputs: tuple = ()
        if node in self.outputs:  # what replaces an input outside of the blocks is like nothing else
            outputs = tuple((i.kind if node in self.inputs or i.kind is Kind.USER else i, operand(x)) for i, x in self.outputs[node])
        if node in self.inputs:
            item = self.inputs[node]
            value = self._constant(item)
            return item.kind, item.shape, item.dtype, item.trainable, len(item.aliases), item.shards, item.codes, value, outputs
        return _call_key(node, operand, is_shared=lambda base: base not in places), outputs

    def _constant(self, item: Input) -> int | None:
        """A number for the value of a constant; equal values have equal ones."""
        value = self.step.constants.get(item.target) if item.kind is Kind.BUFFER else None
        if value is None:
            return None
        for i, known in enumerate(self.constants):
            if known is value or (value.device == known.device != torch.device("meta") and value.dtype == known.dtype and torch.equal(known, value)):
                return i
        self.constants.append(value)
        return len(self.constants) - 1

    def sum_of(self, node: Node) -> Node:
        """The last of a chain of additions outside of blocks, which sums up what blocks give; of another call, itself."""
        chain = []
        while self.adds(node) and node not in self.sums and len(node.users) == 1 and self.adds(user := next(iter(node.users))):
            chain.append(node)
            node = user
        last = self.sums.get(node, node)
        self.sums.update(dict.fromkeys(chain, last))
        return last

    def adds(self, node: Node) -> bool:
        return node.target is aten.add.Tensor and node not in self.block


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """Blocks that are compared as one."""

    nodes: list[Node]
    places: dict[Node, int]
    externals: list[Node]  # operands from outside, in the order of their first use
    code: int  # equal for groups that differ at most in what their externals are


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """`length` equal groups of `size` blocks each, from block `first` on."""

    first: int
    size: int
    length: int

    def groups(self) -> list[range]:
        return [range(self.first + i * self.size, self.first + (i + 1) * self.size) for i in range(self.length)]

    def repeat(self, paths: Sequence[str], keep: int) -> Repeat:
        groups = tuple(tuple(paths[i] for i in group) for group in self.groups())
        return Repeat(groups=groups, kept=(*groups[: keep - 1], groups[-1]))


def _description(node: Node) -> Any:
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in values)


@functools.cache
def _stream(target: Any) -> int | None:
    """Which argument of a random operator is its stream."""
    names = [argument.name for argument in target._schema.arguments] if isinstance(target, torch._ops.OpOverload) else []
    return names.index("stream") if "stream" in names else None


def _call_key(node: Node, operand: Callable[[Node], tuple[int, ...]], is_shared: Callable[[Node], bool]) -> tuple:
    """Operator and arguments of a call; of a part of a shared value, its shape."""

    def key(value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is str or value is None:
            return value
        if kind is Node:
            return operand(value)
        if isinstance(value, (tuple, list)):
            return ("(", *map(key, value))
        if kind is float or kind is complex:
            return kind, repr(value)  # 1 is not 1.0, and 0.0 is not -0.0
        return kind, value

    args = node.args
    if node.target in _PARTS and is_shared(base := node.all_input_nodes[0]):
        return node.target, operand(base), _description(node)
    if (stream := _stream(node.target)) is not None:
        args = (*args[:stream], None, *args[stream + 1 :])
    kwargs = tuple((name, key(value)) for name, value in node.kwargs.items() if name != "stream") if node.kwargs else ()
    return node.target, tuple(map(key, args)), kwargs


def _runs(blocks: _Blocks, keep: int) -> Iterator[_Run]:
    """From the first block on, the run that leaves out most, then on behind it."""
    codes = [blocks.group(i, 1).code for i in range(len(blocks.paths))]
    first = 0
    while first < len(codes):
        best = _longest(blocks, first, 1)
        for size in range(2, _MAX_PERIOD + 1):
            equal = 0
            while first + size + equal < len(codes) and codes[first + equal] == codes[first + size + equal]:
                equal += 1
            if (1 + equal // size - keep) * size > max(0, best.length - keep) * best.size:
                run = _longest(blocks, first, size)
                best = max(best, run, key=lambda run: max(0, run.length - keep) * run.size)
        if best.length > keep:
            yield best
            first += best.size * best.length
        else:
            first += 1


def _longest(blocks: _Blocks, first: int, size: int) -> _Run:
    """The longest run of groups of `size` blocks from block `first` on."""

    def group(i: int) -> _Group:
        return blocks.group(first + i * size, size)

    def readers(i: int) -> dict[int, set[Node]]:
        """Place of a value -> who reads it beyond the groups next to this one."""
        near = range(first + (i - 1) * size, first + (i + 2) * size)
        found: dict[int, set[Node]] = {}
        for node, place in group(i).places.items():
            for user in node.users:
                if blocks.block.get(user) not in near and user.op != "output":
                    found.setdefault(place, set()).add(blocks.sum_of(user))
        return found

    length, relation = 1, None
    at_start, outside, last = readers(0), None, {}
    while first + (length + 1) * size <= len(blocks.paths) and group(length).code == group(0).code:
        next_relation = _relation(blocks.numbers, group(length - 1), group(length))
        if next_relation is None or relation not in (None, next_relation):
            break
        next_last = readers(length)
        if length > 1:  # `last` comes to stand between two
            if outside not in (None, last) or _reads_more(last, at_start) or _reads_more(last, next_last):
                break
            outside = last
        length, relation, last = length + 1, next_relation, next_last
    return _Run(first=first, size=size, length=length)


def _reads_more(some: dict[int, set[Node]], others: dict[int, set[Node]]) -> bool:
    return any(users - others.get(place, set()) for place, users in some.items())


def _relation(numbers: Mapping[Node, int], one: _Group, other: _Group) -> tuple | None:
    """What every external of a group is to that of the next: shared, handed on, handed back; None if one is none of these.

    Nothing handed on means that they do not follow each other.
    """
    found: list[tuple[str, int]] = []
    for x, y in zip(one.externals, other.externals, strict=True):
        if numbers[x] == numbers[y]:
            found.append(("shared", 0))
        elif (y in one.places) == (x in other.places):
            return None
        else:
            found.append(("on", one.places[y]) if y in one.places else ("back", other.places[x]))
    return tuple(found) if any(kind == "on" for kind, _ in found) else None


def _differences(blocks: _Blocks, runs: Sequence[_Run]) -> Iterator[str]:
    """For neighbours of one list of modules that are in no run together, why."""
    together = {i for run in runs for i in range(run.first, run.first + run.size * run.length - 1)}
    for i, (path, next_path) in enumerate(itertools.pairwise(blocks.paths)):
        if i not in together and path.rpartition(".")[0] == next_path.rpartition(".")[0]:
            reason = _difference(blocks, blocks.group(i, 1), blocks.group(i + 1, 1))
            yield f"{next_path} is not taken together with {path}: {reason}"


def _difference(blocks: _Blocks, one: _Group, other: _Group) -> str:
    if one.code == other.code:
        for x, y in zip(one.externals, other.externals, strict=True):
            if blocks.numbers[x] != blocks.numbers[y] and (y in one.places) == (x in other.places):
                return f"where one reads {x.name}, the other reads {y.name}"
        return "a value of one of them is read by others than its neighbours, or what they hand on differs from the blocks around"
    keys = list(blocks.codes)
    calls = [[x for x in zip(group.nodes, keys[group.code][0]) if x[0].op == "call_function"] for group in (one, other)]
    for (node, key), (twin, twin_key) in zip(*calls):
        if key != twin_key:
            return f"{_text(node)} against {_text(twin)}"
    return f"{len(one.nodes)} nodes against {len(other.nodes)}, or operands of other shapes"


def _text(node: Node) -> str:
    return f"{node.name} = {node.target}{node.args}"


def _without(
    step: StepGraph, blocks: _Blocks, runs: Sequence[_Run], keep: int, counts: Mapping[str, int]
) -> tuple[StepGraph, dict[str, int]]:
    """The step with `keep` groups of every run, and the counts of its nodes."""
    stands_in: dict[Node, tuple[Node, Node]] = {}  # dropped node -> the same of the last group before and of the first behind
    weights: dict[Node, int] = {}
    for run in runs:
        groups = [blocks.group(group[0], run.size).nodes for group in run.groups()]
        second = groups[1] if keep > 2 else groups[-1]
        for node, before, behind, *others in zip(second, groups[keep - 2], groups[-1], *groups[keep - 1 : -1], strict=True):
            weights[node] = counts[node.name] + sum(counts[other.name] for other in others)
            stands_in.update(dict.fromkeys(others, (before, behind)))
    gone = set(stands_in)
    for node in reversed(list(step.graph.nodes)):
        item = blocks.inputs.get(node)
        if node.users and (item is None or item.kind is Kind.HYPER) and node not in blocks.block and gone.issuperset(node.users):
            gone.add(node)  # computed for dropped blocks alone
    first = {}
    for node in step.graph.nodes:
        if node not in gone:
            first.setdefault(blocks.numbers[node], node)
    for node in gone - stands_in.keys():
        same = first[blocks.numbers[node]]
        weights[same] = weights.get(same, counts[same.name]) + counts[node.name]

    sums = _sums_without(step, blocks, stands_in, gone)
    for node, (_, twin) in sums.items():
        weights[twin] = weights.get(twin, counts[twin.name]) + counts[node.name]

    graph = Graph()
    copies: dict[Node, Node] = {}

    def operand(reader: Node, node: Node) -> Node:
        while node in sums:
            node = sums[node][0]
        if node not in gone:
            return node
        before, behind = stands_in[node]
        if reader not in blocks.block:
            return min(before, behind, key=blocks.order.__getitem__)
        return before if blocks.block[node] < blocks.block[reader] else behind

    for node in step.graph.nodes:
        waiting = [node] if node.op != "output" and node not in gone and node not in sums else []
        while waiting:  # for operands that came earlier in a dropped block
            node = waiting[-1]
            missing = [x for x in (operand(node, x) for x in node.all_input_nodes) if x not in copies] if node not in copies else []
            assert len(waiting) <= len(counts), f"{node.name} waits for itself in the step without blocks of {runs}"
            if not missing and waiting.pop() not in copies:
                copies[node] = graph.node_copy(node, lambda x: copies[operand(node, x)])
            waiting += missing
    kept = [i for i, (owner, node) in enumerate(zip(blocks.owners, step.results, strict=True)) if owner not in gone and node not in gone]
    graph.output(tuple(copies[step.results[i]] for i in kept))
    graph.output_node().meta = dict(step.graph.output_node().meta)
    inputs = tuple(dataclasses.replace(item, name=copies[node].name) for node, item in blocks.inputs.items() if node in copies)
    outputs = tuple(step.outputs[i] for i in kept)
    names = {item.target for item in inputs if item.kind is Kind.BUFFER}
    constants = {name: value for name, value in step.constants.items() if name in names}
    result = StepGraph(graph=graph, inputs=inputs, outputs=outputs, constants=constants)
    result.verify()
    return result, {copy.name: weights.get(node, counts[node.name]) for node, copy in copies.items()}


def _sums_without(step: StepGraph, blocks: _Blocks, stands_in: Mapping[Node, tuple[Node, Node]], gone: set[Node]) -> dict[Node, tuple[Node, Node]]:
    """Additions outside of blocks, of a value of a dropped one to a sum over blocks -> the sum before, and the addition that stands for it."""
    results = set(step.results)
    found: dict[Node, tuple[Node, Node]] = {}
    for node in step.graph.nodes:
        if not blocks.adds(node) or node in gone or node in results or len(node.all_input_nodes) != 2:
            continue
        for term, total in itertools.permutations(node.all_input_nodes):
            if term not in stands_in or total in gone or _description(total) != _description(node):
                continue
            twins = {user for x in stands_in[term] for user in x.users if blocks.adds(user) and blocks.sum_of(user) is blocks.sum_of(node)}
            if twins:
                found[node] = total, min(twins, key=blocks.order.__getitem__)
                break
    return found
