"""Private or unstable JAX APIs, in one place. Tried with jax 0.10.2."""

import contextlib
import dataclasses
import pathlib
import threading

import jax


def x64() -> contextlib.AbstractContextManager:
    """64-bit integers and floats inside this context: PyTorch's integer semantics are 64-bit. Never a global setting."""
    return jax.enable_x64(True)


# --- executables (graphacc/runtime/replan) -------------------------------------------------------------------------------


def xla_library() -> pathlib.Path:
    """The shared library that XLA is compiled into."""
    import jaxlib

    return pathlib.Path(jaxlib.__file__).parent / "libjax_common.so"


def platform(compiled: jax.stages.Compiled) -> str:
    """Where a compiled function runs: "cpu", "gpu" (CUDA and ROCm) or "tpu"."""
    return compiled._executable._unloaded_executable.backend.platform


def serialize(compiled: jax.stages.Compiled) -> bytes:
    """The PJRT executable behind a compiled function, as bytes. Of one that was itself loaded from bytes the code is missing."""
    return compiled.runtime_executable().serialize()


def cached_executable(entry: bytes) -> bytes:
    """The serialised executable inside an entry of JAX's persistent compilation cache."""
    from jax._src import compilation_cache as cache

    return cache.extract_executable_and_time(cache.decompress_executable(entry))[0]


def has_host_callbacks(compiled: jax.stages.Compiled) -> bool:
    """Whether the program calls back into Python, or passes tokens: such an executable cannot be loaded from bytes."""
    unloaded = compiled._executable._unloaded_executable
    return bool(unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects or unloaded.keepalive)


def can_replace_executable(compiled: jax.stages.Compiled) -> bool:
    """Whether `with_executable` can work on it: it was compiled in this process."""
    return getattr(getattr(compiled, "_executable", None), "_unloaded_executable", None) is not None


def load_executable(serialized: bytes, compiled: jax.stages.Compiled):
    """A `LoadedExecutable` from bytes, on the client and the devices of `compiled`."""
    unloaded = compiled._executable._unloaded_executable
    return unloaded.backend.deserialize_executable(serialized, unloaded.device_list)


def with_executable(compiled: jax.stages.Compiled, executable) -> jax.stages.Compiled:
    """A copy of `compiled` (its trees, shardings, donation) that runs `executable`, a `LoadedExecutable`."""
    unloaded = dataclasses.replace(compiled._executable._unloaded_executable, xla_executable=executable)
    params = compiled._params
    return jax.stages.Compiled(
        unloaded.load(),
        params.const_args,
        compiled.args_info,
        compiled.out_tree,
        no_kwargs=compiled._no_kwargs,
        in_types=params.in_types,
        out_types=params.out_types,
    )


# --- runtime -----------------------------------------------------------------------------------------------------------


def backend_started() -> bool:
    """Whether JAX has made its devices; until then their number on CPU can be chosen."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def accelerator_present() -> bool:
    """Whether this machine shows a GPU or TPU, without starting a backend."""
    from jax._src import hardware_utils

    gpu = hardware_utils.has_visible_nvidia_gpu() or hardware_utils.num_available_amd_gpus(stop_at=1) > 0
    return gpu or hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


_cache_lock = threading.RLock()


@contextlib.contextmanager
def persistent_cache(store):
    """Compile with `store` (``get(key) -> bytes | None``, ``put(key, bytes)``) as JAX's persistent compilation cache.

    JAX's own cache, if the user has set one, stands aside meanwhile and is as before afterwards. What other threads
    compile in between goes to `store` too.
    """
    from jax._src import compilation_cache as cache
    from jax._src import config

    names = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
    with _cache_lock:
        before = {name: getattr(cache, name) for name in names}
        cache._cache, cache._cache_initialized, cache._cache_checked, cache._cache_used = store, True, False, False
        try:
            with config.persistent_cache_min_compile_time_secs(0.0), config.persistent_cache_min_entry_size_bytes(-1):
                yield
        finally:
            for name, value in before.items():
                setattr(cache, name, value)
