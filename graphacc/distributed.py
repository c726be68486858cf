"""Several processes: the same script, started by torchrun, srun or by hand, in each of them.

``torchrun --nproc-per-node=2 train.py`` is enough: `graphacc.compile` joins the processes. ``devices=`` is the total number; each process owns
its share. The rules for the script: every process does the same calls in the same order (also those that read sharded values, such
as ``state_dict()``), passes the same batch (``batch="global"``, the default) or its own rows of it
(``batch="local"``, with ``torch.utils.data.DistributedSampler(dataset, num_replicas=process_count(), rank=process_index())``), and
prints only where `is_first_process`.
"""

from graphacc.runtime.distributed import initialize, is_first_process, process_count, process_index

__all__ = ["initialize", "is_first_process", "process_count", "process_index"]
