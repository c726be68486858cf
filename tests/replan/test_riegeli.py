import random
import struct

import pytest

from graphacc.runtime.replan import riegeli
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.wire import encode_varint

KEY = bytes(range(32))
HASHES = (0x907A56DE22C26E53, 0x7EAB43AAC7CDDD78, 0xB8D0569AB0B53D62, 0x5C6BEFAB8A463D80, 0xF205A46893007EDA, 0x2B8A1668E4A94541)
"""HighwayHash's own test vectors: of the bytes 0, 1, ... n - 1 under KEY, for n = 0, 1, ..."""
SIGNATURE = bytes.fromhex("91bac23c9287e1a90000000000000000e19f13c0e9b1c37273000000000000000000000000000000")
"""The first chunk of every file, as the format's description gives it."""


@pytest.mark.parametrize("size", range(len(HASHES)))
def test_hashes_are_those_of_the_reference(size):
    assert riegeli.hash64(bytes(range(size)), KEY) == HASHES[size]


def test_hashes_depend_on_every_byte():
    for size in (1, 31, 32, 33, 100):
        data = bytes(range(size))
        changed = {riegeli.hash64(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]) for i in range(size)}
        assert len(changed | {riegeli.hash64(data), riegeli.hash64(data + b"\0")}) == size + 2


def test_files_start_with_the_signature():
    data = riegeli.write_records([])
    assert data[riegeli.BLOCK_HEADER.size :].startswith(SIGNATURE)
    assert riegeli.is_record_file(data) and not riegeli.is_record_file(data[1:])


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 300], [65_000, 1_000], [400_000], [65_536 - 24 - 40 - 40 - 5 - 24], [1] * 500])
def test_records_come_back(sizes):
    """Also where a chunk crosses blocks of 64 KiB, or ends close to one."""
    records = [random.Random(size).randbytes(size) for size in sizes]
    assert riegeli.read_records(riegeli.write_records(records)) == records


def test_every_end_around_a_block_comes_back():
    for size in range(riegeli.BLOCK_BYTES - 150, riegeli.BLOCK_BYTES - 60):
        assert riegeli.read_records(riegeli.write_records([b"x" * size])) == [b"x" * size]


def test_flipped_bits_are_refused():
    data = riegeli.write_records([random.Random(0).randbytes(70_000), b"tail"])
    rng = random.Random(1)
    headers = [*range(0, 110), *range(65_536, 65_560)]
    for position in [*headers, *rng.sample(range(len(data)), 100)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        with pytest.raises(NotUnderstood):
            riegeli.read_records(bytes(damaged))


def test_truncated_files_are_refused():
    data = riegeli.write_records([random.Random(0).randbytes(70_000)])
    for length in [*range(0, 110, 7), *random.Random(1).sample(range(110, len(data)), 50)]:
        if length != riegeli.BLOCK_HEADER.size + riegeli.CHUNK_HEADER.size:  # a file without records ends here
            with pytest.raises(NotUnderstood):
                riegeli.read_records(data[:length])


# --- Snappy ---


def block(size: int, *elements: bytes) -> bytes:
    return encode_varint(size) + b"".join(elements)


def literal(data: bytes) -> bytes:
    return bytes([(len(data) - 1) << 2]) + data


@pytest.mark.parametrize(
    "data, result",
    [
        (block(0), b""),
        (block(3, literal(b"abc")), b"abc"),
        (block(7, literal(b"abc"), b"\x01\x03"), b"abcabca"),  # four bytes from three back: the copy overlaps itself
        (block(9, literal(b"ab"), struct.pack("<BH", 6 << 2 | 2, 2)), b"ababababa"),
        (block(8, literal(b"abcd"), struct.pack("<BI", 3 << 2 | 3, 4)), b"abcdabcd"),
        (block(70, b"\xf0\x45" + b"x" * 70), b"x" * 70),  # a length in a byte of its own
    ],
)
def test_snappy_blocks_are_read(data, result):
    assert riegeli.snappy_decompress(data) == result


@pytest.mark.parametrize(
    "data, says",
    [
        (block(4, literal(b"abc")), "3 bytes come out, not 4"),
        (block(2, literal(b"abc")), "more than 2 bytes"),
        (block(7, literal(b"abc"), b"\x01\x04"), "reaches 4 bytes back"),
        (block(7, literal(b"abc"), b"\x01\x00"), "reaches 0 bytes back"),
        (block(3, literal(b"abc")[:-1]), "inside a literal"),
        (block(7, literal(b"abc"), b"\x01"), "inside an element"),
        (block(1 << 40, literal(b"abc")), "cannot hold"),
    ],
)
def test_damaged_snappy_blocks_are_refused(data, says):
    with pytest.raises(NotUnderstood, match=says):
        riegeli.snappy_decompress(data)


def file_of(content: bytes, kind: str = "r", num_records: int = 1, decoded_size: int = 3) -> bytes:
    """A file with one chunk of our own making."""
    out = bytearray()
    chunk = riegeli._Chunk(kind=ord(kind), data=content, num_records=num_records, decoded_size=decoded_size)
    for encoded in (riegeli._Chunk(kind=ord("s")).encode(), chunk.encode()):
        riegeli._append_chunk(out, encoded)
    return bytes(out)


def compressed(data: bytes) -> bytes:
    return encode_varint(len(data)) + block(len(data), literal(data))


def test_compressed_chunks_are_read():
    sizes = compressed(encode_varint(3))
    data = b"s" + encode_varint(len(sizes)) + sizes + compressed(b"abc")
    assert riegeli.read_records(file_of(data)) == [b"abc"]


@pytest.mark.parametrize(
    "data, says",
    [
        (file_of(b"\0\x01\x03abc", kind="t"), "chunk of type 116"),
        (file_of(b"b\x01\x03abc"), "compression 'b'"),
        (file_of(b"\0\x01\x03abcd"), "records"),
        (file_of(b"\0\x01\x03abc", num_records=2), "length field|records"),
        (file_of(b"\0\x01\x03abc", decoded_size=4), "records"),
    ],
)
def test_other_chunks_are_refused(data, says):
    with pytest.raises(NotUnderstood, match=says):
        riegeli.read_records(data)
