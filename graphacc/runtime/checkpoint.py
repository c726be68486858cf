"""Checkpoints: sharded, atomic, and loadable into any other mesh and layout.

Why safetensors and not orbax: a checkpoint is a few plain files that other tools can open, there is no pickle and no
further dependency, and the code that has to be right when a machine dies is short enough to read. Every process
writes the shards that lie on its own devices (one replica of each), block by block, and nothing is gathered; loading
reads for each device the slices that it needs. Shapes are the model's own, without padding.

Saving is atomic: new data files get fresh names beside the old ones and are flushed to disk; then the manifest is
replaced by a rename, which is the moment when the new checkpoint exists; then the old data files are removed. An error or
a crash at any moment leaves the old checkpoint or the new one, and what it leaves over is removed by the next save. In a
run of several processes the directory must be on a file system that they share.
"""

import collections
import dataclasses
import functools
import itertools
import json
import logging
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from graphacc.errors import CheckpointError
from graphacc.lowering.dtypes import to_jax, to_torch
from graphacc.runtime import checkpoint_files as files
from graphacc.runtime.checkpoint_files import Block, Entry, Manifest, Piece, Reader, read_manifest
from graphacc.runtime.distributed import note, tell_all
from graphacc.runtime.exchange import from_blocks, numpy_view
from graphacc.runtime.layout import Index, Item, bounds, extent, pieces, whole

T = TypeVar("T")

log = logging.getLogger("graphacc")

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""

Saved = torch.Tensor | tuple[jax.Array, Item]
"""A tensor on the host (the same in every process), or an array on the devices with its layout."""


class Saving:
    """A checkpoint that is being written, or has been."""

    def __init__(self, directory: pathlib.Path, finish: Callable[[], None]):
        self.directory = directory
        self._finish = finish
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there; an error of the saving is raised once, here or by the next save or load."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="graphacc-checkpoint", daemon=False)  # Python waits for it at its end
        self._thread.start()

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:
            log.error("graphacc: the checkpoint %s was not saved, what was there before is: %s: %s", self.directory, type(error).__name__, error)
            self._error = error


_last: Saving | None = None
"""The last save of this process that may still go on: one at a time."""


def finish_saving() -> None:
    """Wait for the save that goes on; raises its error, if nobody has seen it."""
    global _last
    saving, _last = _last, None
    if saving is not None:
        saving.wait()


def save(
    directory: str | os.PathLike,
    tensors: Mapping[str, Saved],
    metadata: Mapping,
    *,
    aliases: Mapping[str, str] | None = None,
    asynchronous: bool = False,
    staging_bytes: int | None = None,
) -> Saving:
    """Write a checkpoint, at once or not at all; every process of the run calls this.

    Args:
        directory: made if it does not exist; a checkpoint in it is replaced.
        tensors: by name; a tied tensor once.
        metadata: anything that JSON can hold.
        aliases: the other names of tied tensors -> the name in `tensors`; loading knows both.
        asynchronous: returns when this process's blocks are copied to the host; a thread writes them, and makes the checkpoint when all processes have.
        staging_bytes: of those copies at most; what is more is written before this returns, if not yet on disk for certain. None: no bound.

    Raises:
        CheckpointError: the directory holds something else, or the metadata is no JSON: nothing is written then. Or another process
            failed; the message is its error.
        OSError: the disk is full or gone; the checkpoint that was there before is untouched.
    """
    global _last
    finish_saving()
    directory = pathlib.Path(directory)
    metadata, blocks = _together(lambda: _checked(directory, tensors, metadata))
    token = _shared_token()
    path = directory / f"data-{token}-{jax.process_index():05d}.safetensors"
    forms = {name: (tuple(like.shape), like.dtype) for name, value in tensors.items() for like in [value if isinstance(value, torch.Tensor) else value[1]]}
    pieces: list[tuple[str, Piece]] = []
    writing = files.write_blocks(path, blocks)
    try:
        if asynchronous:
            _together(lambda: _stage(blocks, writing, pieces, sum(block.size_bytes for block in blocks) if staging_bytes is None else staging_bytes))
    except BaseException:
        _discard(directory, path)
        raise

    def finish() -> None:
        try:
            _together(lambda: _write(directory, token, writing, pieces), f"{token}/data")
            _together(lambda: _commit(directory, token, forms, pieces, metadata, dict(aliases or {})), f"{token}/manifest")
        except BaseException:
            _discard(directory, path)
            raise

    saving = Saving(directory, finish)
    if asynchronous:
        _last = saving
        saving._start()
    else:
        finish()
    return saving


def load(
    directory: str | os.PathLike, wanted: Mapping[str, Item], mesh: Mesh, *, ignore_extra: Sequence[str] = ()
) -> dict[str, jax.Array]:
    """Read tensors into the layout that each item describes; every device's host reads only what the device needs.

    Args:
        wanted: name -> shape, dtype and layout.
        ignore_extra: prefixes of names that the checkpoint may hold without their being wanted.

    Raises:
        CheckpointError: there is no checkpoint, it is truncated or damaged, or it is of another model: then all missing and
            unexpected names and all unequal shapes and dtypes are listed.
    """
    reader = _open(directory, {name: (item.shape, item.dtype) for name, item in wanted.items()}, ignore_extra)
    return {name: from_blocks(functools.partial(reader.read, name), item, mesh) for name, item in wanted.items()}


def open_checked(
    directory: str | os.PathLike, wanted: Mapping[str, tuple[Form, Iterable[Index]]], *, ignore_extra: Sequence[str] = (), differences: Sequence[str] = ()
) -> Reader:
    """A reader of a checkpoint of which everything that this process is about to read has been found to be whole; every process of the run calls this.

    Args:
        wanted: name -> shape and dtype, and the blocks that are going to be read; otherwise as `load`.
        differences: those that the caller has found besides; with any the checkpoint is of another model.

    Raises:
        CheckpointError: as `load`, also where it is another process that has found damage.
    """

    def check() -> Reader:
        reader = _open(directory, {name: form for name, (form, _) in wanted.items()}, ignore_extra, differences)
        for name, (_, blocks) in wanted.items():
            for block in blocks:
                reader.check(name, block)
        return reader

    finish_saving()
    return _together(check, verb="load")


def read_metadata(directory: str | os.PathLike) -> dict:
    """The metadata of a checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is truncated or damaged.
    """
    return read_manifest(pathlib.Path(directory)).metadata


def read_index(directory: str | os.PathLike) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> global shape and dtype of every tensor in a checkpoint, without aliases; raises as `read_metadata`."""
    entries = read_manifest(pathlib.Path(directory)).tensors
    return {name: (entry.shape, to_torch(files.DTYPES[entry.dtype])) for name, entry in entries.items()}


# ---- saving

_meetings = itertools.count()


def _together(action: Callable[[], T], meeting: str = "", verb: str = "save") -> T:
    """Do a part of the work; where it fails in one process, it raises in all, so that none waits for one that will not come.

    Processes leave this function only when all have done their part.

    Args:
        meeting: a name of its own, where another thread than the loop's calls this.
    """
    if jax.process_count() == 1:
        return action()
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    if not meeting:
        note("ends a part of saving a checkpoint" if verb == "save" else "ends the check of a checkpoint")
    messages = tell_all(f"checkpoint/{meeting or next(_meetings)}", text)
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message:
            raise CheckpointError(f"process {rank} could not {verb} its part: {message}")
    return result


def _checked(directory: pathlib.Path, tensors: Mapping[str, Saved], metadata: Mapping) -> tuple[dict, list[Block]]:
    """What this process writes, and the metadata; the directory is there."""
    plain = _plain(metadata)
    blocks = [block for name, value in tensors.items() for block in _blocks(name, value)]
    _prepare(directory)
    return plain, files.in_order(blocks)


def _stage(blocks: list[Block], writing: Iterator[tuple[str, Piece]], pieces: list[tuple[str, Piece]], size_bytes: int) -> None:
    """Write the first blocks, and copy the others, of at most `size_bytes`, so that the arrays may change."""
    left = sum(block.size_bytes for block in blocks)
    while left > size_bytes:
        left -= blocks[len(pieces)].size_bytes
        pieces.append(next(writing))
    for i in range(len(pieces), len(blocks)):
        copied = np.array(blocks[i].fetch(), order="C")
        blocks[i] = dataclasses.replace(blocks[i], fetch=lambda copied=copied: copied)


def _write(directory: pathlib.Path, token: str, writing: Iterator[tuple[str, Piece]], pieces: list[tuple[str, Piece]]) -> None:
    """Write this process's data; in a run of several also the list of its pieces, for process 0."""
    pieces.extend(writing)
    if jax.process_count() > 1:
        with open(directory / f"pieces-{token}-{jax.process_index():05d}.json", "w", encoding="utf-8") as file:
            json.dump([(name, dataclasses.asdict(piece)) for name, piece in pieces], file)
            files.flush(file)


def _commit(
    directory: pathlib.Path, token: str, tensors: Mapping[str, Form], written: list[tuple[str, Piece]], metadata: dict, aliases: dict
) -> None:
    """Process 0 makes what all have written the checkpoint."""
    if jax.process_index() != 0:
        return
    pieces = written if jax.process_count() == 1 else _gathered(directory, token)
    manifest = _manifest(directory, tensors, pieces, metadata, aliases)
    files.commit(directory, manifest)
    files.remove_files(path for path in _own_files(directory) if path.name not in manifest.files)


def _plain(metadata: Mapping) -> dict:
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's metadata cannot be written as JSON ({error}): use numbers that are finite, text, lists and dicts"
        ) from None


def _prepare(directory: pathlib.Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file: choose a directory for the checkpoint")
    directory.mkdir(parents=True, exist_ok=True)
    own = {files.MANIFEST, *(path.name for path in _own_files(directory))}
    present = sorted(path.name for path in directory.iterdir())
    if files.is_checkpoint(directory) or (own.issuperset(present) and files.MANIFEST not in present):
        files.sync_directory(directory.parent)
        return
    raise CheckpointError(f"{directory} is no checkpoint but holds {', '.join(present[:5])}: choose an empty or new directory")


def _discard(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Remove what a save that failed has written, unless it failed after its commit."""
    manifest = directory / files.MANIFEST
    if not manifest.exists() or path.name not in manifest.read_text(encoding="utf-8"):
        files.remove_files([path, directory / f"{files.MANIFEST}.new"])


def _own_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of this and of earlier saves, besides the manifest."""
    return [
        path for pattern in ("data-*.safetensors", "pieces-*.json", f"{files.MANIFEST}.new") for path in directory.glob(pattern)
    ]


def _blocks(name: str, value: Saved) -> list[Block]:
    """The blocks of a tensor that this process writes."""
    if isinstance(value, torch.Tensor):
        shape, dtype = tuple(value.shape), _saved_dtype(name, value.dtype)
        return [Block(name, dtype, whole(shape), True, lambda: numpy_view(value))] if jax.process_index() == 0 else []
    array, item = value
    blocks = []
    for shard in array.addressable_shards:
        if shard.replica_id != 0:
            continue
        for here, there in pieces(bounds(shard.index, array.shape), item):
            is_whole = extent(there) == item.shape
            read = lambda data=shard.data, here=here: np.asarray(data)[here]  # noqa: E731  (the file is written later)
            blocks.append(Block(name, _saved_dtype(name, item.dtype), there, is_whole, read))
    return blocks


def _saved_dtype(name: str, dtype: torch.dtype) -> np.dtype:
    found = to_jax(dtype)
    if found not in files.NAMES:
        raise CheckpointError(f"{name!r} is {dtype}, which safetensors cannot hold: known are {', '.join(files.NAMES.values())}")
    return found


def _gathered(directory: pathlib.Path, token: str) -> list[tuple[str, Piece]]:
    """The pieces that all processes wrote."""
    found = []
    for part in sorted(directory.glob(f"pieces-{token}-*.json")):
        for name, fields in json.loads(part.read_text(encoding="utf-8")):
            found.append((name, Piece(**fields | {"start": tuple(fields["start"]), "shape": tuple(fields["shape"])})))
    return found


def _manifest(
    directory: pathlib.Path, tensors: Mapping[str, Form], pieces: list[tuple[str, Piece]], metadata: dict, aliases: dict
) -> Manifest:
    by_name: dict[str, list[Piece]] = collections.defaultdict(list)
    for name, piece in pieces:
        by_name[name].append(piece)
    entries = {}
    for name, (shape, dtype) in tensors.items():
        entries[name] = Entry(shape=shape, dtype=files.NAMES[to_jax(dtype)], pieces=tuple(by_name[name]))
    names = sorted({piece.file for _, piece in pieces})
    return Manifest(
        tensors=entries, aliases=aliases, files={name: (directory / name).stat().st_size for name in names}, metadata=metadata
    )


def _shared_token() -> str:
    """A name for this save, fresh and the same in every process."""
    token = f"{secrets.randbits(31):08x}"
    return token if jax.process_count() == 1 else tell_all(f"checkpoint/{next(_meetings)}", token)[0]


# ---- loading


def _open(
    directory: str | os.PathLike, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], ignore_extra: Sequence[str], differences: Sequence[str] = ()
) -> Reader:
    directory = pathlib.Path(directory)
    reader = Reader(directory, read_manifest(directory))
    problems = [*differences, *_differences(reader, wanted, tuple(ignore_extra))]
    if problems:
        raise CheckpointError(_other_model(directory, problems))
    return reader


def _differences(
    reader: Reader, wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], ignore_extra: tuple[str, ...]
) -> Iterable[str]:
    manifest, used = reader.manifest, set()
    for name, (shape, dtype) in wanted.items():
        first = manifest.aliases.get(name, name)
        if first not in manifest.tensors:
            yield f"missing: {name} {dtype}{list(shape)}"
            continue
        used.add(first)
        entry = manifest.tensors[first]
        found = to_torch(files.DTYPES[entry.dtype])
        if (entry.shape, found) != (shape, dtype):
            yield f"different: {name} is {found}{list(entry.shape)} in the checkpoint, {dtype}{list(shape)} here"
    for name, entry in manifest.tensors.items():
        if name not in used and not (ignore_extra and name.startswith(ignore_extra)):
            yield f"unexpected: {name} {to_torch(files.DTYPES[entry.dtype])}{list(entry.shape)}"


def _other_model(directory: pathlib.Path, problems: list[str], shown: int = 40) -> str:
    lines = [f"the checkpoint at {directory} is of another model or optimizer; {len(problems)} differences:"]
    lines += [f"  {problem}" for problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"  ... and {len(problems) - shown} more")
    lines.append(
        "Build the model and the optimizer with the settings that the checkpoint was saved with, or load another checkpoint."
    )
    return "\n".join(lines)
