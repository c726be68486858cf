"""The small models that all tests share: real architectures at toy size, random weights, dropout 0, loss inside.

Every model is called as ``model(**batch).loss``. ``MODELS[name](batch_size, seed)`` builds a conditioned model and one
batch; ``batch(name, seed, batch_size)`` makes further batches of the same shapes. Batches are padded unequally, so that a
mean over ranks is not the mean over tokens.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch import Tensor

HIDDEN, LAYERS, HEADS, VOCAB, SEQ = 32, 2, 4, 96, 16
IGNORED = -100


class Output(NamedTuple):
    """What the models of this file return; transformers' outputs have the same two fields."""

    loss: Tensor
    logits: Tensor


class Seq2Seq(nn.Module):
    """nn.Transformer with embeddings, a head and a cross-entropy that ignores padding."""

    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(VOCAB, HIDDEN)
        self.target = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Parameter(torch.randn(SEQ, HIDDEN))
        self.transformer = nn.Transformer(HIDDEN, HEADS, LAYERS, LAYERS, 2 * HIDDEN, dropout=0.0, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor, padding: Tensor) -> Output:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self.source(source) + self.position,
            self.target(target) + self.position,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits = self.head(hidden)
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits)


class LstmLanguageModel(nn.Module):
    """Embedding, a two-layer LSTM and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.lstm(self.embedding(input_ids))[0])
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits)


class ScaledSquare(torch.autograd.Function):
    """x², whose backward is deliberately half of the true gradient: a trace that drops the backward is seen at once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


class TiedMlp(nn.Module):
    """Tied input and output embeddings, a frozen layer, a custom autograd.Function and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.hidden = nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Parameter(torch.randn(HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = torch.tanh(self.frozen(self.embedding(input_ids)))
        logits = self.head(ScaledSquare.apply(self.hidden(hidden)))
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits)


_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    intermediate_size=2 * HIDDEN,
    max_position_embeddings=2 * SEQ,
    attention_dropout=0.0,
    use_cache=False,
)
_ENCODER = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=2 * HIDDEN,
    attention_probs_dropout_prob=0.0,
    hidden_dropout_prob=0.0,
)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=2 * SEQ, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_DECODER, head_dim=8))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **_DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, sliding_window=None
    )
    return transformers.MixtralForCausalLM(config)


def _qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **_DECODER, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=HIDDEN, output_router_logits=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(**_ENCODER, vocab_size=VOCAB, max_position_embeddings=2 * SEQ)
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=2 * HIDDEN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_ENCODER, image_size=16, patch_size=4, num_labels=10))


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=10, num_channels=3
    )
    return transformers.ResNetForImageClassification(config)


def _clip() -> nn.Module:
    tower = dict(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
    )
    text = dict(**tower, vocab_size=VOCAB, max_position_embeddings=SEQ, bos_token_id=0, eos_token_id=VOCAB - 1, pad_token_id=1)
    config = transformers.CLIPConfig(
        text_config=text, vision_config=dict(**tower, image_size=16, patch_size=4), projection_dim=16, logit_scale_init_value=1.0
    )
    return transformers.CLIPModel(config)


def _tokens(generator: torch.Generator, batch_size: int, seq: int = SEQ) -> Tensor:
    return torch.randint(2, VOCAB - 1, (batch_size, seq), generator=generator)


def _lengths(generator: torch.Generator, batch_size: int, seq: int = SEQ) -> Tensor:
    """[B, 1]: the number of real tokens per sample, at least 4 and not the same for all."""
    lengths = torch.randint(4, seq + 1, (batch_size, 1), generator=generator)
    lengths[0], lengths[-1] = seq, 4
    return lengths


def _padded(generator: torch.Generator, batch_size: int, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and a bool [B, T] that says which of them are real."""
    return _tokens(generator, batch_size, seq), torch.arange(seq) < _lengths(generator, batch_size, seq)


def _causal_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    tokens, real = _padded(generator, batch_size)
    return dict(input_ids=tokens, labels=tokens.masked_fill(~real, IGNORED))


def _short_causal_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    tokens, real = _padded(generator, batch_size, 8)
    return dict(input_ids=tokens, labels=tokens.roll(-1, 1).masked_fill(~real, IGNORED))


def _masked_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    tokens, real = _padded(generator, batch_size)
    hidden = (torch.rand(tokens.shape, generator=generator) < 0.3) & real
    hidden[:, 1] = True
    return dict(input_ids=tokens.masked_fill(hidden, 1), attention_mask=real.long(), labels=tokens.masked_fill(~hidden, IGNORED))


def _translation_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    tokens, real = _padded(generator, batch_size)
    labels, real_labels = _padded(generator, batch_size)
    return dict(input_ids=tokens, attention_mask=real.long(), labels=labels.masked_fill(~real_labels, IGNORED))


def _seq2seq_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    source, real = _padded(generator, batch_size)
    target, real_target = _padded(generator, batch_size)
    return dict(source=source, target=target, labels=target.roll(-1, 1).masked_fill(~real_target, IGNORED), padding=~real)


def _image_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    return dict(
        pixel_values=torch.randn(batch_size, 3, 16, 16, generator=generator),
        labels=torch.randint(0, 10, (batch_size,), generator=generator),
    )


def _contrastive_batch(generator: torch.Generator, batch_size: int) -> dict[str, Tensor]:
    tokens, real = _padded(generator, batch_size)
    ends = real.sum(1, keepdim=True) - 1
    tokens = tokens.masked_fill(~real, 1).scatter(1, ends, VOCAB - 1)
    images = torch.randn(batch_size, 3, 16, 16, generator=generator)
    return dict(input_ids=tokens, attention_mask=real.long(), pixel_values=images, return_loss=True)


_MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], dict]]] = {
    "gpt2": (_gpt2, _causal_batch),
    "llama": (_llama, _causal_batch),
    "qwen3": (_qwen3, _causal_batch),
    "mixtral": (_mixtral, _causal_batch),
    "qwen3_moe": (_qwen3_moe, _causal_batch),
    "bert": (_bert, _masked_batch),
    "t5": (_t5, _translation_batch),
    "vit": (_vit, _image_batch),
    "resnet": (_resnet, _image_batch),
    "clip": (_clip, _contrastive_batch),
    "nn_transformer": (Seq2Seq, _seq2seq_batch),
    "lstm_lm": (LstmLanguageModel, _short_causal_batch),
    "tied_mlp": (TiedMlp, _causal_batch),
}


def condition(model: nn.Module, seed: int = 1) -> nn.Module:
    """Set every parameter, in place, so that it has a gradient of useful size; returns the model.

    Libraries initialise class tokens to zero, layer scales to 1e-6 and so on; with those a parity test tests little.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if parameter.dim() >= 2:
                parameter.copy_(noise / max(1, parameter[0].numel()) ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif parameter.abs().max() < 0.3:
                parameter.copy_(0.7 + 0.1 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    """AdamW whose epsilon keeps parity tests meaningful.

    Some gradients are mathematically zero (a key's bias under softmax) and rounding noise of 1e-9 in practice. The default
    epsilon, 1e-8, turns that noise into updates of the learning rate's size, which no two programs share.
    """
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-5)


def batch(name: str, seed: int = 0, batch_size: int = 8) -> dict:
    """Keyword arguments of one call of model `name`; other seeds give other values of the same shapes."""
    return _MAKERS[name][1](torch.Generator().manual_seed(1000 + seed), batch_size)


def _builder(name: str) -> Callable[..., tuple[nn.Module, dict]]:
    def build(batch_size: int = 8, seed: int = 0) -> tuple[nn.Module, dict]:
        """The model in training mode, and one batch for it."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = _MAKERS[name][0]()
        return condition(model, seed + 1).train(), batch(name, seed, batch_size)

    return build


MODELS: dict[str, Callable[..., tuple[nn.Module, dict]]] = {name: _builder(name) for name in _MAKERS}
