"""graphacc::flash_attention on the CPU, against attention in float64 written with plain operators."""

import math

import pytest
import torch
import torch.nn.functional as F
from tolerances import RELATIVE, assert_close, relative_error

import graphacc
from graphacc.kernels import library
from graphacc.ops.flash_attention import EmptyRows

operator = torch.ops.graphacc.flash_attention


def make(batch, heads, groups, q_len, kv_len, dim, value_dim=None, dtype=torch.float32, scale=1.0):
    """q, k and v that take gradients."""
    sizes = ((heads, q_len, dim), (groups, kv_len, dim), (groups, kv_len, value_dim or dim))
    return [(scale * torch.randn(batch, *size)).to(dtype).requires_grad_() for size in sizes]


def reference(q, k, v, seen=None, bias=None, kept=None, scale=None):
    """softmax(q kᵀ · scale + bias) v with a [T, S] tensor; rows that see nothing give zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    empty = ~seen.expand(scores.shape).any(-1, keepdim=True)
    p = scores.masked_fill(~seen, -math.inf).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (p if kept is None else p * kept) @ v


def check(tensors, run, expect, tolerance=None):
    """Compare a function's result and gradients with those of `expect` in float64."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, wanted = run(*tensors), expect(*wide)
    grad = torch.randn(wanted.shape).to(out.dtype)
    grads = torch.autograd.grad(out, tensors, grad)
    wanted_grads = torch.autograd.grad(wanted, wide, grad.double())
    names = ("out", "grad of q", "grad of k", "grad of v", "grad of the bias")
    for name, got, want in zip(names, (out, *grads), (wanted, *wanted_grads)):
        assert got.dtype == tensors[0].dtype or name == names[-1]
        error, limit = relative_error(got, want), RELATIVE[out.dtype] if tolerance is None else tolerance
        assert error <= limit, f"{name}: relative error {error:.3g} is above {limit:.3g}"


def ahead(q_len, kv_len):
    return torch.arange(kv_len) - torch.arange(q_len)[:, None]


SHAPES = [
    (2, 4, 2, 70, 101, 40, 24),  # grouped heads, other lengths, no tile divides
    (1, 2, 2, 1, 5, 32, 32),  # one query
    (2, 2, 1, 64, 1, 64, 64),  # one key
    (1, 1, 1, 128, 192, 128, 128),  # whole tiles
    (1, 2, 1, 67, 65, 256, 256),
    (1, 2, 1, 260, 200, 80, 96),  # several tiles, and vectors of which no whole block fits the head sizes
    (1, 1, 1, 130, 100, 256, 16),
    (1, 2, 1, 3, 9000, 48, 48),  # more scratch memory than a thread keeps
    (2, 4, 4, 4, 4, 32, 32),  # a block of a ring
]


@pytest.mark.parametrize("isa", library.available_isas())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_instruction_sets(shape, isa, monkeypatch):
    monkeypatch.setattr(library, "default_isa", lambda: isa)
    check(make(*shape), graphacc.flash_attention, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(dtype, causal):
    seen = ahead(70, 70) <= 0 if causal else None
    check(make(2, 4, 2, 70, 70, 64, dtype=dtype), lambda *x: graphacc.flash_attention(*x, causal=causal), lambda *x: reference(*x, seen))


@pytest.mark.parametrize("q_len, kv_len", [(150, 150), (70, 200), (200, 70)])
@pytest.mark.parametrize(
    "causal, window, band",
    [(True, None, (10**6, 0)), (False, (20, 70), (20, 70)), (True, 5, (4, 0)), (False, 80, (79, 0))],
)
def test_bands(q_len, kv_len, causal, window, band):
    seen = (ahead(q_len, kv_len) >= -band[0]) & (ahead(q_len, kv_len) <= band[1])
    tensors = make(1, 2, 2, q_len, kv_len, 32)
    check(tensors, lambda *x: graphacc.flash_attention(*x, causal=causal, window=window), lambda *x: reference(*x, seen))


@pytest.mark.parametrize("isa", library.available_isas())
@pytest.mark.parametrize("q_len, kv_len", [(300, 300), (150, 290), (290, 110)])
@pytest.mark.parametrize("left, right", [(10**6, 0), (150, 40)])
def test_bands_cut_tiles_anywhere(q_len, kv_len, left, right, isa, monkeypatch):
    monkeypatch.setattr(library, "default_isa", lambda: isa)
    seen = (ahead(q_len, kv_len) >= -left) & (ahead(q_len, kv_len) <= right)
    tensors = make(1, 2, 1, q_len, kv_len, 32)
    check(tensors, lambda *x: graphacc.flash_attention(*x, window=(left, right)), lambda *x: reference(*x, seen))


def test_segments():
    ids = torch.randint(0, 3, (2, 90)), torch.randint(1, 4, (2, 75))
    seen = ids[0][:, None, :, None] == ids[1][:, None, None, :]
    assert not seen.any(-1).all(), "some rows see nothing"
    check(make(2, 2, 1, 90, 75, 32), lambda *x: graphacc.flash_attention(*x, segment_ids=ids), lambda *x: reference(*x, seen))
    packed = torch.arange(3).repeat_interleave(30).expand(2, 90)
    seen = packed[:, None, :, None] == packed[:, None, None, :]
    check(make(2, 2, 1, 90, 90, 32), lambda *x: graphacc.flash_attention(*x, segment_ids=packed), lambda *x: reference(*x, seen))


@pytest.mark.parametrize("shape", [(2, 4, 70, 90), (4, 70, 90), (1, 1, 70, 90), (2, 1, 1, 90), (2, 4, 1, 90), (90,)], ids=str)
def test_bias_and_its_gradient(shape):
    bias = torch.randn(shape, requires_grad=True)
    tensors = [*make(2, 4, 2, 70, 90, 32), bias]
    check(tensors, lambda q, k, v, b: graphacc.flash_attention(q, k, v, bias=b), lambda q, k, v, b: reference(q, k, v, bias=b))


def test_dropout_is_that_of_the_random_operators():
    key, size, p = torch.tensor([2**32 - 5, 77]), [2, 2, 70, 90], 0.3
    uniform = torch.ops.graphacc.random_uniform(key, 9, size, size, None)
    kept = (uniform >= p).double() / (1 - p)
    tensors = make(2, 2, 2, 70, 90, 32)
    options = (None, None, None, key, None, -1, -1, 1 / math.sqrt(32), 0, p, 9, size)
    check(tensors, lambda *x: operator(*x, *options)[0], lambda *x: reference(*x, kept=kept))
    block = [x[1:, :1, 30:50] if i == 0 else x[1:, :1, 40:] for i, x in enumerate(tensors)]
    options = (None, None, None, key, torch.tensor([1, 0, 30, 40]), *options[5:])
    block, kept = [x.detach().requires_grad_() for x in block], kept[1:, :1, 30:50, 40:]
    check(block, lambda *x: operator(*x, *options)[0], lambda *x: reference(*x, kept=kept))


def test_dropout_draws_anew_and_keeps_the_mean():
    q, k, v = make(1, 1, 1, 64, 256, 32)
    ones = torch.ones_like(v)
    first, second = (graphacc.flash_attention(q, k, ones, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(first.mean().item() - 1.0) < 0.1


@pytest.mark.parametrize("rows", EmptyRows)
def test_rows_without_a_key(rows):
    """With finite masks torch's softmax is uniform over all keys, gradients included."""
    ids = torch.tensor([[1, 2, 1, 2, 1]]).int(), torch.tensor([[1, 1, 0, 1, 0, 1, 1]]).int()
    seen = ids[0][:, None, :, None] == ids[1][:, None, None, :]
    low = torch.finfo(torch.float64).min

    def expect(q, k, v, bias):
        if rows == EmptyRows.ZEROS:
            return reference(q, k, v, seen, bias, scale=0.5)
        scores = q @ k.mT * 0.5
        added = bias + torch.zeros_like(bias).masked_fill(~seen, low)
        hidden = torch.where(seen, bias, low) if rows == EmptyRows.UNIFORM_CONSTANT else added
        return (scores + hidden).softmax(-1) @ v

    tensors = [*make(1, 2, 2, 5, 7, 32), torch.randn(1, 2, 5, 7, requires_grad=True)]
    check(tensors, lambda *x: operator(*x, *ids, None, None, -1, -1, 0.5, int(rows), 0.0, 0, [])[0], expect)


def test_no_keys_and_no_queries():
    q, k, v = make(2, 2, 2, 3, 0, 32)
    out = graphacc.flash_attention(q, k, v)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), [q])
    assert not grad.any()
    assert graphacc.flash_attention(*make(2, 2, 2, 0, 3, 32)).shape == (2, 2, 0, 32)
    assert graphacc.flash_attention(*make(0, 2, 2, 4, 3, 32)).shape == (0, 2, 4, 32)


def test_tensors_in_other_layouts():
    q, k, v = (torch.randn(2, 70, 3, 32).transpose(1, 2).requires_grad_() for _ in range(3))
    check([q, k, v], lambda *x: graphacc.flash_attention(*x).transpose(1, 2), lambda *x: reference(*x).transpose(1, 2))
    expanded = torch.randn(1, 1, 70, 32).expand(2, 3, 70, 32)
    assert_close(graphacc.flash_attention(q, expanded, v), graphacc.flash_attention(q, expanded.contiguous(), v))


def test_extreme_scores():
    """Logits of +-1e4, as torch: the largest takes all."""
    q, k, v = make(1, 2, 2, 70, 90, 32)
    big = [q.detach().sign() * 100 * math.sqrt(32) / 4, k.detach().sign() * 100 / 8, v.detach()]
    scores = big[0] @ big[1].mT / math.sqrt(32)
    assert scores.abs().max() > 5e3
    # A score of 5e3 is exact to 5e-4 in fp32, which is the relative error of its exponential.
    check([x.requires_grad_() for x in big], graphacc.flash_attention, reference, tolerance=1e-3)
    bias = torch.randn(1, 2, 70, 90).sign() * 1e4
    assert_close(graphacc.flash_attention(q, k, v, bias=bias), reference(q, k, v, bias=bias), tolerance=1e-5)


def test_rows_that_finite_masks_hide():
    """The lowest score shared by n keys: its log-sum-exp cannot say n, but the gradients must."""
    low = torch.full((1, 1, 70, 90), -1e38)
    low[..., :30, ::3] = 0.0
    low[..., 50:, :40] = -2e38
    tensors = [*make(1, 2, 2, 70, 90, 32), low.requires_grad_()]
    check(tensors, lambda q, k, v, b: graphacc.flash_attention(q, k, v, bias=b), lambda q, k, v, b: reference(q, k, v, bias=b))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_infinity_stand_where_torch_has_them(which, value):
    tensors = [x.detach() for x in make(1, 2, 2, 5, 70, 32)]
    tensors[which][0, 1, 3, 7] = value
    assert_close(graphacc.flash_attention(*tensors), F.scaled_dot_product_attention(*tensors), tolerance=1e-5)


def test_threads_do_not_change_the_result():
    tensors, results = make(2, 4, 2, 200, 200, 64), []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        out = graphacc.flash_attention(*tensors, causal=True)
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_fp64_is_written_out():
    tensors = [x.detach().double().requires_grad_() for x in make(1, 4, 2, 20, 30, 32)]
    check(tensors, lambda *x: graphacc.flash_attention(*x, causal=True), lambda *x: reference(*x, ahead(20, 30) <= 0), tolerance=1e-12)


def test_it_is_an_operator_for_torch_compile_and_export():
    q, k, v = make(1, 2, 1, 8, 9, 32)
    bias = torch.randn(2, 8, 9, requires_grad=True)
    torch.library.opcheck(operator, (q, k, v, bias, None, None, None, None, -1, 0, 0.3, 0, 0.0, 0, []))
    program = torch.export.export(_Module(), (q, k, v))
    assert any(node.target is operator.default for node in program.graph.nodes)


class _Module(torch.nn.Module):
    def forward(self, q, k, v):
        return graphacc.flash_attention(q, k, v, causal=True)


Q, GROUPED = torch.zeros(2, 4, 8, 32), torch.zeros(2, 3, 8, 32)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ((Q[0], Q, Q), {}, ValueError, "each must have 4 dims"),
        ((Q, Q[:1], Q), {}, ValueError, "batches must agree"),
        ((Q, GROUPED, GROUPED), {}, ValueError, "4 query heads are no multiple of 3 key heads"),
        ((Q, Q[..., :16], Q), {}, ValueError, "head sizes of q and k"),
        ((Q, Q.half(), Q), {}, TypeError, "float32, torch.float16.*alike"),
        ((Q.int(), Q.int(), Q.int()), {}, TypeError, "must be fp32, bf16, fp16 or fp64"),
        ((Q, Q, Q), {"bias": torch.zeros(3, 8, 8)}, ValueError, r"bias \[3, 8, 8\] does not broadcast to the scores \[2, 4, 8, 8\]"),
        ((Q, Q, Q), {"bias": torch.zeros(8, 8, dtype=torch.bool)}, TypeError, "bias is torch.bool"),
        ((Q, Q, Q), {"segment_ids": torch.zeros(2, 9)}, ValueError, r"q_segments is torch.int32\[2, 9\], expected int32\[2, 8\]"),
        ((Q, Q, Q), {"dropout": 1.5}, ValueError, "dropout=1.5 is a probability"),
        ((Q, Q, Q), {"window": 0}, ValueError, "window=0: a query must see itself"),
    ],
)
def test_wrong_arguments_are_refused(tensors, options, error, message):
    with pytest.raises(error, match=message):
        graphacc.flash_attention(*tensors, **options)
