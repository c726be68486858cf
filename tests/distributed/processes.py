"""Starts the processes of a distributed test, each with four CPU devices, and collects what they print."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
_UNWANTED = ("XLA_FLAGS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GRAPHACC_COORDINATOR", "GRAPHACC_TIMEOUT")


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    status: int
    out: str
    err: str

    @property
    def results(self) -> list:
        """What the tasks of `job.py` gave."""
        assert self.status == 0, self
        return [json.loads(line.removeprefix("result ")) for line in self.out.splitlines() if line.startswith("result ")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def torchrun_variables(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def explicit_variables(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "GRAPHACC_COORDINATOR": f"localhost:{port}",
        "GRAPHACC_NUM_PROCESSES": str(count),
        "GRAPHACC_PROCESS_ID": str(rank),
    }


def slurm_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Of one step on this machine; the coordinator's port follows from the job's number."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def environment(**variables: str) -> dict[str, str]:
    """Of a process that sets up its own devices, unlike those of the test session."""
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE)])
    return kept | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1"} | variables


def start(command: list[str], count: int = 2, variables=torchrun_variables, **more: str) -> list[subprocess.Popen]:
    """Start Python with the same arguments in `count` processes."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables(rank, count, port), **more),
        )
        for rank in range(count)
    ]


def run_by_torchrun(command: list[str], folder: pathlib.Path, timeout: float = 240) -> list[Ended]:
    """A real torchrun with two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir", str(folder), "--redirects", "3"]
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, env=environment(), timeout=timeout)
    logs = sorted(log.parent for log in folder.glob("*/attempt_0/*/stdout.log"))
    assert [log.name for log in logs] == ["0", "1"], done.stderr
    return [Ended(done.returncode, (log / "stdout.log").read_text(), (log / "stderr.log").read_text() + done.stderr) for log in logs]


def finish(started: list[subprocess.Popen], timeout: float = 240) -> list[Ended]:
    """Wait for all; none is left behind."""
    try:
        results = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [Ended(process.returncode, out, err) for process, (out, err) in zip(started, results)]
