"""Private or unstable torch APIs, in one place. Tried with torch 2.9.1 and 2.13.0."""

import contextlib

import torch


def group_rank(name: str) -> int:
    """This process's rank in the process group registered under `name` (a mesh axis)."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name).rank()


@contextlib.contextmanager
def compiling():
    """Make ``torch.compiler.is_compiling()`` true while tracing, as models expect who avoid data-dependent branches."""
    compiler = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before
