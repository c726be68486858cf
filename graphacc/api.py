"""The public functions: compile a model, and run its step explicitly."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from graphacc._compat.probes import META_MODELS, has, why_not_at_all, why_off
from graphacc.costs.hardware import Hardware
from graphacc.errors import GraphAccError, StrategyError
from graphacc.loop.buckets import AUTOMATIC, SHORTEST_BUCKET, why_not_under
from graphacc.loop.choice import Choice
from graphacc.loop.engine import Engine, Options
from graphacc.loop.fallback import CHOICES
from graphacc.loop.module import attach, engine_of, is_compiled, seed_of_torch
from graphacc.loop.on_torch_xla import OnTorchXla, run_on_torch_xla
from graphacc.loop.optimizers import install_hooks
from graphacc.loop.pipelined import class_of
from graphacc.loop.verify import Report
from graphacc.runtime import DEFAULT_PLAN_SECONDS, available_devices, check_memory_plan, default_platform, distributed
from graphacc.search import Plan, Request, describe_parameter, first_strategy
from graphacc.strategy import Strategy
from graphacc.strategy.annotations import Annotations, P, annotate, annotated, checked_spec, pinned_parameters

log = logging.getLogger("graphacc")

NAN_ACTIONS = ("warn", "stop", "ignore")
BATCHES = ("global", "local")


def compile(
    model: nn.Module,
    *,
    strategy: Strategy | Plan | str | None = None,
    devices: int | None = None,
    precision: str | None = None,
    capture: str = "auto",
    seed: int | None = None,
    max_grad_norm: float | None = None,
    nan_loss: str = "warn",
    keep_gradients: bool = False,
    batch: str = "global",
    batch_dims: Mapping[str, int | None] | None = None,
    bucket_lengths: Sequence[int] | Literal["auto"] | None = None,
    length_dims: Mapping[str, int | Sequence[int] | None] | None = None,
    annotations: Annotations | None = None,
    cache_dir: str | None = "default",
    fast_compile: bool = False,
    memory_plan: str = "roam",
    plan_seconds: float = DEFAULT_PLAN_SECONDS,
    verify: int = 0,
) -> nn.Module:
    """Compile the training of `model`; the training loop stays as it is.

    The model is changed in place and returned: its calls are recorded, and ``optimizer.step()`` runs forward, backward
    and update as one program on the devices. Its loss is a promise until then; reading anything earlier works, and
    runs the step in parts.

    Args:
        model: the module to train. Its parameters and buffers move to the devices at the first step. One that was made on the meta device
            (``torch.device("meta")``, ``accelerate.init_empty_weights()``) is loaded by `graphacc.load_safetensors` or `graphacc.load_checkpoint`; what
            has no value when it is first used is made by the modules' own initialisers, one after the other, so that no process ever
            holds more than its shards and one module (see `graphacc.loop.deferred`).
        strategy: how the step is spread over devices, as a `Strategy` or as text ("dp=2,fsdp=4"); "auto" searches the fastest one that
            fits into the devices' memory, "auto,tp=2" with what is pinned (`graphacc.plan` says more, and needs no devices); a plan, or
            the path of one that ends in ".json", is replayed. Default: as "auto", and ``fsdp`` over all devices, which is said, where
            nothing can be searched or nothing is predicted to fit; with `bucket_lengths` or ``batch="local"`` it is ``fsdp``, too.
        devices: number of devices; on CPU they are virtual and made on demand. Default: what the strategy needs, else all.
        precision: "fp32", or "bf16" to compute in bf16 with fp32 parameters; overrides the strategy's.
        capture: "fx" captures operators in a torch.fx graph; "lazy" records HLO with PyTorch/XLA's lazy tensors (needs torch_xla 2.9),
            which follow more code, but give no operators for passes to work on; "auto" takes FX, and lazy tensors where FX refuses.
            "torch_xla" compiles nothing: the model runs on torch_xla's own runtime, which follows all code, on one device (see
            `graphacc.loop.on_torch_xla`); options about programs have no effect.
        seed: of the random numbers inside the model; default: torch's, and `torch.manual_seed` sets it anew (in a job of several
            processes: torch's when this is called).
        max_grad_norm: clip, in every ``optimizer.step()``, the total 2-norm of the gradients of that optimizer's parameters.
        nan_loss: what to do about a loss that is not finite: "warn" (once, until one is finite again), "stop" (raise) or "ignore".
        keep_gradients: ``parameter.grad`` can be read after ``optimizer.step()``, and a backward without ``zero_grad()`` adds to it, as in
            PyTorch. Takes the gradients' memory, and runs every step as two programs.
        batch: in a run of several processes, "global": every process passes the same whole batch, "local": each passes its own rows
            of it, equally many (``torch.utils.data.DistributedSampler``), which lie behind one another in the processes' order.
            Results and losses are those of the whole batch in both.
        batch_dims: path of a batch tensor, such as "model.kwargs['src']" -> the dim along which it is split over the data axes, or None
            to give every device all of it. Default: dim 0. Any choice gives the same result; a good one is faster.
        bucket_lengths: lengths to which batches are padded, such as (64, 128, 256), so that there is one program for each of them instead of one
            for each length. Losses, gradients and results are those of the unpadded batch: the program masks the padding wherever an operator would
            take it into a result. Where it cannot, and beyond the largest of these lengths, a batch is compiled for its own length, which is said.
            "auto": multiples of 8 up to 64, then four lengths in each octave; programs are only compiled for those that occur.
        length_dims: path of a batch tensor, such as "model.args[0]" -> the dim (or dims) that is such a length, or None. Default: dim 1 of the first tensor
            of integers (of any numbers, if there is none) and of whatever else has its size there, and dim 1 of further tensors of integers.
        annotations: pattern of parameter names -> how they are split: ``{"*.q_proj.weight": graphacc.P("tp", None)}``. A pin: what is
            not annotated is decided by the policy of the strategy's axes (``print(model.strategy)`` shows both).
        cache_dir: directory of the persistent compile cache ("default": the user's cache directory); None turns it off.
        fast_compile: compile faster, for programs that run slower; for debugging and tests.
        memory_plan: "roam" plans the temporaries of every program again after XLA has compiled it (order of operations and
            addresses; on CPU; results keep their bits), "xla" leaves XLA's plan. ``model.explain()`` says what it gave.
        plan_seconds: budget for planning one program, and for compiling it with XLA's other scheduler where the budget covers that.
        verify: number of first steps that plain PyTorch runs too, on a copy and with the same random numbers; loss, results, gradients,
            parameters, buffers and optimizer state are compared within the tolerances of `graphacc.loop.tolerances`, and a
            difference raises VerificationError, which names the tensor, the line of the model, and the pass at fault. Such a step costs
            PyTorch's own step besides, and up to two copies of parameters, gradients, buffers and optimizer state on the host, once
            per program that runs in it; the model's Python code runs once more. Later steps cost nothing. ``graphacc.verify(model)``
            asks for it at any time, ``model.explain()`` says what came out.

    Returns:
        `model` itself.

    Raises:
        StrategyError: the strategy does not fit the devices, or asks for what is not available.
        LoopError: the model, or a part of it, is compiled already, or its tensors cannot be managed.
        VerificationError: by a step, where `verify` finds a difference.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"graphacc.compile takes a torch.nn.Module, got {type(model).__name__}")
    if is_compiled(model) or isinstance(model, OnTorchXla):
        raise GraphAccError(f"{type(model).__name__} is compiled already: call graphacc.compile once")
    if why := why_not_at_all():
        raise GraphAccError(why)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and capture == "torch_xla":
            raise GraphAccError(f'{name!r} is on the meta device, and capture="torch_xla" makes no values: materialise the model before, or leave capture out')
        if tensor.is_meta and not has(META_MODELS):
            raise GraphAccError(f"{name!r} is on the meta device, which cannot be compiled with this version of torch ({why_off(META_MODELS)}): materialise the model before")
        if is_lazy(tensor):
            raise GraphAccError(f"{name!r} has no shape yet: call the model once on a batch before graphacc.compile, which gives its lazy modules their shapes")
    _check_attributes(model)
    _check_choice("capture", capture, CHOICES)
    _check_choice("nan_loss", nan_loss, NAN_ACTIONS)
    _check_choice("batch", batch, BATCHES)
    check_memory_plan(memory_plan, plan_seconds)
    distributed.initialize()
    seed_is_chosen, follows_torch = seed is not None, seed is None and distributed.process_count() == 1
    seed = seed_of_torch() if seed is None else seed & 0xFFFFFFFF
    if capture == "torch_xla":
        asked = dict(verify=verify, max_grad_norm=max_grad_norm, batch_dims=batch_dims, annotations=annotations)
        asked |= dict(nan_loss=nan_loss if nan_loss == "stop" else None, batch=batch if batch == "local" else None, bucket_lengths=bucket_lengths)
        _check_not_asked(capture, asked)
        alone, _ = _choose_strategy(model, strategy, 1 if devices is None else devices, precision)
        return run_on_torch_xla(model, alone, seed=seed)
    if not any(True for _ in model.parameters()):
        log.warning("graphacc: %s has no parameters, so there is nothing to train in it: compile the module that holds the layers", type(model).__name__)
    if bucket_lengths is not None and isinstance(strategy, str) and _is_auto(strategy):
        raise StrategyError(f"bucket_lengths with strategy={strategy!r}: a search knows one length; name the strategy, such as fsdp=8")
    if strategy is None and (bucket_lengths is not None or batch == "local"):
        strategy = Strategy(fsdp=available_devices() if devices is None else devices)  # a search knows one length, and takes batches for whole
    if isinstance(strategy, str) and strategy.endswith(".json"):
        strategy = Plan.load(strategy)
    chosen, choice = _choose_strategy(model, strategy, devices, precision)
    if batch == "local" and chosen.microbatches > 1:
        raise StrategyError(
            f'batch="local" with microbatches={chosen.microbatches}: the rows of a microbatch would come from every process; '
            'use batch="global", or accumulate over several calls of backward()'
        )
    programs = class_of(chosen)(
        chosen,
        num_devices=chosen.num_devices if devices is None else devices,
        batch_dims=batch_dims or {},
        annotations=_pins(model, annotations or {}, chosen),
        cache_dir=cache_dir,
        fast_compile=fast_compile,
        memory_plan=memory_plan,
        plan_seconds=plan_seconds,
        local_batch=batch == "local",
        seed=seed,
    )
    programs.chose_microbatches = isinstance(strategy, Plan) and "microbatches" not in strategy.request
    options = Options(
        seed=seed,
        follows_torch=follows_torch,
        seed_is_chosen=seed_is_chosen,
        max_grad_norm=max_grad_norm,
        nan_loss=nan_loss,
        keep_gradients=keep_gradients,
        capture=capture,
        bucket_lengths=_checked_lengths(bucket_lengths, length_dims, chosen, batch),
        length_dims={path: () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims) for path, dims in (length_dims or {}).items()},
    )
    engine = Engine(model, programs, options, choice)
    engine.verifier.request(verify)
    attach(model, engine)
    install_hooks()
    return model


def verify(model: nn.Module, steps: int = 1) -> Report:
    """Check the next steps of a compiled model against plain PyTorch, as ``compile(verify=)`` does for the first ones.

    Args:
        model: a compiled model.
        steps: number of calls of an optimizer's ``step()``, with all programs that run until then. 0 ends a check that goes on.

    Returns:
        The model's report, which fills as the steps run; ``model.explain()`` shows it as one line.

    Raises:
        StrategyError: the run has several processes.
        VerificationError: by a step of the loop, where a value differs.
    """
    return engine_of(model).verifier.request(steps)


def mark_sharding(tensor: Tensor, spec: Iterable[str | None]) -> Tensor:
    """Pin how a tensor is split over the mesh (the name is PyTorch/XLA's ``xs.mark_sharding``).

    Args:
        tensor: an ``nn.Parameter``, before its model is compiled; or an activation, inside a model's forward.
        spec: the mesh axis of every dim, None for a dim that stays whole: ``graphacc.P(None, None, "tp")``.

    Returns:
        The parameter itself; for an activation, a tensor to use in its place. Its gradient is split alike.

    Raises:
        StrategyError: an axis is unknown or used twice, or there are more entries than dims.
        GraphAccError: the parameter's model is compiled already.
    """
    checked = checked_spec(spec)
    if len(checked) > tensor.dim():
        raise StrategyError(f"{checked!r} has {len(checked)} entries, the tensor has shape {list(tensor.shape)}: give at most {tensor.dim()}")
    if isinstance(tensor, nn.Parameter):
        if hasattr(tensor, "_graphacc_handle"):
            raise GraphAccError("mark_sharding on a parameter of a compiled model would have no effect: call it before graphacc.compile")
        annotate(tensor, checked)
        return tensor
    return torch.ops.graphacc.mark_sharding(tensor, ",".join(axis or "" for axis in checked))


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
        ``step.model`` is the model.
    """
    if not is_compiled(model) and not (isinstance(model, OnTorchXla) and not options):
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

    step.model = model
    return step


def _default_loss(model: nn.Module, *args, **kwargs) -> Tensor:
    result = model(*args, **kwargs)
    value = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if value is None:
        raise GraphAccError(
            f"{type(model).__name__} returned a {type(result).__name__} without a loss: pass labels, or give train_step a loss function"
        )
    return value


def _check_attributes(model: nn.Module) -> None:
    """Tensors of the meta device that nothing can give a value: they are neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise GraphAccError(
                    f"the attribute {name!r} of {path or 'the model'} ({type(module).__name__}) is a tensor of shape {list(value.shape)} on the meta device, and neither "
                    f"parameter nor buffer, so it would never get a value: make it with device='cpu', or register it (register_buffer)"
                )


def _pins(model: nn.Module, annotations: Annotations, strategy: Strategy) -> dict[str, P]:
    first = {parameter: name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    first |= {parameter: name for name, parameter in model.named_parameters()}
    aliases = {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False) if first[parameter] != name}
    shapes = {name: tuple(parameter.shape) for parameter, name in first.items()}
    return pinned_parameters(annotations, annotated(model), shapes, aliases, strategy)


def _choose_strategy(
    model: nn.Module, strategy: Strategy | Plan | str | None, devices: int | None, precision: str | None
) -> tuple[Strategy, Choice | None]:
    """The strategy, and the search for another one; programs without gradients run under the strategy until it is found."""
    if isinstance(strategy, Plan):
        count = strategy.strategy.num_devices if devices is None else devices
        parameters = {name: describe_parameter(p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
        strategy.check(parameters, count, Hardware.present(count).chip.name)
        strategy = strategy.strategy
    if strategy is None or (isinstance(strategy, str) and _is_auto(strategy)):
        count = available_devices() if devices is None else devices
        request = Request.parse("auto" if strategy is None else strategy, count)
        if request.chooses_microbatches:
            raise StrategyError(
                f"strategy={strategy!r}: leave microbatches=auto out, as their number is searched where they together give what the whole batch gives; where they do not, a loop is recorded "
                "for one number: graphacc.plan(model, batch, microbatches='auto') chooses it, and graphacc.compile(strategy=) takes its plan, or give it here, such as 'auto,microbatches=8'"
            )
        if precision is not None:
            request = dataclasses.replace(request, pins={**request.pins, "precision": precision})
        is_asked = strategy is not None
        searches = count > 1 or (is_asked and default_platform() != "cpu")  # one device has rematerialisation and its host to choose
        return (first_strategy(request), Choice(request, is_asked=is_asked)) if searches else (Strategy(**request.pins), None)
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy)
    if precision is not None:
        strategy = strategy.replace(precision=precision)
    return _with_nodes(strategy), None


def _is_auto(strategy: str) -> bool:
    return strategy.partition(",")[0].strip() == "auto"


def _with_nodes(strategy: Strategy) -> Strategy:
    """With the number of fsdp's ranks in one process, where the strategy wants to know it: the devices of a process follow one another, around tp, cp and ep."""
    local_devices = strategy.num_devices // distributed.process_count()
    if not strategy.quantized_gradients or strategy.node_size is not None or strategy.hpz > 1 or distributed.process_count() == 1:
        return strategy
    return strategy.replace(node_size=math.gcd(strategy.fsdp, max(1, local_devices // (strategy.tp * strategy.cp * strategy.ep))))


def _checked_lengths(lengths: Sequence[int] | Literal["auto"] | None, dims: Mapping[str, object] | None, strategy: Strategy, batch: str) -> tuple[int, ...]:
    """The lengths of the buckets; raises StrategyError where they make no sense, or cannot be had."""
    if lengths is None:
        if dims:
            raise StrategyError("length_dims says which dims bucket_lengths pads: give bucket_lengths, too")
        return ()
    found = AUTOMATIC if lengths == "auto" else tuple(lengths)
    if not found or any(type(length) is not int or length < SHORTEST_BUCKET for length in found) or sorted(set(found)) != list(found):
        raise StrategyError(f'bucket_lengths={lengths!r}: give ascending whole numbers from {SHORTEST_BUCKET}, such as (64, 128, 256), or "auto"')
    if (why := why_not_under(strategy)) is not None:
        raise StrategyError(why)
    if batch == "local":
        raise StrategyError('bucket_lengths with batch="local": processes could see other lengths; use batch="global", or pad the batches yourself')
    return found


def _check_not_asked(capture: str, options: Mapping[str, object]) -> None:
    asked = [f"{name}={value!r}" for name, value in options.items() if value]
    if asked:
        raise StrategyError(f"{', '.join(asked)}: capture={capture!r} compiles no step that could do this; leave it out, or choose another capture")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise GraphAccError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


__all__ = ["compile", "engine_of", "mark_sharding", "train_step", "verify"]
