"""Writing a file so that a reader, or a crash, sees the old one or the new one and nothing between."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

LEFT_BEHIND_S = 3600.0  # a write takes milliseconds: who began one so long ago was killed in the middle of it
_log = logging.getLogger(__name__)


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


def check_writable(path: Path) -> None:
    """Raises OSError where `write_atomically` would, as far as that can be told before there is something to write."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_prefix(path)):
        pass


def _prefix(path: Path) -> str:
    return f".{path.name}.writing-"


def _sweep(path: Path) -> None:
    """Remove what writers of this file have left that were killed."""
    now = time.time()
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix(path)) and now - entry.stat().st_mtime > LEFT_BEHIND_S:
                os.unlink(entry)


def opened(path: Path) -> int | None:
    """A descriptor of the file; None where there is none, or, with a warning, where it cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:  # that is no fault of the file, which may be good
        _log.warning("not used: %s: %s", path, error.strerror)
        return None


def set_aside(path: Path, seen: int, problem: str) -> None:
    """Rename the file that is open as `seen`, with one warning: it cannot be used, and is never deleted.

    What was stored in its place since then stays.
    """
    aside = path.with_name(f"{path.name}.bad-{time.time_ns()}")
    try:
        path.replace(aside)
        if not os.path.samestat(aside.stat(), os.fstat(seen)):
            aside.replace(path)
    except FileNotFoundError:
        _log.warning("set aside by another process: %s", problem)
    except OSError as error:
        _log.warning("not used, and it cannot be set aside (%s): %s", error.strerror, problem)
    else:
        _log.warning("set aside: %s", problem)
