"""Hardware from text and files, and which ranks of a mesh share a host."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from graphacc.costs import Chip, Hardware, Level
from graphacc.costs.hardware import PRESETS
from graphacc.errors import GraphAccError, StrategyError


@pytest.mark.parametrize(("text", "sizes"), [("H100", []), ("8xH100", [8]), ("16x8xH100", [8, 16]), ("2x8xh200", [8, 2]), ("2x256xTPUv5e", [256, 2])])
def test_a_text_is_the_sizes_of_the_levels_from_outside_to_inside(text, sizes):
    hardware = Hardware.parse(text)
    assert [level.size for level in hardware.levels] == sizes
    assert hardware.num_devices == np.prod(sizes)
    assert str(hardware).lower() == text.lower() and Hardware.parse(str(hardware)) == hardware


def test_presets_have_their_data_sheets_numbers():
    h100 = Hardware.parse("16x8xH100")
    assert (h100.chip.peak_flops("bf16"), h100.chip.peak_flops("fp32"), h100.chip.memory_bandwidth) == (989e12, 67e12, 3.35e12)
    assert [level.bandwidth for level in h100.levels] == [361e9, 48e9]
    assert h100.usable_bytes == 77 * 2**30 and h100.error == 0.15 and "not calibrated" in h100.source
    assert all(Hardware.parse(name).num_devices == 1 for name in PRESETS)


def test_virtual_cpu_devices_share_their_cores():
    one, eight = Hardware.parse("cpu"), Hardware.parse("cpu:8")
    assert eight.shared_cores == one.shared_cores >= 1
    for field in ("fp32_flops", "bf16_flops", "memory_bandwidth", "memory_bytes"):
        assert getattr(eight.chip, field) == pytest.approx(getattr(one.chip, field) / 8)
    assert str(eight) == "cpu:8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H1000", "hardware 'H1000' is unknown: write CHIP, NxCHIP or HOSTSxNxCHIP with a chip out of H100, H200"),
        ("", "hardware '' is unknown"),
        ("16xH100", "nvlink joins at most 8 H100, not 16: write HOSTSx8xH100"),
        ("2x2x8xH100", r"joined by 2 levels of links \(nvlink, network\)"),
        ("0xH100", "each at least 1"),
        ("H100:8", 'only "cpu" takes ":N"'),
        ("2xcpu:4", 'no "Nx" beside it'),
    ],
)
def test_a_wrong_text_says_what_may_be_written(text, message):
    with pytest.raises(StrategyError, match=message) as caught:
        Hardware.parse(text)
    assert isinstance(caught.value, GraphAccError)


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "my-cluster.json"
    chip = dataclasses.replace(PRESETS["H100"].chip, name="H100 at 500 W", memory_bandwidth=2.4e12)
    rack = Level(name="rack", size=4, bandwidth=100e9, latency_seconds=5e-6)
    mine = Hardware.parse("4x8xH100").replace(chip=chip, levels=(*Hardware.parse("8xH100").levels, rack), source="measured", error=0.1, collective_shares=(("all_to_all", 0.5),))
    path.write_text(mine.to_json())
    assert Hardware.parse(str(path)) == mine and hash(mine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("chip"), "lacks chip: the fields are chip, levels"),
        (lambda x: x.update(hosts=3), "has the unknown fields hosts"),
        (lambda x: x.update(chip=3), "chip: expected an object, found 3"),
        (lambda x: x["chip"].update(fp32_flops="much"), "fp32_flops='much' of chip 'H100' must be a number above 0"),
        (lambda x: x["chip"].update(memory_bandwidth=0), "memory_bandwidth=0 of chip 'H100' must be a number above 0"),
        (lambda x: x["chip"].update(product_efficiency=[[512, 0.5], [256, 0.3]]), "with growing dims from 1"),
        (lambda x: x["chip"].update(product_efficiency=[["a", 0.5]]), "give pairs"),
        (lambda x: x["levels"][0].update(size=2.5), "size=2.5 of level 'nvlink' must be a whole number of at least 1"),
        (lambda x: x.update(levels=8), "levels is 8, expected a list"),
        (lambda x: x.update(reserve_bytes=2**50), "leaves nothing of memory_bytes"),
        (lambda x: x.update(source=7), "source is 7, expected text"),
        (lambda x: x.update(error=float("nan")), "error=nan"),
        (lambda x: x.update(collective_shares=[["all_to_all", 0]]), "must be pairs"),
        (lambda x: x.update(format=2), '"format": 1'),
    ],
)
def test_a_wrong_file_says_which_field(tmp_path, change, message):
    values = json.loads(Hardware.parse("8xH100").to_json())
    change(values)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(StrategyError, match=message) as caught:
        Hardware.parse(str(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_json(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"format": 1, "chip"')
    with pytest.raises(StrategyError, match="bad.json is no JSON"):
        Hardware.parse(str(path))
    with pytest.raises(FileNotFoundError):
        Hardware.parse(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("mesh", "axis", "group"),
    [
        ({"fsdp": 16, "tp": 8}, "tp", (8, 8)),  # a host's
        ({"fsdp": 16, "tp": 8}, "fsdp", (1, 16)),  # trap 7: one rank in each host
        ({"fsdp": 128}, "fsdp", (8, 128)),
        ({"dp": 4, "fsdp": 8, "tp": 4}, "fsdp", (2, 8)),
        ({"dp": 4, "fsdp": 8, "tp": 4}, "dp", (1, 4)),
        ({"tp": 8, "cp": 2}, "tp", (4, 8)),  # trap 6: cp inside of tp puts tp over two hosts
        ({"tp": 8, "cp": 2}, "cp", (2, 2)),
        ({"dp": 2, "fsdp": 8, "tp": 8}, "dp+fsdp", (1, 16)),
        ({"fsdp": 16, "tp": 8}, "fsdp+tp", (8, 128)),
        ({"dp": 20, "tp": 6}, "tp", (2, 6)),  # a group of six with two in one host is as slow as these two
        ({"tp": 8}, "dp", (1, 1)),  # no such axis: every rank by itself
    ],
)
def test_a_group_is_spread_as_its_strides_say(mesh, axis, group):
    assert Hardware.parse("16x8xH100").group(mesh, axis) == group


def test_groups_against_device_numbers():
    """Every axis of random meshes on three levels, against counting places one by one."""
    base = Hardware.parse("2x8xH100")
    hardware = base.replace(levels=(*base.levels, Level(name="pod", size=3, bandwidth=1e9, latency_seconds=1e-6)))
    generator = np.random.default_rng(0)
    for _ in range(20):
        sizes = generator.choice([1, 2, 3, 4], size=3)
        mesh = dict(zip(("dp", "fsdp", "tp"), map(int, sizes)))
        for number, axis in enumerate(mesh):
            fewest = [10**9] * 3
            for others in itertools.product(*(range(size) for i, size in enumerate(sizes) if i != number)):
                places = [np.ravel_multi_index(np.insert(others, number, i), sizes) for i in range(sizes[number])]
                for level, unit in enumerate((8, 16, 48)):
                    counts = np.bincount([place // unit for place in places])
                    fewest[level] = min(fewest[level], counts[counts > 0].min())
            assert hardware.group(mesh, axis) == tuple(fewest)


def test_a_mesh_that_is_too_large():
    with pytest.raises(StrategyError, match="fsdp=4 x tp=4 are 16 devices, and 8xH100 has 8"):
        Hardware.parse("8xH100").group({"fsdp": 4, "tp": 4}, "tp")


def test_efficiency_is_interpolated_over_the_logarithm_and_constant_outside():
    chip = dataclasses.replace(PRESETS["H100"].chip, product_efficiency=((64, 0.2), (1024, 0.6)))
    assert chip.efficiency(256) == pytest.approx(0.4)
    assert chip.efficiency(np.array([1, 64, 1024, np.inf])) == pytest.approx([0.2, 0.2, 0.6, 0.6])
    with pytest.raises(StrategyError, match="dtype 'fp8' has no peak: choose one of fp32, bf16"):
        chip.peak_flops("fp8")
    with pytest.raises(StrategyError, match="memory_efficiency=1.5 of chip"):
        Chip(**{**dataclasses.asdict(chip), "memory_efficiency": 1.5})
