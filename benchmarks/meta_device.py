"""Host memory of two processes that train, save and load a model which neither could hold: made on the meta device, loaded from sharded safetensors.

``python benchmarks/meta_device.py [--layers 24 --width 1024]`` starts both processes, each with four virtual CPU devices, and prints for every part the peak of
anonymous memory (``RssAnon`` of /proc/self/status, sampled every 2 ms; pages of files that the kernel can drop are not in it) above where the part began, and the
bytes of the shards that the process's devices hold at its end and held at its beginning. On virtual CPU devices the devices' memory is in it, so what is
left over, `extra`, is what making, loading or saving has needed besides; an empty process of the same imports and devices is below the first part's beginning. In
parts with steps it is the step's temporaries (gathered weights, gradients, activations) and what compiling leaves behind.

``--limit`` lets the system enforce that: in the parts without a step (`WITHOUT_STEP`) an allocation fails that would bring the process's data (RLIMIT_DATA) above the shards that it
gets there and a fifth, which is 0.6 of the model while it is loaded: half of the model are the process's own shards, on virtual devices. Making the whole model has to fail there.
"""

import argparse
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

WITHOUT_STEP = ("made on the meta device", "loaded", "saved", "checkpoint loaded under another strategy")
"""Parts in which no step runs."""

SPARE = 0.2
"""What these parts may need besides the shards that the process holds then, as a share of them."""


class Peak:
    """The highest anonymous memory of this process since the last look."""

    def __init__(self):
        self.start = self.highest = 0
        self._looking = threading.Lock()  # a look that began before a restart must not bring the part before it into the next one
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._looking:
                self.highest = max(self.highest, anonymous_bytes())
            time.sleep(0.002)

    def restart(self) -> None:
        settle()
        with self._looking:
            self.start = self.highest = anonymous_bytes()


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def limit_data(more: float) -> None:
    """From now on allocations fail that bring this process's data above what it has and `more` bytes; infinity lifts it."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY if more == float("inf") else int(line.split()[1]) * 1024 + int(more), hard))


def settle() -> None:
    """Give freed memory back to the system, so that it is not counted as held."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def build(layers: int, width: int):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 2 * width)
            self.down = nn.Linear(2 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    return nn.Sequential(*(Block() for _ in range(layers)))


def write_weights(directory: pathlib.Path, layers: int, width: int) -> int:
    """One file for every layer, and the index, as Hugging Face writes them; returns the model's bytes."""
    import torch
    from safetensors.torch import save_file

    places, total = {}, 0
    for number in range(layers):
        torch.manual_seed(number)
        block = {name.replace("0.", f"{number}.", 1): value for name, value in build(1, width).state_dict().items()}
        name = f"model-{number:05d}-of-{layers:05d}.safetensors"
        save_file(block, directory / name)
        places |= dict.fromkeys(block, name)
        total += sum(value.nbytes for value in block.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def arrays_of(model) -> list:
    """What the devices hold between steps."""
    state = model._graphacc_engine.programs.state
    return [state.find(*key)[0] for key in state.keys()]


def shard_bytes(*models) -> int:
    """The same in bytes, of the devices of this process."""
    return sum(shard.data.nbytes for model in models for array in arrays_of(model) for shard in array.addressable_shards)


def part(directory: pathlib.Path, layers: int, width: int, staging: float, limited: bool) -> None:
    """What each of the two processes does; prints a line of JSON."""
    import jax
    import torch

    import graphacc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = dict(cache_dir=None, fast_compile=True, memory_plan="xla")
    warm = graphacc.compile(torch.nn.Linear(8, 8), strategy="fsdp=8", **options)
    warm(torch.ones(8, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    batch = torch.linspace(-1, 1, 8 * width).view(8, width)
    settle()
    peak, found, held = Peak(), [], [0]

    def note(label: str, *models) -> None:
        jax.block_until_ready([array for one in models for array in arrays_of(one)])
        time.sleep(0.01)
        before, held[0] = held[0], shard_bytes(*models)
        risen = peak.highest - peak.start
        found.append({"part": label, "risen": risen, "shards": held[0], "before": before, "extra": risen - (held[0] - before)})
        peak.restart()

    def limit(new_shards: float, all_shards: float) -> None:
        if limited:
            settle()
            limit_data(new_shards + SPARE * all_shards)

    def step(model, optimizer) -> float:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    own = sum(file.stat().st_size for file in (directory / "weights").glob("*.safetensors")) / 2
    limit(own, own)
    whole_fits = True
    try:
        build(layers, width)
    except RuntimeError:  # of torch's allocator
        whole_fits = False
    peak.restart()
    with torch.device("meta"):
        model = build(layers, width)
    model = graphacc.compile(model, strategy="fsdp=8", **options)
    note("made on the meta device", model)
    graphacc.load_safetensors(model, directory / "weights")
    note("loaded", model)
    limit_data(float("inf"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [step(model, optimizer) for _ in range(2)]
    note("two steps", model)
    limit(0, held[0])
    start = time.perf_counter()
    saving = graphacc.save_checkpoint(directory / "saved", model, optimizer, asynchronous=True, staging_mb=staging)
    blocked = time.perf_counter() - start
    note("saved", model)
    limit_data(float("inf"))
    losses.append(step(model, optimizer))
    beside = not saving.done
    saving.wait()
    whole = time.perf_counter() - start
    note("a step while it is written", model)
    losses.append(step(model, optimizer))
    del model, optimizer, saving
    state, held[0] = held[0], 0
    peak.restart()
    limit(2 * state, 2 * state)  # four devices in four shards, twice: each process has all of it
    with torch.device("meta"):
        other = build(layers, width)
    other = graphacc.compile(other, strategy="fsdp=4,dp=2", **options)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    graphacc.load_checkpoint(directory / "saved", other, optimizer)
    note("checkpoint loaded under another strategy", other)
    limit_data(float("inf"))
    again = [step(other, optimizer), step(other, optimizer)]
    print("result", json.dumps({"parts": found, "losses": losses, "again": again, "blocked": blocked, "whole": whole, "beside": beside, "whole_fits": whole_fits}), flush=True)


def run(layers: int, width: int, staging: float, limited: bool = False) -> tuple[int, list[dict]]:
    """The model's bytes, and what each process has found."""
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "weights").mkdir()
        total = write_weights(directory / "weights", layers, width)
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "RANK", "WORLD_SIZE")}
        environment |= {"JAX_PLATFORMS": "cpu", "USE_TORCH_XLA": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "GRAPHACC_COORDINATOR": f"localhost:{port}", "GRAPHACC_NUM_PROCESSES": "2"}
        command = [sys.executable, __file__, "--part", name, "--layers", str(layers), "--width", str(width), "--staging", str(staging), *(["--limit"] if limited else [])]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | {"GRAPHACC_PROCESS_ID": str(rank)}) for rank in range(2)
        ]
        try:
            ended = [process.communicate(timeout=500) for process in started]
        finally:
            for process in started:
                process.kill()
    for process, (_, errors) in zip(started, ended):
        if process.returncode:
            raise RuntimeError(errors[-3000:])
    return total, [json.loads(next(line for line in out.splitlines() if line.startswith("result ")).removeprefix("result ")) for out, _ in ended]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--staging", type=float, default=20.0, help="MB of copies of a save that goes on")
    parser.add_argument("--limit", action="store_true", help="let the system refuse memory above a process's shards and a fifth")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return part(pathlib.Path(options.part), options.layers, options.width, options.staging, options.limit)
    total, processes = run(options.layers, options.width, options.staging, options.limit)
    print(f"parameters {total / 1e6:.0f} MB, in two processes")
    for rank, found in enumerate(processes):
        for line in found["parts"]:
            share = f", {line['extra'] / line['shards']:.2f} of them" if line["shards"] else ""
            print(
                f"process {rank}  {line['part']:42} up by {line['risen'] / 1e6:6.1f} MB, shards {line['before'] / 1e6:6.1f} -> {line['shards'] / 1e6:6.1f} MB, "
                f"extra {line['extra'] / 1e6:6.1f} MB{share}"
            )
        print(f"process {rank}  the whole model {'fits' if found['whole_fits'] else 'does not fit, as it should be: its allocation failed'}")
        print(f"process {rank}  losses {found['losses']}, again {found['again']}; the save kept the loop for {found['blocked']:.2f} s of {found['whole']:.2f} s")


if __name__ == "__main__":
    main()
