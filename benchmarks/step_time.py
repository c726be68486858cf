"""Claim: a compiled step on one CPU device is not slower than PyTorch eager, and this is where its time goes.

Runs the example's model with plain PyTorch eager and with GraphAcc in the same process, step by step in turn, with the
same number of threads, and prints the medians, the ratio and the breakdown of GraphAcc's step by kind of operator.
"""

import argparse
import collections
import copy
import os
import statistics
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    args = parser.parse_args()
    os.environ["USE_TORCH_XLA"] = "0"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # XLA sizes its thread pool by it
    run(args)


def run(args: argparse.Namespace) -> None:
    import torch

    import graphacc

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    eager = build_model(args)
    compiled = graphacc.compile(copy.deepcopy(eager), devices=1, strategy=graphacc.Strategy())
    batch = torch.randint(args.vocabulary, (args.batch, args.length))
    steps = {"PyTorch eager": Loop(eager, batch), "PyTorch eager, fused AdamW": Loop(copy.deepcopy(eager), batch, fused=True)}
    steps["GraphAcc"] = Loop(compiled, batch)
    seconds = collections.defaultdict(list)
    for number in range(args.steps + 2):
        for name, loop in steps.items():
            start = time.perf_counter()
            loop.step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    print(f"GPT-2, {args.layers} layers, hidden {args.hidden}, batch {args.batch} x {args.length}, vocabulary {args.vocabulary}, fp32, AdamW")
    print(f"{args.threads} threads, torch {torch.__version__}, {args.steps} steps each, in turn")
    base = statistics.median(seconds["PyTorch eager"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:28} {median * 1e3:8.1f} ms  {median / base:5.2f} x eager  (min {min(values) * 1e3:.1f}, max {max(values) * 1e3:.1f})")
    print(compiled.explain())
    breakdown(steps["GraphAcc"])


class Loop:
    """The plain training loop on one fixed batch."""

    def __init__(self, model, batch, *, fused: bool | None = None):
        import torch

        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step(self) -> float:
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def build_model(args: argparse.Namespace):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_positions=args.length,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def breakdown(loop: Loop, steps: int = 3) -> None:
    """Print the share of each kind of XLA operator, from JAX's profiler."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 3
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            for _ in range(steps):
                loop.step()
            wall = (time.perf_counter() - start) / steps
        path = next(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(".xplane.pb"))
        data = jax.profiler.ProfileData.from_file(path)
        totals: collections.Counter[str] = collections.Counter()
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    operator = dict(event.stats).get("hlo_op")
                    if operator:
                        totals[str(operator).split(".")[0].rstrip("0123456789_")] += event.duration_ns / steps / 1e6
    print(f"GraphAcc's step under the profiler: {wall * 1e3:.1f} ms; time inside XLA's operators, by kind (threads overlap):")
    for kind, milliseconds in totals.most_common(12):
        print(f"  {kind:40} {milliseconds:8.1f} ms")


if __name__ == "__main__":
    main()
