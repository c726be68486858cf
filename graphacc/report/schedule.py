"""The schedule of a compiled program, read out of its optimised HLO: what runs between the start and the end of a collective, and
how long what it gathers is kept.

The instructions of a computation stand in the order in which they run (`is_scheduled=true`, which XLA's CPU and GPU compilers
leave). A collective is one instruction, during which nothing else runs, or two, X-start and X-done.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$")
_VALUE = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_ARRAY = re.compile(r"(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")
_COMPUTES = ("fusion", "custom-call", "dot", "convolution", "while", "conditional", "call", "sort", "scatter", "reduce", "reduce-window", "triangular-solve", "cholesky", "fft")
_FORWARDS = ("get-tuple-element", "bitcast", "tuple", "opt-barrier", "reshape")  # results in the memory of their operands
_COPIES = (*_FORWARDS, "parameter", "slice", "dynamic-slice", "constant", "copy", "transpose", "convert", "concatenate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    shape: str  # as HLO writes it; a tuple in brackets
    operands: tuple[str, ...]
    after: tuple[str, ...]  # what it waits for besides its operands
    calls: str  # the computation of a fusion
    text: str  # everything behind the opcode
    is_root: bool = False  # the result of the computation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """Memory that is in use from one instruction to another, both included."""

    first: int
    last: int
    size_bytes: int
    is_copy: bool = False  # of a part of another one


class Computation:
    """One computation of a scheduled module, in the order in which it runs."""

    def __init__(self, name: str, instructions: Sequence[Instruction], module: Mapping[str, "Computation"]):
        self.name, self.instructions, self._module = name, instructions, module
        self.places = {item.name: i for i, item in enumerate(instructions)}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {item.name: [] for item in self}
        for item in self:
            for operand in item.operands:
                if operand in found:
                    found[operand].append(item)
        return found

    def done(self, start: Instruction) -> Instruction:
        """Where a collective ends: its X-done, or itself."""
        if not start.opcode.endswith("-start"):
            return start
        (end,) = (item for item in self.users[start.name] if item.opcode == start.opcode.removesuffix("-start") + "-done")
        return end

    def between(self, start: Instruction) -> list[Instruction]:
        """What computes while a collective is on its way."""
        first, last = self.places[start.name], self.places[self.done(start).name]
        return [item for item in self.instructions[first:last] if item.opcode in _COMPUTES]

    @functools.cached_property
    def _waits(self) -> dict[str, frozenset[str]]:
        """Of every instruction the collectives (their first instructions) that must have ended before it."""
        waits: dict[str, frozenset[str]] = {}
        for item in self:
            before = [name for name in (*item.operands, *item.after) if name in waits]
            found = frozenset().union(*(waits[name] for name in before))
            ends = {name for name in before if kind_of(self.instructions[self.places[name]]) is not None}
            waits[item.name] = found | ends
        return waits

    def chained(self, kind: str) -> list[Instruction]:
        """The collectives of a kind that wait for another of their kind."""
        members = {item.name for item in self if kind_of(item) == kind}
        return [item for item in self if item.name in members and self._waits[item.name] & members]

    def kept(self, start: Instruction) -> list[Buffer]:
        """The memory of a collective's result: of every tensor of it, and of what is copied out of it, from when until when it is needed."""
        done = self.done(start)
        return self._buffers(done, self.places[start.name])

    def _buffers(self, item: Instruction, first: int) -> list[Buffer]:
        """The buffers of the results of an instruction, and of copies of them."""
        sizes = array_bytes(item.shape)
        last, copies = [self.places[item.name]] * len(sizes), []
        left: list[tuple[Instruction, int | None]] = [(item, None if len(sizes) > 1 else 0)]  # a value, and which of the buffers it is
        while left:
            value, index = left.pop()
            if value.is_root:
                last = [len(self.instructions) - 1 if index in (None, i) else place for i, place in enumerate(last)]
            for user in self.users[value.name]:
                if user.opcode == "get-tuple-element" and index is None:
                    left.append((user, int(_INDEX.search(user.text)[1])))
                    continue
                for i in range(len(sizes)) if index is None else (index,):
                    last[i] = max(last[i], self.places[user.name])
                if user.opcode in _FORWARDS:
                    left.append((user, index))
                elif self._copies(user):
                    copies.append(user)
        found = [Buffer(first=first, last=end, size_bytes=size) for end, size in zip(last, sizes, strict=True)]
        for copy in dict.fromkeys(copies):
            found += [dataclasses.replace(buffer, is_copy=True) for buffer in self._buffers(copy, self.places[copy.name])]
        return found

    def _copies(self, item: Instruction) -> bool:
        """Whether an instruction gives what it is given, or parts of it, in another memory."""
        if item.opcode == "fusion":
            return all(inner.opcode in _COPIES for inner in self._module[item.calls]) and len(item.operands) == 1
        return item.opcode in _COPIES


def kind_of(item: Instruction) -> str | None:
    """Which collective an instruction starts, if any."""
    kind = item.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def read_module(hlo: str) -> dict[str, Computation]:
    """The computations of an HLO module, or of a part of one, by their names; the entry is the last one."""
    module: dict[str, Computation] = {}
    name, lines = "", list[Instruction]()
    for line in _COMMENT.sub("", hlo).splitlines():
        if (head := _HEAD.match(line)) is not None:
            name, lines = head[1], []
        elif line.startswith("}"):
            module[name] = Computation(name, lines, module)
        elif (match := _INSTRUCTION.match(line)) is not None:
            lines.append(_instruction(match))
    if name not in module:
        module[name] = Computation(name, lines, module)
    return module


def _instruction(match: re.Match[str]) -> Instruction:
    operands, _, attributes = match["rest"].partition(")")
    called, control = _CALLED.search(attributes), _CONTROL.search(attributes)
    return Instruction(
        name=match["name"],
        opcode=match["opcode"],
        shape=match["shape"],
        operands=tuple(_VALUE.findall(operands)),
        after=tuple(_VALUE.findall(control[1])) if control else (),
        calls=called[1] if called else "",
        text=match["rest"],
        is_root=match["root"] is not None,
    )


def array_bytes(shape: str) -> list[int]:
    """Bytes of every array of an HLO shape."""
    return [math.ceil(_item_bytes(dtype) * math.prod(int(size) for size in dims.split(",") if size)) for dtype, dims in _ARRAY.findall(shape)]


def _item_bytes(dtype: str) -> float:
    if dtype == "pred":
        return 1
    digits = re.search(r"\d+", dtype)
    assert digits is not None, dtype
    return int(digits[0]) / 8


def most_at_once(buffers: Iterable[Buffer], weight: Callable[[Buffer], int] = lambda buffer: buffer.size_bytes) -> int:
    """The largest sum of weights (bytes) of buffers that are in use at one time."""
    changes = sorted((place, order, sign * weight(buffer)) for buffer in buffers for place, order, sign in ((buffer.first, 0, 1), (buffer.last, 1, -1)))
    return max(itertools.accumulate(change for _, _, change in changes), default=0)
