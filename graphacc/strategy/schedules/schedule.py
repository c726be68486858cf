"""The values that describe a pipeline schedule.

A model of `num_chunks` consecutive chunks runs on `num_stages` stages; chunk c lies on stage ``c % num_stages``. A
microbatch goes forward (F) through all chunks in order, then backward (B) in reverse order. Where the schedule splits the
backward (zero-bubble), B computes the gradients of activations alone, and W, at any later time, those of the weights.
"""

import dataclasses
import enum


class Part(enum.Enum):
    """What an action computes for one microbatch on one chunk."""

    FORWARD = "F"
    BACKWARD = "B"  # all of backward, or the gradients of activations alone where the schedule splits it
    WEIGHTS = "W"  # the gradients of weights, where the schedule splits the backward


@dataclasses.dataclass(frozen=True)
class Action:
    """One program to run."""

    part: Part
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.part.value}{self.microbatch} of chunk {self.chunk}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every stage, in the order in which the stage does them."""

    name: str
    num_chunks: int
    num_microbatches: int
    stages: tuple[tuple[Action, ...], ...]  # per stage
    splits_backward: bool = False  # there are W actions

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stage_of(self, chunk: int) -> int:
        return chunk % self.num_stages

    def chunks_of(self, stage: int) -> range:
        return range(stage, self.num_chunks, self.num_stages)

    def requirements(self, action: Action) -> tuple[Action, ...]:
        """The actions whose results `action` reads."""
        part, microbatch, chunk = action.part, action.microbatch, action.chunk
        if part is Part.WEIGHTS:
            return (Action(Part.BACKWARD, microbatch, chunk),)
        if part is Part.FORWARD:
            return (Action(part, microbatch, chunk - 1),) if chunk else ()
        own = Action(Part.FORWARD, microbatch, chunk)
        return (own,) if chunk == self.num_chunks - 1 else (own, Action(part, microbatch, chunk + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of one microbatch on one chunk, in any unit."""

    forward: float = 1.0
    backward: float = 1.0  # the gradients of activations
    weights: float = 1.0  # the gradients of weights
    transfer: float = 0.0  # from one stage to another

    def of(self, part: Part, splits_backward: bool) -> float:
        if part is Part.FORWARD:
            return self.forward
        if part is Part.WEIGHTS:
            return self.weights
        return self.backward if splits_backward else self.backward + self.weights
