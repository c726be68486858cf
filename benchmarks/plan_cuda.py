"""Temporary memory of training steps that XLA:CUDA compiles for H100s: XLA's plan against ours, and the lower bound.

No GPU is needed and none is used: the programs are compiled through the topology of JAX's CUDA plugin, planned, and proved. The
bound is certified: no order and no addresses that keep an executable's dependencies and in-place updates need less. "seconds" is
what reading, planning and proving took. The first rows are `tests/replan/h100.py`'s programs, the others steps that GraphAcc makes.

    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
    python benchmarks/plan_cuda.py                   # all rows: five minutes on two cores
    python benchmarks/plan_cuda.py remat --seconds 20
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "replan"))

import h100
import torch
import transformers

import graphacc
from graphacc._compat import jax_ as compat
from graphacc.runtime import Program
from graphacc.runtime.replan.planner import plan_bytes
from graphacc.runtime.replan.solvers import core_solvers

GPT = dict(layers=12, width=768, heads=12, vocabulary=50304, length=256, batch=8)
VOCABULARY, LENGTH, BATCH = 8192, 256, 8


def _compiled(build: Callable, **sizes) -> bytes:
    return compat.serialize(h100.compile(*build(**sizes), options={}))


def _gpt2(strategy: str, devices: int) -> bytes:
    """GPT-2 with AdamW, 4 layers of 256: captured on CPU, then lowered for H100s in the place of CPU devices."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=8, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    model = graphacc.compile(model, strategy=strategy, devices=devices, cache_dir=None, memory_plan="xla", fast_compile=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    (compiled,) = model.programs
    program = Program.build(compiled.graph, h100.like(compiled.program.mesh), cache_dir=None, memory_plan="xla")
    return compat.serialize(program._compiled)


PROGRAMS: dict[str, Callable[[], bytes]] = {
    "GPT 12x768, scan, remat, vocabulary 50304": lambda: _compiled(h100.remat_gpt, **GPT),
    "GPT 12x768, scan, vocabulary 50304": lambda: _compiled(h100.remat_gpt, **GPT, remat=False),
    "GPT 6x128, scan, remat, vocabulary 4096": lambda: _compiled(h100.remat_gpt),
    "MLP": lambda: _compiled(h100.programs.training_step),
    "loops": lambda: _compiled(h100.programs.loops),
    "branches": lambda: _compiled(h100.programs.branches),
    "8 devices, collectives": lambda: _compiled(h100.collectives),
    "GraphAcc: GPT-2 4x256, one device": lambda: _gpt2("dp=1", 1),
    "GraphAcc: GPT-2 4x256, fsdp=8": lambda: _gpt2("fsdp=8", 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of rows; all rows without one")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the solvers")
    options = parser.parse_args()
    _prepare()
    print("| program | XLA, MB | planned | bound | planned/XLA | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for name, compile in PROGRAMS.items():
        if options.names and not any(part in name for part in options.names):
            continue
        found = plan_bytes(compile(), library=compat.cuda_library(), solvers=core_solvers(2), seconds=options.seconds)
        before, after, bound = (size / 1e6 for size in (found.temporary_before, found.temporary_after, found.lower_bound))
        print(f"| {name} | {before:.2f} | {after:.2f} | {bound:.2f} | {after / before:.3f} | {found.seconds:.1f} |", flush=True)


def _prepare() -> None:
    """Eight virtual CPU devices for capture; the plugin must be there."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    if compat.cuda_library() is None:
        raise SystemExit("JAX's CUDA plugin is not installed: pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2")


if __name__ == "__main__":
    main()
