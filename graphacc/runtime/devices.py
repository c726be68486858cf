"""The devices that JAX offers, virtual ones on CPU, and the mesh that a strategy spreads over them."""

import math
import os
import re
import threading
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from graphacc._compat.jax_ import accelerator_present, backend_started, can_make_cpu_devices, more_cpu_devices
from graphacc.errors import StrategyError
from graphacc.runtime.distributed import process_count
from graphacc.strategy.axes import DP, FSDP, GRADIENT_AXES
from graphacc.strategy.spec import Strategy


def default_platform() -> str:
    """The platform that JAX will use: "cpu", "gpu" or "tpu". Does not start a backend where it can be told without."""
    if backend_started():
        return jax.default_backend()
    chosen = (jax.config.jax_platforms or "").split(",")[0]
    if chosen == "cpu" or (not chosen and not accelerator_present()):
        return "cpu"
    return jax.default_backend()


def available_devices() -> int:
    """The number of devices that JAX has of itself; starts its backend."""
    return len(jax.devices())


def select_devices(num_devices: int | None = None, platform: str | None = None) -> list[jax.Device]:
    """The first `num_devices` devices; in a run of several processes, as many of each process, in the processes' order.

    On CPU the devices are virtual. Where JAX has too few, they are made on a second client beside JAX's own, at any time: models on
    different numbers of devices live in one process, and `jax.devices()` stays as the user has it. In a run of several processes
    only JAX's own client is connected with the others: it is set up to have as many as are asked for if it has not started yet.

    Args:
        num_devices: how many; None for all that JAX has.
        platform: "cpu", "gpu" or "tpu"; None for JAX's default.

    Raises:
        StrategyError: there are fewer; the message says how to get more.
    """
    if num_devices is not None and num_devices < 1:
        raise StrategyError(f"devices={num_devices} must be at least 1")
    started, processes = backend_started(), process_count()
    if num_devices is not None and num_devices % processes:
        raise StrategyError(f"devices={num_devices} cannot be shared by {processes} processes: choose a multiple of {processes}")
    if num_devices is not None and not started and (processes > 1 or not can_make_cpu_devices()):
        jax.config.update("jax_num_cpu_devices", max(num_devices // processes, _configured_cpu_devices()))
    devices = jax.devices(platform)
    if num_devices is None:
        return devices
    if processes == 1 and devices[0].platform == "cpu" and len(devices) < num_devices and can_make_cpu_devices():
        devices = _virtual_devices(num_devices)
    shares = [[device for device in devices if device.process_index == rank][: num_devices // processes] for rank in range(processes)]
    chosen = [device for share in shares for device in share]
    if len(chosen) < num_devices:
        raise StrategyError(_too_few(num_devices, devices))
    return chosen


_virtual: list[list[jax.Device]] = []
"""The devices of each CPU client that was made beside JAX's own."""

_virtual_lock = threading.Lock()


def _virtual_devices(num_devices: int) -> list[jax.Device]:
    """At least `num_devices` devices of one client; the same ones for every model that they are enough for."""
    with _virtual_lock:
        if not any(len(devices) >= num_devices for devices in _virtual):
            _virtual.append(more_cpu_devices(num_devices))
        return next(devices for devices in _virtual if len(devices) >= num_devices)


def _configured_cpu_devices() -> int:
    """The number of virtual CPU devices that the user has set for JAX already; 0 if none."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(jax.config.jax_num_cpu_devices, int(found[-1]) if found else 0)


def _too_few(wanted: int, devices: Sequence[jax.Device]) -> str:
    platform, processes = devices[0].platform, process_count()
    message = f"{wanted} devices are wanted, JAX has {len(devices)} on {platform}"
    if platform != "cpu":
        return f"{message}: set devices={len(devices)} or less, or run on CPU with JAX_PLATFORMS=cpu"
    where = f"in {processes} processes. There" if processes > 1 else "and this version of JAX makes no further client. So"
    return (
        f"{message} {where} virtual CPU devices can only be made before JAX is first used: call graphacc.compile before "
        "the first use of jax, and the model with the most devices first, or start every process with "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted // processes}"
    )


def make_mesh(strategy: Strategy, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a strategy: its axes outermost first, without those of size 1 (one device: an axis ``dp`` of size 1).

    Raises:
        StrategyError: the strategy needs another number of devices; lists the choices of dp and fsdp that would fit.
    """
    if strategy.num_devices != len(devices):
        raise StrategyError(_misfit(strategy, len(devices)))
    axes = strategy.mesh or {DP: 1}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def stage_meshes(strategy: Strategy, devices: Sequence[jax.Device]) -> list[Mesh]:
    """One mesh per pipeline stage, over consecutive devices; raises as `make_mesh`."""
    if strategy.num_devices != len(devices):
        raise StrategyError(_misfit(strategy, len(devices)))
    within = strategy.within_stage
    size = within.num_devices
    return [make_mesh(within, devices[stage * size : (stage + 1) * size]) for stage in range(strategy.pp)]


def _misfit(strategy: Strategy, num_devices: int) -> str:
    sizes = " * ".join(f"{axis}={size}" for axis, size in strategy.mesh.items()) or "one device"
    needed = strategy.num_devices
    message = f"the strategy needs {needed} devices ({sizes}), but there are {num_devices}: set devices={needed}"
    fixed = {axis: size for axis, size in strategy.mesh.items() if axis not in GRADIENT_AXES}
    others = math.prod(fixed.values())
    if num_devices % others:
        return f"{message}, or change {' * '.join(fixed)} to a divisor of {num_devices}"
    rest = num_devices // others
    fits = ", ".join(_pair(dp, rest // dp) for dp in range(1, rest + 1) if rest % dp == 0)
    return f"{message}, or make the sizes multiply to {num_devices}: {fits}"


def _pair(dp: int, fsdp: int) -> str:
    """
    Examples:
        >>> _pair(2, 4)
        'dp=2 fsdp=4'
    """
    parts = [f"{name}={size}" for name, size in ((DP, dp), (FSDP, fsdp)) if size > 1]
    return " ".join(parts) or "dp=1 fsdp=1"
