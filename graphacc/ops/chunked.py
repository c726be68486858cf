"""A part of a graph that runs chunk by chunk, one after the other, as one operator: what a chunk makes dies with it.

The part is written into an argument, as JSON: a graph that stands in a string is copied, compared, sent to another process and found in a
cache like any other argument. `Body` is that string as a graph of operators again.

Legend: C chunks. A dim that is split is read as [outer, C, rest]; chunk i has [outer, 1, rest], flattened.
"""

import dataclasses
import functools
import json
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from graphacc._compat.torch_ import fake_mode, new_graph

SUM, MAX, MIN, SAME = "sum", "max", "min", "same"
COMBINED = (SUM, MAX, MIN, SAME)
"""How a result that every chunk gives whole comes out of theirs; `SAME`: all give the same."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Dim `dim`, read as [outer, C, rest], has a chunk's part at [:, i, :]."""

    dim: int
    outer: int = 1

    def local(self, shape: Sequence[int], chunks: int) -> list[int]:
        """The shape of a chunk's part."""
        return [size // chunks if dim == self.dim else size for dim, size in enumerate(shape)]

    def whole(self, shape: Sequence[int], chunks: int) -> list[int]:
        """The shape of which a chunk has a part of `shape`."""
        return [size * chunks if dim == self.dim else size for dim, size in enumerate(shape)]

    def blocks(self, shape: Sequence[int], chunks: int) -> list[int]:
        """A whole shape with the chunks in a dim of their own, ``dim + 1``."""
        return [*shape[: self.dim], self.outer, chunks, shape[self.dim] // (self.outer * chunks), *shape[self.dim + 1 :]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Body:
    """What a chunk does.

    Attributes:
        chunks: how many there are.
        splits: of each operand that is split.
        results: of each result its split, or how it is combined.
        graph: placeholders are the number of the chunk (int64, 0-d), the chunk's parts of what is split, and what all chunks read whole; nodes
            carry ``val`` and ``module_path``. Nobody changes it.
    """

    chunks: int
    splits: tuple[Split, ...]
    results: tuple[Split | str, ...]
    graph: torch.fx.Graph

    @property
    def values(self) -> tuple[torch.fx.Node, ...]:
        """What a chunk gives, in the order of `results`."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    @property
    def targets(self) -> tuple[torch._ops.OpOverload, ...]:
        """The operators that it calls, once each."""
        return tuple(dict.fromkeys(node.target for node in self.graph.nodes if node.op == "call_function" and node.target is not operator.getitem))  # type: ignore[misc]

    def accumulates_in(self, index: int) -> torch.dtype:
        """In what a result is added up: 16 bits of a sum would be rounded again by every chunk."""
        dtype = self.values[index].meta["val"].dtype
        return torch.float32 if self.results[index] == SUM and dtype in (torch.bfloat16, torch.float16) else dtype

    def write(self) -> str:
        """The text that `read` reads."""
        numbers: dict[torch.fx.Node, int] = {}
        inputs, nodes = [], []
        for node in self.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                inputs.append(_form(node.meta["val"]))
            else:
                kwargs = {name: _plain(value, numbers) for name, value in node.kwargs.items()}
                target = "getitem" if node.target is operator.getitem else str(node.target)
                nodes.append([target, _plain(node.args, numbers), kwargs, _form(node.meta["val"]), node.meta.get("module_path") or ""])
            numbers[node] = len(numbers)
        results = [[numbers[node], how if isinstance(how, str) else [how.dim, how.outer]] for node, how in zip(self.values, self.results, strict=True)]
        content = dict(chunks=self.chunks, splits=[[split.dim, split.outer] for split in self.splits], inputs=inputs, nodes=nodes, results=results)
        return json.dumps(content, separators=(",", ":"))


@functools.lru_cache(maxsize=64)
def read(text: str) -> Body:
    """What a call of `chunked` runs, by its last argument."""
    content = json.loads(text)
    graph, found = new_graph(), []
    for i, form in enumerate(content["inputs"]):
        found.append(graph.placeholder(f"input_{i}"))
        found[-1].meta.update(val=_value(form), module_path="")
    for target, args, kwargs, form, path in content["nodes"]:
        called = operator.getitem if target == "getitem" else _overload(target)
        named = {name: _argument(value, found) for name, value in kwargs.items()}
        found.append(graph.call_function(called, tuple(_argument(value, found) for value in args), named))
        found[-1].meta.update(val=_value(form), module_path=path)
    graph.output(tuple(found[number] for number, _ in content["results"]))
    return Body(
        chunks=content["chunks"],
        splits=tuple(Split(*split) for split in content["splits"]),
        results=tuple(how if isinstance(how, str) else Split(*how) for _, how in content["results"]),
        graph=graph,
    )


def body_of(node: torch.fx.Node) -> Body | None:
    """The body of a call of `chunked`; None for other nodes."""
    return read(str(node.args[2])) if node.target is torch.ops.graphacc.chunked.default else None


@torch.library.custom_op("graphacc::chunked", mutates_args=())
def chunked(split: list[Tensor], whole: list[Tensor], body: str) -> list[Tensor]:
    """Run `body` for one chunk after the other.

    Args:
        split: of which a chunk reads its part.
        whole: read by all chunks.
        body: written by `Body.write`.

    Returns:
        For each result of the body the chunks' parts as one tensor, or all chunks' values combined.
    """
    loop = read(body)
    found: list[list[Tensor]] = []
    for i in range(loop.chunks):
        parts = [_part(x, at, loop.chunks, i) for x, at in zip(split, loop.splits, strict=True)]
        found.append(_run(loop, [torch.tensor(i), *parts, *whole]))
    return [_joined([values[k] for values in found], how, loop.accumulates_in(k)) for k, how in enumerate(loop.results)]


@chunked.register_fake
def _(split, whole, body):
    loop, made = read(body), []
    for x, at, inner in zip(split, loop.splits, list(loop.graph.nodes)[1:]):
        assert at.local(x.shape, loop.chunks) == list(inner.meta["val"].shape), f"chunked: a chunk of {list(x.shape)} is no {list(inner.meta['val'].shape)}"
    for node, how in zip(loop.values, loop.results, strict=True):
        value = node.meta["val"]
        shape = how.whole(value.shape, loop.chunks) if isinstance(how, Split) else list(value.shape)
        made.append((split or whole)[0].new_empty(shape, dtype=value.dtype))
    return made


def _part(x: Tensor, at: Split, chunks: int, index: int) -> Tensor:
    blocks = x.reshape(at.blocks(x.shape, chunks)).select(at.dim + 1, index)
    return blocks.reshape(at.local(x.shape, chunks)).clone()


def _run(loop: Body, inputs: list[Tensor]) -> list[Tensor]:
    given, values = iter(inputs), dict[torch.fx.Node, Any]()
    for node in loop.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            assert callable(node.target), "a body holds calls"
            values[node] = node.target(*args, **kwargs)
    return [values[node] for node in loop.values]


def _joined(parts: list[Tensor], how: Split | str, accumulated: torch.dtype) -> Tensor:
    if isinstance(how, Split):
        apart = [part.unflatten(how.dim, (how.outer, -1)) for part in parts]
        return torch.stack(apart, how.dim + 1).flatten(how.dim, how.dim + 2)
    if how == SAME:
        return parts[-1].clone()
    combine = {SUM: torch.add, MAX: torch.maximum, MIN: torch.minimum}[how]
    return functools.reduce(combine, [part.to(accumulated) for part in parts]).to(parts[0].dtype, copy=True)


# ---- text

_TAGGED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def _plain(value: Any, numbers: dict[torch.fx.Node, int]) -> Any:
    """An argument as JSON; what JSON lacks is a dict of one entry."""
    if isinstance(value, torch.fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_plain(item, numbers) for item in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for name, kind in _TAGGED.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}, which the text of a body does not know")


def _argument(value: Any, found: list[torch.fx.Node]) -> Any:
    if isinstance(value, list):
        return [_argument(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "node":
        return found[content]
    return torch.device(content) if name == "device" else getattr(torch, content)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch.")]
    return {"several": [_form(item) for item in value]} if isinstance(value, (tuple, list)) else None


def _value(form: Any) -> Any:
    if isinstance(form, dict):
        return [_value(item) for item in form["several"]]
    if form is None:
        return None
    shape, stride, dtype = form
    with fake_mode():
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))


def _overload(name: str) -> torch._ops.OpOverload:
    return functools.reduce(getattr, name.split("."), torch.ops)  # type: ignore[return-value]
