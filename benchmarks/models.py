"""The models that `peers.py` times and `slow_thunks.py` takes apart: small ones of the usual kinds, each with a batch.

All are built from transformers' configurations or written here, without downloads; losses come from the model.
"""

import dataclasses
import itertools

import torch
from torch import Tensor, nn

MODELS = {}
"""Name -> a function that gives a model, whose result has a `loss`, and its batch."""


def model(function):
    MODELS[function.__name__] = function
    return function


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, size: int, classes: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(classes, (batch,))}


@model
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=8192, n_positions=256, n_embd=512, n_layer=4, n_head=8, bos_token_id=0, eos_token_id=0, use_cache=False)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)), _tokens(8192, 4, 256)


@model
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512, use_cache=False)), _tokens(8192, 4, 256)


@model
def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(vocab_size=8192, hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536)
    batch = _tokens(8192, 8, 128)
    return BertForMaskedLM(BertConfig(**sizes)), batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


@model
def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], num_labels=100)
    return ResNetForImageClassification(config), _images(8, 96, 100)


@model
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2, use_cache=False)), _tokens(4096, 4, 256)


@model
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=4096, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False)), _tokens(4096, 8, 96)


@model
def efficientnet():
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(image_size=64, width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640, num_labels=100)
    return EfficientNetForImageClassification(config), _images(8, 64, 100)


@model
def convnext():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 2, 2], image_size=96, num_labels=100)
    return ConvNextForImageClassification(config), _images(8, 96, 100)


@model
def regnet():
    """Grouped convolutions."""
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[1, 2, 2], groups_width=16, num_labels=100)
    return RegNetForImageClassification(config), _images(8, 96, 100)


@model
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = dict(vocab_size=2048, hidden_size=128, num_hidden_layers=2, state_size=16)
    return MambaForCausalLM(MambaConfig(**sizes, use_cache=False, use_mambapy=False)), _tokens(2048, 4, 64)


@model
def swin():
    from transformers import SwinConfig, SwinForImageClassification

    sizes = dict(image_size=64, embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=4)
    return SwinForImageClassification(SwinConfig(**sizes, num_labels=100)), _images(8, 64, 100)


@model
def unet():
    """Max pools on the way down, bilinear upsampling on the way up."""
    return _Loss(_UNet(32)), {"x": torch.randn(4, 3, 96, 96), "labels": torch.randint(8, (4, 96, 96))}


@model
def adaptive_pools():
    """Adaptive maximum and average to sizes that do not divide, overlapping maxima, nearest upsampling."""
    return _Loss(_Pools(48)), {"x": torch.randn(8, 3, 80, 80), "labels": torch.randint(8, (8, 20, 20))}


@model
def lstm():
    return _Loss(_LSTM(2048, 256)), {"x": torch.randint(2048, (8, 48)), "labels": torch.randint(2048, (8, 48))}


@dataclasses.dataclass
class _Result:
    loss: Tensor


class _Loss(nn.Module):
    """A model of [N, C, ...] logits with the mean cross-entropy."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> _Result:
        return _Result(loss=nn.functional.cross_entropy(self.body(x), labels))


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    pairs = [(inputs, outputs), (outputs, outputs)]
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())))


class _UNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(_convolutions, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(_convolutions(a + b, a) for a, b in itertools.pairwise(widths))
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x if not kept else self.pool(x))
            kept.append(x)
        for block, skip in zip(reversed(self.up), reversed(kept[:-1])):
            x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = block(torch.cat([skip, x], 1))
        return self.head(x)


class _Pools(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.stem, self.body, self.head = _convolutions(3, width), _convolutions(2 * width, width), nn.Conv2d(width, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.stem(x), 5, 2, 2)  # 40 x 40
        x = torch.cat([nn.functional.adaptive_max_pool2d(x, 17), nn.functional.adaptive_avg_pool2d(x, 17)], 1)
        x = nn.functional.interpolate(self.body(x), size=20, mode="nearest")
        return self.head(x)


class _LSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0]).transpose(1, 2)
