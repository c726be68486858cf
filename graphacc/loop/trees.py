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

_specs: dict[Hashable, pytree.TreeSpec] = {}
_paths: dict[int, tuple[pytree.TreeSpec, list[tuple[Any, ...]]]] = {}  # by the identity of a spec, which is kept


def flatten(tree: object) -> tuple[list[Any], pytree.TreeSpec]:
    """`pytree.tree_flatten`."""
    found: list = []
    form = _walk(tree, found)
    spec = _specs.get(form)
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
    """`pytree.tree_unflatten`."""
    return leaves[0] if spec.num_nodes == spec.num_leaves == 1 else pytree.tree_unflatten(leaves, spec)


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
    for child in node:
        if isinstance(child, Tensor):
            found.append(child)
        else:
            _collect(child, found)


def _walk(node: object, found: list) -> Hashable:
    """Add the leaves of a tree, and return what tells its form: two trees of one form have equal specs."""
    if isinstance(node, Tensor):
        found.append(node)
        return None
    kind = type(node)
    if kind is tuple or kind is list:
        return kind, *[_walk(child, found) for child in node]  # type: ignore[union-attr]
    if kind is dict:
        return dict, tuple(node), *[_walk(child, found) for child in node.values()]  # type: ignore[union-attr]
    if kind not in pytree.SUPPORTED_NODES and not isinstance(node, tuple):
        found.append(node)
        return None
    inner, spec = pytree.tree_flatten(node)
    found.extend(inner)
    return spec
