"""What a rank of ring attention holds, and the operators it writes: blocks, parcels, the zigzag, calls of the kernel, gradients.

Legend: see `ring`. A "part" is what one call of the kernel gave for some queries over some keys: output and log-sum-exp.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphacc.passes.partition.plan import Role
from graphacc.passes.partition.rules import Call

aten, ops = torch.ops.aten, torch.ops.graphacc
NAMES = [argument.name for argument in ops.flash_attention.default._schema.arguments]
BACKWARD_NAMES = [argument.name for argument in ops.flash_attention_backward.default._schema.arguments]
Node = Any
Part = tuple[Node, Node]
Pair = tuple[Node | None, Node | None]  # something of the low and of the high queries; without halves, the first is all


@dataclasses.dataclass(frozen=True)
class Block:
    """One call of the kernel: which of a rank's queries see which of the keys that it holds in step j.

    "chosen" is the low half where the keys come from an earlier rank, else the high half.
    """

    step: int
    queries: str  # "low", "high", "whole" or "chosen"
    keys: str
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class Halves:
    """A local tensor as its two halves along `dim`; one that is absent, broadcasts along it, or is not cut serves as both."""

    low: Node | None
    high: Node | None
    dim: int


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Tensors that travel together: one message for all of a dtype, in which they stand one behind the other."""

    buffers: Mapping[torch.dtype, Node]
    shapes: tuple[tuple[torch.dtype, list[int]] | None, ...]  # of the tensors; None: there is none

    def map(self, function: Callable[..., Node], *others: "Parcel") -> "Parcel":
        """The parcel of what a function makes of each buffer, and of those of other parcels of the same shapes."""
        return Parcel({dtype: function(x, *(other.buffers[dtype] for other in others)) for dtype, x in self.buffers.items()}, self.shapes)


@dataclasses.dataclass
class Ring:
    """The local values of one attention, and how to write operators on them."""

    build: Any
    call: Call
    values: dict[str, Any]
    outer: int = 1  # of the keys' split
    earlier: Node | None = None  # bool, 0-d: the keys of this step come from an earlier rank; set where that counts

    @property
    def ranks(self) -> int:
        return self.call.num_ranks

    @property
    def causal(self) -> bool:
        return self.call["right"] == 0

    @property
    def wide(self) -> torch.dtype:
        """What outputs and gradients are added up in."""
        return torch.promote_types(self.values["q"].meta["val"].dtype, torch.float32)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.build.call(target, *args, **kwargs)

    def to(self, x: Node, dtype: torch.dtype) -> Node:
        return x if x.meta["val"].dtype == dtype else self.op(aten._to_copy.default, x, dtype=dtype)

    def narrowed(self, pair: Sequence[Node | None], name: str) -> Pair:
        """What was added up, in the dtype of an argument."""
        low, high = (None if x is None else self.to(x, self.values[name].meta["val"].dtype) for x in pair)
        return low, high

    def add(self, x: Node | None, y: Node) -> Node:
        return y if x is None else self.op(aten.add.Tensor, x, y)

    def zeros(self, x: Node) -> Node:
        value = x.meta["val"]
        return self.op(aten.full.default, list(value.shape), 0, dtype=value.dtype, device=value.device)

    def number(self, value: float) -> Node:
        return self.op(aten.full.default, [], value, dtype=self.wide)

    def join(self, low: Node, high: Node, dim: int) -> Node:
        return self.op(aten.cat.default, [low, high], dim)

    def where(self, condition: Node, x: Node | None, y: Node | None) -> Node | None:
        return x if x is y else self.op(aten.where.self, condition, x, y)

    # Around the ring

    def parcel(self, tensors: Sequence[Node | None]) -> Parcel:
        buffers: dict[torch.dtype, list[Node]] = {}
        for x in tensors:
            if x is not None:
                buffers.setdefault(x.meta["val"].dtype, []).append(x)
        shapes = tuple(None if x is None else (x.meta["val"].dtype, [*x.meta["val"].shape]) for x in tensors)
        return Parcel({dtype: self._packed(found) for dtype, found in buffers.items()}, shapes)

    def _packed(self, tensors: Sequence[Node]) -> Node:
        if len(tensors) == 1:
            return tensors[0]
        if len({tuple(x.meta["val"].shape) for x in tensors}) > 1:
            tensors = [self.op(aten.view.default, self.contiguous(x), [-1]) for x in tensors]
        return self.op(aten.cat.default, list(tensors), 0)

    def unpacked(self, parcel: Parcel) -> list[Node | None]:
        """The tensors of a parcel, which are parts of its buffers."""
        found: list[Node | None] = []
        starts = dict.fromkeys(parcel.buffers, 0)
        for item in parcel.shapes:
            if item is None:
                found.append(None)
                continue
            dtype, shape = item
            x, start = parcel.buffers[dtype], starts[dtype]
            is_flat = x.meta["val"].dim() < len(shape)
            starts[dtype] = stop = start + (math.prod(shape) if is_flat else shape[0])
            part = x if size(x, 0) == stop - start else self.op(aten.slice.Tensor, x, 0, start, stop)
            found.append(self.op(aten.view.default, part, shape) if is_flat else part)
        return found

    def permute(self, parcel: Parcel, targets: Sequence[int], role: Role | None = None) -> Parcel:
        """What the rank has that sends to this one; rank i sends to ``targets[i]``."""
        if list(targets) == [*range(self.ranks)]:  # of two ranks, each has its first chunk
            return parcel
        return parcel.map(lambda x: self.build.permute_ranks(x, list(targets), role))

    def turn(self, parcel: Parcel, role: Role | None = Role.KEYS) -> Parcel:
        """One step around the ring."""
        return self.permute(parcel, [(rank + 1) % self.ranks for rank in range(self.ranks)], role)

    def keys_of_steps(self, keys: Sequence[Halves], *carried: list[Node | None]) -> Iterator[list[Halves]]:
        """The keys, values and segments that this rank holds in each step.

        They are read, and sent on, when the kernels of the step before have run, and what is carried from step to step is in memory. XLA's schedulers would bring
        the keys of all steps first, with nothing computed beside them, and keep them; choose the queries of all steps in one fusion, and keep those; and add up what the
        kernels give in one fusion behind the last.

        Args:
            carried: what the kernels' results are added to, or what every step reads; the lists are brought up to date between the steps.
        """
        parcel = self.turn(self.parcel([half for x in keys for half in self._travelling(x)]))
        yield list(keys)
        for step in range(1, self.ranks):
            earlier = self.op(aten.ge.Scalar, self.build.axis_index(), step) if self.causal else None
            buffers, (self.earlier,), *now = self._together(list(parcel.buffers.values()), [earlier], *carried)
            for held, tensors in zip(carried, now):
                held[:] = tensors
            parcel = Parcel(dict(zip(parcel.buffers, buffers)), parcel.shapes)
            tensors = iter(self.unpacked(parcel))
            if step < self.ranks - 1:
                parcel = self.turn(parcel)
            yield [dataclasses.replace(x, low=low, high=next(tensors) if self.causal else low) for x, low in zip(keys, tensors)]

    def _together(self, *lists: Sequence[Node | None]) -> list[list[Node | None]]:
        """The same tensors behind a barrier of all of them."""
        given = [x for tensors in lists for x in tensors if x is not None]
        called = self.op(ops.barrier.default, given)
        found = iter([self.op(operator.getitem, called, i) for i in range(len(given))])
        return [[None if x is None else next(found) for x in tensors] for tensors in lists]

    def _travelling(self, x: Halves) -> list[Node | None]:
        return [x.low, x.high] if self.causal else [x.low]

    def source(self, step: int) -> Node:
        """The rank whose keys this one holds in step j."""
        return self.op(aten.remainder.Scalar, self.op(aten.sub.Scalar, self.build.axis_index(), step), self.ranks)

    # Halves. The zigzag: chunk c of 2n lies with rank c // 2 outside, and with rank min(c, 2n - 1 - c) inside

    def halves(self, x: Node | None, dim: int) -> Halves:
        if not self.causal or x is None or size(x, dim) == 1:
            return Halves(x, x, dim)
        half = size(x, dim) // 2
        low, high = (self.op(aten.slice.Tensor, x, dim, start, start + half) for start in (0, half))
        return Halves(low, high, dim)

    def whole(self, x: Halves) -> Node | None:
        return x.low if x.low is x.high else self.join(x.low, x.high, x.dim)

    def pick(self, x: Halves, which: str) -> Node | None:
        """The low half, the high one, both, or the chosen one."""
        if which == "chosen":
            return x.low if x.low is x.high else self.where(self.earlier, x.low, x.high)
        return {"low": x.low, "high": x.high}[which] if which != "whole" else self.whole(x)

    def rows(self, *names: str) -> list[Halves]:
        """These arguments, dealt out zigzag where positions count, in two messages."""
        return self._dealt([(self.values[name], 1 if name.endswith("segments") else 2) for name in names])

    def again(self, rows: Sequence[Halves], anchor: Node) -> list[Halves]:
        """The same values behind another one, so that what is made of them is made again: a backward that read what the forward has made would
        keep the queries, and the keys of all ranks, of every step in between."""
        found = []
        for x in rows:
            low, high = (None if half is None else self.op(ops.after.default, half, anchor) for half in (x.low, x.high))
            found.append(Halves(low, low if x.low is x.high else high, x.dim))
        return found

    def bias_rows(self) -> list[Halves]:
        """The bias, with its queries."""
        x = self.values["bias"]
        if x is not None and len(shape := list(x.meta["val"].shape)) != 4:
            x = self.op(aten.view.default, x, [1] * (4 - len(shape)) + shape)
        return self._dealt([(x, 2)])

    def _dealt(self, tensors: Sequence[tuple[Node | None, int]]) -> list[Halves]:
        """From contiguous blocks to the zigzag. The even chunks go to different ranks each, and so do the odd ones."""
        found = [self.halves(x, dim) for x, dim in tensors]
        moves = [i for i, x in enumerate(found) if x.low is not x.high]
        if moves:
            first = self.permute(self.parcel([found[i].low for i in moves]), self._owners(0))
            second = self.permute(self.parcel([found[i].high for i in moves]), self._owners(1))
            for i, low, high in zip(moves, *map(self.unpacked, self._by_parity(first, second))):
                found[i] = dataclasses.replace(found[i], low=low, high=high)
        return found

    def collect(self, *pairs: Sequence[Node | None]) -> list[Node]:
        """From the zigzag to contiguous blocks, along dim 2: the inverse of dealing out, in two messages."""
        if not self.causal:
            return [low for low, _ in pairs]
        lows, highs = zip(*pairs)
        chunks = self._by_parity(self.parcel(lows), self.parcel(highs))
        halves = [self.unpacked(self.permute(parcel, _inverse(self._owners(odd)))) for odd, parcel in enumerate(chunks)]
        return [self.join(low, high, 2) for low, high in zip(*halves)]

    def _by_parity(self, first: Parcel, second: Parcel) -> tuple[Parcel, Parcel]:
        """Both, exchanged on ranks of odd numbers."""
        even = self._even_rank()
        return first.map(lambda x, y: self.where(even, x, y), second), first.map(lambda x, y: self.where(even, y, x), second)

    def _owners(self, odd: int) -> list[int]:
        chunks = [2 * rank + odd for rank in range(self.ranks)]
        return [min(chunk, 2 * self.ranks - 1 - chunk) for chunk in chunks]

    def _even_rank(self) -> Node:
        parity = self.op(aten.remainder.Scalar, self.build.axis_index(), 2)
        return self.op(aten.eq.Scalar, parity, 0)

    # Where a block lies

    def chunk(self, rank: Node, which: str) -> Node:
        """The number of a rank's low or high chunk of 2n."""
        if which == "low":
            return rank
        high = self.op(aten.add.Scalar, self.op(aten.neg.default, rank), 2 * self.ranks - 1)
        return self.pick(Halves(rank, high, 0), which)

    def start(self, block: Block, queries: Node, keys: Node) -> Node | None:
        """Where the block of these queries and keys lies in the global scores, for dropout."""
        if not self.call["dropout"]:
            return None
        numbers = [self.build.axis_index(), self.source(block.step)]
        if self.causal:
            numbers = [self.chunk(rank, which) for rank, which in zip(numbers, (block.queries, block.keys))]
        place = self._index([self.op(aten.mul.Scalar, number, size(x, 2)) for number, x in zip(numbers, (queries, keys))])
        place = self.op(aten.constant_pad_nd.default, place, [2, 0], 0)
        return place if self.values["start"] is None else self.op(aten.add.Tensor, self.values["start"], place)

    def bias(self, block: Block, bias: Halves) -> Node | None:
        """What of a bias [B or 1, H or 1, T or 1, S or 1] belongs to the block."""
        x = self.pick(bias, block.queries)
        if x is None or size(x, 3) == 1:
            return x
        source, count = self.source(block.step), self.ranks
        chunks = [source]
        if self.causal:
            wanted = ("low", "high") if block.keys == "whole" else (block.keys,)
            chunks, count = [self.chunk(source, which) for which in wanted], 2 * self.ranks
        lead, length = list(x.meta["val"].shape[:3]), size(x, 3) // count
        parts = self.op(aten.view.default, self.contiguous(x), [*lead, self.outer, count, length // self.outer])
        found = self.op(aten.index_select.default, parts, 4, self._index(chunks))
        return self.op(aten.view.default, found, [*lead, length * len(chunks)])

    def contiguous(self, x: Node) -> Node:
        return x if x.meta["val"].is_contiguous() else self.op(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _index(self, numbers: Sequence[Node]) -> Node:
        """int64[len(numbers)] of 0-d numbers."""
        return self.op(aten.cat.default, [self.op(aten.view.default, number, [1]) for number in numbers], 0)

    # Calls of the kernel

    def attend(self, block: Block, queries: list[Halves], keys: list[Halves], bias: list[Halves]) -> Part:
        """Output and log-sum-exp of queries and their segments over keys, values and their segments."""
        given = self._given(block, ("q", "q_segments"), queries, keys, bias)
        called = self.op(ops.flash_attention.default, *(given[name] for name in NAMES))
        return self.to(self.op(operator.getitem, called, 0), self.wide), self.op(operator.getitem, called, 1)

    def attend_backward(self, block: Block, rows: list[Halves], keys: list[Halves], bias: list[Halves], lses: Pair, shares: Pair) -> list[Node]:
        """Gradients of queries, keys, values and, if wanted, the bias, over one block.

        Args:
            rows: gradient, queries, output over all keys, and segments of the queries.
            lses: of this block alone, [B, H, T] each.
            shares: the part of each row's softmax that lies in this block. A row's probabilities are those in the block times
                its share; as all is linear in them and in the gradient, the gradient takes the share.
        """
        given = self._given(block, ("grad", "q", "out", "q_segments"), rows, keys, bias)
        lse, share = (self._of_rows(block, pair) for pair in (lses, shares))
        dtype = given["grad"].meta["val"].dtype
        scaled = self.op(aten.mul.Tensor, self.to(given["grad"], self.wide), self.op(aten.unsqueeze.default, share, -1))
        given |= {"grad": self.to(scaled, dtype), "lse": lse}
        called = self.op(ops.flash_attention_backward.default, *(given[name] for name in BACKWARD_NAMES))
        return [self.to(self.op(operator.getitem, called, i), self.wide) for i in range(4 if given["bias_grad"] else 3)]

    def _given(self, block: Block, names: Sequence[str], rows: list[Halves], keys: list[Halves], bias: list[Halves]) -> dict[str, Any]:
        given = dict(self.values)
        for which, of, tensors in ((block.queries, names, rows), (block.keys, ("k", "v", "kv_segments"), keys)):
            given |= {name: self.pick(x, which) for name, x in zip(of, tensors, strict=True)}
        given |= {"bias": self.bias(block, *bias), "start": self.start(block, given["q"], given["k"])}
        return given | {"right": 0 if block.causal else -1}

    def _of_rows(self, block: Block, pair: Pair) -> Node:
        """One [B, H, T] for a block's queries out of those of the halves."""
        low, high = pair
        return self.pick(Halves(low, high if self.causal else low, 2), block.queries)

    def deliver(self, block: Block, part: Part) -> tuple[Part | None, Part | None]:
        """A part for the low and one for the high queries; over no key for the half that was not chosen."""
        if block.queries == "chosen":
            return self._unless(self.op(aten.logical_not.default, self.earlier), part), self._unless(self.earlier, part)
        if block.queries == "whole" and self.causal:
            out, lse = (self.halves(x, 2) for x in part)
            return (out.low, lse.low), (out.high, lse.high)
        return (None, part) if block.queries == "high" else (part, None)

    def _unless(self, condition: Node, part: Part) -> Part:
        out, lse = part
        return self.where(condition, self.zeros(out), out), self.where(condition, self.number(float("-inf")), lse)

    # Parts over disjoint keys; a log-sum-exp of -inf stands for no key

    def merge(self, so_far: Part, new: Part, count: int) -> Part:
        """The part over the keys of both; where there is no key, outputs over `count` blocks and one are averaged."""
        outs, lses = zip(so_far, new)
        top = self.op(aten.maximum.default, *lses)
        weights = self._weights(lses, top, (count, 1))
        total = self.op(aten.add.Tensor, *weights)
        scaled = [
            self.op(aten.mul.Tensor, out, self.op(aten.unsqueeze.default, self.op(aten.div.Tensor, weight, total), -1))
            for out, weight in zip(outs, weights)
        ]
        return self.op(aten.add.Tensor, *scaled), self.op(aten.add.Tensor, top, self.op(aten.log.default, total))

    def _weights(self, lses: Sequence[Node], top: Node, counts: Sequence[int]) -> list[Node]:
        """exp(lse - top), or the counts where `top` is -inf."""
        empty = self.op(aten.eq.Scalar, top, float("-inf"))
        base = self.where(empty, self.number(0), top)
        return [
            self.where(empty, self.number(count), self.op(aten.exp.default, self.op(aten.sub.Tensor, lse, base)))
            for lse, count in zip(lses, counts)
        ]

    def softmax_sums(self, blocks: Sequence[Pair]) -> tuple[list[Node | None], list[Node | None]]:
        """Of the rows of the low and of the high queries over all blocks: the largest log-sum-exp, and the sum of the softmax's terms relative to it."""
        tops: list[Node | None] = []
        sums: list[Node | None] = []
        for lses in zip(*blocks):
            given, top, total = [lse for lse in lses if lse is not None], None, None
            for lse in given:
                top = lse if top is None else self.op(aten.maximum.default, top, lse)
            for weight in self._weights(given, top, [1] * len(given)) if given else ():
                total = self.add(total, weight)
            tops.append(top)
            sums.append(total)
        return tops, sums

    def shares(self, lses: Pair, tops: Sequence[Node | None], sums: Sequence[Node | None]) -> Pair:
        """The part of each row's softmax that lies in a block; equal parts where there is no key. See `softmax_sums`."""
        low, high = (
            None if lse is None else self.op(aten.div.Tensor, *self._weights([lse], top, [1]), total) for lse, top, total in zip(lses, tops, sums)
        )
        return low, high


class Gradients:
    """Gradients of queries (which stay), of keys and values (which travel with them) and of the bias, added up block by block."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.queries: list[Node | None] = [None, None]  # of the low and the high half
        self.keys: list[list[Node | None]] = [[None, None], [None, None]]  # and of values, of this step,
        self.travelled: Parcel | None = None  # of the steps before, as it came,
        self.leaving: list[Node | None] = []  # and of all so far, as it is to travel on: the buffers of a parcel like `_total`
        self._total: Parcel | None = None
        self.bias: dict[tuple[int, int, int], Node] = {}  # (half of the queries, step, half of the keys) -> its part

    def add_up(self) -> None:
        """What the kernels of a step have given is added to what came; it leaves with the next turn."""
        ring = self.ring
        here = ring.parcel([half for pair in self.keys for half in (pair if ring.causal else pair[:1])])
        self._total = here if self.travelled is None else self.travelled.map(ring.add, here)
        self.leaving[:] = self._total.buffers.values()
        self.keys = [[None, None], [None, None]]

    def turn(self, role: Role | None = Role.KEYS) -> None:
        """One step around the ring."""
        assert self._total is not None
        self.travelled = self.ring.turn(Parcel(dict(zip(self._total.buffers, self.leaving)), self._total.shapes), role)

    def add(self, block: Block, parts: list[Node]) -> None:
        grad_q, *of_keys = parts[:3]
        self._add_to(self.queries, block.queries, grad_q)
        for pair, part in zip(self.keys, of_keys):
            self._add_to(pair, block.keys, part)
        if len(parts) == 4:
            self._add_bias(block, parts[3])

    def _add_to(self, pair: list, which: str, part: Node) -> None:
        for half, x in enumerate(self._delivered(which, part, 2)):
            if x is not None:
                pair[half] = self.ring.add(pair[half], x)

    def _delivered(self, which: str, part: Node, dim: int, is_alike: bool = False) -> Pair:
        """`part` for the low and for the high half; zeros for the one that was not chosen. All in the first where there are no halves.

        Args:
            is_alike: it is the gradient of one number for all places along `dim`. A half of one place has size 1, too.
        """
        ring = self.ring
        if not ring.causal or is_alike:
            return part, None
        if which == "chosen":
            zeros = ring.zeros(part)
            return ring.where(ring.earlier, part, zeros), ring.where(ring.earlier, zeros, part)
        if which == "whole":
            halves = ring.halves(part, dim)
            return halves.low, halves.high
        return (None, part) if which == "high" else (part, None)

    def _add_bias(self, block: Block, part: Node) -> None:
        rows = self._delivered(block.queries, part, 2, self._is_alike(-2))
        for q_half, of_rows in enumerate(rows):
            columns = (None, None) if of_rows is None else self._delivered(block.keys, of_rows, 3, self._is_alike(-1))
            for k_half, x in enumerate(columns):
                if x is not None:
                    place = q_half, block.step, k_half
                    self.bias[place] = self.ring.add(self.bias.get(place), x)

    def _is_alike(self, dim: int) -> bool:
        """Whether the bias has one number for all queries (-2) or for all keys (-1)."""
        shape = self.ring.values["bias"].meta["val"].shape
        return len(shape) < -dim or shape[dim] == 1

    def results(self) -> list[Node]:
        """Gradients of q, k, v and the bias (of shape [0] if it takes none), local, in their dtypes; those of keys have come home."""
        ring = self.ring
        home = iter(ring.unpacked(self.travelled))
        pairs = [self.queries, *([x, next(home) if ring.causal else None] for x in home)]
        found = ring.collect(*(ring.narrowed(pair, name) for name, pair in zip("qkv", pairs)))
        if self.bias:
            bias = ring.values["bias"].meta["val"]
            grad = ring.to(ring.contiguous(self._bias_gradient()), bias.dtype)
            return [*found, ring.op(aten.view.default, grad, list(bias.shape))]
        value = ring.values["q"].meta["val"]
        return [*found, ring.op(aten.full.default, [0], 0, dtype=value.dtype, device=value.device)]

    def _bias_gradient(self) -> Node:
        """[B or 1, H or 1, T or 1, S or 1]."""
        rows = tuple(self._row(half) if any(place[0] == half for place in self.bias) else None for half in range(2))
        return rows[0] if rows[1] is None else self.ring.collect(rows)[0]

    def _row(self, q_half: int) -> Node:
        """All keys, in their order, for one half of the queries."""
        ring = self.ring
        some = next(part for place, part in self.bias.items() if place[0] == q_half)
        if self._is_alike(-1):
            total = None
            for place, part in self.bias.items():
                total = ring.add(total, part) if place[0] == q_half else total
            return total
        places = [(q_half, step, k_half) for k_half in range(2 if ring.causal else 1) for step in range(ring.ranks)]
        lead, length = list(some.meta["val"].shape[:3]), size(some, 3) // ring.outer
        blocks = [ring.contiguous(self.bias[place]) if place in self.bias else ring.zeros(some) for place in places]
        blocks = [ring.op(aten.view.default, x, [*lead, ring.outer, 1, length]) for x in blocks]
        joined = ring.op(aten.index_select.default, ring.op(aten.cat.default, blocks, 4), 4, self._order())
        return ring.op(aten.view.default, joined, [*lead, length * ring.outer * len(blocks)])

    def _order(self) -> Node:
        """int64: the step in which each chunk of the keys was here; chunk 2n - 1 - c travels with chunk c, and stands behind it."""
        ring = self.ring
        ranks = ring.op(aten.arange.start_step, 0, ring.ranks, 1, dtype=torch.int64)
        steps = ring.op(aten.remainder.Scalar, ring.op(aten.sub.Tensor, ring.build.axis_index(), ranks), ring.ranks)
        if not ring.causal:
            return steps
        return ring.join(steps, ring.op(aten.add.Scalar, ring.op(aten.flip.default, steps, [0]), ring.ranks), 0)


def size(x: Node, dim: int) -> int:
    return x.meta["val"].shape[dim]


def _inverse(targets: list[int]) -> list[int]:
    return [targets.index(rank) for rank in range(len(targets))]
