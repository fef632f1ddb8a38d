"""Writing a file that the user named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dispatch.errors import DispatchError


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write`; a path that cannot be written is the user's mistake, in one line."""
    try:
        write(path)
    except OSError as error:
        raise DispatchError(f"{path} cannot be written: {error.strerror}") from None
