"""The files of a checkpoint: pieces of tensors in safetensors files, and the manifest that says where each piece is.

A checkpoint directory holds ``manifest.json`` and the data files that it names. The manifest gives, per tensor, the global shape
without padding, the dtype and its pieces (which block of the tensor, in which file, at which byte, with which CRC-32), and
a SHA-256 of itself. The data files are ordinary safetensors files, written piece by piece, and read by slices of a memory map.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

from graphacc.errors import CheckpointError
from graphacc.runtime.layout import Index, extent

MANIFEST = "manifest.json"
FORMAT = "graphacc-checkpoint-1"

DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
"""Safetensors' dtype names."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a tensor in a data file."""

    start: tuple[int, ...]  # of the block in the tensor
    shape: tuple[int, ...]
    file: str
    offset: int  # of its first byte in the file
    crc32: int

    @property
    def index(self) -> Index:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    tensors: dict[str, Entry]
    aliases: dict[str, str]  # other name -> name in `tensors`
    files: dict[str, int]  # data file -> bytes
    metadata: dict

    def to_json(self) -> str:
        content = json.dumps(dataclasses.asdict(self), sort_keys=True, allow_nan=False)
        return json.dumps(
            {"format": FORMAT, "sha256": hashlib.sha256(content.encode()).hexdigest(), "content": content}, indent=1
        )


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a tensor that is to be written."""

    name: str  # of the tensor
    dtype: np.dtype
    index: Index
    whole: bool  # it is all of the tensor
    fetch: Callable[[], np.ndarray]  # brings its values to the host

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        return self.name if self.whole else f"{self.name}[{','.join(f'{part.start}:{part.stop}' for part in self.index)}]"

    @property
    def size_bytes(self) -> int:
        return math.prod(extent(self.index)) * self.dtype.itemsize


def write_blocks(path: pathlib.Path, blocks: Sequence[Block]) -> Iterator[tuple[str, Piece]]:
    """Write a safetensors file, one block at a time, and give each block's tensor name and piece; flushed to disk at the end.

    Args:
        blocks: `in_order`; one that has not been written yet may be exchanged for one with the same values meanwhile.
    """
    header = _header(blocks)
    with open(path, "xb") as file:
        file.write(header)
        for block in blocks:
            data = np.ascontiguousarray(block.fetch())
            raw = memoryview(data.reshape(-1).view(np.uint8))
            assert raw.nbytes == block.size_bytes, f"{block.key}: {raw.nbytes} bytes, expected {block.size_bytes}"
            piece = Piece(
                start=tuple(part.start for part in block.index),
                shape=extent(block.index),
                file=path.name,
                offset=file.tell(),
                crc32=zlib.crc32(raw),
            )
            file.write(raw)
            yield block.name, piece
        flush(file)


def in_order(blocks: Iterable[Block]) -> list[Block]:
    """The order of blocks in a file, which keeps every one aligned to its items."""
    return sorted(blocks, key=lambda block: -block.dtype.itemsize)


def _header(blocks: Sequence[Block]) -> bytes:
    entries, offset = {}, 0
    for block in blocks:
        end = offset + block.size_bytes
        entries[block.key] = {"dtype": NAMES[block.dtype], "shape": extent(block.index), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def commit(directory: pathlib.Path, manifest: Manifest) -> None:
    """Make `manifest` the directory's checkpoint, in one step: before it the old one is whole, after it the new one."""
    temporary = directory / f"{MANIFEST}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        flush(file)
    sync_directory(directory)
    os.replace(temporary, directory / MANIFEST)
    sync_directory(directory)


def flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Read and check a manifest and the sizes of its data files.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_absent(directory)) from None
    except UnicodeDecodeError:
        raise CheckpointError(_damaged(path, "is no text")) from None
    manifest = _parse(path, text)
    for name, size in manifest.files.items():
        _check_file(directory / name, size)
    return manifest


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Whether a directory holds a checkpoint of ours, damaged ones included."""
    try:
        with open(directory / MANIFEST, "rb") as file:
            return b"graphacc-checkpoint" in file.read(100)
    except FileNotFoundError:
        return False


def _absent(directory: pathlib.Path) -> str:
    if not directory.is_dir():
        return f"there is no checkpoint at {directory}: no such directory"
    if any(directory.glob("data-*.safetensors")):
        return (
            f"the checkpoint at {directory} is incomplete: it has data but no {MANIFEST}; its first save was interrupted, "
            "use another checkpoint"
        )
    return f"there is no checkpoint at {directory}: the directory has no {MANIFEST}"


def _parse(path: pathlib.Path, text: str) -> Manifest:
    try:
        outer = json.loads(text)
        found, digest, content = outer["format"], outer["sha256"], outer["content"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(_damaged(path, f"cannot be parsed ({error!r})")) from None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}, this version reads {FORMAT!r}: load it with the version of graphacc that wrote it"
        )
    if hashlib.sha256(content.encode()).hexdigest() != digest:
        raise CheckpointError(_damaged(path, "does not have the SHA-256 that it states"))
    fields = json.loads(content)
    tensors = {
        name: Entry(
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            pieces=tuple(
                Piece(**piece | {"start": tuple(piece["start"]), "shape": tuple(piece["shape"])}) for piece in entry["pieces"]
            ),
        )
        for name, entry in fields["tensors"].items()
    }
    return Manifest(tensors=tensors, aliases=fields["aliases"], files=fields["files"], metadata=fields["metadata"])


def _check_file(path: pathlib.Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint file {path} is missing: restore it, or use another checkpoint") from None
    if found != size:
        raise CheckpointError(_damaged(path, f"has {found} bytes, {size} were written"))


def _damaged(path: pathlib.Path, how: str) -> str:
    return f"the checkpoint file {path} is damaged: it {how}; use another checkpoint"


class Reader:
    """Reads blocks of the tensors of one checkpoint; every piece that is read is checked once, whole."""

    def __init__(self, directory: pathlib.Path, manifest: Manifest):
        self.directory = directory
        self.manifest = manifest
        self._checked: set[Piece] = set()

    def entry(self, name: str) -> Entry:
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def read(self, name: str, index: Index) -> np.ndarray:
        """A block of a tensor, in memory of its own.

        Raises:
            CheckpointError: a piece does not have its checksum, or the pieces do not cover the block.
        """
        entry = self.entry(name)
        result = np.zeros(extent(index), DTYPES[entry.dtype])
        covered = 0
        for piece in entry.pieces:
            common = _intersect(piece.index, index)
            if common is None:
                continue
            result[_relative(common, index)] = self._values(name, entry, piece)[_relative(common, piece.index)]
            covered += math.prod(extent(common))
        if covered != result.size:
            raise CheckpointError(
                f"the checkpoint {self.directory} holds {covered} of the {result.size} values wanted of {name!r}: "
                "use another checkpoint"
            )
        return result

    def check(self, name: str, index: Index) -> None:
        """Find damage in the pieces from which a block is read, before anything is changed; raises as `read`."""
        entry = self.entry(name)
        for piece in entry.pieces:
            if _intersect(piece.index, index) is not None:
                self._values(name, entry, piece)

    def _values(self, name: str, entry: Entry, piece: Piece) -> np.ndarray:
        path, dtype = self.directory / piece.file, DTYPES[entry.dtype]
        count = math.prod(piece.shape) * dtype.itemsize
        raw = np.memmap(path, dtype=np.uint8, mode="r", offset=piece.offset, shape=(count,))
        if piece not in self._checked:
            if zlib.crc32(raw) != piece.crc32:
                raise CheckpointError(_damaged(path, f"does not have the checksum of {name!r} that the manifest states"))
            self._checked.add(piece)
        return raw.view(dtype).reshape(piece.shape)


def _intersect(a: Index, b: Index) -> Index | None:
    """The common part of two blocks; None if it is empty."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return None if any(part.start >= part.stop for part in common) else common


def _relative(part: Index, whole: Index) -> Index:
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(part, whole))


def remove_files(paths: Iterable[pathlib.Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
