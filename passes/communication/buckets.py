"""Buckets: gathers of weights, scatters and small all-reduces of gradients are joined into flat messages.

Each message costs a round trip and, on virtual devices, a meeting of all threads, whatever its size; two thirds of a transformer's
parameters are biases and norms of a few kilobytes (Li et al., "PyTorch Distributed", VLDB 2020, section 4.2; Zhao et al., "PyTorch FSDP",
VLDB 2023, section 3.2). A bucket is one flat tensor [ranks, sum of local sizes], members in the order of their parameters:

    gather     each [n_i] local  ->  concatenate [sum n_i]  ->  gather [ranks * sum n_i]  ->  slices [ranks, n_i]
    scatter    each [ranks, n_i] ->  concatenate [ranks, sum n_i]  ->  scatter [sum n_i]  ->  slices [n_i]

No element is added to another one than before, and ranks are summed in one order on CPU. What can still differ there is the last bit of an
element: XLA fuses what stands around a message differently, and contracts a product and a sum into one operation (FMA) where they are in
one kernel (measured: GPT-2 with dropout differs by 1e-6; not without it, and not with `--xla_cpu_max_isa=AVX`, which has no FMA).

What is scattered over one axis is often summed over another one next (ranks of `dp`, `tp`); then the members of a bucket are summed as one as well, before they
are taken apart. Under `cp` and `ep` ZeRO takes a step for each axis (`passes/partition/zero.py`), and these have buckets of their own: a gather over `fsdp` counts as what the
last one makes of it, and gradients are scattered over `cp`, then `ep`, in buckets before those of `fsdp` are made.

A gather waits for nothing but parameters and, in the backward of ZeRO-3, the gradient that `graphacc::after` names, so that a bucket is
gathered where its first member was. A scatter or an all-reduce is carried out where its last member was, as long as nothing has read one
of them. A bucket is closed when the next member would make it larger than `bucket_bytes`, which therefore bounds what is gathered, or kept
whole, for it; a tensor of more than half of that stays alone, as joining would copy it for nothing, and so does one that is read again much
later, as a tied embedding.

Gathers of small tensors have buckets of their own: XLA:CPU computes what it adds a bias to, or scales by a norm, again in the backward, and
what it reads there stays until then (with them in the buckets of the large ones 19 buckets of GPT-2 12 x 768 at once, not 2). All-reduces
of larger tensors stay as they are: XLA's own combiner joins them on GPUs, and on CPU a joined one would keep whole gradients alive that a
single one writes in place.
"""

import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import torch
import torch.fx

from graphacc.graph import StepGraph
from graphacc.passes.communication.secondary import is_across_nodes
from graphacc.passes.edit import Editor, only_user
from graphacc.passes.partition.axis import verify_collectives
from graphacc.passes.partition.placement import size_bytes
from graphacc.passes.partition.plan import Role
from graphacc.passes.runner import Log, Pass
from graphacc.passes.stages.values import SEGMENT, VIEWS
from graphacc.strategy.axes import ZERO_AXES

aten, collective = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER, REDUCE = (
    collective.all_gather_into_tensor.default,
    collective.reduce_scatter_tensor.default,
    collective.all_reduce.default,
)
_SEEN_THROUGH = (collective.wait_tensor.default, torch.ops.graphacc.dequantize_blocks.default)
_ROLES = {GATHER: (Role.WEIGHT, Role.STATE), SCATTER: (Role.GRADIENT,), REDUCE: (Role.GRADIENT,)}
MAX_BYTES, SHARE = 32_000_000, 16
"""Buckets whose size is not asked for: of at most so many bytes, and of at most this share of the weights, so that a small model is not gathered at once."""
SMALL_BYTES = 64 * 1024
"""A tensor of at most this is small: a bias, the weight of a norm."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Collectives that become one."""

    members: tuple[torch.fx.Node, ...]  # in the order in which the graph has them

    @property
    def size_bytes(self) -> int:
        return sum(_bytes(node) for node in self.members)


@dataclasses.dataclass
class BucketReport:
    """What was joined, and what was left alone."""

    num_before: int  # collectives
    joined: dict[tuple[str, str, str], tuple[int, int, int]] = dataclasses.field(default_factory=dict)  # axis, phase and collective -> buckets, tensors, bytes

    def add(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            move = bucket.members[0].meta["move"]
            key = move.axis, move.phase.value, f"{move.collective} of {move.role.value}s"
            count, tensors, size = self.joined.get(key, (0, 0, 0))
            self.joined[key] = count + 1, tensors + len(bucket.members), size + bucket.size_bytes

    @property
    def num_after(self) -> int:
        return self.num_before - sum(tensors - count for count, tensors, _ in self.joined.values())

    def __str__(self) -> str:
        lines = [f"{self.num_before} collectives became {self.num_after}; all-reduces of more than {SMALL_BYTES} bytes are left to XLA's combiner"]
        return "\n".join(
            lines + [f"  {axis} in {phase}: {tensors} {what} in {count}, {size} bytes" for (axis, phase, what), (count, tensors, size) in self.joined.items()]
        )


def bucket_pass(bucket_bytes: int | None, multiple: int = 1) -> Pass:
    """Joins collectives into buckets of at most `bucket_bytes` (None: `MAX_BYTES`, or less); exact where ranks are summed in one order, as on CPU.

    Args:
        multiple: what a rank's part of a gradient that will be quantised is padded to, so that no two tensors share a block.
    """

    def run(step: StepGraph, log: Log) -> StepGraph:
        log.details = report = BucketReport(_count(step))
        limit, given = _limit(step) if bucket_bytes is None else bucket_bytes, _gathers_of_given(step)
        early = _early(step, limit, given)
        report.add(early)
        log.rewrote(len(early))
        for bucket in early:
            _join_early(step, bucket)
        for further in reversed(range(len(ZERO_AXES))):
            late = _late(step, limit, given, further)
            report.add(late)
            log.rewrote(len(late))
            for bucket in late:
                _join(step, bucket, bucket.members[-1], multiple if bucket.members[-1].meta["move"].bits else 1)
        return step

    return Pass(name="buckets", exact=False, optional=True, run=run, verify=verify_collectives, key=("buckets", bucket_bytes, multiple))


def _count(step: StepGraph) -> int:
    return sum("move" in node.meta for node in step.graph.nodes)


def _limit(step: StepGraph) -> int:
    """Bytes of a bucket by default."""
    totals: dict[Hashable, int] = {}
    for node in step.graph.nodes:
        if node.target in _ROLES and node.meta["move"].role in _ROLES[node.target] and last_gather(node) is node:
            key = node.target, is_across_nodes(node) if node.target is GATHER else node.args[-1], node.meta["phase"]
            totals[key] = totals.get(key, 0) + _bytes(node)
    return min(MAX_BYTES, max(totals.values(), default=MAX_BYTES) // SHARE)


def _operand(node: torch.fx.Node) -> torch.fx.Node:
    """What a collective is given, or what a value is made of."""
    return node.all_input_nodes[0]


def _bytes(node: torch.fx.Node) -> int:
    """The whole tensor: gathered, reduced, or before it is scattered."""
    value = node.meta["val"] if node.target is GATHER else _operand(node).meta["val"]
    return size_bytes(tuple(value.shape), value.dtype)


def _kind(node: torch.fx.Node, bucket_bytes: int) -> Hashable | None:
    """Collectives of one kind can be joined; None for those that stay alone."""
    target: Any = node.target
    if target not in _ROLES or node.meta["move"].role not in _ROLES[target]:
        return None
    limit = SMALL_BYTES if target is REDUCE else bucket_bytes // 2
    if _bytes(last_gather(node)) > limit or len(node.users) != 1:
        return None
    what = node.meta["val"].dtype, node.meta["move"].bits, target is GATHER and is_small(node)
    return node.target, node.args[1:], what, place_of(node)


def place_of(node: torch.fx.Node) -> Hashable:
    """Phase, and stage of a pipeline: a gather of a parameter's view has no mark of its own, and stands with the first of its readers."""
    segment = node.meta.get(SEGMENT)
    if segment is None and node.target is GATHER:
        segment = min((reader.meta[SEGMENT] for reader in readers(node) if SEGMENT in reader.meta), default=None)
    return node.meta["phase"], segment


def is_small(node: torch.fx.Node) -> bool:
    """Whether a collective moves one small tensor, or nothing but small ones."""
    node = last_gather(node)
    return node.meta["move"].size_bytes <= SMALL_BYTES * node.meta["move"].tensors


def is_of_weights(node: torch.fx.Node) -> bool:
    """Whether a node gathers parameters, or what an optimizer makes of them."""
    return node.target is GATHER and node.meta["move"].role in _ROLES[GATHER]


def last_gather(node: torch.fx.Node) -> torch.fx.Node:
    """The gather over another axis that takes what a gather of weights gives, as ZeRO's does under `cp`; other collectives as they are."""
    while is_of_weights(node) and not is_across_nodes(node) and (behind := next(iter(_passed_on(node)[1]), None)) is not None:
        node = behind
    return node


def readers(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """The calls that compute with what is gathered, seen through views, codes and gathers over further axes."""
    found, left = list[torch.fx.Node](), [gather]
    while left:
        others, further = _passed_on(left.pop())
        found += others
        left += further
    return list(dict.fromkeys(found))


def _passed_on(gather: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """What reads a gathered tensor, seen through views and codes: calls that compute with it, and gathers over further axes, of buckets too."""
    found, further = list[torch.fx.Node](), list[torch.fx.Node]()
    left, seen = [gather], set[torch.fx.Node]()
    while left:
        for user in left.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            if user.target in VIEWS or user.target in _SEEN_THROUGH:
                left.append(user)
            elif is_of_weights(user):
                further.append(user)
            elif user.target is aten.cat.default and (sent := _bucket_of(user)) is not None:
                further.append(sent)
            else:
                found.append(user)
    return found, further


def _bucket_of(joined: torch.fx.Node) -> torch.fx.Node | None:
    """The gather of a bucket, of what its members were joined to."""
    flat = only_user(joined)
    sent = None if flat is None else only_user(flat)
    return sent if sent is not None and is_of_weights(sent) else None


def _gathers_of_given(step: StepGraph) -> set[torch.fx.Node]:
    """Gathers of what is there from the start."""
    available = _available(step)
    return {node for node in step.graph.nodes if is_of_weights(node) and _operand(node) in available}


def _early(step: StepGraph, bucket_bytes: int, given: Collection[torch.fx.Node]) -> list[Bucket]:
    """Gathers of what is there from the start, in the order of first use.

    A bucket of large tensors is closed by any other gather of one, so that nothing that is not in it is read between its members, and
    buckets can be given back in the order in which they came.
    """
    kept = _kept(step, bucket_bytes)
    left: dict[Hashable, list[torch.fx.Node]] = {}
    filled: dict[Hashable, int] = {}  # bytes of these
    last: dict[Hashable, Hashable] = {}  # phase and segment -> the kind of the last large tensor
    closed = []
    for node in step.graph.nodes:
        if node not in given:
            continue
        kind = None if node in kept else _kind(node, bucket_bytes), _anchor(node) is None
        place = place_of(node), is_across_nodes(node), node.args[-1]
        if not is_small(node) and last.setdefault(place, kind) != kind:
            closed.append(left.pop(last[place], []))
            filled.pop(last[place], None)
            last[place] = kind
        if kind[0] is None:
            continue
        members = left.setdefault(kind, [])
        size = _bytes(last_gather(node))
        if filled.get(kind, 0) + size > bucket_bytes and members:
            closed.append(left.pop(kind))
            members, filled[kind] = left.setdefault(kind, []), 0
        members.append(node)
        filled[kind] = filled.get(kind, 0) + size
    return [Bucket(tuple(members)) for members in [*closed, *left.values()] if len(members) > 1]


def _kept(step: StepGraph, bucket_bytes: int) -> set[torch.fx.Node]:
    """Gathers that are read again after more than a bucket of others, as a tied embedding is: in a bucket they would keep the rest of it."""
    found: set[torch.fx.Node] = set()
    gathered, since = 0, dict[torch.fx.Node, int]()  # bytes of large tensors so far, and up to each node
    large = {node for node in step.graph.nodes if is_of_weights(node) and not is_small(node) and not is_across_nodes(node)}
    for node in step.graph.nodes:
        if node in large and last_gather(node) is node:
            gathered += _bytes(node)
        since[node] = gathered
    for node in large:
        last = max((since[reader] for reader in readers(node)), default=0)
        if last - since[last_gather(node)] > bucket_bytes:
            found.add(node)
    return found


def _available(step: StepGraph) -> set[torch.fx.Node]:
    """Inputs, what is made of one input alone (views, casts, `after`, whose second operand is an ordering edge, gathers)."""
    early = set(step.placeholders)
    for node in step.graph.nodes:
        read = node.all_input_nodes[:1] if node.target is torch.ops.graphacc.after.default else node.all_input_nodes
        if node.op == "call_function" and len(read) == 1 and read[0] in early and isinstance(node.meta["val"], torch.Tensor):
            early.add(node)
    return early


def _late(step: StepGraph, bucket_bytes: int, given: Collection[torch.fx.Node], further: int) -> list[Bucket]:
    """Collectives of what the step computes, of which nothing is read by the last of their bucket.

    Args:
        further: those alone of what is scattered, or gathered, over so many further axes next, or more.
    """
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    follow: set[torch.fx.Node] = set()  # sums of what a collective in front of them gives, which share its bucket
    left: dict[Hashable, tuple[list[torch.fx.Node], int]] = {}  # members, and where the first reader of one of them is
    closed = []
    for node in step.graph.nodes:
        kind = _kind(node, bucket_bytes) if node.target in _ROLES and node not in given and node not in follow else None
        if kind is None or node.meta["move"].tensors > 1 or (further and goes_further(node) < further):
            continue
        sums = _sums_behind(node)
        follow.update(sums)
        (waited,) = sums[-1].users if sums else node.users
        read = min((order[user] for user in _computing(waited)), default=len(order))
        kind = kind, tuple(item.args[1:] for item in sums)
        members, earliest = left.pop(kind, ([], len(order)))
        if members and (earliest <= order[node] or sum(map(_bytes, members)) + _bytes(node) > bucket_bytes):
            closed.append(members)
            members, earliest = [], len(order)
        left[kind] = [*members, node], min(earliest, read)
    return [Bucket(tuple(members)) for members in [*closed, *(members for members, _ in left.values())] if len(members) > 1]


def _computing(value: torch.fx.Node) -> list[torch.fx.Node]:
    """The readers of a value, seen through what follows it wherever it comes to be: views and casts, and what moves it over further axes."""
    found: list[torch.fx.Node] = []
    for user in value.users:
        found += _computing(user) if _follows(user) else [user]
    return found


def _follows(node: torch.fx.Node) -> bool:
    if node.target is collective.wait_tensor.default:
        node = _operand(node)
    target: Any = node.target
    if target in _ROLES:
        return node.meta["move"].role in _ROLES[target]
    return (target in VIEWS or target is aten.constant_pad_nd.default) and len(node.all_input_nodes) == 1


def goes_further(node: torch.fx.Node) -> int:
    """Over how many further axes what a collective scatters, or gathers, is scattered or gathered next, in a bucket or alone."""
    left = list(node.users) if node.target in (SCATTER, GATHER) else []
    while left:
        user = left.pop()
        if user.target is node.target:
            return 1 + goes_further(user)
        left += user.users if _follows(user) or user.target is aten.cat.default else ()
    return 0


def _move_behind(value: torch.fx.Node) -> None:
    """Move what follows a value behind it."""
    for user in value.users:
        if user < value:
            value.append(user)
            _move_behind(user)


def _sums_behind(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The sums of a gradient over further axes that follow on a collective, one on the other, with nothing else that reads what is in between."""
    found: list[torch.fx.Node] = []
    while node.target in (SCATTER, REDUCE) and (waited := only_user(node)) is not None:
        behind = only_user(waited)
        if behind is None or behind.target is not REDUCE or behind.meta["move"].role is not Role.GRADIENT or place_of(behind) != place_of(node):
            break
        found.append(behind)
        node = behind
    return found


def _parameter_order(members: tuple[torch.fx.Node, ...]) -> list[torch.fx.Node]:
    """Not the order of use, which depends on the schedule: a ring sums each place of the message in an order of its own."""
    return sorted(members, key=lambda node: node.meta["move"].value)


def _join_early(step: StepGraph, bucket: Bucket) -> None:
    """One gather where the first member is; what the others are made of moves there too."""
    first = functools.reduce(lambda x, y: y if y < x else x, bucket.members)  # buckets before this one may have moved members of it up
    anchor = _anchor(first)
    for node in bucket.members:
        if node is not first:
            _move_up(_operand(node), first, anchor)
    _join(step, bucket, first)


def _anchor(node: torch.fx.Node) -> torch.fx.Node | None:
    """What the operand of a gather waits for."""
    source = _operand(node)
    while source.op == "call_function":
        if source.target is torch.ops.graphacc.after.default:
            return source.all_input_nodes[1]
        source = source.all_input_nodes[0]
    return None


def _move_up(node: torch.fx.Node, before: torch.fx.Node, anchor: torch.fx.Node | None) -> None:
    """Move what an operand is made of in front of `before`, where it waits for `anchor`; what stands there already may have earlier readers."""
    if node < before:
        return
    waits = node.target is torch.ops.graphacc.after.default
    for source in node.all_input_nodes[:1] if waits else node.all_input_nodes:
        _move_up(source, before, anchor)
    if waits and anchor is not None:
        node.update_arg(1, anchor)
    before.prepend(node)


def _join(step: StepGraph, bucket: Bucket, at: torch.fx.Node, multiple: int = 1) -> None:
    """One collective in front of `at`; each rank's part of every member is padded to `multiple` elements."""
    edit, members = Editor(step.graph, at), _parameter_order(bucket.members)
    target: Any = at.target
    group: Any = at.args[1:]  # GATHER: ranks and axis; SCATTER: operation, ranks and axis; REDUCE: operation and axis
    ranks: int = group[1] if target is SCATTER else 1  # parts of what is given
    flat = [edit.view(_operand(node), [ranks, _operand(node).meta["val"].numel() // ranks]) for node in members]
    flat = [edit(aten.constant_pad_nd.default, part, [0, behind], 0) if (behind := -part.meta["val"].shape[1] % multiple) else part for part in flat]
    joined = edit(aten.cat.default, flat, 1)
    sent = edit(target, edit.view(joined, [joined.meta["val"].numel()]), *group)
    sent.meta["move"] = dataclasses.replace(at.meta["move"], value=members[0].meta["move"].value, size_bytes=bucket.size_bytes, tensors=len(members))
    parts: int = group[0] if target is GATHER else 1  # of what is received
    received = edit(collective.wait_tensor.default, sent)
    sums = {node: _sums_behind(node) for node in members}
    for following in zip(*sums.values(), strict=True):
        sent = edit(REDUCE, received, *following[0].args[1:])
        size = sum(node.meta["move"].size_bytes for node in following)
        sent.meta["move"] = dataclasses.replace(following[0].meta["move"], size_bytes=size, tensors=len(members))
        received = edit(collective.wait_tensor.default, sent)
    whole = edit.view(received, [parts, received.meta["val"].numel() // parts])
    start, pieces = 0, []
    for node, part in zip(members, flat):
        size = node.meta["val"].numel() // parts
        pieces.append(edit.view(edit(aten.slice.Tensor, whole, 1, start, start + size), list(node.meta["val"].shape)))
        start += part.meta["val"].shape[1]
    for node, piece in zip(members, pieces):  # behind the loop above, which inserts in front of one of them
        (waited,) = (sums[node][-1] if sums[node] else node).users
        waited.replace_all_uses_with(piece)
        _move_behind(piece)
        for item in reversed([node, *sums[node]]):
            (waited,) = item.users
            step.graph.erase_node(waited)
            step.graph.erase_node(item)
