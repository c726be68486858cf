"""Training a model with plain PyTorch and with GraphAcc in the same run, and comparing."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import zoo
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, relative_error
from torch import nn
from zoo import adamw

import graphacc
from graphacc.capture import FX
from graphacc.loop import build
from graphacc.loop.execution import Execution

STEPS = 5
_captures: dict[tuple, object] = {}


def train(model: nn.Module, batches: list[dict], make_optimizer: Callable = adamw, scheduled: bool = True) -> list[float]:
    """The plain loop; returns the losses."""
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=len(batches)) if scheduled else None
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def batches_of(name: str, steps: int = STEPS, batch_size: int = 8) -> list[dict]:
    return [zoo.batch(name, seed, batch_size) for seed in range(steps)]


def compiled(model: nn.Module, strategy: str | None, **options) -> nn.Module:
    """Compile for tests: fast, no persistent cache, one device unless the strategy says more."""
    options = {"cache_dir": None, "fast_compile": True} | options
    if strategy is None:
        options.setdefault("devices", 1)
    return graphacc.compile(model, strategy=strategy or graphacc.Strategy(), **options)


def assert_parity(
    reference: nn.Module, model: nn.Module, expected: list[float], losses: list[float], by_pytorch: bool = False
) -> None:
    """Losses within 1e-5, and every parameter and buffer within 1e-4 of its largest value; and it was no run by PyTorch."""
    engine = getattr(model, "_graphacc_engine", None)  # none where torch_xla's own runtime has the model
    assert by_pytorch or engine is None or not engine.by_pytorch.counts, engine.by_pytorch.counts
    for step, (got, want) in enumerate(zip(losses, expected, strict=True)):
        assert abs(got - want) <= LOSS * max(1.0, abs(want)), f"loss of step {step}: {got}, plain PyTorch {want}"
    got, want = model.state_dict(), reference.state_dict()
    assert list(got) == list(want)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= PARAMETERS_AFTER_STEPS, f"{worst}: relative error {errors[worst]:.3g} after {len(losses)} steps"


def check_both(reference: nn.Module, model: nn.Module, loss_of: Callable, steps: int, lr: float = 0.01, by_pytorch: bool = False) -> None:
    """Train both with SGD on `loss_of(model, step)`, which ends the step's forward; the same losses, parameters and buffers come out."""
    losses = []
    for one in (reference, model):
        optimizer, found = torch.optim.SGD(one.parameters(), lr=lr), []
        for step in range(steps):
            loss = loss_of(one, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert_parity(reference, model, *losses, by_pytorch=by_pytorch)


def check_parity(name: str, strategy: str | None, make_optimizer: Callable = adamw, **options) -> nn.Module:
    """Train a zoo model both ways; returns the compiled model."""
    model, reference, expected = plainly_trained(name, make_optimizer)
    batches = batches_of(name)
    model = compiled(copy.deepcopy(model), strategy, **options)
    with captured_once("parity", name) if make_optimizer is adamw and not options else contextlib.nullcontext():
        losses = train(model, batches, make_optimizer)
    assert_parity(reference, model, expected, losses)
    return model


@functools.cache
def plainly_trained(name: str, make_optimizer: Callable = adamw) -> tuple[nn.Module, nn.Module, list[float]]:
    """A zoo model, the same after plain PyTorch's training, and its losses; nobody changes them."""
    model, _ = zoo.MODELS[name]()
    reference = copy.deepcopy(model)
    return model, reference, train(reference, batches_of(name), make_optimizer)


@contextlib.contextmanager
def captured_once(*key: object) -> Iterator[None]:
    """What is captured in the block is captured by the first block with this key, in order; the others get the same graphs.

    A strategy is applied to captured graphs, so a model, its batch and its optimizer give the same ones under all, which
    tests/api/test_parity.py shows (but not with lazy tensors, whose graphs know the strategy). Two fifths of a test's time go into their capture.
    """
    capture, count = Execution.capture, itertools.count()

    def once(execution: Execution, build_graph: Callable, *arguments) -> object:
        engine = execution.engine
        if engine.fallback.backend is not FX:
            return capture(execution, build_graph, *arguments)
        strategy = engine.programs.strategy
        parts = arguments[-1] if build_graph is build.joint_graph else strategy.microbatches  # a whole batch's serves all
        place = (*key, next(count), build_graph.__name__, strategy.precision, parts)
        if place not in _captures:
            _captures[place] = capture(execution, build_graph, *arguments)
        return _captures[place]

    Execution.capture = once
    try:
        yield
    finally:
        Execution.capture = capture
