"""graphacc::flash_attention on CUDA and TPU, without either: the choice of the form, the programs as lowered, and the TPU kernels' numbers.

The kernels run in Pallas' interpreter, against the operator's written-out formula in plain PyTorch.
"""

import functools
import json
import re

import jax
import pytest
import torch
from helpers_lowering import FAST_COMPILE, known_options, step_graph, to_array, to_tensor
from tolerances import assert_close

import graphacc.lowering
from graphacc._compat.jax_ import x64
from graphacc.lowering.rules import flash_attention as rules
from graphacc.lowering.rules import flash_pallas
from graphacc.ops import flash_attention as operator
from graphacc.ops.flash_attention import EmptyRows
from graphacc.ops.flash_form import Described, Form, choose

ops = torch.ops.graphacc
CAUSAL = (-1, 0)


def described(**changes) -> Described:
    """A causal call that every kernel takes, with changes."""
    usual = dict(dtype="bfloat16", batch=2, heads=4, kv_heads=2, q_len=200, kv_len=300, head_dim=64, value_dim=64, left=-1, right=0)
    return Described(**usual | changes)


# The choice


@pytest.mark.parametrize(
    ("changes", "cuda", "tpu"),
    [
        ({}, Form.CUDNN, Form.PALLAS),
        ({"right": -1}, Form.CUDNN, Form.PALLAS),
        ({"left": 63}, Form.CUDNN, Form.PALLAS),
        ({"dtype": "float16", "head_dim": 128, "value_dim": 128}, Form.CUDNN, "the call is float16"),
        ({"dtype": "float32"}, "takes bf16 and fp16", Form.PALLAS),
        ({"dtype": "float64"}, "fp64", "fp64"),
        ({"head_dim": 36, "value_dim": 36}, "36 is no multiple of 8", Form.PALLAS),
        ({"head_dim": 256, "value_dim": 256}, "256 is no multiple of 8 up to 128", Form.PALLAS),
        ({"head_dim": 264, "value_dim": 64}, "differ, 264 and 64", "264 is above 256"),
        ({"value_dim": 32}, "differ, 64 and 32", Form.PALLAS),
        ({"q_len": 1}, "one query", Form.PALLAS),
        ({"q_len": 0}, "no elements", "no elements"),
        ({"dropout": True}, "global scores", "no random numbers"),
        ({"bias": True}, "a bias may hide", "no bias"),
        ({"segments": True}, "lengths", Form.PALLAS),
        ({"right": 5}, "right 5.* is not causal", Form.PALLAS),
        ({"left": 5, "right": -1}, "left 5.* is not causal", Form.PALLAS),
        ({"left": 63, "q_len": 301}, "leaves queries without a key", Form.PALLAS),
    ],
    ids=str,
)
def test_the_form_of_a_call(changes, cuda, tpu):
    for platform, expected in (("cuda", cuda), ("tpu", tpu)):
        choice = choose(platform, described(**changes))
        if isinstance(expected, Form):
            assert choice.form == expected, choice
        else:
            assert choice.form == Form.BLOCKWISE and re.search(expected, choice.reason), choice


def test_the_form_depends_on_the_platform_and_the_device():
    assert choose("cpu", described(bias=True, dropout=True)).form == Form.CPU_KERNEL
    assert str(choose("rocm", described())) == "blocks of keys in an XLA loop (there is no kernel for rocm)"
    assert choose("cuda", described(), capability=(8, 0)).form == Form.CUDNN
    assert "the device has 7.5" in choose("cuda", described(), capability=(7, 5)).reason


def test_a_band_that_hides_nothing_is_none():
    """Of torch's tensors, as a report reads them, and of arrays alike."""
    q, k = torch.empty(1, 4, 10, 64, dtype=torch.bfloat16), torch.empty(1, 2, 20, 64, dtype=torch.bfloat16)
    for make in (lambda x: x, to_array):
        read = Described.of(make(q), make(k), make(k), bias=None, q_segments=None, left=9, right=19, dropout=0.0)
        assert read == described(batch=1, q_len=10, kv_len=20, left=-1, right=-1)
        read = Described.of(make(q), make(k), make(k), bias=None, q_segments=None, left=8, right=18, dropout=0.0)
        assert (read.left, read.right) == (8, 18)


# The programs


def lowered(platform, *, dtype=torch.bfloat16, band=CAUSAL, bias=False, dropout=0.0, segments=False):
    """The StableHLO of forward and backward, [2, 4, 1100, 64] and [2, 2, 1100, 64]."""
    length, heads = 1100, (4, 2)
    options = (*band, 0.125, int(EmptyRows.UNIFORM), dropout, 0, [2, heads[0], length, length] if dropout else [])

    def run(q, k, v, grad, *rest):
        tensors = [rest[0] if bias else None, *(rest[-2:] if segments else (None, None)), rest[0] if dropout else None, None]
        out, lse = ops.flash_attention(q, k, v, *tensors, *options)
        return out, lse, *ops.flash_attention_backward(grad, q, k, v, *tensors, out, lse, *options, False)[:3]

    made = [torch.zeros(2, count, length, 64, dtype=dtype) for count in (heads[0], heads[1], heads[1], heads[0])]
    made += [torch.zeros(heads[0], 1, length)] if bias else [torch.zeros(2, dtype=torch.int64)] if dropout else []
    made += [torch.zeros(2, length, dtype=torch.int32)] * 2 if segments else []
    with x64():
        traced = jax.jit(graphacc.lowering.lower(step_graph(run, *made))).trace(*map(to_array, made))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert f"{length}x{length}" not in text, "no tensor has both lengths"
    return text


def cudnn_calls(text) -> dict[str, tuple[dict, str]]:
    """Target of a custom call -> what cuDNN is told, and the types of operands and results."""
    found = re.findall(r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "(.*?)(?<!\\)".*? : (\(.*)', text)
    unescaped = [(name, re.sub(r"\\22", '"', config).replace('\\"', '"'), types) for name, config, types in found]
    return {name: (json.loads(config)["cudnn_fmha_backend_config"], types) for name, config, types in unescaped}


@pytest.mark.parametrize(
    ("band", "mask", "window"), [(CAUSAL, "CAUSAL", 0), ((-1, -1), "NO_MASK", 0), ((255, 0), "CAUSAL", 256)], ids=str
)
def test_cudnn_forward_and_backward(band, mask, window):
    text = lowered("cuda", band=band)
    calls = cudnn_calls(text)
    assert list(calls) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"] and "stablehlo.while" not in text
    for told, _ in calls.values():
        assert (told["fmha_scale"], told["mask_type"], told["sliding_window_length"]) == (0.125, mask, window)
        assert told["dropout_rate"] == 0 and told["intermediate_tensor_shape"]["dimensions"] == ["2", "4", "1100", "1100"]
    q, kv, lse = "tensor<2x1100x4x64xbf16>", "tensor<2x1100x2x64xbf16>", "tensor<2x4x1100xf32>"  # as linear layers give them: no copies before and behind
    (_, forward), (_, backward) = calls.values()
    of_q, of_kv = "tensor<2x4x1100x64xbf16>", "tensor<2x2x1100x64xbf16>"  # JAX gives results so, in the operands' layout
    assert forward.startswith(f"({q}, {kv}, {kv}) -> ({of_q}, {lse}, ")
    assert backward.startswith(f"({q}, {kv}, {kv}, {lse}, {q}, {q}) -> ({of_q}, {of_kv}, {of_kv}, ")
    gave = re.search(r"(%\d+):\d = stablehlo.custom_call @__cudnn\$fmhaSoftmax\(", text)[1]
    assert f"{gave}#1" in re.search(r"Backward\((.*?)\)", text)[1], "the backward takes the forward's log-sum-exp"


@pytest.mark.parametrize("options", [dict(dtype=torch.float32), dict(bias=True), dict(dropout=0.1), dict(segments=True)], ids=str)
def test_what_cudnn_does_not_take_goes_by_blocks(options):
    text = lowered("cuda", **options)
    assert not cudnn_calls(text) and text.count("stablehlo.while") >= 3


@pytest.mark.parametrize("options", [dict(), dict(dtype=torch.float32, band=(255, 0)), dict(segments=True)], ids=str)
def test_pallas_forward_and_backward(options):
    text = lowered("tpu", **options)
    names = re.findall(r"custom_call @tpu_custom_call.*?gacc_flash_(\w+)", text)
    assert names == ["forward", "backward_queries", "backward_keys"], names


@pytest.mark.parametrize("options", [dict(dtype=torch.float16), dict(bias=True), dict(dropout=0.1)], ids=str)
def test_what_pallas_does_not_take_goes_by_blocks(options):
    text = lowered("tpu", **options)
    assert "tpu_custom_call" not in text and text.count("stablehlo.while") >= 3


def test_only_the_platform_that_is_lowered_for_is_traced(monkeypatch):
    """Kernels for TPU take longer to trace than the CPU's calls to compile."""

    def traced(*_, **__):
        raise AssertionError("traced")

    monkeypatch.setattr(flash_pallas, "forward", traced)
    monkeypatch.setitem(rules._FORWARD, Form.BLOCKWISE, traced)
    assert lowered("cpu").count("@gacc_flash_") == 2
    with pytest.raises(AssertionError, match="traced"):
        lowered("tpu")


# The numbers of the TPU kernels


def both_ways(shapes, options, *, segments=(None, None), dtype=torch.float32, factor=1.0):
    """(results of the kernels, expected): output, log-sum-exp, gradients of q, k and v."""
    (batch, heads, q_len, head_dim), (kv_heads, kv_len, value_dim) = shapes
    made = [(heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim), (heads, q_len, value_dim)]
    q, k, v, grad = (torch.randn(batch, *shape).to(dtype) for shape in made)
    tensors = (q * factor, k, v, None, *segments, None, None)
    out, lse = operator.written_out(*tensors, *options)
    expected = [out, lse, *operator._written_out_backward(grad, tensors, out, lse, options, False)[:3]]

    def run(*arrays):
        call = rules._Call(*arrays[:8], *options[:-1], tuple(options[-1]))
        out, lse = rules._pallas(call, interpret=True)
        return out, lse, *rules._pallas_backward(call, arrays[8], out, lse, False, interpret=True)[:3]

    with x64():
        got = jax.jit(run, compiler_options=known_options(FAST_COMPILE))(*[x if x is None else to_array(x) for x in (*tensors, grad)])
    return [to_tensor(x) for x in got], expected


def check(*args, **options):
    got, expected = both_ways(*args, **options)
    for what, mine, theirs in zip(("out", "lse", "grad of q", "grad of k", "grad of v"), got, expected, strict=True):
        assert_close(mine, theirs, what=what)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash_pallas, "BLOCK", 128)


def options(left, right, rows=EmptyRows.ZEROS):
    return (left, right, 0.3, int(rows), 0.0, 0, [])


@pytest.mark.parametrize(
    ("band", "lengths"),
    [
        (CAUSAL, (150, 300)),
        ((40, 150), (390, 300)),
        ((5, 3), (400, 120)),
        ((-1, -1), (1, 130)),
    ],
    ids=str,
)
@pytest.mark.default_cases("(-1, 0)-(150, 300)", "(-1, -1)-(1, 130)")
def test_bands_and_lengths(band, lengths):
    """Grouped heads, head sizes that differ, lengths that no block divides, queries beyond all keys."""
    check(((1, 4, lengths[0], 40), (2, lengths[1], 24)), options(*band))


@pytest.mark.parametrize("rows", [EmptyRows.ZEROS, EmptyRows.UNIFORM_CONSTANT], ids=str)
def test_segments_and_rows_without_a_key(rows):
    """Segment 2 has no key, and the window leaves more rows empty."""
    segments = torch.randint(0, 3, (2, 150)).int(), torch.randint(0, 2, (2, 140)).int()
    check(((2, 4, 150, 32), (2, 140, 32)), options(30, 10, rows), segments=segments)


def test_bf16():
    check(((2, 2, 200, 64), (1, 200, 64)), options(-1, 0), dtype=torch.bfloat16)


def test_large_scores():
    """A log-sum-exp of 1e4 has no digits left for the probabilities, which are normalised again."""
    check(((1, 2, 140, 32), (1, 140, 32)), options(-1, 0), factor=3e3)


def test_a_window_walks_over_what_it_shows():
    tiles = functools.partial(flash_pallas.Tiles, x_block=128, y_block=256, x_blocks=32, y_blocks=16)
    assert tiles(before=255, after=0).steps == 3 and tiles(before=-1, after=0).steps == tiles(before=-1, after=-1).steps == 16
    seen = [(int(x) for x in tiles(before=100, after=300).seen(i)) for i in (0, 8, 31)]
    assert [tuple(pair) for pair in seen] == [(0, 1), (3, 5), (15, 15)]
