"""Captured steps of the zoo's models with as many layers as a test wants."""

import functools
from collections.abc import Callable
from unittest import mock

import torch
import zoo
from torch import nn

from graphacc.capture import Batch, capture_joint, capture_update, stitch
from graphacc.graph import Kind, StepGraph


def deep_model(name: str, layers: int) -> tuple[nn.Module, dict]:
    deeper = {"num_hidden_layers": layers}
    with mock.patch.object(zoo, "LAYERS", layers), mock.patch.dict(zoo._DECODER, deeper), mock.patch.dict(zoo._ENCODER, deeper):
        return zoo.MODELS[name]()


def captured(model: nn.Module, batch: dict, make_optimizer: Callable = zoo.adamw, precision: str = "fp32", **options) -> tuple[StepGraph, StepGraph]:
    """The joint graph and the whole step; `options` are those of `capture_update`."""
    tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}

    def call(model, leaves):
        return model(**{**batch, **dict(zip(tensors, leaves, strict=True))}).loss, []

    joint = capture_joint(model, call, Batch(leaves=tuple(tensors.values()), paths=tuple(tensors)), precision=precision)
    grads = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    return joint, stitch(joint, capture_update(model, make_optimizer(model), grads, **options))


@functools.cache
def deep_steps(name: str, layers: int, precision: str = "fp32") -> tuple[StepGraph, StepGraph]:
    """`captured` of a model of the zoo, once for all tests, which change none of them."""
    return captured(*deep_model(name, layers), precision=precision)
