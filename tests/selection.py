"""Which cases the README's command runs, and which are left to the matrix: `pytest -m matrix`, see `conftest.py`."""

from collections.abc import Collection, Iterable

import pytest


def with_matrix(cases: Iterable, default: Collection) -> list:
    """Cases for `pytest.mark.parametrize`: those in `default` as they are, the others marked `matrix`."""
    cases = list(cases)
    unknown = [case for case in default if case not in cases]
    assert default and not unknown, f"no such cases: {unknown}"
    return [case if case in default else _in_matrix(case) for case in cases]


def _in_matrix(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix)
