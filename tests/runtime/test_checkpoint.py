"""Checkpoints: exact in any layout, whole or not at all, and clear about what is wrong with a bad one."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from selection import with_matrix
from step_graphs import an_input, split

import graphacc
from graphacc.errors import CheckpointError
from graphacc.graph import Kind
from graphacc.runtime import checkpoint, checkpoint_files, make_mesh, select_devices, to_device, to_torch
from graphacc.runtime.exchange import torch_view
from graphacc.runtime.layout import whole
from graphacc.strategy import Strategy

ROOT = str(pathlib.Path(graphacc.__file__).parent.parent)
HERE = os.path.dirname(os.path.abspath(__file__))

_fixed = torch.Generator().manual_seed(0)
TENSORS = {
    "weight": torch.randn(10, 6, generator=_fixed),
    "embedding": torch.randn(37, 16, generator=_fixed).bfloat16(),
    "half": torch.randn(8, 4, generator=_fixed).half(),
    "double": torch.randn(3, 5, dtype=torch.float64, generator=_fixed),
    "steps": torch.tensor(2**40 + 1),
    "mask": torch.randint(0, 2, (9,), generator=_fixed).bool(),
    "empty": torch.zeros(0, 4),
    "complex": torch.randn(4, dtype=torch.complex64, generator=_fixed),
    "float8": torch.randn(16, generator=_fixed).to(torch.float8_e4m3fn),
}


def load_host(directory, wanted, **options) -> dict:
    """Whole tensors, as `wanted` describes them."""
    reader = checkpoint.open_checked(directory, {name: ((tuple(x.shape), x.dtype), [whole(x.shape)]) for name, x in wanted.items()}, **options)
    return {name: torch_view(reader.read(name, whole(x.shape))) for name, x in wanted.items()}


def mesh_of(strategy):
    return make_mesh(strategy, select_devices(strategy.num_devices))


def items_for(strategy, tensors=TENSORS):
    """Every tensor split along fsdp by its largest dim, as the ZeRO passes do; 0-d ones whole."""
    items = {}
    for name, tensor in tensors.items():
        dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d], default=None)
        shards = [split("fsdp", strategy.fsdp, dim)] if dim is not None and strategy.fsdp > 1 else []
        items[name] = an_input(Kind.PARAM, name, tensor.shape, tensor.dtype, shards)
    return items


def on_devices(strategy, tensors=TENSORS):
    mesh, items = mesh_of(strategy), items_for(strategy, tensors)
    return {name: (to_device(tensors[name], item, mesh), item) for name, item in items.items()}


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def check_loads(directory, strategy, tensors=TENSORS):
    items = items_for(strategy, tensors)
    loaded = checkpoint.load(directory, items, mesh_of(strategy))
    for name, tensor in tensors.items():
        assert same(to_torch(loaded[name], items[name]), tensor), name


MESHES = [Strategy(fsdp=8), Strategy(dp=2, fsdp=4), Strategy()]


@pytest.mark.parametrize("reader", MESHES, ids=str)
@pytest.mark.parametrize("writer", MESHES, ids=str)
def test_round_trip_between_meshes(tmp_path, writer, reader):
    checkpoint.save(tmp_path / "c", on_devices(writer), {"step": 3})
    check_loads(tmp_path / "c", reader)
    assert checkpoint.read_metadata(tmp_path / "c") == {"step": 3}
    assert checkpoint.read_index(tmp_path / "c") == {name: (tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


def test_a_layout_split_along_two_axes_and_another_dim(tmp_path):
    tensor = torch.randn(16, 10)
    mesh = mesh_of(Strategy(dp=2, fsdp=4))
    old = an_input(Kind.PARAM, "w", (16, 10), shards=[split("dp", 2), split("fsdp", 4)])
    new = an_input(Kind.PARAM, "w", (16, 10), shards=[split("fsdp", 4, 1)])
    checkpoint.save(tmp_path, {"w": (to_device(tensor, old, mesh), old)}, {})
    assert same(to_torch(checkpoint.load(tmp_path, {"w": new}, mesh)["w"], new), tensor)


def test_interleaved_blocks_are_saved_and_loaded_in_the_tensors_order(tmp_path):
    """A fused projection split by heads over tp=2 (and its rows over fsdp=4) loads under another strategy, and back."""
    tensor = torch.randn(10, 12)
    mesh = mesh_of(Strategy(fsdp=4, tp=2))
    fused = an_input(Kind.PARAM, "w", (10, 12), shards=[split("tp", 2, 1, outer=3), split("fsdp", 4, 0)])
    rows = an_input(Kind.PARAM, "w", (10, 12), shards=[split("fsdp", 4, 0)])
    checkpoint.save(tmp_path / "a", {"w": (to_device(tensor, fused, mesh), fused)}, {})
    array = checkpoint.load(tmp_path / "a", {"w": rows}, mesh)["w"]
    assert same(to_torch(array, rows), tensor)
    checkpoint.save(tmp_path / "b", {"w": (array, rows)}, {})
    assert same(to_torch(checkpoint.load(tmp_path / "b", {"w": fused}, mesh)["w"], fused), tensor)


def test_host_tensors_and_loading_to_the_host(tmp_path):
    arrays = on_devices(Strategy(fsdp=8))
    checkpoint.save(tmp_path, {**arrays, "weight": TENSORS["weight"].t().contiguous().t()}, {})
    loaded = load_host(tmp_path, {name: tensor.to("meta") for name, tensor in TENSORS.items()})
    for name, tensor in TENSORS.items():
        assert same(loaded[name], tensor)
        loaded[name].zero_()  # memory of its own


def test_files_are_ordinary_safetensors_written_once_per_shard(tmp_path):
    tensor = torch.arange(10.0)
    mesh = mesh_of(Strategy(dp=2, fsdp=4))
    items = {"split": an_input(Kind.PARAM, "s", (10,), shards=[split("fsdp", 4)]), "whole": an_input(Kind.PARAM, "w", (10,))}
    checkpoint.save(tmp_path, {name: (to_device(tensor, item, mesh), item) for name, item in items.items()}, {})
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["split[0:3]", "split[3:6]", "split[6:9]", "split[9:10]", "whole"]
        assert torch.equal(file.get_tensor("split[3:6]"), tensor[3:6])
        assert torch.equal(file.get_tensor("whole"), tensor)


def test_loading_reads_only_the_slices_of_a_device(tmp_path, monkeypatch):
    tensor = torch.arange(16.0)
    mesh = mesh_of(Strategy(fsdp=8))
    item = an_input(Kind.PARAM, "w", (16,), shards=[split("fsdp", 8)])
    checkpoint.save(tmp_path, {"w": tensor}, {})
    read = []
    original = checkpoint_files.Reader.read
    monkeypatch.setattr(
        checkpoint_files.Reader, "read", lambda self, name, index: read.append(index) or original(self, name, index)
    )
    checkpoint.load(tmp_path, {"w": item}, mesh)
    assert sorted(index[0].start for index in read) == list(range(0, 16, 2)) and {i[0].stop - i[0].start for i in read} == {2}


def test_tied_tensors_are_written_once_and_known_by_both_names(tmp_path):
    tensor = torch.randn(4, 2)
    checkpoint.save(tmp_path, {"wte": tensor}, {}, aliases={"lm_head": "wte"})
    assert list(checkpoint.read_index(tmp_path)) == ["wte"]
    assert same(load_host(tmp_path, {"lm_head": tensor})["lm_head"], tensor)


# ---- asynchronous


class SlowDisk:
    """Nothing is on it for certain before somebody lets it go on."""

    def __init__(self, monkeypatch, fails: bool = False):
        self.go_on, self.reached = threading.Event(), threading.Event()
        original = checkpoint_files.flush

        def flush(file):
            self.reached.set()
            assert self.go_on.wait(60)
            if fails:
                raise OSError(28, "No space left on device")
            original(file)

        monkeypatch.setattr(checkpoint_files, "flush", flush)


@pytest.mark.parametrize("staging", [None, 20_000, 0])
def test_a_save_goes_on_beside_its_caller_with_the_values_of_its_time(tmp_path, monkeypatch, staging):
    checkpoint.save(tmp_path, versioned(1), {"version": 1})
    disk, copied = SlowDisk(monkeypatch), []
    original = np.array
    monkeypatch.setattr(checkpoint.np, "array", lambda value, **options: copied.append(value.nbytes) or original(value, **options))
    tensors = versioned(2)
    saving = checkpoint.save(tmp_path, tensors, {"version": 2}, asynchronous=True, staging_bytes=staging)
    assert sum(copied) == {None: 4 * 64 * 33 * 4, 20_000: 2 * 64 * 33 * 4, 0: 0}[staging]
    for tensor in tensors.values():
        tensor.fill_(7.0)  # the next step
    assert disk.reached.wait(60) and not saving.done
    assert checkpoint.read_metadata(tmp_path) == {"version": 1}
    disk.go_on.set()
    saving.wait()
    assert saving.done and loaded_version(tmp_path) == 2 and len(data_files(tmp_path)) == 1


@pytest.mark.parametrize("seen_by", ["wait", "save", "load"])
def test_what_fails_in_the_background_is_raised_once_and_leaves_the_old_checkpoint(tmp_path, monkeypatch, caplog, seen_by):
    checkpoint.save(tmp_path, versioned(1), {"version": 1})
    with monkeypatch.context() as patch:
        disk = SlowDisk(patch, fails=True)
        saving = checkpoint.save(tmp_path, versioned(2), {"version": 2}, asynchronous=True)
        disk.go_on.set()
        with pytest.raises(OSError, match="No space left"):
            {"wait": saving.wait, "save": lambda: checkpoint.save(tmp_path, versioned(3), {}), "load": lambda: loaded_version(tmp_path)}[seen_by]()
    assert "was not saved, what was there before is" in caplog.text
    assert loaded_version(tmp_path) == 1 and len(data_files(tmp_path)) == 1
    checkpoint.save(tmp_path, versioned(3), {"version": 3})
    assert loaded_version(tmp_path) == 3


BACKGROUND = """
import sys, time, torch
from graphacc.runtime import checkpoint, checkpoint_files
value = lambda version: {name: torch.full((64, 33), float(version)) for name in "abcd"}
checkpoint.save(sys.argv[1], value(1), {"version": 1})
flush, seconds = checkpoint_files.flush, float(sys.argv[2])
checkpoint_files.flush = lambda file: (print("writing", flush=True), time.sleep(seconds), flush(file))
checkpoint.save(sys.argv[1], value(2), {"version": 2}, asynchronous=True)
"""


@pytest.mark.matrix
def test_the_end_of_python_waits_for_a_save_and_a_kill_leaves_the_old_checkpoint(tmp_path):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    for directory, seconds, expected in ((tmp_path / "ended", "0.5", 2), (tmp_path / "killed", "60", 1)):
        process = subprocess.Popen([sys.executable, "-c", BACKGROUND, str(directory), seconds], stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout.readline() == "writing\n"
        if expected == 1:
            process.kill()
        process.communicate(timeout=60)
        assert loaded_version(directory) == expected


# ---- atomic


def versioned(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((64, 33), float(version)) for name in "abcd"}


def loaded_version(directory) -> int:
    """The version of a checkpoint, all of whose parts must be of one version."""
    tensors = load_host(directory, versioned(0))
    version = checkpoint.read_metadata(directory)["version"]
    assert all(torch.equal(tensor, torch.full((64, 33), float(version))) for tensor in tensors.values())
    return version


def data_files(directory):
    return sorted(path.name for path in directory.glob("*") if path.name != "manifest.json")


def test_saving_again_replaces_and_leaves_nothing_over(tmp_path):
    for version in range(3):
        checkpoint.save(tmp_path, versioned(version), {"version": version})
        assert loaded_version(tmp_path) == version and len(data_files(tmp_path)) == 1


@pytest.mark.parametrize("where", ["data", "manifest", "rename", "after the commit"])
def test_an_error_in_the_middle_keeps_one_whole_checkpoint(tmp_path, monkeypatch, where):
    checkpoint.save(tmp_path, versioned(1), {"version": 1})
    calls = []

    def fails_late(original, after):
        def function(*args):
            calls.append(args)
            if len(calls) > after:
                raise OSError(28, "No space left on device")
            return original(*args)

        return function

    target, after = {
        "data": ("zlib.crc32", 2),
        "manifest": ("graphacc.runtime.checkpoint_files.flush", 1),
        "rename": ("os.replace", 0),
        "after the commit": ("graphacc.runtime.checkpoint_files.sync_directory", 2),
    }[where]
    module, _, name = target.rpartition(".")
    holder = checkpoint_files if module.startswith("graphacc") else sys.modules[module]
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, fails_late(getattr(holder, name), after))
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path, versioned(2), {"version": 2})
    assert loaded_version(tmp_path) == (2 if where == "after the commit" else 1)
    if where != "after the commit":
        assert len(data_files(tmp_path)) == 1
    checkpoint.save(tmp_path, versioned(3), {"version": 3})
    assert loaded_version(tmp_path) == 3 and len(data_files(tmp_path)) == 1


def test_what_is_on_disk_at_any_step_of_a_save_is_a_whole_checkpoint(tmp_path, monkeypatch):
    """Before every step that writes, flushes, renames or removes the directory is copied: the disk after a crash there."""
    directory, copies = tmp_path / "c", []
    checkpoint.save(directory, versioned(1), {"version": 1})

    def copies_first(original):
        def function(*args, **kwargs):
            copies.append(tmp_path / f"copy{len(copies)}")
            shutil.copytree(directory, copies[-1])
            return original(*args, **kwargs)

        return function

    with monkeypatch.context() as patch:
        for holder, name in (
            (checkpoint_files.zlib, "crc32"),
            (checkpoint_files, "flush"),
            (checkpoint_files, "sync_directory"),
            (os, "replace"),
        ):
            patch.setattr(holder, name, copies_first(getattr(holder, name)))
        patch.setattr(pathlib.Path, "unlink", copies_first(pathlib.Path.unlink))
        checkpoint.save(directory, versioned(2), {"version": 2})
    versions = [loaded_version(copy) for copy in copies]
    assert versions == sorted(versions) and set(versions) == {1, 2} and len(versions) == 11


_SAVER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_checkpoint import versioned
from graphacc.runtime import checkpoint
version = 1
print("ready", flush=True)
while True:
    checkpoint.save(sys.argv[1], versioned(version), {"version": version})
    print(version, flush=True)
    version += 1
"""


@pytest.mark.parametrize("seed", with_matrix(range(3), [0]))
def test_killed_at_a_random_moment_leaves_a_whole_checkpoint(seed, tmp_path):
    """A process that saves without end is killed; what it reported as saved, or what it was saving, is there and whole."""
    directory = tmp_path / "c"
    arguments = [sys.executable, "-c", _SAVER, str(directory), ROOT, os.path.dirname(HERE), HERE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout.readline() == "ready\n" and saver.stdout.readline() == "1\n"
        time.sleep(random.Random(seed).uniform(0, 0.1))
        saver.send_signal(signal.SIGKILL)
        reported = [1] + [int(line) for line in saver.stdout.read().split("\n") if line]
    assert loaded_version(directory) in (reported[-1], reported[-1] + 1)
    checkpoint.save(directory, versioned(0), {"version": 0})
    assert loaded_version(directory) == 0 and len(data_files(directory)) == 1


# ---- bad checkpoints


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "c", versioned(1), {"version": 1})
    return tmp_path / "c"


def damage(path: pathlib.Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at .*nothing: no such directory"):
        checkpoint.read_metadata(tmp_path / "nothing")


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match="has no manifest.json"):
        load_host(tmp_path, {})


def test_a_first_save_that_was_interrupted(saved):
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="incomplete: it has data but no manifest.json; its first save was interrupted"):
        checkpoint.read_metadata(saved)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b[: len(b) // 2], "cannot be parsed"),
        (lambda b: b"", "cannot be parsed"),
        (lambda b: b"[1]", "cannot be parsed"),
        (lambda b: b"\xff\xfe\xfd", "is no text"),
        (lambda b: b.replace(b"[64, 33]", b"[33, 64]"), "does not have the SHA-256"),
        (
            lambda b: b.replace(b"graphacc-checkpoint-1", b"graphacc-checkpoint-9"),
            "has format 'graphacc-checkpoint-9', this version reads",
        ),
    ],
    ids=["cut", "empty", "other JSON", "no text", "changed", "other version"],
)
def test_a_damaged_manifest(saved, change, message):
    damage(saved / "manifest.json", change)
    with pytest.raises(CheckpointError, match=message):
        load_host(saved, versioned(0))


def test_a_truncated_data_file(saved):
    (path,) = saved.glob("*.safetensors")
    damage(path, lambda content: content[:-1])
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: it has \d+ bytes, \d+ were written; use another"):
        checkpoint.read_metadata(saved)


def test_a_missing_data_file(saved):
    (path,) = saved.glob("*.safetensors")
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} is missing"):
        load_host(saved, versioned(0))


def test_a_changed_data_file(saved):
    (path,) = saved.glob("*.safetensors")
    damage(path, flip_last_byte)
    with pytest.raises(CheckpointError, match="does not have the checksum of 'd' that the manifest states"):
        load_host(saved, versioned(0))
    with pytest.raises(CheckpointError, match="checksum of 'd'"):
        checkpoint.load(saved, items_for(Strategy(fsdp=8), versioned(0)), mesh_of(Strategy(fsdp=8)))


def test_another_model_lists_every_difference(saved):
    wanted = {"a": torch.zeros(64, 33), "b": torch.zeros(33, 64), "c": torch.zeros(64, 33).half(), "e": torch.zeros(2)}
    with pytest.raises(CheckpointError) as raised:
        load_host(saved, wanted)
    assert str(raised.value).splitlines()[1:-1] == [
        "  different: b is torch.float32[64, 33] in the checkpoint, torch.float32[33, 64] here",
        "  different: c is torch.float32[64, 33] in the checkpoint, torch.float16[64, 33] here",
        "  missing: e torch.float32[2]",
        "  unexpected: d torch.float32[64, 33]",
    ]
    assert "another model" in str(raised.value) and "Build the model" in str(raised.value)


def test_names_that_are_not_wanted_can_be_ignored(tmp_path):
    checkpoint.save(tmp_path, {"model/w": torch.ones(2), "optimizer/w/m": torch.ones(2)}, {})
    assert list(load_host(tmp_path, {"model/w": torch.ones(2)}, ignore_extra=("optimizer/",))) == ["model/w"]


def test_what_cannot_be_saved_is_refused_before_writing(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "manifest.json").write_text("{}")
    for directory, present in ((tmp_path / "other", "notes.txt"), (tmp_path, "manifest.json")):
        with pytest.raises(CheckpointError, match=f"is no checkpoint but holds .*{present}"):
            checkpoint.save(directory, versioned(1), {})
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.save(tmp_path / "manifest.json", versioned(1), {})
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        checkpoint.save(tmp_path / "new", versioned(1), {"x": object()})
    with pytest.raises(CheckpointError, match="'z' is torch.complex128, which safetensors cannot hold"):
        checkpoint.save(tmp_path / "new", {"z": torch.zeros(2, dtype=torch.complex128)}, {})
    assert not (tmp_path / "new").exists()


# ---- several processes

_TWO_PROCESSES = """
import os, sys
rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path[:0] = sys.argv[4:]
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from test_checkpoint import TENSORS, check_loads, items_for, mesh_of, on_devices, same
from graphacc.runtime import checkpoint, to_torch
from graphacc.strategy import Strategy
strategy = Strategy(fsdp=8)
for version in range(2):
    checkpoint.save(directory, on_devices(strategy), {"version": version})
check_loads(directory, strategy)
print("done", flush=True)
"""


def test_two_processes_save_together_and_one_loads(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _TWO_PROCESSES, str(rank), str(port), str(tmp_path), ROOT, os.path.dirname(HERE), HERE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=150) for process in started]
    assert all(process.returncode == 0 and out.endswith("done\n") for process, (out, _) in zip(started, results)), results
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 and not list(tmp_path.glob("pieces-*"))
    assert checkpoint.read_metadata(tmp_path) == {"version": 1}
    index = json.loads(json.loads((tmp_path / "manifest.json").read_text())["content"])
    assert len({piece["file"] for piece in index["tensors"]["weight"]["pieces"]}) == 2
    check_loads(tmp_path, Strategy(dp=2, fsdp=4))


def test_zero_size_and_scalar_blocks_read_as_saved(tmp_path):
    tensors = {"none": torch.zeros(3, 0), "scalar": torch.tensor(5, dtype=torch.int16)}
    checkpoint.save(tmp_path, tensors, {})
    loaded = load_host(tmp_path, tensors)
    assert all(same(loaded[name], tensors[name]) for name in tensors)
