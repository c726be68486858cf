"""Operators that cannot have a rule, each with the reason that the error repeats (random ones: `random.py`)."""

from graphacc.lowering.registry import refuse

refuse(
    "the shape of its result depends on the data, and XLA's shapes are fixed: use torch.where, a mask, topk or a padded "
    "size instead",
    "aten.nonzero.default",
    "aten.nonzero_static.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
    "aten.bincount.default",
    "aten.repeat_interleave.Tensor",
    "aten._ctc_loss.default",
)
refuse(
    "it reads a value back to Python in the middle of the step (.item(), bool(tensor), a tensor in a condition): keep it a "
    "tensor, or read it after the step",
    "aten._local_scalar_dense.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
    "aten.allclose.default",
)
refuse(
    "sizes, strides and storage offsets are fixed at capture and never operators of a step; this graph was captured with "
    "dynamic shapes",
    "aten.sym_size.int",
    "aten.sym_stride.int",
    "aten.sym_numel.default",
    "aten.sym_storage_offset.default",
    "aten.sym_is_contiguous.default",
)
refuse(
    "XLA has no sparse tensors: use dense ones",
    "aten._to_sparse.default",
    "aten._to_sparse.sparse_dim",
    "aten._sparse_mm_reduce_impl.default",
    "aten.sparse_sampled_addmm.default",
)
refuse(
    "it writes into an argument, and a StepGraph is functional: capture replaces it by its functional form",
    "aten._native_batch_norm_legit.default",
    "aten.atan2.out",
    "aten.resize_.default",
)
refuse(
    "it reads results of embedding_bag's forward that XLA's rule does not make: write the bags as embedding and sum, mean "
    "or amax",
    "aten._embedding_bag_backward.default",
    "aten._embedding_bag_dense_backward.default",
    "aten._embedding_bag_per_sample_weights_backward.default",
)
