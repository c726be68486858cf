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
from graphacc.runtime import devices as devices_module
from graphacc.strategy import Strategy

ROOT = str(pathlib.Path(graphacc.__file__).parent.parent)
TESTS = str(pathlib.Path(__file__).parent.parent)


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


def test_virtual_devices_are_made_on_demand_and_the_users_jax_stays():
    code = "import jax; from graphacc.runtime import *; print(default_platform(), len(select_devices(6)), available_devices(), len(jax.devices()))"
    assert run(code, JAX_PLATFORMS="cpu") == "cpu 6 1 1"


@pytest.mark.matrix
def test_models_share_the_virtual_devices_that_are_enough_for_both():
    code = (
        "from graphacc.runtime import *; six, four, nine = map(select_devices, (6, 4, 9));"
        "print(six[:4] == four, set(six).isdisjoint(nine), select_devices(1)[0] in six)"
    )
    assert run(code, JAX_PLATFORMS="cpu") == "True True False"


@pytest.mark.matrix
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


def test_devices_are_added_when_jax_has_started():
    assert len(set(select_devices(16))) == 16 and available_devices() == 8
    assert select_devices(8) == jax.devices()


def test_too_few_devices_between_processes_say_how_to_get_more(monkeypatch):
    monkeypatch.setattr(devices_module, "process_count", lambda: 2)
    with pytest.raises(StrategyError, match=r"16 devices are wanted, JAX has 8 on cpu in 2 processes.*before JAX is first used.*device_count=8"):
        select_devices(16)


NOTEBOOK = """
import os, tempfile
import jax, torch
import torch.nn.functional as F
from torch import nn
import graphacc
from tolerances import LOSS, PARAMETERS_AFTER_STEPS, relative_error

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(32, 96, bias=False), nn.Linear(32, 256), nn.Linear(256, 32)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), Block(), Block(), Block(), nn.Linear(32, 50))

cache = tempfile.mkdtemp()
def make(devices):
    model = build() if devices is None else graphacc.compile(build(), strategy=f"fsdp={devices}" if devices else None, cache_dir=cache)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

def step(model, optimizer, tokens):
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def check(pairs, rounds):
    for _ in range(rounds):
        for reference, compiled in pairs:
            tokens = torch.randint(0, 50, (32, 64))
            want, got = step(*reference, tokens), step(*compiled, tokens)
            assert abs(got - want) <= LOSS * max(1.0, abs(want)), (got, want)
    for (reference, _), (model, _) in pairs:
        assert not model._graphacc_engine.by_pytorch.counts, model._graphacc_engine.by_pytorch.counts
        for name, value in model.state_dict().items():
            assert relative_error(value, reference.state_dict()[name]) <= PARAMETERS_AFTER_STEPS, name

before = jax.devices() if USED else None
torch.manual_seed(1)
first = make(None), make(FIRST)
check([first], 2)
second = make(None), make(SECOND)
check([first, second], 3)
counts = [model.strategy.num_devices for _, (model, _) in (first, second)]

for _, (model, _) in (first, second):  # the same programs on each client: CPU kernels, and the plan of memory
    program = model.programs[0].program
    assert "gacc_flash_forward" in program.hlo_text() and (program.plan.changed or model.strategy.num_devices < 8), model.explain()
    assert len(program.mesh.devices.flat[0].client.devices()) == model.strategy.num_devices

third = make(None), make(SECOND)
check([third], 1)
assert third[1][0].programs[0].program.from_cache, third[1][0].explain()

saved = tempfile.mkdtemp()
graphacc.save_checkpoint(saved, *first[1])
graphacc.load_checkpoint(saved, *third[1])  # from one client's arrays to the other's
check([(first[0], third[1])], 2)

assert len(jax.devices()) == 1 and before in (None, jax.devices())
assert not [name for name in os.environ if name.startswith(("XLA", "JAX_NUM"))]
assert float(jax.numpy.ones(3).sum()) == 3.0
print(*counts)
"""


@pytest.mark.parametrize("first, second, used, counts", [(0, 8, True, "1 8"), (8, 0, False, "8 1")])
@pytest.mark.matrix
def test_models_for_different_numbers_of_devices_train_in_turn(first, second, used, counts):
    """Devices 0: the default. `used`: JAX has started before."""
    code = NOTEBOOK.replace("FIRST", str(first)).replace("SECOND", str(second)).replace("USED", str(used))
    assert run(f"sys.path.insert(0, {TESTS!r})\n{code}", JAX_PLATFORMS="cpu") == counts


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
