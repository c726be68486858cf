"""Hardware as numbers: a chip, and the levels of links that join chips, from inside to outside.

    >>> hardware = Hardware.parse("16x8xH100")                 # 16 hosts of 8 GPUs
    >>> hardware.group({"fsdp": 16, "tp": 8}, "fsdp")          # one rank in each host, 16 in all
    (1, 16)

The devices of a mesh are numbered in its order, the last axis innermost, and fill the innermost level first. So the place of an
axis in the mesh decides which links its collectives cross: with 8 chips in a host, ``tp=8,cp=2`` spreads tp over two hosts.

Virtual CPU devices share the cores of one machine. Their `Chip` is what one of them gets while all run, so that programs that are
alike on all devices cost what is said here; see `Hardware.shared_cores`.

Constants of the presets, and where they are from. A prototype with a dozen constants of these sources gave the times of 73 published
steps of NVIDIA's on H100 with 14 % mean error, without fitting, and those of other implementations with 20 to 50 %: measure your own.

- peaks, memory bandwidth: NVIDIA's data sheets of H100 SXM, H200, A100, L40S and HGX B200, without sparsity; fp32 without TF32, since
  products run in full fp32 by default (`graphacc/lowering/rules/matmul.py`). TPUs: jax-ml/scaling-book, tpus.md; fp32 takes 6 passes in bf16.
- memory: what CUDA, and XLA on TPU, say is there in messages about memory that ran out, rounded down.
- product efficiency: up to 4096 XLA's own measurements (openxla/xla, default_matmul_perf_table.txtpb: bf16 4096^3 571 TFLOP/s, with one side
  1024 539, 512 447 to 459, 256 347); the largest products 794.5 TFLOP/s on H100 and 271.2 on A100 (stas00/ml-engineering,
  compute/accelerator/README.md). The other GPUs are assumed to have H100's share, and TPUs to fill their systolic array from 128 on.
- launch of a kernel: 5 us (openxla/xla, sol_gpu_cost_model.cc). Share of the memory bandwidth: 0.8 (0.7 in AutoParallel, 0.9 in Calculon).
- NVLink: ring all-gather 361 GB/s of bus bandwidth in a host of H200, 235 on A100 (stas00/ml-engineering, network/README.md); twice as much
  for B200 as NVLink 5 has twice the rate. L40S: PCIe 4.0 x16, 22 GB/s, assumed.
- network: 48 of 50 GB/s for each GPU's NIC of 400 Gb/s (nccl-tests #290), and in proportion for 200 Gb/s. A ring with r ranks in each
  host has r NICs: 55 GB/s for 8 hosts with one rank each, 390 with 8 (autoparallel, cost_models/nccl_cost_model.py, from NCCL 2.27.5).
- latency: 4.4 us for a collective, 3.7 us for each step of a ring inside a host and 12.5 us for one between hosts, which give the same
  source's 8, 17 and 30 us for 2, 4, 8 ranks, and 70, 146, 297, 599, 1204 us for 2 to 32 hosts of 8, within 10 %.
- TPU: both directions of one axis of the torus, about 1 us per hop, and the data-centre network (jax-ml/scaling-book, tpus.md).
- to and from the host: 0.7 of PCIe 4 and 5 x16 (32 and 63 GB/s). The update: an eighth of 0.3 of the memory's peak of two sockets (16 channels: 410 GB/s with DDR4-3200, 614 with DDR5-4800). Both are
  assumed, and of an update that nothing else slows: with DeepSpeed a LLaMA-7B on 8 A800s takes 17 to 20 s longer for it (a table in gist d4cd6a20ab4b95cb3a49491747e2139a), 2 s by these. TPUs' are not known.
- reserve: 2 GiB for CUDA's context, NCCL and fragmentation, 0.25 GiB on TPU: assumed.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphacc.errors import StrategyError

_FORMAT = 1
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device."""

    name: str
    fp32_flops: float  # peak, FLOP/s
    bf16_flops: float
    memory_bandwidth: float  # bytes/s
    memory_bytes: int
    launch_seconds: float  # of one kernel
    product_efficiency: tuple[tuple[int, float], ...]  # (smallest of m, k, n; share of the peak), by size; interpolated over the logarithm
    memory_efficiency: float  # share of the memory bandwidth that streams reach
    stream_rates: tuple[tuple[int, float], ...] = ()  # (bytes read and written, multiple of `memory_bandwidth * memory_efficiency`): what caches hold streams faster; by size, interpolated over the logarithm
    update_rate: float = 1.0  # of an optimizer's update, a multiple of `memory_bandwidth * memory_efficiency`: it writes where it has read, for which a CPU's caches fetch nothing
    attention_efficiency: float = 1.0  # share that a fused attention reaches of what a product of its dims would (see `Work.dims`)

    def __post_init__(self):
        for field in ("fp32_flops", "bf16_flops", "memory_bandwidth", "memory_bytes"):
            _check(self, field, "a number above 0", lambda x: x > 0)
        _check(self, "launch_seconds", "a number of at least 0", lambda x: x >= 0)
        _check(self, "memory_efficiency", "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        for field in ("update_rate", "attention_efficiency"):
            _check(self, field, "a number above 0", lambda x: x > 0)
        if not _is_table(self.product_efficiency):
            raise StrategyError(
                f"product_efficiency={self.product_efficiency} of chip {self.name!r}: give pairs (smallest dim, share of the peak) "
                "with growing dims from 1 and shares above 0 and at most 1"
            )
        object.__setattr__(self, "product_efficiency", tuple(map(tuple, self.product_efficiency)))
        if self.stream_rates and not _is_table(self.stream_rates, most=math.inf):
            raise StrategyError(f"stream_rates={self.stream_rates} of chip {self.name!r}: give pairs (bytes, multiple) with growing bytes from 1 and multiples above 0, or none")
        object.__setattr__(self, "stream_rates", tuple(map(tuple, self.stream_rates)))

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of the largest products in "fp32" or "bf16", before `efficiency`.

        Raises:
            StrategyError: another dtype.
        """
        peaks = {"fp32": self.fp32_flops, "bf16": self.bf16_flops}
        if dtype not in peaks:
            raise StrategyError(f"dtype {dtype!r} has no peak: choose one of {', '.join(peaks)}")
        return peaks[dtype]

    def efficiency(self, smallest_dim):
        """Share of the peak that products reach whose smallest of (m, k, n) is this, a number or an array."""
        sizes, shares = zip(*self.product_efficiency)
        return np.interp(np.log(np.maximum(smallest_dim, 1)), np.log(sizes), shares)

    def stream_rate(self, size_bytes):
        """Bytes/s of kernels that read and write so many, a number or an array."""
        base = self.memory_bandwidth * self.memory_efficiency
        if not self.stream_rates:
            return base
        sizes, rates = zip(*self.stream_rates)
        return base * np.interp(np.log(np.maximum(size_bytes, 1)), np.log(sizes), rates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """Links that join units of the level below: chips in a host, hosts in a cluster."""

    name: str
    size: int  # how many units of the level below (chips, for the innermost) one unit of this level joins
    bandwidth: float  # bytes/s of one chip over these links; r chips of a unit below have r times that together
    latency_seconds: float  # of one step of a ring over these links

    def __post_init__(self):
        _check(self, "size", "a whole number of at least 1", lambda x: isinstance(x, int) and x >= 1)
        _check(self, "bandwidth", "a number above 0", lambda x: x > 0)
        _check(self, "latency_seconds", "a number of at least 0", lambda x: x >= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal chips and what joins them.

    With `shared_cores` the devices are virtual ones that share so many CPU cores, and the chip's numbers are one device's share while
    all run. What differs between devices (the stages of a pipeline) then costs the *mean* of their busy seconds, not the longest:
    a device that waits leaves its share to the others.
    """

    chip: Chip
    levels: tuple[Level, ...] = ()  # from inside to outside; none: one chip
    meeting_seconds: float = 0.0  # of every collective, before its first step
    collective_shares: tuple[tuple[str, float], ...] = ()  # (collective, share of the links' bandwidth that it reaches); 1 if left out
    collective_meetings: tuple[tuple[str, float], ...] = ()  # (collective, its `meeting_seconds`); those of all if left out
    reserve_bytes: int = 0  # of each device's memory, for what no program sees: context, communication buffers, fragmentation
    shared_cores: int = 0  # 0: every device has its own
    lateness: float = 0.0  # of what devices that share cores compute between two collectives: the share by which the last rank comes later, for each rank beyond the cores
    host_link: float = 0.0  # bytes/s of each device to the memory of its host, and as many back, while all devices send; 0: not known
    host_stream: float = 0.0  # bytes/s that the host's cores read and write in memory for each device, while they do for all; 0: not known
    source: str  # where the constants come from
    error: float  # relative: seconds are expected within ± so much
    error_source: str

    def __post_init__(self):
        object.__setattr__(self, "levels", tuple(self.levels))
        if not _is_shares(self.collective_shares):
            raise StrategyError(f"collective_shares={self.collective_shares!r} must be pairs (collective, number above 0)")
        object.__setattr__(self, "collective_shares", tuple(map(tuple, self.collective_shares)))
        if not _is_shares(self.collective_meetings, least=0.0):
            raise StrategyError(f"collective_meetings={self.collective_meetings!r} must be pairs (collective, seconds of at least 0)")
        object.__setattr__(self, "collective_meetings", tuple(map(tuple, self.collective_meetings)))
        for field in ("meeting_seconds", "reserve_bytes", "shared_cores", "lateness", "host_link", "host_stream", "error"):
            _check(self, field, "a number of at least 0", lambda x: x >= 0)
        if self.reserve_bytes >= self.chip.memory_bytes:
            raise StrategyError(f"reserve_bytes={self.reserve_bytes:,} leaves nothing of memory_bytes={self.chip.memory_bytes:,} of chip {self.chip.name!r}: lower it")

    @functools.cached_property
    def known_terms(self) -> dict[tuple, tuple[float, float]]:
        """(collective, axis, mesh) -> its seconds of latency and per byte, as far as asked for: a search asks for the same ones a hundred thousand times."""
        return {}

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def num_hosts(self) -> int:
        """Units of the innermost level (hosts; slices of TPUs), each of which is joined to the others by a network."""
        return math.prod(level.size for level in self.levels[1:])

    def late_seconds(self, num_ranks: int, computing_seconds: float) -> float:
        """How long a collective of so many ranks waits for the last of them, which have computed since the one before it; those of other groups use the cores meanwhile."""
        return self.lateness * max(0, num_ranks - self.shared_cores) * computing_seconds

    @property
    def usable_bytes(self) -> int:
        """Of one device's memory."""
        return self.chip.memory_bytes - self.reserve_bytes

    @property
    def has_known_peak(self) -> bool:
        """Whether the chip's operations per second are measured, or its maker's figures; a CPU's preset is neither."""
        return self.is_measured or self.chip.name != "cpu"

    @property
    def is_measured(self) -> bool:
        """Whether the constants are no preset's."""
        return self.source != _preset_source(self.chip.name)

    def group(self, mesh: Mapping[str, int], axis: str) -> tuple[int, ...]:
        """How many ranks of one group along `axis` share a unit of each level, from inside to outside; the last is the group's size.

        Where groups differ, it is the fewest: a collective of all groups is as slow as the slowest one.

        Args:
            mesh: axis -> size in the order of the mesh, the last innermost, as `Strategy.mesh` gives.
            axis: an axis, or several joined by "+", as in names of groups.

        Raises:
            StrategyError: the mesh has more devices than there are.
        """
        if math.prod(mesh.values()) > self.num_devices:
            sizes = " x ".join(f"{name}={size}" for name, size in mesh.items())
            raise StrategyError(f"{sizes} are {math.prod(mesh.values())} devices, and {self} has {self.num_devices}: choose a smaller mesh, or more hardware")
        units = tuple(itertools.accumulate((level.size for level in self.levels), lambda x, y: x * y))
        axes = axis.split("+")
        return _group(tuple(mesh.values()), tuple(i for i, name in enumerate(mesh) if name in axes), units)

    def host_update_seconds(self, *, gradient_bytes: float, parameter_bytes: float, update_bytes: float) -> float | None:
        """Of an update on the host for one device (`Strategy.offload`): gradients come, the update reads and writes, parameters go, each as soon as it can.

        Devices that share the host's cores do nothing meanwhile, and their messages are streams in the same memory. None: not known.
        """
        if self.shared_cores:
            return (2 * gradient_bytes + 2 * parameter_bytes + update_bytes) / (self.chip.memory_bandwidth * self.chip.memory_efficiency)
        if not self.host_link or not self.host_stream:
            return None
        return max(gradient_bytes / self.host_link, update_bytes / self.host_stream, parameter_bytes / self.host_link)

    def replace(self, **changes) -> "Hardware":
        """The same hardware with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """Read ``"H100"``, ``"8xH100"``, ``"16x8xH100"`` (hosts x chips in a host), ``"cpu:8"``, or a file of `to_json` that ends in ".json".

        TPUs: ``"256xTPUv5e"`` is one slice, ``"2x256xTPUv5e"`` two. ``"cpu:8"`` are virtual devices on the cores of this machine.

        Raises:
            StrategyError: an unknown chip (the known ones are listed), more chips than its links join, or a file that is none of ours.
            OSError: the file cannot be read.
        """
        text = text.strip()
        if text.endswith(".json"):
            return cls.from_json(pathlib.Path(text).read_text(encoding="utf-8"), name=text)
        found = re.fullmatch(r"((?:\d+x)*)([A-Za-z][\w-]*?)(?::(\d+))?", text)
        name = {known.lower(): known for known in PRESETS}.get(found.group(2).lower()) if found else None
        if found is None or name is None:
            raise StrategyError(f'hardware {text!r} is unknown: write CHIP, NxCHIP or HOSTSxNxCHIP with a chip out of {", ".join(PRESETS)}, "cpu:N", or a file that ends in .json')
        if found.group(3) and (name != "cpu" or found.group(1)):
            raise StrategyError(f'hardware {text!r}: only "cpu" takes ":N", and no "Nx" beside it; write "cpu:8" or "8xH100"')
        counts = [int(count) for count in (found.group(3) or found.group(1)).split("x") if count]
        return _preset(text, name, counts[::-1])

    @classmethod
    def present(cls, devices: Sequence[Any] | int | None = None) -> "Hardware":
        """The devices of this process' JAX: as `graphacc calibrate` measured them if it did, else the preset of their kind.

        Devices of several hosts (slices, on TPU) have the measured numbers of one, and the preset's network. Starts JAX's backend.

        Args:
            devices: JAX devices, or how many; all of them if None.

        Raises:
            StrategyError: they were not measured, and their kind has no preset.
        """
        from graphacc.costs.calibrate import present

        return present(devices)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, name: str = "hardware") -> "Hardware":
        """Read what `to_json` wrote.

        Args:
            name: of the text, for messages.

        Raises:
            StrategyError: it is no such JSON, or a field is missing, unknown or out of range.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise StrategyError(f"{name} is no JSON ({error}): write it with Hardware.to_json or `graphacc calibrate --output`") from None
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise StrategyError(f'{name}: expected an object with "format": {_FORMAT}: write it with Hardware.to_json or `graphacc calibrate --output`')
        values = _fields(cls, values, name)
        levels = values.get("levels", ())
        if not isinstance(levels, list | tuple):
            raise StrategyError(f"{name}: levels is {levels!r}, expected a list of objects")
        try:
            values["chip"] = Chip(**_fields(Chip, values["chip"], f"{name}, chip"))
            values["levels"] = tuple(Level(**_fields(Level, level, f"{name}, levels[{i}]")) for i, level in enumerate(levels))
            return cls(**values)
        except StrategyError as error:
            raise StrategyError(error if str(error).startswith(name) else f"{name}: {error}") from None

    def __str__(self) -> str:
        """The form that `parse` reads, where the chip is a preset."""
        if self.shared_cores:
            return f"{self.chip.name}:{self.num_devices}"
        return "".join(f"{level.size}x" for level in reversed(self.levels)) + self.chip.name


@functools.lru_cache(maxsize=4096)
def _group(sizes: tuple[int, ...], along: tuple[int, ...], units: tuple[int, ...]) -> tuple[int, ...]:
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    groups = np.moveaxis(devices, along, range(len(sizes) - len(along), len(sizes))).reshape(-1, math.prod(sizes[i] for i in along))
    return tuple(min(int(np.unique(group // unit, return_counts=True)[1].min()) for group in groups) for unit in units)


def _is_table(table: object, most: float = 1.0) -> bool:
    """Whether this is a table of shares by size."""
    if not isinstance(table, list | tuple) or not all(isinstance(row, list | tuple) and len(row) == 2 for row in table):
        return False
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for row in table for x in row)
    sizes = [size for size, _ in table]
    return bool(table) and numbers and sizes == sorted(set(sizes)) and sizes[0] >= 1 and all(0 < share <= most for _, share in table)


def _is_shares(pairs: object, least: float = math.ulp(0.0)) -> bool:
    return isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], int | float) and pair[1] >= least for pair in pairs
    )


def _check(owner, field: str, rule: str, holds) -> None:
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not holds(value):
        raise StrategyError(f"{field}={value!r} of {type(owner).__name__.lower()} {getattr(owner, 'name', '')!r} must be {rule}")


def _fields(cls, values: object, where: str) -> dict[str, Any]:
    """The fields of a dataclass out of JSON."""
    if not isinstance(values, dict):
        raise StrategyError(f"{where}: expected an object, found {values!r}")
    known = {field.name: field for field in dataclasses.fields(cls)}
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in values]
    if missing or values.keys() - known.keys():
        unknown = ", ".join(sorted(values.keys() - known.keys()))
        said = f"lacks {', '.join(missing)}" if missing else f"has the unknown fields {unknown}"
        raise StrategyError(f"{where} {said}: the fields are {', '.join(known)}")
    texts = [name for name, field in known.items() if field.type is str and not isinstance(values.get(name, ""), str)]
    if texts:
        raise StrategyError(f"{where}: {texts[0]} is {values[texts[0]]!r}, expected text")
    return dict(values)


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is known of a kind of chip, for any number of them. A level's size is the most that it joins."""

    chip: Chip
    levels: tuple[Level, ...]
    meeting_seconds: float
    reserve_bytes: int
    error: float
    error_source: str
    host_link: float = 0.0
    host_stream: float = 0.0


_XLA_TABLE = ((256, 347 / 989), (512, 453 / 989), (1024, 539 / 989), (4096, 571 / 989), (16384, 794.5 / 989))
_A100_TABLE = tuple((size, share * (271.2 / 312) / (794.5 / 989)) for size, share in _XLA_TABLE)
_SYSTOLIC = ((8, 0.06), (128, 0.5), (512, 0.8), (1024, 0.9), (8192, 0.95))
_ANY = 2**20  # hosts
_PCIE_4, _PCIE_5 = (22e9, 15e9), (44e9, 25e9)  # `host_link`, `host_stream`: see above


def _gpu(name, bf16, fp32, bandwidth, gib, inside: Level, nic, error=0.5, source="assumed: none of its steps were compared", table=_XLA_TABLE, host=_PCIE_5) -> Preset:
    chip = Chip(
        name=name, fp32_flops=fp32 * 1e12, bf16_flops=bf16 * 1e12, memory_bandwidth=bandwidth * 1e9, memory_bytes=gib * _GIB,
        launch_seconds=5e-6, product_efficiency=table, memory_efficiency=0.8,
    )  # fmt: skip
    network = Level(name="network", size=_ANY, bandwidth=nic * 1e9, latency_seconds=12.5e-6)
    return Preset(chip, (inside, network), 4.4e-6, 2 * _GIB, error, source, *host)


def _nvlink(bandwidth: float, size: int = 8) -> Level:
    return Level(name="nvlink", size=size, bandwidth=bandwidth * 1e9, latency_seconds=3.7e-6)


def _tpu(name, bf16, bandwidth, gib, pod, ici, dcn) -> Preset:
    chip = Chip(
        name=name, fp32_flops=bf16 * 1e12 / 6, bf16_flops=bf16 * 1e12, memory_bandwidth=bandwidth * 1e9, memory_bytes=int(gib * _GIB),
        launch_seconds=1e-6, product_efficiency=_SYSTOLIC, memory_efficiency=0.8,
    )  # fmt: skip
    levels = (
        Level(name="ici", size=pod, bandwidth=ici * 1e9, latency_seconds=1e-6),
        Level(name="network", size=_ANY, bandwidth=dcn * 1e9, latency_seconds=50e-6),  # assumed
    )
    return Preset(chip, levels, 1e-6, _GIB // 4, 0.5, "assumed: none of its steps were compared")


def _cpu() -> Preset:
    """One core: assumed, as machines differ too much; `graphacc calibrate` takes a minute."""
    chip = Chip(
        name="cpu", fp32_flops=50e9, bf16_flops=25e9, memory_bandwidth=10e9, memory_bytes=main_memory_bytes(),
        launch_seconds=2e-6, product_efficiency=((8, 0.2), (64, 0.6), (256, 1.0)), memory_efficiency=0.8,
    )  # fmt: skip
    memory = Level(name="memory", size=_ANY, bandwidth=3e9, latency_seconds=20e-6)
    return Preset(chip, (memory,), 50e-6, 0, 1.0, "assumed")


def main_memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_H100_STEPS = "mean error of a prototype with such constants on 73 published steps of NVIDIA's, 14 %; on other implementations up to 50 %"
_A100_STEPS = "mean error of a prototype with such constants on 145 published steps of MosaicML and Korthikanti et al., 19 to 25 %"

PRESETS: dict[str, Preset] = {
    preset.chip.name: preset
    for preset in (
        _gpu("H100", 989, 67, 3350, 79, _nvlink(361), 48, 0.15, _H100_STEPS),
        _gpu("H200", 989, 67, 4800, 139, _nvlink(361), 48, 0.15, _H100_STEPS),
        _gpu("A100-80", 312, 19.5, 2039, 79, _nvlink(235), 24, 0.25, _A100_STEPS, _A100_TABLE, _PCIE_4),
        _gpu("A100-40", 312, 19.5, 1555, 39, _nvlink(235), 24, 0.25, _A100_STEPS, _A100_TABLE, _PCIE_4),
        _gpu("L40S", 362, 91.6, 864, 44, Level(name="pcie", size=8, bandwidth=22e9, latency_seconds=6e-6), 24, host=_PCIE_4),
        _gpu("B200", 2250, 75, 8000, 178, _nvlink(722, size=72), 48),
        _tpu("TPUv4", 275, 1200, 30.75, 4096, ici=90, dcn=6.25),
        _tpu("TPUv5e", 197, 820, 15.75, 256, ici=90, dcn=3.125),
        _tpu("TPUv6e", 920, 1600, 31.25, 256, ici=180, dcn=12.5),
        _cpu(),
    )
}
"""By the names that `Hardware.parse` reads."""


def _preset_source(name: str) -> str:
    return f"preset {name}, not calibrated"


def _preset(text: str, name: str, counts: list[int]) -> Hardware:
    """Args: counts: chips in a host, hosts."""
    preset = PRESETS[name]
    if len(counts) > len(preset.levels) or not all(counts):
        raise StrategyError(f"hardware {text!r}: {name} is joined by {len(preset.levels)} levels of links ({', '.join(level.name for level in preset.levels)}): write at most so many counts, each at least 1")
    for count, level in zip(counts, preset.levels):
        if count > level.size:
            raise StrategyError(f"hardware {text!r}: {level.name} joins at most {level.size} {name}, not {count}: write HOSTSx{level.size}x{name}")
    chip, shared, levels = preset.chip, 0, preset.levels
    if name == "cpu":
        shared, num_devices = cores(), math.prod(counts)
        share = shared / num_devices
        chip = dataclasses.replace(
            chip, fp32_flops=chip.fp32_flops * share, bf16_flops=chip.bf16_flops * share, memory_bandwidth=chip.memory_bandwidth * share,
            memory_bytes=chip.memory_bytes // num_devices, launch_seconds=chip.launch_seconds / min(share, 1.0),
        )  # fmt: skip
        levels = (dataclasses.replace(levels[0], bandwidth=levels[0].bandwidth * share),)
    return Hardware(
        chip=chip,
        levels=tuple(dataclasses.replace(level, size=count) for count, level in zip(counts, levels)),
        meeting_seconds=preset.meeting_seconds,
        reserve_bytes=preset.reserve_bytes,
        shared_cores=shared,
        host_link=preset.host_link,
        host_stream=preset.host_stream,
        source=_preset_source(name),
        error=preset.error,
        error_source=preset.error_source,
    )
