"""The report on communication: what it reads out of HLO, and ZeRO's formulas in compiled programs."""

import jax
import numpy as np
import pytest
import zoo
from training import batches_of, check_parity, compiled, train

import graphacc
from graphacc.errors import GraphAccError
from graphacc.report import communication
from graphacc.report.communication import read_collectives
from graphacc.runtime import make_mesh, select_devices
from graphacc.strategy import Strategy


def parameter_bytes(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) * 4


def test_zero_3_moves_three_times_the_parameters():
    """Rajbhandari et al., section 7.2: a gather forward, a gather backward and a scatter of gradients; the rest are a few numbers."""
    model = check_parity("llama", "fsdp=8")
    size, found = parameter_bytes(model), communication(model)
    gathered, scattered = found.select("all-gather", "fsdp"), found.select("reduce-scatter", "fsdp")
    assert scattered.size_bytes == size
    assert size < gathered.size_bytes <= 2 * size  # what the backward does not read (norms of the last block, ...) is gathered once
    others = found.size_bytes - gathered.size_bytes - scattered.size_bytes
    assert others <= 64
    assert found.traffic_bytes == pytest.approx(found.size_bytes * 7 / 8, rel=1e-3)


@pytest.mark.parametrize(("strategy", "gathers"), [("fsdp=8,zero=2", 1), ("dp=8", 0)])
@pytest.mark.default_cases("fsdp=8,zero=2-1")
def test_zero_2_and_replicas(strategy, gathers):
    """Stage 2 scatters gradients and gathers new parameters; replicas sum gradients."""
    model = check_parity("llama", strategy)
    size, found = parameter_bytes(model), communication(model)
    assert found.select("all-gather").size_bytes == gathers * size
    assert found.select("reduce-scatter").size_bytes == gathers * size
    sums = found.select("all-reduce").size_bytes
    assert (sums <= 64) if gathers else (size <= sums <= size + 64)


HLO = """
  %all-reduce.1 = (f32[8,4]{1,0}, /*index=1*/bf16[16]{0}) all-reduce(%a, %b), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %ag = f32[16]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={op_name="jit(step)/shard_map/model.layers.0.mlp/all_gather"}
  %rs = f32[2,4]{1,0} reduce-scatter(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add
  %cp = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}
  %some = f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1},{2,4},{3,5},{4,6},{5,7},{6,2},{7,3}}
  %none = f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1},{2,2},{3,3},{4,4},{5,5},{6,6},{7,7}}
  %last = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}
  %a2a = (f32[1,4]{1,0}, f32[1,4]{1,0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %alone = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %other = f32[4]{0} add(%x, %y)
"""


def test_what_is_read_out_of_hlo():
    mesh = make_mesh(Strategy(dp=2, fsdp=2, tp=2), select_devices(8))
    found = list(read_collectives(HLO, mesh))
    assert [(item.kind, item.axes, item.tensor_bytes, item.group_size) for item in found] == [
        ("all-reduce", ("tp",), (128, 32), 2),
        ("all-gather", ("dp", "fsdp"), (64,), 4),
        ("reduce-scatter", ("dp",), (64,), 2),
        ("collective-permute", ("tp",), (16,), 2),
        ("collective-permute", ("dp", "fsdp"), (32,), 3),
        ("collective-permute", ("tp",), (32,), 2),
        ("all-to-all", ("tp",), (32,), 2),
    ]
    assert [item.traffic_bytes for item in found] == [160, 48, 32, 16, 32, 32, 16]
    assert found[1].module == "model.layers.0.mlp"


def test_groups_are_read_as_xla_writes_them():
    """A real program on a mesh whose groups are strided."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=auto, devices=jax.devices()[:8])

    def function(x):
        return jax.lax.psum(x, ("a", "c")), jax.lax.all_gather(x, "b")

    spec = jax.sharding.PartitionSpec("a")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=(jax.sharding.PartitionSpec(), spec), check_vma=False)
    hlo = jax.jit(mapped).lower(np.ones((8, 3), np.float32)).compile().as_text()
    assert sorted((item.kind, item.axes, item.size_bytes) for item in read_collectives(hlo, mesh)) == [
        ("all-gather", ("b",), 2 * 4 * 3 * 4),
        ("all-reduce", ("a", "c"), 4 * 3 * 4),
    ]


def test_the_table_and_what_it_takes():
    model, _ = zoo.MODELS["tied_mlp"]()
    with pytest.raises(GraphAccError, match="takes a compiled model or a train_step function, got Linear"):
        communication(model.hidden)
    model = compiled(model, "dp=2")
    with pytest.raises(GraphAccError, match="run a step first"):
        communication(model)
    step = graphacc.train_step(model, zoo.adamw(model))
    step(**batches_of("tied_mlp", 1)[0])
    assert "dp    all-reduce" in str(communication(step))
    assert communication(step) == communication(model)
    assert train(model, batches_of("tied_mlp", 1))
