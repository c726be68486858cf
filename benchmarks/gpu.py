"""Claim: on one NVIDIA GPU GraphAcc gives PyTorch's results, and more tokens per second than torch.compile with SDPA.

Runs from the source tree with the installed Python, torch and jax, and installs nothing. Every part is a process of its own with a time limit, and
reports alone: one that fails loses only its own figures. Writes ``gpu.json`` (a line per part) and prints a table. ``--small`` takes small models, which
a machine without a GPU can run: there it shows that the parts work, and nothing about speed.
"""

import argparse
import collections
import concurrent.futures
import copy
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = {}
"""Name -> (function of the arguments that gives the figures, seconds that it may take, whether it measures speed and so runs alone)."""
PEERS = ("graphacc", "graphacc, cheap work again", "graphacc, XLA's plan", "torch.compile", "eager")
SECONDS = 570  # of all parts
QUEUED = 10  # calls of a kernel in a row
FIRST = ("environment", "build")  # one after the other, before the rest; then all that measure no speed at once, then those that do alone


def part(seconds: int, timed: bool = False):
    def register(function):
        PARTS[function.__name__] = function, seconds, timed
        return function

    return register


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ROOT / "build" / "gpu")))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="small models, for a machine without a GPU")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each peer")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="of the parts that measure steps")
    parser.add_argument("--alone", choices=PARTS, help="run one part in this process")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(ROOT))
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch's memory is on the same GPU
    os.environ["USE_TORCH_XLA"] = "0"
    if args.alone:
        print(json.dumps(PARTS[args.alone][0](args)))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + SECONDS
    first = [name for name in args.parts if name in FIRST]
    checks = [name for name in args.parts if name not in FIRST and not PARTS[name][2]]
    timed = [name for name in args.parts if PARTS[name][2]]
    with open(args.output / "gpu.json", "w", encoding="utf-8") as file:
        for together in (*([name] for name in first), checks, *([name] for name in timed)):
            with concurrent.futures.ThreadPoolExecutor(max(1, len(together))) as threads:
                started = [threads.submit(run, name, args, min(PARTS[name][1], end - time.monotonic())) for name in together]
                for future in concurrent.futures.as_completed(started):
                    found = future.result()
                    file.write(json.dumps(found) + "\n")
                    file.flush()
                    show(found)


def run(name: str, args: argparse.Namespace, seconds: float) -> dict:
    """One part in a process of its own."""
    if seconds < 5:
        return {"part": name, "failed": f"not run: {SECONDS} s are over"}
    command = [sys.executable, __file__, "--alone", name, "--rounds", str(args.rounds), "--output", str(args.output), *["--small"] * args.small, "--peers", *args.peers]
    start, log = time.monotonic(), args.output / f"{name}.log"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        log.write_text(f"{_text(error.stdout)}\n{_text(error.stderr)}", encoding="utf-8")
        return {"part": name, "failed": f"not finished in {seconds:.0f} s", "seconds": seconds}
    log.write_text(f"{done.stdout}\n{done.stderr}", encoding="utf-8")
    result = {"part": name, "seconds": round(time.monotonic() - start, 1)}
    if done.returncode:
        return result | {"failed": f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}"}
    return result | json.loads(done.stdout.splitlines()[-1])


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def show(found: dict) -> None:
    print(f"{found['part']:14} {found.get('seconds', 0):6.1f} s  {'FAILED ' + found['failed'] if 'failed' in found else 'ok'}", flush=True)
    for name, value in found.items():
        if name in ("part", "seconds", "failed"):
            continue
        if isinstance(value, dict):
            for key, figure in value.items():
                print(f"    {key}: {figure}", flush=True)
        else:
            print(f"    {name}: {value}", flush=True)


# ---- the machine


@part(60)
def environment(args: argparse.Namespace) -> dict:
    """Versions, and the devices that torch and JAX see."""
    names = ["torch", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton", "transformers", "safetensors", "ortools", "numpy"]
    versions = {"python": sys.version.split()[0]}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    import jax
    import torch

    devices = {"torch": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "jax": str(jax.devices())}
    return {"versions": versions, "devices": devices}


@part(240)
def build(args: argparse.Namespace) -> dict:
    """The native library, from csrc/, into the source tree."""
    folder = args.output / "csrc"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), *generator, "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(folder), "--parallel"],
        ["cmake", "--install", str(folder), "--component", "python", "--prefix", str(ROOT)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    from graphacc.kernels import library

    library.load()
    return {"library": "built and loaded"}


# ---- results


def _gpt2(layers: int, hidden: int, heads: int, vocabulary: int, length: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, n_positions=length, use_cache=False, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa"))


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, length: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary, max_position_embeddings=length, use_cache=False, attn_implementation="sdpa"))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    return MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=128, use_cache=False, attn_implementation="sdpa", experts_implementation="grouped_mm"))


def _resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10))


def _losses(model, batch: dict, steps: int, autocast: bool = False) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _recurrent():
    """A language model of two LSTM layers, called as those of transformers are."""
    from torch import nn
    from torch.nn import functional as F
    from transformers.modeling_outputs import CausalLMOutput

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm, self.head = nn.Embedding(128, 64), nn.LSTM(64, 64, num_layers=2, batch_first=True), nn.Linear(64, 128)

        def forward(self, input_ids, labels):
            logits = self.head(self.lstm(self.embedding(input_ids))[0])
            return CausalLMOutput(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    return Recurrent()


@part(240)
def parity(args: argparse.Namespace) -> dict:
    """Three steps on the device against PyTorch on the CPU: in fp32 the largest relative difference of losses and of parameters; in bf16 their distance
    from PyTorch's fp32, beside that of PyTorch's autocast."""
    import torch

    torch.manual_seed(0)
    tokens = torch.randint(128, (4, 64))
    text = {"input_ids": tokens, "labels": tokens}
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))}
    gpt2 = _gpt2(2, 64, 4, 128, 64)
    models = {"gpt2": (gpt2, text), "llama": (_llama(2, 64, 128, 4, 2, 128, 64), text), "mixtral": (_mixtral(), text), "resnet": (_resnet(), images)}
    cases = {name: (*given, "") for name, given in (models | {"lstm": (_recurrent(), text)}).items()} | {
        "gpt2, two microbatches": (gpt2, text, "dp=1,microbatches=2"),
        "gpt2, rematerialised": (gpt2, text, "dp=1,remat=blocks"),
        "gpt2, state on the host": (gpt2, text, "dp=1,offload=optimizer"),
    }
    figures = {}
    for name, (model, batch, strategy) in cases.items():
        try:
            want, got = _trained(model, batch), _trained(model, batch, strategy)
            losses, values = (_difference(a, b) for a, b in zip(got, want))
            figures[name] = f"losses {losses:.1e}, parameters {values:.1e}{'' if losses < 1e-4 else ': WRONG'}"
        except Exception as error:
            figures[name] = f"{type(error).__name__}: {str(error)[:600]}"
    for name, (model, batch) in models.items():
        try:
            exact, rounded, got = _trained(model, batch), _trained(model, batch, autocast=True), _trained(model, batch, "dp=1,precision=bf16")
            losses, values = (_distance(a, b) for a, b in zip(got, exact))
            theirs = _distance(rounded[1], exact[1])
            figures[f"{name}, bf16"] = f"losses {losses:.1e}, parameters {values:.1e}, autocast's {theirs:.1e}{'' if losses < 1e-3 and values < 1.5 * theirs else ': WRONG'}"
        except Exception as error:
            figures[f"{name}, bf16"] = f"{type(error).__name__}: {str(error)[:600]}"
    return {"relative differences": figures}


def _trained(model, batch: dict, strategy: str | None = None, autocast: bool = False):
    """The losses of three steps and the parameters behind them: by PyTorch on the CPU, or by GraphAcc where a strategy is told."""
    import torch

    import graphacc

    model = copy.deepcopy(model)
    trained = model if strategy is None else graphacc.compile(model, devices=1, strategy=graphacc.Strategy.parse(strategy), cache_dir=None)
    return [torch.tensor(_losses(trained, batch, 3, autocast))], list(model.state_dict().values())


def _difference(values, expected) -> float:
    """The largest difference over the largest value, of all tensors."""
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3)).item() for a, b in zip(values, expected))


def _distance(values, expected) -> float:
    """The norm of all differences over that of all values."""
    import torch

    flat, wanted = (torch.cat([x.double().flatten() for x in tensors]) for tensors in (values, expected))
    return ((flat - wanted).norm() / wanted.norm()).item()


@part(100)
def again(args: argparse.Namespace) -> dict:
    """A script that runs twice with one cache: seconds to the first loss, and whether the losses are equal."""
    script = (
        "import gpu, json, sys, time, pathlib; start = time.monotonic(); import torch, graphacc; torch.manual_seed(0); "
        "tokens = torch.randint(128, (4, 64)); seconds = []; "
        "model = graphacc.compile(gpu._gpt2(12, 64, 4, 128, 64), devices=1, strategy='dp=1', cache_dir=pathlib.Path(sys.argv[1])); "
        "batch = {'input_ids': tokens, 'labels': tokens}; optimizer = torch.optim.AdamW(model.parameters()); "
        "step = lambda: (loss := model(**batch).loss, loss.backward(), optimizer.step(), optimizer.zero_grad())[0].item(); "
        "first = step(); seconds = time.monotonic() - start; print(json.dumps([seconds, [first] + [step() for _ in range(4)]]))"
    )
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ["PYTHONPATH"]])
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script, str(args.output / "again")], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
        if done.returncode:
            return {"again": f"exit code {done.returncode}: {done.stderr.strip()[-1200:]}"}
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    equal = "equal losses" if runs[0][1] == runs[1][1] else f"WRONG: {runs[0][1]}, then {runs[1][1]}"
    return {"again": f"first loss after {runs[0][0]:.1f} s, again after {runs[1][0]:.1f} s; {equal}"}


@part(120)
def attention(args: argparse.Namespace) -> dict:
    """Attention in bf16 with gradients on the device, for each form, against fp32 PyTorch: error over that of PyTorch's own bf16."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import graphacc

    class Attend(nn.Module):
        def __init__(self, causal: bool, kv_heads: int, masked: bool):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(128, 256), nn.Linear(128, 64 * kv_heads), nn.Linear(128, 64 * kv_heads)
            self.causal, self.kv_heads, self.masked = causal, kv_heads, masked

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = (one(x).view(batch, length, -1, 64).transpose(1, 2) for one in (self.q, self.k, self.v))
            mask = (torch.arange(length, device=x.device) < length - 7)[None, None, None].expand(batch, 1, length, length) if self.masked else None
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=self.kv_heads != 4)

    def gradients(model, batch):
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        return torch.cat([p.grad.float().cpu().flatten() for p in model.parameters()])

    figures = {}
    for name, form in {"causal": (True, 4, False), "full": (False, 4, False), "grouped": (True, 2, False), "masked": (False, 4, True)}.items():
        torch.manual_seed(0)
        model, batch = Attend(*form), torch.randn(2, 256, 128)
        exact = gradients(copy.deepcopy(model), batch)
        rounded = gradients(copy.deepcopy(model).bfloat16(), batch.bfloat16())
        try:
            compiled = graphacc.compile(copy.deepcopy(model), devices=1, strategy=graphacc.Strategy(precision="bf16"), cache_dir=None)
            errors = [((found - exact).norm() / exact.norm()).item() for found in (gradients(compiled, batch), rounded)]
            figures[name] = f"{errors[0]:.1e}, PyTorch's bf16 {errors[1]:.1e}{'' if errors[0] < 2 * errors[1] else ': WRONG'}"
        except Exception as error:
            figures[name] = f"{type(error).__name__}: {str(error)[:600]}"
    return {"relative error of gradients": figures}


def _lines_with(text: str, folder: pathlib.Path) -> list[str]:
    """"file:line" of the places in a folder's Python files."""
    files = ((path, path.read_text(encoding="utf-8").splitlines()) for path in sorted(folder.rglob("*.py")))
    return [f"{path}:{number}" for path, lines in files for number, line in enumerate(lines, 1) if line.startswith("@" + text)]


@part(200)
def tests(args: argparse.Namespace) -> dict:
    """The tests marked gpu (planned and unplanned executables give equal bits)."""
    configuration = args.output / "pytest.ini"
    configuration.write_text("[pytest]\nmarkers =\n    gpu\n    lazy\n    matrix\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(configuration), "--rootdir", str(ROOT / "tests"), "-m", "gpu", "-p", "no:cacheprovider"]
    paths = {str(ROOT / "tests"), str(ROOT / "tests" / "replan"), os.environ["PYTHONPATH"]}
    files = {line.partition(":")[0] for line in _lines_with("pytest.mark.gpu", ROOT / "tests")}
    done = subprocess.run([*command, *sorted(files)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    print(done.stdout[-3000:], file=sys.stderr)
    return {"pytest": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-800:]}


@part(40, timed=True)
def host_memory(args: argparse.Namespace) -> dict:
    """Whether arrays move to the host's pinned memory and back, as offload needs it."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        return {"memories": str(kinds)}
    values = np.random.default_rng(0).standard_normal((64, 1 << 20), dtype=np.float32)
    there = jax.device_put(values, SingleDeviceSharding(device, memory_kind="device")).block_until_ready()
    figures = {"memories": str(kinds)}
    for kind, source in (("pinned_host", there), ("device", None)):
        source = host if source is None else source  # noqa: F821 - made in the first round
        start = time.perf_counter()
        host = jax.device_put(source, SingleDeviceSharding(device, memory_kind=kind)).block_until_ready()
        figures[f"to {kind}, GB/s"] = f"{values.nbytes / (time.perf_counter() - start) / 1e9:.1f}"
    assert (np.asarray(host) == values).all()
    return {"figures": figures}


# ---- speed


@part(100, timed=True)
def experts(args: argparse.Namespace) -> dict:
    """The product of a mixture's experts with both gradients in bf16, against a loop of torch products and torch's grouped product."""
    import jax
    import torch

    from graphacc._compat.jax_ import x64
    from graphacc.lowering.rules import matmul

    place = "cuda" if torch.cuda.is_available() else "cpu"
    rows, hidden, inner = (256, 64, 128) if args.small else (16384, 1024, 4096)
    torch.manual_seed(0)
    figures = {}
    for count in (8, 64):
        x, grad, weight = (torch.randn(shape, device=place).bfloat16() for shape in ((rows, hidden), (rows, inner), (count, hidden, inner)))
        ends = torch.bincount(torch.randint(count, (rows,)), minlength=count).cumsum(0).int().to(place)
        cuts = [0, *ends.tolist()]

        def loop():
            parts = list(itertools.pairwise(cuts))
            out = torch.cat([x[a:b] @ weight[g] for g, (a, b) in enumerate(parts)])
            grad_x = torch.cat([grad[a:b] @ weight[g].T for g, (a, b) in enumerate(parts)])
            return out, grad_x, torch.stack([x[a:b].T @ grad[a:b] for a, b in parts])

        def grouped():
            return torch._grouped_mm(x, weight, ends), torch._grouped_mm(grad, weight.mT, ends), torch._grouped_mm(x.T, grad, ends)

        def ours(x, grad, weight, ends):
            out = matmul.grouped_dot(x, weight, ends)
            return out, matmul.grouped_dot(grad, weight.mT, ends), matmul.grouped_outer(x, grad, ends)

        with x64():
            arrays = [jax.dlpack.from_dlpack(tensor.detach()) for tensor in (x, grad, weight, ends)]
            compiled = jax.jit(ours).lower(*arrays).compile()
        want, got = loop(), compiled(*arrays)
        errors = [((torch.from_dlpack(b).float() - a.float()).norm() / a.float().norm()).item() for a, b in zip(want, got)]
        calls = {"torch, a loop": loop, "torch's grouped product": grouped, "graphacc": lambda: compiled(*arrays)}
        work = 3 * 2 * rows * hidden * inner
        for name, call in calls.items():
            try:
                seconds = _median_seconds(lambda call=call: _queued(call), args.rounds) / QUEUED
                figures[f"{count} experts, {name}"] = f"{seconds * 1e3:.2f} ms, {work / seconds / 1e12:.0f} TFLOP/s"
            except Exception as error:
                figures[f"{count} experts, {name}"] = f"{type(error).__name__}: {str(error)[:200]}"
        figures[f"{count} experts, relative errors"] = ", ".join(f"{error:.1e}" for error in errors)
    return {"figures": figures}


@part(80, timed=True)
def head(args: argparse.Namespace) -> dict:
    """A language model's head with its cross-entropy and both gradients: with a vocabulary of 50,257, whose rows no tensor core reads aligned, and padded to 50,304."""
    import jax
    import jax.numpy as jnp

    rows, width, vocabulary, padded = (256, 64, 1001, 1024) if args.small else (16384, 768, 50257, 50304)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocabulary, width), jnp.float32) * 0.02
    labels = jax.random.randint(keys[2], (rows,), 0, vocabulary)

    def loss(length, x, weight):
        narrow = jnp.pad(weight.astype(jnp.bfloat16), ((0, length - vocabulary), (0, 0)))
        logits = (x @ narrow.T)[:, :vocabulary].astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()

    figures = {}
    for length in (vocabulary, padded):
        compiled = jax.jit(jax.value_and_grad(lambda *told, length=length: loss(length, *told), argnums=(0, 1))).lower(x, weight).compile()
        seconds = _median_seconds(lambda compiled=compiled: jax.block_until_ready(compiled(x, weight)), args.rounds)
        figures[f"{length} columns"] = f"{seconds * 1e3:.2f} ms, temporaries {compiled.memory_analysis().temp_size_in_bytes / 1e9:.2f} GB"
    return {"figures": figures}


def _queued(call) -> None:
    """Several calls without waiting, as a step queues its kernels."""
    import jax

    for _ in range(QUEUED):
        result = call()
    jax.block_until_ready(result)  # nothing for torch's tensors


def _median_seconds(call, rounds: int) -> float:
    import torch

    seconds = []
    for number in range(rounds + 3):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@dataclasses.dataclass
class Loop:
    """A peer's training loop."""

    model: object
    optimizer: object
    batch: dict
    autocast: bool

    def step(self):
        import torch

        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def _speed(make, vocabulary: int, batch: int, length: int, args: argparse.Namespace) -> dict:
    """Milliseconds of a step, a peer after the other in turn."""
    import jax
    import torch

    import graphacc
    from graphacc.costs.hardware import Hardware

    cuda = torch.cuda.is_available()
    place = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    model = make()
    count = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(vocabulary, (batch, length))
    here = {"input_ids": tokens, "labels": tokens}
    there = {key: value.to(place) for key, value in here.items()}
    fused = dict(lr=1e-4, fused=True)

    def eager(compiled: bool):
        one = copy.deepcopy(model).to(place)
        return Loop(torch.compile(one) if compiled else one, torch.optim.AdamW(one.parameters(), **fused), there, True)

    def ours(plan: str, **choices):
        one = graphacc.compile(copy.deepcopy(model), devices=1, strategy=graphacc.Strategy(precision="bf16", **choices), memory_plan=plan)
        return Loop(one, torch.optim.AdamW(one.parameters(), lr=1e-4), here, False)

    peers = {
        "graphacc": lambda: ours("roam"),
        "graphacc, cheap work again": lambda: ours("roam", remat="*:cheap"),
        "graphacc, XLA's plan": lambda: ours("xla"),
        "torch.compile": lambda: eager(True),
        "eager": lambda: eager(False),
    }
    name = torch.cuda.get_device_name() if cuda else ""
    chip = next((kind for kind in ("H200", "H100", "A100", "L40S", "B200") if kind in name), None)
    peak = Hardware.parse(chip).chip.peak_flops("bf16") if chip else None
    work = 6 * count * batch * length
    figures = {}
    for peer, make_loop in ((peer, peers[peer]) for peer in args.peers):  # one after the other: four copies of a model of a billion parameters do not fit at once
        try:
            figures[peer] = _measured(make_loop, cuda, args, work, peak, batch * length, f"{count / 1e6:.0f}M {peer}")
        except Exception as error:
            figures[peer] = f"{type(error).__name__}: {str(error)[:600]}"
        if cuda:
            torch.cuda.empty_cache()
        jax.clear_caches()
    return {"model": f"{count / 1e6:.0f} M parameters, batch {batch} x {length}, bf16", "figures": figures}


def _measured(make_loop, cuda: bool, args: argparse.Namespace, work: float, peak: float | None, tokens: int, name: str) -> str:
    import jax
    import torch

    start = time.perf_counter()
    loop = make_loop()
    float(loop.step())
    first = time.perf_counter() - start
    for _ in range(2):
        float(loop.step())
    seconds = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        loss = loop.step()
        if cuda:
            torch.cuda.synchronize()
        value = float(loss)  # waits for GraphAcc's program
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    start = time.perf_counter()
    for _ in range(args.rounds):
        loss = loop.step()
    if cuda:
        torch.cuda.synchronize()
    float(loss)
    unread = (time.perf_counter() - start) / args.rounds
    ours = hasattr(loop.model, "_graphacc_engine")
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) if ours else torch.cuda.max_memory_allocated() if cuda else 0
    own = ""  # the process's peak is that of all programs so far
    if cuda and not ours:
        torch.cuda.reset_peak_memory_stats()
    if ours:
        own = f" (the program's {max(compiled.program.memory.peak_bytes for compiled in loop.model.programs) / 1e9:.2f})"
        _profile(loop, args.output / re.sub(r"\W+", "-", name), loop.model.programs)
    share = f", MFU {work / unread / peak:.3f}" if peak else ""
    return f"{unread * 1e3:.1f} ms ({median * 1e3:.1f} where the loop reads each loss), {tokens / unread:,.0f} tokens/s{share}, peak {memory / 1e9:.2f} GB{own}, first step {first:.0f} s, loss {value:.3f}"


def _profile(loop: Loop, folder: pathlib.Path, programs) -> None:
    """Write what the device does in four steps, kernel by kernel, and the programs' HLO."""
    import jax

    folder.mkdir(exist_ok=True)
    for number, compiled in enumerate(programs):
        (folder / f"{number}.hlo").write_text(compiled.program.hlo_text(), encoding="utf-8")
    with jax.profiler.trace(folder):
        for _ in range(4):
            loss = loop.step()
        float(loss)
    lines = []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                events = [(event.start_ns, event.duration_ns, event.name) for event in line.events]
                kinds: dict[str, list[float]] = collections.defaultdict(list)
                for _, duration, name in events:
                    kinds[re.sub(r"[._\d]+$", "", name)].append(duration / 1e6)
                if not events:
                    continue
                span = (max(start + duration for start, duration, _ in events) - min(start for start, _, _ in events)) / 1e6
                lines.append(f"{plane.name} {line.name}: {sum(map(sum, kinds.values())):.2f} ms busy of {span:.2f}")
                for name, times in sorted(kinds.items(), key=lambda item: -sum(item[1]))[:40]:
                    lines.append(f"    {sum(times):9.3f} ms {len(times):6} x {name[:150]}")
    (folder / "kernels.txt").write_text("\n".join(lines), encoding="utf-8")


@part(300, timed=True)
def gpt2(args: argparse.Namespace) -> dict:
    """GPT-2 of 124 M parameters."""
    if args.small:
        return _speed(lambda: _gpt2(2, 64, 4, 512, 128), 512, 2, 128, args)
    return _speed(lambda: _gpt2(12, 768, 12, 50257, 1024), 50257, 16, 1024, args)


@part(280, timed=True)
def llama(args: argparse.Namespace) -> dict:
    """A Llama of a billion parameters."""
    if args.small:
        return _speed(lambda: _llama(2, 64, 128, 4, 2, 512, 128), 512, 2, 128, args)
    return _speed(lambda: _llama(16, 2048, 5632, 32, 8, 32000, 2048), 32000, 4, 2048, args)


if __name__ == "__main__":
    main()
