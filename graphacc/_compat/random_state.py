"""Random generators, left as they are by what we load and compile: some imports of jax draw from NumPy's, some optimizers from torch's in their first step."""

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Give the generators of `random`, ``numpy.random`` and PyTorch on the CPU the state again that they had before the block."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)
