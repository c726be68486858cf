"""Runs the programs of a pipeline: one per stage and part of a step, which pass values to each other between their meshes.

Programs are started one after another in an order that respects every dependency, without waiting for any: JAX queues them per
device, so that stages work at the same time, and a value is sent to its next stage as soon as the program that makes it
has been started. A value is forgotten when the last program that reads it has been started, so that no more microbatches are
live on a stage than the schedule says. Where the stages lie in several processes, each does the whole list; for a
stage that is not its own, programs take and give arrays without data (see `graphacc.runtime.transfer`).
"""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from graphacc._compat.jax_ import x64
from graphacc.graph import Input, Kind, Output
from graphacc.runtime.program import Program
from graphacc.runtime.transfer import note_started, send, settle


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One compiled segment."""

    part: str  # "F", "B" or "W" of a chunk, or "U" of an update
    index: int  # the chunk, or the level of an update
    stage: int
    program: Program

    @property
    def name(self) -> str:
        return f"{self.part}{self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One run of a program."""

    program: StageProgram
    microbatch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """When a task ran, in seconds from the start of the run."""

    task: Task
    start: float
    end: float


Feed = Callable[[StageProgram, Input, int], jax.Array]
"""(program, input, microbatch) -> the array of an input that is no CROSS value."""

Keep = Callable[[StageProgram, Output, int, jax.Array], None]
"""(program, output, microbatch, array): called for every output that is no CROSS value, when its program has been started."""


def run_tasks(
    tasks: Sequence[Task], meshes: Sequence[Mesh], feed: Feed, keep: Keep, recorder: "Recorder | None" = None
) -> None:
    """Start all tasks in the given order, in which every task stands behind those that it reads from.

    Args:
        meshes: one per stage.
        recorder: notes when each task runs.
    """
    readers = _readers({task.program.name + str(task.program.stage): task.program for task in tasks}.values())
    values: dict[tuple[str, int, int], jax.Array] = {}  # target, microbatch, stage
    unread: dict[tuple[str, int, int], int] = {}
    for task in tasks:
        part, microbatch = task.program, task.microbatch
        arguments = []
        for item in part.program.inputs:
            if item.kind is Kind.CROSS:
                arguments.append(_take(values, unread, (item.target, microbatch, part.stage)))
            else:
                arguments.append(feed(part, item, microbatch))
        started = time.perf_counter()
        if meshes[part.stage].is_multi_process:
            settle()
        results = part.program(*arguments)
        note_started(results)
        del arguments
        for item, array in zip(part.program.outputs, results):
            if item.kind is not Kind.CROSS:
                keep(part, item, microbatch, array)
                continue
            for stage, count in readers[item.target].items():
                here = stage == part.stage
                values[item.target, microbatch, stage] = array if here else send(array, item, meshes[part.stage], meshes[stage])
                unread[item.target, microbatch, stage] = count
        if recorder is not None:
            recorder.note(task, started, results)
    assert not values, f"values that nobody read: {sorted(values)[:5]}"


def _readers(programs: "Sequence[StageProgram]") -> Mapping[str, Mapping[int, int]]:
    """CROSS target -> stage -> number of its programs that read the value."""
    found: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for program in programs:
        for item in program.program.inputs:
            if item.kind is Kind.CROSS:
                found[item.target][program.stage] += 1
    return found


def _take(values: dict, unread: dict, key: tuple[str, int, int]) -> jax.Array:
    unread[key] -= 1
    if unread[key]:
        return values[key]
    del unread[key]
    return values.pop(key)


@jax.jit
def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


def add_on(mesh: Mesh, item: Input | Output, here: jax.Array, elsewhere: jax.Array, source: Mesh) -> jax.Array:
    """The sum of two arrays with the layout of `item`, one on `mesh` and one on `source`, another stage's mesh."""
    moved = send(elsewhere, item, source, mesh)
    with x64():
        return _sum(here, moved)


def _copy(array: jax.Array) -> jax.Array:
    with x64():
        return jnp.copy(array)


class Recorder:
    """Notes when the tasks of a run are done, without changing how they run: one thread per stage waits for their results.

    Of every task the smallest result is waited for; of one that only adds to gradients, which the next microbatch takes
    over, a copy of the smallest. A task is taken to begin when its predecessor on the stage has ended and what it reads
    from other stages is there.
    """

    def __init__(self, num_stages: int):
        self._origin = time.perf_counter()
        self._queues: list[queue.Queue] = [queue.Queue() for _ in range(num_stages)]
        self._ends: list[list[tuple[Task, float, float]]] = [[] for _ in range(num_stages)]
        self._threads = [threading.Thread(target=self._watch, args=(stage,), daemon=True) for stage in range(num_stages)]
        for thread in self._threads:
            thread.start()

    def note(self, task: Task, started: float, results: Sequence[jax.Array]) -> None:
        """Called when a task has been started, before anything that takes its results over."""
        stays = [array for item, array in zip(task.program.program.outputs, results) if item.kind is Kind.CROSS]
        probe = min(stays or results, key=lambda array: array.nbytes)
        self._queues[task.program.stage].put((task, started, probe if stays else _copy(probe)))

    def _watch(self, stage: int) -> None:
        while (entry := self._queues[stage].get()) is not None:
            task, started, probe = entry
            probe.block_until_ready()
            del probe
            self._ends[stage].append((task, started, time.perf_counter()))

    def stop(self) -> None:
        """No task follows; the threads end when the last one is done."""
        for waiting in self._queues:
            waiting.put(None)

    def spans(self) -> list[Span]:
        """All tasks with their times; waits for the run, which has been stopped."""
        for thread in self._threads:
            thread.join()
        return _spans(self._ends, self._origin)


def _spans(ends: Sequence[Sequence[tuple[Task, float, float]]], origin: float) -> list[Span]:
    """Times that agree with the dependencies, also where a waiting thread woke up late."""
    free = [origin] * len(ends)
    arrived: dict[tuple[str, int], float] = {}
    spans = []
    for task, started, noted in sorted((entry for done in ends for entry in done), key=lambda entry: entry[1]):
        stage, program = task.program.stage, task.program.program
        arrivals = (arrived[item.target, task.microbatch] for item in program.inputs if item.kind is Kind.CROSS)
        start = max(free[stage], started, *arrivals)
        free[stage] = end = max(noted, start)
        arrived |= {(item.target, task.microbatch): end for item in program.outputs if item.kind is Kind.CROSS}
        spans.append(Span(task=task, start=start - origin, end=end - origin))
    return spans
