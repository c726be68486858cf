"""`graphacc.plan`: a strategy for a model that is not trained here, for hardware that need not be here."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphacc.capture import PATCHING, Batch, capture_joint, capture_update
from graphacc.capture.optimizer import ELEMENTWISE, steps_like
from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.graph import Kind, StepGraph
from graphacc.search.find import Search
from graphacc.search.plan import Plan
from graphacc.search.space import Request
from graphacc.strategy.spec import Strategy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def plan(
    model: nn.Module,
    batch: Any,
    optimizer: "torch.optim.Optimizer | MakeOptimizer | None" = None,
    *,
    hardware: Hardware | str | None = None,
    strategy: Strategy | str = "auto",
    memory_gib: float | None = None,
    precision: str | None = None,
    loss: Callable[..., Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    annotations: Mapping[str, Iterable[str | None]] | None = None,
    **pins: Any,
) -> Plan:
    """Search the fastest strategy that fits, without running the model.

    The step is captured on fake tensors, so that `model` and `batch` can be on the meta device, and larger than this machine's memory.

    Args:
        model: left exactly as it is.
        batch: of all devices: a dict of keyword arguments, a tuple of positional ones, or a tensor.
        optimizer: an optimizer of the model's parameters, or a function that makes one from them; None: ``torch.optim.AdamW``.
        hardware: as text ("16x8xH100": hosts x chips, "8xH100", "cpu:8", or a file that `graphacc calibrate` wrote); None: the present devices.
        strategy: "auto", or "auto" with pins ("auto,tp=2"); a whole strategy is evaluated and not searched.
        memory_gib: GiB of a device that a step may use; None: what the hardware has.
        precision: "fp32" or "bf16", as of `graphacc.compile`.
        loss: ``loss(model, *args, **kwargs)`` gives the scalar loss; default: what the model returns, or its ``.loss``.
        batch_dims: path of a batch tensor, such as "kwargs['src']" -> the dim that the data axes split, or None.
        annotations: parameter -> the mesh axis of every dim.
        **pins: fields of `Strategy` that must have these values; ``microbatches="auto"`` lets the search choose their number, and with it pipelines.

    Raises:
        StrategyError: no strategy fits; with the pins that conflict, and what would do.
        CaptureError: the step cannot be captured.
    """
    return search_and_plan(
        model, batch, optimizer, hardware=hardware, strategy=strategy, memory_gib=memory_gib, precision=precision, loss=loss, batch_dims=batch_dims,
        annotations=annotations, **pins,
    )[1]  # fmt: skip


def search_and_plan(
    model: nn.Module,
    batch: Any,
    optimizer: "torch.optim.Optimizer | MakeOptimizer | None" = None,
    *,
    hardware: Hardware | str | None = None,
    strategy: Strategy | str = "auto",
    memory_gib: float | None = None,
    precision: str | None = None,
    loss: Callable[..., Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    annotations: Mapping[str, Iterable[str | None]] | None = None,
    **pins: Any,
) -> tuple[Search, Plan]:
    """The plan, and the search that it came from; arguments and errors as of `plan`."""
    found = hardware if isinstance(hardware, Hardware) else Hardware.present() if hardware is None else Hardware.parse(hardware)
    request, fixed = _asked(strategy, pins | ({} if precision is None else {"precision": precision}), found.num_devices)
    asked = request.pins if fixed is None else dataclasses.asdict(fixed)
    microbatches = int(str(asked.get("microbatches", 1)))
    search = search_of(
        model,
        batch,
        optimizer,
        found,
        loss=loss,
        precision=str(asked.get("precision", "fp32")),
        microbatches=microbatches,
        batch_dims=batch_dims,
        annotations=annotations,
        memory_bytes=None if memory_gib is None else round(memory_gib * 2**30),
    )
    return search, search.run(request) if fixed is None else search.plan_of(fixed)


def search_of(
    model: nn.Module,
    batch: Any,
    optimizer: "torch.optim.Optimizer | MakeOptimizer | None",
    hardware: Hardware,
    *,
    loss: Callable[..., Tensor] | None = None,
    precision: str = "fp32",
    microbatches: int = 1,
    **options: Any,
) -> Search:
    """The captured step of a model, ready to be searched; arguments as of `plan`, options as of `Search`."""
    start = time.perf_counter()

    def capture(count: int) -> StepGraph:
        with PATCHING:
            return _joint(model, batch, loss, precision, count)

    with PATCHING:
        joint = capture(microbatches)
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else (optimizer or torch.optim.AdamW)(model.parameters())
        names = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
        update = capture_update(model, made, names, alike=dict.fromkeys(names) if not made.state else None)
    assert isinstance(update, StepGraph)
    captured = time.perf_counter()
    search = Search(joint, update, hardware, microbatches=microbatches, capture=capture, offloads=steps_like(made, ELEMENTWISE), **options)
    search.seconds = {"capture": captured - start, "reduction": time.perf_counter() - captured}
    return search


def _asked(strategy: Strategy | str, pins: Mapping[str, Any], devices: int) -> tuple[Request, Strategy | None]:
    """What is searched; or the strategy that is evaluated alone."""
    if isinstance(strategy, str) and strategy.strip().startswith("auto"):
        is_free = pins.get("microbatches") == "auto"
        request = Request.parse(strategy, devices)
        pins = {**request.pins, **{name: value for name, value in pins.items() if not (is_free and name == "microbatches")}}
        return Request(devices=devices, pins=pins, chooses_microbatches=is_free or request.chooses_microbatches), None
    fixed = (Strategy.parse(strategy) if isinstance(strategy, str) else strategy).replace(**pins)
    if fixed.num_devices > devices:
        raise StrategyError(f"{fixed} needs {fixed.num_devices} devices, the hardware has {devices}: choose another strategy, or more hardware")
    return Request(devices=fixed.num_devices), fixed


def _joint(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, precision: str, microbatches: int) -> StepGraph:
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})
    entries, structure = pytree.tree_flatten_with_path({"args": args, "kwargs": dict(kwargs)})
    places = [i for i, (_, leaf) in enumerate(entries) if isinstance(leaf, Tensor)]
    leaves = [leaf for _, leaf in entries]
    paths = [pytree.keystr(path)[2:].replace("']", "", 1) for path, _ in entries]  # "kwargs['src']"

    def call(module: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        given = pytree.tree_unflatten(filled, structure)
        result = module(*given["args"], **given["kwargs"]) if loss is None else loss(module, *given["args"], **given["kwargs"])
        value = result if isinstance(result, Tensor) else getattr(result, "loss", None)
        if not isinstance(value, Tensor):
            raise StrategyError(f"{type(module).__name__} returned a {type(result).__name__} without a loss: pass labels, or give `loss`")
        return value, []

    tensors = tuple(_rows(leaves[i], microbatches) for i in places)
    joint = capture_joint(model, call, Batch(leaves=tensors, paths=tuple(paths[i] for i in places)), precision=precision)
    assert isinstance(joint, StepGraph)
    return joint


def _rows(tensor: Tensor, microbatches: int) -> Tensor:
    """Those of one microbatch."""
    if microbatches == 1 or not tensor.dim():
        return tensor
    if tensor.shape[0] % microbatches:
        raise StrategyError(f"microbatches={microbatches} does not divide the batch of {tensor.shape[0]}: choose a divisor")
    return tensor[: tensor.shape[0] // microbatches]
