"""Decompositions whose factors are not unique: they must rebuild the matrix."""

import pytest
import torch
from helpers_lowering import run_lowered, step_graph
from tolerances import assert_close


def _factors(function, x):
    return run_lowered(step_graph(function, x), x)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5, 5)])
def test_eigh(shape):
    x = torch.randn(shape, dtype=torch.float64)
    x = x + x.mT
    values, vectors = _factors(torch.linalg.eigh, x)
    assert_close(values, torch.linalg.eigvalsh(x))
    assert_close(vectors * values[..., None, :] @ vectors.mT, x)


@pytest.mark.parametrize("shape", [(4, 6), (2, 6, 4)])
def test_svd_and_qr(shape):
    x = torch.randn(shape, dtype=torch.float64)
    u, s, vh = _factors(lambda x: torch.linalg.svd(x, full_matrices=False), x)
    assert_close(s, torch.linalg.svdvals(x))
    assert_close(u * s[..., None, :] @ vh, x)
    q, r = _factors(torch.linalg.qr, x)
    assert_close(q @ r, x)
    assert_close(r.triu(), r)


def test_eig():
    x = torch.randn(4, 4, dtype=torch.float64)
    values, vectors = _factors(torch.linalg.eig, x)
    wide = x.to(torch.complex128)
    assert_close(vectors * values[None, :], wide @ vectors, tolerance=1e-10)
