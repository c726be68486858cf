"""The example, as a user runs it: in processes of its own."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from graphacc.strategy import Strategy

SMALL = "--steps 8 --batch 8 --length 32 --layers 2 --hidden 32 --heads 4 --save-every 2".split()


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "graphacc.examples.train_gpt", *SMALL, *options]


def environment() -> dict[str, str]:
    """Without the test session's devices: the example sets up its own."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "USE_TORCH_XLA")}


def run(*options: str) -> str:
    result = subprocess.run(command(*options), capture_output=True, text=True, env=environment(), timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Results of an uninterrupted run on eight devices."""
    path = tmp_path_factory.mktemp("eight") / "result.json"
    text = run("--json", str(path))
    return text, json.loads(path.read_text())


@pytest.mark.matrix
def test_eight_devices_by_itself(eight):
    text, result = eight
    assert "strategy: auto, searched at the first step, on 8 devices" in text and text.strip().splitlines()[-1].startswith("loss: 5.")
    assert result["devices"] == 8 and f"\nstrategy {result['strategy']}: " in text and Strategy.parse(result["strategy"]).num_devices == 8
    assert len(result["losses"]) == len(result["step_seconds"]) == 8 and result["losses"][-1] < result["losses"][0]
    assert result["tokens_per_second"] > 0 and result["memory"]["measured_bytes"] > result["memory"]["argument_bytes"] > 0
    assert 0.4 < result["memory"]["predicted_bytes"] / result["memory"]["measured_bytes"] < 2.5


@pytest.mark.matrix
def test_the_loss_curve_is_that_of_one_device(eight, tmp_path):
    run("--devices", "1", "--strategy", "dp=1", "--json", str(tmp_path / "one.json"))
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["devices"] == 1
    for a, b in zip(one["losses"], eight[1]["losses"], strict=True):
        assert abs(a - b) < 1e-4


@pytest.mark.matrix
def test_killed_at_a_random_moment_and_resumed(eight, tmp_path):
    """The losses of a run that is killed and resumed are those of an uninterrupted run, bit for bit."""
    folder = tmp_path / "checkpoint"
    process = subprocess.Popen(command("--save", str(folder)), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (folder / "manifest.json").exists():
        assert process.poll() is None or process.returncode == 0, "the example failed before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(random.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run("--resume", str(folder), "--json", str(tmp_path / "resumed.json"))
    assert json.loads((tmp_path / "resumed.json").read_text())["losses"] == eight[1]["losses"]


def test_errors_are_one_line():
    result = subprocess.run(command("--strategy", "dq=2"), capture_output=True, text=True, env=environment(), timeout=300)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: strategy 'dq=2'")
