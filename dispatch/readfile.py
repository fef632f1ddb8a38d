"""Reading a file into memory, up to a bound, whatever kind of file it is."""

from __future__ import annotations

import errno
from pathlib import Path

LARGEST_BYTES = 32 << 20  # far above what plans, samples and config.json files come to; a hostile one ends here
GZIP = b"\x1f\x8b"  # how compressed content begins
_PIECE_BYTES = 1 << 18  # read() makes room for all that it may return, however little there is


def read_file(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """The whole content. Raises OSError, also where it is more than `largest_bytes`."""
    pieces, left = [], largest_bytes
    with path.open("rb") as file:
        while piece := file.read(min(left + 1, _PIECE_BYTES)):
            left -= len(piece)
            if left < 0:
                raise too_large(largest_bytes)
            pieces.append(piece)
    return b"".join(pieces)


def too_large(largest_bytes: int) -> OSError:
    """The error for what is larger than it may be."""
    return OSError(errno.EFBIG, f"more than {largest_bytes >> 20} MiB")
