"""Depthwise convolutions as custom calls on the CPU: every channel has its own filter.

XLA:CPU has no kernel for them. It computes each with a loop over scalars, and a filter's gradient as that of a full convolution between all
channels, of which it keeps the diagonal: ConvNeXt's step takes 2.7 times PyTorch's. The calls (csrc/ffi/depthwise.cc) take channels last, as XLA's own
convolutions on the CPU and layer norms over channels do, so that next to those no transposition is left.

Legend: N batch, C channels, KH and KW the filters' sizes. An image is "fine" before a convolution with a stride, and "coarse" behind it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from graphacc.kernels.library import register_xla_target
from graphacc.lowering.dtypes import cast

LEAST_CHANNELS = 4
"""Vectors hold channels."""

_TAKEN = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depthwise:
    """One convolution of one or two spatial dims."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool

    def forward(self, x, weight, size):
        """[N, C, *spatial] with [C, 1, *filter] -> [N, C, *size]."""
        return self._gathered(x, weight, size, "gacc_depthwise_transposed" if self.transposed else "gacc_depthwise")

    def input_gradient(self, grad, weight, size):
        """The transposed map of `forward`."""
        return self._gathered(grad, weight, size, "gacc_depthwise" if self.transposed else "gacc_depthwise_transposed")

    def weight_gradient(self, grad, x, filter_size):
        """[C, 1, *filter]."""
        fine, coarse = (grad, x) if self.transposed else (x, grad)
        result = (*_of_two(filter_size, 1), x.shape[1])
        found = self._call("gacc_depthwise_weight", result, _channels_last(fine), _channels_last(coarse))
        return cast(found.transpose(2, 0, 1).reshape(x.shape[1], 1, *filter_size), x.dtype)

    def _gathered(self, x, weight, size, call):
        filters = cast(weight, np.float32).reshape(weight.shape[0], *_of_two(weight.shape[2:], 1)).transpose(1, 2, 0)
        result = (x.shape[0], *_of_two(size, 1), x.shape[1])
        found = self._call(call, result, _channels_last(x), filters)
        return cast(jnp.moveaxis(found, -1, 1).reshape(*x.shape[:2], *size), x.dtype)

    def _call(self, name, shape, *arrays):
        register_xla_target(name)
        numbers = {"stride": (self.stride, 1), "padding": (self.padding, 0), "dilation": (self.dilation, 1)}
        told = {what: np.array(_of_two(values, missing), np.int64) for what, (values, missing) in numbers.items()}
        return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, np.float32))(*arrays, **told)


def takes(x, weight, groups: int) -> bool:
    """Whether [N, C, ...] with these filters is a depthwise convolution of one or two spatial dims."""
    channels = x.shape[1]
    fits = groups == channels >= LEAST_CHANNELS and tuple(weight.shape[:2]) == (channels, 1) and x.ndim in (3, 4)
    return fits and x.dtype == weight.dtype and x.dtype.name in _TAKEN and 0 not in x.shape


def _of_two(numbers, missing: int) -> tuple[int, ...]:
    """Of rows and columns; one dim is a row of columns."""
    return tuple(numbers) if len(numbers) == 2 else (missing, *numbers)


def _channels_last(x):
    """fp32 [N, H, W, C]."""
    return jnp.moveaxis(cast(x, np.float32).reshape(*x.shape[:2], *_of_two(x.shape[2:], 1)), 1, -1)
