"""Which private or unstable APIs of torch, JAX and jaxlib are there, and what is off where one is missing.

Code that rests on such an API asks `has` first, and does without it otherwise; what is missing is said once, in one line. An API that is there
and behaves otherwise is found where it is used, which then calls `switch_off`.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import logging

log = logging.getLogger("graphacc")

TRIED = "torch 2.9.1, 2.13.0 and 2.15.0, jax 0.10.2 and 0.12.0.1"
NEEDED = "nothing can be compiled without it"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # every step asks for some, by their identity
class Feature:
    """What rests on private or unstable APIs."""

    title: str  # as a user knows it
    without: str | None  # what happens where it is off; None: nothing can be compiled
    apis: tuple[str, ...]  # "package.module:name.name"


# --- torch ---------------------------------------------------------------------------------------------------------------

CAPTURE = Feature(
    title="capture",
    without=None,
    apis=(
        "torch._subclasses.fake_tensor:FakeTensor",
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch._subclasses.functional_tensor:FunctionalTensorMode",
        "torch._subclasses.functional_tensor:dispatch_functionalize",
        "torch.fx.experimental.proxy_tensor:make_fx",
        "torch.fx.traceback:preserve_node_meta",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch.utils._pytree:tree_map_only",
        "torch.utils._pytree:SUPPORTED_NODES",
        "torch._dispatch.python:enable_python_dispatcher",
        "torch._decomp:core_aten_decompositions",
        "torch._decomp:decomposition_table",
        "torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode",
        "torch._C:DisableTorchFunctionSubclass",
    ),
)
FAKES_THAT_STAY = Feature(
    title="protection of fake tensors from the garbage collector",
    without="torch 2.13 and newer need none; with an older one a collection in the middle of a capture may end the process",
    apis=("torch:Tensor._fix_weakref",),
)
CODE_ON_DEMAND = Feature(
    title="graphs without Python code",
    without="torch.fx writes the code of every captured graph, which takes longer",
    apis=("torch.fx._lazy_graph_module:_use_lazy_graph_module",),
)
EFFECTS = Feature(
    title="checks of singular matrices without tokens",
    without="torch.linalg's operators that check for singular matrices may be run by PyTorch",
    apis=("torch._higher_order_ops.effects:has_effects",),
)
COMPILING_FLAG = Feature(
    title="torch.compiler.is_compiling() during capture",
    without="code that asks it takes its eager branch, and may be run by PyTorch where that follows values",
    apis=("torch.compiler:_is_compiling_flag",),
)
ONEDNN_SWITCH = Feature(
    title="capture without oneDNN's fused operators",
    without="layers that torch runs by oneDNN (LSTM) may be run by PyTorch",
    apis=("torch._C:_get_mkldnn_enabled", "torch._C:_set_mkldnn_enabled"),
)
CHECKPOINTS = Feature(
    title="torch.utils.checkpoint in the model",
    without="what is given to it is run by PyTorch, or kept instead of computed again",
    apis=(
        "torch.utils.checkpoint:CheckpointFunction",
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        "torch.utils.checkpoint:check_backward_validity",
        "torch.utils.checkpoint:_CachingTorchDispatchMode",
    ),
)
FLEX_ATTENTION = Feature(
    title="flex_attention in the model",
    without="such a model is run by PyTorch",
    apis=(
        "torch.nn.attention.flex_attention:_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "torch.nn.attention.flex_attention:flex_attention_hop",
        "torch._higher_order_ops.flex_attention:math_attention",
        "torch._dynamo._trace_wrapped_higher_order_op:zeros_and_scatter",
    ),
)
VALUES_ASKED = Feature(
    title="naming the line that asks for a tensor's values during capture",
    without="such code is run by PyTorch, with torch's own message",
    apis=(
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    ),
)
FOREACH = Feature(
    title="operators on lists of tensors (foreach)",
    without="optimizers that call them are run by PyTorch: pass foreach=False",
    apis=("torch._C:_dispatch_get_all_op_names",),
)
CUSTOM_OPERATORS = Feature(
    title="bodies of torch.library.custom_op",
    without="models that call one need a rule for it, or are run by PyTorch",
    apis=("torch._library.custom_ops:OPDEFS",),
)
FORWARD_MODE = Feature(
    title="noticing forward-mode differentiation around a compiled model",
    without="tangents do not pass through it: use an uncompiled copy there",
    apis=("torch.autograd.forward_ad:_current_level",),
)
SAVED_TENSOR_HOOKS = Feature(
    title="noticing torch.autograd.graph.saved_tensors_hooks around a compiled model",
    without="they do not see what it saves",
    apis=("torch._C:_autograd._top_saved_tensors_default_hooks",),
)
PARAMETRIZATION_CACHE = Feature(
    title="torch.nn.utils.parametrize.cached() around a compiled model",
    without="it is not noticed: weights are computed in every call",
    apis=("torch.nn.utils.parametrize:_cache_enabled", "torch.nn.utils.parametrize:_cache"),
)
TRANSFORMS = Feature(
    title="torch.func's transforms around a compiled model",
    without="state cannot be fetched inside of them",
    apis=(
        "torch._C:_functorch.peek_interpreter_stack",
        "torch._C:_functorch.is_functorch_wrapped_tensor",
        "torch._C:_functorch.get_unwrapped",
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    ),
)
MODES = Feature(
    title="noticing modes of torch around a compiled model",
    without="a TorchFunctionMode or TorchDispatchMode around a call does not see what it computes",
    apis=(
        "torch._C:_len_torch_function_stack",
        "torch._C:_len_torch_dispatch_stack",
        "torch.overrides:_get_current_function_mode_stack",
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    ),
)
STORAGE_USERS = Feature(
    title="seeing whether the loop holds a tensor",
    without="every one is taken as held, and state comes to the host in every step that it may be read in",
    apis=("torch._C:_storage_Use_Count", "torch:UntypedStorage._cdata"),
)
META_MODELS = Feature(
    title="models on the meta device",
    without="they are refused: materialise them before",
    apis=("torch._C:_swap_tensor_impl",),
)
PROCESS_GROUPS = Feature(
    title="the reference executor's process groups",
    without="captured graphs cannot be run by PyTorch on several ranks, which tests do",
    apis=("torch.distributed.distributed_c10d:_resolve_process_group", "torch._C:_distributed_c10d._register_process_group"),
)
TORCH_PROFILER = Feature(
    title="asking whether torch.profiler runs",
    without="named ranges are made in every step, which costs some microseconds",
    apis=("torch._C:_autograd._profiler_enabled",),
)

# --- JAX and jaxlib ------------------------------------------------------------------------------------------------------

LOWERED_FOR_PLATFORM = Feature(
    title="kernels traced for one platform alone",
    without="those of all platforms are traced, so programs take longer to build",
    apis=("jax.extend.core:Primitive", "jax.interpreters.mlir:register_lowering", "jax.interpreters.mlir:lower_fun"),
)
PALLAS = Feature(
    title="attention by our Pallas kernels on TPU",
    without="blocks of keys in an XLA loop do it",
    apis=(
        "jax.experimental.pallas:pallas_call",
        "jax.experimental.pallas:BlockSpec",
        "jax.experimental.pallas:program_id",
        "jax.experimental.pallas:when",
        "jax.experimental.pallas.tpu:CompilerParams",
        "jax.experimental.pallas.tpu:VMEM",
    ),
)
PALLAS_TRITON = Feature(
    title="the products of experts by our Pallas kernels on CUDA",
    without="XLA multiplies every row by the matrices of all experts",
    apis=(
        "jax.experimental.pallas:pallas_call",
        "jax.experimental.pallas:program_id",
        "jax.experimental.pallas.triton:CompilerParams",
        "jax.experimental.pallas.triton:load",
        "jax.experimental.pallas.triton:store",
    ),
)
PALLAS_MOSAIC = Feature(
    title="the products of experts by our Pallas kernels for Hopper GPUs",
    without="the kernels for Triton do it, which take 1.2 times as long",
    apis=(
        "jax.experimental.pallas:run_scoped",
        *(
            f"jax.experimental.pallas.mosaic_gpu:{name}"
            for name in ("kernel", "nd_loop", "planar_snake", "Barrier", "WGMMAAccumulatorRef", "wgmma", "copy_gmem_to_smem", "copy_smem_to_gmem")
        ),
    ),
)
DESCRIBED_GPU = Feature(
    title="compiling our Pallas kernels for GPUs that are not there (from jaxlib 0.11 on it must be told of them)",
    without="that fails, where JAX wants a device",
    apis=("jax._src.mesh:AbstractDevice", "jax.sharding:AbstractMesh", "jax.sharding:use_abstract_mesh"),
)
BACKENDS = Feature(
    title="asking whether JAX has started its devices",
    without="it is taken as started: join several processes by jax.distributed.initialize() in front of graphacc.compile",
    apis=("jax._src.xla_bridge:backends_are_initialized", "jax._src.xla_bridge:backends"),
)
DIRECT_UPLOADS = Feature(
    title="uploads without JAX's Python code",
    without="every tensor of the batch takes a step some 50 us longer to upload",
    apis=("jaxlib.xla_client:batched_device_put",),
)
MORE_CPU_DEVICES = Feature(
    title="virtual CPU devices beside JAX's own",
    without="as many as the first model asks for are made where JAX has not started, and later models have those",
    apis=("jaxlib.xla_client:make_cpu_client", "jax._src.xla_bridge:_CPU_ENABLE_ASYNC_DISPATCH"),
)
ACCELERATORS = Feature(
    title="looking for accelerators without starting JAX",
    without="JAX's devices are started earlier",
    apis=(
        "jax._src.hardware_utils:has_visible_nvidia_gpu",
        "jax._src.hardware_utils:num_available_amd_gpus",
        "jax._src.hardware_utils:num_available_tpu_chips_and_device_id",
    ),
)
CUDNN_ATTENTION = Feature(
    title="cuDNN's fused attention",
    without="blocks of keys in an XLA loop do it",
    apis=(
        "jax._src.cudnn.fused_attention_stablehlo:_dot_product_attention_fwd_p",
        "jax._src.cudnn.fused_attention_stablehlo:_dot_product_attention_bwd_p",
        "jax._src.cudnn.fused_attention_stablehlo:MaskType.CAUSAL",
        "jax._src.cudnn.fused_attention_stablehlo:AttentionLayout.BNTH",
    ),
)
EXECUTABLES = Feature(
    title="plans of memory",
    without="XLA's own plans are kept, and programs are not kept between runs",
    apis=(
        "jax.stages:Compiled.runtime_executable",
        *(
            f"jax._src.interpreters.pxla:UnloadedMeshExecutable.{field}"
            for field in ("xla_executable", "device_list", "backend", "host_callbacks", "ordered_effects", "unordered_effects", "keepalive", "load")
        ),
    ),
)
PROGRAM_CACHE = Feature(
    title="the cache of compiled programs",
    without="every run compiles its programs again",
    apis=(
        "jax._src.compilation_cache:extract_executable_and_time",
        "jax._src.compilation_cache:decompress_executable",
        "jax._src.compilation_cache:compress_executable",
        "jax._src.compilation_cache:combine_executable_and_time",
        "jax._src.compilation_cache:_cache",
        "jax._src.compilation_cache:_cache_initialized",
        "jax._src.compilation_cache:_cache_checked",
        "jax._src.compilation_cache:_cache_used",
        "jax._src.compiler:_cache_write",
    ),
)
QUICK_LOADING = Feature(
    title="executables without the bodies of kernels",
    without="programs of deep models take several times as long to load",
    apis=("jaxlib.xla_client:XlaComputation.as_hlo_module", "jaxlib._jax:hlo_module_cost_analysis"),
)
PROGRAMS_BY_GRAPH = Feature(
    title="finding kept programs without lowering",
    without="every run lowers its graphs again, to find their programs in the cache",
    apis=("jax._src.config:trace_context", "jax._src.compiler:compile_or_get_cached", "jax:config.values", "jax.stages:Lowered.compiler_ir", "jaxlib.mlir.ir:WalkResult"),
)
SEVERAL_PROCESSES = Feature(
    title="runs of several processes",
    without="starting one is an error",
    apis=("jax._src.distributed:global_state",),
)
SLURM = Feature(
    title="joining the processes of srun",
    without="GRAPHACC_COORDINATOR, GRAPHACC_NUM_PROCESSES and GRAPHACC_PROCESS_ID have to say which they are",
    apis=("jax._src.clusters:SlurmCluster",),
)
CAPTURED_HLO = Feature(
    title='capture="lazy"',
    without="what torch.fx cannot capture is run by PyTorch",
    apis=(
        "jaxlib.xla_client:XlaComputation",
        "jaxlib._jax:mlir.hlo_to_stablehlo",
        "jax._src.interpreters.mlir:make_ir_context",
        "jax._src.interpreters.mlir:merge_mlir_modules",
        "jax._src.interpreters.mlir:TokenSet",
        "jax._src.interpreters.mlir:ir_tree_registry",
        "jax._src.interpreters.mlir:dtype_to_ir_type",
        "jax._src.lib.mlir:ir",
        "jax._src.lib.mlir.dialects:func",
    ),
)
JAX_PROFILER = Feature(
    title="asking whether JAX's profiler runs",
    without="named ranges are made in every step, which costs half a microsecond each",
    apis=("jax.profiler:TraceAnnotation.is_enabled",),
)

FEATURES: dict[str, Feature] = {name: value for name, value in vars().items() if isinstance(value, Feature)}
"""All of them, by the name of their constant."""

_why_off: dict[Feature, str] = {}


def has(feature: Feature) -> bool:
    """Whether a feature is on; says once, in one line, which of its APIs is missing where it is not."""
    if feature in _why_off:
        return False
    absent = _missing_once(feature)
    return switch_off(feature, f"{absent[0]} is missing") if absent else True


def why_not_at_all() -> str | None:
    """Why nothing can be compiled with the versions that are installed; None where it can."""
    why = why_off(CAPTURE)
    return f"graphacc cannot compile with torch {_version('torch')}: {why}. Install a version with which it was tried ({TRIED})" if why else None


def _version(name: str) -> str:
    return importlib.metadata.version(name)


def switch_off(feature: Feature, why: str) -> bool:
    """Do without a feature from now on: False, and one line in the log at the first time."""
    if feature not in _why_off:
        _why_off[feature] = why
        log.warning("graphacc: off: %s (%s; tried with %s): %s", feature.title, why, TRIED, feature.without)
    return False


def switched_off() -> tuple[str, ...]:
    """The features that are known to be off."""
    return tuple(sorted(feature.title for feature in _why_off))


def why_off(feature: Feature) -> str | None:
    """Why a feature is off; None where it is not. Does not log."""
    absent = missing(feature)
    return f"{', '.join(absent)} missing" if absent else _why_off.get(feature)


def missing(feature: Feature) -> list[str]:
    """Those of a feature's APIs that the installed versions lack."""
    return [api for api in feature.apis if not _is_there(api)]


_missing_once = functools.cache(missing)


def _is_there(api: str) -> bool:
    module, _, names = api.partition(":")
    try:
        owner: object = importlib.import_module(module)
    except (ImportError, AttributeError):  # the latter where a module uses on import what is missing elsewhere
        return False
    for name in names.split("."):
        if not hasattr(owner, name):
            return name in getattr(owner, "__dataclass_fields__", ())  # a field without a default is no attribute of its class
        owner = getattr(owner, name)
    return True
