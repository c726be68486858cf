"""Seconds of kernels and collectives, against numbers worked out by hand, and against the tables that the constants come from."""

import dataclasses

import numpy as np
import pytest

from graphacc.costs import Hardware, Level, Work, collective_seconds, compute_seconds, work_seconds
from graphacc.costs.hardware import PRESETS
from graphacc.costs.seconds import COLLECTIVES
from graphacc.errors import StrategyError

CHIP = dataclasses.replace(
    PRESETS["H100"].chip,
    bf16_flops=100e12,
    fp32_flops=10e12,
    memory_bandwidth=1e12,
    memory_efficiency=0.5,
    launch_seconds=1e-6,
    product_efficiency=((64, 0.1), (1024, 0.5)),
)
INSIDE = Level(name="inside", size=4, bandwidth=100e9, latency_seconds=1e-6)
OUTSIDE = Level(name="outside", size=4, bandwidth=10e9, latency_seconds=10e-6)
CLUSTER = Hardware.parse("H100").replace(chip=CHIP, levels=(INSIDE, OUTSIDE), meeting_seconds=5e-6)


def test_a_kernel_takes_its_arithmetic_or_its_memory_and_the_launch():
    assert compute_seconds(1e9, (1024, 2048, 4096), 1e6, "bf16", CHIP) == pytest.approx(1e9 / 50e12 + 1e-6)
    assert compute_seconds(1e9, (1024, 2048, 4096), 1e6, "fp32", CHIP) == pytest.approx(1e9 / 5e12 + 1e-6)
    assert compute_seconds(1e9, (1024, 64, 4096), 1e6, "bf16", CHIP) == pytest.approx(1e9 / 10e12 + 1e-6)
    assert compute_seconds(1e9, (1024, 2048, 4096), 1e9, "bf16", CHIP) == pytest.approx(1e9 / 0.5e12 + 1e-6)
    assert compute_seconds(0, None, 1e6, "fp32", CHIP) == pytest.approx(2e-6 + 1e-6)
    assert compute_seconds(0, None, 0, "fp32", CHIP) == 0.0, "a view is no kernel"


def test_small_streams_are_faster():
    chip = dataclasses.replace(CHIP, stream_rates=((10**3, 4.0), (10**5, 2.0), (10**7, 1.0)))
    seconds = [float(compute_seconds(0, None, size, "fp32", chip)) - 1e-6 for size in (10, 10**3, 10**4, 10**5, 10**7, 10**9)]
    assert seconds == pytest.approx([size / (0.5e12 * multiple) for size, multiple in zip((10, 10**3, 10**4, 10**5, 10**7, 10**9), (4, 4, 3, 2, 1, 1))])
    for table in (((10, 0.0),), ((10, 1.0), (5, 1.0)), ((10,),)):
        with pytest.raises(StrategyError, match="stream_rates=.* give pairs"):
            dataclasses.replace(CHIP, stream_rates=table)


def test_a_fused_attention_has_an_efficiency_of_its_own():
    chip = dataclasses.replace(CHIP, attention_efficiency=0.5)
    dims = (1024, 2048, 4096)
    assert compute_seconds(1e9, dims, 1e6, "bf16", chip) == pytest.approx(1e9 / 50e12 + 1e-6)
    assert compute_seconds(1e9, dims, 1e6, "bf16", chip, attends=True) == pytest.approx(1e9 / 25e12 + 1e-6)
    works = [Work(flops=1e9, dims=dims, dtype="bf16", attends=attends) for attends in (False, True)]
    assert work_seconds(works, chip) == pytest.approx([1e9 / 50e12 + 1e-6, 1e9 / 25e12 + 1e-6])
    with pytest.raises(StrategyError, match="attention_efficiency=0 of chip"):
        dataclasses.replace(CHIP, attention_efficiency=0)


def test_arrays_give_what_numbers_give():
    generator = np.random.default_rng(0)
    flops, sizes, dims = generator.uniform(0, 1e12, 50), generator.uniform(0, 1e9, 50), generator.integers(1, 5000, (50, 3))
    flops[:5] = sizes[:5] = 0
    together = compute_seconds(flops, dims, sizes, "bf16", CHIP)
    assert together == pytest.approx([compute_seconds(*row, "bf16", CHIP) for row in zip(flops, dims, sizes, strict=True)])
    for kind in COLLECTIVES:
        each = [collective_seconds(kind, size, CLUSTER, (2, 8)) for size in sizes]
        assert collective_seconds(kind, sizes, CLUSTER, (2, 8)) == pytest.approx(each)


def test_works_of_any_kind_together():
    works = [
        Work(flops=1e12, dims=(1024, 64, 4096), dtype="bf16", read_bytes=10),
        Work(),
        Work(read_bytes=10**8, written_bytes=10**7),
        Work(flops=1e12, dims=(1024, 64, 4096)),
    ]
    want = [compute_seconds(work.flops, work.dims, work.size_bytes, work.dtype, CHIP) for work in works]
    assert work_seconds(works, CHIP) == pytest.approx(want) and want[1] == 0
    assert work_seconds([], CHIP).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "group", "want"),
    [
        # inside a host: a ring of 3 steps; 3/4 of the bytes, twice for an all-reduce, which has 2 log2(4) steps
        ("all_gather", (4, 4), 5e-6 + 3e-6 + 0.75e9 / 100e9),
        ("reduce_scatter", (4, 4), 5e-6 + 3e-6 + 0.75e9 / 100e9),
        ("all_reduce", (4, 4), 5e-6 + 4e-6 + 1.5e9 / 100e9),
        ("all_to_all", (4, 4), 5e-6 + 3e-6 + 0.75e9 / 100e9),
        ("permute", (4, 4), 5e-6 + 1e-6 + 1e9 / 100e9),
        # one rank in each of 4 hosts: one NIC
        ("all_gather", (1, 4), 5e-6 + 30e-6 + 0.75e9 / 10e9),
        ("all_reduce", (1, 4), 5e-6 + 40e-6 + 1.5e9 / 10e9),
        # 4 ranks in each of 4 hosts: four NICs, 12 steps inside and 3 between
        ("all_gather", (4, 16), 5e-6 + 12e-6 + 30e-6 + (15 / 16) * 1e9 / 40e9),
        ("all_reduce", (4, 16), 5e-6 + 4e-6 + 40e-6 + 2 * (15 / 16) * 1e9 / 40e9),
        # every chip sends 12/16 of its part over its own NIC
        ("all_to_all", (4, 16), 5e-6 + 12e-6 + 30e-6 + 0.75e9 / 10e9),
        ("permute", (4, 16), 5e-6 + 10e-6 + 1e9 / 10e9),
    ],
)
def test_collectives_by_hand(kind, group, want):
    assert collective_seconds(kind, 1e9, CLUSTER, group) == pytest.approx(want)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_rank_does_nothing_and_more_bytes_take_longer(kind):
    assert collective_seconds(kind, 1e9, CLUSTER, (1, 1)) == 0.0
    assert collective_seconds(kind, 1e9, Hardware.parse("H100"), ()) == 0.0
    for group in ((2, 2), (1, 4), (4, 8)):
        assert (np.diff(collective_seconds(kind, np.logspace(0, 10, 30), CLUSTER, group)) > 0).all()


def test_virtual_devices_copy_their_own_part_too():
    shared = CLUSTER.replace(levels=(INSIDE,), shared_cores=2)
    for kind, share in (("all_gather", 1), ("all_reduce", 2), ("all_to_all", 1)):
        for ranks in (2, 4):
            seconds = collective_seconds(kind, np.array([0.0, 1e9]), shared, (ranks,))
            assert seconds[1] - seconds[0] == pytest.approx(share * 1e9 / 100e9)
    alone, all_together = (collective_seconds("permute", 0.0, shared, (ranks,)) for ranks in (2, 4))
    assert all_together - alone == pytest.approx(2 * INSIDE.latency_seconds), "all ranks of a group meet, though each has one neighbour"


def test_a_kind_of_collective_may_reach_another_share_of_the_links():
    half = CLUSTER.replace(collective_shares=(("all_to_all", 0.5),))
    assert collective_seconds("all_to_all", 1e9, half, (4, 4)) == pytest.approx(5e-6 + 3e-6 + 2 * 0.75e9 / 100e9)
    assert collective_seconds("all_gather", 1e9, half, (4, 4)) == collective_seconds("all_gather", 1e9, CLUSTER, (4, 4))


def test_many_ranks_in_a_host_are_no_faster_than_their_links():
    """8 NICs of 48 GB/s are more than a ring inside a host gives."""
    hardware = Hardware.parse("16x8xH100")
    seconds = collective_seconds("all_gather", 100e9, hardware, hardware.group({"fsdp": 128}, "fsdp"))
    assert seconds == pytest.approx(100e9 * (127 / 128) / 361e9, rel=0.01)


def test_the_measured_table_of_gathers_over_hosts():
    """autoparallel's cost model, from NCCL's logs: (hosts, ranks in a host) -> latency, and bytes/s by size of the whole tensor."""
    hardware = Hardware.parse("32x8xH100")
    latencies = {(1, 2): 8, (1, 4): 17, (1, 8): 30, (2, 8): 70, (4, 8): 146, (8, 8): 297, (16, 8): 599, (32, 8): 1204}
    for (hosts, ranks), microseconds in latencies.items():
        group = hardware.group({"dp": hosts, "x": 8 // ranks, "tp": ranks}, "dp+tp")
        assert collective_seconds("all_gather", 0, hardware, group) == pytest.approx(microseconds * 1e-6, rel=0.1)
    for hosts, rate in {2: 96e9, 8: 55e9, 32: 49.5e9}.items():
        group = hardware.group({"fsdp": hosts, "tp": 8}, "fsdp")
        assert collective_seconds("all_gather", 1e12, hardware, group) == pytest.approx(1e12 / rate, rel=0.01)
    for hosts, rate in {2: 410e9, 4: 396e9, 16: 387e9}.items():
        group = hardware.group({"fsdp": hosts * 8}, "fsdp")
        assert collective_seconds("all_gather", 1e12, hardware, group) == pytest.approx(1e12 / rate, rel=0.1)


def test_an_unknown_collective():
    with pytest.raises(StrategyError, match="collective 'shard' is unknown: choose one of all_gather"):
        collective_seconds("shard", 1, CLUSTER, (2, 2))
