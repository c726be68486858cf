"""ZeRO++ against ZeRO-3: bytes that cross nodes, in programs compiled for H100s, and losses of the example.

    python benchmarks/zero_plus_plus.py bytes            # two nodes of four H100s, without a GPU (needs JAX's CUDA plugin: see plan_cuda.py)
    python benchmarks/zero_plus_plus.py losses           # the example's GPT-2 on eight virtual CPU devices, 200 steps, three seeds

Bytes are counted in the optimised HLO, scales and padding included, in units of the bf16 model: a collective that crosses nodes brings each part of a
tensor into a node once (a gather, a scatter), an exchange what the ranks of a node get from others. Of k nodes, each gets (k - 1) / k of a tensor, which
counts as the whole. Losses are means of the last 20 steps. The control is exact ZeRO-3 whose first weights were rounded to int8, once,
in blocks of 256: what one difference of that size does to a run, which no quantisation in every step can be below but by chance.
"""

import argparse
import contextlib
import io
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from unittest import mock

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "replan"))

import torch
from torch import nn

import graphacc

RANKS, NODE = 8, 4
ROWS = {
    "ZeRO-3": "",
    "qwZ": "quantized_weights=True",
    "hpZ": f"hpz={NODE}",
    "qgZ": f"quantized_gradients=True,node_size={NODE}",
    "all": f"quantized_weights=True,quantized_gradients=True,hpz={NODE}",
}
CONTROL = "control"


def crossing_bytes(collectives) -> float:
    """Bytes that cross nodes, as the module's docstring counts them."""
    total = 0.0
    for item in collectives:
        nodes = {place // NODE for place in item.group}
        if len(nodes) > 1 and item.kind != "all-reduce":
            whole = NODE if item.kind == "all-to-all" or len(item.group) < RANKS else 1  # each rank of a node has its own
            total += item.size_bytes * whole
    return total


def layers(width: int = 512, count: int = 6) -> nn.Module:
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(width, width), nn.Tanh())))


def bytes_table(names: list[str]) -> None:
    import h100

    from graphacc.report.communication import read_collectives
    from graphacc.runtime import Program

    print(f"6 layers of 512 x 512 in bf16, AdamW, fsdp={RANKS} as {RANKS // NODE} nodes of {NODE} H100s")
    print(f"{'':8}{'crossing nodes, in M':>22}{'received per rank, in M':>26}{'temporaries, MB':>18}")
    for name in names:
        torch.manual_seed(0)
        model = layers()
        unit = 2 * sum(p.numel() for p in model.parameters())
        reduced = "" if "quantized_gradients" in ROWS[name] else "reduce_dtype=bf16"
        strategy = ",".join(filter(None, (f"fsdp={RANKS}", "precision=bf16", reduced, ROWS[name])))
        model = graphacc.compile(model, strategy=strategy, devices=RANKS, cache_dir=None, memory_plan="xla", fast_compile=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
        (compiled,) = model.programs
        mesh = h100.like(compiled.program.mesh)
        program = Program.build(compiled.graph, mesh, cache_dir=None, memory_plan="xla", compiler_options=h100.FAST)
        found = list(read_collectives(program.hlo_text(), mesh))
        received = sum(item.traffic_bytes for item in found)
        temporaries = program._compiled.memory_analysis().temp_size_in_bytes
        print(f"{name:8}{crossing_bytes(found) / unit:22.4f}{received / unit:26.4f}{temporaries / 1e6:18.2f}", flush=True)


def losses_table(names: list[str], steps: int, seeds: int) -> None:
    exact = [last_loss("", steps, seed) for seed in range(seeds)]
    print(f"mean of the last 20 of {steps} steps, seeds 0 to {seeds - 1}")
    print(f"{'ZeRO-3':8} {' '.join(f'{loss:8.4f}' for loss in exact)}", flush=True)
    for name in [CONTROL, *(name for name in names if name != "ZeRO-3")]:
        found = [last_loss(ROWS.get(name, ""), steps, seed, control=name == CONTROL) for seed in range(seeds)]
        differences = [loss - reference for loss, reference in zip(found, exact)]
        error = statistics.stdev(differences) / math.sqrt(seeds) if seeds > 1 else math.nan
        text = " ".join(f"{difference:+8.4f}" for difference in differences)
        print(f"{name:8} {text}   mean {statistics.mean(differences):+.4f}, standard error {error:.4f}", flush=True)


def last_loss(fields: str, steps: int, seed: int, *, control: bool = False) -> float:
    """The example's loss, mean of the last 20 steps, under ZeRO-3 with more `fields`."""
    from graphacc.examples import train_gpt

    strategy = ",".join(filter(None, (f"fsdp={RANKS}", fields)))
    build = rounded(train_gpt.build_model) if control else train_gpt.build_model
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(train_gpt, "build_model", build):
        file = pathlib.Path(folder) / "run.json"
        arguments = ["--strategy", strategy, "--steps", str(steps), "--seed", str(seed), "--json", str(file)]
        with contextlib.redirect_stdout(io.StringIO()):
            assert train_gpt.main(arguments) == 0
        return statistics.mean(json.loads(file.read_text())["losses"][-20:])


def rounded(build: Callable) -> Callable:
    """`build`, with weights rounded to int8 in blocks of 256, as qwZ rounds what it gathers."""

    def build_rounded(args: argparse.Namespace) -> nn.Module:
        model = build(args)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    blocks = parameter.view(-1, 256)
                    scale = blocks.abs().amax(1, keepdim=True) / 127
                    blocks.copy_((blocks / scale).round() * scale)
        return model

    return build_rounded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("bytes", "losses"))
    parser.add_argument("--rows", default=",".join(ROWS), help="names out of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    chosen = args.rows.split(",")
    bytes_table(chosen) if args.part == "bytes" else losses_table(chosen, args.steps, args.seeds)
