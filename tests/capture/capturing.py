"""Shared by the capture tests: capturing a model by its keyword arguments, and running a StepGraph on the CPU with torch."""

import dataclasses

import torch
from torch import Tensor, fx, nn

from graphacc.capture import Batch, capture_joint, capture_update, hyperparameters, init_optimizer_state, stitch
from graphacc.graph import Kind, StepGraph

Values = dict[tuple[Kind, str], Tensor]


def tensors_of(kwargs: dict) -> dict[str, Tensor]:
    return {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}


def path(name: str) -> str:
    return f"kwargs[{name!r}]"


def batch_of(kwargs: dict) -> Batch:
    tensors = tensors_of(kwargs)
    return Batch(leaves=tuple(tensors.values()), paths=tuple(path(name) for name in tensors))


def loss_of(kwargs: dict):
    """A ForwardFn that calls ``model(**kwargs).loss`` (or takes the result itself as the loss) with the leaves in place."""
    names = list(tensors_of(kwargs))

    def forward(model: nn.Module, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        result = model(**{**kwargs, **dict(zip(names, leaves))})
        return getattr(result, "loss", result), []

    return forward


def joint_of(model: nn.Module, kwargs: dict, **options) -> StepGraph:
    return capture_joint(model, loss_of(kwargs), batch_of(kwargs), **options)


def operators(step: StepGraph) -> set[str]:
    return {str(node.target) for node in step.graph.nodes if node.op == "call_function"}


def model_values(model: nn.Module, step: StepGraph) -> Values:
    values = {(Kind.PARAM, name): tensor.detach() for name, tensor in model.named_parameters()}
    values |= {(Kind.BUFFER, name): tensor for name, tensor in model.named_buffers()}
    return values | {(Kind.BUFFER, target): value for target, value in step.constants.items()}


def batch_values(kwargs: dict) -> Values:
    return {(Kind.BATCH, path(name)): value for name, value in tensors_of(kwargs).items()}


def key(counter: int = 0) -> Values:
    return {(Kind.KEY, "key"): torch.tensor([7, counter])}


def run(step: StepGraph, values: Values) -> Values:
    """Execute the graph; returns its outputs by kind and target."""
    with torch.no_grad():
        results = fx.Interpreter(torch.nn.Module(), graph=step.graph).run(*[values[item.kind, item.target] for item in step.inputs])
    return {(item.kind, item.target): value for item, value in zip(step.outputs, results)}


@dataclasses.dataclass
class Session:
    """A model trained by its step graph, beside nothing else: what the runtime does, in ten lines."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    kwargs: dict

    def __post_init__(self):
        joint = joint_of(self.model, self.kwargs)
        grads = [out.target for out in joint.outputs if out.kind is Kind.GRAD]
        self.step = stitch(joint, capture_update(self.model, self.optimizer, grads))
        self.values = model_values(self.model, self.step)
        for name, state in init_optimizer_state(self.model, self.optimizer, grads):
            self.values |= {(Kind.STATE, f"{name}/{entry}"): value for entry, value in state.items()}
        self.counter = 0

    def run(self, kwargs: dict) -> Tensor:
        """One training step; returns the loss."""
        numbers = {
            (Kind.HYPER, name): torch.tensor(x, dtype=torch.float64) for name, x in hyperparameters(self.optimizer).items()
        }
        results = run(self.step, self.values | numbers | batch_values(kwargs) | key(self.counter))
        self.counter += 1
        self.values |= {entry: value for entry, value in results.items() if entry in self.values}
        return results[Kind.LOSS, "loss"]
