"""Trace a function to a StepGraph, lower it, and run it beside eager torch."""

import contextlib
from collections.abc import Callable

import jax
import numpy as np
import torch
from tolerances import assert_close
from torch.utils import _pytree as pytree

import graphacc.lowering
from graphacc._compat.jax_ import known_options, x64
from graphacc._compat.torch_ import fake_mode, trace_functional
from graphacc.graph import Input, Kind, Output, Phase, StepGraph
from graphacc.lowering.dtypes import from_torch, to_torch
from graphacc.runtime.program import FAST_COMPILE


def step_graph(function, *tensors, inside_mode=False, decompositions=None) -> StepGraph:
    """The ATen graph of ``function(*tensors)``, without decompositions if none are given; its tensor results are the outputs.

    `inside_mode` traces operators without tensor arguments as fake ones too.
    """
    mode = fake_mode()
    fakes = [mode.from_tensor(x.detach()) for x in tensors]

    def flat(*args):
        return tuple(x for x in pytree.tree_leaves(function(*args)) if isinstance(x, torch.Tensor))

    with mode if inside_mode else contextlib.nullcontext():
        module = trace_functional(flat, fakes, decompositions or {})
    for node in module.graph.nodes:
        node.meta["phase"] = Phase.FORWARD
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [
        Input(name=node.name, kind=Kind.BATCH, target=str(i), shape=tuple(fake.shape), dtype=fake.dtype)
        for i, (node, fake) in enumerate(zip(placeholders, fakes))
    ]
    values = [node.meta["val"] for node in module.graph.output_node().args[0]]
    outputs = [Output(kind=Kind.USER, target=str(i), shape=tuple(x.shape), dtype=x.dtype) for i, x in enumerate(values)]
    return StepGraph(module.graph, tuple(inputs), tuple(outputs))


def to_array(x: torch.Tensor):
    """A jax array with the tensor's values and dtype."""
    return jax.numpy.asarray(from_torch(x))


def to_tensor(x) -> torch.Tensor:
    """A torch tensor with the array's values and dtype."""
    host = np.array(x)
    if to_torch(host.dtype) == torch.bfloat16:
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def run_lowered(step: StepGraph, *tensors, jit=False) -> list[torch.Tensor]:
    with x64():
        lowered = graphacc.lowering.lower(step)
        lowered = jax.jit(lowered, compiler_options=known_options(FAST_COMPILE)) if jit else lowered
        return [to_tensor(x) for x in lowered(*map(to_array, tensors))]


def check_lowering(function, *tensors, step=None, jit=True, tolerance=None, results=None):
    """Assert that the lowered function (or its traced `step`) gives what eager torch gives.

    `results` maps both lists of results before they are compared.
    """
    got = run_lowered(step or step_graph(function, *tensors), *tensors, jit=jit)
    _compare(got, function, tensors, tolerance=tolerance, results=results)


def check_lowered_together(samples: list[tuple[Callable, list[torch.Tensor], StepGraph]], *, results: Callable, tolerance=None):
    """`check_lowering` of several (function, tensors, step), compiled as one program."""
    with x64():
        lowered = [graphacc.lowering.lower(step) for _, _, step in samples]
        together = jax.jit(lambda *inputs: [f(*x) for f, x in zip(lowered, inputs)], compiler_options=known_options(FAST_COMPILE))
        outputs = together(*([to_array(x) for x in tensors] for _, tensors, _ in samples))
        for number, ((function, tensors, _), got) in enumerate(zip(samples, outputs)):
            _compare([to_tensor(x) for x in got], function, tensors, tolerance=tolerance, results=results, what=f"sample {number}, ")


def _compare(got, function, tensors, *, tolerance=None, results=None, what="") -> None:
    expected = [x for x in pytree.tree_leaves(function(*(x.clone() for x in tensors))) if isinstance(x, torch.Tensor)]
    if results is not None:
        expected, got = results(expected), results(got)
    assert len(got) == len(expected)
    for i, (mine, theirs) in enumerate(zip(got, expected)):
        assert_close(mine, theirs.detach().resolve_conj().resolve_neg(), tolerance=tolerance, what=f"{what}result {i}")
