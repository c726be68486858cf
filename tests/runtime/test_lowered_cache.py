"""Programs that are found by their graphs: the same program without lowering, and another digest for whatever lowering reads."""

import concurrent.futures
import dataclasses
import threading

import jax
import pytest
import torch
from step_graphs import an_input, an_output, make_step, sgd_step
from test_program import mesh_of, mlp_step

import graphacc.lowering
from graphacc._compat import jax_ as compat
from graphacc._compat import probes
from graphacc._compat.torch_ import patched
from graphacc.graph import Kind, StepGraph
from graphacc.runtime import Program, compile_cache, lowered_cache, to_device, to_torch
from graphacc.runtime import program as program_module
from graphacc.runtime.lowered_cache import digest_of


def ran(program: Program, mesh) -> list[torch.Tensor]:
    """The results on fixed inputs."""
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(item.shape, generator=generator) for item in program.inputs]
    arrays = [to_device(value, item, mesh) for value, item in zip(values, program.inputs)]
    results = program(*arrays)
    assert [array.is_deleted() for array in arrays] == [item.kind is Kind.PARAM for item in program.inputs], "parameters are donated"
    return [to_torch(array, item) for array, item in zip(results, program.outputs)]


@pytest.fixture
def lowerings(monkeypatch):
    """The steps that are lowered."""
    found: list[StepGraph] = []
    lower = program_module.lower
    monkeypatch.setattr(program_module, "lower", lambda step: found.append(step) or lower(step))
    return found


@pytest.mark.parametrize("memory_plan", ["roam", "xla"])
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.default_cases("8-roam", "1-xla")
def test_a_known_graph_is_not_lowered_again(ranks, memory_plan, tmp_path, lowerings):
    mesh = mesh_of(fsdp=ranks)
    first = Program.build(mlp_step(ranks), mesh, cache_dir=tmp_path, memory_plan=memory_plan, plan_seconds=1.0)
    assert len(lowerings) == 1 and not first.from_cache
    second = Program.build(mlp_step(ranks), mesh, cache_dir=tmp_path, memory_plan=memory_plan, plan_seconds=1.0)
    assert len(lowerings) == 1 and second.from_cache
    assert second.memory == first.memory and (second.inputs, second.outputs) == (first.inputs, first.outputs)
    if first.plan is not None:
        assert first.plan.changed and second.plan == dataclasses.replace(first.plan, from_cache=True)
    for found, expected in zip(ran(second, mesh), ran(first, mesh), strict=True):
        assert torch.equal(found, expected)


def test_other_options_are_other_programs(tmp_path, lowerings):
    builds = [{}, {"plan_seconds": 1.0}, {"memory_plan": "xla"}, {"fast_compile": True}, {"compiler_options": {"xla_cpu_enable_fast_math": True}}]
    for options in builds:
        Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path, **options)
    assert len(lowerings) == len(builds)
    Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path, name="another")
    Program.build(sgd_step(1, 1), mesh_of(), cache_dir=None)
    assert len(lowerings) == len(builds) + 2


def changed_node(step: StepGraph, **changes) -> StepGraph:
    node = next(node for node in step.graph.nodes if node.target is torch.ops.aten.mm.default)
    node.meta.update(changes)
    return step


def transposed(step: StepGraph) -> StepGraph:
    return changed_node(step, val=next(node for node in step.graph.nodes if node.target is torch.ops.aten.mm.default).meta["val"].t().contiguous().t())


STEPS = {
    "a constant": lambda: sgd_step(1, 1, learning_rate=0.2),
    "a constant's type": lambda: sgd_step(1, 1, learning_rate=1),
    "a shape": lambda: sgd_step(1, 1, batch=32),
    "strides of a value": lambda: transposed(sgd_step(1, 1)),
    "the module of a call": lambda: changed_node(sgd_step(1, 1), module_path="layer"),
    "shards": lambda: sgd_step(2, 4),
    "another signature": lambda: StepGraph(sgd_step(1, 1).graph, tuple(dataclasses.replace(item, kind=Kind.BATCH) for item in sgd_step(1, 1).inputs), sgd_step(1, 1).outputs),
}


def test_graphs_have_digests_of_their_own():
    mesh = mesh_of()
    found = {name: digest_of(make(), mesh) for name, make in STEPS.items()}
    found["as it is"] = digest_of(sgd_step(1, 1), mesh)
    found["another mesh"] = digest_of(sgd_step(1, 1), mesh_of(dp=2))
    assert None not in found.values() and len(set(found.values())) == len(found), found
    assert digest_of(sgd_step(1, 1), mesh) == found["as it is"]


def test_what_lowering_reads_besides_the_graph(monkeypatch):
    step, mesh = sgd_step(1, 1), mesh_of()
    found = [digest_of(step, mesh)]
    torch.set_float32_matmul_precision("high")
    try:
        found.append(digest_of(step, mesh))
    finally:
        torch.set_float32_matmul_precision("highest")
    with jax.default_matmul_precision("bfloat16"):
        found.append(digest_of(step, mesh))
    for name in ("GRAPHACC_ISA", "XLA_FLAGS", "JAX_SOMETHING"):
        with monkeypatch.context() as context:
            context.setenv(name, "x")
            found.append(digest_of(step, mesh))
    with patched(probes, _why_off={probes.PALLAS: "for a test"}):
        found.append(digest_of(step, mesh))
    with patched(lowered_cache, _sources=lambda: ("another version",)):
        found.append(digest_of(step, mesh))
    assert None not in found and len(set(found)) == len(found)
    assert digest_of(step, mesh) == found[0]


def test_sources_are_those_that_lowering_imports():
    """A module of ours that lowering imports is in the digest of sources, also where it is imported later."""
    folders = {"lowering", "ops", "kernels", "strategy", "_compat", "runtime"}
    import test_structure

    assert test_structure.MAY_IMPORT["lowering"] - folders == {"errors", "graph"}


def test_lowering_reads_of_nodes_what_the_digest_holds():
    read: set[str] = set()

    class Meta(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

    step = sgd_step(1, 1)
    for node in step.graph.nodes:
        node.meta = Meta(node.meta)
    jax.jit(graphacc.lowering.lower(step)).lower(*(jax.ShapeDtypeStruct(item.shape, "float32") for item in step.inputs))
    assert read == {"val", "module_path"}


def test_graphs_that_cannot_be_told_are_lowered(tmp_path, lowerings):
    @torch.library.custom_op("graphacc_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    graphacc.lowering.register("graphacc_test.doubled.default")(lambda ctx, x: x * 2)
    step = make_step(lambda x: (torch.ops.graphacc_test.doubled(x),), [an_input(Kind.BATCH, "x", (4,))], [an_output(Kind.USER, "0", (4,))])
    assert digest_of(step, mesh_of()) is None
    for _ in range(2):
        assert torch.equal(ran(Program.build(step, mesh_of(), cache_dir=tmp_path), mesh_of())[0], 2 * torch.randn(4, generator=torch.Generator().manual_seed(5)))
    assert len(lowerings) == 2
    odd = sgd_step(1, 1)
    next(iter(reversed(odd.graph.nodes))).prev.kwargs = {"scale": object()}
    assert digest_of(odd, mesh_of()) is None


def test_programs_that_call_other_libraries_are_lowered(tmp_path, lowerings):
    step = make_step(lambda x: (torch.linalg.cholesky_ex(x @ x.t() + torch.eye(4))[0],), [an_input(Kind.BATCH, "x", (4, 4))], [an_output(Kind.USER, "0", (4, 4))])
    results = [ran(Program.build(step, mesh_of(), cache_dir=tmp_path), mesh_of())[0] for _ in range(2)]
    assert len(lowerings) == 2 and torch.equal(*results)


def break_content(path, change) -> None:
    path.write_bytes(compile_cache._pack(change(compile_cache._unpack(path.read_bytes()))))


def half_an_executable(content: bytes) -> bytes:
    note, _, entry = content.partition(b"\n")
    executable = compat.cached_executable(entry)
    return note + b"\n" + compat.cache_entry(executable[: len(executable) // 2], 0.0)


DAMAGES = {
    "a note that is none": (0, lambda path: break_content(path, lambda content: b"[]")),
    "a note of nothing": (0, lambda path: break_content(path, lambda content: b'{"entry": "no such one", "calls": []}')),
    "calls that we do not have": (0, lambda path: break_content(path, lambda content: content.replace(b"[]", b'["gacc_no_such"]'))),
    "a note that is cut": (0, lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "a program that is gone": (1, lambda path: path.unlink()),
    "a program that is cut": (1, lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "half an executable": (1, lambda path: break_content(path, half_an_executable)),
}


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.default_cases("a note that is none", "a note that is cut", "half an executable")
def test_damage_is_noticed(name, tmp_path, lowerings):
    expected = ran(Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path), mesh_of())
    which, damage = DAMAGES[name]
    damage(sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_size)[which])
    found = ran(Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path), mesh_of())
    assert len(lowerings) == 2 and all(map(torch.equal, found, expected))
    found = ran(Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path), mesh_of())
    assert len(lowerings) == 2 and all(map(torch.equal, found, expected)), "it was mended"


@pytest.fixture
def loads(monkeypatch):
    """The threads in which executables are loaded."""
    found: list[str] = []
    load = compat.load_executable_on
    monkeypatch.setattr(compat, "load_executable_on", lambda *given: found.append(threading.current_thread().name) or load(*given))
    return found


def built_ahead(step, tmp_path, looks="a run", ranks=1, **options) -> Program:
    mesh = mesh_of(fsdp=ranks)
    return Program.build(step, mesh, cache_dir=tmp_path, ahead=program_module.look_ahead(tmp_path, looks, mesh), **options)


@pytest.mark.parametrize(("ranks", "memory_plan"), [(8, "roam"), (1, "xla")])
def test_what_the_last_run_has_used_is_loaded_ahead(ranks, memory_plan, tmp_path, lowerings, loads):
    options = {"ranks": ranks, "memory_plan": memory_plan, "plan_seconds": 1.0}
    first = built_ahead(mlp_step(ranks), tmp_path, **options)
    loads.clear()
    second = built_ahead(mlp_step(ranks), tmp_path, **options)
    assert len(lowerings) == 1 and second.from_cache and len(loads) == 1 and loads[0].startswith("graphacc-ahead")
    for found, expected in zip(ran(second, mesh_of(fsdp=ranks)), ran(first, mesh_of(fsdp=ranks)), strict=True):
        assert torch.equal(found, expected)


def test_a_wrong_guess_changes_nothing(tmp_path, lowerings, loads):
    """Another program of a run that looks the same, which the next such run then loads ahead."""
    built_ahead(mlp_step(1), tmp_path)
    expected = ran(Program.build(sgd_step(1, 1), mesh_of(), cache_dir=None), mesh_of())
    for number in range(2):
        found = ran(built_ahead(sgd_step(1, 1), tmp_path), mesh_of())
        assert len(lowerings) == 3 and all(map(torch.equal, found, expected)), number
    loads.clear()
    built_ahead(sgd_step(1, 1), tmp_path, looks="another run")
    assert [name.startswith("graphacc-ahead") for name in loads] == [False], "nothing is known of it"


@pytest.fixture
def trials(monkeypatch):
    """The programs that run on zeros: their number of inputs, and the thread."""
    found: list[tuple[int, str]] = []
    run = compat.run_on_zeros

    def noted(executable, forms, device):
        run(executable, forms, device)
        found.append((len(forms), threading.current_thread().name.partition("_")[0]))

    monkeypatch.setattr(compat, "run_on_zeros", noted)
    return found


def waited_for(ahead: lowered_cache.Ahead) -> lowered_cache.Ahead:
    """What it has begun is done: behind this nothing is cancelled."""
    concurrent.futures.wait([*ahead._loads.values(), *ahead._trials])
    return ahead


def test_a_program_that_is_loaded_ahead_runs_on_zeros_first(tmp_path, trials):
    expected = ran(built_ahead(sgd_step(1, 1), tmp_path), mesh_of())
    assert not trials, "nothing is known yet"
    ahead = waited_for(program_module.look_ahead(tmp_path, "a run", mesh_of()))
    assert trials == [(len(sgd_step(1, 1).inputs), "graphacc-ahead")]
    found = ran(Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path, ahead=ahead), mesh_of())
    assert all(map(torch.equal, found, expected)) and len(trials) == 1


def test_a_program_that_fails_on_zeros_is_loaded_all_the_same(tmp_path, monkeypatch, lowerings, loads):
    def fail(*given):
        raise RuntimeError("a row of zeros")

    expected = ran(built_ahead(sgd_step(1, 1), tmp_path), mesh_of())
    loads.clear()
    monkeypatch.setattr(compat, "run_on_zeros", fail)
    ahead = waited_for(program_module.look_ahead(tmp_path, "a run", mesh_of()))
    found = ran(Program.build(sgd_step(1, 1), mesh_of(), cache_dir=tmp_path, ahead=ahead), mesh_of())
    assert all(map(torch.equal, found, expected)) and len(lowerings) == 1 and len(loads) == 1


def gcd_step() -> StepGraph:
    """A program with a loop that ends when the values say so."""
    return make_step(torch.gcd, [an_input(Kind.BATCH, name, (4,), torch.int64) for name in "xy"], [an_output(Kind.USER, "0", (4,), torch.int64)])


@pytest.mark.parametrize("name", ["a loop", "several devices", "a large program"])
def test_programs_that_do_not_run_on_zeros(name, tmp_path, trials, loads, monkeypatch):
    step, ranks = {"a loop": (gcd_step(), 1), "several devices": (mlp_step(8), 8), "a large program": (sgd_step(1, 1), 1)}[name]
    if name == "a large program":
        monkeypatch.setattr(lowered_cache, "MAX_TRIAL_BYTES", 4 * 16 * 8)
    built_ahead(step, tmp_path, ranks=ranks, memory_plan="xla")
    loads.clear()
    waited_for(program_module.look_ahead(tmp_path, "a run", mesh_of(fsdp=ranks)))
    assert len(loads) == 1 and not trials


def test_what_a_program_has_in_it():
    x = jax.ShapeDtypeStruct((4,), "float32")

    def called(has_effect):
        return lambda x: jax.ffi.ffi_call("some_call", x, has_side_effect=has_effect)(x)

    cases = [
        (lambda x: x + 1, set(), True),
        (lambda x: jax.lax.while_loop(lambda y: (y > 0).any(), lambda y: y - 1, x), set(), False),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y - 1, x), set(), False),
        (called(False), {"some_call"}, True),
        (called(True), {"some_call"}, False),
    ]
    for function, calls, runs in cases:
        assert compat.contents(jax.jit(function).lower(x)) == compat.Contents(frozenset(calls), runs)


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.default_cases("a note that is none", "half an executable")
def test_damage_is_noticed_ahead(name, tmp_path, lowerings):
    expected = ran(built_ahead(sgd_step(1, 1), tmp_path), mesh_of())
    notes = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    ahead, note = sorted(notes[:2], key=lambda path: b"calls" in path.read_bytes())
    which, damage = DAMAGES[name]
    damage(note if which == 0 else notes[2])
    for damaged in (b"{}", b"[1]", b"no list", b"[[\"key\", []]]", b"[[\"key\", [7]]]"):
        found = ran(built_ahead(sgd_step(1, 1), tmp_path), mesh_of())
        assert len(lowerings) == 2 and all(map(torch.equal, found, expected))
        break_content(ahead, lambda content, damaged=damaged: damaged)
