"""Devices on demand, and meshes that fit them."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

import graphacc
from graphacc.errors import StrategyError
from graphacc.runtime import available_devices, default_platform, make_mesh, select_devices
from graphacc.strategy import Strategy

ROOT = str(pathlib.Path(graphacc.__file__).parent.parent)


def run(code: str, **environment: str) -> str:
    """Run code in a process where JAX has no devices yet."""
    base = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {ROOT!r})\n{code}"],
        capture_output=True,
        text=True,
        env=base | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_virtual_devices_are_made_on_demand():
    assert (
        run(
            "from graphacc.runtime import *; print(default_platform(), len(select_devices(6)), available_devices())",
            JAX_PLATFORMS="cpu",
        )
        == "cpu 6 6"
    )


def test_more_devices_that_the_user_set_up_stay():
    code = "from graphacc.runtime import *; print(len(select_devices(2)), available_devices())"
    assert run(code, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=5") == "2 5"


def test_importing_the_runtime_starts_no_backend():
    code = (
        "import graphacc.runtime; from graphacc._compat.jax_ import backend_started;"
        "print(graphacc.runtime.default_platform(), backend_started())"
    )
    assert run(code, JAX_PLATFORMS="cpu") == "cpu False"


def test_devices_in_the_mesh_are_those_given():
    assert available_devices() == 8 and default_platform() == "cpu"
    mesh = make_mesh(Strategy(dp=2, fsdp=4), select_devices(8))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 4}
    assert list(mesh.devices.flat) == jax.devices()


def test_axes_of_size_one_vanish_and_one_device_has_one_axis():
    assert dict(make_mesh(Strategy(fsdp=3), select_devices(3)).shape) == {"fsdp": 3}
    assert dict(make_mesh(Strategy(), select_devices(1)).shape) == {"dp": 1}


def test_too_few_devices_say_how_to_get_more():
    with pytest.raises(
        StrategyError, match=r"16 devices are wanted, JAX has 8 on cpu.*before JAX is first used.*device_count=16"
    ):
        select_devices(16)


def test_no_devices():
    with pytest.raises(StrategyError, match="devices=0 must be at least 1"):
        select_devices(0)


@pytest.mark.parametrize(
    "strategy, count, message",
    [
        (
            Strategy(dp=3),
            8,
            r"needs 3 devices \(dp=3\), but there are 8: set devices=3, .* 8: fsdp=8, dp=2 fsdp=4, dp=4 fsdp=2, dp=8$",
        ),
        (
            Strategy(dp=2, tp=2),
            8,
            r"needs 4 devices \(dp=2 \* tp=2\), but there are 8: set devices=4, .* fsdp=4, dp=2 fsdp=2, dp=4$",
        ),
        (Strategy(tp=3), 8, r"or change tp to a divisor of 8"),
        (Strategy(fsdp=8), 1, r"multiply to 1: dp=1 fsdp=1$"),
    ],
)
def test_a_mesh_that_does_not_fit_lists_those_that_would(strategy, count, message):
    with pytest.raises(StrategyError, match=message):
        make_mesh(strategy, select_devices(count))
