"""Claim: the first step of a GPT-2 of 48 thin layers is there in 20 s after the imports, and in 5 s when the script runs again.

Runs a training script in processes of its own, by PyTorch eager, torch.compile (inductor) and GraphAcc: each twice, the first time with an empty folder for caches and
the second time with what the first left there. Prints for each the seconds and the processor time from the end of the imports to the value of the first loss, and what
GraphAcc says that it spent them on. The model is without dropout; losses of all runs must agree, and those of both runs of GraphAcc have equal bits.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

RUNS = ("eager", "torch.compile", "graphacc")
TOLERANCE = 2e-5
"""Relative, between losses of GraphAcc, torch.compile and eager in fp32 after a few steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--strategy", default="dp=1", help="of GraphAcc; devices are virtual ones of the CPU")
    parser.add_argument("--memory-plan", default="roam", help="of GraphAcc")
    parser.add_argument("--runs", nargs="*", default=RUNS, choices=RUNS)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--train", choices=RUNS, help=argparse.SUPPRESS)  # the script itself
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args)))
        return
    figures = {}
    print(f"{'':14}{'run':>4}{'first step':>12}{'processor':>11}{'later steps':>13}   loss of step {args.steps}")
    for name in args.runs:
        with tempfile.TemporaryDirectory() as caches:
            figures[name] = [run(name, caches) for _ in range(2)]
        for number, found in enumerate(figures[name], 1):
            later = min(found["seconds"][1:], default=float("nan"))
            print(f"{name:14}{number:4}{found['seconds'][0]:10.2f} s{found['processor']:9.2f} s{later:11.3f} s   {found['losses'][-1]:.7f}")
            print("".join(f"    {line}\n" for line in found["lines"]), end="")
    check(figures)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


def run(name: str, caches: str) -> dict:
    """Train in a process of its own, with its caches in a folder."""
    command = [sys.executable, __file__, *sys.argv[1:], "--train", name]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # what pip installs has byte code, too
    environment |= {"XDG_CACHE_HOME": caches, "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "inductor"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("graphacc: ")]
    return json.loads(done.stdout.splitlines()[-1]) | {"lines": lines}


def check(figures: dict) -> None:
    losses = {f"{name}, run {number}": found["losses"] for name, runs in figures.items() for number, found in enumerate(runs, 1)}
    reference = next(iter(losses.values()))
    for name, found in losses.items():
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))
        if worst > TOLERANCE:
            raise SystemExit(f"losses of {name} differ by {worst:.1e} from the first run's: {found} and {reference}")
    if "graphacc" in figures and losses["graphacc, run 1"] != losses["graphacc, run 2"]:
        raise SystemExit(f"both runs of GraphAcc must have equal bits: {losses['graphacc, run 1']} and {losses['graphacc, run 2']}")


def train(args: argparse.Namespace) -> dict:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import graphacc

    torch.manual_seed(0)
    sizes = dict(vocab_size=1024, n_positions=128, n_embd=args.width, n_layer=args.layers, n_head=max(1, args.width // 16), bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randint(1024, (8, 64)) for _ in range(args.steps)]
    start, processor = time.perf_counter(), _processor_seconds()
    if args.train == "graphacc":
        model = graphacc.compile(model, strategy=args.strategy, memory_plan=args.memory_plan)
    elif args.train == "torch.compile":
        model = torch.compile(model)
    seconds, losses = [], []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        now = time.perf_counter()
        seconds.append(now - start)
        if len(seconds) == 1:
            processor = _processor_seconds() - processor
        start = now
    return {"seconds": seconds, "processor": processor, "losses": losses}


def _processor_seconds() -> float:
    """Of this process and of those that it started and waited for, such as inductor's compilers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
