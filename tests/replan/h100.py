"""Programs compiled for H100 GPUs that are not there, through JAX's CUDA plugin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from graphacc._compat import jax_ as compat
from graphacc.runtime.absent import TARGETS

FAST = {"xla_gpu_autotune_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options with which XLA takes half the time."""
CUBLAS = FAST | {"xla_gpu_enable_triton_gemm": False}
"""Products by cuBLAS, which has a workspace of 32 MiB."""


@functools.cache
def devices(count: int = 1) -> list:
    """`count` H100s of one machine."""
    return topologies.get_topology_desc(platform="cuda", target_config=TARGETS["h100"], topology=f"1x1x{count}").devices


def like(mesh: Mesh) -> Mesh:
    """A mesh of H100s in the place of other devices."""
    return Mesh(np.array(devices(mesh.size)).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


def compile(jitted, arguments, options=FAST) -> jax.stages.Compiled:
    """For arguments that are arrays or ShapeDtypeStructs; those without a sharding on H100s lie on one."""

    def abstract(x):
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) and x.sharding else SingleDeviceSharding(devices()[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    traced = jitted.trace(*jax.tree.map(abstract, arguments))
    return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)


def remat_gpt(layers=6, width=128, heads=2, vocabulary=4096, length=128, batch=8, remat=True):
    """A GPT's step with SGD: a scan over blocks, rematerialised or not, and a head tied to the embedding."""
    shapes = dict(qkv=(width, 3 * width), out=(width, width), up=(width, 4 * width), down=(4 * width, width))
    params = {name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for name, shape in shapes.items()}
    params = dict(blocks=params, embedding=jax.ShapeDtypeStruct((vocabulary, width), jnp.float32))

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(h, w):
        q, k, v = jnp.split((norm(h) @ w["qkv"]).reshape(batch, length, heads, -1).swapaxes(1, 2), 3, -1)
        scores = jnp.where(np.tri(length, dtype=bool), q @ k.swapaxes(2, 3), -1e9)
        h = h + (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(h.shape) @ w["out"]
        return h + jax.nn.gelu(norm(h) @ w["up"]) @ w["down"]

    apply = jax.checkpoint(block) if remat else block

    def loss(params, tokens):
        h = jax.lax.scan(lambda h, w: (apply(h, w), None), params["embedding"][tokens], params["blocks"])[0]
        logits = (norm(h) @ params["embedding"].T)[:, :-1]
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def step(params, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    return jax.jit(step, donate_argnums=0), (params, jax.ShapeDtypeStruct((batch, length), jnp.int32))


def collectives():
    """Gathers, reduce-scatters and all-reduces of eight devices, asynchronous beside products."""
    return programs.collectives(devices(8), width=512, rows=2048)


PROGRAMS = {name: (programs.PROGRAMS[name], FAST) for name in ("training_step", "loops", "branches")}
PROGRAMS |= {"remat_gpt": (remat_gpt, CUBLAS), "collectives": (collectives, FAST), "mlp": (programs.training_step, CUBLAS)}


@functools.cache
def serialized(name: str) -> bytes:
    """A program's bytes."""
    build, options = PROGRAMS[name]
    return compat.serialize(compile(*build(), options))
