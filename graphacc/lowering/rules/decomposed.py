"""Operators lowered through torch's own decomposition: traced once per call signature, its operators lowered in turn.

Only operators listed here take this road: a decomposition is not always right for training (that of
`_scaled_dot_product_flash_attention_for_cpu` hands its backward another second output than the kernel's). Forward operators are
compared with eager torch by test_opinfo.py, backward ones by test_rules.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphacc._compat.torch_ import decomposition, fake_mode, trace_functional
from graphacc.lowering.dtypes import cast, to_torch, wide
from graphacc.lowering.interpret import check_rules, run_graph
from graphacc.lowering.registry import register

DECOMPOSED = (
    "aten._batch_norm_with_update_functional.default",
    "aten._chunk_cat.default",
    "aten._fused_rms_norm_backward.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten._prelu_kernel_backward.default",
    "aten.batch_norm_backward.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_backward.default",
    "aten.binary_cross_entropy_with_logits.default",
    "aten.block_diag.default",
    "aten.channel_shuffle.default",
    "aten.diag_embed.default",
    "aten.dist.default",
    "aten.elu_backward.default",
    "aten.glu_backward.default",
    "aten.grid_sampler_2d.default",
    "aten.hardsigmoid_backward.default",
    "aten.hardswish_backward.default",
    "aten.huber_loss.default",
    "aten.huber_loss_backward.default",
    "aten.log_sigmoid_backward.default",
    "aten.logit_backward.default",
    "aten.logspace.Scalar_Tensor",
    "aten.logspace.Tensor_Scalar",
    "aten.logspace.Tensor_Tensor",
    "aten.logspace.default",
    "aten.max_unpool2d.default",
    "aten.max_unpool3d.default",
    "aten.mish_backward.default",
    "aten.mse_loss.default",
    "aten.mse_loss_backward.default",
    "aten.multi_margin_loss.default",
    "aten.native_batch_norm_backward.default",
    "aten.native_group_norm.default",
    "aten.native_group_norm_backward.default",
    "aten.pixel_shuffle.default",
    "aten.pixel_unshuffle.default",
    "aten.reflection_pad1d.default",
    "aten.reflection_pad1d_backward.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad2d_backward.default",
    "aten.reflection_pad3d.default",
    "aten.reflection_pad3d_backward.default",
    "aten.renorm.default",
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad3d.default",
    "aten.rot90.default",
    "aten.smooth_l1_loss.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.soft_margin_loss.default",
    "aten.soft_margin_loss_backward.default",
    "aten.upsample_bicubic2d.default",
    "aten.upsample_bicubic2d.vec",
)


@functools.lru_cache(maxsize=512)
def _trace(overload: torch._ops.OpOverload, tensors: tuple, static: tuple, structure: pytree.TreeSpec) -> torch.fx.Graph:
    """The operators of a decomposition. `tensors` holds (position, shape, dtype), `static` (position, type, value)."""
    with fake_mode():
        fakes = [torch.empty(shape, dtype=dtype) for _, shape, dtype in tensors]

    def call(*values):
        flat = dict(zip((position for position, *_ in tensors), values)) | {position: value for position, _, value in static}
        args, kwargs = pytree.tree_unflatten([flat[i] for i in range(len(flat))], structure)
        return decomposition(overload)(*args, **kwargs)

    graph = trace_functional(call, fakes, {}).graph
    check_rules(graph)
    return graph


def run_decomposed(overload: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    """Call an operator on jax arrays through torch's decomposition of it."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    arrays = [(i, x) for i, x in enumerate(flat) if isinstance(x, jax.Array)]
    tensors = tuple((i, tuple(x.shape), to_torch(x.dtype)) for i, x in arrays)
    static = tuple((i, type(x), x) for i, x in enumerate(flat) if not isinstance(x, jax.Array))
    return run_graph(_trace(overload, tensors, static, structure), [x for _, x in arrays])


def _rule(ctx, *args, **kwargs):
    """In fp32 for bf16 and fp16, as torch's kernels compute; a decomposition would round every step."""
    args, kwargs = pytree.tree_map(lambda x: cast(x, wide(x.dtype)) if isinstance(x, jax.Array) else x, (args, kwargs))
    result = run_decomposed(ctx.node.target, args, kwargs)
    if isinstance(result, (tuple, list)):
        return tuple(None if x is None else cast(x, ctx.element(i).dtype) for i, x in enumerate(result))
    return cast(result, ctx.dtype)


register(*DECOMPOSED)(_rule)


@register("aten.grid_sampler_2d_backward.default")
def _grid_sampler_backward(ctx, grad, x, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    """Gradients of the input and of the grid, as jax's derivative of the forward; torch says a shape for some that nobody asked for."""
    forward = torch.ops.aten.grid_sampler_2d.default

    def call(x, grid):
        return run_decomposed(forward, (x, grid, interpolation_mode, padding_mode, align_corners), {})

    grads = jax.vjp(call, x, grid)[1](grad)
    return tuple(None if said is None else value for value, said in zip(grads, ctx.val))


@register(*(f"aten.replication_pad{dims}d_backward.default" for dims in (1, 2, 3)))
def _replication_pad_backward(ctx, grad, x, padding):
    before = [(low, high) for low, high in zip(padding[-2::-2], padding[::-2])]
    widths = [(0, 0)] * (x.ndim - len(before)) + before
    place = np.ix_(*(np.clip(np.arange(-low, size + high), 0, size - 1) for size, (low, high) in zip(x.shape, widths)))
    total = jnp.zeros(x.shape, wide(grad.dtype)).at[place].add(cast(grad, wide(grad.dtype)))
    return cast(total, ctx.dtype)


@register("aten.upsample_bicubic2d_backward.default")
def _bicubic_backward(ctx, grad, output_size, input_size, align_corners, scales_h=None, scales_w=None):
    forward = torch.ops.aten.upsample_bicubic2d.default
    primal = jax.ShapeDtypeStruct(ctx.shape, grad.dtype)
    call = lambda x: run_decomposed(forward, (x, output_size, align_corners, scales_h, scales_w), {})  # noqa: E731
    return jax.linear_transpose(call, primal)(grad)[0]
