"""The gradients of one run of a program, block by block, as its devices send them (`graphacc.passes.stream`)."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jax.sharding import Mesh
from torch import Tensor

from graphacc.graph import Input, Output
from graphacc.kernels.host_stream import HostStream
from graphacc.runtime.host_array import Bounds, HostArray, blocks_of_devices
from graphacc.runtime.layout import sharding, stored_shape

_POLL_SECONDS = 0.1
"""How soon a program that ended with an error, and so sends nothing more, is noticed."""


class Staging:
    """Host memory for the gradients of one run; it serves later runs of programs with the same gradients.

    Args:
        items: the gradients, by slot.
        stream: the program's input that names the stream.
    """

    def __init__(self, items: Sequence[Output], stream: Input, mesh: Mesh):
        self._stream = stream
        devices = blocks_of_devices(stream_layout := sharding(stream, mesh), stored_shape(stream))
        self._rows = {device: key[0][0] for device, key in devices.items()}  # of the stream's input
        self._keys: list[dict[int, Bounds]] = []  # by slot: row of a device -> the block that it sends
        self.arrays: dict[str, HostArray] = {}
        for item in items:
            layout = sharding(item, mesh)
            assert layout.mesh == stream_layout.mesh
            senders: dict[Bounds, int] = {}
            for device, key in blocks_of_devices(layout, stored_shape(item)).items():
                senders.setdefault(key, self._rows[device])  # the first of those that have it
            blocks = {key: torch.empty([stop - start for start, stop in key], dtype=item.dtype) for key in senders}
            self._keys.append({row: key for key, row in senders.items()})
            self.arrays[item.target] = HostArray(item=_as_input(item), layout=layout, blocks=blocks)
        self._names = [item.target for item in items]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def blocks(self) -> list[tuple[str, Bounds]]:
        """All that has to arrive."""
        return [(name, key) for name, keys in zip(self._names, self._keys) for key in keys.values()]

    def block(self, row: int, slot: int) -> tuple[str, Bounds]:
        """The gradient, and the block of it, that a device sends in a slot."""
        return self._names[slot], self._keys[slot][row]

    def open(self) -> HostStream:
        def destination(row: int, slot: int) -> Tensor | None:
            key = self._keys[slot].get(row)
            return None if key is None else self.arrays[self._names[slot]].blocks[key]

        return HostStream([[destination(row, slot) for slot in range(len(self._names))] for row in range(self._stream.shape[0])])

    def ticket(self, stream: HostStream) -> Tensor:
        """The program's input: for every device the stream's number, which is this process's own, and the device's row."""
        return torch.tensor([[stream.number, row] for row in range(self._stream.shape[0])])


def _as_input(item: Output) -> Input:
    return Input(name="", kind=item.kind, target=item.target, shape=item.shape, dtype=item.dtype, shards=item.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A block of a gradient that is in the host's memory."""

    name: str
    key: Bounds
    size_bytes: int
    seconds: float  # of `time.perf_counter`, when it was there


class GradientStream:
    """What one run of a program sends.

    Args:
        staging: where it is written; nobody else uses it until `close`.
    """

    def __init__(self, staging: Staging):
        self.staging = staging
        self.opened = time.perf_counter()  # the program was started then
        self._stream = staging.open()
        self.ticket = staging.ticket(self._stream)
        self.sent: Any = None  # a jax.Array: the result of the program that says what was sent, once it has been started

    def arrivals(self) -> Iterator[list[Arrival]]:
        """The blocks in the order in which they arrive, those together that are there at the same time; ends when the program has.

        Raises:
            jax.errors.JaxRuntimeError: the program failed. What has arrived until then was given.
        """
        assert self.sent is not None, "the program has not been started"
        left = set(self.staging.blocks)
        while left:
            has_ended = self.sent.is_ready()  # asked before, so that what it sent last is not missed
            if found := [self._arrival(*each) for each in self._stream.wait(0.0 if has_ended else _POLL_SECONDS)]:
                left -= {(each.name, each.key) for each in found}
                yield found
            elif has_ended:
                self.wait_for_program()
                raise AssertionError(f"the program has ended, and {len(left)} blocks of gradients, such as {min(left)}, were not sent")
        self.wait_for_program()

    def _arrival(self, device: int, slot: int, seconds: float) -> Arrival:
        name, key = self.staging.block(device, slot)
        return Arrival(name=name, key=key, size_bytes=self.staging.arrays[name].blocks[key].nbytes, seconds=seconds)

    def wait_for_program(self) -> None:
        """Raises its error, if it failed."""
        assert self.sent is not None
        self.sent.block_until_ready()

    def end_of_program(self) -> float:
        """Wait until the program has ended, well or not; returns when that was."""
        with contextlib.suppress(Exception):  # `arrivals` raises it
            self.wait_for_program()
        return time.perf_counter()

    def close(self) -> None:
        """The staging is free; what the program may still send is dropped."""
        self._stream.close()
