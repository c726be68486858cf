"""Which products of gradients a program for GPUs may compute last: those of experts like others, and where rows are exchanged only what is smaller than its factors."""

import functools

import pytest
import torch
from gpt2_steps import captured, mixtral, spread

from graphacc.costs.xla_gpu import _for_update
from graphacc.passes.communication.buckets import SCATTER

LENGTH = 16
GRADIENT = torch.ops.graphacc.grouped_mm_weight_grad.default


@functools.cache
def step():
    return captured(mixtral(layers=2, width=256, length=LENGTH, vocabulary=512), LENGTH, "bf16")


@pytest.mark.parametrize(("strategy", "last"), [("fsdp=8", True), ("fsdp=4,ep=2", False)])
def test_gradients_of_experts(strategy, last):
    """128 rows are smaller than the matrices; what carries the products is last in either case."""
    program = spread(step(), f"{strategy},precision=bf16")
    found = _for_update(program)
    products = {node for node in program.graph.nodes if node.target is GRADIENT}
    assert len(products) == 4 and (found & products == (products if last else set()))
    carried, left = set(), list(products)
    while left:
        for user in left.pop().users:
            if user.target is SCATTER:
                carried.add(user)
            elif user not in carried:
                left.append(user)
    assert carried and carried <= found
