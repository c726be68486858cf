"""Compiled programs for tests: built once, each with a reason to be here."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphacc._compat import jax_ as compat
from graphacc.lowering.fence import computed_once
from graphacc.runtime.replan.figures import MemoryPlan

NEWER = jax.__version_info__ >= (0, 11)
"""XLA writes and plans programs in other ways than those that these tests look for (tried with JAX 0.12.0.1)."""


def normal(seed: int, *shape: int) -> jax.Array:
    """float32 from a seed."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


def training_step():
    """An MLP's step with donated parameters: outputs in the memory of inputs."""
    sizes = (64, 96, 80, 48)
    params = [normal(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(sizes))]

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, [w - 0.1 * g for w, g in zip(params, gradients)]

    return jax.jit(step, donate_argnums=0), (params, normal(9, 128, 64))


def loops():
    """Nested scans and a while loop: loop-carried values, whose buffers have holes."""
    w = normal(1, 48, 48)

    def inner(h, _):
        return jnp.tanh(h @ w) + jnp.sin(h), h.mean()

    def outer(h, x):
        h, means = jax.lax.scan(inner, h + x, None, length=3)
        return h, (h * x, means)

    def function(h, xs):
        h, (ys, means) = jax.lax.scan(outer, h, xs)
        h = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.cos(s[1] @ w)), (0, h))[1]
        return h, ys.sum(0), means

    return jax.jit(function), (normal(2, 48, 48), normal(3, 4, 48, 48))


def branches():
    """Conditionals whose branches need different memory."""
    w = normal(1, 3, 64, 64)

    def function(x, k):
        for i in range(2):
            wide = [lambda a: jnp.tanh(a @ w[0]) @ w[1], lambda a: jnp.sin(a) * (a @ w[2] @ w[1]), lambda a: -a]
            x = x + jax.lax.switch((k + i) % 3, wide, x * 2)
        return x

    return jax.jit(function, donate_argnums=0), (normal(2, 64, 64), jnp.int32(1))


def library_calls():
    """LAPACK and a fence through FFI custom calls, FFTs, sorts, top-k, random bits, a scatter."""

    def function(a, x, key):
        s = a @ a.T + 8 * jnp.eye(a.shape[0])
        c = jnp.linalg.cholesky(s)
        q, r = jnp.linalg.qr(a)
        w, v = jnp.linalg.eigh(s)
        top, places = jax.lax.top_k(x, 8)
        ranks = jnp.argsort(x[:, ::-1], axis=1)
        spectrum = jnp.abs(jnp.fft.rfft(jnp.sort(x, axis=1), axis=1)).sum(1)
        noise = computed_once(jax.random.normal(jax.random.wrap_key_data(key), x.shape))
        spread = jnp.zeros(x.shape).at[ranks[:, :8] % 64, places % 64].add(top)
        return q @ r + v @ c, w, spectrum, jnp.cumsum(noise * spread, axis=1)

    return jax.jit(function), (normal(1, 48, 48), normal(2, 64, 64), jnp.array([3, 4], jnp.uint32))


def collectives(devices=None, width: int = 64, rows: int = 256):
    """Eight devices: gathers, reduce-scatters and all-reduces, with donated shards of three [width, width] weights, and x [rows, width].

    On `devices` that are not there the arguments are abstract.
    """
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)

    def local(params, x):
        def loss(full):
            h = x
            for w in full:
                h = h + jnp.tanh(h @ w)
            return jnp.square(h).mean()

        full = [jax.lax.all_gather(w, "fsdp", axis=0, tiled=True) for w in params]
        value, gradients = jax.value_and_grad(loss)(full)
        shards = [jax.lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True) for g in gradients]
        return jax.lax.pmean(value, "fsdp"), [w - 0.1 * g for w, g in zip(params, shards)]

    def split(seed: int, *shape: int):
        sharding = NamedSharding(mesh, P("fsdp"))
        if devices is not None:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        return jax.device_put(normal(seed, *shape), sharding)

    params = [split(i, width, width) for i in range(3)]
    function = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=(P(), P("fsdp")), check_vma=False)
    return jax.jit(function, donate_argnums=0), (params, split(9, rows, width))


def loop_over_devices(inside: bool):
    """Eight devices: a scan of layers on each, and sums over the devices inside of it, or behind it."""
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    ws = normal(1, 3, 64, 64)

    def local(x):
        def layer(h, w):
            h = jnp.tanh(h @ w) + jnp.sin(h).mean()
            return jax.lax.psum(h, "dp") if inside else h, jnp.cos(h) @ w

        h, parts = jax.lax.scan(layer, x, ws)
        return jax.lax.psum(h, "dp") * parts.sum(0)

    x = jax.device_put(normal(2, 8 * 64, 64), NamedSharding(mesh, P("dp")))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)), (x,)


PROGRAMS = {f.__name__: f for f in (training_step, loops, branches, library_calls, collectives)}


@functools.cache
def compiled(name: str) -> jax.stages.Compiled:
    """A program, compiled once per session."""
    jitted, arguments = PROGRAMS[name]()
    return jitted.lower(*arguments).compile()


@functools.cache
def serialized(name: str) -> bytes:
    """A program's bytes, from a compilation that has never run (a sort that has run cannot be serialised)."""
    jitted, arguments = PROGRAMS[name]()
    return compat.serialize(jitted.lower(*arguments).compile())


def require_planned(plan: MemoryPlan) -> None:
    """Assert that a program was planned. XLA of a newer JAX may plan it as well itself, or write it in another way, which keeps XLA's plan and is no failure."""
    if not plan.changed and NEWER:
        pytest.skip(f"jax {jax.__version__}: XLA's plan kept: {plan.reason}")
    assert plan.changed, plan.reason


def arguments(name: str) -> tuple:
    """Fresh arguments of a program."""
    return PROGRAMS[name]()[1]


def bits(outputs) -> list[bytes]:
    """Every output of every device, byte by byte."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(outputs) for shard in leaf.addressable_shards]
