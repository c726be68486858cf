"""What `loss_chunks` gives: temporaries, operations and step time of GPT-2's training step, on CPU and compiled for an H100.

Every row is one compiled step (forward, backward, AdamW) of one device, next to that of the same strategy without chunks; its temporaries are XLA's own
(`memory_plan="xla"`). Operations are those of the graph's products, which chunks do not change: XLA counts the body of a loop once. The
peer is the same computation written by hand, as in torchtitan's and Liger-Kernel's chunked losses: in PyTorch a loop over chunks of the hidden states, each under
`torch.utils.checkpoint`, here compiled by GraphAcc ("by hand").

    python benchmarks/chunked_loss.py cpu              # 2 layers of 256, T 512, batch 4, vocabulary 32768
    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2     # no GPU is needed
    python benchmarks/chunked_loss.py h100 --layers 4 --width 768 --length 1024 --vocabulary 50257
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
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

from graphacc._compat.jax_ import cuda_library
from graphacc.capture import Batch, capture_joint, capture_update, stitch
from graphacc.costs.memory import predict_memory
from graphacc.costs.work import flops_by_dtype
from graphacc.graph import Kind, StepGraph
from graphacc.passes.batch import default_batch_dims
from graphacc.passes.pipeline import build_pipeline
from graphacc.passes.runner import run_passes
from graphacc.runtime import Program, make_mesh, select_devices, to_device
from graphacc.strategy import Strategy

ROWS = ["", "loss_chunks=4", "loss_chunks=16", "by hand", "remat=blocks", "remat=blocks,loss_chunks=16"]
"""Strategies; "by hand": the model's code has the loop, of 16 chunks."""
STEPS = 5
BY_HAND = 16


def captured(args: argparse.Namespace, precision: str, by_hand: bool) -> StepGraph:
    """The whole step, with global shapes; nothing is computed."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=args.vocabulary, n_positions=args.length, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(args.batch, args.length, dtype=torch.long)
    batch = Batch(leaves=(tokens, tokens.clone()), paths=("input_ids", "labels"))
    joint = capture_joint(model, (_by_hand if by_hand else _plain), batch, precision=precision)
    gradients = [item.target for item in joint.outputs if item.kind is Kind.GRAD]
    return stitch(joint, capture_update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), gradients))


def _plain(model: transformers.GPT2LMHeadModel, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list]:
    return model(input_ids=leaves[0], labels=leaves[1]).loss, []


def _by_hand(model: transformers.GPT2LMHeadModel, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list]:
    hidden = model.transformer(input_ids=leaves[0]).last_hidden_state.flatten(0, 1)
    labels = F.pad(leaves[1], (0, 1), value=-100)[:, 1:].flatten()

    def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    parts = [checkpoint(loss, x, y, use_reentrant=False) for x, y in zip(hidden.chunk(BY_HAND), labels.chunk(BY_HAND), strict=True)]
    return torch.stack(parts).sum() / (labels != -100).sum(), []


def step_seconds(program: Program, step: StepGraph) -> tuple[float, float]:
    """The medians of a few steps on this machine: on the clock, and of all its processors' time."""
    import jax

    mesh = program.mesh
    times = []
    for _ in range(STEPS + 1):
        arrays = [to_device(torch.full(item.shape, 1e-2).to(item.dtype), item, mesh) for item in step.inputs]  # the program takes their memory
        start, spent = time.perf_counter(), time.process_time()
        jax.block_until_ready(program(*arrays))
        times.append((time.perf_counter() - start, time.process_time() - spent))
    clock, processors = zip(*times[1:], strict=True)
    return statistics.median(clock), statistics.median(processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "h100"])
    parser.add_argument("rows", nargs="*", help=f"default: {ROWS}")
    for name, value in dict(layers=2, width=256, length=512, vocabulary=32768, batch=4).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.what == "h100" and cuda_library() is None:
        raise SystemExit("JAX's CUDA plugin is not installed: pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2")
    print(f"{args.what}: GPT-2 {args.layers} x {args.width}, T {args.length}, vocabulary {args.vocabulary}, batch {args.batch}")
    print("| strategy | temporaries MB | of the first | predicted MB | GFLOP | step ms | processor ms | compile s |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    first = 0
    for row in args.rows or ROWS:
        strategy = Strategy.parse("" if row == "by hand" else row)
        step = captured(args, strategy.precision, row == "by hand")
        local, _ = run_passes(step.copy(), build_pipeline(step, strategy, batch_dims=default_batch_dims(step)))
        mesh, start = make_mesh(strategy, select_devices(strategy.num_devices)), time.perf_counter()
        options = {} if args.what == "cpu" else {"compiler_options": h100.FAST}
        program = Program.build(local, mesh if args.what == "cpu" else h100.like(mesh), cache_dir=None, memory_plan="xla", **options)
        compiled, temporaries = time.perf_counter() - start, program.memory.temp_bytes
        first = first or temporaries
        seconds = [f"{1e3 * each:.0f}" for each in step_seconds(program, local)] if args.what == "cpu" else ["-", "-"]
        flops = sum(flops_by_dtype(local).values()) / 1e9
        cells = row or "nothing", f"{temporaries / 1e6:.1f}", f"{temporaries / first:.3f}", f"{predict_memory(local).temporary_bytes / 1e6:.1f}", f"{flops:.1f}", *seconds, f"{compiled:.0f}"
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
