"""Counter-based random numbers: the value of an element depends on the key, the stream and its global index alone.

A random operator of the model becomes one of these with a `stream` of its own. An element's bits are
threefry-2x32 of its linear index in the *global* tensor, so every strategy and device count draws the same numbers: a
device that holds a block passes the block's `start`. Threefry: Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC'11; the counter layout is that of JAX's partitionable threefry.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry2x32(key: tuple[Tensor, Tensor], x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds on int64 tensors that hold 32-bit words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (x0 + keys[0]) & _MASK, (x1 + keys[1]) & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) & _MASK
            x1 = x0 ^ x1
        x0 = (x0 + keys[(block + 1) % 3]) & _MASK
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _MASK
    return x0, x1


def _linear_index(size: list[int], global_size: list[int], start: Tensor | None, device: torch.device) -> Tensor:
    """Index in the row-major global tensor of every element of the local block, int64 of shape `size`."""
    index = torch.zeros(size, dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(size))):
        position = torch.arange(size[dim], dtype=torch.int64, device=device)
        if start is not None:
            position = position + start[dim]
        index = index + (position * stride).view([-1] + [1] * (len(size) - dim - 1))
        stride *= global_size[dim]
    return index


@torch.library.custom_op("graphacc::random_bits", mutates_args=())
def random_bits(key: Tensor, stream: int, size: list[int], global_size: list[int], start: Tensor | None) -> Tensor:
    """Uniform 32-bit integers.

    Args:
        key: int64[2], two 32-bit words.
        stream: number of the random operator within the step.
        size: shape of the result, which is a block of the global tensor.
        global_size: shape of the global tensor.
        start: int64[ndim], index of the block's first element in the global tensor; None means zeros.

    Returns:
        int64 tensor of shape `size` with values in [0, 2**32).
    """
    return _bits(key[0], key[1], _linear_index(size, global_size, start, key.device), stream)


def _bits(word0: Tensor, word1: Tensor, index: Tensor, stream: int) -> Tensor:
    words = (word0 & _MASK, word1 & _MASK)
    derived = _threefry2x32(words, torch.full_like(words[0], stream & _MASK), torch.full_like(words[0], stream >> 32))
    x0, x1 = _threefry2x32(derived, index >> 32, index & _MASK)
    return x0 ^ x1


@random_bits.register_fake
def _(key, stream, size, global_size, start):
    return key.new_empty(size, dtype=torch.int64)


@torch.library.custom_op("graphacc::random_uniform", mutates_args=())
def random_uniform(key: Tensor, stream: int, size: list[int], global_size: list[int], start: Tensor | None) -> Tensor:
    """Uniform float32 in [0, 1) with 24 random bits; arguments as for `random_bits`."""
    bits = torch.ops.graphacc.random_bits(key, stream, size, global_size, start)
    return (bits >> 8).to(torch.float32) * 2.0**-24


@random_uniform.register_fake
def _(key, stream, size, global_size, start):
    return key.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("graphacc::random_bits_at", mutates_args=(), tags=(torch.Tag.pointwise,))  # type: ignore[call-overload]  (the stub knows no tags)
def random_bits_at(word0: Tensor, word1: Tensor, index: Tensor, stream: int) -> Tensor:
    """The numbers that `random_bits` has at indices of the global tensor, where its shape is known only when the program runs.

    Args:
        word0, word1: the key's words, int64, 0-d.
        index: int64, row-major in the global tensor.
        stream: as for `random_bits`.

    Returns:
        int64 tensor of the shape of `index` with values in [0, 2**32).
    """
    return _bits(word0, word1, index, stream)


@random_bits_at.register_fake
def _(word0, word1, index, stream):
    return index.new_empty(index.shape)


@torch.library.custom_op("graphacc::random_uniform_at", mutates_args=(), tags=(torch.Tag.pointwise,))  # type: ignore[call-overload]  (the stub knows no tags)
def random_uniform_at(word0: Tensor, word1: Tensor, index: Tensor, stream: int) -> Tensor:
    """The numbers of `random_uniform`; arguments as for `random_bits_at`."""
    return (_bits(word0, word1, index, stream) >> 8).to(torch.float32) * 2.0**-24


@random_uniform_at.register_fake
def _(word0, word1, index, stream):
    return index.new_empty(index.shape, dtype=torch.float32)
