"""Predicting the memory of a step on one device from its StepGraph, without compiling it.

Counted is what a compiler stores: views share their base's memory, an element-wise operator whose users can all compute it
on the fly is never stored (its operands live longer instead; but XLA repeats for several users only what is cheap and reads one
tensor of its size), an operator that works element by element writes over an operand that nothing else reads, and an output that
replaces an input is written in place. On CPUs what waits for another value is a copy. The order is the program's, on CPUs the best of a few quick ones, or planned as the compiled program's is.

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
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.costs.sizes import size_bytes, sizes
from graphacc.costs.xla_gpu import (
    ATTENTIONS,
    BlockwiseAttentions,
    as_sent,
    is_given_so,
    is_in_blocks,
    joined_products,
    scores_bytes,
)
from graphacc.graph import Phase, StepGraph
from graphacc.ops.chunked import body_of
from graphacc.ops.facts import (
    LAYOUT_KINDS,
    OpKind,
    before_barrier,
    is_packed_factor,
    is_read_transposed,
    of_kind,
    padding_of_rows,
)
from graphacc.passes.memory.order.graph import compile_problem
from graphacc.passes.memory.order.heuristics import HEURISTICS
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.problem import Buffer, Operator, Problem

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_AFTER = torch.ops.graphacc.after.default
_BARRIER, _PERMUTE = torch.ops.graphacc.barrier.default, torch.ops.graphacc.permute_ranks.default
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
"""For an element on a GPU, of operators that take long; others take up to 170. That of tanh is in XLA's table for H100; those of erf and pow are taken to be like it."""
_HIDDEN_CYCLES_PER_BYTE = 120
"""As many cycles for an element take as long as two kernels that read two tensors and write one, for each byte of an element of theirs (H100: 67e12 cycles and 3.35e12 bytes in a second)."""
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
        argument_bytes=sum(size_bytes(node) for node in step.placeholders),
        temporary_bytes=temporary,
        output_bytes=sum(size_bytes(node) for i, node in enumerate(step.results) if i not in donated),
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
    attentions = BlockwiseAttentions()
    groups = {} if cpu else joined_products(step)
    joined: dict[tuple[torch.fx.Node, ...], int] = {}  # products that are computed as one -> the buffer of that
    for node in step.graph.nodes if cpu else as_sent(step, groups, late=late):
        if not cpu and node.target is _WAIT and node.all_input_nodes[0].target is not _REDUCE:  # what is sent stays until then
            sent = node.all_input_nodes[0].all_input_nodes
            operators.append(Operator(name=node.name, reads=tuple(sorted(frozenset().union(*(places[operand] for operand in sent)))), writes=()))
        if node.target is _BARRIER or (same := before_barrier(node)) is not node:
            places[node] = frozenset() if node.target is _BARRIER else places[same]
            continue
        again = _repeated_for(node) if cpu else None
        reads = frozenset().union(*(places[operand] for operand in (node if again is None else again).all_input_nodes))
        waits = _copied_and_awaited(node) if cpu else None
        if waits is not None:
            value, awaited = waits
            reads = places[value] | {len(buffers)}
            operators.append(Operator(name=node.name, reads=tuple(sorted(places[awaited])), writes=(len(buffers),)))
            buffers.append(Buffer(name=node.name, size=awaited.meta["val"].dtype.itemsize))
        is_view = node.op == "call_function" and waits is None and (node.target in _VIEWS or _is_computed_so(node) or (not cpu and is_given_so(node)))
        base = node.args[0] if is_view else None
        if (group := groups.get(node)) is not None:
            if group not in joined:
                joined[group] = len(buffers)
                buffers.append(Buffer(name=node.name, size=sum(map(size_bytes, group))))
                operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=(joined[group],)))
                reads = frozenset()
            reads |= {joined[group]}
        if node.op != "call_function":
            places[node] = frozenset()
        elif node.target is operator.getitem and base in made:
            places[node] = frozenset({made[base][node.args[1]]})
        elif base is not None and again is None:
            places[node] = places[base]
        elif base is None and computed_on_the_fly(node, cpu=cpu, sources=None if cpu else sum(buffers[number].size >= size_bytes(node) for number in reads)):
            places[node] = reads
        elif group is not None and _is_read_by_fusions(node):
            places[node] = frozenset({joined[group]})
            operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=()))
        else:
            made[node] = range(len(buffers), len(buffers) + len(sizes(node)))
            places[node] = frozenset(made[node])
            if not cpu and node.target is _PERMUTE and all(user.target is not _BARRIER for user in node.users):  # what is sent stays until it has come; of keys that go around a ring it is read that long
                places[node] |= places[node.all_input_nodes[0]]
            widened = 2 if not cpu and _is_summed_wide(node) else 1
            buffers += [Buffer(name=node.name, size=widened * size) for size in sizes(node)]
            workspace = loop_bytes(node)
            if not cpu and node.target in ATTENTIONS and is_in_blocks(node):
                workspace = scores_bytes(node)
                reads |= attentions.add(node, made[node], buffers, place=len(operators))
            operators.append(Operator(name=node.name, reads=tuple(sorted(reads)), writes=tuple(range(made[node].start, len(buffers))), workspace=workspace))
    for number in frozenset().union(*(places[node] for node in step.results)) - frozenset(joined.values()):
        buffers[number] = dataclasses.replace(buffers[number], size=0)
    operators = list(_in_place(operators, buffers, made, cpu=cpu))
    for place, numbers in attentions.zeros.values():
        operators[place] = dataclasses.replace(operators[place], writes=tuple(sorted({*operators[place].writes, *numbers})))
    return Problem(operators=tuple(operators), buffers=tuple(buffers))


def _is_read_by_fusions(node: torch.fx.Node) -> bool:
    """Whether all users of a part of a joined product can read it there."""
    return all(user.op == "call_function" and (_is_fusible(user) or user.target in _REDUCTIONS) for user in _users(node))


def _copied_and_awaited(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The operands of `graphacc::after`: what is given, and what it waits for; None for other calls, and where nothing is waited for.

    XLA:CPU drops barriers. There the first operand is xor-ed with a zero, which is made of one element of the second one (`graphacc.lowering.hidden_zero`): an
    element-wise operator, which makes a copy of a parameter's part before that is gathered.
    """
    args: Any = node.args
    return (args[0], args[1]) if node.target is _AFTER and args[1].meta["val"].numel() else None


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
        if others or not (_is_fusible(node, cpu=cpu) or (node.target is _REDUCE and not cpu)):
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
    for operand in map(before_barrier, node.all_input_nodes):
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
    return inside + sum(map(size_bytes, body.values)) + wider


def computed_on_the_fly(node: torch.fx.Node, *, cpu: bool = False, sources: int | None = None) -> bool:
    """Whether a call's result is never stored, since all its users can compute it for themselves.

    Args:
        cpu: in a program for CPUs, where what waits for another value is made element by element (`_copied_and_awaited`), of what is stored.
        sources: in a program for GPUs, the stored tensors of at least its size that it is made of. Users are then also those of another shape of it, and what takes
            long is computed again as long as memory takes longer.
    """
    if node.op != "call_function" or not _is_fusible(node, cpu=cpu) or not node.users:
        return False
    users = list(_users_behind_barriers(node) if sources is None else _users(node))
    if len(users) > 1 and not _may_be_repeated(node, sources):
        return False
    return all(user.op == "call_function" and (_is_fusible(user) or user.target in _REDUCTIONS) for user in users)


def _users_behind_barriers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Who reads a value, where barriers count for nothing: in programs for CPUs, where they are none, and in the count of kernels (`graphacc.costs.work`), to which XLA's fusions on GPUs come nearer so."""
    for user in node.users:
        if user.target is _BARRIER:
            for same in user.users:
                if before_barrier(same) is before_barrier(node):
                    yield from _users_behind_barriers(same)
        else:
            yield user


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
    size = size_bytes(node)
    read = node.all_input_nodes[:1] if node.target is _AFTER else node.all_input_nodes
    return node.target not in _EXPENSIVE and sum(size_bytes(operand) >= size for operand in read) <= 1


def _is_fusible(node: torch.fx.Node, *, cpu: bool = False) -> bool:
    target = node.target
    if target in _COMPUTED_ON_THE_FLY or (cpu and target is _AFTER):
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
