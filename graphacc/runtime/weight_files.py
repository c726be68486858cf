"""Weights in safetensors files as Hugging Face writes them: one file, or several with an index, read by slices of a memory map."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np

from graphacc.errors import CheckpointError
from graphacc.runtime.checkpoint_files import DTYPES
from graphacc.runtime.layout import Index, extent

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor in one of the files."""

    file: pathlib.Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index, dtype: np.dtype) -> np.ndarray:
        """A block of it, cast to `dtype`, in memory of its own."""
        if 0 in extent(index):
            return np.zeros(extent(index), dtype)
        mapped = np.memmap(self.file, dtype=self.dtype, mode="r", offset=self.offset, shape=self.shape)
        return np.array(mapped[index]).astype(dtype, copy=False)


def open_weights(path: str | pathlib.Path) -> dict[str, Weight]:
    """Every tensor of a safetensors file, of a directory that holds one or several with an index, or of an index, by name; only headers are read.

    Raises:
        CheckpointError: there is no such file, one is damaged, or the index does not fit the files.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = next((path / name for name in (INDEX, SINGLE) if (path / name).is_file()), None) or _only_file(path)
    if not path.is_file():
        raise CheckpointError(f"there are no weights at {path}: give a .safetensors file, or a directory with {SINGLE} or with {INDEX} and the files that it names")
    if path.suffix != ".json":
        return dict(_header(path))
    return _indexed(path)


def _only_file(directory: pathlib.Path) -> pathlib.Path:
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:
        raise CheckpointError(f"{directory} holds {len(found)} safetensors files and no {INDEX}, which says what is in which: name one file, or write the index")
    return found[0] if found else directory / SINGLE


def _indexed(path: pathlib.Path) -> dict[str, Weight]:
    try:
        places: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error!r}): it needs a \"weight_map\" of tensor names to files") from None
    files = {name: dict(_header(path.parent / name)) for name in sorted(set(places.values()))}
    absent = [f"{tensor} in {name}" for tensor, name in places.items() if tensor not in files[name]]
    if absent:
        raise CheckpointError(f"{path} names {len(absent)} tensors that the files do not hold, the first {absent[0]}: copy the files again, all of one version")
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _header(path: pathlib.Path) -> Iterator[tuple[str, Weight]]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            entries = json.loads(file.read(length)) if 8 + length <= size else None
    except FileNotFoundError:
        raise CheckpointError(f"the file of weights {path} is missing: copy it beside the index that names it") from None
    except ValueError:
        entries = None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no safetensors file, or is cut off: its header cannot be read; copy it again")
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: {name!r} has dtype {entry['dtype']}, known are {', '.join(DTYPES)}")
        start, stop = entry["data_offsets"]
        if 8 + length + stop > size:
            raise CheckpointError(f"{path} is cut off: {name!r} ends at byte {8 + length + stop}, the file has {size}; copy it again")
        yield name, Weight(file=path, offset=8 + length + start, shape=tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]])
