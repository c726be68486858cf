"""Every entry of torch's own operator database against eager torch, and the share of it that lowers."""

import collections
import warnings

import pytest
import torch
from helpers_lowering import check_lowered_together, run_lowered, step_graph
from operator_database import UNTRACEABLE, UNTRACEABLE_TEXT, functions, op_db
from selection import with_matrix

import graphacc.lowering
from graphacc.errors import LoweringError
from graphacc.graph import StepGraph
from graphacc.lowering import registry

SAMPLES = 3
FLOOR_OP_DB = 0.85
FLOOR_CORE = 0.92
LOW_PRECISION = (
    "add sub mul div exp log tanh sigmoid nn.functional.gelu softmax sum mean cumsum matmul addmm "
    "where clamp scatter_add index_put sort"
).split()

# Which of its results are determined; None: only shapes and dtypes are compared.
UNDETERMINED = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        (None, "contents are undefined"),
    ),
    **dict.fromkeys(
        ("sort", "topk", "kthvalue", "mode", "median", "nanmedian", "msort"),
        (slice(1), "ties may come in any order: the values count"),
    ),
    "argsort": (None, "ties may come in any order"),
    "linalg.eigh": (slice(1), "eigenvectors are unique up to their sign; test_linalg.py rebuilds the matrix"),
    "linalg.eig": (slice(1), "eigenvectors are unique up to their phase"),
    "as_strided.partial_views": ("raises", "reads storage outside its input, which XLA does not have"),
    "nn.functional.embedding_bag": (slice(1), "the others serve torch's own backward kernels"),
    "chalf": ("raises", "jax has no complex32"),
}


def _shapes(results):
    return [torch.zeros(x.shape, dtype=x.dtype) for x in results]


def _traced(call, tensors) -> StepGraph | None:
    """The graph of one sample; None where it cannot be traced or has an operator without a rule."""
    try:
        step = step_graph(call, *tensors)
    except UNTRACEABLE:
        return None
    except (RuntimeError, AssertionError) as error:
        if any(text in str(error) for text in UNTRACEABLE_TEXT):
            return None
        raise
    return None if graphacc.lowering.missing(step) else step


def _check_entry(op, dtype, limit) -> bool:
    """Whether any sample of the entry lowers; those that do must agree with eager torch.

    The samples share one program: half of the time was the cost of starting a small one.
    """
    determined, _ = UNDETERMINED.get(op.full_name, (slice(None), ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's and numpy's, about the samples themselves
        samples = [(call, tensors, _traced(call, tensors)) for call, tensors in functions(op, dtype, limit)]
        samples = [sample for sample in samples if sample[2] is not None]
        if determined == "raises":
            for _, tensors, step in samples:
                with pytest.raises(LoweringError):
                    run_lowered(step, *tensors)
            return False
        if samples:
            check_lowered_together(samples, results=_shapes if determined is None else lambda results: results[determined])
    return bool(samples)


def _dtype(op):
    return next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in op.dtypes), None)


def _sweep(entries) -> tuple[set[str], dict[str, str]]:
    """(op, dtype, limit) -> names that lower, and the failures of those that disagree."""
    covered, failures = set(), {}
    for op, dtype, limit in entries:
        torch.manual_seed(0)
        try:
            if dtype is not None and _check_entry(op, dtype, limit):
                covered.add(op.full_name)
        except Exception as error:  # gathered, and asserted to be none
            failures[f"{op.full_name} {dtype}"] = f"{type(error).__name__}: {error}"[:300]
    return covered, failures


def _core_operators() -> list[str]:
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [str(getattr(packet, o)) for o in packet.overloads() if torch.Tag.core in getattr(packet, o).tags]
    return found


@pytest.mark.parametrize("every, samples", with_matrix([(4, 1), (1, SAMPLES)], [(4, 1)]))
def test_op_db_agrees_with_eager_torch(capsys, every, samples):
    chosen = op_db()[::every]
    covered, failures = _sweep((op, _dtype(op), samples) for op in chosen)
    core = _core_operators()
    with_rule = [name for name in core if registry.find(name)]
    share, core_share = len(covered) / len(chosen), len(with_rule) / len(core)
    with capsys.disabled():
        print(
            f"\nOpInfo: {len(covered)} of {len(chosen)} op_db entries lower ({share:.1%}), "
            f"{len(with_rule)} of {len(core)} core ATen operators have a rule ({core_share:.1%})"
        )
    assert failures == {}
    assert share >= FLOOR_OP_DB and core_share >= FLOOR_CORE


def test_every_core_operator_has_a_rule_or_a_reason():
    assert [name for name in _core_operators() if not registry.find(name) and not registry.reason(name)] == []


@pytest.mark.matrix
def test_integers_agree_with_eager_torch():
    covered, failures = _sweep((op, torch.int64, 2) for op in op_db() if torch.int64 in op.dtypes and _dtype(op) != torch.int64)
    assert failures == {}
    assert len(covered) > 350


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_low_precision_and_bool_agree_with_eager_torch(dtype):
    chosen = [op for op in op_db() if op.full_name in LOW_PRECISION and dtype in op.dtypes]
    covered, failures = _sweep((op, dtype, 2) for op in chosen)
    assert failures == {}
    assert covered == {op.full_name for op in chosen}


def test_no_exception_is_out_of_date():
    names = collections.Counter(op.full_name for op in op_db())
    assert [name for name in UNDETERMINED if name not in names] == []
