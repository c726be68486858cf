"""Several processes: the same script, started by torchrun, srun or by hand, in each of them.

``torchrun --nproc-per-node=2 train.py`` is enough: `graphacc.compile` joins the processes. ``devices=`` is the total number; each process owns
its share. The rules for the script: every process does the same calls in the same order (also those that read sharded values, such
as ``state_dict()``), passes the same batch (``batch="global"``, the default) or its own rows of it
(``batch="local"``, with ``torch.utils.data.DistributedSampler(dataset, num_replicas=process_count(), rank=process_index())``), and
prints only where `is_first_process`.

Processes that do not do the same are stopped, with an error that says which one differs and in what: before a program is compiled they compare
its strategy, shapes and operators; programs that were compiled before, and scripts that end early, are compared a quarter of
GRAPHACC_TIMEOUT later at most. Pipeline stages may lie in different processes; a stage may also span several.
"""

from graphacc.runtime.distributed import initialize, is_first_process, process_count, process_index

__all__ = ["initialize", "is_first_process", "process_count", "process_index"]
