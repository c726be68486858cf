"""Whether what is lowered is partitioned afterwards: XLA's SPMD partitioner cannot look into a kernel, and would gather all of its operands.

So a rule that has a kernel of its own (a custom call) gives what XLA can partition instead; inside of a ``jax.shard_map``, where every device has its part, it has its kernels.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_PARTITIONED = contextvars.ContextVar("partitioned", default=False)


@contextlib.contextmanager
def partitioned_by_xla(holds: bool = True) -> Iterator[None]:
    """Within, `is_partitioned` is `holds`."""
    token = _PARTITIONED.set(holds)
    try:
        yield
    finally:
        _PARTITIONED.reset(token)


def is_partitioned() -> bool:
    return _PARTITIONED.get()
