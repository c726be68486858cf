"""Gradients of torch's own operator database, traced and lowered as the product does, against eager torch in double precision."""

import warnings

import pytest
import torch
from helpers_lowering import check_lowered_together, step_graph
from operator_database import UNTRACEABLE, UNTRACEABLE_TEXT, functions, op_db
from torch.utils import _pytree as pytree

import graphacc.lowering
from graphacc.capture.decompositions import decompositions
from graphacc.capture.functions import WrittenOut
from graphacc.errors import CaptureError
from graphacc.graph import StepGraph

pytestmark = pytest.mark.matrix

SAMPLES = 2
FLOOR = {torch.float64: 400, torch.complex128: 150}
UNDETERMINED = {
    "linalg.eigh": "eigenvectors are unique up to their sign",
    "linalg.eig": "eigenvectors are unique up to their phase",
    "nn.functional.hardsigmoid": "torch's kernel divides by 6 in fp32",
    "chalf": "jax has no complex32",
}


def gradients(call, tensors):
    """The gradients of a weighted sum of an entry's results with regard to its tensors, as a function of them."""
    wanted = [i for i, x in enumerate(tensors) if x.dtype.is_floating_point or x.dtype.is_complex]

    def run(*given):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(given)]
            results = call(*(x * 1 if i in wanted else x for i, x in enumerate(leaves)))
            total = torch.zeros(())
            for x in pytree.tree_leaves(results):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x = torch.view_as_real(x) if x.is_complex() else x
                    total = total + (x * torch.arange(1, x.numel() + 1, dtype=x.dtype).reshape(x.shape).sin()).sum()
            found = torch.autograd.grad(total, [leaves[i] for i in wanted], allow_unused=True)
            return tuple(x for x in found if x is not None)

    return run


def traced(run, tensors) -> StepGraph | None:
    """None for what has no gradient, cannot be traced, or has an operator without a rule."""
    try:
        run(*tensors)
    except (RuntimeError, NotImplementedError):
        return None
    try:
        with WrittenOut():
            step = step_graph(run, *tensors, inside_mode=True, decompositions=decompositions())
    except (*UNTRACEABLE, CaptureError):
        return None
    except (RuntimeError, AssertionError) as error:
        if any(text in str(error) for text in (*UNTRACEABLE_TEXT, "does not require grad")):
            return None
        raise
    return None if graphacc.lowering.missing(step) else step


def check(op, dtype) -> bool:
    """Whether any sample of the entry has gradients that lower; those must agree. The samples share one program."""
    samples = [(gradients(call, tensors), tensors) for call, tensors in functions(op, dtype, SAMPLES)]
    samples = [(run, tensors, step) for run, tensors in samples if (step := traced(run, tensors)) is not None]
    if samples:
        check_lowered_together(samples, results=list, tolerance=1e-9)
    return bool(samples)


@pytest.mark.parametrize("dtype", FLOOR)
def test_gradients_agree_with_eager_torch(dtype):
    covered, failures = set(), {}
    for op in op_db():
        if not op.supports_autograd or dtype not in op.dtypes or op.full_name in UNDETERMINED:
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if check(op, dtype):
                    covered.add(op.full_name)
            except Exception as error:  # gathered, and asserted to be none
                failures[op.full_name] = f"{type(error).__name__}: {error}"[:300]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
    assert len(covered) > FLOOR[dtype]
