"""Predicted against published: training steps that others have measured on clusters, from the model of costs that the search uses.

`published_steps.csv` has 279 runs with model, hardware, strategy and throughput, each with its source (a public repository, and the file in
it). They are other programs than ours, so what is compared is how the model of costs sees their strategy. Rows that our space cannot express
are counted, with the reason. A model is captured with three layers on the meta device and stands for one of any depth, as equal layers do in
the search (`graphacc.costs.repeats`); its profiles, by the real passes, serve all rows with its microbatch.

Printed per source: the median error of the seconds of a step, predicted / published (median), and Kendall's tau of tokens per second and
device (over all pairs, and over those whose rates are more than 2 % apart: the same step measured twice differs by 1 to 6 %). Then the same after four constants of the hardware, which stand for how good the source's kernels and links are, were fitted to half of the source's
models (every second one by size), on the models of the other half; the other way round; and of the whole source (`all others`), where each
run is predicted by the constants that were fitted without its model.

    python benchmarks/published.py              # six minutes on two cores
    python benchmarks/published.py torchtitan   # sources with this in their name
"""

import argparse
import collections
import csv
import dataclasses
import math
import pathlib
import statistics
import time

import numpy as np
import scipy.optimize
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphacc.costs.hardware import Chip, Hardware
from graphacc.costs.seconds import COLLECTIVES
from graphacc.errors import StrategyError
from graphacc.search import Search
from graphacc.search.estimate import Estimate, Profile
from graphacc.search.model import search_of
from graphacc.search.pipeline import Depth, chunks_of_profile, estimate_of
from graphacc.strategy import Strategy

RUNS = pathlib.Path(__file__).with_name("published_steps.csv")
LAYERS = 3  # that are captured
CHIPS = {"H100-SXM-80G": "H100", "H100-SXM-96G-500W": "H100", "H200-SXM-141G": "H200", "A100-SXM-80G": "A100-80", "A100-SXM-40G": "A100-40", "TPU-v6e": "TPUv6e"}
ERROR, PRIOR = 0.03, 0.3  # of a run's predicted seconds; of a constant: both relative
CONSTANTS = ("product", "memory", "attention", "links")  # what `fitted` scales


class NotExpressible(Exception):
    """A row that the space of strategies, or the table, lacks something for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder, and how much of it is checkpointed by itself: what a capture depends on."""

    kind: str  # "gpt" or "llama"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    length: int
    checkpoint: str  # "", "mlp and attention" or "every second product"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A row."""

    source: str
    model: str
    parameters: int
    shape: Shape
    strategy: Strategy
    hardware: Hardware
    microbatch: int  # rows of one device
    seconds: float | None  # of a step; None: it ran out of memory
    memory_gib: float | None
    sums_once: bool  # gradients over the ranks, behind the last microbatch

    @property
    def tokens(self) -> int:
        """Of a step, for each device."""
        return self.microbatch * self.strategy.microbatches * self.strategy.dp * self.strategy.fsdp * self.shape.length // self.strategy.num_devices


# ---- the table


def read(path: pathlib.Path = RUNS) -> tuple[list[Run], collections.Counter]:
    """The runs that can be predicted; for the others, how often each reason occurs."""
    runs, reasons = [], collections.Counter()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                runs.append(run_of(row))
            except NotExpressible as reason:
                reasons[str(reason)] += 1
    return runs, reasons


def run_of(row: dict[str, str]) -> Run:
    _check(row)
    data = int(row["dp"]) * int(row["fsdp"])
    sequences, devices = int(row["global_batch"]), int(row["num_gpus"])
    if sequences % (data * int(row["microbatch"])):
        raise NotExpressible("a batch that the microbatches do not divide")
    strategy = Strategy(
        **({"dp": data} if row["zero"] == "0" else {"dp": int(row["dp"]), "fsdp": int(row["fsdp"])} if int(row["zero"]) > 1 else {"fsdp": data}),
        **({} if row["zero"] == "0" or data == 1 else {"zero": int(row["zero"])}),
        tp=int(row["tp"]),
        sequence_parallel=row["sp"] == "1" and int(row["tp"]) > 1,
        cp=int(row["cp"] or 1),
        pp=int(row["pp"] or 1),
        **({"schedule": "interleaved", "chunks": int(row["vpp"])} if int(row["vpp"] or 1) > 1 else {}),
        context="ring" if int(row["cp"] or 1) > 1 and row["sp"] != "1" else "ulysses",  # the ring with sequence parallelism is refused
        microbatches=sequences // data // int(row["microbatch"]),
        remat="blocks" if row["recompute"] == "full" else (("*", "products"),) if "SAVE_DOT_ONLY" in row["note"] else "none",
        precision="bf16",
        reduce_dtype="bf16" if row["precision"] == "bf16-pure" else "fp32",
    )
    if strategy.num_devices != devices:
        raise NotExpressible("axes that do not multiply to the devices")
    shape = Shape(
        kind="llama" if row["model"].startswith("llama") else "gpt",
        **{name: int(row[name]) for name in ("layers", "hidden", "heads", "ffn")},
        kv_heads=int(row["kv_heads"] or row["heads"]),
        vocabulary=int(row["vocab"]),
        length=int(row["seq"]),
        checkpoint="mlp and attention" if row["recompute"] == "custom" else "every second product" if row["recompute"] == "selective" and strategy.remat == "none" else "",
    )
    rate = float(row["tokens_per_s_per_gpu"] or 0)
    return Run(
        source=source_of(row),
        model=row["model"],
        parameters=int(float(row["params"] or 0)) or shape.layers * shape.hidden**2,
        shape=shape,
        strategy=strategy,
        hardware=hardware_of(row["gpu"], devices),
        microbatch=int(row["microbatch"]),
        seconds=sequences * shape.length / (rate * devices) if rate else None,
        memory_gib=float(row["mem_gib"]) if row["mem_gib"] else None,
        sums_once=strategy.zero_stage <= 1,
    )


def _check(row: dict[str, str]) -> None:
    """
    Raises:
        NotExpressible: the row says too little, or what it says has no field in a strategy.
    """
    reasons = (
        ("fp8", row["precision"].startswith("fp8")),
        ("the strategy is not said", not row["tp"]),
        ("experts", row["ep"] not in ("", "1")),
        ("activations on the host", "offload" in row["recompute"]),
        ("the number of layers is not said", not row["layers"]),
        ("the number of heads is not said", not row["heads"]),
        ("the microbatch is not said", not row["microbatch"]),
        ("attention is not fused", "unfused" in row["note"]),
        ("tp's exchanges hide behind its products", "async TP" in row["note"]),
        ("neither time nor 'out of memory'", not row["tokens_per_s_per_gpu"] and "OUT OF MEMORY" not in row["note"]),
    )
    for reason, holds in reasons:
        if holds:
            raise NotExpressible(reason)


def source_of(row: dict[str, str]) -> str:
    """The repository, in it the software, and the chip: what has constants of its own."""
    repository = row["source"].split("@")[0].split(":")[0].split(" ")[0]
    software = ""
    if "dgxc" in repository:
        software = next((name for name in (" MaxText", " Paxml") if name.strip().lower() in row["source"]), " NeMo")
    if row["note"].startswith("eager"):
        software = " eager"
    precision = " pure" if row["precision"] == "bf16-pure" else ""
    return f"{repository}{software}, {row['gpu'].split('-')[0]}{'-' + row['gpu'].split('-')[2] if 'SXM' in row['gpu'] else ''}{precision}"


def hardware_of(gpu: str, devices: int) -> Hardware:
    name = CHIPS[gpu]
    on_hosts = devices > 8 and not name.startswith("TPU")
    found = Hardware.parse(f"{devices // 8}x8x{name}" if on_hosts else f"{devices}x{name}")
    if gpu == "H100-SXM-96G-500W":  # HBM2e, as its source says
        found = found.replace(chip=dataclasses.replace(found.chip, memory_bandwidth=2.4e12, memory_bytes=95 * 2**30))
    return found


# ---- the models


class Block(nn.Module):
    """Of GPT-3 and MPT; without biases, as MPT has none."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.hidden, bias=False), nn.LayerNorm(shape.hidden, bias=False)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.up, self.down = nn.Linear(shape.hidden, shape.ffn, bias=False), nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(shape.hidden, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def llama(shape: Shape) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=LAYERS, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, vocab_size=shape.vocabulary, max_position_embeddings=shape.length, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers if shape.checkpoint else ():
        if shape.checkpoint == "mlp and attention":
            layer.self_attn, layer.mlp = Checkpointed(layer.self_attn, products_alone), Checkpointed(layer.mlp)
        else:
            layer.self_attn, layer.mlp = (Checkpointed(module, every_second_product) for module in (layer.self_attn, layer.mlp))
    return model


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, contexts=None):
        super().__init__()
        self.inner, self.options = inner, {} if contexts is None else {"context_fn": contexts}

    def forward(self, *args, **kwargs):
        return checkpoint(self.inner, *args, use_reentrant=False, **self.options, **kwargs)


def products_alone():
    """As MaxText's policies that save the projections by name: of attention, q, k, v and the output's are kept; what lies between them, the fused attention, runs again."""

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def every_second_product():
    """As torchtitan's selective checkpointing: attention and every second product are kept."""
    count = collections.Counter()

    def policy(context, operator, *args, **kwargs):
        if operator is torch.ops.aten.mm.default:
            count[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if count[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if "attention" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# ---- predictions


class Profiles:
    """A capture for each shape, and a profile for each way in which a device computes it."""

    def __init__(self, runs: list[Run]):
        self.rows = collections.defaultdict(int)  # of a capture: what all its microbatches divide
        for run in runs:
            known = self.rows[run.shape] or 2
            self.rows[run.shape] = math.lcm(known, 2 * run.microbatch)
        self._searches: dict[Shape, Search] = {}
        self._depths: dict[Shape, Depth] = {}
        self._profiles: dict[tuple, Profile] = {}
        self._priced: dict[tuple, Profile] = {}

    def estimate(self, run: Run, hardware: Hardware) -> Estimate:
        """Of one step, with gradients that stay between microbatches."""
        strategy = run.strategy
        key = run.shape, run.microbatch, strategy.tp, strategy.sequence_parallel, strategy.cp, strategy.remat, strategy.reduce_dtype
        if key not in self._profiles:
            rank = strategy.replace(dp=self.rows[run.shape] // run.microbatch, fsdp=1, zero=None, microbatches=1, pp=1, schedule="1f1b", chunks=1)
            self._profiles[key] = self._search(run.shape).profile_of(rank)
        profile = self._at(key, hardware.chip)
        if strategy.pp > 1:
            share = run.microbatch / self.rows[run.shape]
            chunks = chunks_of_profile(profile, self._depth(run.shape), strategy, hardware, share, sums_once=run.sums_once)
            return estimate_of(chunks, strategy, hardware, plays=False)
        found = profile.estimate(strategy, hardware, sums_once=run.sums_once)
        kept = profile.gradient_bytes(strategy) if strategy.microbatches > 1 else 0
        return dataclasses.replace(found, other_bytes=found.other_bytes + kept)

    def _at(self, key: tuple, chip: Chip) -> Profile:
        if len(self._priced) > 1000:
            self._priced.clear()
        if (key, chip) not in self._priced:
            profile = self._profiles[key]
            self._priced[key, chip] = dataclasses.replace(profile, cost=profile.cost.on(chip))
        return self._priced[key, chip]

    def _depth(self, shape: Shape) -> Depth:
        if shape not in self._depths:
            self._depths[shape] = Depth(self._search(shape).reduced)
        return self._depths[shape]

    def _search(self, shape: Shape) -> Search:
        if shape not in self._searches:
            with torch.device("meta"):
                model = llama(shape) if shape.kind == "llama" else Gpt(shape)
                ids = torch.zeros(self.rows[shape], shape.length, dtype=torch.long)
            search = search_of(model, {"input_ids": ids, "labels": ids}, None, Hardware.parse("H100"), precision="bf16")
            search.reduced = search.reduced.of_depth(shape.layers)
            self._searches[shape] = search
        return self._searches[shape]


def scaled(hardware: Hardware, constants: dict[str, float]) -> Hardware:
    """The hardware with its efficiencies multiplied by these."""
    chip = hardware.chip
    chip = dataclasses.replace(
        chip,
        product_efficiency=tuple((size, min(1.0, share * constants["product"])) for size, share in chip.product_efficiency),
        memory_efficiency=min(1.0, chip.memory_efficiency * constants["memory"]),
        attention_efficiency=chip.attention_efficiency * constants["attention"],
    )
    return hardware.replace(chip=chip, collective_shares=tuple((kind, constants["links"]) for kind in COLLECTIVES))


def errors(runs: list[Run], profiles: Profiles, constants: dict[str, float]) -> np.ndarray:
    """log(predicted / published) seconds [runs]."""
    return np.array([math.log(profiles.estimate(run, scaled(run.hardware, constants)).seconds / run.seconds) for run in runs])


def fitted(runs: list[Run], profiles: Profiles) -> dict[str, float]:
    """The constants that are most likely for these runs (errors of about `ERROR`), and are known beforehand to within about `PRIOR`: those that the runs say little about stay near 1."""

    def loss(logs: np.ndarray) -> float:
        logs = np.clip(logs, -3, 3)
        return float(np.abs(errors(runs, profiles, dict(zip(CONSTANTS, np.exp(logs), strict=True)))).mean() + ERROR / (2 * PRIOR**2 * len(runs)) * np.square(logs).sum())

    start = np.zeros(len(CONSTANTS))
    simplex = np.vstack([start, start - 0.4 * np.eye(len(CONSTANTS))])
    found = scipy.optimize.minimize(loss, start, method="Nelder-Mead", options={"initial_simplex": simplex, "maxfev": 250, "xatol": 1e-2, "fatol": 1e-4})
    return dict(zip(CONSTANTS, map(float, np.exp(np.clip(found.x, -3, 3))), strict=True))


def tau(runs: list[Run], logs: np.ndarray, apart: float = 0.0) -> float:
    """Kendall's rank correlation of predicted and published tokens per second and device, over pairs whose published rates differ by more than `apart`, relatively."""
    published = np.log([run.tokens / run.seconds for run in runs])
    differences, predicted = np.subtract.outer(published, published), np.subtract.outer(published - logs, published - logs)
    counted = np.abs(differences) > math.log1p(apart)
    return float((np.sign(differences) * np.sign(predicted))[counted].mean()) if counted.any() else math.nan


def said(runs: list[Run], logs: np.ndarray) -> str:
    absolute = np.abs(np.expm1(logs))
    return f"{100 * statistics.median(absolute):5.1f} %  predicted / published {math.exp(statistics.median(logs)):4.2f}  tau {tau(runs, logs):5.2f}, of pairs 2 % apart {tau(runs, logs, 0.02):5.2f}  ({len(runs)} runs)"


def halves(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """By model: every second one in the order of size."""
    models = sorted({run.model for run in runs}, key=lambda name: (next(run.parameters for run in runs if run.model == name), name))
    return [run for run in runs if run.model in models[::2]], [run for run in runs if run.model in models[1::2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="", help="part of a source's name")
    parser.add_argument("--runs", action="store_true", help="print every run")
    parser.add_argument("--table", type=pathlib.Path, default=RUNS, help="another table with the same columns")
    args = parser.parse_args()
    start = time.process_time()
    runs, reasons = read(args.table)
    runs = [run for run in runs if args.source in run.source]
    print(f"{len(runs)} runs, and {sum(reasons.values())} of the table that are left out:" + "".join(f"\n  {count:3} {reason}" for reason, count in reasons.most_common()))
    profiles = Profiles(runs)
    unfitted = dict.fromkeys(CONSTANTS, 1.0)
    by_source: dict[str, list[Run]] = {}
    for run in runs:
        try:
            estimate = profiles.estimate(run, run.hardware)
        except StrategyError as error:
            print(f"refused: {run.source}, {run.model}, {run.strategy}: {error}")
            continue
        if run.seconds is not None:
            by_source.setdefault(run.source, []).append(run)
        if args.runs:
            parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in estimate.parts().items())
            published = "out of memory" if run.seconds is None else f"{run.seconds:.3g} s, predicted / published {estimate.seconds / run.seconds:.2f}"
            print(f"  {run.source} {run.model} T={run.shape.length} b={run.microbatch} {run.hardware} {run.strategy}: {published} ({parts})")
        if run.memory_gib is not None or run.seconds is None:
            published = "ran out of memory" if run.seconds is None else f"{run.memory_gib:.1f} GiB published"
            print(f"memory: {run.source}, {run.model}, {run.strategy}: {published}, {estimate.bytes_per_device / 2**30:.1f} predicted of {run.hardware.usable_bytes / 2**30:.0f}")
    print(f"profiles: {time.process_time() - start:.0f} s of processor time, {len(profiles._profiles)} of {len(profiles._searches)} captures", flush=True)
    for source, found in by_source.items():
        print(f"\n{source}\n  unfitted: {said(found, errors(found, profiles, unfitted))}")
        one, other = halves(found)
        held_out, logs = [], []
        for train, test in ((one, other), (other, one)) if other else ():
            constants = fitted(train, profiles)
            logs.append(errors(test, profiles, constants))
            held_out += test
            print(f"  others:   {said(test, logs[-1])} fitted on {', '.join(dict.fromkeys(run.model for run in train))}: " + ", ".join(f"{name} {value:.2f}" for name, value in constants.items()), flush=True)
        if held_out:
            print(f"  all others: {said(held_out, np.concatenate(logs))}", flush=True)
    print(f"\n{time.process_time() - start:.0f} s of processor time")


if __name__ == "__main__":
    main()
