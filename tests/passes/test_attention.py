"""The pass that attaches attention: in every form and layer it is found, says the same, and leaves no [T, S] tensor."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from selection import with_matrix
from simulate import run_global
from tolerances import relative_error
from torch import nn
from training import batches_of, captured_once, check_parity, compiled, train
from zoo_steps import build, forward_case

from graphacc.graph import StepGraph
from graphacc.passes.attention import ATTACH_ATTENTION, AttentionReport
from graphacc.passes.cleanup import COMMON_SUBEXPRESSIONS, DEAD_CODE
from graphacc.passes.runner import run_passes

aten, ops = torch.ops.aten, torch.ops.graphacc
T = zoo.SEQ
LAYERS = {"gpt2": 2, "llama": 2, "bert": 2, "t5": 6, "vit": 2}
"""Attentions of the zoo's models; T5 has three kinds."""


def attach(step: StepGraph) -> tuple[StepGraph, AttentionReport]:
    step, reports = run_passes(step, [DEAD_CODE, COMMON_SUBEXPRESSIONS, ATTACH_ATTENTION])
    return step, reports[-1].details


def check(case) -> tuple[StepGraph, AttentionReport]:
    """Attach, and compare loss, outputs and every gradient with the graph before."""
    step = case.joint
    inputs = case.inputs(step)
    expected = run_global(step, inputs)
    step, report = attach(step)
    for got, want, item in zip(run_global(step, inputs), expected, step.outputs, strict=True):
        error = relative_error(got, want)
        small = torch.allclose(got, want, rtol=0, atol=1e-6)
        assert error <= 2e-5 or small, f"{item.kind.value} {item.target}: relative error {error:.3g}"
    return step, report


def assert_attached(step: StepGraph, report: AttentionReport, what: list[str], form: str) -> None:
    assert [item.what for item in report.found] == what and not report.missed, str(report)
    assert {item.form for item in report.found} == {form}
    targets = [node.target for node in step.graph.nodes]
    assert targets.count(ops.flash_attention.default) == targets.count(ops.flash_attention_backward.default) == len(what)
    assert ops.sdpa.default not in targets


def squares(step: StepGraph) -> list[str]:
    """Values with both lengths, but weights; lengths must differ from the hidden size."""
    tensors = [(node, node.meta["val"]) for node in step.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return [node.name for node, value in tensors if value.shape[-2:] == (T, T)]


_DECODER = dict(zoo._DECODER, num_hidden_layers=1, hidden_size=40, head_dim=10, num_attention_heads=4)


def _model(name: str, implementation: str) -> nn.Module:
    tiny = dict(vocab_size=zoo.VOCAB, use_cache=False, attn_implementation=implementation)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, attn_implementation=implementation))
    if name == "mistral":
        return transformers.MistralForCausalLM(
            transformers.MistralConfig(**_DECODER, sliding_window=4, attn_implementation=implementation)
        )
    if name == "gpt2":
        dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=32, **dropout, **tiny))
    if name == "bloom":
        return transformers.BloomForCausalLM(
            transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, hidden_dropout=0.0, attention_dropout=0.0, **tiny)
        )
    assert name == "t5"
    relative = dict(relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0, **relative, **tiny)
    )


def _batch(name: str, padding: str) -> dict:
    batch = zoo.batch("t5" if name == "t5" else "llama")
    real = (batch["labels"] != zoo.IGNORED).long()
    if padding != "none":  # padded on the left, rows see nothing at all
        batch["attention_mask"] = real.flip(1) if padding == "left" else real
    return batch


FORMS = [
    ("llama", "eager", "none", ["causal"]),
    ("llama", "eager", "left", ["causal, padding"]),
    ("llama", "sdpa", "left", ["causal, padding"]),
    ("mistral", "eager", "right", ["causal window of 4, padding"]),
    ("mistral", "sdpa", "none", ["causal window of 4"]),
    ("gpt2", "eager", "right", ["causal, padding"]),
    ("bloom", "eager", "right", ["causal, padding, bias [8, 4, 1, 16]"]),
]


@pytest.mark.parametrize("name, implementation, padding, what", FORMS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.default_cases("llama-eager-left-", "gpt2-eager-right-")
def test_forms_of_transformers(name, implementation, padding, what):
    """Causal, window and padding masks, ALiBi, dropout and repeated heads, as SDPA and written out."""
    model = zoo.condition(_model(name, implementation), 1).train()
    step, report = check(build(model, _batch(name, padding)))
    assert_attached(step, report, what, "sdpa" if implementation == "sdpa" else "written out")
    assert not squares(step)


def test_products_of_two_dtypes_stay_written_out():
    """Autocast leaves Bloom's scores, which are added to ALiBi's numbers, in fp32, and multiplies their softmax and the values in bf16."""
    model, batch = zoo.condition(_model("bloom", "eager"), 1).train(), _batch("bloom", "right")
    _, report = attach(build(copy.deepcopy(model), batch, precision="bf16").joint)
    assert report.missed and "its products are in torch.float32 and torch.bfloat16" in str(report)
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(model)(**batch).loss.item()
    assert train(compiled(model, "precision=bf16"), [batch])[0] == pytest.approx(expected, rel=1e-3)


def test_key_heads_are_not_repeated():
    for implementation in ("eager", "sdpa"):
        step, _ = attach(build(zoo.condition(_model("llama", implementation), 1).train(), _batch("llama", "right")).joint)
        (call,) = (node for node in step.graph.nodes if node.target is ops.flash_attention.default)
        assert [node.meta["val"].shape[1] for node in call.args[:3]] == [4, 2, 2]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.default_cases("eager")
def test_t5_with_its_relative_bias(implementation):
    """The bias [1, H, T, S] takes a gradient; the masks beside it vanish."""
    step, report = check(build(zoo.condition(_model("t5", implementation), 1).train(), _batch("t5", "right")))
    assert [item.what for item in report.found] == ["padding, bias [1, 4, 16, 16]", "causal, bias [1, 4, 16, 16]", "padding"]
    assert not report.missed
    batched = [node for node in squares_of(step) if node.meta["val"].dim() == 4 and node.meta["val"].shape[0] > 1]
    assert not batched, "no tensor of a batch has both lengths"


def squares_of(step: StepGraph) -> list:
    names = set(squares(step))
    return [node for node in step.graph.nodes if node.name in names]


PROGRAMS = [(name, "fsdp=4,tp=2") for name in LAYERS] + [("gpt2", None)]
IN_BF16 = [*((name, None) for name in LAYERS), ("gpt2", "fsdp=4,tp=2"), ("t5", "fsdp=4,tp=2")]


@pytest.mark.parametrize("name, strategy", with_matrix(PROGRAMS, [("gpt2", "fsdp=4,tp=2"), ("t5", "fsdp=4,tp=2")]))
@pytest.mark.default_cases("gpt2-fsdp=4,tp=2")
def test_programs_run_the_kernel_in_every_layer(name, strategy):
    """Parity over five AdamW steps;
    the custom calls get a rank's samples and heads, and attention's operands are not gathered."""
    model = check_parity(name, strategy)
    (program,) = model.programs
    calls = [line for line in program.program.hlo_text().splitlines() if 'custom_call_target="gacc_flash_' in line]
    for target in ("gacc_flash_forward", "gacc_flash_backward"):
        assert sum(f'"{target}"' in line for line in calls) == LAYERS[name]
    samples, heads = {None: (8, 4), "fsdp=4,tp=2": (2, 2)}[strategy]
    assert all(f"f32[{samples},{heads}," in line.split("custom-call(")[0] for line in calls)
    assert not _gathered(program.program.hlo_text())


def _gathered(text: str) -> list[str]:
    """All-gathers of attention's operands and results, [batch, heads, length, head size 8]."""
    found = []
    for line in text.splitlines():
        if " all-gather(" in line or " all-gather-start(" in line:
            dims = line.split("[", 1)[1].split("]")[0].split(",")
            if len(dims) >= 4 and dims[-1] == "8":
                found.append(line.strip())
    return found


def _kernels(model: nn.Module, target: str) -> list[str]:
    """The custom calls of the compiled programs."""
    lines = [line for compiled in model.programs for line in compiled.program.hlo_text().splitlines()]
    return [line for line in lines if f'custom_call_target="{target}"' in line]


@pytest.mark.parametrize("name, strategy", with_matrix(IN_BF16, [("gpt2", "fsdp=4,tp=2")]))
@pytest.mark.matrix
def test_bf16(name, strategy):
    """Products and attention in bf16, parameters in fp32: losses within the resolution of bf16."""
    reference, _ = zoo.MODELS[name]()
    model, batches = copy.deepcopy(reference), batches_of(name, steps=3)
    expected = train(reference, batches)
    model = compiled(model, strategy, precision="bf16")
    with captured_once("parity", name):
        losses = train(model, batches)
    assert all(abs(got - want) <= 1e-2 * abs(want) for got, want in zip(losses, expected))
    assert losses != expected
    for target in ("gacc_flash_forward", "gacc_flash_backward"):
        calls = _kernels(model, target)
        assert len(calls) == LAYERS[name] and all("(bf16[" in call.split("custom-call(")[0] for call in calls)


@pytest.mark.parametrize("name", with_matrix(LAYERS, ["llama"]))
def test_gradients_against_float64(name):
    model, _ = zoo.MODELS[name]()
    reference, (batch,) = copy.deepcopy(model).double(), batches_of(name, steps=1)
    reference(**{key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in batch.items()}).loss.backward()
    model = compiled(model, None)
    optimizer = zoo.adamw(model)
    model(**batch).loss.backward()
    wanted = {key: parameter.grad for key, parameter in reference.named_parameters() if parameter.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for key, parameter in model.named_parameters():
        if key in wanted:
            error = float((parameter.grad.double() - wanted[key]).abs().max())
            assert error <= 2e-5 * float(wanted[key].abs().max()) + 1e-7 * largest, f"{key}: {error:.3g}"
    assert len(_kernels(model, "gacc_flash_backward")) == LAYERS[name]
    optimizer.step()


# Masks of small models


class Small(nn.Module):
    """One attention whose scores, mask and values are made by a function."""

    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(12, 3 * 12)
        self.attend = attend

    def forward(self, x, ids):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        return zoo.Output((self.attend(q, k, v, ids) ** 2).mean(), None)


def small(attend) -> tuple[StepGraph, AttentionReport]:
    model = Small(attend)
    x, ids = torch.randn(2, T, 12), torch.arange(T).div(5, rounding_mode="floor").expand(2, T).clone()
    return check(build(model, {"x": x, "ids": ids}))


def positions():
    return torch.arange(T)[:, None], torch.arange(T)


def packed(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(ids[:, None, :, None] == ids[:, None, None, :]))


def packed_causal(q, k, v, ids):
    query, key = positions()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(ids[:, None, :, None] == ids[:, None, None, :]) & (key <= query))


def both_sides(q, k, v, ids):
    query, key = positions()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(query - key).abs() <= 3)


def filled(q, k, v, ids):
    scores = (q @ k.mT).div(2.0).masked_fill(torch.ones(T, T).triu(1).bool(), -1e9)
    return scores.softmax(-1) @ v


def triangle_of_infinity(q, k, v, ids):
    return (q @ k.mT + torch.full((T, T), -math.inf).triu(1)).softmax(-1) @ v


def query_padding(q, k, v, ids):
    real = ids < 2
    return F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, :, None] & real[:, None, None, :])


def key_bias(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=0.1 * ids[:, None, None, :].float())


def stripes(q, k, v, ids):
    query, key = positions()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(query + key) % 2 == 0)


def two_finite_masks(q, k, v, ids):
    """Hidden twice is lower than hidden once, which matters where a query sees nothing: the sum itself is kept."""
    low = torch.finfo(torch.float32).min / 4
    query, key = positions()
    hidden = torch.where(ids[:, None, None, :] > 0, 0.0, low)
    return (q @ k.mT + torch.where(key <= query, 0.0, low) + hidden).softmax(-1) @ v


def old_bert(q, k, v, ids):
    """-1e4 leaves the scores of a row that sees nothing as they are: it is added, not read as hidden."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(ids[:, None, None, :] > 0, 0.0, -1e4))


def old_bert_lower(q, k, v, ids):
    """-1e9 keeps some bits of the scores."""
    return (10 * q @ k.mT + torch.where(ids[:, None, None, :] > 9, 0.0, -1e9)).softmax(-1) @ v


SMALL = [
    (old_bert, "bias [2, 1, 1, 16]"),
    (old_bert_lower, "bias [2, 1, 1, 16], masks of several terms, or of no lowest number"),
    (packed, "segments"),
    (packed_causal, "causal, segments"),
    (both_sides, "window (3, 3)"),
    (filled, "causal"),
    (triangle_of_infinity, "causal"),
    (query_padding, "padding"),
    (key_bias, "bias [2, 1, 1, 16]"),
    (stripes, "bias [16, 16], a mask [1, 1, 16, 16] that is no band and no padding stays a tensor"),
    (two_finite_masks, "bias [16, 16], bias [2, 1, 1, 16], masks of several terms, or of no lowest number"),
]


@pytest.mark.parametrize("attend, what", SMALL, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.default_cases("old_bert-", "both_sides-", "key_bias-")
def test_masks(attend, what):
    _, report = small(attend)
    (found,) = report.found
    assert found.attached and found.what == what, str(report)


def probabilities_used_twice(q, k, v, ids):
    p = (q @ k.mT).softmax(-1)
    return p @ v + p.sum()


def scores_used_twice(q, k, v, ids):
    scores = q @ k.mT
    return scores.softmax(-1) @ v + scores.mean()


def normalised_again(q, k, v, ids):
    p = (q @ k.mT).softmax(-1)
    return (p * ids[:, None, None, :].float()) @ v


def clipped(q, k, v, ids):
    """A constant that hides nothing."""
    scores = q @ k.mT
    return torch.where(ids[:, None, None, :] > 0, scores, -5.0).softmax(-1) @ v


def padding_of_infinity(q, k, v, ids):
    """A query that sees nothing is NaN here, and depends on the data."""
    return (q @ k.mT).masked_fill(ids[:, None, None, :] > 2, -math.inf).softmax(-1) @ v


def doubled_gradient(q, k, v, ids):
    """A hook changes the gradient of the scores, so the backward is not that of attention."""
    scores = q @ k.mT
    if scores.requires_grad:
        scores.register_hook(lambda grad: 2.0 * grad + 1e-3)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (probabilities_used_twice, "2 nodes are users of the probabilities"),
        (clipped, "something else than a low number"),
        (scores_used_twice, "the gradient of"),
        (normalised_again, "something else than dropout"),
        (padding_of_infinity, "NaN"),
        (doubled_gradient, "the gradient of"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.default_cases("probabilities_used_twice-", "normalised_again-")
def test_what_is_left_says_why(attend, reason):
    step, report = small(attend)
    (found,) = report.found
    assert not found.attached and reason in found.what, str(report)
    assert ops.flash_attention.default not in [node.target for node in step.graph.nodes]
    assert "left: (no module) (written out)" in str(report)


def test_a_softmax_that_is_no_attention_is_not_reported():
    _, report = small(lambda q, k, v, ids: q.softmax(-1) + k * v)
    assert report is None


def test_an_evaluation_graph_has_no_backward():
    model, batch = zoo.MODELS["gpt2"]()
    step, inputs = forward_case(model.eval(), batch)
    expected = run_global(step, inputs)
    step, report = attach(step)
    assert len(report.found) == 2 and not report.missed
    for got, want in zip(run_global(step, inputs), expected):
        assert relative_error(got, want) < 2e-5


def test_a_mask_that_is_added_to_windows_is_left():
    """Swin's evaluation: the scores of all windows are viewed by images, and a mask of the windows is added."""

    def windows(q, k, v, ids):
        scores = q @ k.transpose(-2, -1)
        batch, heads, rows, columns = scores.shape
        mask = torch.where(torch.arange(columns) > torch.arange(rows)[:, None], -100.0, 0.0).expand(batch, 1, rows, columns)
        return (scores.view(1, batch, heads, rows, columns) + mask.unsqueeze(0)).view(scores.shape).softmax(-1) @ v

    _, report = small(windows)
    assert not report.found[0].attached
