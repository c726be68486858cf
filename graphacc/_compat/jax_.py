"""Private or unstable JAX APIs, in one place. Tried with jax 0.10.2."""

import contextlib

import jax


def x64() -> contextlib.AbstractContextManager:
    """64-bit integers and floats inside this context: PyTorch's integer semantics are 64-bit. Never a global setting."""
    return jax.enable_x64(True)
