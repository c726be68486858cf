"""Named ranges in the traces of torch.profiler and of JAX's profiler: "graphacc.step", "graphacc.upload" and "graphacc.compile".

They cover the time of the host. A step's program runs on after its range has ended, wherever nobody waits for its results.
"""

import contextlib

import jax
import torch

from graphacc._compat.jax_ import traces_are_taken
from graphacc._compat.torch_ import is_profiling

_NOTHING = contextlib.nullcontext()


def named(name: str, step: int | None = None) -> contextlib.AbstractContextManager:
    """A range of this name around the block; without a profiler that runs, it costs two calls of C++.

    Args:
        step: number of the training step that the range is, by which JAX's profiler groups what else it saw.
    """
    in_torch, in_jax = is_profiling(), traces_are_taken()
    if not in_torch and not in_jax:
        return _NOTHING
    both = contextlib.ExitStack()
    if in_torch:
        both.enter_context(torch.profiler.record_function(name))
    if in_jax:
        both.enter_context(jax.profiler.TraceAnnotation(name) if step is None else jax.profiler.StepTraceAnnotation(name, step_num=step))
    return both
