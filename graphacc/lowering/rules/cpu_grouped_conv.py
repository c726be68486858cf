"""Convolutions as custom calls on the CPU: those in groups (depthwise ones, in which every channel has its own filter, and those of ResNeXt and RegNet),
and those of large images.

XLA:CPU has no kernel for groups. It computes each with a loop over scalars, and a depthwise filter's gradient as that of a full convolution between
all channels, of which it keeps the diagonal: ConvNeXt's step takes 2.7 times PyTorch's, RegNet's 7.4 times. The calls (csrc/ffi/grouped_conv.cc) take
channels last, as XLA's own convolutions on the CPU and layer norms over channels do, so that next to those no transposition is left.

Legend: N batch, G groups, I and O input and output channels of a group, KH and KW the filters' sizes. An image is "fine" before a convolution
with a stride, and "coarse" behind it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from graphacc.kernels.library import register_xla_target
from graphacc.lowering.dtypes import cast

LEAST_CHANNELS = 4
"""Of the smallest vector."""

LEAST_IMAGE = 16
"""Rows and columns of an image of a convolution without groups: XLA's kernels take 1.5 to 1.8 times as long (3 x 3, 32 to 96 channels), and 10 times where an image's three channels come in; on smaller ones the same."""

_TAKEN = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConvolution:
    """One convolution of one or two spatial dims; without groups it has one."""

    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool

    def forward(self, x, weight, size):
        """[N, G · I, *spatial] with [G · O, I, *filter], or [G · I, O, *filter] when transposed, -> [N, G · O, *size]."""
        return self._gathered(x, self._filters(weight, inputs_first=True), size, upwards=self.transposed)

    def input_gradient(self, grad, weight, size):
        """The transposed map of `forward`."""
        return self._gathered(grad, self._filters(weight, inputs_first=False), size, upwards=not self.transposed)

    def weight_gradient(self, grad, x, shape):
        """In a weight's shape."""
        fine, coarse = (grad, x) if self.transposed else (x, grad)
        of_groups = fine.shape[1] // self.groups, coarse.shape[1] // self.groups
        found = self._call("gacc_grouped_conv_weight", (*_of_two(shape[2:], 1), self.groups, *of_groups), _channels_last(fine), _channels_last(coarse))
        return cast(found.transpose(2, 4, 3, 0, 1).reshape(shape), x.dtype)  # the weight's first channels are the coarse image's

    def _filters(self, weight, *, inputs_first: bool):
        """[KH, KW, G, I, O], or with O and I swapped."""
        filters = cast(weight, np.float32).reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], *_of_two(weight.shape[2:], 1))
        return filters.transpose((3, 4, 0, 1, 2) if inputs_first == self.transposed else (3, 4, 0, 2, 1))

    def _gathered(self, x, filters, size, *, upwards: bool):
        result = (x.shape[0], *_of_two(size, 1), self.groups * filters.shape[-1])
        found = self._call("gacc_grouped_conv_transposed" if upwards else "gacc_grouped_conv", result, _channels_last(x), filters)
        return cast(jnp.moveaxis(found, -1, 1).reshape(x.shape[0], result[-1], *size), x.dtype)

    def _call(self, name, shape, *arrays):
        register_xla_target(name)
        numbers = {"stride": (self.stride, 1), "padding": (self.padding, 0), "dilation": (self.dilation, 1)}
        told = {what: np.array(_of_two(values, missing), np.int64) for what, (values, missing) in numbers.items()}
        return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, np.float32))(*arrays, **told)


def takes(x, weight, groups: int) -> bool:
    """Whether a convolution of [N, C, ...] of one or two spatial dims with these filters is computed here: XLA has no kernel, or a slower one."""
    if x.ndim not in (3, 4) or 0 in x.shape or x.dtype != weight.dtype or x.dtype.name not in _TAKEN:
        return False
    outputs = weight.shape[0] * weight.shape[1] // x.shape[1]
    return groups > 1 or (x.ndim == 4 and math.prod(weight.shape[2:]) > 1 and min(x.shape[2:]) >= LEAST_IMAGE and fills_vectors(outputs))


def fills_vectors(channels: int) -> bool:
    """Whether these channels of a result are whole vectors. Those of an image's gradient, which is seldom asked for, are not."""
    return channels % LEAST_CHANNELS == 0


def _of_two(numbers, missing: int) -> tuple[int, ...]:
    """Of rows and columns; one dim is a row of columns."""
    return tuple(numbers) if len(numbers) == 2 else (missing, *numbers)


def _channels_last(x):
    """fp32 [N, H, W, C]."""
    return jnp.moveaxis(cast(x, np.float32).reshape(*x.shape[:2], *_of_two(x.shape[2:], 1)), 1, -1)
