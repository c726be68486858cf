"""Test session set-up: eight virtual CPU devices, one thread per process, before JAX or transformers is imported; `--slice`."""

import gc
import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import pytest
import torch
from selection import DefaultCases, slices_of

torch.set_num_threads(1)
gc.set_threshold(100_000, 20, 20)  # a tenth of the time: the 600,000 objects of the imports would be searched for cycles again and again


GRU, CLIP_GRAD_NORM = torch.nn.GRU, torch.nn.utils.clip_grad_norm_


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    """A plain import of torch_xla replaces parts of torch, for the tests that come after it in this process, too."""
    yield
    assert torch.nn.GRU is GRU and torch.nn.utils.clip_grad_norm_ is CLIP_GRAD_NORM, "this test, or a library it loads, imported torch_xla"


def pytest_configure(config):
    config.pluginmanager.register(DefaultCases(), "default_cases")


def pytest_collection_finish(session):
    """The objects of the imports become old, and are not frozen: beside frozen ones the passes leave their own to the collector (`collector.paused`)."""
    gc.collect()


def pytest_addoption(parser):
    parser.addoption("--slice", metavar="K/N", help="of the tests that are selected, run the K-th of N slices, K from 1 to N")


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_runtest_setup(item):
    if item.get_closest_marker("lazy") is not None and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed (the extra `lazy`)")


def pytest_collection_modifyitems(config, items):
    if config.option.slice is None:
        return
    number, count = map(int, config.option.slice.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--slice={config.option.slice}: K is not between 1 and N")
    slices = slices_of(items, count)
    config.hook.pytest_deselected(items=[item for item in items if slices[item.nodeid] != number])
    items[:] = [item for item in items if slices[item.nodeid] == number]
