"""A folder of planned executables, by the digest of what they were planned from.

An entry begins with the SHA-256 of the rest, since a damaged executable would end the process when it is loaded. The rest is one
line of JSON (the figures), then the planned executable, or nothing where XLA's plan is as good.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile

from graphacc.runtime.replan.planner import PlannedBytes

FORMAT = "graphacc-replan-1"
_DIGEST_BYTES = hashlib.sha256().digest_size


class PlanCache:
    """Planned executables in a folder, which is made when it is first written to."""

    def __init__(self, folder: os.PathLike | str):
        self.folder = pathlib.Path(folder)

    def path(self, serialized: bytes, options: str) -> pathlib.Path:
        """The file for an original executable and the options that it is planned with."""
        digest = hashlib.sha256(f"{FORMAT} {options}\n".encode() + serialized).hexdigest()
        return self.folder / f"{digest}.plan"

    def load(self, serialized: bytes, options: str) -> PlannedBytes | None:
        """The entry; None where there is none, or a damaged one."""
        try:
            data = self.path(serialized, options).read_bytes()
        except OSError:
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        figures, _, planned = content.partition(b"\n")
        return PlannedBytes(serialized=planned or None, **json.loads(figures))

    def store(self, serialized: bytes, options: str, planned: PlannedBytes) -> None:
        """Write an entry in one step, so that a reader sees all of it or nothing."""
        figures = {f.name: getattr(planned, f.name) for f in dataclasses.fields(planned) if f.name != "serialized"}
        content = json.dumps(figures).encode() + b"\n" + (planned.serialized or b"")
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(file.name, self.path(serialized, options))
