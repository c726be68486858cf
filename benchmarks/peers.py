"""Claim: a step of GraphAcc on one CPU device takes at most torch.compile's time, model by model.

For each model one process of its own: PyTorch eager, eager with fused AdamW, torch.compile with fused AdamW and GraphAcc train copies of it,
a step each in turn, with the same number of threads. Prints medians, their ratios to eager, and what the first step took. A model or a peer that fails
loses only its own figures. bf16 is autocast for PyTorch and `precision="bf16"` here.
"""

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import time
import warnings

DEFAULT = ["gpt2", "llama", "bert", "resnet", "mixtral", "gpt2:bf16"]
PEERS = ["eager", "fused", "torch.compile", "graphacc"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=DEFAULT, help="NAME or NAME:bf16, of benchmarks/models.py")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--without", nargs="*", default=[], choices=PEERS[1:], help="peers to leave out")
    parser.add_argument("--output", help="a file for the figures, as JSON lines")
    parser.add_argument("--alone", action="store_true", help="measure the one model in this process")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.models[0], args)))
        return
    print(f"{args.threads} threads, medians of {args.rounds} steps in turn, ms (over eager), [first step, s]")
    print(f"{'model':16}" + "".join(f"{peer:>30}" for peer in PEERS), flush=True)
    for name in args.models:
        report(name, args)


def report(name: str, args: argparse.Namespace) -> None:
    """One model's line, from a process of its own."""
    command = [sys.executable, __file__, name, "--alone", "--rounds", str(args.rounds), "--threads", str(args.threads), "--without", *args.without]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        found = {"model": name, "failed": {"process": f"exit code {done.returncode}: {done.stderr[-500:]}"}, "ms": {}}
    if args.output:
        with open(args.output, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    cells = []
    for peer in PEERS:
        ms = found["ms"].get(peer)
        cells.append("-" if ms is None else f"{ms:.1f} ({ms / found['ms']['eager']:.2f}) [{found['first_seconds'][peer]:.0f}]")
    print(f"{name:16}" + "".join(f"{cell:>30}" for cell in cells), flush=True)
    for peer, why in found["failed"].items():
        print(f"  {peer} failed: {why}", flush=True)


def measure(name: str, args: argparse.Namespace) -> dict:
    """Median milliseconds of each peer's step."""
    warnings.filterwarnings("ignore")
    os.environ["USE_TORCH_XLA"] = "0"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # XLA sizes its thread pool by it
    import torch

    torch.set_num_threads(args.threads)
    steps, first, failed = {}, {}, {}
    for peer in PEERS:
        if peer in args.without:
            continue
        try:
            start = time.perf_counter()
            step = make_step(name, peer)
            loss = step()
            first[peer] = time.perf_counter() - start
            step()
            steps[peer] = step
            print(f"{peer}: first loss {loss}", file=sys.stderr)
        except Exception as error:  # a peer's failure is a result
            failed[peer] = f"{type(error).__name__}: {str(error)[:300]}"
    seconds = {peer: [] for peer in steps}
    for _ in range(args.rounds):
        for peer, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[peer].append(time.perf_counter() - start)
    medians = {peer: 1e3 * statistics.median(values) for peer, values in seconds.items()}
    least = {peer: 1e3 * min(values) for peer, values in seconds.items()}
    return {"model": name, "threads": args.threads, "torch": torch.__version__, "ms": medians, "min_ms": least, "first_seconds": first, "failed": failed}


def make_step(name: str, peer: str):
    """A function that trains a fresh copy of the model for one step and returns its loss."""
    import torch
    from models import MODELS

    import graphacc

    name, _, precision = name.partition(":")
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model, autocast = copy.deepcopy(model), contextlib.nullcontext
    if peer == "graphacc":
        model = graphacc.compile(model, devices=1, precision=precision or "fp32", cache_dir=None)
    elif precision:
        autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    if peer == "torch.compile":
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if peer in ("fused", "torch.compile") else None)

    def step() -> float:
        with autocast():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
