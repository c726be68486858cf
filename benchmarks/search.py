"""Predicted against measured: every strategy of eight virtual CPU devices is estimated, compiled and run.

The plan's hardware is this machine's, as `graphacc calibrate --devices 8` measured it (run that first; nothing is fitted on what is
measured here). For each strategy: seconds of a step predicted and measured (in turn with steps of the chosen strategy: the median over the rounds of how
much longer than the step beside it one takes, so that what the machine's speed changes meanwhile is taken out), bytes of a device predicted and as XLA has them. Below the table: Kendall's tau of the two orders, how much slower the chosen strategy is than the best measured, and how far
memory is off. The best measured ones are measured again before the chosen one is compared with them. The machine must be quiet.

    graphacc calibrate --devices 8
    python benchmarks/search.py gpt2                  # half an hour on two cores; another number of tokens: BATCH and LENGTH below
    python benchmarks/search.py mixtral --every 4     # a sample
    python benchmarks/search.py plan                  # Llama-8B on 128 H100 and Mixtral-8x7B on 64: seconds and memory of the planning itself
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import time

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers

import graphacc
from graphacc.costs.hardware import Hardware
from graphacc.errors import StrategyError
from graphacc.search.model import search_of
from graphacc.search.space import Refusals, Request, candidates

DEVICES, BATCH, LENGTH, VOCABULARY = 8, 8, 64, 2048
AGAIN = 3  # strategies that are measured again: of many times the least is one that was measured too short
COMMON = dict(vocab_size=VOCABULARY, use_cache=False, bos_token_id=0, eos_token_id=0)


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(n_positions=LENGTH, n_embd=256, n_layer=4, n_head=8, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **COMMON)
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, **COMMON)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, **COMMON
    )
    return transformers.MixtralForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


class Measured:
    """A compiled model, and the seconds of its steps."""

    def __init__(self, make, strategy, batch: dict):
        torch.manual_seed(0)
        self.model = graphacc.compile(make(), strategy=strategy, devices=DEVICES, cache_dir=None)
        self.optimizer, self.batch = torch.optim.AdamW(self.model.parameters(), lr=1e-4), batch
        for _ in range(2):
            self.step()
        self.bytes = self.model.memory().measured_bytes

    def step(self) -> float:
        start = time.perf_counter()
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - start


def beside(reference: Measured, other: Measured, rounds: int) -> list[float]:
    """How much longer than a step of the reference one of the other takes that follows it."""
    steps = [(reference.step(), other.step()) for _ in range(rounds)]
    return [theirs / mine for mine, theirs in steps]


def compare(args: argparse.Namespace) -> None:
    make = MODELS[args.model]
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    hardware = Hardware.present(DEVICES)
    print(f"{hardware}: {hardware.source}")
    search = search_of(make(), batch, None, hardware)
    rows = []
    everything = []
    for strategy in candidates(Request.parse("auto", DEVICES), search.limits(), Refusals()):
        try:
            everything.append((search.estimate(strategy).seconds, strategy))
        except StrategyError:
            continue
    everything.sort(key=lambda item: item[0])
    plan = search.run(Request.parse("auto", DEVICES))
    chosen = [strategy for i, (_, strategy) in enumerate(everything) if i % args.every == 0 or strategy == plan.strategy]
    print(f"{'strategy':44}{'predicted ms':>13}{'measured ms':>12}{'ratio':>7}{'predicted MB':>13}{'XLA MB':>9}{'ratio':>7}")
    reference = Measured(make, plan.strategy, batch)
    usual = statistics.median(reference.step() for _ in range(3 * args.rounds))
    for strategy in chosen:
        estimate = search.evaluate(strategy)
        other = Measured(make, strategy, batch)
        ratios = beside(reference, other, args.rounds)
        seconds, size = usual * statistics.median(ratios), other.bytes
        rows.append(dict(strategy=str(strategy), predicted=estimate.seconds, measured=seconds, ratios=ratios, predicted_bytes=estimate.bytes_per_device, bytes=size, needed=search.needed(estimate), parts=estimate.parts()))
        print(f"{strategy!s:44}{estimate.seconds * 1e3:13.1f}{seconds * 1e3:12.1f}{estimate.seconds / seconds:7.2f}{estimate.bytes_per_device / 1e6:13.1f}{size / 1e6:9.1f}{estimate.bytes_per_device / size:7.2f}", flush=True)
    best = 1.0
    for row in sorted(rows, key=lambda row: row["measured"])[:AGAIN]:
        if row["strategy"] != str(plan.strategy):
            again = statistics.median(beside(reference, Measured(make, row["strategy"], batch), 3 * args.rounds))
            print(f"again, {row['strategy']}: {again:.3f} of the chosen one's time")
            best = min(best, again)
    ratios = sorted(row["predicted_bytes"] / row["bytes"] for row in rows)
    print(f"chosen: {plan.strategy}; {1 / best - 1:+.1%} of the best measured time; Kendall's tau {tau(rows):.2f} of {len(rows)} strategies")
    print(f"memory: predicted / XLA from {ratios[0]:.2f} to {ratios[-1]:.2f}; within 5 %: {sum(abs(r - 1) <= 0.05 for r in ratios) / len(ratios):.0%}; with the margin too low by more than 2 %: {sum(row['needed'] < 0.98 * row['bytes'] for row in rows)}")
    if args.output:
        pathlib.Path(args.output).write_text(json.dumps(rows, indent=1))


def tau(rows: list[dict]) -> float:
    """Kendall's rank correlation of predicted and measured seconds."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    agree = sum(((a["predicted"] - b["predicted"]) * (a["measured"] - b["measured"]) > 0) - ((a["predicted"] - b["predicted"]) * (a["measured"] - b["measured"]) < 0) for a, b in pairs)
    return agree / max(1, len(pairs))


def plan_large(args: argparse.Namespace) -> None:
    """The planning of two models that this machine could not hold."""
    with torch.device("meta"):
        llama8b = transformers.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, use_cache=False)
        mixtral8x7b = transformers.MixtralConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, vocab_size=32000, use_cache=False)
        for name, make, config, hardware, rows in (
            ("Llama-8B", transformers.LlamaForCausalLM, llama8b, "16x8xH100", 128),
            ("Mixtral-8x7B", transformers.MixtralForCausalLM, mixtral8x7b, "8x8xH100", 64),
        ):
            if args.only and args.only not in name:
                continue
            ids = torch.zeros(rows, 4096, dtype=torch.long)
            start = time.perf_counter()
            model = make(config)
            made = time.perf_counter() - start
            plan = graphacc.plan(model, {"input_ids": ids, "labels": ids}, hardware=hardware, precision="bf16")
            total = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"== {name}, {hardware}: {total:.1f} s ({made:.1f} s the model), {peak:.2f} GiB of this process at most\n{plan}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "plan"])
    parser.add_argument("--every", type=int, default=1, help="of the strategies in order of predicted time, every so many-th")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="of `plan`: a part of the model's name")
    parser.add_argument("--output", help="JSON of the table")
    args = parser.parse_args()
    plan_large(args) if args.model == "plan" else compare(args)


if __name__ == "__main__":
    main()
