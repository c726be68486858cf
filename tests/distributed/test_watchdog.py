"""Who may talk to the watchdog of process 0: the run's other processes, where they meet, and nobody else."""

import errno
import socket

import pytest
from processes import HERE, explicit_variables, finish, start

from graphacc.errors import DistributedError
from graphacc.runtime import watchdog

JOB = str(HERE / "job.py")
TIMEOUT = 3


@pytest.mark.matrix
def test_strangers_end_neither_the_watch_nor_the_job():
    """Lines that are no JSON, not ASCII, nested too deep, without a token, without an end: sent while two processes train."""
    first, second = finish(start([JOB, "strangers", str(3 * TIMEOUT)], GRAPHACC_TIMEOUT=str(TIMEOUT), variables=explicit_variables))
    (found,), (_,) = first.results, second.results
    assert found["alive"] and found["goes on"] == [True]
    assert found["told"] and set(found["told"]) == {""}  # dropped, and nothing was said to them
    assert {address for address, _ in found["places"]} <= {"127.0.0.1", "::1"}  # the coordinator is "localhost"
    assert set(found["elsewhere"]) == {errno.ECONNREFUSED}
    assert "Traceback" not in first.err + second.err


@pytest.fixture
def listeners():
    found: dict[str, socket.socket] = {}
    yield found
    for listener in found.values():
        listener.close()


def test_it_listens_on_the_addresses_that_others_see(listeners):
    places = watchdog._listen(listeners, ["127.0.0.1", "127.0.0.5"], 2)
    assert list(listeners) == ["127.0.0.1", "127.0.0.5"] == [place.partition("@")[2] for place in places]
    assert watchdog._listen(listeners, ["127.0.0.1"], 2) == places[:1]  # a further process, the same socket
    with watchdog._connected(places) as connection:
        assert connection.getpeername() == listeners["127.0.0.1"].getsockname()


def test_a_forwarded_address_is_answered_on_the_one_that_faces_it(listeners, monkeypatch):
    """The others see 203.0.113.7 (of documentation), which is not this machine's."""
    facing = watchdog._facing
    monkeypatch.setattr(watchdog, "_facing", lambda address: facing("127.0.0.9"))  # the way to it depends on the machine
    (place,) = watchdog._listen(listeners, ["203.0.113.7"], 2)
    assert place.endswith("@127.0.0.1") and list(listeners) == ["127.0.0.1"]
    monkeypatch.setattr(watchdog, "_facing", lambda address: None)
    with pytest.raises(DistributedError, match=r"cannot listen on any address at which the others see it \(203.0.113.8\)"):
        watchdog._listen(listeners, ["203.0.113.8"], 2)


def test_what_cannot_be_reached_is_said():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(DistributedError, match=r"cannot be reached to be watched \(127.0.0.1: .*refused"):
        watchdog._connected([f"{port}@127.0.0.1"])


