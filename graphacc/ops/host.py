"""Values that leave a device while its program runs."""

import torch
from torch import Tensor

from graphacc.kernels import host_stream


@torch.library.custom_op("graphacc::send_to_host", mutates_args=())
def send_to_host(x: Tensor, stream: Tensor, slot: int) -> Tensor:
    """Copy `x` to the host of the device, which is told at once; the program goes on.

    Args:
        stream: int64 [1, 2], the number of an open `graphacc.kernels.host_stream.HostStream` and this device's place in it.
        slot: which of the stream's blocks `x` is.

    Returns:
        uint8 [1], which the program has to return: nothing else keeps the call.
    """
    number, device = stream.flatten().tolist()
    host_stream.send(number, device, slot, x)
    return torch.ones(1, dtype=torch.uint8)


@send_to_host.register_fake
def _(x, stream, slot):
    return x.new_empty(1, dtype=torch.uint8)
