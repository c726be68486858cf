"""Streams: blocks arrive once, in their place, and nowhere once the stream is closed."""

import threading
import time

import pytest
import torch

import graphacc.ops  # noqa: F401  (registers the operators)
from graphacc.kernels.host_stream import HostStream, send


def test_blocks_arrive_where_they_belong():
    blocks = [[torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16)], [None, torch.zeros(0)]]
    stream = HostStream(blocks)
    assert stream.wait(0.0) == []
    before = time.perf_counter()
    other = torch.ops.graphacc.send_to_host(torch.arange(4).bfloat16().view(2, 2).t(), torch.tensor([[stream.number, 0]]), 1)
    thread = threading.Timer(0.05, send, (stream.number, 1, 1, torch.zeros(0)))
    assert other.tolist() == [1] and [found[:2] for found in stream.wait(0.0)] == [(0, 1)]
    thread.start()
    ((device, slot, when),) = stream.wait(10.0)  # it is woken
    assert (device, slot) == (1, 1) and before < when < time.perf_counter() < before + 5
    send(stream.number, 1, 0, torch.ones(3))  # a copy of what device 0 sends
    assert stream.wait(0.0) == [] and blocks[0][0].eq(0).all()
    assert torch.equal(blocks[0][1], torch.tensor([[0, 2], [1, 3]]).bfloat16())
    stream.close()


def test_what_is_refused_and_what_is_dropped():
    blocks = [[torch.zeros(3)]]
    first, second = HostStream(blocks), HostStream([[torch.zeros(3)]])
    assert first.number != second.number
    send(first.number, 0, 0, torch.ones(3))
    for arguments, message in [((0, 0, torch.ones(3)), "device 0 sent slot 0 twice"), ((1, 0, torch.ones(3)), "device 1, slot 0: the stream has 1 and 1")]:
        with pytest.raises(ValueError, match=message):
            send(first.number, *arguments)
    with pytest.raises(ValueError, match="slot 0: 16 bytes for a block of 12"):
        send(second.number, 0, 0, torch.ones(4))
    assert second.wait(0.0) == [], "streams are apart"
    first.close()
    first.close()
    blocks[0][0].zero_()
    send(first.number, 0, 0, torch.ones(3))
    assert blocks[0][0].eq(0).all(), "nobody waits for it"
    with pytest.raises(ValueError, match=f"stream {first.number} is not open"):
        first.wait(0.0)
    second.close()
