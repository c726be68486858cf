"""The model of costs against a few of the published steps of `benchmarks/published.py`, unfitted."""

import functools
import importlib.util
import math
import pathlib
import statistics

import numpy as np
import pytest


@functools.cache
def published():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "published.py"
    spec = importlib.util.spec_from_file_location("published", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_is_a_run_or_has_a_reason():
    runs, reasons = published().read()
    assert len(runs) + sum(reasons.values()) == 279 and len(runs) > 150
    for run in runs:
        assert run.strategy.num_devices == run.hardware.num_devices, run
    known = next(run for run in runs if "NeMo" in run.source and run.hardware.num_devices == 8)
    assert known.seconds == pytest.approx(12.78, rel=0.005) and str(known.strategy) == "fsdp=4,zero=1,cp=2,context=ring,microbatches=32,precision=bf16"


@pytest.mark.matrix
def test_a_few_steps_as_published():
    """An implementation on XLA, as ours: GPT of 5B parameters on 16 to 128 H100."""
    module = published()
    runs = [run for run in module.read()[0] if run.model == "gpt3-5b"]
    assert len(runs) == 4
    profiles = module.Profiles(runs)
    logs = module.errors(runs, profiles, dict.fromkeys(module.CONSTANTS, 1.0))
    assert statistics.median(np.abs(np.expm1(logs))) < 0.2, logs
    slow = module.errors(runs, profiles, dict.fromkeys(module.CONSTANTS, 0.5))
    assert slow == pytest.approx(logs + math.log(2), abs=0.3), "most of the time is what these constants divide"
