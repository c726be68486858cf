"""Communication of the program of one rank: many small collectives become few large ones (`buckets.py`), and weights are gathered a
fixed number of them ahead (`prefetch.py`).

It works on collectives that say what they move (``meta["move"]``, a `Move` with role, bytes and layer), behind the partition along
every axis and in front of the lowering. Whatever rewrites communication is a pass of its own here.
"""

from graphacc.passes.communication.buckets import bucket_pass
from graphacc.passes.communication.prefetch import prefetch_pass

__all__ = ["bucket_pass", "prefetch_pass"]
