"""Claim: no operator takes above a quarter of a step, unless it is a product, a convolution or attention.

Trains a model of benchmarks/models.py for a few steps on one CPU device under JAX's profiler and lists the instructions of the compiled program
by the time inside them, with their share and the operator of the model that they come from. A fusion that repeats work shows up at the
top: XLA's own counts of operations do not know how often a fused instruction is computed again.

Times are of the thread that runs an instruction; instructions that contain others (loops, branches, calls) count without them.
"""

import argparse
import collections
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import warnings

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
HEAVY = re.compile(r"\b(dot|convolution|ragged-dot)\(")
HEAVY_CALL = re.compile(r"gacc_(flash|product|grouped)|matmul|dot|conv", re.IGNORECASE)
CONTAINERS = ("while", "conditional", "call")
LIMIT = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="NAME or NAME:bf16, of benchmarks/models.py; several run in processes of their own")
    parser.add_argument("--lines", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if len(args.models) == 1:
        profile(args.models[0], args.lines, args.steps)
        return
    for name in args.models:
        subprocess.run([sys.executable, __file__, name, "--lines", str(args.lines), "--steps", str(args.steps)])


def profile(name: str, lines: int, steps: int) -> None:
    """Print the slowest instructions of a model's step."""
    warnings.filterwarnings("ignore")
    os.environ["USE_TORCH_XLA"] = "0"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import torch
    from models import MODELS

    import graphacc

    name, _, precision = name.partition(":")
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model = graphacc.compile(model, devices=1, precision=precision or "fp32", cache_dir=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    for _ in range(3):
        step()
    described = {}
    for program in model.programs:
        described |= describe(program.program.hlo_text())
    milliseconds = measure(step, steps, described)
    total = sum(milliseconds.values())
    print(f"{name} {precision}: {total:.1f} ms inside instructions per step; the model by PyTorch: {model._graphacc_engine.by_pytorch.counts or 'no part'}")
    kinds: collections.Counter[str] = collections.Counter()
    for instruction, value in milliseconds.items():
        kinds[kind_of(described[instruction])] += value
    print("  " + ", ".join(f"{kind} {value:.1f} ms" for kind, value in kinds.most_common(8)))
    for instruction, value in milliseconds.most_common(lines):
        what = described[instruction]
        mark = "  <-- above the limit" if value > LIMIT * total and not what.heavy else ""
        print(f"  {value:8.2f} ms {value / total:6.1%}  {instruction:36.36} {what.shape:34.34} {what.source[-60:]}{mark}")


Described = collections.namedtuple("Described", "opcode shape source target heavy")


def kind_of(what: Described) -> str:
    """What an instruction is counted as: its opcode, its custom call, or a product inside a fusion."""
    return what.target or ("product or convolution" if what.heavy else what.opcode)


def describe(text: str) -> dict[str, Described]:
    """Every instruction of an HLO module: opcode, shape, the operator it comes from, and whether it is a product, a convolution or attention."""
    found, bodies, current = {}, collections.defaultdict(list), ""
    for line in text.splitlines():
        if start := COMPUTATION.match(line):
            current = start.group(1)
        bodies[current].append(line)
    for body in bodies.values():
        for line in body:
            if not (parts := INSTRUCTION.match(line)):
                continue
            name, shape, opcode, rest = parts.groups()
            called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", rest)
            inner = "\n".join(bodies[called.group(1)]) if called else ""
            target = re.search(r'custom_call_target="([^"]*)"', rest)
            source = re.search(r'op_name="([^"]*)"', rest)
            heavy = bool(HEAVY.search(f"{opcode}({inner}")) or bool(target and HEAVY_CALL.search(target.group(1)))
            made_by = target.group(1) if target else ""
            found[name] = Described(opcode, shape, source.group(1) if source else made_by or opcode, made_by, heavy)
    return found


def measure(step, steps: int, described: dict[str, Described]) -> collections.Counter:
    """Milliseconds of a step inside each instruction."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = 3, 0
        with jax.profiler.trace(folder, profiler_options=options), contextlib.redirect_stdout(sys.stderr):
            for _ in range(steps):
                step()
        path = next(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(".xplane.pb"))
        totals: collections.Counter[str] = collections.Counter()
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    operator = str(dict(event.stats).get("hlo_op"))
                    if operator in described and described[operator].opcode not in CONTAINERS:
                        totals[operator] += event.duration_ns / steps / 1e6
    return totals


if __name__ == "__main__":
    main()
