"""Pipelines whose stages lie in two processes, started by SLURM's variables, against this process with all devices."""

import job
import pytest
from processes import HERE, finish, slurm_variables, start
from selection import with_matrix

STRATEGY = "pp=2,fsdp=2,microbatches=2,schedule=1f1b"
FURTHER_STRATEGIES = ["pp=4,microbatches=4,schedule=zb-h1", "pp=2,tp=2,microbatches=2"]
"""One stage in each process, with two devices; two stages in each; tensor parallelism within each."""


@pytest.mark.parametrize("further", with_matrix([[], FURTHER_STRATEGIES], [[]]), ids=["one strategy", "further strategies"])
@pytest.mark.matrix
def test_stages_in_two_processes(further, tmp_path):
    """Losses, a checkpoint, logits, parameters: in both processes those of one process, and of a loop without stages."""
    strategies = (STRATEGY, *further)
    ended = finish(start([str(HERE / "job.py"), "pipelines", str(tmp_path / "two"), *strategies], variables=slurm_variables))
    first, second = (process.results[0] for process in ended)
    assert first == second and all("[Gloo]" in process.out for process in ended)
    expected = job.pipelines(str(tmp_path / "one"), *strategies)
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert first["after"][0] == first["after"][1] == pytest.approx(expected["after"][0], rel=1e-6)
    assert first["logits"] == pytest.approx(expected["logits"], rel=1e-5)
    assert first["parameters"] == pytest.approx(expected["parameters"], rel=1e-5)
    for strategy, values in expected["others"].items():
        assert first["others"][strategy]["losses"] == pytest.approx(values["losses"], rel=1e-6)
        assert first["others"][strategy]["parameters"] == pytest.approx(values["parameters"], rel=1e-6)
    assert job.losses("microbatches=2")["microbatches=2"]["losses"] == pytest.approx(first["losses"], rel=1e-5)
