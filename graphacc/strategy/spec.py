"""Strategy: everything that may be chosen about how a step runs, in one frozen value."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from graphacc.errors import StrategyError
from graphacc.strategy.axes import AXES, DP, FSDP
from graphacc.strategy.schedules import SCHEDULES

REMATS = ("none", "blocks", "auto")
"""What backward computes again; or a tuple of pairs, a pattern of regions and what they keep."""

KEEPS = ("all", "cheap", "products", "inputs")
"""What a region keeps for backward: everything; all but what is element by element; products, convolutions and attention; what it reads."""

OPTIMIZER = "optimizer"

OFFLOADS = (None, OPTIMIZER)
"""What lives on the host: nothing, or the optimizer's state, with exact (master) parameters, and its step (ZeRO-Offload)."""

CONTEXTS = ("ulysses", "ring")
"""How attention crosses the `cp` axis."""

PARTITIONERS = ("passes", "spmd")
"""Who splits a step along `tp`: GraphAcc's passes, or XLA's SPMD partitioner, to which the same marks are handed with the whole step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a training step is spread over devices. None leaves a choice free for the search."""

    dp: int = 1  # replicas that split the batch and keep whole parameters
    fsdp: int = 1  # ranks that split the batch and the state that `zero` names
    zero: int | None = None  # ZeRO stage over the ranks of `fsdp`, `cp` and `ep`: 1 optimizer state, 2 and gradients, 3 and parameters; None: 3 with fsdp, and nothing is split without
    tp: int = 1  # tensor parallelism
    sequence_parallel: bool = False  # along tp: activations between blocks are split along the sequence
    tp_by: str = "passes"  # who partitions along tp: GraphAcc's "passes", with explicit collectives, or "spmd": XLA's SPMD partitioner, which gets the marks of parameters and sequences and partitions the whole step, dp and fsdp too
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallelism: the sequence is split, through attention too
    context: str = "ulysses"  # how attention crosses cp: "ulysses" (all-to-all of heads) or "ring"
    ep: int = 1  # expert parallelism: ranks that split the batch and the experts
    capacity_factor: float | None = None  # rows that a rank may send to another over ep, as a multiple of their mean; None: no row is dropped
    microbatches: int = 1  # the batch is cut in so many, whose gradients are accumulated before one update
    schedule: str = "1f1b"  # of the pipeline: "gpipe", "1f1b", "interleaved" or "zb-h1"
    chunks: int = 1  # consecutive parts of the model per pipeline stage; more than one for "interleaved"
    stages: tuple[tuple[str, int], ...] = ()  # pins: pattern of module paths -> chunk of the model, from 0 to pp * chunks - 1; or a dict
    bucket_mb: float | None = None  # gathers of weights and scatters of gradients are joined into messages of at most so many MB; 0: one for each tensor; None: 32, or a 16th of the weights if that is less
    prefetch: int = 1  # buckets of ZeRO-3's weights that are gathered ahead of the one in use; no more than this and that one are there at a time
    quantized_weights: bool = False  # ZeRO++ qwZ: fsdp gathers large weights as int8; changes numerics
    quantized_gradients: bool = False  # ZeRO++ qgZ: fsdp scatters large gradients as int4, within nodes and then across; changes numerics
    hpz: int = 1  # ZeRO++ hpZ: backward gathers within groups of so many fsdp ranks what forward gathered and kept a part of; 1: over all
    node_size: int | None = None  # fsdp ranks in one node, for quantized_gradients; None: hpz, or else the fsdp ranks of one process
    quant_block: int = 256  # elements that share a scale
    quant_min_size: int = 16384  # elements of a weight below which it and its gradient travel exactly; norms and biases always do
    frozen_bits: int = 8  # with quantized_weights: weights that are not trained are kept on the devices as codes of so many bits, 8 or 4
    remat: str | tuple[tuple[str, str], ...] = "none"  # what backward computes again besides what the model checkpoints: "none", "blocks" (all but what a block reads), "auto" (what memory_gb asks for), or pairs of a pattern of blocks and what they keep: "all", "cheap", "products" or "inputs"
    memory_gb: float | None = None  # for remat="auto": predicted memory of a device, in 1e9 bytes, that the step must not exceed
    loss_chunks: int = 1  # the head of a language model and its loss, forward and backward, are computed in so many chunks of the tokens, one after the other, so that no more than one chunk's logits exist; sums over tokens are taken in another order
    offload: str | None = None  # "optimizer": fp32 parameters and the optimizer's state are on the host, which does the update (ZeRO-Offload); devices keep what they compute with
    delay: int = 0  # with offload: 1 lets the host update with the gradients of a step while the devices run the next one; changes numerics
    delay_after: int = 40  # with delay=1: steps that are not delayed before
    precision: str = "fp32"  # "fp32", or "bf16": compute in bf16, fp32 masters
    reduce_dtype: str = "fp32"  # of gradients computed in bf16: cast to fp32 and summed over the ranks so, or "bf16": summed in bf16, at half the bytes; those that add up on each rank before (`late_axes`) are summed as they lie there

    def __post_init__(self):
        for axis in AXES:
            _check_count(axis, getattr(self, axis))
        _check_count("microbatches", self.microbatches)
        _check_count("chunks", self.chunks)
        _check_count("loss_chunks", self.loss_chunks)
        _check_count("prefetch", self.prefetch, at_least=0)
        object.__setattr__(self, "stages", _pins(self.stages))
        if self.context not in CONTEXTS:
            raise StrategyError(f"context={self.context!r} is unknown: choose one of {', '.join(CONTEXTS)}")
        if not isinstance(self.sequence_parallel, bool):
            raise StrategyError(f"sequence_parallel={self.sequence_parallel!r} must be True or False")
        if self.context == "ring" and self.cp > 1 and self.sequence_parallel:
            raise StrategyError("context='ring' needs contiguous blocks of the sequence, which sequence_parallel interleaves: use context='ulysses', or leave sequence_parallel out")
        if self.sequence_parallel and self.tp == 1:
            raise StrategyError("sequence_parallel splits activations over the tp axis, which has size 1: set tp, or leave it False")
        self._check_partitioner()
        if self.schedule not in SCHEDULES:
            raise StrategyError(f"schedule={self.schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
        if self.pp == 1 and (self.chunks, self.stages, self.schedule) != (1, (), "1f1b"):
            raise StrategyError("schedule, chunks and stages are for a pipeline, which pp=1 does not make: set pp to the number of stages")
        if self.bucket_mb is not None and (isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, int | float) or not 0 <= self.bucket_mb < math.inf):
            raise StrategyError(f"bucket_mb={self.bucket_mb!r} must be a number of MB, 0 for a message for each tensor, or None for buckets that fit the model")
        if self.capacity_factor is not None:
            _check_capacity(self.capacity_factor, self.ep)
        if self.zero not in (None, 1, 2, 3):
            raise StrategyError(f"zero={self.zero!r} is no ZeRO stage: set zero to 1, 2 or 3")
        object.__setattr__(self, "remat", _remat(self.remat))
        if self.remat == "auto" and self.memory_gb is None:
            raise StrategyError("remat='auto' computes again what a budget asks for: set memory_gb to the memory of a device that the step may use")
        if self.memory_gb is not None:
            _check_memory(self.memory_gb, self.remat)
        if self.remat == "auto" and self.pp > 1:
            raise StrategyError(f"remat='auto' predicts one program, and pp={self.pp} makes one for every stage: use remat='blocks', or name what blocks keep")
        if self.precision not in ("fp32", "bf16"):
            raise StrategyError(f"precision={self.precision!r} is unknown: set precision to 'fp32' or 'bf16'")
        if self.reduce_dtype not in ("fp32", "bf16"):
            raise StrategyError(f"reduce_dtype={self.reduce_dtype!r} is unknown: set reduce_dtype to 'fp32' or 'bf16'")
        if self.reduce_dtype == "bf16" and self.precision != "bf16":
            raise StrategyError(f"reduce_dtype='bf16' is for gradients that are computed in bf16, and precision is {self.precision!r}: set precision='bf16', or leave reduce_dtype out")
        if self.reduce_dtype == "bf16" and self.quantized_gradients:
            raise StrategyError("reduce_dtype='bf16' is for gradients that travel as they are, and quantized_gradients sends them as int4: leave one of the two out")
        self._check_quantization()
        self._check_offload()
        if self.zero is not None and self.fsdp == self.cp == self.ep == 1:
            raise StrategyError(f"zero={self.zero} shards over the axes fsdp, cp and ep, which have size 1: set fsdp to the number of ranks, or leave zero unset")

    def _check_partitioner(self) -> None:
        if self.tp_by not in PARTITIONERS:
            raise StrategyError(f"tp_by={self.tp_by!r} is unknown: choose one of {', '.join(PARTITIONERS)}")
        if self.tp_by == "passes":
            return
        if self.tp == 1:
            raise StrategyError(f"tp_by={self.tp_by!r} says who partitions along the tp axis, which has size 1: set tp, or leave tp_by out")
        rewriting = ("pp", "cp", "ep", "capacity_factor", "bucket_mb", "prefetch", "quantized_weights", "quantized_gradients", "hpz", "loss_chunks", "offload", "reduce_dtype")
        asked = [field.name for field in dataclasses.fields(self) if field.name in rewriting and getattr(self, field.name) != field.default]
        asked += ["remat='auto'"] * (self.remat == "auto")
        if asked:
            raise StrategyError(
                f"tp_by={self.tp_by!r} hands the whole step to XLA's partitioner, which makes its own collectives, and {', '.join(asked)} need{'s' * (len(asked) == 1)} "
                "the program of one device: leave them out, or leave tp_by out"
            )

    def _check_quantization(self) -> None:
        _check_count("hpz", self.hpz)
        for name in ("quantized_weights", "quantized_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise StrategyError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.quantized_weights and (self.zero_stage != 3 or self.fsdp == 1):
            raise StrategyError(
                f"quantized_weights=True is about the weights that ZeRO-3 gathers over fsdp; with fsdp={self.fsdp},zero={self.zero} it gathers none there, and the replicas "
                f"of a weight would keep the error: set fsdp and zero=3, or leave quantized_weights out"
            )
        if self.quantized_gradients and self.fsdp == 1:
            raise StrategyError("quantized_gradients=True is about what the fsdp axis scatters, which has size 1: set fsdp, or leave it out")
        if self.hpz > 1 and (self.zero_stage != 3 or self.fsdp == 1):
            raise StrategyError(f"hpz={self.hpz} is about the second gather of ZeRO-3: set fsdp and zero=3, or leave hpz out")
        if self.hpz > 1 and self.hpz == self.fsdp:
            raise StrategyError(f"hpz={self.hpz} is all of fsdp={self.fsdp}, so that the secondary partition would be the primary one: leave hpz out")
        if self.hpz > 1 and self.pp > 1:
            raise StrategyError(f"hpz={self.hpz} keeps a part of every gathered weight until its backward, under pp={self.pp} once for each microbatch in flight: leave hpz out, or set pp=1")
        for name in ("hpz", "node_size"):
            size = getattr(self, name)
            if size is not None:
                _check_count(name, size)
                if self.fsdp % size:
                    raise StrategyError(f"{name}={size} does not divide fsdp={self.fsdp}: set it to the number of fsdp ranks in one node")
        if self.node_size is not None and not self.quantized_gradients:
            raise StrategyError(f"node_size={self.node_size} is for quantized_gradients, which is not set: leave it out")
        _check_count("quant_block", self.quant_block)
        _check_count("quant_min_size", self.quant_min_size)
        if self.frozen_bits not in (4, 8):
            raise StrategyError(f"frozen_bits={self.frozen_bits!r} must be 8 or 4")
        if self.frozen_bits != 8 and not self.quantized_weights:
            raise StrategyError(f"frozen_bits={self.frozen_bits} is for quantized_weights, which is not set: set it, or leave frozen_bits out")
        if self.quant_block % 2:
            raise StrategyError(f"quant_block={self.quant_block} must be even: two 4-bit values share a byte")

    def _check_offload(self) -> None:
        if self.offload not in OFFLOADS:
            raise StrategyError(f"offload={self.offload!r} is unknown: set offload='optimizer', or leave it out (in text also: offload=none)")
        _check_count("delay", self.delay, at_least=0)
        _check_count("delay_after", self.delay_after, at_least=0)
        if self.delay > 1:
            raise StrategyError(f"delay={self.delay}: an update may use the gradients of the step before at the most: set delay=1, or 0 for updates that wait")
        if self.delay and self.offload is None:
            raise StrategyError(f"delay={self.delay} is about updates that the host does beside the devices: set offload='optimizer', or leave delay out")
        if self.delay_after != 40 and not self.delay:
            raise StrategyError(f"delay_after={self.delay_after} counts the steps before updates are delayed, and delay is 0: set delay=1, or leave delay_after out")

    @property
    def changes_numerics(self) -> tuple[str, ...]:
        """What makes results differ from those of one device by more than rounding, in a sentence each."""
        weights = f"quantized_weights: forward and backward compute with weights of {self.quant_min_size} elements and more as int8, in blocks of {self.quant_block} (those that are not trained: int{self.frozen_bits})"
        gradients = f"quantized_gradients: the optimizer gets sums of gradients as int4, in blocks of {self.quant_block}"
        delayed = f"delay: after {self.delay_after} steps an update uses the gradients of the step before its own"
        said = (weights, self.quantized_weights), (gradients, self.quantized_gradients), (delayed, self.delay > 0)
        return tuple(f"changes numerics: {text}" for text, holds in said if holds)

    @property
    def node_ranks(self) -> int:
        """The fsdp ranks within which a quantised scatter makes its first exchange; 1 or all of fsdp: there is one exchange alone."""
        return self.node_size or self.hpz

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in force: 0 without an fsdp axis, unless `zero` asks for one over `cp` or `ep`."""
        return (3 if self.fsdp > 1 else 0) if self.zero is None else self.zero

    @property
    def zero_ranks(self) -> int:
        """The ranks over which that splits what is no expert's."""
        return self.fsdp * self.cp * self.ep if self.zero_stage else 1

    @property
    def zero_ranks_of_experts(self) -> int:
        """The ranks over which that splits the weights of experts, besides `ep`."""
        return self.fsdp * self.cp if self.zero_stage else 1

    @property
    def data_ranks(self) -> int:
        """Ranks that split the batch."""
        return self.dp * self.fsdp * self.ep

    @property
    def reduces_narrow(self) -> bool:
        """Whether gradients are summed over the ranks in the dtype in which they were computed."""
        return self.reduce_dtype == "bf16"

    @property
    def late_axes(self) -> tuple[str, ...]:
        """The axes along which gradients of several runs (microbatches, or calls of backward() before a step) add up on every rank, and are summed once, in front of the update:
        those of ranks that keep whole gradients, as under DDP's ``no_sync`` and in Megatron-LM."""
        if self.offload is not None or self.tp_by == "spmd":
            return ()
        return (DP, FSDP) if self.zero_stage < 2 else (DP,)

    @property
    def within_stage(self) -> "Strategy":
        """The same strategy for the devices of one pipeline stage."""
        return self.replace(pp=1, schedule="1f1b", chunks=1, stages=())

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size, outermost first, without the axes of size 1."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) > 1}

    @property
    def num_devices(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    def replace(self, **changes) -> "Strategy":
        """The same strategy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Read ``"dp=2,fsdp=4,zero=3"``, the form of the command line; lines after the first (``str(model.strategy)``) are skipped.

        Raises:
            StrategyError: an unknown field (the known ones are listed) or a value that is no number.
        """
        return cls(**parse_fields(text.partition("\n")[0]))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Strategy":
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """The shortest text that `parse` reads back."""
        changed = [f"{f.name}={field_text(value)}" for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default]
        return ",".join(changed)


def parse_fields(text: str) -> dict[str, Any]:
    """The fields that ``"dp=2,fsdp=4"`` sets, each checked alone."""
    known = [field.name for field in dataclasses.fields(Strategy)]
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in known:
            raise StrategyError(f"strategy {text!r}: {part!r} sets no known field; write name=value with a name out of {', '.join(known)}")
        if name in values:
            raise StrategyError(f"strategy {text!r}: {name} is set twice; keep one")
        values[name] = _parse_value(name, text, part, value)
    return values


def _check_count(name: str, value: object, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise StrategyError(f"{name}={value!r} must be a whole number of at least {at_least}")


def _check_capacity(value: object, ep: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise StrategyError(f"capacity_factor={value!r} must be a number above 0, or None to drop no row")
    if ep == 1:
        raise StrategyError("capacity_factor bounds what ranks exchange over the ep axis, which has size 1: set ep, or leave it unset")


def _pins(value: object) -> tuple[tuple[str, int], ...]:
    """Pins as a tuple of pairs, from a dict or any sequence of pairs."""
    pairs = tuple(tuple(pair) for pair in (value.items() if isinstance(value, Mapping) else value))
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str) or isinstance(pair[1], bool) or not isinstance(pair[1], int):
            raise StrategyError(f"stages: {pair!r} is no pin; give a pattern of module paths and the number of a chunk, as ('encoder.*', 0)")
    return pairs


def _remat(value: Any) -> str | tuple[tuple[str, str], ...]:
    """One of `REMATS`, or pairs of a pattern and what its regions keep, which text separates by semicolons."""
    if isinstance(value, str) and ":" in value:
        value = tuple(pair.rpartition(":")[::2] for pair in value.split(";"))
    if isinstance(value, str):
        if value not in REMATS:
            raise StrategyError(f"remat={value!r} is unknown: choose one of {', '.join(REMATS)}, or pairs such as 'transformer.h.*:products'")
        return value
    pairs = tuple(tuple(pair) for pair in (value.items() if isinstance(value, Mapping) else value))
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in KEEPS:
            raise StrategyError(f"remat: {pair!r} is no pattern with what its blocks keep; give pairs such as ('transformer.h.*', 'products'), with one of {', '.join(KEEPS)}")
    return pairs


def _check_memory(value: object, remat: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise StrategyError(f"memory_gb={value!r} must be a number of 1e9 bytes above 0")
    if remat != "auto":
        raise StrategyError(f"memory_gb={value!r} is what remat='auto' chooses by, and remat is {remat!r}: set remat='auto', or leave memory_gb out")


def field_text(value: object) -> str:
    """The value of a field as `Strategy.parse` reads it."""
    if value is None:
        return "none"
    return ";".join(f"{pattern}:{chunk}" for pattern, chunk in value) if isinstance(value, tuple) else str(value)


def _parse_value(name: str, text: str, part: str, value: str) -> object:
    if name in ("capacity_factor", "bucket_mb", "memory_gb"):
        return _parse_float(text, part, value)
    if name in ("precision", "reduce_dtype", "schedule", "context", "offload", "tp_by"):
        return None if (name, value) == ("offload", "none") else value
    if name == "remat":
        return _remat(value)
    if name in ("sequence_parallel", "quantized_weights", "quantized_gradients") and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if name != "stages":
        return _parse_int(text, part, value)
    pairs = (pin.rpartition(":") for pin in value.split(";"))
    return tuple((pattern, _parse_int(text, part, chunk)) for pattern, _, chunk in pairs)


def _parse_float(text: str, part: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise StrategyError(f"strategy {text!r}: {part!r} needs a number") from None


def _parse_int(text: str, part: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise StrategyError(f"strategy {text!r}: {part!r} needs a whole number") from None
