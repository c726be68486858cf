"""A seeded sampler of JAX programs that exercise what a memory plan can break.

Every program works on a pool of arrays [N, N] in float32 (and one of int32), and is built from elementwise chains, matmuls,
reductions, transposes, sorts, in-place updates, scans (also nested), conditionals, while loops, and, on several devices,
collectives inside `shard_map`. Some inputs are donated.
"""

import dataclasses
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

N = 16
NUM_INPUTS = 4
AXIS = "x"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomProgram:
    """A function of NUM_INPUTS arrays and an integer, and how to compile and call it."""

    seed: int
    steps: tuple[str, ...]  # what it is made of
    jitted: Callable
    num_devices: int

    def compile(self) -> jax.stages.Compiled:
        """Compiled without LLVM's optimisations, which take most of the time and change nothing in the thunks."""
        return self.jitted.lower(*self.arguments()).compile(compiler_options={"xla_backend_optimization_level": 0})

    def arguments(self) -> tuple[jax.Array, ...]:
        """Fresh arguments, always the same values."""
        generator = np.random.default_rng(self.seed)
        arrays = [generator.normal(size=(N * self.num_devices, N)).astype(np.float32) for _ in range(NUM_INPUTS)]
        sharding = _sharding(self.num_devices, PartitionSpec(AXIS)) if self.num_devices > 1 else None
        count = jax.device_put(np.int32(self.seed % 4), _sharding(self.num_devices, PartitionSpec()) if sharding else None)
        return (*(jax.device_put(a, sharding) for a in arrays), count)


def sample(seed: int, *, num_devices: int = 1, max_steps: int = 8) -> RandomProgram:
    """The program of a seed."""
    rng = random.Random(f"{seed}/{num_devices}")
    makers = [*_LOCAL, *_COLLECTIVE] if num_devices > 1 else _LOCAL
    chosen = [rng.choice(makers) for _ in range(rng.randint(3, max_steps))]
    step_seeds = [rng.randrange(1 << 30) for _ in chosen]

    def body(*arguments):
        *arrays, count = arguments
        pool = list(arrays)
        for maker, step_seed in zip(chosen, step_seeds):
            pool.append(_tame(maker(random.Random(step_seed), pool, count)))
        num_outputs = 1 + seed % 3
        return (*pool[-num_outputs:], sum(p.sum() for p in pool[NUM_INPUTS:])[None])

    num_donated = rng.randint(0, 1 + seed % 3)  # as many as there are outputs of that shape
    donated = tuple(sorted(rng.sample(range(NUM_INPUTS), num_donated)))
    return RandomProgram(
        seed=seed,
        steps=tuple(m.__name__ for m in chosen),
        jitted=_jit(body, num_devices, donated, 2 + seed % 3),
        num_devices=num_devices,
    )


def _jit(body: Callable, num_devices: int, donated: tuple[int, ...], num_outputs: int) -> Callable:
    if num_devices > 1:
        body = jax.shard_map(
            body,
            mesh=_mesh(num_devices),
            in_specs=(*[PartitionSpec(AXIS)] * NUM_INPUTS, PartitionSpec()),
            out_specs=(PartitionSpec(AXIS),) * num_outputs,
            check_vma=False,
        )
    return jax.jit(body, donate_argnums=donated, keep_unused=True)


def _mesh(num_devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:num_devices])


def _sharding(num_devices: int, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(_mesh(num_devices), spec)


def _tame(x: jax.Array) -> jax.Array:
    """Keep numbers in a range where nothing overflows."""
    return x / (1 + jnp.abs(x).max())


def _pick(rng: random.Random, pool: list[jax.Array]) -> jax.Array:
    return pool[rng.randrange(len(pool))]


# --- steps: (random, pool, count) -> array [N, N] ---


def elementwise(rng, pool, count):
    x, y = _pick(rng, pool), _pick(rng, pool)
    for function in rng.choices([jnp.tanh, jnp.sin, jnp.exp, jnp.square, jnp.negative], k=rng.randint(1, 4)):
        x = _tame(function(x)) + y
    return x


def matmul(rng, pool, count):
    return _pick(rng, pool) @ _pick(rng, pool)


def transposed_matmul(rng, pool, count):
    return _pick(rng, pool).T @ _pick(rng, pool)


def reduction(rng, pool, count):
    x = _pick(rng, pool)
    return x - rng.choice([jnp.mean, jnp.max, jnp.sum])(x, axis=rng.randrange(2), keepdims=True)


def softmax(rng, pool, count):
    return jax.nn.softmax(_pick(rng, pool) @ _pick(rng, pool).T, axis=-1) @ _pick(rng, pool)


def sort(rng, pool, count):
    return jnp.sort(_pick(rng, pool), axis=rng.randrange(2)) + _pick(rng, pool)


def cumulative(rng, pool, count):
    return jnp.cumsum(_pick(rng, pool), axis=rng.randrange(2))


def update_rows(rng, pool, count):
    rows = rng.randint(1, N // 2)
    x = _pick(rng, pool) * 1.5
    return jax.lax.dynamic_update_slice(x, _pick(rng, pool)[:rows] @ _pick(rng, pool), (count * 2, 0))


def scatter(rng, pool, count):
    rows = jnp.argsort(_pick(rng, pool)[:, 0])[: N // 2]
    return (_pick(rng, pool) + 1).at[rows].add(_pick(rng, pool)[: N // 2])


def concatenated(rng, pool, count):
    both = jnp.concatenate([_pick(rng, pool) @ _pick(rng, pool), jnp.sin(_pick(rng, pool))], axis=0)
    return both[N // 2 : N // 2 + N] + both[:N].T


def conditional(rng, pool, count):
    x, y, z = (_pick(rng, pool) for _ in range(3))
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ y) @ z, lambda: y - jnp.cos(z @ x)) + x


def switch(rng, pool, count):
    x, y = _pick(rng, pool), _pick(rng, pool)
    branches = [lambda a: a @ y, lambda a: jnp.sin(a) * (a @ a), lambda a: a.at[1].set(a[2])]
    return jax.lax.switch(count % 3, branches, x * 2)


def scan(rng, pool, count):
    x, w = _pick(rng, pool), _pick(rng, pool)

    def step(carry, row):
        carry = _tame(jnp.tanh(carry @ w) + row)
        return carry, carry.sum(axis=0)

    carry, rows = jax.lax.scan(step, x, _pick(rng, pool))
    return carry + rows


def nested_scan(rng, pool, count):
    x, w = _pick(rng, pool), _pick(rng, pool)

    def inner(carry, _):
        return _tame(jnp.sin(carry @ w) - carry), None

    def outer(carry, row):
        carry, _ = jax.lax.scan(inner, carry + row, None, length=2)
        return carry, carry[0]

    carry, rows = jax.lax.scan(outer, x, _pick(rng, pool)[:3])
    return carry.at[:3].add(rows)


def while_loop(rng, pool, count):
    x, w = _pick(rng, pool), _pick(rng, pool)

    def step(state):
        i, a, b = state
        return i + 1, b, _tame(jnp.tanh(a @ w) + b.at[i % N].set(a[0]))

    return jax.lax.while_loop(lambda state: state[0] < count, step, (0, x, x * 2))[2]


def gradient(rng, pool, count):
    w, y = _pick(rng, pool), _pick(rng, pool)
    return jax.grad(lambda x: jnp.square(jnp.tanh(jnp.tanh(x @ w) @ w) - y).mean())(_pick(rng, pool))


def integers(rng, pool, count):
    places = (jnp.abs(_pick(rng, pool)) * 100).astype(jnp.int32) % N
    return jnp.take_along_axis(_pick(rng, pool), places, axis=1) * count


def all_reduce(rng, pool, count):
    return jax.lax.psum(_pick(rng, pool) @ _pick(rng, pool), AXIS)


def all_gather_and_scatter(rng, pool, count):
    full = jax.lax.all_gather(_pick(rng, pool), AXIS, axis=0, tiled=True)
    return jax.lax.psum_scatter(jnp.tanh(full), AXIS, scatter_dimension=0, tiled=True)


def all_to_all(rng, pool, count):
    return jax.lax.all_to_all(_pick(rng, pool), AXIS, split_axis=0, concat_axis=0, tiled=True)


def permute(rng, pool, count):
    size = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(_pick(rng, pool), AXIS, [(i, (i + 1) % size) for i in range(size)])


def scan_with_collective(rng, pool, count):
    w = _pick(rng, pool)

    def step(carry, _):
        return _tame(jax.lax.psum(jnp.tanh(carry @ w), AXIS)), None

    return jax.lax.scan(step, _pick(rng, pool), None, length=2)[0]


_LOCAL = [
    elementwise, matmul, transposed_matmul, reduction, softmax, sort, cumulative, update_rows, scatter, concatenated,
    conditional, switch, scan, nested_scan, while_loop, gradient, integers,
]  # fmt: skip
_COLLECTIVE = [all_reduce, all_gather_and_scatter, all_to_all, permute] * 3 + [scan_with_collective]
