"""What the tests of parallelism share."""

import functools

import pytest
from training import check_parity


@pytest.fixture(scope="module")
def trained():
    """`check_parity`, which runs once for a model and a strategy; tests only look at what it returns."""
    return functools.cache(check_parity)
