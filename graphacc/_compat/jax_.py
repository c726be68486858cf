"""Private or unstable JAX APIs, in one place. Tried with jax 0.10.2."""

import contextlib
import dataclasses
import functools
import pathlib
import threading
import typing

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


def with_cached_executable(entry: bytes, serialized: bytes) -> bytes:
    """An entry of JAX's persistent compilation cache with another serialised executable in it."""
    from jax._src import compilation_cache as cache

    seconds = cache.extract_executable_and_time(cache.decompress_executable(entry))[1]
    return cache.compress_executable(cache.combine_executable_and_time(serialized, seconds))


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedService:
    """What joins the processes of this run."""

    process_id: int
    num_processes: int
    address: str  # "host:port" of process 0's service
    client: typing.Any  # with key_value_set(key, value) and blocking_key_value_get(key, milliseconds)


def distributed_service() -> DistributedService:
    """After `jax.distributed.initialize`; unlike `jax.process_index` it does not start a backend."""
    from jax._src.distributed import global_state as state

    return DistributedService(
        process_id=state.process_id, num_processes=state.num_processes, address=state.coordinator_address, client=state.client
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The processes that srun has started."""

    coordinator: str  # "host:port" on the first node; the port follows from the job's number
    num_processes: int
    process_id: int
    local_id: int


def slurm_step() -> SlurmStep | None:
    """What SLURM's variables say, as JAX reads them; None outside of srun."""
    from jax._src.clusters import SlurmCluster

    if not SlurmCluster.is_env_present():
        return None
    return SlurmStep(
        coordinator=SlurmCluster.get_coordinator_address(None, None),
        num_processes=SlurmCluster.get_process_count(),
        process_id=SlurmCluster.get_process_id(),
        local_id=SlurmCluster.get_local_process_id(),
    )


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


# --- captured HLO (graphacc/capture/lazy) --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HloModule:
    """An HLO module that a JAX function can call; its result is a tuple of arrays."""

    stablehlo: bytes
    parameters: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    num_operators: int

    @classmethod
    def from_proto(cls, proto: bytes) -> "HloModule":
        """From a serialised HloModuleProto."""
        from jaxlib import _jax, xla_client

        computation = xla_client.XlaComputation(proto)
        shape = computation.program_shape()
        return cls(
            stablehlo=_jax.mlir.hlo_to_stablehlo(proto),
            parameters=tuple(map(_abstract, shape.parameter_shapes())),
            results=tuple(map(_abstract, shape.result_shape().tuple_shapes())),
            num_operators=computation.as_hlo_text().count(" = "),
        )

    @functools.cached_property
    def passed_through(self) -> dict[int, int]:
        """Index of a result that is a parameter, unchanged -> index of that parameter."""
        from jax._src.interpreters import mlir
        from jax._src.lib.mlir import ir

        with mlir.make_ir_context():
            module = ir.Module.parse(self.stablehlo)
            operations = ir.SymbolTable(module.operation)["main"].regions[0].blocks[0].operations
            returned = operations[len(operations) - 1].operands
            return {i: ir.BlockArgument(value).arg_number for i, value in enumerate(returned) if isinstance(value.owner, ir.Block)}

    def call(self, arrays) -> list[jax.Array]:
        """The results for one array per parameter, inside a function that JAX traces; arrays are cast to the parameters' dtypes."""
        cast = [array.astype(parameter.dtype) for array, parameter in zip(arrays, self.parameters, strict=True)]
        return _call_hlo_primitive().bind(*cast, module=self)


def _abstract(shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.dimensions(), shape.numpy_dtype())


@functools.cache
def _call_hlo_primitive():
    """The primitive that stands for a call of an `HloModule`: lowering merges the module into the program that calls it."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import func
    from jax.extend.core import Primitive

    primitive = Primitive("graphacc_hlo")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*arrays, module):
        return [jax.core.ShapedArray(result.shape, result.dtype) for result in module.results]

    def lower(context, *arrays, module):
        into = context.module_context
        name = mlir.merge_mlir_modules(into.module, "captured", ir.Module.parse(module.stablehlo), dst_symtab=into.symbol_table)
        called = into.symbol_table[name]
        return list(func.CallOp(called.type.results, ir.FlatSymbolRefAttr.get(name), arrays).results)

    mlir.register_lowering(primitive, lower)
    return primitive
