"""graphacc's own operators: attention and random numbers, against their torch implementations."""

import pytest
import torch
from helpers_lowering import check_lowering, run_lowered, step_graph

import graphacc.ops  # noqa: F401  (registers the operators)

ops = torch.ops.graphacc
B, H, T, S, D, E = 2, 4, 5, 6, 8, 7


def _mask(kind):
    if kind == "bool":
        mask = torch.rand(B, 1, T, S) > 0.3
        mask[0, :, 2] = False  # a row that is masked entirely
        return mask
    return {"none": None, "added": torch.randn(H, T, S), "row": torch.randn(1, 1, 1, S)}[kind]


def _tensors(dtype, groups):
    return [torch.randn(shape).to(dtype) for shape in ((B, H, T, D), (B, groups, S, D), (B, groups, S, E))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("mask", "dropout", "causal"),
    [("none", False, False), ("none", False, True), ("bool", True, False), ("added", False, True), ("row", True, True)],
)
@pytest.mark.default_cases("none-False-False-1-dtype0", "none-False-False-2-dtype1", "none-False-False-4-dtype2", "none-False-True-2-dtype0", "none-False-True-4-dtype1", "bool-True-False-1-dtype2", "bool-True-False-4-dtype0", "added-False-True-1-dtype1", "added-False-True-2-dtype2", "row-True-True-1-dtype0", "row-True-True-2-dtype1", "row-True-True-4-dtype2")
def test_sdpa_and_its_backward(dtype, groups, mask, dropout, causal):
    q, k, v = _tensors(dtype, groups)
    mask = _mask(mask)
    keep = (torch.rand(B, H, T, S) > 0.2).float() / 0.8 if dropout else None
    extra = [x for x in (mask, keep) if x is not None]

    def optional(rest):
        rest = list(rest)
        return [rest.pop(0) if x is not None else None for x in (mask, keep)]

    check_lowering(lambda q, k, v, *rest: ops.sdpa(q, k, v, *optional(rest), causal, 0.3), q, k, v, *extra)
    out, lse = ops.sdpa(q, k, v, mask, keep, causal, 0.3)
    grad = torch.randn_like(out)

    def backward(grad, q, k, v, out, lse, *rest):
        return ops.sdpa_backward(grad, q, k, v, *optional(rest), out, lse, causal, 0.3)

    check_lowering(backward, grad, q, k, v, out, lse, *extra)


def test_a_row_that_is_masked_entirely_gives_zeros():
    q, k, v = _tensors(torch.float32, H)
    mask = torch.zeros(T, S, dtype=torch.bool)
    out, lse = run_lowered(step_graph(lambda q, k, v, m: ops.sdpa(q, k, v, m, None, False, 1.0), q, k, v, mask), q, k, v, mask)
    assert not out.any() and bool(torch.isneginf(lse).all())


def test_flash_attention_for_cpu_and_its_backward():
    q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    check_lowering(lambda q, k, v: forward(q, k, v, 0.0, True), q, k, v)
    out, lse = forward(q, k, v, 0.0, True)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    check_lowering(lambda g, *rest: backward(g, *rest, 0.0, True), torch.randn_like(out), q, k, v, out, lse)


def _same_bits(call, *tensors):
    got = run_lowered(step_graph(call, *tensors), *tensors, jit=True)
    expected = call(*tensors)
    assert got[0].dtype == expected.dtype and torch.equal(got[0], expected)


KEY = torch.tensor([0xDEADBEEF, 2**32 + 12345])


@pytest.mark.parametrize("stream", [0, 7, 2**32 + 3])
@pytest.mark.parametrize("size", [[], [5], [3, 4, 5]])
@pytest.mark.default_cases("size0-0", "size1-7", "size2-4294967299")
def test_random_numbers_are_bit_identical(stream, size):
    _same_bits(lambda key: ops.random_bits(key, stream, size, size, None), KEY)
    _same_bits(lambda key: ops.random_uniform(key, stream, size, size, None), KEY)
    index = torch.randint(2**40, size, generator=torch.Generator().manual_seed(0))
    _same_bits(lambda key, index: ops.random_bits_at(key[0], key[1], index, stream), KEY, index)
    _same_bits(lambda key, index: ops.random_uniform_at(key[0], key[1], index, stream), KEY, index)


@pytest.mark.parametrize("whole", [[8, 6], [2**20, 2**14]])
def test_a_block_draws_the_numbers_of_its_place_in_the_whole(whole):
    start = torch.tensor([whole[0] - 2, 3])
    _same_bits(lambda key, start: ops.random_bits(key, 1, [2, 3], whole, start), KEY, start)


def test_blocks_are_cut_from_the_same_numbers():
    whole = ops.random_uniform(KEY, 3, [8, 6], [8, 6], None)
    start = torch.tensor([4, 3])
    (block,) = run_lowered(step_graph(lambda key, s: ops.random_uniform(key, 3, [4, 3], [8, 6], s), KEY, start), KEY, start)
    assert torch.equal(block, whole[4:, 3:])


def test_after_keeps_the_value():
    check_lowering(lambda x, y: ops.after(x, y) * 2, torch.randn(3), torch.randn(2))
