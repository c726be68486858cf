"""Communication of GPT-2's training step under ZeRO-3, with buckets and prefetch and without, on CPU and compiled for H100s.

Every row is one compiled step (forward, backward, AdamW) for eight devices. The figures are read out of the compiled program and its
schedule: collectives (of the CPU's, how many bytes travel in messages above 1 MB); gathers, scatters and the MB of gathers during which nothing
else runs ("exposed"; on CPU all are); scatters that wait for another scatter; how many buckets of weights are gathered at once, from
their live ranges, without the tied embedding, which stays through the whole forward; temporaries, and their ratio to the first row's.

`time` trains a smaller model on eight virtual devices, with buckets and without in turn, and compares losses bit for bit; the ratio of
step times is the median of the rounds' ratios. Claim it on a quiet machine only. Where the losses differ in their last bits, XLA has fused a
product with a sum in one of the programs and not in the other: with ``XLA_FLAGS=--xla_cpu_max_isa=AVX``, which has no such instruction, they are
the same.

    python benchmarks/communication.py cpu             # 12 layers of 768: five minutes on two cores
    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2     # no GPU is needed
    python benchmarks/communication.py h100            # ten minutes
    python benchmarks/communication.py time --layers 4 --width 256 --length 128 --vocabulary 8192 --rounds 15
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "replan"))

import h100
import jax
import torch
import transformers

import graphacc
from graphacc._compat.jax_ import cuda_library
from graphacc.capture import Batch, capture_joint, capture_update, stitch
from graphacc.graph import Kind, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.report.communication import read_collectives
from graphacc.report.schedule import kind_of, most_at_once, read_module
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy

STRATEGIES = ["fsdp=8,bucket_mb=0", "fsdp=8", "fsdp=8,bucket_mb=25", "fsdp=8,prefetch=0", "fsdp=8,prefetch=2"]
BUCKET_BYTES = (1e6, 40e6)  # of a gather that counts as a bucket


def gpt2(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=args.vocabulary, n_positions=args.length, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), torch.randint(args.vocabulary, (8, args.length))


def captured(args: argparse.Namespace) -> StepGraph:
    """The whole step, with global shapes; nothing is computed."""
    model, tokens = gpt2(args)
    batch = Batch(leaves=(tokens, tokens.clone()), paths=("input_ids", "labels"))
    joint = capture_joint(model, lambda model, leaves: (model(input_ids=leaves[0], labels=leaves[1]).loss, []), batch)
    gradients = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    return stitch(joint, capture_update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), gradients))


def compiled(step: StepGraph, strategy: Strategy, platform: str) -> Program:
    program, _ = run_passes(step.copy(), build_pipeline(step, strategy, batch_dims=default_batch_dims(step)))
    mesh = make_mesh(strategy, select_devices(strategy.num_devices))
    if platform == "h100":
        return Program.build(program, h100.like(mesh), cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)
    return Program.build(program, mesh, cache_dir=None, memory_plan="xla")


def row(strategy: str, program: Program, before: int | None) -> tuple[str, int]:
    """A row of the table, and the bytes of temporaries."""
    hlo, temporaries = program.hlo_text(), program.memory.temp_bytes
    found = list(read_collectives(hlo, program.mesh))
    of = {kind: [item for item in found if item.kind == kind] for kind in ("all-gather", "reduce-scatter")}
    sizes = {kind: sum(item.size_bytes for item in items) for kind, items in of.items()}
    large = sum(item.size_bytes for item in found if item.size_bytes > 1e6) / sum(item.size_bytes for item in found)
    exposed = sum(item.exposed_bytes for item in of["all-gather"])
    entry = list(read_module(hlo).values())[-1]
    buffers = [buffer for item in entry if kind_of(item) == "all-gather" for buffer in entry.kept(item) if not buffer.is_copy]
    at_once = most_at_once([buffer for buffer in buffers if BUCKET_BYTES[0] < buffer.size_bytes < BUCKET_BYTES[1]], weight=lambda _: 1)
    cells = [
        strategy, len(found), f"{100 * large:.2f} %", f"{len(of['all-gather'])}, {sizes['all-gather'] / 1e6:.1f}",
        f"{exposed / 1e6:.1f} ({100 * exposed / sizes['all-gather']:.1f} %)", f"{len(of['reduce-scatter'])}, {sizes['reduce-scatter'] / 1e6:.1f}",
        len(entry.chained("reduce-scatter")), at_once, f"{temporaries / 1e6:.1f}", f"{temporaries / (before or temporaries):.3f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |", temporaries


def tables(args: argparse.Namespace) -> None:
    step, before = captured(args), None
    names = "strategy, collectives, above 1 MB, gathers and MB, exposed MB, scatters and MB, scatters in a chain, gathered at once, temporaries MB, ratio"
    print(f"{args.what}: GPT-2 {args.layers} x {args.width}, T {args.length}, vocabulary {args.vocabulary}, batch 8")
    print("| " + " | ".join(names.split(", ")) + " |\n|" + " --- |" * len(names.split(", ")))
    for strategy in args.strategies or STRATEGIES:
        text, temporaries = row(strategy, compiled(step, Strategy.parse(strategy), args.what), before)
        before = before or temporaries
        print(text, flush=True)


def times(args: argparse.Namespace) -> None:
    """Steps of models with buckets and without, in turn."""
    strategies, steps, losses, seconds = (args.strategies or STRATEGIES[:2]), [], [], []
    for strategy in strategies:
        model, tokens = gpt2(args)
        model = graphacc.compile(model, strategy=strategy, devices=8, cache_dir=None)
        steps.append((graphacc.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), tokens))
        losses.append([])
        seconds.append([])
    for turn in range(args.rounds + 2):
        for (step, tokens), found, taken in zip(steps, losses, seconds, strict=True):
            torch.manual_seed(turn)  # dropout draws the same in all of them
            start = time.perf_counter()
            found.append(step(input_ids=tokens, labels=tokens).item())
            if turn >= 2:  # the first ones compile
                taken.append(time.perf_counter() - start)
    for strategy, found, taken in zip(strategies, losses, seconds, strict=True):
        ratio = statistics.median(mine / first for mine, first in zip(taken, seconds[0], strict=True))
        same = "the same bits" if found == losses[0] else "OTHER LOSSES"
        print(f"{strategy}: {1e3 * statistics.median(taken):.0f} ms, {ratio:.3f} of the first row, {same}, loss {found[0]:.4f} -> {found[-1]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "h100", "time"])
    parser.add_argument("strategies", nargs="*", help=f"default: {' '.join(STRATEGIES)}")
    for name, value in dict(layers=12, width=768, length=1024, vocabulary=50257, rounds=10).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if args.what == "h100" and cuda_library() is None:
        raise SystemExit("JAX's CUDA plugin is not installed: pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2")
    times(args) if args.what == "time" else tables(args)


if __name__ == "__main__":
    main()
