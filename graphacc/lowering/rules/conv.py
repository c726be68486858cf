"""Convolutions of one to three spatial dims, batch and channels first, and their gradients as the transposed maps.

Legend: N batch, C input channels, O output channels, spatial dims in torch's order.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from graphacc._compat import jax_ as compat
from graphacc.lowering.dtypes import cast, wide
from graphacc.lowering.partitioned import is_partitioned
from graphacc.lowering.registry import register
from graphacc.lowering.rules import cpu_grouped_conv
from graphacc.lowering.rules.matmul import precision


def _spread(values, spatial: int) -> list[int]:
    """Torch allows one number for all spatial dims."""
    return list(values) * spatial if len(values) == 1 else list(values)


def _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups):
    """[N, C, ...] with [O, C / groups, ...], or [C, O / groups, ...] when transposed, -> [N, O, ...]."""
    spatial = x.ndim - 2
    stride, padding, dilation = _spread(stride, spatial), _spread(padding, spatial), _spread(dilation, spatial)
    pads = [(p, p) for p in padding]
    window, lhs_dilation = stride, [1] * spatial
    if transposed:
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, _spread(output_padding, spatial))]
        window, lhs_dilation = [1] * spatial, stride
        weight = _transpose_kernel(weight, groups)
    return lax.conv_general_dilated(
        x,
        weight,
        window_strides=window,
        padding=pads,
        lhs_dilation=lhs_dilation,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=precision(),
        preferred_element_type=x.dtype,
    )


def _transpose_kernel(weight, groups):
    """[C, O / groups, ...] -> [O, C / groups, ...] with reversed spatial dims."""
    channels, per_group, *kernel = weight.shape
    grouped = weight.reshape(groups, channels // groups, per_group, *kernel).swapaxes(1, 2)
    return lax.rev(grouped.reshape(groups * per_group, channels // groups, *kernel), list(range(2, weight.ndim)))


def _in_groups(x, weight, stride, padding, dilation, transposed, output_padding, groups) -> cpu_grouped_conv.GroupedConvolution | None:
    """How the CPU computes this convolution by itself; None where XLA does."""
    if is_partitioned() or not cpu_grouped_conv.takes(x, weight, groups):
        return None
    sizes = [tuple(_spread(values, x.ndim - 2)) for values in (stride, padding, dilation)]
    return cpu_grouped_conv.GroupedConvolution(groups=groups, stride=sizes[0], padding=sizes[1], dilation=sizes[2], transposed=transposed)


def _on_cpu(own, by_xla, *arrays):
    """`own` of the arrays where a program is for the CPU, and there is such a function; else `by_xla`."""
    if not own:
        return by_xla(*arrays)
    result = jax.eval_shape(by_xla, *arrays)
    return compat.lowered_for_platform(lambda platform, *given: [(own if platform == "cpu" else by_xla)(*given)], [result], *arrays)[0]


@register("aten.convolution.default", "aten.convolution_overrideable.default")
def convolution(ctx, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    static = (stride, padding, dilation, transposed, output_padding, groups)
    own = _in_groups(x, weight, *static)
    result = _on_cpu(own and (lambda x, weight: own.forward(x, weight, ctx.shape[2:])), lambda x, weight: _convolve(x, weight, *static), x, weight)
    return result if bias is None else result + bias.reshape((-1,) + (1,) * (x.ndim - 2))


@register("aten.convolution_backward.default")
def _convolution_backward(
    ctx, grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    static = (stride, padding, dilation, transposed, output_padding, groups)
    own = _in_groups(x, weight, *static)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        vectors = groups > 1 or cpu_grouped_conv.fills_vectors(x.shape[1])
        grad_x = _on_cpu(
            own and vectors and (lambda grad, weight: own.input_gradient(grad, weight, like.shape[2:])),
            lambda grad, weight: jax.linear_transpose(lambda value: _convolve(value, weight, *static), like)(grad)[0],
            grad, weight,
        )  # fmt: skip
    if output_mask[1]:
        filters = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        grad_weight = _on_cpu(
            own and (lambda grad, x: own.weight_gradient(grad, x, filters.shape)),
            lambda grad, x: jax.linear_transpose(lambda value: _convolve(x, value, *static), filters)(grad)[0],
            grad, x,
        )  # fmt: skip
    if output_mask[2]:
        grad_bias = cast(jnp.sum(grad, axis=(0, *range(2, grad.ndim))), grad.dtype)
    return grad_x, grad_weight, grad_bias


@register("aten.im2col.default")
def im2col(ctx, x, kernel_size, dilation, padding, stride):
    """[N, C, H, W] -> [N, C · kh · kw, blocks]."""
    return _im2col(x, kernel_size, dilation, padding, stride).reshape(ctx.shape)


_MOST_SLICES = 64


def _im2col(x, kernel_size, dilation, padding, stride):
    """Patches as slices of the image, one for each place in the kernel; large kernels as a convolution with one-hot filters, which multiplies zeros."""
    x = x if x.ndim == 4 else x[None]
    if math.prod(kernel_size) > _MOST_SLICES:
        pads = [(p, p) for p in padding]
        patches = lax.conv_general_dilated_patches(
            x, tuple(kernel_size), tuple(stride), pads, rhs_dilation=tuple(dilation), precision=lax.Precision.HIGHEST
        )
        return patches.reshape(*patches.shape[:2], math.prod(patches.shape[2:]))
    padded = jnp.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    reach = [size - d * (k - 1) for size, d, k in zip(padded.shape[2:], dilation, kernel_size)]
    slices = [
        padded[:, :, row * dilation[0] :, column * dilation[1] :][:, :, : reach[0] : stride[0], : reach[1] : stride[1]]
        for row in range(kernel_size[0])
        for column in range(kernel_size[1])
    ]
    patches = jnp.stack(slices, axis=2)  # [N, C, kh · kw, rows, columns]
    return patches.reshape(x.shape[0], x.shape[1] * len(slices), math.prod(patches.shape[3:]))


@register("aten.col2im.default")
def _col2im(ctx, columns, output_size, kernel_size, dilation, padding, stride):
    batched = columns if columns.ndim == 3 else columns[None]
    channels = batched.shape[1] // (kernel_size[0] * kernel_size[1])
    batched = cast(batched, wide(columns.dtype))
    image = jax.ShapeDtypeStruct((batched.shape[0], channels, *output_size), batched.dtype)
    transpose = jax.linear_transpose(lambda x: _im2col(x, kernel_size, dilation, padding, stride), image)
    return cast(transpose(batched)[0], ctx.dtype).reshape(ctx.shape)
