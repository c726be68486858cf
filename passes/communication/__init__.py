"""Communication of the program of one rank: quantised gathers and scatters (`quantize.py`), codes of weights that are not trained
(`frozen.py`), gathers within a node of what the forward kept (`secondary.py`), many small collectives as few large ones (`buckets.py`),
weights that are gathered a fixed number of them ahead (`prefetch.py`), gradients that are scattered before other sums (`scatter_first.py`), and as they are made
(`release.py`).

It works on collectives that say what they move (``meta["move"]``, a `Move` with role, bytes and layer), behind the partition along
every axis and in front of the lowering. Whatever rewrites communication is a pass of its own here.
"""

from graphacc.passes.communication.buckets import bucket_pass
from graphacc.passes.communication.frozen import Frozen
from graphacc.passes.communication.prefetch import prefetch_pass
from graphacc.passes.communication.quantize import Quantization, quantized_gather_pass, quantized_scatter_pass
from graphacc.passes.communication.release import RELEASE_GRADIENTS
from graphacc.passes.communication.scatter_first import SCATTER_FIRST
from graphacc.passes.communication.secondary import secondary_partition_pass

__all__ = ["RELEASE_GRADIENTS", "SCATTER_FIRST", "Frozen", "Quantization", "bucket_pass", "prefetch_pass", "quantized_gather_pass", "quantized_scatter_pass", "secondary_partition_pass"]
