"""Private or unstable JAX APIs, in one place. Tried with jax 0.10.2 and 0.12.0.1; `probes` says what is off where one is missing."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import pathlib
import re
import threading
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from graphacc._compat import probes
from graphacc._compat.probes import has

log = logging.getLogger("graphacc")


def x64() -> contextlib.AbstractContextManager:
    """64-bit integers and floats inside this context: PyTorch's integer semantics are 64-bit. Never a global setting."""
    return jax.enable_x64(True)


def x32() -> contextlib.AbstractContextManager:
    """32-bit integers inside this context, as Pallas wants them for the indices of TPU kernels."""
    return jax.enable_x64(False)


def placer(shape: tuple[int, ...], dtype: np.dtype, layout: jax.sharding.NamedSharding):
    """A function that makes arrays of one form: it takes a function from index to numpy block, as `jax.make_array_from_callback` does, which
    works out everything anew at every call and takes ten times as long. Equal blocks of several devices are asked for once.
    """

    def place_anew(block) -> jax.Array:
        with x64():
            return jax.make_array_from_callback(shape, layout, block, dtype=dtype)

    places = layout.addressable_devices_indices_map(shape)
    if not places or not has(probes.DIRECT_UPLOADS):
        return place_anew
    from jaxlib import xla_client

    with x64():
        aval = jax.core.ShapedArray(shape, dtype)
    put: typing.Any = xla_client.batched_device_put
    devices = list(places)
    keys = [tuple((part.start, part.stop) for part in index) for index in places.values()]
    indices, is_wide = dict(zip(keys, places.values())), np.dtype(dtype).itemsize >= 8

    def place(block) -> jax.Array:
        blocks = {key: block(index) for key, index in indices.items()}
        with x64() if is_wide else contextlib.nullcontext():
            return put(aval, layout, [blocks[key] for key in keys], devices, True)

    return place


# --- what a platform has (graphacc/lowering/rules/flash_*) ----------------------------------------------------------------


def lowered_for_platform(function, results, *arrays) -> list[jax.Array]:
    """``function(platform, *arrays)``, traced when the program is lowered and only for the platform that it is lowered for.

    ``jax.lax.platform_dependent`` traces the functions of all platforms, whose kernels cost more to trace than to compile.

    Args:
        function: (platform, *arrays) -> list of arrays, with platform "cpu", "cuda", "rocm" or "tpu".
        results: the shapes and dtypes of what it gives.
    """
    if not has(probes.LOWERED_FOR_PLATFORM):
        platforms = {platform: functools.partial(function, platform) for platform in _PLATFORMS}
        return list(jax.lax.platform_dependent(*arrays, **platforms))
    avals = tuple(jax.core.ShapedArray(result.shape, result.dtype) for result in results)
    return _platform_primitive().bind(*arrays, function=function, results=avals, wide=bool(jax.config.jax_enable_x64))


_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@functools.cache
def _platform_primitive():
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("graphacc_by_platform")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *arrays, function, results, wide: list(results))
    primitive.def_impl(lambda *arrays, **told: jax.jit(lambda *given: primitive.bind(*given, **told))(*arrays))

    def on(platform):
        def traced(*arrays, function, results, wide):
            with jax.enable_x64(wide):
                found = list(function(platform, *arrays))
            got, expected = ([(x.shape, x.dtype) for x in xs] for xs in (found, results))
            assert got == expected, f"{function} gives {got} on {platform}, not {expected}"
            return found

        lower = mlir.lower_fun(traced, multiple_results=True)

        def rule(ctx, *arrays, **told):
            with _described_gpu() if platform == "cuda" else contextlib.nullcontext():
                return lower(ctx, *arrays, **told)

        return rule

    for platform in _PLATFORMS:
        mlir.register_lowering(primitive, on(platform), platform=platform)
    return primitive


def _described_gpu() -> contextlib.AbstractContextManager:
    """Where no CUDA device is here: a context in which Pallas lowers kernels for an H100, which `graphacc.runtime.absent` describes to XLA."""
    if cuda_capability() is not None or not has(probes.DESCRIBED_GPU):
        return contextlib.nullcontext()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=cuda_cores(), platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def _cuda_devices() -> list:
    """This process' CUDA devices; none before JAX has started them."""
    if not has(probes.BACKENDS):
        return []
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized() or "cuda" not in xla_bridge.backends():
        return []
    return jax.local_devices(backend="cuda")


def cuda_capability() -> tuple[int, int] | None:
    """The least compute capability among this process' CUDA devices; None where there are none (a compile for another machine)."""
    return min((tuple(map(int, device.compute_capability.split("."))) for device in _cuda_devices()), default=None)


def cuda_cores() -> int:
    """The multiprocessors of this process' CUDA devices, the least of them; those of an H100 where there are none."""
    return min((device.core_count for device in _cuda_devices()), default=132)


@dataclasses.dataclass(frozen=True)
class CudnnAttention:
    """What cuDNN's fused attention is told besides its operands."""

    scale: float
    causal: bool
    window: int | None  # keys that a query sees, itself among them; under a causal mask only

    def _parameters(self) -> dict:
        from jax._src.cudnn import fused_attention_stablehlo as fused

        mask = fused.MaskType.CAUSAL if self.causal else fused.MaskType.NO_MASK
        given = dict(scale=self.scale, seed=0, dropout_rate=0.0, variadic_args=(False, False), mask_type=mask)
        return given | dict(layout=fused.AttentionLayout.BTNH.value, sliding_window_length=self.window)


def has_cudnn_attention() -> bool:
    """Whether JAX still has the primitives that `cudnn_attention` and `cudnn_attention_backward` bind."""
    return has(probes.CUDNN_ATTENTION)


def has_pallas() -> bool:
    """Whether our Pallas kernels can be traced (graphacc/lowering/rules/flash_pallas.py)."""
    return has(probes.PALLAS)


def has_triton_kernels() -> bool:
    """Whether our Pallas kernels for Triton can be traced (graphacc/lowering/rules/grouped_triton.py)."""
    return has(probes.PALLAS_TRITON)


def has_mosaic_kernels() -> bool:
    """Whether our Pallas kernels for Hopper GPUs can be traced (graphacc/lowering/rules/grouped_hopper.py)."""
    return has(probes.PALLAS_MOSAIC)


_CUDNN_ABSENT = 7  # bias, lengths and offsets of queries and keys, two page tables


def cudnn_attention(q, k, v, told: CudnnAttention) -> list[jax.Array]:
    """Output and log-sum-exp of cuDNN's fused attention, for a program that is lowered for CUDA (JAX's own face wants a device).

    Args:
        q: [B, T, H, D] in bf16 or fp16.
        k, v: [B, S, G, D] in q's dtype.

    Returns:
        [B, T, H, D] and [B, H, T].
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    absent = [jax.numpy.zeros(0, q.dtype)] * _CUDNN_ABSENT
    return fused._dot_product_attention_fwd_p.bind(q, k, v, *absent, is_training=True, **told._parameters())


def cudnn_attention_backward(grad, q, k, v, out, lse, told: CudnnAttention) -> list[jax.Array]:
    """Gradients of q, k and v; see `cudnn_attention`."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    absent = [jax.numpy.zeros(0, q.dtype)] * _CUDNN_ABSENT
    return fused._dot_product_attention_bwd_p.bind(q, k, v, *absent, lse, out, grad, **told._parameters())


# --- options of XLA (graphacc/runtime/program.py) ------------------------------------------------------------------------


def known_options(options: Mapping[str, str | bool | int]) -> dict[str, str | bool | int]:
    """Those of our own options that the installed XLA still has; what it has no more is said once. All platforms read one list of names."""
    return {name: value for name, value in options.items() if name not in _unknown_options(tuple(sorted(options.items())))}


@functools.cache
def _unknown_options(options: tuple[tuple[str, str | bool | int], ...]) -> set[str]:
    unknown: set[str] = set()
    nothing = jax.jit(lambda: 0).lower()
    while left := {name: value for name, value in options if name not in unknown}:
        try:
            nothing.compile(compiler_options=dict[str, typing.Any](left))
            break
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"No such compile option: '(\w+)'", str(error))
            if found is None or found[1] not in left:
                raise
            unknown.add(found[1])
            log.warning("graphacc: off: XLA's option %s, which jaxlib %s has no more: programs are compiled without it", found[1], importlib.metadata.version("jaxlib"))
    return unknown


# --- executables (graphacc/runtime/replan) -------------------------------------------------------------------------------


def can_read_executables() -> bool:
    """Whether what stands behind a compiled function can be read and replaced, as the functions below do."""
    return has(probes.EXECUTABLES)


def xla_library() -> pathlib.Path:
    """The shared library that XLA:CPU is compiled into."""
    import jaxlib

    return pathlib.Path(jaxlib.__file__).parent / "libjax_common.so"


def cuda_library() -> pathlib.Path | None:
    """The shared library of JAX's CUDA plugin, which XLA:CUDA is compiled into; None where none is installed."""
    for package in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):  # in JAX's own order
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            if spec is not None and spec.origin is not None:
                return pathlib.Path(spec.origin).parent / "xla_cuda_plugin.so"
    return None


def library_of(compiled: jax.stages.Compiled) -> pathlib.Path | None:
    """The shared library of the XLA that compiled a function, for CPU or CUDA; None for other platforms."""
    backend = compiled._executable._unloaded_executable.backend
    if backend.platform == "cpu":
        return xla_library()
    return cuda_library() if "cuda" in backend.platform_version.lower() else None


def num_devices(compiled: jax.stages.Compiled) -> int:
    """How many devices a compiled function runs on, in all processes."""
    return len(compiled._executable._unloaded_executable.device_list)


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


def cache_entry(serialized: bytes, seconds: float) -> bytes:
    """An entry of JAX's persistent compilation cache: a serialised executable, and what compiling it took."""
    from jax._src import compilation_cache as cache

    return cache.compress_executable(cache.combine_executable_and_time(serialized, round(seconds)))


def has_host_callbacks(compiled: jax.stages.Compiled) -> bool:
    """Whether the program calls back into Python, or passes tokens: such an executable cannot be loaded from bytes."""
    unloaded = compiled._executable._unloaded_executable
    return bool(unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects or unloaded.keepalive)


def can_keep_programs() -> bool:
    """Whether compiled programs can be kept between runs: `persistent_cache` does nothing otherwise."""
    return has(probes.PROGRAM_CACHE) and can_read_executables()


def can_read_modules() -> bool:
    """Whether `module_text` and `module_cost` work."""
    return has(probes.QUICK_LOADING)


def module_text(module: bytes) -> str:
    """The text of a HloModuleProto, as ``Compiled.as_text`` gives it."""
    from jaxlib import xla_client

    return xla_client.XlaComputation(module).as_hlo_module().to_string()


def module_cost(module: bytes, compiled: jax.stages.Compiled) -> dict[str, float]:
    """XLA's count of the work of a HloModuleProto, as ``Compiled.cost_analysis`` gives it for the executable that was compiled from it."""
    from jaxlib import xla_client

    jaxlib, executable = (typing.cast("typing.Any", each) for each in (importlib.import_module("jaxlib._jax"), compiled))
    return jaxlib.hlo_module_cost_analysis(executable._executable._unloaded_executable.backend, xla_client.XlaComputation(module).as_hlo_module())


def can_find_by_graph() -> bool:
    """Whether `settings`, `contents` and `has_lifted_constants` work, and programs are kept at all."""
    return has(probes.PROGRAMS_BY_GRAPH) and can_keep_programs()


def settings() -> tuple:
    """All settings of JAX that tracing and lowering may read, as text: global ones, and those of this thread."""
    from jax._src import config

    of_thread = [getattr(value, "axis_sizes", value) for value in config.trace_context()]  # the environment of axes has no text of its own
    return repr(of_thread), sorted((name, repr(value)) for name, value in jax.config.values.items())


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a lowered program has in it."""

    custom_calls: frozenset[str]  # their targets
    can_run_on_zeros: bool  # it has an end on any values, and no effects but its results


def contents(lowered: jax.stages.Lowered) -> Contents:
    """What a program has in it. A loop is not looked into: how often it runs may depend on values."""
    ir: typing.Any = importlib.import_module("jaxlib.mlir.ir")
    calls, alone = set(), True

    def visit(operation):
        nonlocal alone
        if operation.name == "stablehlo.custom_call":
            calls.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
            alone = alone and not ("has_side_effect" in operation.attributes and ir.BoolAttr(operation.attributes["has_side_effect"]).value)
        alone = alone and operation.name not in _LOOPS_AND_EFFECTS
        return ir.WalkResult.ADVANCE

    module: typing.Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return Contents(frozenset(calls), alone)


_LOOPS_AND_EFFECTS = frozenset(f"stablehlo.{name}" for name in ("while", "infeed", "outfeed", "send", "recv"))


def run_on_zeros(executable, forms: Sequence[tuple[Sequence[int], str]], device) -> None:
    """Run an executable of one device on zeros, and wait for its end.

    Args:
        executable: a `LoadedExecutable`.
        forms: of its inputs, (shape, dtype).
        device: a `jax.Device`.
    """
    with x64():
        arrays = jax.device_put([np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in forms], device)
    executable.execute_sharded(arrays, with_tokens=True).consume_token().block_until_ready()


def has_lifted_constants(lowered: jax.stages.Lowered) -> bool:
    """Whether JAX gives the program constants as further arguments."""
    return bool(lowered._lowering.const_args)


def can_replace_executable(compiled: jax.stages.Compiled) -> bool:
    """Whether `with_executable` can work on it: it was compiled in this process."""
    return can_read_executables() and getattr(getattr(compiled, "_executable", None), "_unloaded_executable", None) is not None


def load_executable(serialized: bytes, compiled: jax.stages.Compiled):
    """A `LoadedExecutable` from bytes, on the client and the devices of `compiled`."""
    unloaded = compiled._executable._unloaded_executable
    return unloaded.backend.deserialize_executable(serialized, unloaded.device_list)


def load_executable_on(serialized: bytes, mesh: jax.sharding.Mesh):
    """The same on the devices of a mesh. Other threads go on meanwhile."""
    return mesh.devices.flat[0].client.deserialize_executable(serialized, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())._internal_device_list)


def compiled_as(lowered: jax.stages.Lowered, executable) -> jax.stages.Compiled:
    """What `lowered` is compiled to, if that is `executable`, a `LoadedExecutable` with its inputs, outputs and devices: XLA is not called."""
    from jax._src import compiler

    thread, original = threading.get_ident(), compiler.compile_or_get_cached

    def given(*args, **kwargs):
        return executable if threading.get_ident() == thread else original(*args, **kwargs)

    with _cache_lock:
        compiler.compile_or_get_cached = given
        try:
            return lowered.compile()
        finally:
            compiler.compile_or_get_cached = original


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
    if not has(probes.BACKENDS):
        return True
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def can_make_cpu_devices() -> bool:
    """Whether `more_cpu_devices` works."""
    return has(probes.MORE_CPU_DEVICES)


def more_cpu_devices(num_devices: int) -> list[jax.Device]:
    """Virtual CPU devices on a client of their own, beside JAX's: `jax.devices()` stays as it is. They last as long as the process.

    Arrays and programs find their client by their devices, so all of JAX's public functions work on them.
    """
    from jax._src import xla_bridge
    from jaxlib import xla_client

    return xla_client.make_cpu_client(asynchronous=xla_bridge._CPU_ENABLE_ASYNC_DISPATCH.value, num_devices=num_devices).devices()


def accelerator_present() -> bool:
    """Whether this machine shows a GPU or TPU, without starting a backend; True where that cannot be told."""
    if not has(probes.ACCELERATORS):
        return True
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


def can_join_processes() -> bool:
    """Whether `distributed_service` works."""
    return has(probes.SEVERAL_PROCESSES)


def distributed_service() -> DistributedService:
    """After `jax.distributed.initialize`; unlike `jax.process_index` it does not start a backend."""
    from jax._src.distributed import global_state as state

    return DistributedService(
        process_id=state.process_id, num_processes=state.num_processes, address=state.coordinator_address, client=state.client
    )


class KeyNotThere(Exception):
    """Nobody has written a key of the key-value store in time."""


def read_key(service: DistributedService, key: str, seconds: float) -> str:
    """A value of the key-value store, when it is there; other threads run meanwhile.

    Raises:
        KeyNotThere: it was not written in `seconds`.
    """
    try:
        return service.client.blocking_key_value_get(key, max(1, round(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise KeyNotThere(key) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The processes that srun has started."""

    coordinator: str  # "host:port" on the first node; the port follows from the job's number
    num_processes: int
    process_id: int
    local_id: int


def slurm_step() -> SlurmStep | None:
    """What SLURM's variables say, as JAX reads them; None outside of srun."""
    if not has(probes.SLURM):
        return None
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
    """Compile with `store` as JAX's persistent compilation cache.

    ``store.get(key) -> bytes | None`` gives a `cache_entry`. ``store.missed()`` is called where a program had to be compiled, also
    because its entry could not be loaded; JAX's own writing, which would serialise and compress the program, is left out.

    JAX's own cache, if the user has set one, stands aside meanwhile and is as before afterwards. What other threads
    compile in between asks `store` too.
    """
    if not has(probes.PROGRAM_CACHE):
        yield
        return
    from jax._src import compilation_cache as cache
    from jax._src import compiler

    settings = {
        (cache, "_cache"): store,
        (cache, "_cache_initialized"): True,
        (cache, "_cache_checked"): False,
        (cache, "_cache_used"): False,
        (compiler, "_cache_write"): lambda *arguments: store.missed(),
    }
    with _cache_lock:
        before = {place: getattr(*place) for place in settings}
        try:
            for place, value in settings.items():
                setattr(*place, value)
            yield
        finally:
            for place, value in before.items():
                setattr(*place, value)


# --- captured HLO (graphacc/capture/lazy) --------------------------------------------------------------------------------


def _ir() -> typing.Any:
    """MLIR's Python classes."""
    from jax._src.lib.mlir import ir

    return ir


@dataclasses.dataclass(frozen=True)
class HloOperation:
    """One operation of the main function of an `HloModule`. Values are numbered: its parameters, then all results in the program's order."""

    name: str  # "dot_general"
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[tuple[tuple[int, ...], str] | None, ...]  # shape and element type ("f32", "i1") of each result; None: no tensor
    told: dict[str, typing.Any]  # those of its attributes that are integers, lists of integers or text


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

        ir = _ir()
        with mlir.make_ir_context():
            module = ir.Module.parse(self.stablehlo)
            operations = ir.SymbolTable(module.operation)["main"].regions[0].blocks[0].operations
            returned = operations[len(operations) - 1].operands
            return {i: ir.BlockArgument(value).arg_number for i, value in enumerate(returned) if isinstance(value.owner, ir.Block)}

    @functools.cached_property
    def whole_calls(self) -> list[int]:
        """The numbers of the custom calls to `WHOLE_CALL`, in the program's order."""
        from jax._src.interpreters import mlir

        ir = _ir()
        with mlir.make_ir_context():
            module = ir.Module.parse(self.stablehlo)
            return [number for main in module.body.operations for _, number in _whole_calls(main)]

    @functools.cached_property
    def operations(self) -> list[HloOperation]:
        """The main function; the last operation is "return"."""
        from jax._src.interpreters import mlir

        ir = _ir()
        with mlir.make_ir_context():
            block = _main(ir.Module.parse(self.stablehlo))
            numbers = {argument: number for number, argument in enumerate(block.arguments)}
            found = []
            for operation in block.operations:
                operands = tuple(numbers[operand] for operand in operation.operands)
                results = tuple(numbers.setdefault(result, len(numbers)) for result in operation.results)
                name = operation.operation.name.rpartition(".")[2]
                found.append(HloOperation(name, operands, results, tuple(_tensor_type(result.type) for result in operation.results), _told(operation)))
            return found

    def with_calls(self, values: Mapping[int, int]) -> "HloModule":
        """The same module in which values go through a custom call to `WHOLE_CALL` each: the value's number -> the call's number."""
        from jax._src.interpreters import mlir

        ir = _ir()
        with mlir.make_ir_context():
            module = ir.Module.parse(self.stablehlo)
            block = _main(module)
            numbered = [*block.arguments, *(result for operation in block.operations for result in operation.results)]
            following = {operation: after for operation, after in zip(block.operations, list(block.operations)[1:])}
            for value, number in values.items():
                made, first = numbered[value], isinstance(numbered[value].owner, ir.Block)
                attributes: typing.Any = {"call_target_name": ir.StringAttr.get(WHOLE_CALL), "backend_config": ir.StringAttr.get(str(number))}
                with ir.InsertionPoint(block.operations[0] if first else following[made.owner.opview]), ir.Location.unknown():
                    call = ir.Operation.create("stablehlo.custom_call", results=[made.type], operands=[made], attributes=attributes)
                made.replace_all_uses_except(call.results[0], call)
            return dataclasses.replace(self, stablehlo=mlir.module_to_bytecode(module))

    def call(self, arrays, expand) -> list[jax.Array]:
        """The results for one array per parameter, inside a function that JAX traces; arrays are cast to the parameters' dtypes.

        Args:
            expand: (number, arrays) -> arrays; what to compute for the custom call to `WHOLE_CALL` with that number.
        """
        cast = [array.astype(parameter.dtype) for array, parameter in zip(arrays, self.parameters, strict=True)]
        return _call_hlo_primitive().bind(*cast, module=self, expand=expand)


WHOLE_CALL = "graphacc.whole_call"
"""Target of a custom call that a captured module makes in the place of something else; its backend_config is a number."""


def _main(module):
    """The block of a module's main function."""
    ir = _ir()
    return ir.SymbolTable(module.operation)["main"].regions[0].blocks[0]


def _tensor_type(kind) -> tuple[tuple[int, ...], str] | None:
    ir = _ir()
    if not isinstance(kind, ir.RankedTensorType):
        return None
    return tuple(kind.shape), str(kind.element_type)


def _told(operation) -> dict[str, typing.Any]:
    from jax._src.lib.mlir.dialects import hlo

    ir = _ir()
    dimensions = {
        "dot_dimension_numbers": (hlo.DotDimensionNumbers, ("lhs_batching_dimensions", "rhs_batching_dimensions", "lhs_contracting_dimensions", "rhs_contracting_dimensions")),
        "dimension_numbers": (hlo.GatherDimensionNumbers, ("offset_dims", "collapsed_slice_dims", "start_index_map", "index_vector_dim")),
    }
    found: dict[str, typing.Any] = {}
    for name, attribute in operation.operation.attributes.items():
        if isinstance(attribute, ir.DenseI64ArrayAttr):
            found[name] = list(attribute)
        elif isinstance(attribute, (ir.IntegerAttr, ir.StringAttr)):
            found[name] = attribute.value
        elif name in dimensions and dimensions[name][0].isinstance(attribute):
            numbers = dimensions[name][0](attribute)
            found |= {part: value if isinstance(value, int) else list(value) for part in dimensions[name][1] if (value := getattr(numbers, part)) is not None}
    if operation.regions and operation.operation.name == "stablehlo.reduce":
        found["reduces_by"] = [inner.operation.name.rpartition(".")[2] for inner in operation.regions[0].blocks[0].operations]
    return found


def _whole_calls(function) -> list:
    """(operation, number) of every custom call to `WHOLE_CALL` in a function of a module."""
    ir = _ir()
    found = [operation for operation in function.regions[0].blocks[0].operations if operation.operation.name == "stablehlo.custom_call"]
    found = [operation for operation in found if ir.StringAttr(operation.attributes["call_target_name"]).value == WHOLE_CALL]
    return [(operation, int(ir.StringAttr(operation.attributes["backend_config"]).value)) for operation in found]


def _abstract(shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.dimensions(), shape.numpy_dtype())


@functools.cache
def _call_hlo_primitive():
    """The primitive that stands for a call of an `HloModule`: lowering merges the module into the program that calls it."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir.dialects import func
    from jax.extend.core import Primitive

    ir = _ir()
    primitive = Primitive("graphacc_hlo")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*arrays, module, expand):
        return [jax.core.ShapedArray(result.shape, result.dtype) for result in module.results]

    def lower(context, *arrays, module, expand):
        into = context.module_context
        name = mlir.merge_mlir_modules(into.module, "captured", ir.Module.parse(module.stablehlo), dst_symtab=into.symbol_table)
        called = into.symbol_table[name]
        for operation, number in _whole_calls(called):
            _expand(context, operation, functools.partial(expand, number))
        return list(func.CallOp(called.type.results, ir.FlatSymbolRefAttr.get(name), arrays).results)

    mlir.register_lowering(primitive, lower)
    return primitive


def _expand(context, operation, function) -> None:
    """Put what JAX lowers `function` to, of the operands' arrays, in the place of a custom call."""
    from jax._src.interpreters import mlir

    ir = _ir()
    avals = [_aval(operand.type) for operand in operation.operands]
    inside = context.replace(primitive=None, avals_in=avals, avals_out=None, tokens_in=mlir.TokenSet(), tokens_out=None, const_lowering={})
    with ir.InsertionPoint(operation), ir.Location.unknown():
        results, _ = mlir.ir_tree_registry.flatten(mlir.lower_fun(lambda *arrays: function(arrays))(inside, *operation.operands))
    if not isinstance(operation.results[0].type, ir.TupleType):
        operation.results[0].replace_all_uses_with(results[0])
    else:
        for use in list(operation.results[0].uses):
            part = use.owner
            part.results[0].replace_all_uses_with(results[ir.IntegerAttr(part.attributes["index"]).value])
            part.erase()
    operation.operation.erase()


def _aval(kind) -> "jax.core.ShapedArray":
    """The shape and dtype of a value of an MLIR tensor type."""
    from jax._src.interpreters import mlir

    ir = _ir()
    tensor = ir.RankedTensorType(kind)
    dtypes = map(np.dtype, (bool, *"bhilBHILefdFD", jax.dtypes.bfloat16))
    return jax.core.ShapedArray(tuple(tensor.shape), next(dtype for dtype in dtypes if mlir.dtype_to_ir_type(dtype) == tensor.element_type))


# --- profiles (graphacc/runtime/ranges.py) -------------------------------------------------------------------------------


def traces_are_taken() -> bool:
    """Whether a profiler of JAX runs; where JAX does not say, ranges are given to it in any case, at half a microsecond each."""
    return not has(probes.JAX_PROFILER) or jax.profiler.TraceAnnotation.is_enabled()
