"""Writing a file so that a reader, or a crash, sees the old one or the new one and nothing between."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

LEFT_BEHIND_S = 3600.0  # a write takes milliseconds: who began one so long ago was killed in the middle of it


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside it, sync, rename over it. Raises OSError; then the old file is untouched."""
    _sweep(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with suppress(OSError):  # it is written; some file systems sync no folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _prefix(path: Path) -> str:
    return f".{path.name}.writing-"


def _sweep(path: Path) -> None:
    """Remove what writers of this file have left that were killed."""
    now = time.time()
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix(path)) and now - entry.stat().st_mtime > LEFT_BEHIND_S:
                os.unlink(entry)
