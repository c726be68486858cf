"""Programs: compiled steps give what torch gives on one and on eight devices, donate what they replace, and are cached."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest
import torch
from step_graphs import an_input, an_output, c10d, gather, make_step, sgd_step, split, total
from tolerances import assert_close

from graphacc._compat.jax_ import known_options
from graphacc.errors import GraphAccError, GraphError
from graphacc.graph import Kind
from graphacc.runtime import Program, default_options, make_mesh, select_devices, to_device, to_torch
from graphacc.runtime.compile_cache import CompileCache
from graphacc.runtime.program import FAST_COMPILE
from graphacc.strategy import Strategy

MESHES = [{}, {"dp": 8}, {"fsdp": 8}, {"dp": 2, "fsdp": 4}]


def mesh_of(**sizes):
    strategy = Strategy(**sizes)
    return make_mesh(strategy, select_devices(strategy.num_devices))


def build(sizes, **options):
    mesh = mesh_of(**sizes)
    step = sgd_step(sizes.get("dp", 1), sizes.get("fsdp", 1))
    return Program.build(step, mesh, **{"cache_dir": None, **options}), mesh


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_training_step_gives_what_torch_gives(sizes):
    program, mesh = build(sizes)
    w, x = torch.randn(8, 12), torch.randn(16, 8) * 0.1
    array = to_device(w, program.inputs[0], mesh)
    for _ in range(3):
        array, loss = program(array, to_device(x, program.inputs[1], mesh))
        expected = ((x @ w) ** 2).sum()
        w = w - 0.1 * (2 * x.t() @ (x @ w))
        assert_close(to_torch(loss, program.outputs[1]), expected)
    assert_close(to_torch(array, program.outputs[0]), w)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_replaced_inputs_are_donated_and_the_others_kept(sizes):
    program, mesh = build(sizes)
    w, x = to_device(torch.randn(8, 12), program.inputs[0], mesh), to_device(torch.randn(16, 8), program.inputs[1], mesh)
    w, _ = program(w, x)  # its memory is XLA's own from now on
    before = {shard.data.unsafe_buffer_pointer() for shard in w.addressable_shards}
    new, _ = program(w, x)
    assert w.is_deleted() and not x.is_deleted()
    assert {shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards} == before


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_memory_counts_the_bytes_of_one_device(sizes):
    memory = build(sizes)[0].memory
    shard_bytes, batch_bytes = 8 * 12 * 4 // sizes.get("fsdp", 1), 16 * 8 * 4 // (sizes.get("dp", 1) * sizes.get("fsdp", 1))
    assert memory.argument_bytes == shard_bytes + batch_bytes
    assert memory.alias_bytes == shard_bytes
    assert shard_bytes + 4 <= memory.output_bytes <= shard_bytes + 64
    assert (
        memory.peak_bytes
        == memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes + memory.code_bytes
    )
    assert 0 < memory.temp_bytes < 100_000


def test_cost_and_hlo():
    program, _ = build({"fsdp": 8})
    assert program.cost.flops >= 2 * (2 * 16 // 8 * 8 * 12)
    assert "all-gather" in program.hlo_text() and "reduce-scatter" in program.hlo_text()


def test_an_input_that_nothing_reads_is_donated_too():
    step = make_step(
        lambda old, x: (x + 1,),
        [an_input(Kind.BUFFER, "b", (4,)), an_input(Kind.BATCH, "x", (4,))],
        [an_output(Kind.BUFFER, "b", (4,))],
    )
    mesh = mesh_of()
    program = Program.build(step, mesh, cache_dir=None)
    old = to_device(torch.zeros(4), program.inputs[0], mesh)
    (new,) = program(old, to_device(torch.ones(4), program.inputs[1], mesh))
    assert old.is_deleted()
    assert_close(to_torch(new, program.outputs[0]), torch.full((4,), 2.0))


def test_an_unchanged_input_may_be_returned_twice():
    shards = [split("fsdp", 8)]
    step = make_step(
        lambda p: (p, p),
        [an_input(Kind.PARAM, "p", (10,), shards=shards)],
        [an_output(Kind.PARAM, "p", (10,), shards=shards), an_output(Kind.USER, "0", (10,), shards=shards)],
    )
    mesh = mesh_of(fsdp=8)
    program = Program.build(step, mesh, cache_dir=None)
    values = torch.arange(10.0)
    new, user = program(to_device(values, program.inputs[0], mesh))
    for array, item in zip((new, user), program.outputs):
        assert_close(to_torch(array, item), values)


def test_64_bit_integers_and_floats_stay_64_bit():
    step = make_step(
        lambda i, x: (i * 3, x * 2),
        [an_input(Kind.BATCH, "i", (2,), torch.int64), an_input(Kind.HYPER, "0/lr", (), torch.float64)],
        [an_output(Kind.USER, "0", (2,), torch.int64), an_output(Kind.USER, "1", (), torch.float64)],
    )
    mesh = mesh_of()
    program = Program.build(step, mesh, cache_dir=None)
    i, x = torch.tensor([2**40 + 1, -5]), torch.tensor(1 / 3, dtype=torch.float64)
    got = program(to_device(i, program.inputs[0], mesh), to_device(x, program.inputs[1], mesh))
    assert torch.equal(to_torch(got[0], program.outputs[0]), i * 3)
    assert torch.equal(to_torch(got[1], program.outputs[1]), x * 2)
    assert not jax.config.jax_enable_x64


def test_wrong_tensors_are_refused_with_both_shapes():
    program, mesh = build({"fsdp": 8})
    with pytest.raises(
        GraphError, match=r"batch 'x' is torch.float32\[16, 8\] in the compiled graph, got torch.float32\[15, 8\]"
    ):
        to_device(torch.zeros(15, 8), program.inputs[1], mesh)


def test_fast_compile_gives_the_same_within_tolerance():
    w, x = torch.randn(8, 12), torch.randn(16, 8)
    results = []
    for fast in (False, True):
        program, mesh = build({"fsdp": 8}, fast_compile=fast)
        results.append(
            to_torch(program(to_device(w, program.inputs[0], mesh), to_device(x, program.inputs[1], mesh))[0], program.outputs[0])
        )
    assert_close(*results)


def test_unknown_compiler_options_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        build({}, compiler_options={"xla_no_such_option": True})


def test_fast_compile_changes_options_and_leaves_out_passes():
    usual, fast = default_options(mesh_of()), default_options(mesh_of(), fast_compile=True)
    left_out = usual["xla_disable_hlo_passes"] + ",small-while-loop-hoisting"
    assert fast == usual | known_options(FAST_COMPILE) | {"xla_disable_hlo_passes": left_out}


# ---- memory plans


def mlp_step(ranks: int = 1, *, layers: int = 4, width: int = 256, batch: int = 1024):
    """Gradients of a chain of tanh(h w), the weights updated at the end: enough temporaries to be planned."""
    shards = [split("fsdp", ranks)] if ranks > 1 else []

    def step(x, *weights):
        whole = [gather(w, ranks, "fsdp") for w in weights] if ranks > 1 else list(weights)
        hidden = [x]
        for w in whole:
            hidden.append(torch.tanh(hidden[-1] @ w))
        loss = (hidden[-1] ** 2).sum()
        grads, g = [], 2 * hidden[-1]
        for h, w, out in zip(hidden[-2::-1], whole[::-1], hidden[:0:-1]):
            g = g * (1 - out * out)
            grads.append(h.t() @ g)
            g = g @ w.t()
        grads.reverse()
        if ranks > 1:
            loss = total(loss, "fsdp")
            grads = [c10d.wait_tensor(c10d.reduce_scatter_tensor(grad, "sum", ranks, "fsdp")) for grad in grads]
        return (*(w - 1e-3 * grad for w, grad in zip(weights, grads)), loss)

    names = [f"w{i}" for i in range(layers)]
    inputs = [an_input(Kind.BATCH, "x", (batch, width), shards=shards)]
    inputs += [an_input(Kind.PARAM, name, (width, width), shards=shards, trainable=True) for name in names]
    outputs = [an_output(Kind.PARAM, name, (width, width), shards=shards) for name in names]
    return make_step(step, inputs, [*outputs, an_output(Kind.LOSS, "loss", ())])


def train_mlp(program: Program, mesh, steps: int = 3) -> list[torch.Tensor]:
    """Losses and the last weights."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (to_device(torch.randn(i.shape, generator=generator) / 16, i, mesh) for i in program.inputs)
    losses = []
    for _ in range(steps):
        *weights, loss = program(x, *weights)
        losses.append(to_torch(loss, program.outputs[-1]))
    return losses + [to_torch(w, item) for w, item in zip(weights, program.outputs)]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.default_cases("8")
def test_a_planned_program_needs_less_and_gives_the_same_bits(ranks, tmp_path, caplog):
    caplog.set_level("INFO", logger="graphacc")
    mesh, step = mesh_of(fsdp=ranks), mlp_step(ranks)
    plain = Program.build(step, mesh, cache_dir=None, memory_plan="xla")
    planned, warm = (Program.build(step, mesh, cache_dir=tmp_path, plan_seconds=1.0) for _ in range(2))
    assert plain.plan is None and planned.plan.changed and not planned.from_cache
    assert planned.memory.temp_bytes == planned.plan.temporary_after < planned.plan.temporary_before == plain.memory.temp_bytes
    assert "graphacc: step: temporary memory" in caplog.text and "from the cache" in caplog.text
    assert warm.from_cache and warm.plan.changed and warm.memory == planned.memory
    want = train_mlp(plain, mesh)
    for program in (planned, warm):
        assert all(torch.equal(a, b) for a, b in zip(train_mlp(program, mesh), want, strict=True))


def test_planned_programs_donate_what_they_replace():
    mesh = mesh_of(fsdp=8)
    program = Program.build(mlp_step(8), mesh, cache_dir=None)
    assert program.plan.changed
    x, *weights = (to_device(torch.ones(item.shape), item, mesh) for item in program.inputs)
    *weights, _ = program(x, *weights)  # their memory is XLA's own from now on
    before = {shard.data.unsafe_buffer_pointer() for w in weights for shard in w.addressable_shards}
    *new, _ = program(x, *weights)
    assert all(w.is_deleted() for w in weights) and not x.is_deleted()
    assert {shard.data.unsafe_buffer_pointer() for w in new for shard in w.addressable_shards} == before


def test_a_small_program_keeps_xlas_plan_and_says_so(caplog):
    caplog.set_level("INFO", logger="graphacc")
    program, _ = build({})
    assert not program.plan.changed and "below 1048576" in program.plan.reason
    assert "XLA's plan kept: its" in caplog.text


def test_a_scheduler_that_is_asked_for_is_the_only_one():
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_DEFAULT"}
    program = Program.build(mlp_step(), mesh_of(), cache_dir=None, compiler_options=options, plan_seconds=60.0)
    assert program.plan.schedule == "DEFAULT"


@pytest.mark.parametrize(
    "options, says", [({"memory_plan": "olla"}, "memory_plan='olla' is unknown"), ({"plan_seconds": -1}, "plan_seconds=-1 must be")]
)
def test_wrong_memory_plans_are_refused(options, says):
    with pytest.raises(GraphAccError, match=says):
        build({}, **options)


_TWO_PROCESSES = """
import json, logging, sys
rank, port = int(sys.argv[1]), sys.argv[2]
sys.path[:0] = sys.argv[3:]
logging.basicConfig(level=logging.INFO, format="%(message)s")
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from test_program import Program, mesh_of, mlp_step, train_losses
mesh = mesh_of(fsdp=8)
programs = [Program.build(mlp_step(8), mesh, cache_dir=None, memory_plan=planner) for planner in ("xla", "roam")]
assert programs[0].plan is None and programs[1].plan.changed, programs[1].plan
losses = [train_losses(program, mesh) for program in programs]
assert losses[0] == losses[1], losses
print(json.dumps(losses[1]), flush=True)
"""


def train_losses(program: Program, mesh) -> list[float]:
    """Three steps whose losses every process can read."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (to_device(torch.randn(i.shape, generator=generator) / 16, i, mesh) for i in program.inputs)
    losses = []
    for _ in range(3):
        *weights, loss = program(x, *weights)
        losses.append(float(loss.addressable_shards[0].data))
    return losses


@pytest.mark.matrix  # tests/distributed/test_planned_processes.py has the same with a whole model
def test_several_processes_plan_each_for_itself():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.dirname(os.path.dirname(here)), os.path.dirname(here), here]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _TWO_PROCESSES, str(rank), port, *paths],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=150) for process in started]
    assert all(process.returncode == 0 for process in started), results
    mesh = mesh_of(fsdp=8)
    want = train_losses(Program.build(mlp_step(8), mesh, cache_dir=None), mesh)
    for out, messages in results:
        assert_close(torch.tensor(json.loads(out.splitlines()[-1])), torch.tensor(want))
        assert messages.count("graphacc: step: temporary memory") == 1 and "XLA's plan kept" not in messages


# ---- the compile cache


def test_a_second_build_comes_from_the_cache_and_runs_the_same(tmp_path):
    w, x = torch.randn(8, 12), torch.randn(16, 8)
    results = []
    for expected in (False, True):
        program, mesh = build({"dp": 2, "fsdp": 4}, cache_dir=tmp_path)
        assert program.from_cache is expected
        new, loss = program(to_device(w, program.inputs[0], mesh), to_device(x, program.inputs[1], mesh))
        results.append(
            (
                to_torch(new, program.outputs[0]),
                to_torch(loss, program.outputs[1]),
                program.memory,
                "all-gather" in program.hlo_text(),
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(results[0][:2], results[1][:2]))
    assert results[0][2:] == results[1][2:]


def test_other_options_are_another_entry(tmp_path):
    build({}, cache_dir=tmp_path)
    assert not build({}, cache_dir=tmp_path, fast_compile=True)[0].from_cache


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])], ids=["cut", "empty", "bit"]
)
@pytest.mark.default_cases("bit")
def test_a_damaged_entry_is_compiled_again_and_replaced(tmp_path, damage):
    build({}, cache_dir=tmp_path)
    entry = max(tmp_path.glob("*.xla"), key=lambda path: path.stat().st_size)  # the other one says which graph it is of
    entry.write_bytes(damage(entry.read_bytes()))
    assert not build({}, cache_dir=tmp_path)[0].from_cache
    assert build({}, cache_dir=tmp_path)[0].from_cache


def test_a_cache_that_cannot_be_written_does_not_stop_a_build(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    program, _ = build({}, cache_dir=tmp_path / "file" / "cache")
    assert not program.from_cache and "cannot be" in caplog.text


def test_jaxs_own_settings_and_cache_are_untouched(tmp_path):
    from jax._src import compilation_cache

    names = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
    before = [getattr(compilation_cache, name) for name in names]
    settings = (jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)
    build({}, cache_dir=tmp_path)
    assert [getattr(compilation_cache, name) for name in names] == before
    assert (jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs) == settings
    entries = len(list(tmp_path.iterdir()))
    jax.jit(lambda x: x * 5 + 1)(3.0)
    assert len(list(tmp_path.iterdir())) == entries == 2  # the program, and of which graph it is


def test_the_oldest_entries_go_when_the_cache_is_full(tmp_path):
    cache = CompileCache(tmp_path, limit_bytes=2500)
    for key in "abc":
        cache.put(key, key.encode() * 1000)
        for path in tmp_path.glob("*.xla"):
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**9, path.stat().st_mtime_ns - 10**9))
    assert cache.get("a") is None and cache.get("c") == b"c" * 1000


def test_a_full_cache_is_not_looked_through_for_every_entry(tmp_path, monkeypatch):
    scans, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or scan(path))
    cache = CompileCache(tmp_path, limit_bytes=64_000)
    for key in range(400):
        cache.put(str(key), bytes(500))
        assert sum((tmp_path / name).stat().st_size for name in os.listdir(tmp_path)) <= 65_000
    assert cache.get("399") == bytes(500) and len(scans) < 150


_PROCESS = """
import json, sys
sys.path[:0] = sys.argv[2:]
from step_graphs import sgd_step
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy
program = Program.build(sgd_step(2, 4), make_mesh(Strategy(dp=2, fsdp=4), select_devices(8)), cache_dir=sys.argv[1])
print(json.dumps({"hit": program.from_cache, "seconds": program.compile_seconds}))
"""


@pytest.mark.matrix
def test_another_process_hits_the_cache(tmp_path):
    """Both processes are new: what tests before this one left in JAX's own caches can give the same program in other words, with another key."""
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    arguments = [sys.executable, "-c", _PROCESS, str(tmp_path), here, root]
    for expected in (False, True):
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["hit"] is expected
