"""What rematerialisation gives: temporaries and floating-point operations of GPT-2's training step, on CPU and compiled for an H100.

Every row is one compiled step (forward, backward, AdamW) of one device; its temporaries are XLA's own (`memory_plan="xla"`), its operations those that
XLA counts in the compiled program. The ratios are to the first row, in which backward computes nothing again.

    python benchmarks/remat.py cpu                     # 4 layers of 768, T 1024, batch 4
    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2     # no GPU is needed
    python benchmarks/remat.py h100 --layers 6
    python benchmarks/remat.py auto                    # five budgets between all and the least: predicted, and the temporaries that XLA gives
"""

import argparse
import os
import pathlib
import sys
import time

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "replan"))

import h100
import torch
import transformers

from graphacc._compat.jax_ import cuda_library
from graphacc.capture import Batch, capture_joint, capture_update, stitch
from graphacc.costs.memory import predict_memory
from graphacc.costs.work import flops_by_dtype
from graphacc.graph import Kind, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.runtime import Program, make_mesh, select_devices
from graphacc.strategy import Strategy

ROWS = ["", "remat=blocks", "checkpoint"]
"""Strategies; "checkpoint": the blocks are given to torch.utils.checkpoint by the model itself."""


def captured(args: argparse.Namespace, checkpoint: bool) -> StepGraph:
    """The whole step, with global shapes; nothing is computed."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=args.vocabulary, n_positions=args.length, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=args.dropout, embd_pdrop=args.dropout, attn_pdrop=args.dropout, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(args.batch, args.length, dtype=torch.long)
    batch = Batch(leaves=(tokens, tokens.clone()), paths=("input_ids", "labels"))
    joint = capture_joint(model, lambda model, leaves: (model(input_ids=leaves[0], labels=leaves[1]).loss, []), batch)
    gradients = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    return stitch(joint, capture_update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), gradients))


def compiled(step: StepGraph, strategy: Strategy, platform: str) -> tuple[Program, float, str]:
    """The program of one device, its floating-point operations, and what the pass says about it."""
    local, reports = run_passes(step.copy(), build_pipeline(step, strategy, batch_dims=default_batch_dims(step)))
    flops = sum(flops_by_dtype(local).values())
    said = next((str(report.details) for report in reports if report.name == "rematerialise"), "")
    mesh = make_mesh(strategy, select_devices(strategy.num_devices))
    if platform == "h100":
        return Program.build(local, h100.like(mesh), cache_dir=None, memory_plan="xla", compiler_options=h100.FAST), flops, said  # XLA counts none without the device
    program = Program.build(local, mesh, cache_dir=None, memory_plan="xla")
    return program, program.cost.flops, said


def budgets(args: argparse.Namespace) -> None:
    """Rows of remat="auto"."""
    step = captured(args, checkpoint=False)
    most, least = (_predicted(step, strategy) for strategy in ("", "remat=blocks"))
    print(f"GPT-2 {args.layers} x {args.width}: {most / 1e9:.4f} GB predicted with everything kept, {least / 1e9:.4f} with blocks")
    print("| budget GB | predicted GB | XLA's temporaries MB | GFLOP | choosing and compiling s | |\n| --- | --- | --- | --- | --- | --- |")
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        budget, start = (least + share * (most - least)) / 1e9, time.perf_counter()
        program, flops, said = compiled(step, Strategy(remat="auto", memory_gb=budget), "cpu")
        found = _predicted(step, f"remat=auto,memory_gb={budget!r}") / 1e9
        cells = f"{budget:.4f}", f"{found:.4f}", f"{program.memory.temp_bytes / 1e6:.1f}", f"{flops / 1e9:.1f}", f"{time.perf_counter() - start:.0f}"
        print("| " + " | ".join(cells) + f" | {said.splitlines()[-1].strip()} |", flush=True)


def _predicted(step: StepGraph, strategy: str) -> int:
    chosen = Strategy.parse(strategy)
    return predict_memory(run_passes(step.copy(), build_pipeline(step, chosen, batch_dims=default_batch_dims(step)))[0]).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "h100", "auto"])
    parser.add_argument("rows", nargs="*", help=f"default: {ROWS}")
    for name, value in dict(layers=4, width=768, length=1024, vocabulary=50257, batch=4).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    if args.what == "h100" and cuda_library() is None:
        raise SystemExit("JAX's CUDA plugin is not installed: pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2")
    if args.what == "auto":
        budgets(args)
        return
    print(f"{args.what}: GPT-2 {args.layers} x {args.width}, T {args.length}, vocabulary {args.vocabulary}, batch {args.batch}")
    print("| what is computed again | temporaries MB | ratio | GFLOP | ratio | compile s |\n| --- | --- | --- | --- | --- | --- |")
    first: tuple[int, float] | None = None
    for row in args.rows or ROWS:
        step = captured(args, row == "checkpoint")
        start = time.perf_counter()
        program, flops, said = compiled(step, Strategy.parse("" if row == "checkpoint" else row), args.what)
        found = program.memory.temp_bytes, flops
        first = first or found
        ratios = [f"{mine / before:.3f}" for mine, before in zip(found, first, strict=True)]
        print(f"| {row or 'nothing'} | {found[0] / 1e6:.1f} | {ratios[0]} | {found[1] / 1e9:.1f} | {ratios[1]} | {time.perf_counter() - start:.0f} |", flush=True)
        print(said, flush=True)


if __name__ == "__main__":
    main()
