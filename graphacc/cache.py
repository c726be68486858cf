"""Where this user's caches are, and how a file appears in them: whole or not at all."""

import os
import pathlib
import tempfile


def cache_root() -> pathlib.Path:
    """``~/.cache/graphacc``, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base, "graphacc")


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Write a file under a temporary name in the same directory, and rename it.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
