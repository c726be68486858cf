"""The outer bytes of ``LoadedExecutable.serialize()``: IFRT metadata, then the executable and its compile options.

Layout (jaxlib 0.10.2): varint(n), n bytes of ``ifrt.SerializedXlaExecutableMetadata``, then an
``xla.ExecutableAndOptionsProto`` {1: serialized_executable, 2: compile_options}. On CPU the first is an
``xla.cpu.CompilationResultProto``, on CUDA a record file (see `gpu`).
"""

import dataclasses

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.wire import encode_fields, read_fields, read_varint

EXECUTABLE_FIELD = 1
OPTIONS_FIELD = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Envelope:
    """A serialised executable, taken apart."""

    metadata: bytes  # with its length in front
    executable: bytes  # the backend's own message
    others: tuple[tuple[int, bytes], ...]  # the fields behind it: compile options

    def with_executable(self, executable: bytes) -> bytes:
        """The serialised executable with another backend message in it."""
        return self.metadata + encode_fields([(EXECUTABLE_FIELD, executable), *self.others])


def open_envelope(data: bytes) -> Envelope:
    """Take a serialised executable apart.

    Raises:
        NotUnderstood: truncated data, or other fields than those of jaxlib 0.10.
    """
    size, position = read_varint(data)
    end = position + size
    if end > len(data):
        raise NotUnderstood(f"the executable is truncated: {size} bytes of metadata announced, {len(data) - position} are left")
    fields = read_fields(data[end:])
    numbers = [number for number, _ in fields]
    if numbers[:2] != [EXECUTABLE_FIELD, OPTIONS_FIELD] or len(set(numbers)) != len(numbers):
        raise NotUnderstood(f"the executable's envelope has the fields {numbers[:8]}, expected [1, 2, ...] without repetition")
    return Envelope(metadata=data[:end], executable=fields[0][1], others=tuple(fields[1:]))
