"""A sample of torch's own operator database, recorded by lazy tensors as one program, against eager torch."""

import itertools

import pytest
import torch
from operator_database import op_db
from operators_with_gradients import CASES, with_gradient
from test_lazy_capture import run
from tolerances import assert_close
from torch.utils import _pytree as pytree

from graphacc.capture import Batch, capture_forward
from graphacc.capture.lazy import LAZY
from graphacc.errors import CaptureError

pytestmark = [pytest.mark.lazy, pytest.mark.filterwarnings("ignore")]  # torch's and numpy's, about the samples themselves

EVERY, SAMPLES = 10, 2
FLOOR = 0.6  # of the sampled entries, what is recorded; the others are refused with a message
UNDETERMINED = (
    "empty", "rand", "normal", "uniform", "bernoulli", "multinomial", "dropout", "cauchy", "exponential", "geometric", "sort", "topk",
    "multi_head_attention", "scaled_dot_product",  # with dropout
    "native_batch_norm",  # what it saves for a backward of its own
)  # fmt: skip
FIXED = ("aminmax", "roll", "norm.fro", "amax", "_chunk_cat", "nn.functional.adaptive_avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.nll_loss")
"""Entries about which torch_xla's own forms are wrong, or end the process."""


def cases():
    """(name, function of tensors, tensors)."""
    chosen = [op for i, op in enumerate(op_db) if i % EVERY == 0 or op.full_name in FIXED]
    for op in chosen:
        if torch.float32 not in op.dtypes or any(word in op.full_name for word in UNDETERMINED):
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 12 if op.full_name in FIXED else SAMPLES):
            flat, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

            def call(*tensors, op=op, flat=flat, structure=structure, places=places):
                values = dict(enumerate(flat)) | dict(zip(places, tensors))
                first, args, kwargs = pytree.tree_unflatten([values[i] for i in range(len(flat))], structure)
                return [x for x in pytree.tree_leaves(op.op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)]

            yield op.full_name, call, [flat[i].detach().clone() for i in places]


def is_recorded(call, tensors) -> bool:
    batch = Batch(leaves=tuple(tensors), paths=tuple(f"args[{i}]" for i in range(len(tensors))))
    try:
        capture_forward(torch.nn.Module(), lambda module, given: (None, call(*given)), batch, backend=LAZY)
    except CaptureError:
        return False
    return True


@pytest.mark.matrix
def test_what_is_recorded_agrees_with_eager_torch():
    torch.manual_seed(0)
    found = list(cases())
    recorded = [case for case in found if case[2] and is_recorded(*case[1:])]
    expected = [call(*tensors) for _, call, tensors in recorded]

    def together(*tensors):
        given = iter(tensors)
        return [x for _, call, own in recorded for x in call(*itertools.islice(given, len(own)))]

    got = iter(run(together, *(x.clone() for _, _, own in recorded for x in own)))
    for (name, _, _), results in zip(recorded, expected):
        for result in results:
            assert_close(next(got), result, what=name)
    assert {name for name, _, _ in recorded} >= set(FIXED)
    assert len({name for name, _, _ in recorded}) >= FLOOR * len({name for name, _, _ in found})


@pytest.mark.matrix
def test_operators_with_gradients():
    """Those that torch_xla has no HLO for are computed by their rules of the FX capture."""
    functions, tensors = zip(*map(with_gradient, CASES))
    expected = [result for function, x in zip(functions, tensors) for result in function(x)]

    def together(*given):
        with torch.enable_grad():  # a forward alone is captured without
            return [result for function, x in zip(functions, given) for result in function(x)]

    got = run(together, *tensors)
    for result, wanted, name in zip(got, expected, [name for name in CASES for _ in range(2)], strict=True):
        assert_close(result, wanted, what=name)
