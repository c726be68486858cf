"""The protobuf wire format, as far as envelopes need it: varints and length-delimited fields."""

from collections.abc import Iterable

from graphacc.runtime.replan.errors import NotUnderstood

LENGTH_DELIMITED = 2
MAX_VARINT_BYTES = 10


def read_varint(data: bytes, position: int = 0) -> tuple[int, int]:
    """The varint at `position`, and the position behind it.

    Raises:
        NotUnderstood: the data ends inside it, or it is longer than 64 bits.
    """
    value = 0
    for i in range(MAX_VARINT_BYTES):
        if position >= len(data):
            raise NotUnderstood(f"the executable ends inside a length field (at byte {position} of {len(data)})")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * i)
        if not byte & 0x80:
            return value, position
    raise NotUnderstood(f"a length field at byte {position - MAX_VARINT_BYTES} has more than {MAX_VARINT_BYTES} bytes")


def encode_varint(value: int) -> bytes:
    """`value` >= 0 as a varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_fields(data: bytes) -> list[tuple[int, bytes]]:
    """(number, content) of every field of a message that has length-delimited fields only.

    Raises:
        NotUnderstood: a field of another wire type, or truncated data.
    """
    position = 0
    fields = []
    while position < len(data):
        key, position = read_varint(data, position)
        if key & 7 != LENGTH_DELIMITED:
            raise NotUnderstood(f"field {key >> 3} of the executable's envelope has wire type {key & 7}, expected 2")
        size, position = read_varint(data, position)
        if position + size > len(data):
            left = len(data) - position
            raise NotUnderstood(f"the executable is truncated: field {key >> 3} wants {size} bytes, {left} are left")
        fields.append((key >> 3, data[position : position + size]))
        position += size
    return fields


def encode_fields(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """The inverse of `read_fields`."""
    encoded = bytearray()
    for number, content in fields:
        encoded += encode_varint(number << 3 | LENGTH_DELIMITED) + encode_varint(len(content)) + content
    return bytes(encoded)
