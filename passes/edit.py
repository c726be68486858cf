"""Writing into graphs: what a call gives, inserted calls, chains of single users.

What an operator gives for operands of certain shapes, strides and dtypes is asked of PyTorch once (`infer`). The layers of a model
repeat, and a search partitions one step many times, so that nearly every question has been answered before. Fake values are
descriptions, which nodes share.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import as_fake, fake_mode, is_fake
from graphacc.ops.facts import OpKind, of_kind

aten = torch.ops.aten
_MAX_ANSWERS = 1 << 17
_NOT_ONE = torch.device("meta")  # stands for a value that has no kernel to ask


class _Answers:
    """Memory of `infer`: keys hold numbers that stand for descriptions of fake values."""

    def __init__(self):
        self.count = itertools.count()  # goes on when all is forgotten: no number has two meanings
        self.forget()

    def forget(self) -> None:
        self.results: dict[tuple, Any] = {}
        self.numbers: dict[tuple, int] = {}  # description -> its number
        self.of_value: dict[int, tuple[int, torch.Tensor]] = {}  # id -> number and the value, which keeps the id taken
        self.metas: dict[int, torch.Tensor] = {}  # number -> a tensor of the meta device that is like the value

    def number(self, value: torch.Tensor) -> int:
        known = self.of_value.get(id(value))
        if known is None:
            if len(self.of_value) > _MAX_ANSWERS or len(self.results) > _MAX_ANSWERS:
                self.forget()
            description = (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
            number = self.numbers.get(description)
            if number is None:
                number = self.numbers[description] = next(self.count)
            known = self.of_value[id(value)] = number, value
        return known[0]

    def meta(self, value: torch.Tensor) -> torch.Tensor:
        number = self.number(value)
        found = self.metas.get(number)
        if found is None:
            found = self.metas[number] = _meta_like(value)
        return found


def _meta_like(value: torch.Tensor) -> torch.Tensor:
    first = value.storage_offset()
    if first == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    length = first + sum((n - 1) * step for n, step in zip(value.shape, value.stride())) + 1 if value.numel() else first
    return torch.empty(length, dtype=value.dtype, device="meta").as_strided(value.shape, value.stride(), first)


_answers = _Answers()
_META_KERNELS = of_kind(OpKind.SAME, OpKind.CAST, OpKind.RESHAPE, OpKind.SQUEEZE, OpKind.PERMUTE, OpKind.EXPAND, OpKind.PART, OpKind.PRODUCT) | {
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.sum.dim_IntList,
}


def infer(target: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The fake value of ``target(*args, **kwargs)``, where nodes stand for their fake values.

    Raises:
        whatever the operator raises for such operands.
    """
    if target is operator.getitem:
        source = args[0]
        return (source.meta["val"] if isinstance(source, fx.Node) else source)[args[1]]
    try:
        key = target, _key(args), _key(tuple(kwargs.items())) if kwargs else (), torch.get_default_dtype()
        if (known := _answers.results.get(key, key)) is not key:
            return known
    except TypeError:  # an argument that cannot be a key, or a value that is no tensor
        key = None
    result = None if key is None else _by_meta_kernel(target, args, kwargs)
    if result is None:
        values, named = fx.map_arg((args, kwargs), lambda node: _computed(node.meta["val"]))
        with fake_mode(), torch.no_grad():
            result = pytree.tree_map(_computed, target(*values, **named))
    if key is not None:
        _answers.results[key] = result
    return result


def _by_meta_kernel(target: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The fake value of an operator of one result, by the kernel of the meta device, in which the dispatch of fake tensors ends as well, a millisecond later.

    None for operators that are not known to be described by it alone, such as those that make tensors, or look at devices.
    """
    if target not in _META_KERNELS and torch.Tag.pointwise not in target.tags:
        return None
    devices: set[torch.device] = set()

    def like(node: fx.Node) -> torch.Tensor:
        value = node.meta["val"]
        devices.add(value.device if is_fake(value) and not value.is_complex() else _NOT_ONE)
        return _answers.meta(value)

    values, named = fx.map_arg((args, kwargs), like)
    named = dict(named)
    if len(devices) != 1 or _NOT_ONE in devices or named.pop("device", None) not in (None, *devices):
        return None
    with torch.no_grad():
        found = target(*values, **named)
    return as_fake(found, *devices) if type(found) is torch.Tensor else None  # of another type where a mode of torch's is on


def _computed(value: Any) -> Any:
    """A fake value without the bits by which torch defers conjugation and negation: in a graph these are operators like others."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.conj() if value.is_conj() else value
    return aten._neg_view.default(value) if value.is_neg() else value


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is fx.Node:
        of = value.meta["val"]
        if not isinstance(of, torch.Tensor):
            raise TypeError
        return "n", _answers.number(of)
    if isinstance(value, (tuple, list)):
        return kind is list, *[_key(item) for item in value]
    return constant(value)


def constant(value: Any) -> Any:
    """A key of an argument that is no tensor; it tells 1 from 1.0 and True, and 0.0 from -0.0, which compare equal."""
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    return kind, repr(value) if isinstance(value, (float, complex)) else value


def description(value: torch.Tensor) -> int:
    """A number that fake values share if and only if shape, strides, offset, dtype and device are the same."""
    return _answers.number(value)


class Editor:
    """Inserts calls in front of a node, from which they take phase, module and source line.

    Args:
        like: the node to take these from instead.
        meta: further entries of the calls' `meta`.
        without: entries that are not taken.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node | None = None, meta: Mapping[str, Any] = MappingProxyType({}), without: Collection[str] = ()):
        self.graph, self.before = graph, before
        taken = (before if like is None else like).meta
        self.meta = {key: value for key, value in taken.items() if key not in ("move", "val", *without)} | dict(meta)

    def __call__(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        return self._insert(target, args, kwargs, infer(target, args, kwargs))

    def repeat(self, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        """The call of `node` with operands of the same form as its own: the result is like its own, too."""
        assert callable(node.target), f"{node.name} is no call"
        return self._insert(node.target, args, kwargs, node.meta["val"])

    def _insert(self, target: Callable, args: tuple, kwargs: dict[str, Any], value: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, val=value)
        return node

    def item(self, source: fx.Node, index: int) -> fx.Node:
        """One of several results."""
        return self(operator.getitem, source, index)

    def view(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """`x` in another shape, made dense first where strides forbid a view."""
        if list(x.meta["val"].shape) == shape:
            return x
        if not x.meta["val"].is_contiguous():
            x = self(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self(aten.view.default, x, shape)


def shape_of(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def items(node: fx.Node) -> dict[int, fx.Node]:
    """Index -> the getitem of a node with several results."""
    return {user.args[1]: user for user in node.users}
