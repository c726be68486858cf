"""Captured graphs of the zoo's models with values for their inputs."""

import dataclasses
import functools
from collections.abc import Callable

import torch
import zoo
from simulate import run_global, simulate
from tolerances import relative_error
from torch import nn

from graphacc.capture import (
    Batch,
    capture_forward,
    capture_joint,
    capture_update,
    hyperparameters,
    init_optimizer_state,
    stitch,
)
from graphacc.graph import Kind, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.partition import PartitionReport
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's graphs, and the value of every input by kind and target."""

    joint: StepGraph
    update: StepGraph | None
    values: dict[tuple[Kind, str], torch.Tensor]

    @property
    def step(self) -> StepGraph:
        return stitch(self.joint, self.update)

    def inputs(self, step: StepGraph) -> list[torch.Tensor]:
        return [self.values[item.kind, item.target].to(item.dtype) for item in step.inputs]


def build(model: nn.Module, batch: dict, make_optimizer: Callable = zoo.adamw, transform=None, precision: str = "fp32") -> Case:
    """Capture one step of `model`, whose optimizer state is filled with positive random numbers."""
    joint = _capture(capture_joint, model, batch, precision)
    grads = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    optimizer = make_optimizer(model)
    update = capture_update(model, optimizer, grads, transform=transform)
    values = _model_values(model, batch)
    generator = torch.Generator().manual_seed(5)
    for name, entries in init_optimizer_state(model, optimizer, grads):
        for key, x in entries.items():
            filled = torch.rand(x.shape, generator=generator).to(x) * 1e-2 if x.dim() else torch.ones_like(x)
            values[Kind.STATE, f"{name}/{key}"] = filled
    values.update(
        {(Kind.HYPER, name): torch.tensor(value, dtype=torch.float64) for name, value in hyperparameters(optimizer).items()}
    )
    values.update({(Kind.GRAD, name): torch.randn(model.get_parameter(name).shape, generator=generator) for name in grads})
    return Case(joint, update, values)


def forward_case(model: nn.Module, batch: dict) -> tuple[StepGraph, list[torch.Tensor]]:
    step = _capture(capture_forward, model, batch, "fp32")
    values = _model_values(model, batch)
    return step, [values[item.kind, item.target] for item in step.inputs]


def _capture(capture: Callable, model: nn.Module, batch: dict, precision: str) -> StepGraph:
    tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
    others = {name: x for name, x in batch.items() if name not in tensors}

    def call(model, leaves):
        output = model(**dict(zip(tensors, leaves)), **others)
        return output.loss, [output.logits] if getattr(output, "logits", None) is not None else []

    return capture(model, call, Batch(leaves=tuple(tensors.values()), paths=tuple(tensors)), precision=precision)


def _model_values(model: nn.Module, batch: dict) -> dict[tuple[Kind, str], torch.Tensor]:
    values = {(Kind.PARAM, name): x.detach().clone() for name, x in model.named_parameters(remove_duplicate=False)}
    values.update({(Kind.BUFFER, name): x.detach().clone() for name, x in model.named_buffers(remove_duplicate=False)})
    values.update({(Kind.BATCH, name): x for name, x in batch.items() if isinstance(x, torch.Tensor)})
    values[Kind.KEY, ""] = values[Kind.KEY, "key"] = torch.tensor([1234, 5])
    return values


def zoo_case(name: str, make_optimizer: Callable = zoo.adamw, **options) -> Case:
    model, batch = zoo.MODELS[name]()
    return build(model, batch, make_optimizer, **options)


@functools.cache
def shared_case(name: str) -> tuple[Case, list[torch.Tensor], list[torch.Tensor]]:
    """`zoo_case`, the inputs of its step and the results of the step as it is: captured and run once for all tests, which change none of them."""
    case = zoo_case(name)
    inputs = case.inputs(case.step)
    return case, inputs, run_global(case.step, inputs)


def partitioned(step: StepGraph, strategy: str) -> tuple[StepGraph, list[PartitionReport]]:
    chosen = Strategy.parse(strategy)
    result, reports = run_passes(step.copy(), build_pipeline(step, chosen, batch_dims=default_batch_dims(step)))
    return result, [report.details for report in reports if isinstance(report.details, PartitionReport)]


def check(
    step: StepGraph, strategy: str, inputs: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 2e-5
) -> list[PartitionReport]:
    """Partition, simulate and compare every output; an error is relative to the largest value; errors below 1e-6 pass."""
    result, reports = partitioned(step, strategy)
    got = simulate(result, Strategy.parse(strategy).mesh, inputs)
    for x, y, item in zip(got, expected, result.outputs, strict=True):
        assert x.dtype == y.dtype
        error = relative_error(x, y)
        small = torch.allclose(x.double(), y.double(), rtol=0, atol=1e-6)
        assert error <= tolerance or small, f"{item.kind.value} {item.target}: relative error {error:.3g} under {strategy}"
    return reports
