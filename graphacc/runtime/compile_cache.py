"""A directory of compiled programs that later processes load instead of compiling again.

A program whose memory is planned after it was compiled is kept with its plan (`PlannedStore`), so that it is neither compiled
nor planned again.

JAX makes the keys (program, options, versions, devices) and loads the executables; this module stores the bytes.
JAX's own store writes files in place and never replaces one, so that an interrupted write would stay behind as a broken
entry. Here an entry appears by a rename, carries a checksum, and a damaged one is dropped and compiled again. Nothing that goes
wrong with a cache stops a run. The oldest entries go when the directory grows over its limit; as a look at all of them takes longer than to
write one, a process looks again when it has written a part of what was free.

Loading an entry runs machine code from it: keep the directory as private as your programs.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform

from graphacc.cache import cache_root, replace_file

log = logging.getLogger("graphacc")

_MAGIC = b"graphacc-xla-1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
DEFAULT_LIMIT_BYTES = 4 * 2**30

_room: dict[tuple[pathlib.Path, int], int] = {}
"""Directory and limit -> bytes that this process may write before it looks at the directory again."""


def default_directory() -> pathlib.Path:
    """``~/.cache/graphacc/xla``, or below XDG_CACHE_HOME."""
    return cache_root() / "xla"


class CompileCache:
    """A directory of entries, by key."""

    def __init__(self, directory: str | os.PathLike, *, limit_bytes: int = DEFAULT_LIMIT_BYTES):
        self._path = pathlib.Path(directory)
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        entry = self._entry(key)
        try:
            content = entry.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("graphacc: compile cache entry %s cannot be read (%s); compiling", entry, error)
            return None
        value = _unpack(content)
        if value is None:
            log.warning("graphacc: compile cache entry %s is damaged; compiling again", entry)
            return None
        _touch(entry)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry; where it cannot be written, a warning says so."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            content = _pack(value)
            replace_file(self._entry(key), content)
            where = self._path, self.limit_bytes
            room = _room.get(where, 0) - len(content)
            if room < 0:
                free = _evict(*where)
                room = max(free // 4, self.limit_bytes // 64)  # other processes write, too
            _room[where] = room
        except OSError as error:
            log.warning("graphacc: compile cache %s cannot be written (%s)", self._path, error)

    def _entry(self, key: str) -> pathlib.Path:
        return self._path / f"{hashlib.sha256(f'{key} {_host()}'.encode()).hexdigest()}.xla"


class PlannedStore:
    """The store of one compilation whose result is looked at, and mostly planned, before it is kept.

    JAX reads programs from it; `keep` writes what is to be loaded next time. It does so in every process of a run, whose
    directories may be their own: JAX itself would write in process 0 alone.
    """

    def __init__(self, cache: CompileCache | None, variant: str):
        """
        Args:
            cache: where programs are kept; None keeps none.
            variant: everything that the entry depends on besides the program and XLA's options, on one line.
        """
        self._cache = cache
        self._variant = variant
        self._path = "memory" if cache is None else cache._path  # JAX's log messages read this name
        self._key: str | None = None  # JAX's
        self.note: str | None = None  # one line, kept with the program that was found; None: it was compiled
        self.entry: bytes | None = None  # of the program that was found, in JAX's format

    def get(self, key: str) -> bytes | None:
        self._key = key
        content = None if self._cache is None or self.key is None else self._cache.get(self.key)
        if content is None:
            return None
        note, _, self.entry = content.partition(b"\n")
        self.note = note.decode()
        return self.entry

    def missed(self) -> None:
        """The program had to be compiled, also where an entry was found but could not be loaded."""
        self.note = self.entry = None

    def keep(self, entry: bytes, note: str) -> None:
        """Keep a program, in JAX's format, for the next compilation."""
        if self._cache is not None and self.key is not None:
            self._cache.put(self.key, note.encode() + b"\n" + entry)

    @property
    def key(self) -> str | None:
        """Of the program's entry in the cache; None: JAX has not asked for one."""
        return None if self._key is None else f"{self._key} {self._variant}"


def _pack(value: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(value).digest() + value


def _unpack(content: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    value = content[start:]
    return value if content[:start] == _MAGIC + hashlib.sha256(value).digest() else None


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # a read-only directory: its entries keep their age
        os.utime(path)


def _evict(directory: pathlib.Path, limit_bytes: int) -> int:
    """Remove the entries unused for longest where all take more than the limit, until a tenth of it is free; returns the free bytes."""
    entries = []
    with os.scandir(directory) as files:
        for file in files:
            if file.name.endswith(".xla"):
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    found = file.stat()
                    entries.append((found.st_mtime_ns, found.st_size, file.path))
    total = sum(size for _, size, _ in entries)
    if total > limit_bytes:
        for _, size, path in sorted(entries):
            if total <= limit_bytes - limit_bytes // 10:
                break
            pathlib.Path(path).unlink(missing_ok=True)
            total -= size
    return limit_bytes - total


def _host() -> str:
    """What code for this machine's CPU may use: a home directory can be shared by unequal machines."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.system()} {platform.machine()} {' '.join(sorted(flags.split()))}"
