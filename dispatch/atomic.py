"""Writing a file so that a reader, or a crash, sees the old one or the new one and nothing between."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

_log = logging.getLogger(__name__)


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside it, sync, rename over it. Raises OSError; then the old file is untouched."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def set_aside(path: Path, problem: str) -> None:
    """Rename a file that cannot be used, with one warning; it is never deleted."""
    try:
        path.replace(path.with_name(f"{path.name}.bad-{time.time_ns()}"))
    except OSError as error:
        _log.warning("not used, and it cannot be set aside (%s): %s", error.strerror, problem)
    else:
        _log.warning("set aside: %s", problem)
