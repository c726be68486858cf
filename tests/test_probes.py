"""Without a private API of torch or JAX the package imports and trains as PyTorch does, and says in one line what is off."""

import json
import logging
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch
from selection import with_matrix
from tolerances import LOSS, PARAMETERS_AFTER_STEPS

import graphacc
from graphacc import distributed, doctor
from graphacc._compat import jax_, probes
from graphacc.errors import CaptureError, DistributedError, GraphAccError
from graphacc.lowering.rules import flash_attention
from graphacc.ops import flash_form

OPTIONAL = {name: feature for name, feature in probes.FEATURES.items() if feature.without}
HERE = pathlib.Path(__file__).parent


@pytest.fixture
def off(monkeypatch, caplog):
    """Switches a feature off, as if its first API were missing, for one test."""
    monkeypatch.setattr(probes, "_why_off", {})
    caplog.set_level(logging.WARNING, "graphacc")

    def switch(feature: probes.Feature) -> None:
        is_there, absent = probes._is_there, feature.apis[0]
        monkeypatch.setattr(probes, "_is_there", lambda api: api != absent and is_there(api))
        monkeypatch.setattr(probes, "_missing_once", probes.missing)

    return switch


@pytest.mark.parametrize("name", with_matrix(OPTIONAL, ["EXECUTABLES", "LOWERED_FOR_PLATFORM"]))
@pytest.mark.matrix
def test_a_model_trains_without_one_api_after_the_other(name, tmp_path):
    """They are taken away before graphacc is imported: see without_apis.py. By default one API of two features, in the matrix every one of all."""
    feature = OPTIONAL[name]
    apis = feature.apis[:1] if name in ("EXECUTABLES", "LOWERED_FOR_PLATFORM") else feature.apis
    command = [sys.executable, "-W", "ignore", HERE / "without_apis.py", tmp_path, *apis]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    found = {one["api"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(apis), done.stderr
    for api, one in found.items():
        assert one["losses"] <= LOSS and one["parameters"] <= PARAMETERS_AFTER_STEPS and not one["by_pytorch"], one
        (line,) = [line for line in one["lines"] if feature.title in line]
        assert f"{api} is missing" in line and line.endswith(feature.without) and "\n" not in line


def test_every_api_is_there_with_the_versions_of_the_tests():
    found = doctor.examine()
    assert found.probes == {feature.title: "on" for feature in probes.FEATURES.values()}


def test_the_doctor_says_what_is_off(off):
    off(probes.SLURM)
    found = doctor.examine()
    assert found.probes[probes.SLURM.title] == found.off[probes.SLURM.title] == f"jax._src.clusters:SlurmCluster missing: {probes.SLURM.without}"
    assert sum(text != "on" for text in found.probes.values()) == 1


def test_what_nothing_can_be_compiled_without_is_an_error_of_one_line(off):
    off(probes.CAPTURE)
    with pytest.raises(GraphAccError, match="cannot compile with torch .*fake_tensor:FakeTensor missing. Install a version with which it was tried") as error:
        graphacc.compile(torch.nn.Linear(2, 2))
    assert "\n" not in str(error.value)


def test_processes_that_cannot_be_joined_are_refused(off, monkeypatch):
    off(probes.SEVERAL_PROCESSES)
    with pytest.raises(DistributedError, match="process 1 of 2, which this version of JAX cannot join: graphacc doctor says what it lacks"):
        distributed.initialize("localhost:1", 2, 1)


@pytest.mark.parametrize(("platform", "feature", "form"), [("cuda", probes.CUDNN_ATTENTION, flash_form.Form.CUDNN), ("tpu", probes.PALLAS, flash_form.Form.PALLAS)])
def test_kernels_of_other_platforms_give_way_to_blocks(off, caplog, platform, feature, form):
    described = flash_form.Described(dtype="bfloat16", batch=2, heads=2, kv_heads=2, q_len=128, kv_len=128, head_dim=64, value_dim=64, right=0)
    call = types.SimpleNamespace(described=described)
    assert flash_attention._form(platform, call) == form
    off(feature)
    assert flash_attention._form(platform, call) == flash_form.Form.BLOCKWISE
    assert [feature.title in line for line in caplog.messages] == [True]


@pytest.mark.lazy
def test_lazy_capture_that_is_off_is_refused(off):
    from graphacc.capture.lazy import xla

    off(probes.CAPTURED_HLO)
    with pytest.raises(CaptureError, match=r"capture by lazy tensors is off: jaxlib.xla_client:XlaComputation missing; install a version"):
        xla.library.__wrapped__()


def test_options_that_xla_has_no_more_are_left_out(caplog):
    caplog.set_level(logging.WARNING, "graphacc")
    options = {"xla_backend_optimization_level": 0, "xla_once_upon_a_time": 3, "xla_and_another": ""}
    assert jax_.known_options(options) == {"xla_backend_optimization_level": 0}
    assert jax_.known_options(options) == {"xla_backend_optimization_level": 0}
    assert sorted(line.split(",")[0] for line in caplog.messages) == [f"graphacc: off: XLA's option {name}" for name in ("xla_and_another", "xla_once_upon_a_time")]
