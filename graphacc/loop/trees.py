"""Arguments of calls as trees: `torch.utils._pytree` for what every step flattens again.

A tree of tuples, lists and dicts is walked here, in a tenth of the time; its `TreeSpec` is made by torch once for each form, so that equal forms have
the same object.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MAX_FORMS = 4096
"""Forms of trees whose specs are kept."""

_LEAF = torch.zeros((), device="cpu")
"""In place of any leaf: what classes of the user's and of torch's own (`PackedSequence`) are made of may have to be tensors."""

_leaves: set[type] = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, Tensor, torch.nn.Parameter}
"""Types that are no trees; a tuple of these alone is taken as a whole."""

_specs: dict[Hashable, pytree.TreeSpec] = {}
_paths: dict[int, tuple[pytree.TreeSpec, list[tuple[Any, ...]]]] = {}  # by the identity of a spec, which is kept
_builders: dict[int, tuple[pytree.TreeSpec, Callable[[list[Any]], Any]]] = {}  # the same


def are_leaves(*kinds: type) -> None:
    """Further types that are no trees: subclasses of tensors."""
    _leaves.update(kinds)


def flatten_call(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """`flatten` of both, quickly where they hold no trees."""
    if _leaves.issuperset(map(type, args)) and _leaves.issuperset(map(type, kwargs.values())):
        spec = _specs.get((tuple, (tuple, len(args)), (dict, tuple(kwargs))))
        if spec is not None:
            return [*args, *kwargs.values()], spec
    return flatten((args, kwargs))


def flatten(tree: object) -> tuple[list[Any], pytree.TreeSpec]:
    """`pytree.tree_flatten`."""
    found: list = []
    form = _walk(tree, found)
    try:
        spec = _specs.get(form)
    except TypeError:  # a class of the user's, what is no leaf of which cannot be hashed
        return found, pytree.tree_flatten(tree)[1]
    if spec is None:
        if len(_specs) >= MAX_FORMS:
            _specs.clear()
            _paths.clear()
        spec = _specs[form] = pytree.tree_flatten(tree)[1]
    return found, spec


def leaves(tree: object) -> list[Any]:
    """`pytree.tree_leaves`."""
    found: list = []
    _collect(tree, found)
    return found


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """`pytree.tree_unflatten`; of tuples, lists and dicts by one expression for each form."""
    known = _builders.get(id(spec))
    if known is None or known[0] is not spec:
        if len(_builders) >= MAX_FORMS:
            _builders.clear()
        known = _builders[id(spec)] = spec, _builder(spec)
    return known[1](leaves)


def _builder(spec: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    places = [torch.zeros((), device="cpu") for _ in range(spec.num_leaves)]
    try:
        text = _expression(pytree.tree_unflatten(places, spec), {id(place): index for index, place in enumerate(places)})
        if text is not None:
            return eval(f"lambda leaves: {text}")
    except Exception:  # a class of the user's takes no such tensors, or the tree is too deep for Python's parser
        pass
    return lambda leaves: pytree.tree_unflatten(leaves, spec)


def _expression(node: object, places: dict[int, int]) -> str | None:
    """What makes a tree of ``leaves``; None where it has other nodes than tuples, lists, and dicts with names.

    Args:
        places: identity of what stands for a leaf -> its number.
    """
    if id(node) in places:
        return f"leaves[{places[id(node)]}]"
    if type(node) is dict and all(type(key) is str for key in node):
        inside = {key: _expression(child, places) for key, child in node.items()}
        return None if None in inside.values() else "{" + ", ".join(f"{key!r}: {child}" for key, child in inside.items()) + "}"
    if type(node) is not tuple and type(node) is not list:
        return None
    children = [_expression(child, places) for child in node]
    if None in children:
        return None
    inner = "".join(f"{child}, " for child in children)
    return f"({inner})" if type(node) is tuple else f"[{inner}]"


def map_only(kind: type, function: Callable, tree):
    """`pytree.tree_map_only`; a tree without such a leaf is given back as it is."""
    return _mapped(kind, function, tree) if any(isinstance(leaf, kind) for leaf in leaves(tree)) else tree


def _mapped(kind: type, function: Callable, node):
    if isinstance(node, kind):
        return function(node)
    form = type(node)
    if form is tuple or form is list:
        return form([_mapped(kind, function, child) for child in node])
    if form is dict:
        return {key: _mapped(kind, function, child) for key, child in node.items()}
    return pytree.tree_map_only(kind, function, node)


def paths(spec: pytree.TreeSpec) -> list[tuple[Any, ...]]:
    """Where every leaf stands."""
    known = _paths.get(id(spec))
    if known is None or known[0] is not spec:
        tree = pytree.tree_unflatten([_LEAF] * spec.num_leaves, spec)
        known = _paths[id(spec)] = spec, [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    return known[1]


def _collect(node: Any, found: list) -> None:
    """Add the leaves of a tree."""
    kind = type(node)
    if kind is dict:
        node = node.values()
    elif kind is not tuple and kind is not list:
        if isinstance(node, Tensor) or (kind not in pytree.SUPPORTED_NODES and not isinstance(node, tuple)):
            found.append(node)
        else:
            found.extend(pytree.tree_leaves(node))
        return
    if _leaves.issuperset(map(type, node)):
        found += node
        return
    for child in node:
        _collect(child, found)


def _walk(node: Any, found: list) -> Hashable:
    """Add the leaves of a tree, and return what tells its form: two trees of one form have equal specs."""
    kind = type(node)
    if kind is tuple or kind is list:
        if _leaves.issuperset(map(type, node)):
            found += node
            return kind, len(node)
        return kind, *[_walk(child, found) for child in node]
    if kind is dict:
        if _leaves.issuperset(map(type, node.values())):
            found += node.values()
            return dict, tuple(node)
        return dict, tuple(node), *[_walk(child, found) for child in node.values()]
    if isinstance(node, Tensor) or (kind not in pytree.SUPPORTED_NODES and not isinstance(node, tuple)):
        found.append(node)
        return None
    inner, spec = pytree.tree_flatten(node)
    found.extend(inner)
    return spec
