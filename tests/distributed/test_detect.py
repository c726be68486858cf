"""Who the processes are, from what torchrun, SLURM and the user say."""

import pytest

from graphacc.errors import DistributedError
from graphacc.runtime.distributed import Cluster, _own_gpus, _timeout, detect

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "node[004-006],other1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def test_one_process_alone():
    assert detect({}) is None
    assert detect(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None  # inside salloc, without srun


def test_torchrun_variables():
    expected = Cluster(coordinator="node7:29500", num_processes=4, process_id=3, source="torchrun", local_id=1, num_local=2)
    assert detect(TORCHRUN) == expected
    found = detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (found.coordinator, found.store) == ("", "node7:29500")  # the agent listens there


@pytest.mark.parametrize("nodes, first", [("node7", "node7"), ("a1,b[2-3]", "a1"), ("node[004-006],x", "node004"), ("n[07,09]", "n07")])
def test_slurm_variables(monkeypatch, nodes, first):
    variables = SLURM | {"SLURM_STEP_NODELIST": nodes}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = detect(variables)
    assert found == Cluster(coordinator=f"{first}:61443", num_processes=7, process_id=5, source="SLURM", local_id=1, num_local=2)
    assert detect(variables | {"MASTER_ADDR": "other", "MASTER_PORT": "77"}).coordinator == "other:77"


def test_explicit_coordinator():
    variables = {"GRAPHACC_COORDINATOR": "host:1", "GRAPHACC_NUM_PROCESSES": "2", "GRAPHACC_PROCESS_ID": "1"}
    assert detect(variables) == Cluster(coordinator="host:1", num_processes=2, process_id=1, source="GRAPHACC_COORDINATOR")
    assert detect({}, "host:1", 2, 0) == Cluster(coordinator="host:1", num_processes=2, process_id=0, source="arguments")
    over = detect(TORCHRUN | {"GRAPHACC_COORDINATOR": "host:1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (over.coordinator, over.store, over.process_id, over.num_processes) == ("host:1", "", 3, 4)


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"GRAPHACC_COORDINATOR": "host:1"}, "GRAPHACC_NUM_PROCESSES is not set"),
        ({"GRAPHACC_COORDINATOR": "host:1", "GRAPHACC_NUM_PROCESSES": "2"}, "GRAPHACC_PROCESS_ID is not set"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
        (TORCHRUN | {"RANK": "4"}, "process 4 of 4: processes are numbered from 0 to 3"),
        (TORCHRUN | {"MASTER_PORT": ""}, "no address of process 0: set GRAPHACC_COORDINATOR"),
        (TORCHRUN | {"GRAPHACC_COORDINATOR": "host"}, "'host' is not of the form \"host:port\""),
    ],
)
def test_what_contradicts_itself(variables, message):
    with pytest.raises(DistributedError, match=message):
        detect(variables)


def test_gpus_of_processes_on_one_machine():
    cluster = detect(TORCHRUN)
    assert _own_gpus(cluster, {}) == [1] and _own_gpus(cluster, {"CUDA_VISIBLE_DEVICES": "4,5"}) == [1]
    assert _own_gpus(cluster, {"CUDA_VISIBLE_DEVICES": "5"}) is None  # the launcher gave each process its own
    assert _own_gpus(detect(TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}), {}) is None


def test_the_timeout(monkeypatch):
    assert _timeout(None) == 30 and _timeout(5) == 5
    monkeypatch.setenv("GRAPHACC_TIMEOUT", "soon")
    with pytest.raises(DistributedError, match="GRAPHACC_TIMEOUT. is 'soon': give seconds, from 1 to 86400"):
        _timeout(None)
