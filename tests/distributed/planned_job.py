"""What the processes of `test_planned_processes.py` run: ``python planned_job.py <task> [arguments]``."""

import hashlib
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Callable

import job
import torch
from torch import nn

import graphacc
from graphacc._compat import jax_ as compat
from graphacc.runtime import Program
from graphacc.runtime.distributed import process_index
from graphacc.runtime.replan import api, cpu
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.schema import read_schema

ROWS, WIDTH, STEPS, SECONDS = 1024, 256, 3, 5.0
PLANNED = dict(memory_plan="roam", plan_seconds=1.0)


class Branches(nn.Module):
    """Layers side by side, in whose order a plan has something to choose."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.tanh(layer(x)) * torch.sin(x.roll(i, 1)) for i, layer in enumerate(self.layers))


def gpt2(*strategies: str) -> dict:
    """Steps under each strategy, with XLA's plan and with ours: the bits, the plan, and the order of the collectives under both."""
    found, orders = {}, _record_orders()
    job.BATCH = 256  # enough temporaries to be planned
    for strategy in strategies:
        plain, _ = _train(*job.compiled(strategy, memory_plan="xla"), job.step)
        bits, plan = _train(*job.compiled(strategy, **PLANNED), job.step)
        before, after = orders.pop()
        found[strategy] = {"plain": plain, "planned": bits, "plan": plan, "order": before, "planned order": after}
    return found


def unalike(directory: str) -> dict:
    """The same steps again and again, while process 1 does otherwise than process 0 in what concerns the plan alone."""
    graphacc.distributed.initialize()
    odd = process_index() == 1
    own = pathlib.Path(directory, str(process_index()))
    found = {"xla": _branches(memory_plan="xla", cache_dir=None), "cold": _branches(cache_dir=str(own))}
    if odd:
        shutil.rmtree(own)
    found["warm in one"] = _branches(cache_dir=str(own))
    found["warm"] = _branches(cache_dir=str(own))
    found["no time in one"] = _branches(cache_dir=None, plan_seconds=0.0 if odd else 1.0)
    if odd:
        api.plan_bytes = _failing
    found["failed in one"] = _branches(cache_dir=None)
    return {"runs": found, "late": _late()}


def _late() -> dict[str, float]:
    """Process 1 takes longer to compile than process 0: when each is done, and when it starts its first step."""
    times = {}
    build, call = Program.build, Program.__call__

    def slow(*args, **options):
        program = build(*args, **options)
        time.sleep(SECONDS * process_index())
        times["compiled"] = time.time()
        return program

    def noted(program, *arrays):
        times.setdefault("started", time.time())
        return call(program, *arrays)

    Program.build, Program.__call__ = slow, noted
    _branches(memory_plan="xla", cache_dir=None)
    Program.build, Program.__call__ = build, call
    return times


def _branches(**options) -> dict:
    torch.manual_seed(0)
    net = graphacc.compile(Branches(), strategy="fsdp=8,bucket_mb=0", **PLANNED | options)
    bits, plan = _train(net, torch.optim.AdamW(net.parameters(), lr=1e-3), _branches_step)
    return {"bits": bits, "plan": plan}


def _branches_step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    loss = net(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, step: Callable) -> tuple[str, dict | None]:
    """A digest of the losses and of the parameters after them, and what is known of the plan."""
    digest = hashlib.sha256()
    for number in range(STEPS):
        digest.update(step(net, optimizer, number).detach().numpy().tobytes())
    for value in net.state_dict().values():
        digest.update(value.detach().numpy().tobytes())
    plan = net.programs[0].program.plan
    names = ("changed", "reason", "temporary_before", "temporary_after", "lower_bound", "from_cache", "schedule")
    told = plan and {name: getattr(plan, name) for name in names} | {"line": plan.summary() in net.explain()}
    return digest.hexdigest(), told


def _record_orders() -> list[tuple[list[str], list[str]]]:
    """From now on: of every planned program the order of its collectives in XLA's bytes and in ours."""
    orders, plan_bytes = [], api.plan_bytes

    def recording(serialized, **options):
        planned = plan_bytes(serialized, **options)
        orders.append((_collectives(serialized), _collectives(planned.serialized)))
        return planned

    api.plan_bytes = recording
    return orders


def _collectives(serialized: bytes) -> list[str]:
    executable = cpu.read(read_schema(compat.xla_library()), open_envelope(serialized).executable)
    collectives = [thunk for thunk in executable.thunks if thunk.kind == "collective_thunk"]
    return [f"{thunk.name} {thunk.message.collective_thunk.op_params}" for thunk in collectives]


def _failing(*args, **options):
    raise RuntimeError("the planner of process 1 is broken")


if __name__ == "__main__":
    task, *values = sys.argv[1:]
    print("result", json.dumps(globals()[task](*values)), flush=True)
