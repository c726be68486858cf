"""The outer bytes of ``LoadedExecutable.serialize()``: IFRT metadata, then the executable and its compile options.

Layout (jaxlib 0.10.2): varint(n), n bytes of ``ifrt.SerializedXlaExecutableMetadata``, then an
``xla.ExecutableAndOptionsProto`` {1: serialized_executable, 2: compile_options}. On CPU the first is an
``xla.cpu.CompilationResultProto``, on CUDA a record file (see `gpu`). Of XLA:CUDA in jaxlib 0.11 the message is itself split over a
record file (openxla/xla `xla/util/split_proto`): a manifest, field 1, and the other fields.
"""

import dataclasses

from graphacc.runtime.replan import riegeli
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.wire import encode_fields, read_fields, read_varint

EXECUTABLE_FIELD = 1
OPTIONS_FIELD = 2

_SPLIT = [(1, b"xla.ExecutableAndOptionsProto"), (2, b"\x1a\x06\n\x02\x08\x01\x10\x01"), (2, b"\x12\x00")]
"""Fields of ``xla.SplitProtoManifest``: the message; a field_override_record of the path [1], a string; a proto_merge_record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Envelope:
    """A serialised executable, taken apart."""

    metadata: bytes  # with its length in front
    executable: bytes  # the backend's own message
    others: tuple[tuple[int, bytes], ...]  # the fields behind it: compile options
    split: bool = False  # over the records of a file

    def with_executable(self, executable: bytes) -> bytes:
        """The serialised executable with another backend message in it."""
        if self.split:
            return self.metadata + riegeli.write_records([encode_fields(_SPLIT), executable, encode_fields(self.others)])
        return self.metadata + encode_fields([(EXECUTABLE_FIELD, executable), *self.others])


def open_envelope(data: bytes) -> Envelope:
    """Take a serialised executable apart.

    Raises:
        NotUnderstood: truncated data, or other fields than those of jaxlib 0.10 and 0.11.
    """
    size, position = read_varint(data)
    end = position + size
    if end > len(data):
        raise NotUnderstood(f"the executable is truncated: {size} bytes of metadata announced, {len(data) - position} are left")
    content = data[end:]
    split = riegeli.is_record_file(content)
    fields = _merged(riegeli.read_records(content)) if split else read_fields(content)
    numbers = [number for number, _ in fields]
    if numbers[:2] != [EXECUTABLE_FIELD, OPTIONS_FIELD] or len(set(numbers)) != len(numbers):
        raise NotUnderstood(f"the executable's envelope has the fields {numbers[:8]}, expected [1, 2, ...] without repetition")
    return Envelope(metadata=data[:end], executable=fields[0][1], others=tuple(fields[1:]), split=split)


def _merged(records: list[bytes]) -> list[tuple[int, bytes]]:
    """The fields of the message that the records hold."""
    if len(records) != len(_SPLIT) or read_fields(records[0]) != _SPLIT:
        raise NotUnderstood(f"the executable's envelope is split into {len(records)} records, expected a manifest, the executable, and what is beside it")
    _, executable, others = records
    return [(EXECUTABLE_FIELD, executable), *read_fields(others)]
