"""Blockwise symmetric quantisation to int8 or int4, for what travels between devices.

After ZeRO++ (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, sections 3.1 and 3.3). A row of
n elements is cut into blocks; the last one is filled with zeros. A block b of q bits has one scale:

    top   = max |b|                                    qmax = 2 ** (q - 1) - 1
    scale = top / qmax, rounded up to a bfloat16       (1 where top < 2 ** -118: the block becomes zeros)
    code  = round(b / scale), half to even             b ~ code * scale

**Error.** |b / scale| <= qmax (1 + 2 ** -22), so that nothing is clipped, and rounding is off by half a code at most:

    |code * scale - b|  <=  scale / 2 * (1 + 2 ** -14)  <=  top / (2 qmax) * (1 + 2 ** -7) * (1 + 2 ** -13)  =  `error_bound` * top

(the last factors: bfloat16 has 8 significant bits, and division rounds), plus 2 ** -118 where the block becomes zeros. A sum over ranks whose
terms were quantised errs by the sum of their errors.

A block that holds an infinity or a NaN has the scale NaN, so that all of it becomes NaN: it cannot pass unnoticed.

**Same bits everywhere.** Codes have at most 7 significant bits and scales 8, so that their product is exact in float32, and sums come in
the order of ranks: a fused multiply-add gives what a multiplication and an addition give, on any backend. The largest magnitude is
found among the bits as integers, where NaN is larger than infinity; a maximum of floats may lose a NaN.

**Message.** One uint8 row: the codes of all blocks (two 4-bit codes to a byte: of the first half of a block the low, of its second half
the high four bits), then the scales of all blocks, two bytes each.
"""

import torch
from torch import Tensor

SCALE_BYTES = 2
SMALLEST = 2.0**-118
"""A block whose largest magnitude is below this becomes zeros; its scale would be subnormal, which some devices flush to zero."""
INFINITY_BITS = 0x7F800000


def code_limit(bits: int) -> int:
    """The largest code of `bits` bits."""
    return 2 ** (bits - 1) - 1


def message_bytes(n: int, bits: int, block: int) -> int:
    """Bytes of the message of a row of `n` elements."""
    return -(-n // block) * (block * bits // 8 + SCALE_BYTES)


def error_bound(bits: int) -> float:
    """The largest error of one quantisation, as a share of the block's largest magnitude; derived in the docstring of this module."""
    return 0.5 / code_limit(bits) * (1 + 2.0**-7) * (1 + 2.0**-13)


def _check(bits: int, block: int) -> None:
    if bits not in (4, 8) or block <= 0 or block % 2:
        raise ValueError(f"quantize_blocks with bits={bits}, block={block}: bits must be 4 or 8, and block an even number")


@torch.library.custom_op("graphacc::quantize_blocks", mutates_args=())
def quantize_blocks(x: Tensor, bits: int, block: int) -> Tensor:
    """The message of every row of `x`.

    Args:
        x: [..., n], floating point; computed with in float32.
        bits: of a code: 8 or 4.
        block: elements that share a scale; even.

    Returns:
        uint8 [..., message_bytes(n, bits, block)].

    Raises:
        ValueError: other `bits`, or an odd `block`.
    """
    _check(bits, block)
    rows = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    top = (rows.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    raised = (top.view(torch.float32) * torch.tensor(1 / code_limit(bits), dtype=torch.float32)).view(torch.int32) + 0xFFFF
    scales = (raised & -0x10000).view(torch.float32)  # the upper half of a float32 is a bfloat16
    scales = torch.where(top.view(torch.float32) < SMALLEST, 1.0, scales)
    scales = torch.where(top >= INFINITY_BITS, torch.nan, scales)
    codes = (rows / scales.unsqueeze(-1)).round().nan_to_num(0.0).to(torch.int8)
    if bits == 4:
        low, high = codes.unflatten(-1, (2, -1)).unbind(-2)
        codes = (low & 15) | (high << 4)
    return torch.cat([codes.flatten(-2).view(torch.uint8), scales.bfloat16().contiguous().view(torch.uint8)], -1)


@quantize_blocks.register_fake
def _(x, bits, block):
    _check(bits, block)
    return x.new_empty((*x.shape[:-1], message_bytes(x.shape[-1], bits, block)), dtype=torch.uint8)


def _values(message: Tensor, n: int, bits: int, block: int) -> Tensor:
    blocks = -(-n // block)
    codes, scales = message.split([blocks * block * bits // 8, blocks * SCALE_BYTES], -1)
    codes = codes.contiguous().view(torch.int8).unflatten(-1, (blocks, -1))
    if bits == 4:
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], -1)
    values = codes.float() * scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float().unsqueeze(-1)
    return values.flatten(-2)[..., :n]


@torch.library.custom_op("graphacc::dequantize_blocks", mutates_args=())
def dequantize_blocks(message: Tensor, n: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    """The rows of messages: uint8 [..., message_bytes(n, bits, block)] -> [..., n] of `dtype`."""
    return _values(message, n, bits, block).to(dtype, copy=True)


@dequantize_blocks.register_fake
def _(message, n, bits, block, dtype):
    assert message.shape[-1] == message_bytes(n, bits, block), f"a message of {message.shape[-1]} bytes does not hold {n} elements"
    return message.new_empty((*message.shape[:-1], n), dtype=dtype)


@torch.library.custom_op("graphacc::dequantize_sum", mutates_args=())
def dequantize_sum(messages: Tensor, n: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    """The sum over dim 0 of what messages hold, added in float32 in the order of dim 0.

    Args:
        messages: uint8 [ranks, ..., message_bytes(n, bits, block)].

    Returns:
        [..., n] of `dtype`.
    """
    total = _values(messages[0], n, bits, block)
    for message in messages[1:]:
        total = total + _values(message, n, bits, block)
    return total.to(dtype, copy=True)


@dequantize_sum.register_fake
def _(messages, n, bits, block, dtype):
    assert messages.shape[-1] == message_bytes(n, bits, block), f"a message of {messages.shape[-1]} bytes does not hold {n} elements"
    return messages.new_empty((*messages.shape[1:-1], n), dtype=dtype)
