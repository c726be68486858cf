"""Blocks of arrays that a running program copies to the host as it makes them: the Python face of `csrc/cpu/host_stream.cc`."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from graphacc.kernels import library

SEND = "gacc_send_to_host"
"""The XLA custom call."""


class HostStream:
    """Destinations of what the devices of one run of a program send.

    Args:
        destinations: by device and then slot, dense tensors on the host; None for a block that another device sends. The stream keeps them alive
            until it is closed.
    """

    def __init__(self, destinations: Sequence[Sequence[Tensor | None]]):
        self._tensors = [tensor for slots in destinations for tensor in slots]
        self._num_slots, count = len(destinations[0]), len(self._tensors)
        addresses = (ctypes.c_void_p * count)(*(None if tensor is None else tensor.data_ptr() or ctypes.addressof(_EMPTY) for tensor in self._tensors))
        sizes = (ctypes.c_int64 * count)(*(0 if tensor is None else tensor.nbytes for tensor in self._tensors))
        number = ctypes.c_int64()
        library.call("gacc_stream_open", addresses, sizes, ctypes.c_int64(len(destinations)), ctypes.c_int64(self._num_slots), ctypes.byref(number))
        self.number = number.value
        self._places, self._when = (ctypes.c_int64 * count)(), (ctypes.c_double * count)()

    def wait(self, seconds: float) -> list[tuple[int, int, float]]:
        """(device, slot, when) of the blocks that have arrived since the last call, in seconds of `time.perf_counter`; none after `seconds` without one."""
        count = ctypes.c_int64()
        given = ctypes.c_int64(self.number), ctypes.c_double(seconds), ctypes.c_int64(len(self._places))
        library.call("gacc_stream_wait", *given, self._places, self._when, ctypes.byref(count))
        return [(self._places[i] // self._num_slots, self._places[i] % self._num_slots, self._when[i]) for i in range(count.value)]

    def close(self) -> None:
        """Nothing is written to the destinations any more when this returns."""
        library.call("gacc_stream_close", ctypes.c_int64(self.number))
        self._tensors = []


_EMPTY = ctypes.c_int64()
"""Its address stands for those of tensors without elements, which have none."""


def send(number: int, device: int, slot: int, block: Tensor) -> None:
    """What the custom call does.

    Raises:
        ValueError: the block has another size than its destination, was sent before, or the stream has no such device or slot.
    """
    block = block.contiguous()
    library.call("gacc_stream_send", *map(ctypes.c_int64, (number, device, slot)), ctypes.c_void_p(block.data_ptr()), ctypes.c_int64(block.nbytes))
