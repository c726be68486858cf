"""torch's own database of operators and of sample inputs for them."""

import functools
import itertools
import warnings

import torch
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import data_dependent_errors, dynamic_shape_errors

UNTRACEABLE = (*data_dependent_errors(), *dynamic_shape_errors())
# Errors of other kinds while tracing: values read back to Python, CUDA only, sparse layouts, effects (linalg's checks on 2.13).
UNTRACEABLE_TEXT = ("trying to get value out of", "only supported on CUDA", "sparse", "Sparse", "token for effect")


@functools.cache
def op_db() -> list:
    """Made when a test asks, in seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's testing module warns where hypothesis is not installed
        from torch.testing._internal import common_methods_invocations, common_utils
        from torch.testing._internal.opinfo import core

    # For every sample torch looks through the stack for the unittest.TestCase that asks, which took a quarter of the time; we have none.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return common_methods_invocations.op_db


def functions(op, dtype, limit):
    """(function, tensors) of the database's first `limit` samples for an operator."""
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), limit):
        flat, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

        def call(*tensors, flat=flat, structure=structure, places=places):
            values = list(flat)
            for i, x in zip(places, tensors):
                values[i] = x
            first, args, kwargs = pytree.tree_unflatten(values, structure)
            return op.op(first, *args, **kwargs)

        yield call, [flat[i] for i in places]
