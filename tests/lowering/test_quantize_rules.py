"""Blockwise quantisation: XLA's bits are those of the torch reference, the error is bounded as derived, and no NaN is lost."""

import pytest
import torch
from helpers_lowering import run_lowered, step_graph

from graphacc.ops.quantize import SMALLEST, error_bound, message_bytes

own = torch.ops.graphacc


def run(function, x: torch.Tensor) -> torch.Tensor:
    """Compiled by XLA with its ordinary options."""
    return run_lowered(step_graph(function, x), x, jit=True)[0]


def rows(n: int) -> torch.Tensor:
    """Six rows: normal, heavy-tailed, of very different scales, with zeros, tiny, and nearly the largest floats."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(6, n, generator=generator)
    x[1] = x[1] ** 5
    x[2] *= torch.logspace(-30, 30, n)
    x[3, : n // 2] = 0
    x[4] *= 1e-38
    x[5] = x[5].sign() * 3e38
    return x


@pytest.mark.parametrize(("bits", "block", "n", "dtype"), [(8, 256, 1000, torch.float32), (4, 256, 512, torch.bfloat16), (4, 6, 17, torch.float32), (8, 2, 1, torch.float16)])
def test_the_same_bits_as_torch(bits, block, n, dtype):
    x = rows(n).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    message = own.quantize_blocks(x, bits, block)
    assert message.dtype == torch.uint8 and message.shape == (6, message_bytes(n, bits, block))
    assert torch.equal(run(lambda x: own.quantize_blocks(x, bits, block), x), message)
    assert torch.equal(run(lambda m: own.dequantize_blocks(m, n, bits, block, dtype), message), own.dequantize_blocks(message, n, bits, block, dtype))
    summed = own.dequantize_sum(message, n, bits, block, torch.float32)
    assert torch.equal(run(lambda m: own.dequantize_sum(m, n, bits, block, torch.float32), message), summed)
    expected = torch.zeros(n)
    for row in own.dequantize_blocks(message, n, bits, block, torch.float32):
        expected = expected + row
    assert torch.equal(summed, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_bounded(bits):
    x, block = rows(1024), 256
    got = own.dequantize_blocks(own.quantize_blocks(x, bits, block), 1024, bits, block, torch.float32)
    top = x.unflatten(1, (-1, block)).abs().amax(-1, keepdim=True).expand(-1, -1, block).flatten(1)
    assert ((got.double() - x.double()).abs() <= error_bound(bits) * top.double() + SMALLEST).all()
    assert error_bound(bits) < 0.504 / (2 ** (bits - 1) - 1)
    assert (got[3, :512] == 0).all() and (got[4] == 0).all()  # zeros stay zeros, and what no normal scale reaches becomes zero


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_block_nan(bits, value):
    """Of 8,192 elements, where XLA's maximum of floats on CPU loses a NaN; the other blocks and rows are as they were."""
    x = torch.randn(2, 8192)
    clean = own.dequantize_blocks(own.quantize_blocks(x, bits, 4096), 8192, bits, 4096, torch.float32)
    x[1, 5000] = value
    for there_and_back in (lambda x: own.dequantize_blocks(own.quantize_blocks(x, bits, 4096), 8192, bits, 4096, torch.float32),):
        for got in (there_and_back(x), run(there_and_back, x)):
            assert got[1, 4096:].isnan().all()
            assert torch.equal(got[0], clean[0]) and torch.equal(got[1, :4096], clean[1, :4096])


def test_padding_is_not_read():
    """The last block is filled up: what its message holds there changes nothing, and short rows need no more than their blocks."""
    x = torch.randn(300)
    message = own.quantize_blocks(x, 8, 256)
    changed = message.clone()
    changed[300:512] = 77
    assert torch.equal(own.dequantize_blocks(changed, 300, 8, 256, torch.float32), own.dequantize_blocks(message, 300, 8, 256, torch.float32))
    assert message.numel() == 2 * (256 + 2)


def test_bad_arguments():
    for bits, block in ((3, 256), (8, 7), (4, 0)):
        with pytest.raises(ValueError, match="bits must be 4 or 8, and block an even number"):
            own.quantize_blocks(torch.randn(8), bits, block)


