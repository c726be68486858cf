"""Two processes train a model that neither holds whole: `benchmarks/meta_device.py`, under a limit that the system enforces, and with bounds."""

import importlib.util

import pytest
from processes import ROOT
from tolerances import LOSS


def benchmark():
    spec = importlib.util.spec_from_file_location("meta_device", ROOT / "benchmarks" / "meta_device.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.matrix
def test_no_process_holds_more_than_its_shards_and_a_fifth():
    meta_device = benchmark()
    total, processes = meta_device.run(layers=12, width=768, staging=10, limited=True)
    for found in processes:
        parts = {line["part"]: line for line in found["parts"]}
        assert parts["loaded"]["shards"] <= 0.51 * total and not found["whole_fits"]
        for name in meta_device.WITHOUT_STEP:
            assert parts[name]["extra"] <= meta_device.SPARE * max(parts[name]["shards"], parts["loaded"]["shards"]), parts[name]
        assert all(abs(a - b) <= LOSS * abs(b) for a, b in zip(found["again"], found["losses"][2:], strict=True)), found
