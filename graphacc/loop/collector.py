"""Python's garbage collector, out of the way while a program is built."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No automatic collection in the block.

    Graphs and fake tensors are hundreds of thousands of small objects that stay: looking through them again and again takes a
    tenth to a sixth of a capture, and frees next to nothing before it ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
