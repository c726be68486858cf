"""`graphacc doctor`: what it says is what is here, and nothing that names a host or a user."""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys

import pytest
import torch

import graphacc
from graphacc import cli, doctor
from graphacc.errors import GraphAccError
from graphacc.kernels import library


def run(home: pathlib.Path, *options: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", "import sys; from graphacc.cli import main; sys.exit(main())", "doctor", *options]
    environment = kept | {"HOME": str(home), "XDG_CACHE_HOME": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.matrix
def test_it_says_what_is_here(tmp_path):
    entry = tmp_path / ".cache" / "graphacc" / "xla" / "an-entry"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"x" * 1_500_000)
    host = socket.gethostname()
    text = run(
        tmp_path,
        "--json",
        XLA_FLAGS=f"--xla_force_host_platform_device_count=3 --xla_dump_to={tmp_path}/dump",
        GRAPHACC_COORDINATOR=f"{host}:1234",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        NOT_OURS="secret",
    )
    found = json.loads(text)
    for name in ("jax", "jaxlib", "ortools", "transformers"):
        assert found["versions"][name] == importlib.metadata.version(name)
    assert found["versions"]["graphacc"] == graphacc.__version__ and found["versions"]["python"] == platform.python_version()
    assert "torch_xla" in found["versions"]
    assert found["library"].startswith(f"ABI {library.ABI_VERSION}, kernels for {library.default_isa()} ")
    assert found["devices"]["jax"] == "3 x cpu (cpu)" and "cores for this process" in found["devices"]["cpu"]
    assert found["caches"] == {"directory": "~/.cache/graphacc", "xla": "1 compiled programs, 1.5 MB", "hardware": "0 calibrations, 0.0 MB"}
    assert found["environment"]["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3 --xla_dump_to=<path>"
    assert found["environment"]["GRAPHACC_COORDINATOR"] == "<set>" and found["environment"]["JAX_COMPILATION_CACHE_DIR"] == "<path>"
    assert "graphacc calibrate" in found["off"]["measured seconds in searches, MFU on a CPU"]
    assert "NOT_OURS" not in text and str(tmp_path) not in text and f'"{host}' not in text and sys.prefix not in text


def test_the_text_is_for_reading(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^\w+", text, re.MULTILINE) == ["versions", "library", "devices", "caches", "environment", "probes", "off"]
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", text, re.MULTILINE) and f"directory  {tmp_path}/graphacc" in text


def test_a_library_that_cannot_be_loaded_is_said(monkeypatch):
    def load():
        raise library.NativeLibraryError(f"{library.FILE_NAME} was not found (looked at {os.path.abspath(__file__)}). {library.REMEDY}")

    monkeypatch.setattr(library, "load", load)
    found = doctor.examine()
    assert found.library.startswith("cannot be used: libgraphacc_cpu.so was not found (looked at <path>") and "pip install ." in found.library
    assert found.off["kernels of our own (attention, Adam, planning)"] in found.library


@pytest.mark.parametrize(
    ("text", "expected"),
    [("--a=/tmp/me --b=1", "--a=<path> --b=1"), ("a/b ~/c", "a/b <path>"), ("/x:/y,/z", "<path>:<path>,<path>"), ("cpu", "cpu"), ("0.1/2", "0.1/2")],
)
def test_paths_are_left_out(text, expected):
    assert doctor._without_paths(text) == expected


def test_unmeasured_hardware_that_has_no_preset(monkeypatch):
    def present(devices=None):
        raise GraphAccError("1 x 'a chip' have no preset")

    monkeypatch.setattr(doctor.Hardware, "present", present)
    assert doctor.examine().off['strategy="auto", MFU'] == "1 x 'a chip' have no preset"
