"""Two processes of four CPU devices each, over Gloo, against this process with eight."""

import json
import signal
import subprocess
import sys
import time

import jax
import job
import pytest
import torch
from processes import HERE, environment, explicit_variables, finish, run_by_torchrun, start
from selection import with_matrix

import graphacc
from graphacc.errors import DistributedError, StrategyError

JOB = str(HERE / "job.py")
STRATEGIES = ("fsdp=4,tp=2",)
FURTHER_STRATEGIES = ("fsdp=8,hpz=4,quantized_weights=True,quantized_gradients=True,quant_min_size=512", "fsdp=8", "fsdp=4,cp=2", "dp=2,fsdp=4", "dp=2,fsdp=4,zero=1,offload=optimizer,delay=1,delay_after=2")
"""In processes of their own, which only the matrix starts."""
PARTS, FURTHER_PARTS = ("tp=2",), ("fsdp=8",)
"""With all rows on the devices of both processes; with each process's rows on its own devices, as in `losses_with_tables`."""
META, FURTHER_META = ("fsdp=4,tp=2",), ("pp=2,fsdp=4,microbatches=2",)
TIMEOUT = 8  # a connection that ends is seen within a quarter of it; the rest is for a busy machine


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Two processes, started by torchrun: losses, saves that fail."""
    folder = tmp_path_factory.mktemp("together")
    tasks = ["losses", *STRATEGIES, "+", "losses_of_parts", *PARTS, "+", "save_on_a_full_disk", str(folder / "full")]
    tasks += ["+", "made_on_meta", str(folder / "meta"), *META, "+", "losses_with_tables"]
    return run_by_torchrun([JOB, *tasks], folder / "logs")


def test_losses_are_those_of_one_process(together):
    check_losses(together, 0, job.losses(*STRATEGIES))


@pytest.mark.matrix
def test_losses_are_those_of_one_process_under_further_strategies():
    check_losses(finish(start([JOB, "losses", *FURTHER_STRATEGIES])), 0, job.losses(*FURTHER_STRATEGIES))


@pytest.mark.matrix
def test_parts_and_models_of_the_meta_device_under_further_strategies(tmp_path):
    ended = finish(start([JOB, "losses_of_parts", *FURTHER_PARTS, "+", "made_on_meta", str(tmp_path), *FURTHER_META]))
    check_losses(ended, 0, job.losses_of_parts(*FURTHER_PARTS))
    check_meta([process.results[1] for process in ended])


@pytest.mark.matrix
def test_one_process_searches_for_all():
    """Both have the strategy of process 0, and the reasons where there is none; losses are those of one process."""
    first, second = (process.results for process in finish(start([JOB, "searched", "auto,tp=2", "+", "refused", "auto,cp=8,tp=1,dp=1,fsdp=1,ep=1,sequence_parallel=True"])))
    assert first[0]["strategy"] == second[0]["strategy"] and "tp=2" in first[0]["strategy"] and first[0]["losses"] == second[0]["losses"]
    assert first[0]["rivals"] and not second[0]["rivals"]
    expected = job.losses(first[0]["strategy"])[first[0]["strategy"]]["losses"]
    assert first[0]["losses"] == pytest.approx(expected, rel=1e-5)
    assert first[1] == second[1] and "no strategy agrees with the pins" in first[1]


def test_models_of_the_meta_device_and_saves_in_the_background(together):
    check_meta([process.results[3] for process in together])


def check_meta(results: list) -> None:
    torch.manual_seed(3)
    plain = job.two_layers()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    expected = job.train_layers(plain, optimizer, 4)
    for rank, result in enumerate(results):
        for found in result:
            assert found["losses"] == pytest.approx([*expected[:3], *expected[2:]], rel=1e-5)
            assert (found["kept"], found["now"]) == (1, 3)
            assert found["message"].endswith("OSError: [Errno 28] No space left on device") and ("process 1 could not save" in found["message"]) == (rank == 0)


def test_each_process_may_pass_its_own_rows(together):
    check_losses(together, 1, job.losses_of_parts(*PARTS))


def test_tables_are_whole_in_every_process(together):
    """What has the size of a process's part by accident was taken for a part of the batch."""
    ended = together
    expected = job.losses_with_tables()
    for process in ended:
        assert process.results[-1]["losses"] == pytest.approx(expected["losses"], rel=1e-5) and not process.results[-1]["by_pytorch"]


def check_losses(ended, number: int, expected: dict) -> None:
    """Both processes have the same results, and those of one process."""
    first, second = (process.results[number] for process in ended)
    assert first == second and list(first) == list(expected)
    for strategy, values in expected.items():
        for name, expected_value in values.items():
            assert first[strategy][name] == pytest.approx(expected_value, rel=1e-6), (strategy, name)


def test_a_save_that_fails_in_one_process_raises_in_both(together):
    first, second = together
    text = "OSError: [Errno 28] No space left on device"
    assert first.results[2]["message"] == f"CheckpointError: process 1 could not save its part: {text}"
    assert second.results[2]["message"] == text
    assert first.results[2]["kept"] == second.results[2]["kept"] == 1
    assert first.results[2]["losses"] == second.results[2]["losses"]


@pytest.mark.matrix
def test_checkpoints_go_from_two_processes_to_one_and_back(tmp_path):
    ended = finish(start([JOB, "save", str(tmp_path / "saved"), "3"]))
    net, optimizer = job.compiled("dp=2,fsdp=4")
    plain = [job.step(net, optimizer, number).item() for number in range(7)]
    assert ended[0].results[0]["losses"] == pytest.approx(plain[:3], rel=1e-6)
    one = job.save(str(tmp_path / "one"), "1", str(tmp_path / "saved"))
    assert (one["done"], one["losses"]) == (3, pytest.approx(plain[3:4], rel=1e-6))
    offloaded = "dp=2,fsdp=4,offload=optimizer"  # each process saves the blocks that are on its host
    for process in finish(start([JOB, "save", str(tmp_path / "two"), "2", str(tmp_path / "one"), offloaded], variables=explicit_variables)):
        assert (process.results[0]["done"], process.results[0]["losses"]) == (4, pytest.approx(plain[4:6], rel=1e-6))
    again = job.save(str(tmp_path / "three"), "1", str(tmp_path / "two"))
    assert (again["done"], again["losses"]) == (6, pytest.approx(plain[6:], rel=1e-6))


@pytest.mark.parametrize("victim", with_matrix([0, 1], [0]))  # process 0 is the one that the others ask
def test_a_process_that_is_killed_stops_the_other(victim, tmp_path):
    started = start([JOB, "endless", str(tmp_path)], GRAPHACC_TIMEOUT=str(TIMEOUT))
    while len(list(tmp_path.iterdir())) < 2 and all(process.poll() is None for process in started):
        time.sleep(0.1)
    killed_at = time.monotonic()
    started[victim].send_signal(signal.SIGKILL)
    started[1 - victim].wait(4 * TIMEOUT)
    seconds = time.monotonic() - killed_at
    other = finish(started)[1 - victim]
    assert seconds < TIMEOUT and other.status == 70, other
    assert f"graphacc: process {1 - victim} stops: process {victim} " in other.err and "is gone" in other.err, other.err
    assert "start all processes again from the last checkpoint" in other.err


@pytest.mark.matrix
def test_a_process_that_stands_still_stops_the_other(tmp_path):
    """As when a machine or its network fails: nothing closes the connection."""
    started = start([JOB, "endless", str(tmp_path)], GRAPHACC_TIMEOUT=str(TIMEOUT))
    while len(list(tmp_path.iterdir())) < 2 and all(process.poll() is None for process in started):
        time.sleep(0.1)
    stopped_at = time.monotonic()
    started[1].send_signal(signal.SIGSTOP)
    started[0].wait(4 * TIMEOUT)
    seconds = time.monotonic() - stopped_at
    started[1].kill()
    first = finish(started)[0]
    assert TIMEOUT - 2 < seconds < 2 * TIMEOUT and first.status == 70, (seconds, first)
    assert "has not been heard of for" in first.err


@pytest.mark.matrix
def test_an_error_in_one_process_stops_the_other():
    first, second = finish(start([JOB, "failing"]))
    assert (first.status, second.status) == (70, 1), (first, second)
    assert "failed with RuntimeError: the data of this process are broken" in first.err
    assert "RuntimeError: the data of this process are broken" in second.err


@pytest.mark.matrix
def test_the_example_under_torchrun(tmp_path):
    """A real torchrun; process 0 alone prints."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "graphacc.examples.train_gpt"]
    small = "--steps 3 --batch 8 --length 32 --layers 2 --hidden 32 --heads 4".split()
    result = subprocess.run(
        [*run, *small, "--json", str(tmp_path / "two.json")], capture_output=True, text=True, env=environment(), timeout=240
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert len([line for line in lines if line.startswith("loss: ")]) == 1 and lines[0].startswith("strategy: auto, searched at the first step, on 8 devices"), lines
    assert len(json.loads((tmp_path / "two.json").read_text())["losses"]) == 3


def test_parts_are_refused_with_microbatches():
    with pytest.raises(StrategyError, match='batch="local" with microbatches=2'):
        graphacc.compile(job.model(), strategy="fsdp=8,microbatches=2", batch="local")


def test_joining_after_jax_has_started_is_refused(monkeypatch):
    jax.devices()
    for name, value in explicit_variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="process 0 of 2, but JAX was used before they were joined"):
        graphacc.compile(job.model())
