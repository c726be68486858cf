"""GPT-2's (or a BERT's, a Llama's, or a Mixtral's) training step in any size, captured and spread without anything being computed, and what its compiled form gathers."""

import torch
import transformers
from torch import nn

from graphacc.capture import Batch, capture_joint, capture_update, stitch
from graphacc.graph import Kind, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.report.schedule import Buffer, kind_of, most_at_once, read_module
from graphacc.strategy import Strategy

BATCH = 8


def gpt2(*, layers: int, width: int, length: int, vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(*, layers: int, width: int, length: int, vocabulary: int) -> nn.Module:
    """For masked tokens, with heads of 64 elements."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocabulary, max_position_embeddings=length, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama(*, layers: int, width: int, length: int, vocabulary: int, factor: int = 4) -> nn.Module:
    """With heads of 64 elements, and `factor` times the width within MLPs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=length, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, intermediate_size=factor * width, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral(*, layers: int, width: int, length: int, vocabulary: int) -> nn.Module:
    """With two experts, whose MLPs are as wide as the model: all matrices that go up together are as large as one that is four times as wide."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=vocabulary, max_position_embeddings=length, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, intermediate_size=width, num_local_experts=2, num_experts_per_tok=1, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def captured(model: nn.Module, length: int, precision: str = "fp32") -> StepGraph:
    """A step with AdamW, with global shapes; the model takes tokens and labels."""
    tokens = torch.zeros(BATCH, length, dtype=torch.long)
    batch = Batch(leaves=(tokens, tokens.clone()), paths=("input_ids", "labels"))
    joint = capture_joint(model, lambda model, leaves: (model(input_ids=leaves[0], labels=leaves[1]).loss, []), batch, precision=precision)
    gradients = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    return stitch(joint, capture_update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), gradients))


def spread(step: StepGraph, strategy: str) -> StepGraph:
    """The program of one rank; `step` is not changed."""
    chosen = Strategy.parse(strategy)
    return run_passes(step.copy(), build_pipeline(step, chosen, batch_dims=default_batch_dims(step)))[0]


def buckets_at_once(hlo: str, min_bytes: float, max_bytes: float) -> int:
    """How many results of gathers, in this range of sizes, a compiled program keeps at one time."""
    entry = list(read_module(hlo).values())[-1]
    buffers: list[Buffer] = [buffer for item in entry if kind_of(item) == "all-gather" for buffer in entry.kept(item)]
    return most_at_once([item for item in buffers if not item.is_copy and min_bytes < item.size_bytes <= max_bytes], weight=lambda _: 1)
