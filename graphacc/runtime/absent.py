"""Devices that are not here, to compile programs for: XLA needs a description of them and the plugin of their platform, no GPU."""

import itertools

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from graphacc._compat.jax_ import cuda_library
from graphacc.errors import StrategyError
from graphacc.strategy import Strategy
from graphacc.strategy.axes import DP

_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800  memory_bandwidth: {bandwidth}  device_memory_size: {size}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10 }}
device_description_str: "{name}"
"""

TARGETS = {
    "h100": _HOPPER.format(bandwidth=3352320000000, size=84942979072, name="NVIDIA H100 80GB HBM3"),
    "h200": _HOPPER.format(bandwidth=4800000000000, size=150110011392, name="NVIDIA H200"),
}
"""Chip -> ``stream_executor.GpuTargetConfigProto``."""


def absent_mesh(strategy: Strategy, chip: str, devices_per_host: int) -> Mesh:
    """The mesh of a strategy on hosts of GPUs that are not here.

    Raises:
        StrategyError: the chip has no description, or JAX's CUDA plugin is not installed.
    """
    target = TARGETS.get(chip.lower())
    if target is None:
        raise StrategyError(f"programs for {chip} cannot be compiled without one: there is a description of {', '.join(TARGETS)}")
    if cuda_library() is None:
        raise StrategyError(f"to compile for {chip}, JAX's CUDA plugin is needed, though no GPU: pip install --no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}")
    count = strategy.num_devices
    inner = min(count, devices_per_host)
    devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x{-(-count // inner)}x{inner}").devices
    axes = strategy.mesh or {DP: 1}
    chosen = np.array(list(itertools.islice(devices, count)))
    return Mesh(chosen.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
