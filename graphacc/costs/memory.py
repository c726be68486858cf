"""Predicting the memory of a step on one device from its StepGraph, without compiling it.

Counted is what a compiler stores: views share their base's memory, an element-wise operator whose users can all compute it
on the fly is never stored (its operands live longer instead; but XLA repeats for several users only what is cheap and reads one
tensor of its size), an operator that works element by element writes over an operand that nothing else reads, and an output that
replaces an input is written in place. The order is the program's, on CPUs the best of a few quick ones, or planned as the compiled program's is.

On GPUs XLA joins small products of one factor, of which parts are copied only for readers that are no fusions; a sum over ranks is written over its operand; cuDNN's attention
writes heads as the next product reads them, other attention is a loop whose zeros all loops' first one makes; and of two products of a gradient the one that the backward
reads comes first, while the other one is put off at most as far as the program lets it be: the larger of both orders counts. Addresses are not predicted: where large buffers of several sizes meet, gaps between them are up to 10 % (dp=8), beside loops 6 %.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.graph import Phase, StepGraph
from graphacc.ops.chunked import body_of
from graphacc.ops.facts import LAYOUT_KINDS, OpKind, is_packed_factor, is_read_transposed, of_kind, padding_of_rows
from graphacc.ops.flash_form import BLOCK, Described, Form, choose
from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.order.heuristics import HEURISTICS
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.problem import Buffer, Operator, Problem

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_ATTENTION = torch.ops.graphacc.flash_attention.default
_ATTENTIONS = frozenset({_ATTENTION, torch.ops.graphacc.flash_attention_backward.default})
_PRODUCTS = frozenset({_aten.mm.default, torch.ops.graphacc.wide_mm.default})
_ORDERED = of_kind(OpKind.ORDER)
_CARRIES = of_kind(*LAYOUT_KINDS, OpKind.CAST, OpKind.ORDER) | {_aten.add.Tensor, _aten.cat.default, _aten.constant_pad_nd.default, operator.getitem, _WAIT}
"""On the way of a gradient to the update, as of one of a parameter that is used twice."""

_VIEWS = of_kind(*LAYOUT_KINDS, OpKind.EXPAND, OpKind.ORDER) - {_aten.clone.default} | {operator.getitem, _WAIT}
"""Operators whose result shares, or can share, the memory of their first operand."""

_COMPUTED_ON_THE_FLY = frozenset(
    {
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.full.default,
        _aten.full_like.default,
        _aten.scalar_tensor.default,
        _aten.arange.start_step,
        _aten.arange.default,
        _aten.constant_pad_nd.default,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.embedding.default,
        _aten.gather.default,
        torch.ops.graphacc.random_uniform.default,
    }
)
_IN_ORDER = of_kind(OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.SQUEEZE) | {_WAIT}
"""Operators whose elements stand in the order of their operand's."""
_RESHAPES, _TRANSPOSES = of_kind(OpKind.RESHAPE, OpKind.SQUEEZE), of_kind(OpKind.PERMUTE)
_EXPENSIVE = frozenset(
    {
        _aten.exp.default,
        _aten.tanh.default,
        _aten.sigmoid.default,
        _aten.log.default,
        _aten.rsqrt.default,
        _aten.sqrt.default,
        _aten.div.Tensor,
        _aten.erf.default,
        _aten.pow.Tensor_Scalar,
    }
)
_CYCLES: Mapping[object, int] = {_aten.tanh.default: 467, _aten.erf.default: 467, _aten.pow.Tensor_Scalar: 500}
"""What XLA counts for an element on a GPU, of operators that take long; others take up to 170."""
_HIDDEN_CYCLES_PER_BYTE = 120
"""As many cycles for an element take as long as two kernels that read two tensors and write one, for each byte of an element of theirs (H100: 67e12 cycles and 3.35e12 bytes in a second)."""
_JOINED_BYTES = 64 * 2**20
"""XLA for GPUs joins products of one factor if factors and result of one of them are at most as large."""
_REDUCTIONS = frozenset(
    {
        _aten.sum.dim_IntList,
        _aten.sum.default,
        _aten.mean.dim,
        _aten.mean.default,
        _aten.amax.default,
        _aten.amin.default,
    }
)

PLAN_SECONDS = 0.5
"""Budget of one predicted order; most are proved best in a fraction of it."""
_PROGRAM_ORDER = ("program order",)
"""XLA for GPUs keeps near it, and updates parameters behind the backward."""
_ORDERS = (*_PROGRAM_ORDER, "immediate updates", "eager free", "LPMF", "BFS")
"""XLA takes the best of several on CPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes on one device."""

    argument_bytes: int  # parameters, buffers, optimizer state and batch
    temporary_bytes: int  # largest sum of values that live at once, arguments and outputs aside
    output_bytes: int  # outputs that replace no input
    ordered_bytes: int  # temporaries where collectives keep the graph's order, as far as the compiler does not choose another one; where no order is planned, as `temporary_bytes`

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


def predict_memory(step: StepGraph, *, cpu: bool = False, planned: bool = False) -> MemoryPrediction:
    """Predict the memory of one device for a step.

    Args:
        step: a graph whose shapes are those of one device (after the passes).
        cpu: the program is compiled for CPUs, where factors of products are packed (`is_packed_factor`).
        planned: the compiled program's order of operators is planned, and so is the predicted one, for `PLAN_SECONDS` at most; else the program's counts, or on CPUs the best of a few quick ones.
    """
    problem, donated = _problem(step, cpu=cpu), step.donations()
    temporary = ordered = _planned_peak(problem) if planned else _quick_peak(problem, _ORDERS if cpu else _PROGRAM_ORDER)
    if not (cpu or planned):
        temporary = ordered = max(temporary, _quick_peak(_problem(step, late=True), _PROGRAM_ORDER))
    if planned:
        ordered = max(temporary, _planned_peak(_with_collectives_in_order(step, problem)))
    return MemoryPrediction(
        argument_bytes=sum(_size_bytes(node) for node in step.placeholders),
        temporary_bytes=temporary,
        output_bytes=sum(_size_bytes(node) for i, node in enumerate(step.results) if i not in donated),
        ordered_bytes=ordered,
    )


def released_bytes(step: StepGraph, *, cpu: bool = False) -> int:
    """Bytes of temporaries where gradients leave as they are made, as where they are scattered; `cpu` as of `predict_memory`."""
    return _quick_peak(_problem(step, cpu=cpu), _ORDERS)


def _quick_peak(problem: Problem, orders: Iterable[str]) -> int:
    graph = compile_problem(problem)
    return min(graph.peak(HEURISTICS[name](graph)) for name in orders)


@functools.lru_cache(maxsize=16)
def _planned_peak(problem: Problem) -> int:
    """Asked once in a process: what is not proved best depends on how far the search comes in its time."""
    return solve_order(problem, seconds=PLAN_SECONDS).peak


def memory_profile(step: StepGraph) -> dict[torch.fx.Node, int]:
    """Calls whose results are stored -> bytes of temporaries while each runs, in the order of the program."""
    problem = _problem(step)
    graph = compile_problem(problem)
    nodes = {node.name: node for node in step.graph.nodes}
    found: dict[torch.fx.Node, int] = {}
    for item, size in zip(problem.operators, graph.profile(HEURISTICS["program order"](graph)), strict=True):
        found[nodes[item.name]] = max(int(size), found.get(nodes[item.name], 0))
    return found


def saved_for_backward(step: StepGraph, *, cpu: bool = False) -> dict[torch.fx.Node, int]:
    """The calls of the forward whose stored results the backward reads -> bytes of these; `cpu` as of `predict_memory`."""
    problem = _problem(step, cpu=cpu)
    nodes = {node.name: node for node in step.graph.nodes}
    made = {number: nodes[item.name] for item in problem.operators for number in item.writes}
    found: dict[int, None] = {}
    for item in problem.operators:
        if nodes[item.name].meta["phase"] is Phase.BACKWARD:
            found |= dict.fromkeys(number for number in item.reads if made[number].meta["phase"] is Phase.FORWARD)
    sizes: dict[torch.fx.Node, int] = {}
    for number in found:
        sizes[made[number]] = sizes.get(made[number], 0) + problem.buffers[number].size
    return sizes


def working_bytes(step: StepGraph, *, cpu: bool = False) -> dict[torch.fx.Node, int]:
    """Calls whose results are stored -> bytes of temporaries while each runs, in the order of the program, without what the forward has left for the backward; `cpu` as of `predict_memory`."""
    problem = _problem(step, cpu=cpu)
    graph = compile_problem(problem)
    nodes = {node.name: node for node in step.graph.nodes}
    phases = [nodes[item.name].meta["phase"] for item in problem.operators]
    made = {number: i for i, item in enumerate(problem.operators) for number in item.writes}
    last: dict[int, int] = {}
    for i, item in enumerate(problem.operators):
        last |= {number: i for number in item.reads if phases[i] is Phase.BACKWARD and phases[made[number]] is Phase.FORWARD}
    changes = [0] * (len(phases) + 1)
    for number, end in last.items():
        changes[made[number]] += problem.buffers[number].size
        changes[end + 1] -= problem.buffers[number].size
    held = itertools.accumulate(changes)
    stored = graph.profile(HEURISTICS["program order"](graph))
    found: dict[torch.fx.Node, int] = {}
    for item, size, kept in zip(problem.operators, stored, held):
        found[nodes[item.name]] = max(int(size) - kept, found.get(nodes[item.name], 0))
    return found


_kept: contextvars.ContextVar[tuple[StepGraph, dict] | None] = contextvars.ContextVar("kept", default=None)


@contextlib.contextmanager
def unchanged(step: StepGraph) -> Iterator[None]:
    """Inside, the step's graph stays as it is: what several of the functions here begin with is made once."""
    token = _kept.set((step, {}))
    try:
        yield
    finally:
        _kept.reset(token)


def _problem(step: StepGraph, *, cpu: bool = False, late: bool = False) -> Problem:
    """The buffers and operators of a step; `late` as of `_made_problem`."""
    kept = _kept.get()
    if kept is None or kept[0] is not step:
        return _made_problem(step, cpu=cpu, late=late)
    if (cpu, late) not in kept[1]:
        kept[1][cpu, late] = _made_problem(step, cpu=cpu, late=late)
    return kept[1][cpu, late]


def _made_problem(step: StepGraph, *, cpu: bool, late: bool) -> Problem:
    """One operator for each call whose values are stored; it reads what it needs itself, and through values computed on the fly.

    Arguments and outputs have memory of their own, and are left out, or have no bytes.

    Args:
        late: products that give gradients are put off as far as the program lets XLA for GPUs, see `passes/communication/release.py`.
    """
    buffers: list[Buffer] = []
    operators: list[Operator] = []
    made: dict[torch.fx.Node, range] = {}  # the buffers that a call creates
    places: dict[torch.fx.Node, frozenset[int]] = {}  # the buffers that are read where a node's value is used
    attentions = _BlockwiseAttentions()
    groups = {} if cpu else _joined(step)
    joined: dict[tuple[torch.fx.Node, ...], int] = {}  # products that are computed as one -> the buffer of that
    for node in step.graph.nodes if cpu else _as_sent(step, groups, late=late):
        if not cpu and node.target is _WAIT and node.all_input_nodes[0].target is not _REDUCE:  # what is sent stays until then
            sent = node.all_input_nodes[0].all_input_nodes
            operators.append(Operator(name=node.name, reads=tuple(sorted(frozenset().union(*(places[operand] for operand in sent)))), writes=()))
        again = _repeated_for(node) if cpu else None
        reads = frozenset().union(*(places[operand] for operand in (node if again is None else again).all_input_nodes))
        base = node.args[0] if node.op == "call_function" and (node.target in _VIEWS or _is_computed_so(node) or (not cpu and _is_given_so(node))) else None
        if (group := groups.get(node)) is not None:
            if group not in joined:
                joined[group] = len(buffers)
                buffers.append(Buffer(name=node.name, size=sum(map(_size_bytes, group))))
                operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=(joined[group],)))
                reads = frozenset()
            reads |= {joined[group]}
        if node.op != "call_function":
            places[node] = frozenset()
        elif node.target is operator.getitem and base in made:
            places[node] = frozenset({made[base][node.args[1]]})
        elif base is not None and again is None:
            places[node] = places[base]
        elif base is None and computed_on_the_fly(node, sources=None if cpu else sum(buffers[number].size >= _size_bytes(node) for number in reads)):
            places[node] = reads
        elif group is not None and _is_read_by_fusions(node):
            places[node] = frozenset({joined[group]})
            operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=()))
        else:
            made[node] = range(len(buffers), len(buffers) + len(_sizes(node)))
            places[node] = frozenset(made[node])
            widened = 2 if not cpu and _is_summed_wide(node) else 1
            buffers += [Buffer(name=node.name, size=widened * size) for size in _sizes(node)]
            workspace = loop_bytes(node)
            if not cpu and node.target in _ATTENTIONS and _is_in_blocks(node):
                workspace = _scores_bytes(node)
                reads |= attentions.add(node, made[node], buffers, place=len(operators))
            operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=tuple(range(made[node].start, len(buffers))), workspace=workspace))
    for number in frozenset().union(*(places[node] for node in step.results)) - frozenset(joined.values()):
        buffers[number] = dataclasses.replace(buffers[number], size=0)
    operators = list(_in_place(operators, buffers, made, cpu=cpu))
    for place, numbers in attentions.zeros.values():
        operators[place] = dataclasses.replace(operators[place], writes=tuple(sorted({*operators[place].writes, *numbers})))
    return Problem(operators=tuple(operators), buffers=tuple(buffers))


def _as_sent(step: StepGraph, groups: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]], *, late: bool) -> Iterable[torch.fx.Node]:
    """The nodes in the order in which XLA for GPUs begins them: a weight is gathered as soon as what the gather waits for is there, behind what is computed meanwhile,
    and products that are joined (`groups`) are together; `late` as of `_problem`."""
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    ready: dict[torch.fx.Node, int] = {}  # parameters, and what is made of these alone -> the place of the last of what they wait for
    begun: dict[int, list[torch.fx.Node]] = collections.defaultdict(list)  # place -> the gathers that begin there
    for node in step.graph.nodes:
        waits = node.all_input_nodes[1:] if node.target in _ORDERED else []
        made_of = node.all_input_nodes[:1] if waits else node.all_input_nodes
        if node.op == "output" or any(operand not in ready for operand in made_of) or (node.op == "call_function" and not made_of):
            continue
        last = max((*(ready[operand] for operand in made_of), *(place[wait] for wait in waits)), default=-1)
        if node.target is _GATHER and last >= 0:
            begun[last].append(node)
        elif "move" not in node.meta and node.target is not _WAIT:
            ready[node] = last
    put_off, behind = {} if late else _put_off(step), collections.defaultdict(list)
    for product, other in put_off.items():
        behind[other].append(product)
    found: dict[torch.fx.Node, None] = {}
    last = _for_update(step) if late else put_off
    for node in itertools.chain((node for node in step.graph.nodes if node not in last), (node for node in step.graph.nodes if node in last)):
        work = [node]
        while work:
            unmade = [operand for operand in work[-1].all_input_nodes if operand not in found]
            if unmade:
                work += unmade
            elif (one := work.pop()) not in found:
                found[one] = None
                work += reversed([*begun.get(place[one], []), *groups.get(one, ()), *behind[one]])
    return found


def _put_off(step: StepGraph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Products that the backward does not read -> the product behind them of the same gradient, which it reads, and which XLA for GPUs computes first."""
    products = [node for node in step.graph.nodes if node.target in _PRODUCTS and node.meta.get("phase") is Phase.BACKWARD]
    readers: dict[torch.fx.Node, list[torch.fx.Node]] = collections.defaultdict(list)
    for product in products:
        for factor in product.all_input_nodes[:2]:
            readers[_described_factor(factor)[0]].append(product)
    waiting = {product for product in products if not _is_read_by_backward(product)}
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for source, them in readers.items():
        if source.meta.get("phase") is Phase.BACKWARD:
            found |= {product: other for product in them if product in waiting for other in them if other not in waiting and product < other}
    return found


def _for_update(step: StepGraph) -> set[torch.fx.Node]:
    """Products that the backward does not read, what is made for them alone, such as gathered factors, what carries them, and the update."""
    found = {node for node in step.graph.nodes if node.target in _PRODUCTS and node.meta.get("phase") is Phase.BACKWARD and not _is_read_by_backward(node)}
    for node in reversed([*step.graph.nodes]):
        if node.users and node.meta.get("phase") is Phase.BACKWARD and found.issuperset(node.users):
            found.add(node)
    for node in step.graph.nodes:
        is_way = (node.target in _CARRIES and node.target not in _ORDERED) or "move" in node.meta
        if node.op == "output" or node.meta.get("phase") is Phase.UPDATE or (is_way and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _is_read_by_backward(gradient: torch.fx.Node) -> bool:
    """Whether a call of the backward computes with it, but for what carries it to the update."""
    left, seen = [gradient], {gradient}
    while left:
        for user in left.pop().users:
            if user in seen or user.op == "output" or user.meta["phase"] is Phase.UPDATE or (user.target in _ORDERED and user.args[0] not in seen):
                continue
            if user.target not in _CARRIES and "move" not in user.meta:
                return True
            seen.add(user)
            left.append(user)
    return False


def _joined(step: StepGraph) -> dict[torch.fx.Node, tuple[torch.fx.Node, ...]]:
    """Products -> those that XLA for GPUs computes as one with them: they have a factor in common, none is made of another one, and one of any two is small (its pass DotMerger)."""
    classes: dict[tuple, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in step.graph.nodes:
        if node.target in _PRODUCTS:
            for side, factor in enumerate(node.all_input_nodes[:2]):
                classes[(side, node.target, *_described_factor(factor))].append(node)
    classes = {key: products for key, products in classes.items() if len(products) > 1}
    bits = {product: 1 << i for i, product in enumerate(dict.fromkeys(itertools.chain(*classes.values())))}
    made_of: dict[torch.fx.Node, int] = {}  # node -> the products that it is made of, as a mask
    for node in step.graph.nodes:
        made_of[node] = functools.reduce(operator.or_, (made_of[operand] | bits.get(operand, 0) for operand in node.all_input_nodes), 0)
    groups: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}
    for (side, *_), products in classes.items():
        left = [product for product in products if product not in groups]
        while left:
            first = left.pop(0)
            group, size, mask, behind = [first], _product_bytes(first), bits[first], made_of[first]
            for product in list(left):
                small = min(size, _product_bytes(product)) <= _JOINED_BYTES
                if small and not made_of[product] & mask and not behind & bits[product]:
                    size += _product_bytes(product) - _size_bytes(product.all_input_nodes[side])
                    mask, behind = mask | bits[product], behind | made_of[product]
                    group.append(product)
                    left.remove(product)
            if len(group) > 1:
                groups |= dict.fromkeys(group, tuple(group))
    return groups


def _described_factor(node: torch.fx.Node) -> tuple:
    """What is equal for factors that are the same matrix."""
    shape, transposed = tuple(node.meta["val"].shape), False
    while node.op == "call_function" and (node.target in _RESHAPES or (node.target in _TRANSPOSES and node.meta["val"].dim() == 2)):
        transposed ^= node.target in _TRANSPOSES
        node = node.all_input_nodes[0]
    return node, shape, transposed


def _product_bytes(product: torch.fx.Node) -> int:
    """Of factors and result."""
    return _size_bytes(product) + sum(map(_size_bytes, product.all_input_nodes[:2]))


def _is_read_by_fusions(node: torch.fx.Node) -> bool:
    """Whether all users of a part of a joined product can read it there."""
    return all(user.op == "call_function" and (_is_fusible(user) or user.target in _REDUCTIONS) for user in _users(node))


@dataclasses.dataclass
class _BlockwiseAttentions:
    """What attentions in blocks of keys store on GPUs besides their results: loops, which begin with zeros that XLA makes for all loops at once where the first of them begins."""

    keys: dict[torch.fx.Node, int] = dataclasses.field(default_factory=dict)  # attention -> buffer of its keys cut in blocks, for the backward, which reads them uncut, too
    zeros: dict[tuple, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)  # shape -> operator that makes the zeros of this shape, and their buffers

    def add(self, node: torch.fx.Node, results: range, buffers: list[Buffer], *, place: int) -> frozenset[int]:
        """Add the buffers of a call that is the operator at `place`; returns those that it reads."""
        q, k, v = _attended(node)
        if node.target is _ATTENTION:
            self.keys[node] = len(buffers)
            buffers.append(Buffer(name=node.name, size=k.numel() * k.dtype.itemsize))
            self._begin((*q.shape[:3], v.shape[-1]), len(buffers), place)
            buffers.append(Buffer(name=node.name, size=4 * math.prod((*q.shape[:3], v.shape[-1]))))
            return frozenset()
        self._begin((*q.shape,), results[0], place)
        for number, value in zip(results[1:3], (k, v)):
            self._begin((BLOCK, *value.shape), number, place)
        return frozenset(self.keys[maker] for out in node.all_input_nodes for maker in out.all_input_nodes[:1] if out.target is operator.getitem and maker in self.keys)

    def _begin(self, shape: tuple, number: int, place: int) -> None:
        self.zeros.setdefault(shape, (place, []))[1].append(number)


def _is_in_blocks(node: torch.fx.Node) -> bool:
    """Whether an attention on a GPU is a loop over several blocks of keys."""
    return _attention_form(node) is Form.BLOCKWISE and _attended(node)[1].shape[2] > BLOCK


def _scores_bytes(node: torch.fx.Node) -> int:
    """Of a block of keys, and of what is made of them."""
    return 2 * 4 * BLOCK * math.prod(_attended(node)[0].shape[:3])


def _attended(node: torch.fx.Node) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of an attention, or of its backward."""
    args: Any = node.args
    q, k, v = args[:3] if node.target is _ATTENTION else args[1:4]
    return q.meta["val"], k.meta["val"], v.meta["val"]


def _attention_form(node: torch.fx.Node) -> Form:
    """Of a call of `graphacc::flash_attention` or its backward on a GPU."""
    args: Any = node.args
    *_, bias, q_segments, left, right, dropout = (*args[:5], args[8], args[9], args[12]) if node.target is _ATTENTION else (*args[1:6], args[11], args[12], args[15])
    call = Described.of(*_attended(node), bias=bias, q_segments=q_segments, left=left, right=right, dropout=dropout)
    return choose("cuda", call).form


def _is_given_so(node: torch.fx.Node) -> bool:
    """Whether a copy of transposed heads is how cuDNN's attention writes its result: as [B, T, H, D]."""
    if node.target is not _aten.clone.default or node.all_input_nodes[0].target not in _TRANSPOSES:
        return False
    transposed = node.all_input_nodes[0]
    out = transposed.all_input_nodes[0]
    if out.target is not operator.getitem or (attention := out.all_input_nodes[0]).target is not _ATTENTION or _attention_form(attention) is not Form.CUDNN:
        return False
    b, h, t, d = out.meta["val"].shape
    return tuple(transposed.meta["val"].shape) == (b, t, h, d)


def _with_collectives_in_order(step: StepGraph, problem: Problem) -> Problem:
    collectives = {node.name for node in step.graph.nodes if "move" in node.meta}
    places = [i for i, item in enumerate(problem.operators) if item.name in collectives]
    operators = list(problem.operators)
    for first, second in itertools.pairwise(places):
        operators[second] = dataclasses.replace(operators[second], after=(*operators[second].after, first))
    return dataclasses.replace(problem, operators=tuple(operators))


def _repeated_for(node: torch.fx.Node) -> torch.fx.Node | None:
    """The call of the forward that is computed once more, for a packed factor that is `node`; None for other nodes.

    The copy of the transposed input of a layer, which its weight's gradient reads, computes it from what it is made of, so that the input itself dies in the forward.
    """
    if node.op != "call_function" or node.target not in _TRANSPOSES or node.meta["phase"] is not Phase.BACKWARD or not any(_packs(user, node) for user in node.users):
        return None
    value = node.all_input_nodes[0]
    while value.op == "call_function" and value.target in _RESHAPES and value.meta["phase"] is Phase.FORWARD:
        value = value.all_input_nodes[0]
    is_made = value.op == "call_function" and value.meta["phase"] is Phase.FORWARD
    return value if is_made and value.target not in _EXPENSIVE and _is_fusible(value) and value.meta["val"].dtype is torch.float32 else None


def _packs(product: torch.fx.Node, factor: torch.fx.Node) -> bool:
    factors = product.all_input_nodes
    return product.target is _aten.mm.default and len(factors) == 2 and factors[0] is factor and is_packed_factor(*(node.meta["val"] for node in factors))


def _is_computed_so(node: torch.fx.Node) -> bool:
    """Whether a copy of a transposed grouped product is the product itself, see `is_read_transposed`."""
    if node.target is not _aten.clone.default or node.all_input_nodes[0].target not in _TRANSPOSES:
        return False
    product = node.all_input_nodes[0].all_input_nodes[0]
    return product.target is torch.ops.graphacc.grouped_mm_weight_grad.default and is_read_transposed(product)


def _in_place(operators: Sequence[Operator], buffers: Sequence[Buffer], made: Mapping[torch.fx.Node, range], *, cpu: bool) -> tuple[Operator, ...]:
    """The operators, of which those that work element by element write over an operand of their size: one that nothing else reads, or on GPUs
    nothing behind them in the graph."""
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for place, item in enumerate(operators):
        for number in item.reads:
            readers[number].append(place)
    makers = {number: place for place, item in enumerate(operators) for number in item.writes}
    stands_in: dict[int, int] = {}  # buffer -> the one that it takes the memory of
    behind: dict[int, tuple[int, ...]] = {}  # operator that does so -> the other ones that read that buffer
    for node, (own, *others) in made.items():
        if others or not (_is_fusible(node) or (node.target is _REDUCE and not cpu)):
            continue
        for operand in _elementwise_operands(node, made, _VIEWS if node.target is _REDUCE else _IN_ORDER):  # a layout is chosen for what is sent
            (number, *more) = made[operand]
            if more or buffers[number].size != buffers[own].size or (not cpu and (_is_padded(operand) or _is_summed_wide(operand))):
                continue
            before = [place for place in readers[number] if place != makers[own]]
            if not before or (not cpu and all(place < makers[own] for place in before)):
                stands_in[own] = stands_in.get(number, number)
                behind[makers[own]] = tuple(before)
                break

    def renamed(numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({stands_in.get(number, number) for number in numbers}))

    return tuple(dataclasses.replace(item, reads=renamed(item.reads), writes=renamed(item.writes), after=behind.get(place, ())) for place, item in enumerate(operators))


def _is_padded(node: torch.fx.Node) -> bool:
    """Whether a product on a GPU stores its result in longer rows than those of `node`."""
    value = node.meta["val"]
    narrow = node.target is _aten.mm.default and value.dtype in (torch.bfloat16, torch.float16)
    return (narrow or node.target is torch.ops.graphacc.wide_mm.default) and padding_of_rows(value.shape[-1]) > 0


def _is_summed_wide(node: torch.fx.Node) -> bool:
    """Whether a table's gradient is stored in fp32, in which its rows are added up, and rounded by who reads it."""
    value = node.meta["val"]
    return node.target is _aten.embedding_dense_backward.default and value.dtype in (torch.bfloat16, torch.float16)


def _elementwise_operands(node: torch.fx.Node, made: Mapping[torch.fx.Node, range], through: frozenset = _IN_ORDER) -> Iterator[torch.fx.Node]:
    """The calls with results of their own that a call reads element by element, in row-major order or through other operators."""
    for operand in node.all_input_nodes:
        if operand in made:
            yield operand
        elif operand.op == "call_function" and (operand.target in through or torch.Tag.pointwise in getattr(operand.target, "tags", ())):
            yield from _elementwise_operands(operand, made, through)


def loop_bytes(node: torch.fx.Node) -> int:
    """What a loop over chunks stores besides its operands and results: the most of one chunk, its terms of the sums, and sums that are wider than the results."""
    body = body_of(node)
    if body is None:
        return 0
    inside = _quick_peak(_problem(StepGraph(body.graph, (), ())), _ORDERS)
    wider = sum(
        value.meta["val"].numel() * body.accumulates_in(i).itemsize for i, value in enumerate(body.values) if body.accumulates_in(i) is not value.meta["val"].dtype
    )
    return inside + sum(map(_size_bytes, body.values)) + wider


def computed_on_the_fly(node: torch.fx.Node, *, sources: int | None = None) -> bool:
    """Whether a call's result is never stored, since all its users can compute it for themselves.

    Args:
        sources: in a program for GPUs, the stored tensors of at least its size that it is made of. Users are then also those of another shape of it, and what takes
            long is computed again as long as memory takes longer.
    """
    if node.op != "call_function" or not _is_fusible(node) or not node.users:
        return False
    users = list(node.users if sources is None else _users(node))
    if len(users) > 1 and not _may_be_repeated(node, sources):
        return False
    return all(user.op == "call_function" and (_is_fusible(user) or user.target in _REDUCTIONS) for user in users)


def _users(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Who reads a value, in another shape or in its own."""
    for user in node.users:
        if user.op == "call_function" and user.target in _RESHAPES and user.users:
            yield from _users(user)
        else:
            yield user


def _may_be_repeated(node: torch.fx.Node, sources: int | None) -> bool:
    """Whether each of several users computes the value for itself: XLA weighs the work, and the bytes that are read again."""
    if sources is not None:
        return sources <= 1 and _CYCLES.get(node.target, 0) <= _HIDDEN_CYCLES_PER_BYTE * node.meta["val"].dtype.itemsize
    size = _size_bytes(node)
    return node.target not in _EXPENSIVE and sum(_size_bytes(operand) >= size for operand in node.all_input_nodes) <= 1


def _is_fusible(node: torch.fx.Node) -> bool:
    target = node.target
    if target in _COMPUTED_ON_THE_FLY:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _sizes(node: torch.fx.Node) -> list[int]:
    """Bytes of each value that a node returns."""
    values = node.meta["val"]
    values = values if isinstance(values, (tuple, list)) else [values]
    return [math.prod(v.shape) * v.dtype.itemsize if isinstance(v, torch.Tensor) else 0 for v in values]


def _size_bytes(node: torch.fx.Node) -> int:
    return sum(_sizes(node))
