"""A process that dies stops the others, with a message, instead of leaving them in a collective for ever.

Every process holds a connection to process 0 and both sides send a beat four times per timeout. The end of a connection (a process
that crashed or was killed), silence for longer than the timeout (a machine or a network that failed) and a process that says that it
failed (an exception nobody caught) all mean the same: process 0 tells everyone, and each prints what happened and
exits with `EXIT_STATUS`. A process that ends without an error says so first. Process 0 publishes its port, and a token
that connections must show, in JAX's key-value store.

Why not JAX's own heartbeats: they abort with a stack trace of C++ that does not name the cause, and its callback for that event cannot be
used from Python (jaxlib 0.10.2: bad_cast). They stay on, as a second line.
"""

import atexit
import contextlib
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

from graphacc._compat.jax_ import DistributedService

DEFAULT_TIMEOUT = 30.0
EXIT_STATUS = 70
"""Of a process that stops because another one failed (sysexits' EX_SOFTWARE)."""

_KEY = "graphacc/watchdog"
_MAX_LINE = 4096
_BLAME_SECONDS = 1.0  # an error may be the echo of another process's death, which is heard of meanwhile
_FLUSH_SECONDS = 2.0


class _Link:
    """One connection: lines of JSON in both directions."""

    def __init__(self, connection: socket.socket, rank: int | None):
        self.connection = connection
        self.rank = rank  # of the other side; None until it has said so
        self.name = f"process {rank}"
        self.heard = time.monotonic()
        self.ended = False  # the other side ends as it should
        self._rest = b""

    def send(self, **message) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the reading side reports it

    def receive(self) -> list[dict] | None:
        """What has come; None at the end of the connection."""
        try:
            data = self.connection.recv(_MAX_LINE)
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _MAX_LINE:
            return None
        self.heard = time.monotonic()
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


class Watchdog:
    """Watches the other processes from a thread of its own."""

    def __init__(self, rank: int, timeout: float, links: list[_Link], listener: socket.socket | None, token: str):
        self.rank = rank
        self.timeout = timeout
        self.links = links
        self._listener = listener
        self._token = token
        self._selector = selectors.DefaultSelector()
        for watched in (listener, *(link.connection for link in links)):
            if watched is not None:
                self._selector.register(watched, selectors.EVENT_READ)
        self._pid = os.getpid()
        self._failing = False  # this process tells the others of its own error, and ends by itself
        self._print_error, sys.excepthook = sys.excepthook, self._uncaught
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, name="graphacc-watchdog", daemon=True).start()

    @classmethod
    def start(cls, service: DistributedService, timeout: float) -> "Watchdog":
        """Watch the other processes of a run.

        Args:
            timeout: seconds of silence after which a process counts as dead.
        """
        rank = service.process_id
        if rank == 0:
            return cls._serve(service, timeout)
        port, token = service.client.blocking_key_value_get(_KEY, 60_000).split()
        host = service.address.rpartition(":")[0].strip("[]")  # process 0 is reached there
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.settimeout(timeout)  # of sends: one that is stuck must not stop the watch
        link = _Link(connection, 0)
        link.send(kind="hello", token=token, process=rank, name=f"process {rank} (pid {os.getpid()} on {socket.gethostname()})")
        return cls(rank, timeout, [link], None, token)

    @classmethod
    def _serve(cls, service: DistributedService, timeout: float) -> "Watchdog":
        listener = socket.create_server(("", 0), backlog=service.num_processes)
        token = secrets.token_hex(16)
        watchdog = cls(0, timeout, [], listener, token)
        service.client.key_value_set(_KEY, f"{listener.getsockname()[1]} {token}")
        return watchdog

    # ---- the thread

    def _watch(self) -> None:
        pause = self.timeout / 4
        woken = beaten = time.monotonic()
        while True:
            ready = {key.fileobj for key, _ in self._selector.select(pause)}
            now = time.monotonic()
            if self._listener in ready:
                self._accept()
            for link in [link for link in self.links if link.connection in ready]:
                self._read(link)
            if now - woken > 2 * pause:  # this process itself stood still, and has not listened
                for link in self.links:
                    link.heard = now
            woken = now
            if now - beaten >= pause:
                beaten = now
                for link in self.links:
                    link.send(kind="beat")
            for link in list(self.links):
                if now - link.heard > self.timeout:
                    self._lost(link, f"has not been heard of for {now - link.heard:.0f} s")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
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
                if not hmac.compare_digest(str(message.get("token")), self._token):
                    self._drop(link)
                    return
                link.rank, link.name = message["process"], message["name"]
                link.send(kind="beat")
            elif message["kind"] == "end":
                link.ended = True
            elif message["kind"] == "failed":
                self._stop(message["text"])

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        self.links.remove(link)

    def _lost(self, link: _Link, what: str) -> None:
        self._drop(link)
        if not link.ended and link.rank is not None:
            self._stop(f"{link.name} {what} at {time.strftime('%H:%M:%S')}")

    def _stop(self, text: str) -> None:
        """Tell the others, print, and end this process: its main thread may never return from a collective."""
        if self._failing:
            return
        for link in self.links:
            link.send(kind="failed", text=text)
        message = f"graphacc: process {self.rank} stops: {text}. Training cannot go on without it: start all processes again from the last checkpoint\n"
        os.write(2, message.encode())
        _exit(EXIT_STATUS)

    # ---- the end of this process

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # and not in a process that was forked
            for link in self.links:
                link.send(kind="end")

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback) -> None:
        """Python's hook for an exception that ends the process: print it as ever, and tell the others."""
        self._print_error(kind, error, traceback)
        if os.getpid() != self._pid:
            return
        time.sleep(_BLAME_SECONDS)
        self._failing = True
        text = f"process {self.rank} (pid {os.getpid()} on {socket.gethostname()}) failed with {type(error).__name__}: {str(error)[:1000]}"
        for link in self.links:
            link.send(kind="failed", text=text)
        logging.shutdown()
        _exit(1)


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
