"""Small StepGraphs for the tests of the runtime, traced from a function on local tensors."""

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphacc.ops  # noqa: F401
from graphacc.graph import Input, Kind, MeshShard, Output, Phase, StepGraph, local_shape

c10d = torch.ops._c10d_functional


def make_step(function, inputs: list[Input], outputs: list[Output]) -> StepGraph:
    """The graph of ``function(*local tensors) -> tuple of local tensors``."""
    with FakeTensorMode():
        fakes = [torch.empty(local_shape(item.shape, item.shards), dtype=item.dtype) for item in inputs]
        module = make_fx(function)(*fakes)
    for node in module.graph.nodes:
        node.meta.setdefault("phase", Phase.FORWARD)
        node.meta.setdefault("module_path", "")
        node.meta.setdefault("stack_trace", "")
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [Input(**{**vars(item), "name": name}) for item, name in zip(inputs, names, strict=True)]
    result = module.graph.output_node()
    if not isinstance(result.args[0], (tuple, list)):
        result.args = ((result.args[0],),)
    step = StepGraph(module.graph, tuple(inputs), tuple(outputs))
    step.verify()
    return step


def an_input(kind: Kind, target: str, shape, dtype=torch.float32, shards=(), **more) -> Input:
    return Input(name="", kind=kind, target=target, shape=tuple(shape), dtype=dtype, shards=tuple(shards), **more)


def an_output(kind: Kind, target: str, shape, dtype=torch.float32, shards=()) -> Output:
    return Output(kind=kind, target=target, shape=tuple(shape), dtype=dtype, shards=tuple(shards))


def split(axis: str, size: int, dim: int = 0, outer: int = 1) -> MeshShard:
    return MeshShard(axis=axis, size=size, dim=dim, outer=outer)


def gather(x: torch.Tensor, size: int, axis: str) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, size, axis))


def total(x: torch.Tensor, axis: str) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", axis))


def sgd_step(dp: int, fsdp: int, *, batch: int = 16, features: int = 8, width: int = 12, learning_rate: float = 0.1) -> StepGraph:
    """loss = sum((x w)²); w -= learning_rate * gradient. x is split over dp and fsdp, w over fsdp."""
    w_shards = [split("fsdp", fsdp)] if fsdp > 1 else []
    x_shards = [split(axis, size) for axis, size in (("dp", dp), ("fsdp", fsdp)) if size > 1]

    def step(w, x):
        whole = gather(w, fsdp, "fsdp") if fsdp > 1 else w
        y = x @ whole
        loss, grad = (y * y).sum(), 2 * x.t() @ y
        if dp > 1:
            loss, grad = total(loss, "dp"), total(grad, "dp")
        if fsdp > 1:
            loss = total(loss, "fsdp")
            grad = c10d.wait_tensor(c10d.reduce_scatter_tensor(grad, "sum", fsdp, "fsdp"))
        return w - learning_rate * grad, loss

    return make_step(
        step,
        [
            an_input(Kind.PARAM, "w", (features, width), shards=w_shards, trainable=True),
            an_input(Kind.BATCH, "x", (batch, features), shards=x_shards),
        ],
        [an_output(Kind.PARAM, "w", (features, width), shards=w_shards), an_output(Kind.LOSS, "loss", ())],
    )
