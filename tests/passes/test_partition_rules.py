"""Every partition rule against the unpartitioned operator, with placements drawn by a seeded sampler.

An operand is drawn as whole, split along some dim, split with an outer part, a partial sum or a partial maximum; the last three
by operators in front of the one under test. Two axes of two ranks each are partitioned one after the other, so that rules also
see the collectives of another axis.
"""

import random
import subprocess
import sys

import pytest
import torch
from graphs import trace
from rule_cases import CASES, bools, ints
from selection import with_matrix
from simulate import run_global, simulate
from tolerances import assert_close

from graphacc.graph import Kind
from graphacc.passes.partition import partition
from graphacc.passes.partition.placement import Replicate, Shard, view_split
from graphacc.passes.partition.rules import ABSENT, RULES, operator

RANKS, PADDED_RANKS = 2, 3
FIRST, FURTHER = range(2), range(2, 6)
"""Seeds of each case's samples."""


def _tensor(spec, generator):
    if isinstance(spec, ints):
        return torch.randint(0, spec.below, spec.shape, generator=generator)
    if isinstance(spec, bools):
        return torch.rand(spec.shape, generator=generator) < 0.6
    return torch.randn(spec, generator=generator, dtype=torch.float64)


class Sampled:
    """A tensor of a case in a form whose placement is interesting: `base` is the graph's input, `use` makes the tensor."""

    def __init__(self, x: torch.Tensor, draw: random.Random):
        self.base, self.use = x, lambda base: base
        self.dims = {"a": None, "b": None}
        form = draw.choice(["whole", "split", "split", "split", "both", "partial", "strided"])
        divisible = [dim for dim, size in enumerate(x.shape) if size % 4 == 0]
        floating = x.dtype == torch.float64
        if form in ("split", "both") and divisible:
            for axis in ("a", "b") if form == "both" else draw.sample(("a", "b"), 1):
                self.dims[axis] = draw.choice(divisible)
        elif form == "partial" and floating:
            reduce = draw.choice([torch.sum, torch.amax])
            others = torch.rand(3, *x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
            self.base = torch.cat([x[None], others]) if reduce is torch.sum else torch.cat([x[None], x[None] - others])
            self.use = lambda base: reduce(base, 0)
            self.dims[draw.choice(["a", "b"])] = 0
        elif form == "strided" and divisible:
            dim = draw.choice(divisible)
            self.base = x.unflatten(dim, (2, -1)).contiguous()
            self.use = lambda base: base.flatten(dim, dim + 1)
            self.dims[draw.choice(["a", "b"])] = dim + 1

    def placements(self, axis: str) -> Shard | Replicate:
        dim = self.dims[axis]
        return Replicate() if dim is None else Shard(dim)


def _run_sample(function, tensors, seed: int) -> tuple[set, list]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    samples = [Sampled(_tensor(spec, generator), draw) for spec in tensors]

    def whole(*bases):
        return tuple(function(*(sample.use(base) for sample, base in zip(samples, bases))))

    bases = [sample.base for sample in samples]
    expected = whole(*bases)
    step = trace(
        whole, [(Kind.BATCH, str(i), x) for i, x in enumerate(bases)], [(Kind.USER, str(i)) for i in range(len(expected))]
    )
    expected, met = run_global(step, bases), set()
    for axis in ("a", "b"):
        placements = {item.name: sample.placements(axis) for item, sample in zip(step.inputs, samples)}
        met |= {node.target for node in step.graph.nodes}
        step, report = partition(step, axis, RANKS, placements, {}, lambda shape: None)
        step.verify()
    got = simulate(step, {"a": RANKS, "b": RANKS}, bases)
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y)
    return met, report.collectives


@pytest.mark.parametrize("seeds", with_matrix([FIRST, FURTHER], [FIRST]), ids=["first", "further"])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_rule_equals_operator(case, seeds):
    name, function, tensors = CASES[case]
    met = set()
    for seed in seeds:
        met |= _run_sample(function, tensors, 1000 * case + seed)[0]
    if not name.startswith(("_c10d_functional", "graphacc.shard")):
        assert operator(name) in met, f"{name} is not in the traced graph"


def _padded(x: torch.Tensor, draw: random.Random):
    """A graph's input, how the tensor is made of it so that its padding holds rubbish, and a split that needs padding."""
    base, use = x, lambda base: base
    if x.dtype == torch.float64:
        base, use = x.exp(), lambda base: base.log()  # -inf in the padding
    elif x.dtype == torch.bool:
        base, use = ~x, lambda base: ~base
    dims = [dim for dim, size in enumerate(x.shape) if size > 1]
    if not dims or draw.random() < 0.2:
        return base, use, Replicate()
    dim = draw.choice(dims)
    return base, use, Shard(dim, padding=-x.shape[dim] % PADDED_RANKS)


@pytest.mark.parametrize("seeds", with_matrix([FIRST, FURTHER[:2]], [FIRST]), ids=["first", "further"])
@pytest.mark.parametrize("case", with_matrix(range(len(CASES)), range(0, len(CASES), 6)), ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_padding_does_not_count(case, seeds):
    """Three ranks, which divide next to no dim of the cases: what stands in the padding never reaches a result."""
    _, function, tensors = CASES[case]
    for seed in seeds:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        samples = [_padded(_tensor(spec, generator), draw) for spec in tensors]

        def whole(*bases):
            return tuple(function(*(use(base) for (_, use, _), base in zip(samples, bases))))

        bases = [base for base, _, _ in samples]
        count = len(whole(*bases))
        step = trace(whole, [(Kind.BATCH, str(i), x) for i, x in enumerate(bases)], [(Kind.USER, str(i)) for i in range(count)])
        expected = run_global(step, bases)
        placements = {item.name: placement for item, (_, _, placement) in zip(step.inputs, samples)}
        result, _ = partition(step, "a", PADDED_RANKS, placements, {}, lambda shape: None)
        for x, y in zip(simulate(result, {"a": PADDED_RANKS}, bases), expected, strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("case", with_matrix(range(len(CASES)), range(3, len(CASES), 6)), ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_parts_of_size_one(case):
    """As many ranks as a dim has elements: what is decided by a dim of size 1 is decided by its global size."""
    _, function, tensors = CASES[case]
    generator = torch.Generator().manual_seed(case)
    bases = [_tensor(spec, generator) for spec in tensors]
    step = trace(lambda *xs: tuple(function(*xs)), [(Kind.BATCH, str(i), x) for i, x in enumerate(bases)], _users(function, bases))
    expected = run_global(step, bases)
    for ranks in sorted({size for x in bases for size in x.shape if size > 1}):
        for seed in range(4):
            draw = random.Random(seed)
            placements = {item.name: _split_in_ones(item.shape, ranks, draw) for item in step.inputs}
            result, _ = partition(step, "a", ranks, placements, {}, lambda shape: None)
            for x, y in zip(simulate(result, {"a": ranks}, bases), expected, strict=True):
                assert_close(x, y)


def _users(function, bases) -> list[tuple[Kind, str]]:
    return [(Kind.USER, str(i)) for i in range(len(list(function(*bases))))]


def _split_in_ones(shape, ranks: int, draw: random.Random) -> Shard | Replicate:
    dims = [dim for dim, size in enumerate(shape) if size == ranks]
    return Shard(draw.choice(dims)) if dims and draw.random() < 0.8 else Replicate()


def test_every_rule_has_a_case():
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    shared = {operator(f"_c10d_functional.{name}.default") for name in names}
    shared.add(operator("graphacc.permute_ranks.default"))  # test_model_parallel.py
    tested = {operator(name) for name, _, _ in CASES} | shared
    missing = [str(target) for target in RULES if target not in tested]
    assert not missing, f"rules without a case: {missing}"
    assert not ABSENT - {"aten.cholesky.default"}, "torch 2.15 lacks this one; other names without an operator are mistakes"


def _reads(shape, split, ranks, rank):
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    return index.unflatten(split.dim, (split.outer, ranks, -1)).select(split.dim + 1, rank).flatten()


def test_view_split_holds_the_same_elements():
    """Against brute force: the elements that a rank holds, before and after a reshape, in row-major order."""
    shapes = [(24,), (4, 6), (2, 12), (2, 2, 6), (4, 3, 2), (2, 1, 12), (1, 24), (3, 8), (3, 4, 2), (6, 4)]
    found = 0
    for shape in shapes:
        for new_shape in shapes:
            for dim, size in enumerate(shape):
                for outer in (1, 2, 3):
                    if size % (2 * outer):
                        continue
                    split = Shard(dim, outer)
                    new = view_split(shape, split, new_shape, 2)
                    possible = [
                        Shard(d, o)
                        for d, s in enumerate(new_shape)
                        for o in range(1, s + 1)
                        if s % (2 * o) == 0 and torch.equal(_reads(new_shape, Shard(d, o), 2, 0), _reads(shape, split, 2, 0))
                    ]
                    assert possible == ([] if new is None else [new]), (shape, split, new_shape)
                    found += new is not None
    assert found > 50


def test_rules_import_by_themselves():
    """Rules name graphacc's own operators, so that they must register them first."""
    code = "import graphacc.passes.partition"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
