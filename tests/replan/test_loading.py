"""Executables without the bodies of kernels: the same program, of which text and cost are those of the whole."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphacc._compat import jax_ as compat
from graphacc.runtime.compile_cache import CompileCache
from graphacc.runtime.replan import compile_and_replan, cpu, loading
from graphacc.runtime.replan.compiling import compile_cached
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.schema import read_schema

LIBRARY = compat.xla_library()


def parsed(serialized: bytes):
    return cpu.parse(read_schema(LIBRARY), open_envelope(serialized).executable)


def lowered() -> jax.stages.Lowered:
    """Products, kernels, sums with functions of their own, and a loop."""

    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w) + jnp.sin(x) - jnp.max(x, axis=0) * x.sum(axis=1, keepdims=True)
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.cos(x @ w) * i, x).sum()

    return jax.jit(jax.value_and_grad(loss)).lower(jnp.ones((32, 32)), jnp.ones((8, 32)))


def results(compiled) -> list[np.ndarray]:
    arguments = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (8, 32))
    return [np.asarray(found) for found in jax.tree.leaves(compiled(*arguments))]


def assert_same(found, expected) -> None:
    assert all(np.array_equal(one, other) for one, other in zip(results(found), results(expected), strict=True))
    assert str(found.memory_analysis()) == str(expected.memory_analysis())


def plain(text: str) -> set[str]:
    """The instructions, without what XLA numbers anew when it reads a module."""
    return {line.partition(", metadata=")[0] for line in text.splitlines() if " = " in line}


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(loading, "MIN_BYTES", 0)


def test_kernels_are_left_out_and_nothing_else(of_any_size):
    compiled = lowered().compile()
    serialized = compat.serialize(compiled)
    quick = loading.quick_to_load(serialized, LIBRARY)
    before, after = parsed(serialized), parsed(quick)
    instructions = [[i for computation in each.hlo_module.hlo_module.computations for i in computation.instructions] for each in (before, after)]
    kernels = [i.name for i in instructions[1] if i.custom_call_target == loading.KERNEL]
    assert len(kernels) > 5 and len(instructions[1]) < 0.7 * len(instructions[0])
    assert {i.name for i in instructions[1]} >= {thunk.info.op_name for thunk in after.thunk_sequence.thunks}
    for field in ("thunk_sequence", "buffer_assignment", "object_files", "compiled_symbols"):
        assert str(getattr(before, field)) == str(getattr(after, field)), field
    loaded = compat.with_executable(compiled, compat.load_executable(quick, compiled))
    assert_same(loaded, compiled)
    module = zlib.decompress(loading.whole_module(quick) or b"")
    assert plain(compat.module_text(module)) == plain(compiled.as_text()) != plain(loaded.as_text())
    cost, expected = compat.module_cost(module, loaded), compiled.cost_analysis()
    assert {name: cost[name] for name in ("flops", "bytes accessed")} == {name: expected[name] for name in ("flops", "bytes accessed")}


def test_what_stays_as_it_is(of_any_size, monkeypatch):
    without_products = compat.serialize(jax.jit(lambda x: jnp.sin(x) + jnp.cos(x)).lower(jnp.ones(64)).compile())
    assert loading.quick_to_load(without_products, LIBRARY) == without_products and loading.whole_module(without_products) is None
    serialized = compat.serialize(lowered().compile())
    assert loading.quick_to_load(serialized[: len(serialized) // 2], LIBRARY) == serialized[: len(serialized) // 2]
    monkeypatch.setattr(loading, "MIN_BYTES", len(serialized) + 1)
    assert loading.quick_to_load(serialized, LIBRARY) == serialized


@pytest.mark.matrix
def test_programs_from_the_cache_and_planned_ones_have_their_modules(of_any_size, tmp_path):
    expected = lowered().compile()
    for _ in range(2):
        jax.clear_caches()
        compiled, found, entry, module = compile_cached(lowered(), {}, CompileCache(tmp_path / "compiled"))
        assert_same(compiled, expected)
        assert entry is not None and (module is not None) is found
    for known in (False, True):
        jax.clear_caches()
        planned = compile_and_replan(lowered(), cache=CompileCache(tmp_path / "planned"), seconds=5.0, min_temporary_bytes=1, tolerance=0.0)
        assert planned.plan.from_cache is known and all(np.array_equal(one, other) for one, other in zip(results(planned.compiled), results(expected), strict=True))
        assert (planned.module is not None) is (known or planned.plan.changed)
        if planned.module is not None:
            assert {re.sub(r"\.\d+", "", line) for line in plain(compat.module_text(zlib.decompress(planned.module)))} == {re.sub(r"\.\d+", "", line) for line in plain(expected.as_text())}
