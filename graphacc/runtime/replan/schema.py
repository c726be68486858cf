"""Message classes for XLA's protobufs, read out of the installed library itself.

The C++ protobuf runtime embeds every ``FileDescriptorProto`` in the binary. They are found by their first bytes (field 1,
the file's name), end where the fields stop making sense, and go into a private descriptor pool. So an executable is always
read with exactly the schema of the library that wrote it.
"""

import functools
import mmap
import os
import re

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, unknown_fields

from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.wire import read_varint

_FIRST_BYTES = re.compile(rb"\x0a([\x05-\x7f])((?:xla|tsl|stream_executor|google/protobuf)/[A-Za-z0-9_/\.]*\.proto)\x12")
_FILE_FIELDS = frozenset(descriptor_pb2.FileDescriptorProto.DESCRIPTOR.fields_by_number)
_NAME_FIELD = 1
_SYNTAX_FIELD = 12
_MAX_FIELD_BYTES = 1 << 20
_MAX_FILE_BYTES = 8 << 20


class Schema:
    """Message classes by their full name, such as ``xla.cpu.CompilationResultProto``."""

    def __init__(self, files: dict[str, descriptor_pb2.FileDescriptorProto]):
        self._files = files
        self._pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()
        self._classes: dict[str, type[message.Message]] = {}

    def message_class(self, full_name: str) -> type[message.Message]:
        """The class of a top-level message.

        Raises:
            NotUnderstood: the library has no such message, or a file that it needs is missing.
        """
        if full_name not in self._classes:
            self._add(self._file_of(full_name))
            self._classes[full_name] = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))
        return self._classes[full_name]

    def _file_of(self, full_name: str) -> str:
        package, _, name = full_name.rpartition(".")
        for file in self._files.values():
            if file.package == package and any(m.name == name for m in file.message_type):
                return file.name
        raise NotUnderstood(f"the installed XLA library has no protobuf message {full_name}")

    def _add(self, file_name: str) -> None:
        if file_name in self._added:
            return
        self._added.add(file_name)
        file = self._files.get(file_name) or _well_known(file_name)
        for dependency in file.dependency:
            self._add(dependency)
        self._pool.Add(file)


def _well_known(file_name: str) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    try:
        descriptor_pool.Default().FindFileByName(file_name).CopyToProto(file)
    except KeyError:
        raise NotUnderstood(f"the installed XLA library lacks the protobuf schema {file_name}") from None
    return file


@functools.cache
def read_schema(library: os.PathLike | str) -> Schema:
    """The schema inside a shared library; about half a second once per process."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = (_file_at(data, match.start()) for match in _FIRST_BYTES.finditer(data) if _length_fits(match))
        files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
        for descriptor in found:
            if descriptor is not None:
                files.setdefault(descriptor.name, descriptor)
    return Schema(files)


def _length_fits(match: re.Match) -> bool:
    return match.group(1)[0] == len(match.group(2))


def _file_at(data: mmap.mmap, start: int) -> descriptor_pb2.FileDescriptorProto | None:
    window = data[start : start + _MAX_FILE_BYTES]
    descriptor = descriptor_pb2.FileDescriptorProto()
    try:
        descriptor.ParseFromString(window[: _extent(window)])
    except message.DecodeError:
        return None
    return descriptor if descriptor.message_type or descriptor.enum_type else None


def _extent(data: bytes) -> int:
    """Where the FileDescriptorProto at the start of `data` ends: walk its fields until one cannot belong to it."""
    end = 0
    seen: set[int] = set()
    while True:
        try:
            number, following = _skip_field(data, end)
        except NotUnderstood:
            return end
        if number in seen and number in (_NAME_FIELD, _SYNTAX_FIELD):
            return end
        seen.add(number)
        end = following


def _skip_field(data: bytes, position: int) -> tuple[int, int]:
    key, position = read_varint(data, position)
    number, wire_type = key >> 3, key & 7
    if number not in _FILE_FIELDS or wire_type not in (0, 2):
        raise NotUnderstood("not a field of FileDescriptorProto")
    value, position = read_varint(data, position)
    if wire_type == 0:
        return number, position
    if value > _MAX_FIELD_BYTES or position + value > len(data):
        raise NotUnderstood("not a field of FileDescriptorProto")
    return number, position + value


def find_unknown_fields(root: message.Message) -> list[str]:
    """Paths of all fields below `root` that its schema does not know: what a newer XLA has added."""
    known = type(root)()
    known.CopyFrom(root)
    known.DiscardUnknownFields()
    if known.ByteSize() == root.ByteSize():
        return []  # the walk below takes a second for ten thousand thunks
    found: list[str] = []
    _collect_unknown(root, "", found)
    return found


def _collect_unknown(root: message.Message, path: str, found: list[str]) -> None:
    found += [f"{path}#{field.field_number}" for field in unknown_fields.UnknownFieldSet(root)]
    for field, content in root.ListFields():
        for child in child_messages(field, content):
            _collect_unknown(child, f"{path}.{field.name}", found)


def child_messages(field, content) -> list[message.Message]:
    """The messages directly inside one set field, repeated fields and map values included."""
    if field.type != field.TYPE_MESSAGE:
        return []
    if field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        return list(content.values()) if value.type == value.TYPE_MESSAGE else []
    return list(content) if field.is_repeated else [content]
