"""The public functions: compile a model, and run its step explicitly."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from graphacc.errors import GraphAccError, StrategyError
from graphacc.loop.engine import Engine, Options
from graphacc.loop.module import attach, engine_of, is_compiled, seed_of_torch
from graphacc.loop.optimizers import install_hooks
from graphacc.loop.programs import Programs
from graphacc.runtime import available_devices
from graphacc.strategy import Strategy

CAPTURES = ("auto", "fx")
NAN_ACTIONS = ("warn", "stop", "ignore")


def compile(
    model: nn.Module,
    *,
    strategy: Strategy | str | None = None,
    devices: int | None = None,
    precision: str | None = None,
    capture: str = "auto",
    seed: int | None = None,
    max_grad_norm: float | None = None,
    nan_loss: str = "warn",
    batch_dims: Mapping[str, int | None] | None = None,
    cache_dir: str | None = "default",
    fast_compile: bool = False,
) -> nn.Module:
    """Compile the training of `model`; the training loop stays as it is.

    The model is changed in place and returned: its calls are recorded, and ``optimizer.step()`` runs forward, backward
    and update as one program on the devices. Its loss is a promise until then; reading anything earlier works, and
    runs the step in parts.

    Args:
        model: the module to train. Its parameters and buffers move to the devices at the first step.
        strategy: how the step is spread over devices, as a `Strategy` or as text ("dp=2,fsdp=4"). Default: ``fsdp`` over all devices.
        devices: number of devices; on CPU they are virtual and made on demand. Default: what the strategy needs, else all.
        precision: "fp32", or "bf16" to compute in bf16 with fp32 parameters; overrides the strategy's.
        capture: "fx" captures a torch.fx graph; "auto" means the same.
        seed: of the random numbers inside the model; default: torch's current seed.
        max_grad_norm: clip, in every ``optimizer.step()``, the total 2-norm of the gradients of that optimizer's parameters.
        nan_loss: what to do about a loss that is not finite: "warn", "stop" (raise) or "ignore".
        batch_dims: path of a batch tensor, such as "model.kwargs['src']" -> the dim along which it is split over the data axes, or None
            to give every device all of it. Default: dim 0. Any choice gives the same result; a good one is faster.
        cache_dir: directory of the persistent compile cache ("default": the user's cache directory); None turns it off.
        fast_compile: compile faster, for programs that run slower; for debugging and tests.

    Returns:
        `model` itself.

    Raises:
        StrategyError: the strategy does not fit the devices, or asks for what is not available.
        LoopError: the model, or a part of it, is compiled already, or its tensors cannot be managed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"graphacc.compile takes a torch.nn.Module, got {type(model).__name__}")
    if is_compiled(model):
        raise GraphAccError(f"{type(model).__name__} is compiled already: call graphacc.compile once")
    _check_choice("capture", capture, CAPTURES)
    _check_choice("nan_loss", nan_loss, NAN_ACTIONS)
    chosen = _choose_strategy(strategy, devices, precision)
    programs = Programs(
        chosen,
        num_devices=chosen.num_devices if devices is None else devices,
        batch_dims=batch_dims or {},
        cache_dir=cache_dir,
        fast_compile=fast_compile,
    )
    options = Options(seed=seed_of_torch() if seed is None else seed & 0xFFFFFFFF, max_grad_norm=max_grad_norm, nan_loss=nan_loss)
    attach(model, Engine(model, programs, options))
    install_hooks()
    return model


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor] | None = None, **options
) -> Callable[..., Tensor]:
    """The explicit form of the loop: a function that does one training step.

    Args:
        model: a compiled model, or one that is compiled here with `options` (see `compile`).
        optimizer: any ``torch.optim`` optimizer of the model's parameters.
        loss: ``loss(model, *args, **kwargs)`` gives the scalar loss; default: calls the model and takes ``.loss``, or the
            result itself if it is a tensor.

    Returns:
        ``step(*args, **kwargs)``: forward, backward, update and zero_grad; returns the loss, which waits for the device when read.
    """
    if not is_compiled(model):
        compile(model, **options)
    elif options:
        raise TypeError(f"the model is compiled already: {', '.join(options)} must be given to graphacc.compile")
    compute = _default_loss if loss is None else loss

    def step(*args, **kwargs) -> Tensor:
        value = compute(model, *args, **kwargs)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def _default_loss(model: nn.Module, *args, **kwargs) -> Tensor:
    result = model(*args, **kwargs)
    value = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if value is None:
        raise GraphAccError(
            f"{type(model).__name__} returned a {type(result).__name__} without a loss: pass labels, or give train_step a loss function"
        )
    return value


def _choose_strategy(strategy: Strategy | str | None, devices: int | None, precision: str | None) -> Strategy:
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy)
    if strategy is None:
        count = devices if devices is not None else available_devices()
        strategy = Strategy(fsdp=count)
    if precision is not None:
        strategy = strategy.replace(precision=precision)
    later = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(strategy, axis) > 1]
    if later:
        raise StrategyError(f"{strategy}: the axes {', '.join(later)} are not available yet; use dp and fsdp")
    return strategy


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise GraphAccError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


__all__ = ["compile", "engine_of", "train_step"]
