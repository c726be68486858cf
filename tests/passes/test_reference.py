"""The Gloo executor: partitioned graphs in real processes, and what it says when one fails."""

import pytest
import torch
from graphs import trace
from selection import with_matrix
from zoo_steps import partitioned, shared_case

from graphacc.errors import GraphAccError
from graphacc.graph import Kind, MeshShard
from graphacc.runtime.reference import block, coordinates, join, run_reference
from graphacc.strategy import Strategy


def test_blocks_join_to_the_global_tensor():
    mesh = {"dp": 2, "fsdp": 3}
    x = torch.randn(7, 5)
    for shards in (
        (),
        (MeshShard(axis="fsdp", size=3, dim=0),),
        (MeshShard(axis="fsdp", size=3, dim=1), MeshShard(axis="dp", size=2, dim=0)),
        (MeshShard(axis="fsdp", size=3, dim=0), MeshShard(axis="dp", size=2, dim=0)),
    ):
        blocks = [block(x, shards, at) for at in coordinates(mesh)]
        assert len({tuple(part.shape) for part in blocks}) == 1
        assert torch.equal(join(blocks, x.shape, shards, mesh), x)


def test_interleaved_blocks_join_to_the_global_tensor():
    mesh = {"dp": 2, "fsdp": 3}
    x = torch.randn(7, 12)
    shards = (MeshShard(axis="dp", size=2, dim=1, outer=3), MeshShard(axis="fsdp", size=3, dim=1))
    blocks = [block(x, shards, at) for at in coordinates(mesh)]
    assert torch.equal(blocks[0], x[:, [0, 1]]) and torch.equal(blocks[3], x[:, [2, 3]])
    assert torch.equal(join(blocks, x.shape, shards, mesh), x)


STEPS = [("resnet", "fsdp=2,zero=3"), ("mixtral", "dp=2,fsdp=2,zero=2")]


@pytest.mark.parametrize(("name", "strategy"), with_matrix(STEPS, STEPS[:1]))
@pytest.mark.matrix
def test_training_step_in_processes(name, strategy):
    case, inputs, expected = shared_case(name)
    step, _ = partitioned(case.step, strategy)
    for x, y, item in zip(run_reference(step, Strategy.parse(strategy).mesh, inputs), expected, step.outputs, strict=True):
        torch.testing.assert_close(
            x, y, rtol=1e-3, atol=2e-6, msg=lambda text, item=item: f"{item.kind.value} {item.target}: {text}"
        )


@pytest.mark.matrix
def test_a_failing_process_shows_its_traceback():
    step = trace(
        lambda x, i: (x[i],), [(Kind.BATCH, "x", torch.randn(4)), (Kind.BATCH, "i", torch.tensor([0, 1]))], [(Kind.USER, "0")]
    )
    with pytest.raises(GraphAccError, match=r"(?s)process of rank 0 failed:.*index 9 is out of bounds"):
        run_reference(step, {"dp": 1}, [torch.randn(4), torch.tensor([0, 9])])
