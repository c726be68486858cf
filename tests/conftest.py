"""Test session set-up: eight virtual CPU devices, one thread per process, before JAX or transformers is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
