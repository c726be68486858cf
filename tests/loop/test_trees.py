"""Trees are taken apart as torch.utils._pytree does it, with one spec for each form."""

import collections
import random
import typing

import pytest
import torch
from torch.utils import _pytree as pytree

from graphacc.loop import trees


class Pair(typing.NamedTuple):
    first: object
    second: object


def random_tree(random: random.Random, depth: int) -> object:
    leaves = [1, 1.0, True, None, "text", torch.ones(2), torch.float32, slice(1, 2), len, frozenset({1})]
    if depth == 0 or random.random() < 0.3:
        return random.choice(leaves)
    children = [random_tree(random, depth - 1) for _ in range(random.randrange(4))]
    named = {random.choice("abcdef") + str(i): child for i, child in enumerate(children)}
    kinds = [tuple(children), children, named, collections.OrderedDict(named), collections.defaultdict(list, named), Pair(children, named)]
    return random.choice([*kinds, torch.return_types.max((torch.ones(1), torch.ones(1)))])


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_taken_apart_as_torch_does(seed: int):
    generator = random.Random(seed)
    for _ in range(20):
        tree = random_tree(generator, 4)
        found, spec = trees.flatten(tree)
        expected, torchs = pytree.tree_flatten(tree)
        assert list(map(id, found)) == list(map(id, expected)) == list(map(id, trees.leaves(tree)))
        assert spec == torchs
        assert trees.flatten(tree)[1] is spec
        assert pytree.tree_structure(made := trees.unflatten(found, spec)) == torchs and list(map(id, trees.leaves(made))) == list(map(id, found))
        assert trees.paths(spec) == [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
        given = trees.map_only(torch.Tensor, id, tree)
        assert given == pytree.tree_map_only(torch.Tensor, id, tree) and pytree.tree_structure(given) == torchs


def test_other_forms_have_other_specs():
    forms = [(), [], {}, ((),), (1,), [1], (1, 2), {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, Pair(1, 2), collections.OrderedDict(a=1), ((1,), 2), (1, (2,)), 1]
    specs = [trees.flatten(form)[1] for form in forms]
    assert len({id(spec) for spec in specs}) == len(forms)
    assert trees.flatten((torch.ones(1), "x"))[1] is trees.flatten((1, None))[1]


def test_containers_are_made_anew():
    leaves, spec = trees.flatten(([], {"a": []}, [1]))
    (one, *_), (other, *_) = trees.unflatten(leaves, spec), trees.unflatten(leaves, spec)
    assert one == other == [] and one is not other


def test_trees_too_deep_for_an_expression():
    tree: object = 1
    for _ in range(250):
        tree = [tree]
    leaves, spec = trees.flatten(tree)
    assert leaves == [1] and trees.unflatten(leaves, spec) == tree


def test_only_what_holds_such_leaves_is_made_anew():
    tree = {"a": [1, 2.0], "b": (3,)}
    assert trees.map_only(str, str.upper, tree) is tree
    assert trees.map_only(int, lambda leaf: -leaf, tree) == {"a": [-1, 2.0], "b": (-3,)}
