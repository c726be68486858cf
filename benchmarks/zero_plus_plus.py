"""ZeRO++ against ZeRO-3: bytes that cross nodes, in programs compiled for H100s, and losses of the example.

    python benchmarks/zero_plus_plus.py bytes            # two nodes of four H100s, without a GPU (needs JAX's CUDA plugin: see plan_cuda.py)
    python benchmarks/zero_plus_plus.py losses           # the example's GPT-2 on eight virtual CPU devices, 200 steps, three seeds

Bytes are counted in the optimised HLO, scales and padding included, in units of the bf16 model: a collective that crosses nodes brings each part of a
tensor into a node once (a gather, a scatter), an exchange what the ranks of a node get from others. Of k nodes, each gets (k - 1) / k of a tensor, which
counts as the whole. Losses are means of the last 20 steps.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

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
    from graphacc.examples import train_gpt

    exact: dict[int, float] = {}
    for name in ["ZeRO-3", *(name for name in names if name != "ZeRO-3")]:
        means = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "run.json"
                strategy = ",".join(filter(None, (f"fsdp={RANKS}", ROWS[name])))
                arguments = ["--strategy", strategy, "--steps", str(steps), "--seed", str(seed), "--json", str(file)]
                assert train_gpt.main(arguments) == 0
                means.append(statistics.mean(json.loads(file.read_text())["losses"][-20:]))
            exact.setdefault(seed, means[seed])
        differences = [mean - exact[seed] for seed, mean in enumerate(means)]
        text = ", ".join(f"{mean:.4f} ({difference:+.4f})" for mean, difference in zip(means, differences))
        print(f"{name:8} last 20 of {steps} steps by seed: {text}; mean {statistics.mean(differences):+.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("bytes", "losses"))
    parser.add_argument("--rows", default=",".join(ROWS), help="names out of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    chosen = args.rows.split(",")
    bytes_table(chosen) if args.part == "bytes" else losses_table(chosen, args.steps, args.seeds)
