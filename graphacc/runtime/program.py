"""A StepGraph compiled for a mesh: ahead of time, with donated inputs, from the compile cache where it was compiled before."""

import dataclasses
import functools
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from graphacc._compat.jax_ import (
    can_find_by_graph,
    can_keep_programs,
    can_read_executables,
    known_options,
    module_cost,
    module_text,
    x64,
)
from graphacc.errors import GraphAccError
from graphacc.graph import Input, Output, StepGraph
from graphacc.hlo import HloStep
from graphacc.lowering import lower
from graphacc.ops.chunked import body_of
from graphacc.runtime.compile_cache import CompileCache, default_directory
from graphacc.runtime.distributed import process_index
from graphacc.runtime.hlo_program import spmd_function
from graphacc.runtime.layout import dtype_of, partition_spec, sharding, stored_shape
from graphacc.runtime.lowered_cache import Ahead, Shortcut, digest_of
from graphacc.runtime.replan.compiling import (
    CPU_SCHEDULES,
    SCHEDULE_PREFIX,
    SCHEDULER_OPTION,
    compile_and_replan,
    compile_cached,
    plan_of,
)
from graphacc.runtime.replan.figures import MemoryPlan
from graphacc.runtime.transfer import processes_of, without_data
from graphacc.strategy.axes import SPMD_AXES

log = logging.getLogger("graphacc")

MEMORY_PLANNERS = ("roam", "xla")
"""Who lays out a program's temporaries: XLA, and then the planner of `graphacc.passes.memory`; or XLA alone."""
FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_experimental_ynn_fusion_type": "",
}
"""XLA options of `fast_compile` on CPU: see `default_options`."""
DEFAULT_PLAN_SECONDS = 3.0
CUDA_OPT_IN = "planned CUDA programs of several devices are proved, but none has run yet; GRAPHACC_PLAN_CUDA=1 asks for them"

CompilerOptions = Mapping[str, str | bool | int | float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, of the executable that runs."""

    argument_bytes: int  # inputs, with their padding
    output_bytes: int  # outputs, those that overwrite an input included
    alias_bytes: int  # outputs that overwrite an input
    temp_bytes: int  # everything that lives only while the program runs
    code_bytes: int  # machine code; 0 where XLA does not say (CPU)

    @property
    def peak_bytes(self) -> int:
        """What has to fit while the program runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """XLA's count of the work of one device."""

    flops: float
    bytes_accessed: float


class Program:
    """A compiled StepGraph: a function from one array per input to one array per output.

    Inputs that an output replaces are donated: their arrays are deleted by the call, and the output takes their memory.
    """

    def __init__(
        self,
        step: StepGraph | HloStep,
        mesh: Mesh,
        compiled: jax.stages.Compiled | None,
        *,
        name: str,
        lower_seconds: float,
        compile_seconds: float,
        from_cache: bool,
        plan: MemoryPlan | None = None,
        module: bytes | None = None,
    ):
        self.name = name
        self.mesh = mesh
        self.inputs: tuple[Input, ...] = step.inputs
        self.outputs: tuple[Output, ...] = step.outputs
        self.lower_seconds = lower_seconds  # from the graph to StableHLO
        self.compile_seconds = compile_seconds  # XLA and the memory plan, or the cache
        self.from_cache = from_cache
        self.plan = plan  # of the temporaries; None where XLA's was asked for
        self._compiled = compiled
        self._module = module  # as XLA made it, compressed; None: the executable has it
        self._is_checked = False  # its results have the forms of its outputs
        self._keys = _output_keys(step)

    @classmethod
    def build(
        cls,
        step: StepGraph | HloStep,
        mesh: Mesh,
        *,
        compiler_options: CompilerOptions | None = None,
        fast_compile: bool = False,
        cache_dir: str | os.PathLike | None = "default",
        name: str = "step",
        memory_plan: str = "roam",
        plan_seconds: float = DEFAULT_PLAN_SECONDS,
        ahead: Ahead | None = None,
    ) -> "Program":
        """Lower and compile a graph.

        Args:
            step: local along the mesh axes dp and fsdp, global along the others.
            mesh: its axes have the sizes that the graph's shards name.
            compiler_options: XLA options by name, over the defaults of the platform (see `default_options`).
            fast_compile: XLA takes a quarter of the time; steps take up to 1.8 times as long.
            cache_dir: directory of the persistent compile cache; "default" is the user's cache directory, None uses none.
            name: of the program, in profiles and dumps.
            memory_plan: "roam" plans the temporaries again after XLA, on CPU: order of operations and addresses, with the same
                bits as results; where that is not certain to be right, or not worth it, XLA's plan stays. "xla" leaves it.
            plan_seconds: budget for planning, and for compiling with XLA's other scheduler where the budget covers that.
            ahead: may have loaded the program already, and learns which one it is.

        Raises:
            GraphAccError: `memory_plan` or `plan_seconds` is no such choice.
            LoweringError: an operator has no lowering, or lowers to another shape or dtype than the graph says.
        """
        check_memory_plan(memory_plan, plan_seconds)
        options = default_options(mesh, fast_compile=fast_compile, spmd=isinstance(step, HloStep), bucketed=has_buckets(step), chunked=has_chunks(step)) | dict(compiler_options or {})
        if process_index() not in processes_of(mesh.devices.flat):
            return RemoteProgram(step, mesh, options, name)
        cache = _cache(cache_dir)
        planned, schedules = memory_plan == "roam" and _can_plan(mesh), _schedules(compiler_options or {}, mesh)
        start = time.perf_counter()
        with x64():
            shortcut = _shortcut(step, mesh, name, options, cache, f"{plan_seconds} {' '.join(schedules)}" if planned else "")
            known = None if shortcut is None else shortcut.load(ahead)
            plan = plan_of(known.temp_bytes, known.note) if known is not None and planned else None
            if known is not None and (plan is not None or not planned):
                middle, compiled, from_cache, module = start, known.compiled, True, known.module
            else:
                lowered = _jit(step, mesh, name).lower(*(_abstract(item, mesh) for item in step.inputs))
                middle = time.perf_counter()
                if planned:
                    found = compile_and_replan(
                        lowered,
                        compiler_options=options,
                        schedules=schedules,
                        shared=len(processes_of(mesh.devices.flat)) > 1,
                        cache=cache,
                        seconds=float(plan_seconds),
                    )
                    compiled, plan, from_cache, entry, module = found.compiled, found.plan, found.plan.from_cache, found.entry, found.module
                else:
                    compiled, from_cache, entry, module = compile_cached(lowered, options, cache)
                if shortcut is not None and entry is not None:
                    shortcut.keep(entry, lowered)
            if ahead is not None and shortcut is not None and shortcut.key is not None:
                ahead.note(shortcut.key, mesh)
            if plan is not None:
                log.info("graphacc: %s: %s", name, plan.summary())
        return cls(
            step,
            mesh,
            compiled,
            name=name,
            lower_seconds=middle - start,
            compile_seconds=time.perf_counter() - middle,
            from_cache=from_cache,
            plan=plan,
            module=module,
        )

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Start the program; returns without waiting for its results.

        Args:
            arrays: one per input, in its padded shape and sharding (see `to_device`).

        Raises:
            TypeError, ValueError: by JAX, for an array of another shape, dtype or sharding.
        """
        results = self._compiled(*arrays)
        found = tuple(map(results.__getitem__, self._keys))
        if not self._is_checked:
            for item, array in zip(self.outputs, found):
                expected = stored_shape(item), dtype_of(item)
                assert (array.shape, array.dtype) == expected, f"{item.kind.value} {item.target!r}: {array.shape} {array.dtype} is not {expected}"
            self._is_checked = True
        return found

    @property
    def _executable(self) -> jax.stages.Compiled:
        return self._compiled

    @functools.cached_property
    def memory(self) -> Memory:
        stats = self._executable.memory_analysis()
        return Memory(
            argument_bytes=stats.argument_size_in_bytes,
            output_bytes=stats.output_size_in_bytes,
            alias_bytes=stats.alias_size_in_bytes,
            temp_bytes=stats.temp_size_in_bytes,
            code_bytes=stats.generated_code_size_in_bytes,
        )

    @property
    def cost(self) -> Cost:
        """As XLA counts it.

        Raises:
            GraphAccError: the program is compiled for devices that are not here.
        """
        counts = self._executable.cost_analysis() if self._module is None else module_cost(zlib.decompress(self._module), self._executable)
        if counts is None:
            raise GraphAccError(f"XLA counts no operations of {self.name}, which is compiled for devices that are not here: graphacc.costs.work counts those of its graph")
        return Cost(flops=counts.get("flops", 0.0), bytes_accessed=counts.get("bytes accessed", 0.0))

    def hlo_text(self) -> str:
        """The program as XLA optimised it."""
        return self._executable.as_text() if self._module is None else module_text(zlib.decompress(self._module))


class RemoteProgram(Program):
    """A program on devices of other processes: calls give arrays without data; it is compiled only for its figures and text."""

    def __init__(self, step: StepGraph | HloStep, mesh: Mesh, options: CompilerOptions, name: str):
        super().__init__(step, mesh, None, name=name, lower_seconds=0.0, compile_seconds=0.0, from_cache=False)
        self._step = step
        self._options = options

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(without_data(item, self.mesh) for item in self.outputs)

    @functools.cached_property
    def _executable(self) -> jax.stages.Compiled:
        with x64():
            lowered = _jit(self._step, self.mesh, self.name).lower(*(_abstract(item, self.mesh) for item in self.inputs))
            return lowered.compile(compiler_options=dict(self._options))


def has_buckets(step: StepGraph | HloStep) -> bool:
    """Whether a pass has joined collectives of this program (`graphacc.passes.communication`)."""
    return isinstance(step, StepGraph) and any(node.meta["move"].tensors > 1 for node in step.graph.nodes if "move" in node.meta)


def has_chunks(step: StepGraph | HloStep) -> bool:
    """Whether a part of this program is carried out chunk by chunk (`Strategy.loss_chunks`)."""
    return isinstance(step, StepGraph) and any(body_of(node) is not None for node in step.graph.nodes)


def default_options(mesh: Mesh, *, fast_compile: bool = False, spmd: bool = False, bucketed: bool = False, chunked: bool = False) -> dict[str, str | bool | int]:
    """The XLA options for a mesh's platform, each with its reason here.

    CUDA (jaxlib 0.10.2, GPT-2 12 x 768 under fsdp=8 compiled for H100):

    - No excess precision: values of bf16 operators are rounded, as PyTorch rounds them. Otherwise XLA drops pairs of conversions, and stores in fp32 what the backward reads
      of them, such as the tanh of a GELU: GPT-2 of 124M parameters, 16 x 1024 tokens on an H200, peak 12.47 -> 11.26 GB, 35.6 -> 34.7 ms. A Llama is as before.
    - The latency-hiding scheduler is on by default: asking for it gives the same schedule.
    - No combining of gathers and scatters in a program that has buckets (`bucketed`). XLA's combiner counts a scatter by its result and joins
      up to 30 MB, so that with 8 ranks it joins eight buckets, whose whole gradients wait for each other: 2 scatters, which keep 249 MB each.
      Combined gathers would undo what `Strategy.prefetch` bounds. All-reduces are left to the combiner.
    - All permutes that may be on their way together are one message: around a ring the keys and the gradients of other keys travel while one kernel runs, and one message is on its
      way at a time. Otherwise the gradients' are waited for.
    - A larger `xla_gpu_experimental_parallel_collective_overlap_limit`, and starting collectives as early as possible, change nothing that counts:
      24 and 25 of 46 gathers exposed, not 25 (6 layers, without buckets).

    CPU (jaxlib 0.10.2, GPT-2 steps with AdamW on 2 cores, interleaved runs):

    - The memory-optimised scheduler: temporaries 540 -> 458 MB (4 layers of 512, one device), 72 -> 66 MB (of 256, eight
      devices), 5.7 -> 5.4 MB (8 layers of 64, eight devices), at the same speed (ratios of the fastest steps 0.93 to 1.09). The
      default scheduler adds concurrency that these programs do not gain from.
    - Copies of donated inputs are decided by regions (``xla_cpu_copy_insertion_use_region_analysis``), for which XLA orders what may be
      ordered. Without, it copies every weight in every step and keeps the copy from its first use to its update, as nothing in the graph says
      that a gradient's product reads a weight before the update overwrites it: temporaries 9.9 -> 6.0 MB and 0.97 of the time (GPT-2, 4 layers
      of 256, dp=8), 11.0 -> 7.2 MB and 0.87 (Llama), 9.3 -> 7.0 MB (BERT). On one device, where activations decide, 46.3 -> 47.4 and 56.7 -> 55.7 MB,
      at the same speed. Not in a program with chunks (`chunked`), in whose loop a chunk's gradient would not overwrite its logits any more: 12 -> 20 MB.
    - Not oneDNN's dot fusions (``xla_cpu_use_onednn`` with ``xla_cpu_experimental_onednn_fusion_type``): 0.95 of the time on
      one device with hidden size 512, but 1.8 times on eight devices with small matrices, and ``2 * x.t() @ y`` with x [16, 8]
      and y [16, 12] kills the process ("partition compile failed", illegal instruction). `compiler_options` can ask for them.
    - Fast-math, the other scheduler, XNNPACK off and fewer codegen splits change nothing.
    - No combining of all-reduces: XLA joins all of a step into one, so that all whole gradients wait for it together. One each, and
      an update runs as soon as its gradient is there: temporaries 29.7 -> 17.0 MB and 0.79 of the time (GPT-2, 4 layers of 256, dp=8).
      Between processes a collective costs a message, however small it is, and the combining stays; so it does for `spmd`, programs whose
      collectives are XLA's own, which reduces some gradients in several parts.
    - `fast_compile` is optimisation level 0, XLA's older emitters of fused loops, one LLVM module, no fusions of YNNPACK: 0.9 instead
      of 3.5 s of CPU time (GPT-2 of the tests on fsdp=8, 4,400 HLO instructions), 0.9 instead of 5.2 s (Qwen3-MoE on one device);
      level 0 alone takes 1.8 and 2.5 s. Steps take 1.06 and 1.73 times as long, results within 1e-5.
    """
    platform = mesh.devices.flat[0].platform
    options: dict[str, str | bool | int]
    if platform in ("cuda", "gpu", "rocm"):
        options = {"xla_allow_excess_precision": False, "xla_gpu_collective_permute_combine_threshold_bytes": 1 << 40}
        if bucketed:
            options |= {f"xla_gpu_{kind}_combine_threshold_bytes": 1 for kind in ("all_gather", "reduce_scatter")}
        return known_options(options)
    if platform != "cpu":
        return {}
    options = {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_cpu_copy_insertion_use_region_analysis": not chunked,
    }
    without = []
    if len(processes_of(mesh.devices.flat)) == 1 and not spmd:
        without.append("cpu-all-reduce-combiner")
    if fast_compile:
        options |= FAST_COMPILE
        without.append("small-while-loop-hoisting")  # without the emitters it makes kernels of loops, of which no plan can be proved
    if without:
        options["xla_disable_hlo_passes"] = ",".join(without)
    return known_options(options)


def check_memory_plan(memory_plan: str, plan_seconds: float) -> None:
    """Raise GraphAccError where a program cannot be built with these choices."""
    if memory_plan not in MEMORY_PLANNERS:
        raise GraphAccError(f"memory_plan={memory_plan!r} is unknown: choose one of {', '.join(map(repr, MEMORY_PLANNERS))}")
    if isinstance(plan_seconds, bool) or not isinstance(plan_seconds, (int, float)) or not 0 <= plan_seconds < math.inf:
        raise GraphAccError(f'plan_seconds={plan_seconds!r} must be a number, at least 0; memory_plan="xla" plans nothing')


def _can_plan(mesh: Mesh) -> bool:
    """Whether programs on this mesh can be planned; if not, XLA's plan is kept, and the reason is logged once."""
    if not can_read_executables():
        return False
    platform, asked = mesh.devices.flat[0].platform, mesh.devices.size == 1 or os.environ.get("GRAPHACC_PLAN_CUDA") == "1"
    if platform == "gpu" and asked and len(processes_of(mesh.devices.flat)) > 1:
        _log_once("that processes with plans of their own order their collectives alike is known of CPU programs alone")
        return False
    if platform == "cpu" or (platform == "gpu" and asked):
        return True
    _log_once(CUDA_OPT_IN if platform == "gpu" else f"planning of executables for {platform} is not supported")
    return False


@functools.cache
def _log_once(reason: str) -> None:
    log.info("graphacc: XLA's memory plan is kept: %s", reason)


def _schedules(compiler_options: CompilerOptions, mesh: Mesh) -> tuple[str, ...]:
    """XLA:CPU's schedules to try: the one that is asked for, or all; XLA:CUDA has only its own, which has no name."""
    if mesh.devices.flat[0].platform != "cpu":
        return ("",)
    asked = compiler_options.get(SCHEDULER_OPTION)
    return CPU_SCHEDULES if asked is None else (str(asked).removeprefix(SCHEDULE_PREFIX),)


def _cache(cache_dir: str | os.PathLike | None) -> CompileCache | None:
    if cache_dir is None or not can_keep_programs():
        return None
    return CompileCache(default_directory() if cache_dir == "default" else cache_dir)


def _jit(step: StepGraph | HloStep, mesh: Mesh, name: str):
    return _jitted(spmd_function(step, mesh) if isinstance(step, HloStep) else _local(lower(step), step, mesh), step, mesh, name)


def _jitted(function: Callable[..., Sequence[jax.Array]], step: StepGraph | HloStep, mesh: Mesh, name: str):
    """`function`, from one array per input to one per output, with the layouts and donations of a step."""
    keys = _output_keys(step)

    def keyed(*arrays: jax.Array) -> dict[int, jax.Array]:
        return dict(zip(keys, function(*arrays), strict=True))

    keyed.__name__ = name
    return jax.jit(
        keyed,
        donate_argnums=tuple(step.donations().values()),
        in_shardings=tuple(sharding(item, mesh) for item in step.inputs),
        out_shardings=dict(zip(keys, (sharding(item, mesh) for item in step.outputs), strict=True)),
        keep_unused=True,  # every input is donated and counted, whether XLA reads it or not
    )


def _shortcut(step: StepGraph | HloStep, mesh: Mesh, name: str, options: CompilerOptions, cache: CompileCache | None, variant: str) -> Shortcut | None:
    """Where the program of a graph is noted in the cache; None where it cannot be told by the graph."""
    alone = len(processes_of(mesh.devices.flat)) == 1
    digest = digest_of(step, mesh) if cache is not None and alone and isinstance(step, StepGraph) and can_find_by_graph() else None
    if cache is None or digest is None:
        return None
    donated = step.donations()

    def stub(*arrays: jax.Array) -> list[jax.Array]:
        return [arrays[donated[i]] if i in donated else jnp.zeros(stored_shape(item), dtype_of(item)) for i, item in enumerate(step.outputs)]

    lowered = _jitted(stub, step, mesh, name).lower(*(_abstract(item, mesh) for item in step.inputs))
    return Shortcut(cache, digest, lowered, mesh, options, variant)


def look_ahead(cache_dir: str | os.PathLike | None, looks: object, mesh: Mesh) -> Ahead | None:
    """Begin to load what an earlier run that looked like this one has used, see `Ahead`; None where programs are not found by their graphs."""
    cache = _cache(cache_dir)
    alone = len(processes_of(mesh.devices.flat)) == 1
    return Ahead(cache, looks, mesh) if cache is not None and alone and can_find_by_graph() else None


def _output_keys(step: StepGraph | HloStep) -> tuple[int, ...]:
    """A key per output: the number of the input that it replaces; the others come behind all inputs.

    JAX flattens a dict by its keys, and gives the memory of donated inputs, in their order, to the outputs of their shape. So each new
    value gets the memory of its old one; in any other order XLA copies old values aside and new ones into place.
    """
    donated = step.donations()
    return tuple(donated.get(i, len(step.inputs) + i) for i in range(len(step.outputs)))


def _local(function: Callable, step: StepGraph, mesh: Mesh) -> Callable:
    """The function on global arrays that runs `function` on every device's part along the manual axes."""
    axes = {axis for axis in SPMD_AXES if axis in mesh.shape}
    if mesh.size == 1 or not axes:
        return lambda *arrays: function(*arrays)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(partition_spec(item) for item in step.inputs),
        out_specs=tuple(partition_spec(item) for item in step.outputs),
        axis_names=axes,
        check_vma=False,
    )


def _abstract(item: Input, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stored_shape(item), dtype_of(item), sharding=sharding(item, mesh))
