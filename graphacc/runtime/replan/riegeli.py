"""Riegeli record files, in which XLA keeps the parts of a serialised CUDA executable.

Source: google/riegeli, `doc/riegeli_records_file_format.md`. A file is a row of chunks, interrupted every 64 KiB by a block header:

- block header, 24 bytes: hash of the rest, distance back to the beginning of the interrupted chunk, distance to its end;
- chunk: hash of the rest, size and hash of its data, type with number of records, size of the records; then the data.

Read are simple chunks, plain or Snappy; written is one plain chunk. Every hash is checked.
"""

import ctypes
import dataclasses
import struct
from collections.abc import Iterator, Sequence

from graphacc.kernels import library
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.wire import encode_varint, read_varint

BLOCK_BYTES = 1 << 16
BLOCK_HEADER = struct.Struct("<QQQ")  # hash, distance to the chunk's beginning, distance to its end
CHUNK_HEADER = struct.Struct("<QQQQQ")  # hash, bytes of data, their hash, type | records << 8, bytes of the records
_HASH_KEY = b"Riegeli/records\n" * 2

_SIGNATURE, _RECORDS, _PADDING, _METADATA = b"srpm"
_PLAIN, _SNAPPY = 0, ord("s")
_MAX_SNAPPY_RATIO = 32  # a copy of 3 bytes gives at most 64


def hash64(data: bytes, key: bytes = _HASH_KEY) -> int:
    """HighwayHash-64 of `data` under a key of 32 bytes."""
    result = ctypes.c_uint64()
    library.call("gacc_highway_hash64", key, data, ctypes.c_int64(len(data)), ctypes.byref(result))
    return result.value


def snappy_decompress(data: bytes) -> bytes:
    """A Snappy block: its length as a varint, then its elements.

    Raises:
        NotUnderstood: it is none.
    """
    size, start = read_varint(data)
    if size > _MAX_SNAPPY_RATIO * len(data):
        raise NotUnderstood(f"Snappy: {len(data)} bytes cannot hold {size}")
    out = ctypes.create_string_buffer(size)
    try:
        elements = data[start:]
        library.call("gacc_snappy_decompress", elements, ctypes.c_int64(len(elements)), out, ctypes.c_int64(size))
    except ValueError as error:
        raise NotUnderstood(f"Snappy: {error}") from None
    return out.raw


def is_record_file(data: bytes) -> bool:
    """Whether `data` starts as every Riegeli file does: with a block header and a chunk that is nothing but the signature."""
    return data[BLOCK_HEADER.size : BLOCK_HEADER.size + CHUNK_HEADER.size] == _Chunk(kind=_SIGNATURE).encode()


def read_records(data: bytes) -> list[bytes]:
    """All records of a file.

    Raises:
        NotUnderstood: it is no record file, it is damaged, or its chunks are of a kind that XLA does not write.
    """
    if not is_record_file(data):
        raise NotUnderstood("not a Riegeli record file")
    records: list[bytes] = []
    for chunk in _read_chunks(data):
        if chunk.kind == _RECORDS:
            records += _records_of(chunk)
        elif chunk.kind not in (_SIGNATURE, _PADDING, _METADATA):
            raise NotUnderstood(f"Riegeli: a chunk of type {chunk.kind} is not known here")
    return records


def write_records(records: Sequence[bytes]) -> bytes:
    """A file of these records in one plain chunk."""
    sizes = b"".join(encode_varint(len(record)) for record in records)
    content = b"".join(records)
    data = bytes([_PLAIN]) + encode_varint(len(sizes)) + sizes + content
    chunk = _Chunk(kind=_RECORDS, data=data, num_records=len(records), decoded_size=len(content))
    out = bytearray()
    for encoded in (_Chunk(kind=_SIGNATURE).encode(), chunk.encode()):
        _append_chunk(out, encoded)
    return bytes(out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
    kind: int
    data: bytes = b""
    num_records: int = 0
    decoded_size: int = 0

    def encode(self) -> bytes:
        size, digest = len(self.data), hash64(self.data)
        rest = CHUNK_HEADER.pack(0, size, digest, self.kind | self.num_records << 8, self.decoded_size)[8:]
        return struct.pack("<Q", hash64(rest)) + rest + self.data


def _append_chunk(out: bytearray, chunk: bytes) -> None:
    begin = len(out)
    end = _end_of_chunk(begin, len(chunk))
    position = 0
    while position < len(chunk):
        if len(out) % BLOCK_BYTES == 0:
            rest = struct.pack("<QQ", len(out) - begin, end - len(out))
            out += struct.pack("<Q", hash64(rest)) + rest
        taken = BLOCK_BYTES - len(out) % BLOCK_BYTES
        out += chunk[position : position + taken]
        position += taken


def _end_of_chunk(begin: int, size: int) -> int:
    """Where a chunk of `size` bytes ends that begins at `begin`, with the block headers in between."""
    position = begin
    while size:
        position += BLOCK_HEADER.size if position % BLOCK_BYTES == 0 else 0
        taken = min(size, BLOCK_BYTES - position % BLOCK_BYTES)
        position += taken
        size -= taken
    return position


def _read_chunks(data: bytes) -> Iterator[_Chunk]:
    position = 0
    while position < len(data):
        begin = position
        header, position = _take(data, position, CHUNK_HEADER.size)
        expected, size, digest, kind, decoded_size = CHUNK_HEADER.unpack(header)
        _check_hash("the header of the chunk", begin, header[8:], expected)
        content, position = _take(data, position, size)
        _check_hash("the chunk", begin, content, digest)
        _check_block_headers(data, begin, position)
        yield _Chunk(kind=kind & 0xFF, data=content, num_records=kind >> 8, decoded_size=decoded_size)


def _take(data: bytes, position: int, size: int) -> tuple[bytes, int]:
    """`size` bytes from `position` without the block headers among them, and where they end."""
    end = _end_of_chunk(position, size)
    if end > len(data):
        raise NotUnderstood(f"Riegeli: the file of {len(data)} bytes is truncated: {size} bytes are to follow byte {position}")
    parts = []
    while position < end:
        position += BLOCK_HEADER.size if position % BLOCK_BYTES == 0 else 0
        block_end = min(end, position // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES)
        parts.append(data[position:block_end])
        position = block_end
    return b"".join(parts), end


def _check_block_headers(data: bytes, begin: int, end: int) -> None:
    """Every block header inside the chunk of bytes [begin, end) says where it begins and ends."""
    for block in range(-(-begin // BLOCK_BYTES) * BLOCK_BYTES, end, BLOCK_BYTES):
        expected, back, forward = BLOCK_HEADER.unpack_from(data, block)
        _check_hash("the block header", block, data[block + 8 : block + BLOCK_HEADER.size], expected)
        if (back, forward) != (block - begin, end - block):
            raise NotUnderstood(f"Riegeli: the block header at byte {block} names another chunk than [{begin}, {end})")


def _check_hash(what: str, position: int, data: bytes, expected: int) -> None:
    if hash64(data) != expected:
        raise NotUnderstood(f"Riegeli: {what} at byte {position} is damaged: its hash differs")


def _records_of(chunk: _Chunk) -> list[bytes]:
    compression = chunk.data[0] if chunk.data else _PLAIN
    size, start = read_varint(chunk.data, 1)
    sizes = _decompress(compression, chunk.data[start : start + size])
    content = _decompress(compression, chunk.data[start + size :])
    records, position, place = [], 0, 0
    for _ in range(chunk.num_records):
        length, place = read_varint(sizes, place)
        records.append(content[position : position + length])
        position += length
    if position != len(content) or position != chunk.decoded_size or place != len(sizes):
        raise NotUnderstood(f"Riegeli: {chunk.num_records} records of {position} bytes in a chunk of {len(content)}")
    return records


def _decompress(compression: int, data: bytes) -> bytes:
    if compression == _PLAIN:
        return data
    if compression != _SNAPPY:
        raise NotUnderstood(f"Riegeli: compression {chr(compression)!r} is not known here, only Snappy is")
    size, start = read_varint(data)
    content = snappy_decompress(data[start:])
    if len(content) != size:
        raise NotUnderstood(f"Riegeli: {len(content)} bytes come out of a part of {size}")
    return content
