"""The constants of the devices that are here, measured once and kept in the user's cache.

`calibrate` measures in a process of its own (`graphacc.costs.measure`), since the number of virtual CPU devices is chosen before JAX
starts, fits a `Hardware` to the times (`fit`), and stores it under the devices' kind and number and the versions of what ran.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

import graphacc
from graphacc.cache import cache_root, replace_file
from graphacc.costs.hardware import PRESETS, Chip, Hardware, Level, cores, main_memory_bytes
from graphacc.costs.measure import Measurement
from graphacc.costs.seconds import COLLECTIVES, collective_counts, collective_seconds, compute_seconds
from graphacc.errors import GraphAccError, StrategyError

log = logging.getLogger("graphacc")

_KINDS = {
    r"H100 80GB HBM3": "H100",
    r"\bH200\b": "H200",
    r"A100-SXM4-80GB": "A100-80",
    r"A100-SXM4-40GB": "A100-40",
    r"\bL40S\b": "L40S",
    r"\bB200\b": "B200",
    r"^TPU v4": "TPUv4",
    r"^TPU v5( lite|e)": "TPUv5e",
    r"^TPU v6( lite|e)": "TPUv6e",
    r"^cpu$": "cpu",
}
"""Pattern of JAX's ``device_kind`` -> preset."""

_TIMEOUT_SECONDS = 600

_OF_MEMORY = 0.8
"""A product whose bytes alone take this share of its time is bound by memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, and what was fitted to it."""

    hardware: Hardware
    measurements: tuple[Measurement, ...]
    path: pathlib.Path | None  # where it is stored

    def table(self) -> str:
        """A row for each measurement: what it took, and what the constants say."""
        lines = [f"{'what':16}{'dtype':7}{'m, k, n or ranks':20}{'MB':>9}{'measured us':>14}{'predicted us':>14}{'ratio':>8}"]
        for item in self.measurements:
            shape = "x".join(map(str, item.dims)) if item.dims else str(item.num_ranks) if item.kind in (*COLLECTIVES, "lateness") else ""
            predicted = predict(item, self.hardware)
            ratio = "" if item.kind == "lateness" else f"{predicted / item.seconds:8.2f}"  # a difference of two times, which may be nothing
            lines.append(
                f"{item.kind:16}{item.dtype:7}{shape:20}{item.size_bytes / 1e6:9.3f}{1e6 * item.seconds:14.1f}{1e6 * predicted:14.1f}{ratio}"
            )
        return "\n".join(lines)


def calibrate(num_devices: int | None = None, *, quick: bool = False) -> Calibration:
    """Measure this machine's devices, in under a minute, and store the result where `Hardware.present` finds it.

    Args:
        num_devices: how many; on a CPU that many virtual ones. All that are there if None.
        quick: few and small sizes, for tests.

    Raises:
        StrategyError: there are not so many.
        GraphAccError: the measuring process failed; the message has the end of its output.
    """
    if num_devices is not None and num_devices < 1:
        raise StrategyError(f"{num_devices} devices cannot be measured: ask for at least 1")
    load, found = os.getloadavg()[0], _measured(num_devices, quick)
    if found["device_kind"] == "cpu" and load > 0.5 * cores():
        log.warning("graphacc: other work took %.1f of %d cores before the measurement: the constants are those of a loaded machine", load, cores())
    measurements = tuple(Measurement(**{**item, "dims": item["dims"] and tuple(item["dims"])}) for item in found["measurements"])
    hardware = fit(measurements, found["device_kind"], found["num_devices"], memory_bytes=found["memory_bytes"])
    path = _path(found["device_kind"], found["num_devices"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _packed(hardware, _key(found["device_kind"], found["num_devices"])))
    except OSError as error:
        log.warning("graphacc: the calibration cannot be stored in %s (%s)", path, error)
        path = None
    return Calibration(hardware=hardware, measurements=measurements, path=path)


def _measured(num_devices: int | None, quick: bool) -> dict[str, Any]:
    """What `graphacc.costs.measure` prints."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(graphacc.__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])])
    if num_devices is not None:  # of virtual CPU devices; of repeated flags the last one counts
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    asked = json.dumps({"num_devices": num_devices, "quick": quick})
    command = [sys.executable, "-m", "graphacc.costs.measure"]
    try:
        done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise GraphAccError(f"the devices were not measured within {_TIMEOUT_SECONDS} s: free them of other work and try again") from None
    if done.returncode:
        raise GraphAccError(f"measuring the devices failed with status {done.returncode}; the end of its output:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise StrategyError(found["error"])
    return found


def fit(measurements: Sequence[Measurement], device_kind: str, num_devices: int, *, memory_bytes: int | None = None) -> Hardware:
    """The hardware whose times come closest to the measured ones.

    The peak of a dtype is the rate of its fastest product, and the efficiency by smallest dim the geometric mean over dtypes of the
    other rates against it; a product that takes as long as its memory says nothing of the arithmetic, unless it is the largest. The bandwidth is that of the largest stream, and smaller ones, and an update, have their multiples of it. Of
    collectives, meeting and seconds per byte of each kind, and the latency of all, are found by non-negative least squares of relative errors.

    Args:
        device_kind: as JAX says it.
        memory_bytes: of one device, as JAX says; the preset's, where the kind has one, is taken first.
    """
    name = preset_name(device_kind)
    of_kind = {kind: [item for item in measurements if item.kind == kind] for kind in ("product", "stream", "update", "launch")}
    launch = of_kind["launch"][0].seconds

    def working(item: Measurement) -> float:
        """Seconds without the launch."""
        return max(item.seconds - launch, item.seconds / 2)

    largest = max(item.size_bytes for item in of_kind["stream"])
    streams = {item.size_bytes: item.size_bytes / working(item) for item in of_kind["stream"] if item.seconds > 3 * launch or item.size_bytes == largest}  # of shorter ones the launch is what was measured
    bandwidth, sizes = streams[largest], sorted(streams)
    rates: dict[str, dict[int, float]] = {"fp32": {}, "bf16": {}}
    largest_product = max((item.dims or () for item in of_kind["product"]), key=math.prod)
    for item in of_kind["product"]:
        memory = item.size_bytes / np.interp(math.log(max(item.size_bytes, 1)), np.log(sizes), [streams[size] for size in sizes])
        if memory < _OF_MEMORY * working(item) or item.dims == largest_product:
            rates[item.dtype][min(item.dims or ())] = 2.0 * math.prod(item.dims or ()) / working(item)
    peaks = {dtype: max(found.values()) for dtype, found in rates.items()}
    shares: dict[int, list[float]] = {}
    for dtype, found in rates.items():
        for size, rate in found.items():
            shares.setdefault(size, []).append(rate / peaks[dtype])
    is_cpu = name == "cpu"
    chip = Chip(
        name=name or re.sub(r"\W+", "-", device_kind),
        fp32_flops=peaks["fp32"],
        bf16_flops=peaks["bf16"],
        memory_bandwidth=bandwidth,
        memory_bytes=main_memory_bytes() // num_devices if is_cpu else PRESETS[name].chip.memory_bytes if name else memory_bytes or 2**34,
        launch_seconds=launch,
        product_efficiency=tuple((size, min(_geometric_mean(found), 1.0)) for size, found in sorted(shares.items())),
        memory_efficiency=1.0,
        update_rate=of_kind["update"][0].size_bytes / of_kind["update"][0].seconds / bandwidth,
        stream_rates=tuple((size, rate / bandwidth) for size, rate in sorted(streams.items())),
    )
    hardware = Hardware(
        chip=chip,
        reserve_bytes=PRESETS[name].reserve_bytes if name else 2**31,
        shared_cores=cores() if is_cpu else 0,
        host_link=PRESETS[name].host_link if name else 0.0,
        host_stream=PRESETS[name].host_stream if name else 0.0,
        source=f"graphacc calibrate on {num_devices} x {device_kind}, {_versions()}",
        error=0.0,
        error_source=f"90th percentile of {len(measurements)} measurements",
    )
    collectives = [item for item in measurements if item.kind in COLLECTIVES]
    if collectives:
        hardware = _with_links(hardware, collectives, num_devices, PRESETS[name].levels[0].name if name else "link")
    for item in measurements:
        if item.kind == "lateness" and (unit := hardware.replace(lateness=1.0).late_seconds(item.num_ranks, item.computing_seconds)) > 0:
            hardware = hardware.replace(lateness=max(0.0, item.seconds / unit))
    errors = [abs(predict(item, hardware) / item.seconds - 1) for item in measurements if item.kind != "lateness"]
    return hardware.replace(error=math.ceil(100 * float(np.percentile(errors, 90))) / 100)


def _with_links(hardware: Hardware, measurements: Sequence[Measurement], num_devices: int, name: str) -> Hardware:
    """With one level of links, fitted to collectives: a step of theirs takes the same for all kinds, what they begin with and a byte do not."""
    kinds = [kind for kind in COLLECTIVES if any(item.kind == kind for item in measurements)]
    rows = np.zeros((len(measurements), 1 + 2 * len(kinds)))
    for row, item in zip(rows, measurements, strict=True):
        ((steps, share),) = collective_counts(item.kind, (item.num_ranks,), shared_memory=hardware.shared_cores > 0)
        at = kinds.index(item.kind)
        row[0], row[1 + at], row[1 + len(kinds) + at] = steps, 1.0, share * item.size_bytes
    seconds = np.array([item.seconds for item in measurements])
    scale = rows.max(0)
    (latency, *both), _ = nnls(rows / seconds[:, None] / scale, np.ones(len(seconds)))
    meetings = [both[i] / scale[1 + i] for i in range(len(kinds))]
    rates = {kind: scale[1 + len(kinds) + i] / max(both[len(kinds) + i], 1e-12) for i, kind in enumerate(kinds)}
    first = rates[kinds[0]]
    level = Level(name=name, size=num_devices, bandwidth=first, latency_seconds=latency / scale[0])
    shares = tuple((kind, rate / first) for kind, rate in rates.items() if kind != kinds[0])
    others = tuple((kind, meeting) for kind, meeting in zip(kinds, meetings) if kind != kinds[0])
    return hardware.replace(levels=(level,), meeting_seconds=meetings[0], collective_meetings=others, collective_shares=shares)


def predict(item: Measurement, hardware: Hardware) -> float:
    """What the hardware's constants say that a measured time should be."""
    if item.kind in COLLECTIVES:
        return float(collective_seconds(item.kind, item.size_bytes, hardware, (item.num_ranks,)))
    if item.kind == "lateness":
        return hardware.late_seconds(item.num_ranks, item.computing_seconds)
    if item.kind == "launch":
        return hardware.chip.launch_seconds
    if item.kind == "update":
        return item.size_bytes / (hardware.chip.memory_bandwidth * hardware.chip.memory_efficiency * hardware.chip.update_rate)
    flops = 2.0 * math.prod(item.dims) if item.dims else 0.0
    return float(compute_seconds(flops, item.dims, item.size_bytes, item.dtype, hardware.chip))


def _geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def preset_name(device_kind: str) -> str | None:
    """The preset of a kind of JAX device."""
    return next((name for pattern, name in _KINDS.items() if re.search(pattern, device_kind)), None)


def present(devices: Sequence[Any] | int | None = None) -> Hardware:
    """See `Hardware.present`."""
    import jax

    there = jax.devices()
    chosen = there if devices is None else there[:devices] if isinstance(devices, int) else list(devices)
    num_devices = devices if isinstance(devices, int) else len(chosen)
    kind = chosen[0].device_kind
    hosts = len({getattr(device, "slice_index", 0) for device in chosen})
    name, within = preset_name(kind), num_devices // hosts
    stored = _stored(kind, within)
    if stored is not None and hosts == 1:
        return stored
    if name is None:
        raise StrategyError(f"{num_devices} x {kind!r}{f' on {hosts} hosts' if hosts > 1 else ''} have no preset: run `graphacc calibrate` on one host, or write a file for Hardware.parse")
    preset = Hardware.parse(f"{hosts}x{within}x{name}" if hosts > 1 else f"{within}x{name}")
    if stored is None:
        return preset
    levels = (*(stored.levels or preset.levels[:1]), *preset.levels[1:])
    return stored.replace(levels=levels, source=f"{stored.source}; {levels[-1].name}: {preset.source}")


def _stored(device_kind: str, num_devices: int) -> Hardware | None:
    """What was stored for these devices, and these versions; what is damaged is not trusted."""
    path = _path(device_kind, num_devices)
    try:
        return _unpacked(path.read_text(encoding="utf-8"), _key(device_kind, num_devices), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("graphacc: the calibration %s is not used (%s): run `graphacc calibrate` again", path, error)
        return None


def _key(device_kind: str, num_devices: int) -> dict[str, Any]:
    """What a calibration holds for."""
    return {"device_kind": device_kind, "num_devices": num_devices, "cores": cores() if device_kind == "cpu" else 0, "versions": _versions()}


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")) + f", graphacc {graphacc.__version__}"


def _path(device_kind: str, num_devices: int) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps(_key(device_kind, num_devices), sort_keys=True).encode()).hexdigest()[:12]
    return cache_root() / "hardware" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_kind)}-{num_devices}-{digest}.json"


def _packed(hardware: Hardware, key: Mapping[str, Any]) -> bytes:
    text = hardware.to_json()
    return json.dumps({"key": key, "sha256": hashlib.sha256(text.encode()).hexdigest(), "hardware": text}).encode()


def _unpacked(text: str, key: Mapping[str, Any], name: str) -> Hardware:
    """Raises: ValueError: the file is damaged, or of something else."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.keys() != {"key", "sha256", "hardware"} or content["key"] != key:
        raise ValueError("it is not one of these devices and versions")
    if hashlib.sha256(str(content["hardware"]).encode()).hexdigest() != content["sha256"]:
        raise ValueError("its checksum is wrong")
    return Hardware.from_json(content["hardware"], name=name)
