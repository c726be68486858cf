"""On a GPU: the programs of `h100` run as XLA planned them and as we did, from the same inputs, and give the same bits."""

import h100
import jax
import jax.numpy as jnp
import numpy as np
import programs

from graphacc.runtime.replan import replan

OPTIONS = {"xla_gpu_deterministic_ops": True}  # without it a scatter adds in another order every time


def array(seed: int, like):
    """A fresh argument: the functions donate theirs."""
    if isinstance(like, jax.Array):
        return jnp.array(like)
    rng = np.random.default_rng(seed)
    if like.dtype == jnp.int32:
        return jnp.asarray(rng.integers(0, 1000, like.shape), jnp.int32)
    return jnp.asarray(0.02 * rng.normal(size=like.shape), like.dtype)


def arguments(likes):
    leaves, tree = jax.tree.flatten(likes)
    return jax.tree.unflatten(tree, [array(seed, like) for seed, like in enumerate(leaves)])


def main() -> None:
    num_planned = 0
    for name in ("training_step", "loops", "branches", "remat_gpt"):
        jitted, likes = h100.PROGRAMS[name][0]()
        compiled = jitted.lower(*arguments(likes)).compile(compiler_options=OPTIONS)
        result = replan(compiled, min_temporary_bytes=1, tolerance=0.0)
        print(f"{name}: {result.plan.summary()}", flush=True)
        num_planned += result.plan.changed
        for _ in range(3):
            want, got = programs.bits(compiled(*arguments(likes))), programs.bits(result.compiled(*arguments(likes)))
            assert want == got, f"{name}: the planned program gives other bits"
    assert num_planned, "no program was planned"


if __name__ == "__main__":
    main()
