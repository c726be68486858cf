"""Constants out of measured times; the measuring itself on virtual CPU devices; and a cache that is trusted only if whole."""

import dataclasses
import json
import logging
import re
import types

import jax
import pytest

from graphacc import cli
from graphacc.costs import Hardware, Level
from graphacc.costs.calibrate import calibrate, fit, predict, preset_name
from graphacc.costs.hardware import PRESETS
from graphacc.costs.measure import Measurement
from graphacc.errors import StrategyError

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory; where calibrations are kept in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "graphacc" / "hardware"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The one run of this module, and its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return calibrate(4, quick=True)


def test_constants_are_found_again():
    """Times that a known hardware predicts give that hardware."""
    base = Hardware.parse("8xH100")
    chip = dataclasses.replace(base.chip, product_efficiency=((256, 0.3), (1024, 0.6), (8192, 1.0)), stream_rates=((2**28, 3.0), (2**29, 1.5), (2**30, 1.0)), update_rate=1.4)
    known = base.replace(chip=chip, levels=(Level(name="nvlink", size=8, bandwidth=300e9, latency_seconds=3e-6),), collective_shares=(("all_to_all", 0.5),))
    asked = [
        *(Measurement(kind="product", seconds=0, dtype=dtype, dims=(size, 8192, 8192)) for dtype in ("fp32", "bf16") for size in (256, 1024, 8192)),
        *(Measurement(kind="stream", seconds=0, size_bytes=size) for size in (2**20, 2**28, 2**29, 2**30)),
        Measurement(kind="update", seconds=0, size_bytes=2**31),
        Measurement(kind="launch", seconds=0),
        *(Measurement(kind=kind, seconds=0, size_bytes=size, num_ranks=ranks) for kind in KINDS for size in (2**16, 2**22, 2**28) for ranks in (2, 8)),
    ]
    found = fit([dataclasses.replace(item, seconds=predict(item, known)) for item in asked], "NVIDIA H100 80GB HBM3", 8)
    assert found.chip.name == "H100" and found.chip.memory_bytes == base.chip.memory_bytes
    assert (found.chip.fp32_flops, found.chip.bf16_flops) == pytest.approx((67e12, 989e12))
    assert dict(found.chip.product_efficiency) == pytest.approx(dict(chip.product_efficiency))
    assert found.chip.launch_seconds == pytest.approx(5e-6)
    assert found.chip.memory_bandwidth * found.chip.memory_efficiency == pytest.approx(0.8 * 3.35e12)
    assert dict(found.chip.stream_rates) == pytest.approx(dict(chip.stream_rates)) and found.chip.update_rate == pytest.approx(1.4)
    assert found.meeting_seconds == pytest.approx(4.4e-6, rel=1e-3)
    assert (found.levels[0].name, found.levels[0].size) == ("nvlink", 8)
    assert (found.levels[0].bandwidth, found.levels[0].latency_seconds) == pytest.approx((300e9, 3e-6), rel=1e-3)
    assert dict(found.collective_shares) == pytest.approx({"reduce_scatter": 1.0, "all_reduce": 1.0, "all_to_all": 0.5, "permute": 1.0}, rel=1e-3)
    assert dict(found.collective_meetings) == pytest.approx(dict.fromkeys(("reduce_scatter", "all_reduce", "all_to_all", "permute"), 4.4e-6), rel=1e-3)
    assert found.error <= 0.01


@pytest.mark.parametrize(("seconds", "lateness"), [(3e-4, 0.05), (-1e-4, 0.0)], ids=["late", "in time"])
def test_ranks_that_share_cores_come_late_by_what_was_measured(seconds, lateness):
    """Eight ranks on two cores wait 0.3 ms longer behind 1 ms of products more; six of them come behind those that the cores run first."""
    measured = [Measurement(kind=kind, seconds=1e-4, dtype=dtype, dims=(256, 256, 256)) for kind in ("product",) for dtype in ("fp32", "bf16")]
    measured += [Measurement(kind="stream", seconds=1e-3, size_bytes=2**20), Measurement(kind="update", seconds=1e-3, size_bytes=2**20), Measurement(kind="launch", seconds=1e-6)]
    measured += [Measurement(kind=kind, seconds=1e-4 * ranks + size * 1e-9, size_bytes=size, num_ranks=ranks) for kind in KINDS for size in (2**14, 2**22) for ranks in (2, 8)]
    late = Measurement(kind="lateness", seconds=seconds, num_ranks=8, computing_seconds=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphacc.costs.calibrate.cores", lambda: 2)
        found = fit([*measured, late], "cpu", 8)
    assert found.lateness == pytest.approx(lateness)
    assert found.late_seconds(8, 1e-3) == pytest.approx(max(0.0, seconds)) and found.late_seconds(2, 1e-3) == 0.0
    assert found.error == fit(measured, "cpu", 8).error, "a difference of two times is not one that a prediction is held to"
    assert Hardware.from_json(found.to_json()) == found


@pytest.mark.parametrize("sizes, found", [((64, 256, 8192), {256: 0.5, 8192: 1.0}), ((64,), {64: 1.0})], ids=["among others", "nothing else"])
def test_a_product_that_memory_bounds_says_nothing_of_the_arithmetic(sizes, found):
    """Its rate would be taken for the arithmetic's, and its bytes be counted again; unless there is nothing else to take the peak from."""
    chip = dataclasses.replace(PRESETS["H100"].chip, product_efficiency=((256, 0.5), (8192, 1.0)), stream_rates=())
    known = Hardware.parse("8xH100").replace(chip=chip)
    products = [Measurement(kind="product", seconds=0, dtype=dtype, dims=(size, 8192, 8192), size_bytes=2**28) for dtype in ("fp32", "bf16") for size in sizes]
    asked = [*products, *(Measurement(kind=kind, seconds=0, size_bytes=2**28) for kind in ("stream", "update")), Measurement(kind="launch", seconds=0)]
    timed = [dataclasses.replace(item, seconds=predict(item, known)) for item in asked]
    timed = [dataclasses.replace(item, seconds=2**28 / (0.8 * 3.35e12)) if (item.dims or (0,))[0] == 64 else item for item in timed]
    assert dict(fit(timed, "NVIDIA H100 80GB HBM3", 8).chip.product_efficiency) == pytest.approx(found, rel=0.1)


@pytest.mark.matrix
def test_four_virtual_devices_are_measured(measured):
    hardware = measured.hardware
    assert str(hardware) == "cpu:4" and hardware.shared_cores >= 1 and hardware.error > 0
    assert "graphacc calibrate on 4 x cpu, jax" in hardware.source and "measurements" in hardware.error_source
    assert {item.kind for item in measured.measurements} == {"product", "stream", "update", "launch", "lateness", *KINDS}
    assert {item.num_ranks for item in measured.measurements if item.kind in KINDS} == {2, 4}
    assert all(item.seconds > 0 for item in measured.measurements if item.kind != "lateness")
    (late,) = [item for item in measured.measurements if item.kind == "lateness"]
    assert late.num_ranks == 4 and late.computing_seconds > 0 and hardware.lateness == max(0.0, late.seconds / (4 - hardware.shared_cores) / late.computing_seconds)
    assert 1e8 < hardware.chip.fp32_flops < 1e13 and 1e8 < hardware.chip.memory_bandwidth < 1e12
    assert len(measured.table().splitlines()) == 1 + len(measured.measurements)


def stored(measured, cache):
    """The file of the module's run, in an empty cache."""
    cache.mkdir(parents=True)
    path = cache / measured.path.name
    path.write_bytes(measured.path.read_bytes())
    return path


@pytest.mark.matrix
def test_what_was_measured_is_present(measured, cache):
    path = stored(measured, cache)
    assert Hardware.present(4) == Hardware.present(jax.devices()[:4]) == measured.hardware
    assert Hardware.present(2) == Hardware.parse("cpu:2") and Hardware.present() == Hardware.parse("cpu:8")
    assert "not calibrated" in Hardware.present(2).source
    assert [item.name for item in cache.iterdir()] == [path.name], "nothing is left beside it"


def _number(text):
    return text.replace("fp32_flops", "fp32_flops ", 1)


def _version(text):
    content = json.loads(text)
    content["key"]["versions"] = "jax 0.1"
    return json.dumps(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "Unterminated string|Expecting"),
        (lambda text: "", "Expecting value"),
        (_number, "its checksum is wrong"),
        (_version, "it is not one of these devices and versions"),
        (lambda text: "[]", "it is not one of these devices and versions"),
    ],
)
@pytest.mark.matrix
def test_a_damaged_file_is_not_trusted(measured, cache, caplog, damage, message):
    path = stored(measured, cache)
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING, logger="graphacc"):
        assert Hardware.present(4) == Hardware.parse("cpu:4")
    (record,) = [record for record in caplog.records if record.name == "graphacc"]
    assert str(path) in record.getMessage() and "run `graphacc calibrate` again" in record.getMessage()
    assert re.search(message, record.getMessage())


def device(kind: str, host: int = 0):
    return types.SimpleNamespace(device_kind=kind, slice_index=host)


def test_kinds_of_devices(cache):
    assert str(Hardware.present([device("NVIDIA H100 80GB HBM3")] * 8)) == "8xH100"
    assert str(Hardware.present([device("TPU v5 lite", host) for host in (0, 1) for _ in range(4)])) == "2x4xTPUv5e"
    assert preset_name("NVIDIA GH200 480GB") is None and preset_name("NVIDIA GB200") is None and preset_name("NVIDIA A100-SXM4-40GB") == "A100-40"
    with pytest.raises(StrategyError, match="1 x 'NVIDIA GeForce RTX 4090' have no preset: run `graphacc calibrate`"):
        Hardware.present([device("NVIDIA GeForce RTX 4090")])


def test_too_many_devices(capsys):
    with pytest.raises(StrategyError, match="0 devices cannot be measured"):
        calibrate(0)
    assert cli.main(["calibrate", "--output", "constants.txt"]) == cli.EXIT_ERROR
    assert 'the name must end in ".json"' in capsys.readouterr().err
