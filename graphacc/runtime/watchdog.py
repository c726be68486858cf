"""A process that dies stops the others, with a message, instead of leaving them in a collective for ever.

Every process holds a connection to process 0 and both sides send a beat four times per timeout. The end of a connection (a process
that crashed or was killed), silence for longer than the timeout (a machine or a network that failed) and a process that says that it
failed (an exception nobody caught) all mean the same: process 0 tells everyone, and each prints what happened and
exits with `EXIT_STATUS`. A process that ends without an error says so first.

Process 0 listens only on the addresses at which the others reach it: each tells, in JAX's key-value store, to what it resolves the host of JAX's service,
and process 0 answers there with ports and a token that a connection has to show first. Whoever else connects is told nothing and is dropped, at
the latest after the timeout.

Processes that are all alive can still wait for each other for ever, when they do different things. So a beat tells what its process
has done of late (see `graphacc.runtime.agreement`): process 0 stops all when two logs differ, or when one process goes on after
another has ended its script, whose end says how far it came.

Why not JAX's own heartbeats: they abort with a stack trace of C++ that does not name the cause, and its callback for that event cannot be
used from Python (jaxlib 0.10.2: bad_cast). They stay on, as a second line.
"""

import atexit
import contextlib
import dataclasses
import errno
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Collection

from graphacc._compat.jax_ import DistributedService, KeyNotThere, read_key
from graphacc.errors import DistributedError
from graphacc.runtime.agreement import ActionLog, Progress, conflict

DEFAULT_TIMEOUT = 30.0
EXIT_STATUS = 70
"""Of a process that stops because another one failed (sysexits' EX_SOFTWARE)."""

_KEY = "graphacc/watchdog"
_MEET_SECONDS = 300.0  # that a process waits for the others to start their watch
_MAX_LINE = 1 << 16
_RESTART = "Training cannot go on without it: start all processes again from the last checkpoint"
_SAME = "Every process must make the same calls in the same order, and as many: start all processes again from the last checkpoint"
_BLAME_SECONDS = 1.0  # an error may be the echo of another process's death, which is heard of meanwhile
_FLUSH_SECONDS = 2.0


class _Link:
    """One connection: lines of JSON in both directions."""

    def __init__(self, connection: socket.socket, rank: int | None):
        self.connection = connection
        self.rank = rank  # of the other side; None until it has said so
        self.name = f"process {rank}"
        self.heard = time.monotonic()
        self._rest = b""
        self._sending = threading.Lock()  # the main thread sends too

    def send(self, **message) -> None:
        with self._sending, contextlib.suppress(OSError):  # the reading side reports it
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """What has come; None at the end of the connection."""
        try:
            data = self.connection.recv(_MAX_LINE)
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _MAX_LINE:
            return None
        if self.rank is not None:  # a stranger's bytes do not keep its connection open
            self.heard = time.monotonic()
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # no JSON, or nested without end
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


class Watchdog:
    """Watches the other processes from a thread of its own."""

    def __init__(self, rank: int, timeout: float, links: list[_Link], listeners: Collection[socket.socket], token: str):
        self.rank = rank
        self.timeout = timeout
        self.links = links
        self.log = ActionLog()
        self._others: dict[int, Progress] = {}  # process -> how far it said that it was
        self._listeners = listeners  # of process 0
        self._token = token
        self._selector = selectors.DefaultSelector()
        for watched in (*listeners, *(link.connection for link in links)):
            self._selector.register(watched, selectors.EVENT_READ)
        self._reporting = threading.Lock()
        self._pid = os.getpid()
        self._failing = False  # this process tells the others of its own error, and ends by itself
        self._status: object = None  # with which the script asked to be ended
        self._print_error, sys.excepthook = sys.excepthook, self._uncaught
        self._end_script, sys.exit = sys.exit, self._exit_asked
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, name="graphacc-watchdog", daemon=True).start()

    @classmethod
    def start(cls, service: DistributedService, timeout: float) -> "Watchdog":
        """Watch the other processes of a run.

        Args:
            timeout: seconds of silence after which a process counts as dead.

        Raises:
            DistributedError: another process does not start its watch, or cannot be reached.
        """
        rank = service.process_id
        if rank == 0:
            return cls._serve(service, timeout)
        host = service.address.rpartition(":")[0].strip("[]")  # process 0 is reached there
        service.client.key_value_set(f"{_KEY}/{rank}", " ".join(_resolved(host)))
        token, *places = _read(service, f"{_KEY}/{rank}/answer", 0).split()
        connection = _connected(places)
        connection.settimeout(timeout)  # of sends: one that is stuck must not stop the watch
        link = _Link(connection, 0)
        link.send(kind="hello", token=token, process=rank, name=f"process {rank} (pid {os.getpid()} on {socket.gethostname()})")
        return cls(rank, timeout, [link], (), token)

    @classmethod
    def _serve(cls, service: DistributedService, timeout: float) -> "Watchdog":
        token = secrets.token_hex(16)
        listeners: dict[str, socket.socket] = {}
        ranks = range(1, service.num_processes)
        places = {rank: _listen(listeners, _read(service, f"{_KEY}/{rank}", rank).split(), service.num_processes) for rank in ranks}
        watchdog = cls(0, timeout, [], tuple(listeners.values()), token)
        for rank in ranks:
            service.client.key_value_set(f"{_KEY}/{rank}/answer", " ".join([token, *places[rank]]))
        return watchdog

    # ---- the thread

    def _watch(self) -> None:
        pause = self.timeout / 4
        woken = beaten = time.monotonic()
        while True:
            ready = {key.fileobj for key, _ in self._selector.select(pause)}
            now = time.monotonic()
            for listener in self._listeners:
                if listener in ready:
                    self._accept(listener)
            for link in [link for link in self.links if link.connection in ready]:
                self._read(link)
            if now - woken > 2 * pause:  # this process itself stood still, and has not listened
                for link in self.links:
                    link.heard = now
            woken = now
            if now - beaten >= pause:
                beaten = now
                self.report()
                self._compare(self.rank)
            for link in list(self.links):
                if now - link.heard > self.timeout:
                    self._lost(link, f"has not been heard of for {now - link.heard:.0f} s")

    def report(self) -> None:
        """Tell the other side how far this process is; with every beat, and when it begins to wait."""
        with self._reporting:  # or an old report could follow the last one
            progress = self.log.progress()
            for link in self._known_links():
                link.send(kind="beat", **dataclasses.asdict(progress))

    def _known_links(self) -> list[_Link]:
        """Those to processes of this run: one that has not shown the token is told nothing, and cannot block by not listening."""
        return [link for link in self.links if link.rank is not None]

    def _compare(self, rank: int) -> None:
        """Process 0 stops all processes where one cannot be doing the same as another."""
        known = self._others | {self.rank: self.log.progress()}
        for other in sorted(known.keys() - {rank}) if self.rank == 0 else ():
            first, second = sorted((rank, other))
            if text := conflict(first, known[first], second, known[second]):
                self._stop(text, _SAME)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is gone again
            return
        connection.settimeout(self.timeout)
        self.links.append(_Link(connection, None))
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, link: _Link) -> None:
        messages = link.receive()
        if messages is None:
            self._lost(link, "is gone: its connection was closed")
            return
        for message in messages:
            if link.rank is None:
                if not hmac.compare_digest(str(message.get("token")).encode(errors="backslashreplace"), self._token.encode()):
                    self._drop(link)
                    return
                link.rank, link.name, link.heard = message["process"], message["name"], time.monotonic()
                self.report()
            elif message["kind"] == "beat":
                self._others[link.rank] = Progress(count=message["count"], last=tuple(message["last"]), ended=message["ended"])
                self._compare(link.rank)
            elif message["kind"] == "failed":
                self._stop(message["text"], message["remedy"])

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        self.links.remove(link)

    def _lost(self, link: _Link, what: str) -> None:
        self._drop(link)
        if link.rank is not None and not self._others.get(link.rank, Progress()).ended:
            self._stop(f"{link.name} {what} at {time.strftime('%H:%M:%S')}", _RESTART)

    def _stop(self, text: str, remedy: str) -> None:
        """Tell the others, print, and end this process: its main thread may never return from a collective."""
        if self._failing:
            return
        for link in self._known_links():
            link.send(kind="failed", text=text, remedy=remedy)
        os.write(2, f"graphacc: process {self.rank} stops: {text}. {remedy}\n".encode())
        _exit(EXIT_STATUS)

    # ---- the end of this process

    def note(self, action: str) -> int:
        """Log an action of the main thread that all processes take part in; returns its number, from 1."""
        self._status = None  # an end that was asked for has not come
        return self.log.add(action)

    def _exit_asked(self, status: object = None) -> None:
        """In the place of `sys.exit`, whose status Python tells no exit handler: notes it, and does as ever."""
        if threading.current_thread() is threading.main_thread():
            self._status = status
        self._end_script(status)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # in a process that was forked
            return
        if self._status not in (None, 0):
            self._fail(f"ended with exit status {_code(self._status)}", _code(self._status))
        self.log.end()
        self.report()

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback) -> None:
        """Python's hook for an exception that ends the process: print it as ever, and tell the others."""
        self._print_error(kind, error, traceback)
        if os.getpid() != self._pid:
            return
        self._failing = isinstance(error, DistributedError)  # which tells the cause itself
        time.sleep(_BLAME_SECONDS)
        self._fail(f"failed with {type(error).__name__}: {str(error)[:1000]}", 1)

    def _fail(self, what: str, status: int) -> None:
        self._failing = True
        for link in self._known_links():
            link.send(kind="failed", text=f"process {self.rank} (pid {os.getpid()} on {socket.gethostname()}) {what}", remedy=_RESTART)
        logging.shutdown()
        _exit(status)


def _read(service: DistributedService, key: str, rank: int) -> str:
    """What process `rank` writes when it starts its watch."""
    try:
        return read_key(service, key, _MEET_SECONDS)
    except KeyNotThere:
        raise DistributedError(
            f"process {rank} has not started to watch the others within {_MEET_SECONDS:.0f} s: every process must call graphacc.distributed.initialize() "
            "(or graphacc.compile), at about the same time"
        ) from None


def _resolved(host: str) -> list[str]:
    """The addresses of a host, as this machine sees it."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def _listen(listeners: dict[str, socket.socket], seen: list[str], backlog: int) -> list[str]:
    """Listen where a process sees this one; where those are not this machine's addresses (they are forwarded), on the one that faces them.

    Args:
        listeners: by address; those that are missing are added.
        seen: to what the other process resolves this one's host.

    Returns:
        "port@address", of each that the other process can try.
    """
    found = [address for address in seen if _listens(listeners, address, backlog)]
    if not found:
        found = [address for address in dict.fromkeys(map(_facing, seen)) if address and _listens(listeners, address, backlog)]
    if not found:
        raise DistributedError(
            f"process 0 cannot listen on any address at which the others see it ({', '.join(seen)}): give the coordinator's address by a name or number "
            "that reaches the machine of process 0"
        )
    return [f"{listeners[address].getsockname()[1]}@{address}" for address in found]


def _listens(listeners: dict[str, socket.socket], address: str, backlog: int) -> bool:
    if address not in listeners:
        try:
            listener = socket.create_server((address, 0), family=_family(address), backlog=backlog)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # not of this machine
                return False
            raise
        listener.setblocking(False)  # a connection may be gone again before it is accepted
        listeners[address] = listener
    return True


def _facing(address: str) -> str | None:
    """This machine's address on the way to another; nothing is sent."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _connected(places: list[str]) -> socket.socket:
    """A connection to the first of "port@address" that answers."""
    errors = []
    for place in places:
        port, _, address = place.partition("@")
        try:
            return socket.create_connection((address, int(port)), timeout=60)
        except OSError as error:
            errors.append(f"{address}: {error}")
    raise DistributedError(f"process 0 cannot be reached to be watched ({'; '.join(errors)}): the processes must be able to connect to each other on any port")


def _code(status: object) -> int:
    """What the system is told for an argument of `sys.exit`."""
    return status & 0xFF if isinstance(status, int) else 1


def _exit(status: int) -> None:
    """End now, without JAX's exit handler, which would wait for the other processes."""
    flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold the streams' locks for ever
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
