"""What a rank of ring attention holds, and the operators it writes: blocks, the zigzag, calls of the kernel, gradients.

Legend: see `ring`. A "part" is what one call of the kernel gave for some queries over some keys: output and log-sum-exp.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch

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
    """A local tensor and its two halves along `dim`; one that is absent or broadcasts along it serves both."""

    whole: Node | None
    low: Node | None
    high: Node | None
    dim: int


@dataclasses.dataclass
class Ring:
    """The local values of one attention, and how to write operators on them."""

    build: Any
    call: Call
    values: dict[str, Any]
    outer: int = 1  # of the keys' split

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

    def permute(self, x: Node, targets: Sequence[int]) -> Node:
        """`x` of the rank that sends to this one; rank i sends to ``targets[i]``."""
        return self.build.permute_ranks(x, list(targets))

    def turn(self, x: Node | None) -> Node | None:
        """One step around the ring."""
        return None if x is None else self.permute(x, [(rank + 1) % self.ranks for rank in range(self.ranks)])

    def source(self, step: int) -> Node:
        """The rank whose keys this one holds in step j."""
        return self.op(aten.remainder.Scalar, self.op(aten.sub.Scalar, self.build.axis_index(), step), self.ranks)

    def earlier(self, step: int) -> Node:
        """bool, 0-d: the keys of step j come from an earlier rank."""
        return self.op(aten.ge.Scalar, self.build.axis_index(), step)

    # Halves. The zigzag: chunk c of 2n lies with rank c // 2 outside, and with rank min(c, 2n - 1 - c) inside

    def halves(self, x: Node | None, dim: int) -> Halves:
        if not self.causal or x is None or size(x, dim) == 1:
            return Halves(x, x, x, dim)
        half = size(x, dim) // 2
        low, high = (self.op(aten.slice.Tensor, x, dim, start, start + half) for start in (0, half))
        return Halves(x, low, high, dim)

    def pick(self, of: Sequence, which: str, step: int) -> Any:
        """One of (whole, low, high), or the chosen half."""
        whole, low, high = of
        if which != "chosen":
            return {"whole": whole, "low": low, "high": high}[which]
        return low if low is high else self.where(self.earlier(step), low, high)

    def rows(self, *names: str) -> list[Halves]:
        """These arguments, dealt out zigzag where positions count."""
        found = []
        for name in names:
            x, dim = self.values[name], 1 if name.endswith("segments") else 2
            if name == "bias" and x is not None:
                shape = list(x.meta["val"].shape)
                x = x if len(shape) == 4 else self.op(aten.view.default, x, [1] * (4 - len(shape)) + shape)
            found.append(self.halves(self._deal(x, dim), dim))
        return found

    def _deal(self, x: Node | None, dim: int) -> Node | None:
        """From contiguous blocks to the zigzag. The even chunks go to different ranks each, and so do the odd ones."""
        if not self.causal or x is None or size(x, dim) == 1:
            return x
        parts = self.halves(x, dim)
        first, second = self.permute(parts.low, self._owners(0)), self.permute(parts.high, self._owners(1))
        even = self._even_rank()
        return self.join(self.where(even, first, second), self.where(even, second, first), dim)

    def collect(self, pair: Pair, dim: int) -> Node:
        """From the zigzag to contiguous blocks: the inverse of dealing out."""
        if not self.causal:
            return pair[0]
        low, high = pair
        even = self._even_rank()
        first, second = self.where(even, low, high), self.where(even, high, low)
        back = [_inverse(self._owners(odd)) for odd in (0, 1)]
        return self.join(self.permute(first, back[0]), self.permute(second, back[1]), dim)

    def _owners(self, odd: int) -> list[int]:
        chunks = [2 * rank + odd for rank in range(self.ranks)]
        return [min(chunk, 2 * self.ranks - 1 - chunk) for chunk in chunks]

    def _even_rank(self) -> Node:
        parity = self.op(aten.remainder.Scalar, self.build.axis_index(), 2)
        return self.op(aten.eq.Scalar, parity, 0)

    # Where a block lies

    def chunk(self, rank: Node, which: str, step: int) -> Node:
        """The number of a rank's low or high chunk of 2n."""
        if which == "low":
            return rank
        high = self.op(aten.add.Scalar, self.op(aten.neg.default, rank), 2 * self.ranks - 1)
        return self.pick((None, rank, high), which, step)

    def start(self, block: Block, queries: Node, keys: Node) -> Node | None:
        """Where the block of these queries and keys lies in the global scores, for dropout."""
        if not self.call["dropout"]:
            return None
        numbers = [self.build.axis_index(), self.source(block.step)]
        if self.causal:
            numbers = [self.chunk(rank, which, block.step) for rank, which in zip(numbers, (block.queries, block.keys))]
        place = self._index([self.op(aten.mul.Scalar, number, size(x, 2)) for number, x in zip(numbers, (queries, keys))])
        place = self.op(aten.constant_pad_nd.default, place, [2, 0], 0)
        return place if self.values["start"] is None else self.op(aten.add.Tensor, self.values["start"], place)

    def bias(self, block: Block, bias: Halves) -> Node | None:
        """What of a bias [B or 1, H or 1, T or 1, S or 1] belongs to the block."""
        x = self.pick((bias.whole, bias.low, bias.high), block.queries, block.step)
        if x is None or size(x, 3) == 1:
            return x
        source, count = self.source(block.step), self.ranks
        chunks = [source]
        if self.causal:
            wanted = ("low", "high") if block.keys == "whole" else (block.keys,)
            chunks, count = [self.chunk(source, which, block.step) for which in wanted], 2 * self.ranks
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
            given |= {name: self.pick((x.whole, x.low, x.high), which, block.step) for name, x in zip(of, tensors, strict=True)}
        given |= {"bias": self.bias(block, *bias), "start": self.start(block, given["q"], given["k"])}
        return given | {"right": 0 if block.causal else -1}

    def _of_rows(self, block: Block, pair: Pair) -> Node:
        """One [B, H, T] for a block's queries out of those of the halves."""
        if block.queries == "whole":
            return self.join(*pair, 2) if self.causal else pair[0]
        return self.pick((None, *pair), block.queries, block.step)

    def deliver(self, block: Block, part: Part) -> tuple[Part | None, Part | None]:
        """A part for the low and one for the high queries; over no key for the half that was not chosen."""
        if block.queries == "chosen":
            earlier = self.earlier(block.step)
            return self._unless(self.op(aten.logical_not.default, earlier), part), self._unless(earlier, part)
        if block.queries == "whole" and self.causal:
            out, lse = (self.halves(x, 2) for x in part)
            return (out.low, lse.low), (out.high, lse.high)
        return (None, part) if block.queries == "high" else (part, None)

    def _unless(self, condition: Node, part: Part) -> Part:
        out, lse = part
        return self.where(condition, self.zeros(out), out), self.where(condition, self.number(float("-inf")), lse)

    # Parts over disjoint keys; a log-sum-exp of -inf stands for no key

    def merge(self, so_far: Part | None, new: Part, count: int) -> Part:
        """The part over the keys of both; where there is no key, outputs over `count` blocks and one are averaged."""
        if so_far is None:
            return new
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

    def shares(self, blocks: Sequence[Pair]) -> list[Pair]:
        """For every block the part of each row's softmax that lies in it; equal parts where there is no key."""
        halves = []
        for lses in zip(*blocks):
            given = [lse for lse in lses if lse is not None]
            found = iter(self._shares(given) if given else ())
            halves.append([None if lse is None else next(found) for lse in lses])
        return list(zip(*halves))

    def _shares(self, lses: Sequence[Node]) -> list[Node]:
        top = lses[0]
        for lse in lses[1:]:
            top = self.op(aten.maximum.default, top, lse)
        weights = self._weights(lses, top, [1] * len(lses))
        total = None
        for weight in weights:
            total = self.add(total, weight)
        return [self.op(aten.div.Tensor, weight, total) for weight in weights]


class Gradients:
    """Gradients of queries (which stay), of keys and values (which travel with them) and of the bias, added up block by block."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.queries: list[Node | None] = [None, None]  # of the low and the high half
        self.keys: list[list[Node | None]] = [[None, None], [None, None]]
        self.bias: dict[tuple[int, int, int], Node] = {}  # (half of the queries, step, half of the keys) -> its part

    def turn(self) -> None:
        """One step around the ring."""
        self.keys = [[self.ring.turn(x) for x in pair] for pair in self.keys]

    def add(self, block: Block, parts: list[Node]) -> None:
        grad_q, *of_keys = parts[:3]
        self._add_to(self.queries, block.queries, block.step, grad_q)
        for pair, part in zip(self.keys, of_keys):
            self._add_to(pair, block.keys, block.step, part)
        if len(parts) == 4:
            self._add_bias(block, parts[3])

    def _add_to(self, pair: list, which: str, step: int, part: Node) -> None:
        for half, x in enumerate(self._delivered(which, step, part, 2)):
            if x is not None:
                pair[half] = self.ring.add(pair[half], x)

    def _delivered(self, which: str, step: int, part: Node, dim: int, is_alike: bool = False) -> Pair:
        """`part` for the low and for the high half; zeros for the one that was not chosen. All in the first where there are no halves.

        Args:
            is_alike: it is the gradient of one number for all places along `dim`. A half of one place has size 1, too.
        """
        ring = self.ring
        if not ring.causal or is_alike:
            return part, None
        if which == "chosen":
            zeros, earlier = ring.zeros(part), ring.earlier(step)
            return ring.where(earlier, part, zeros), ring.where(earlier, zeros, part)
        if which == "whole":
            halves = ring.halves(part, dim)
            return halves.low, halves.high
        return (None, part) if which == "high" else (part, None)

    def _add_bias(self, block: Block, part: Node) -> None:
        rows = self._delivered(block.queries, block.step, part, 2, self._is_alike(-2))
        for q_half, of_rows in enumerate(rows):
            columns = (None, None) if of_rows is None else self._delivered(block.keys, block.step, of_rows, 3, self._is_alike(-1))
            for k_half, x in enumerate(columns):
                if x is not None:
                    place = q_half, block.step, k_half
                    self.bias[place] = self.ring.add(self.bias.get(place), x)

    def _is_alike(self, dim: int) -> bool:
        """Whether the bias has one number for all queries (-2) or for all keys (-1)."""
        shape = self.ring.values["bias"].meta["val"].shape
        return len(shape) < -dim or shape[dim] == 1

    def results(self) -> list[Node]:
        """Gradients of q, k, v and the bias (of shape [0] if it takes none), local, in their dtypes."""
        ring = self.ring
        found = [ring.collect(tuple(pair), 2) for pair in (self.queries, *self.keys)]
        found = [ring.to(x, ring.values[name].meta["val"].dtype) for name, x in zip("qkv", found)]
        if self.bias:
            bias = ring.values["bias"].meta["val"]
            grad = ring.to(ring.contiguous(self._bias_gradient()), bias.dtype)
            return [*found, ring.op(aten.view.default, grad, list(bias.shape))]
        value = ring.values["q"].meta["val"]
        return [*found, ring.op(aten.full.default, [0], 0, dtype=value.dtype, device=value.device)]

    def _bias_gradient(self) -> Node:
        """[B or 1, H or 1, T or 1, S or 1]."""
        rows = tuple(self._row(half) if any(place[0] == half for place in self.bias) else None for half in range(2))
        return rows[0] if rows[1] is None else self.ring.collect(rows, 2)

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
