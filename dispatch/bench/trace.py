"""Reading a trace of requests: how long their prompts and their answers were."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dispatch.errors import TraceError
from dispatch.plainjson import shown
from dispatch.readfile import read_file

COLUMNS = ("input_tokens", "output_tokens")
MAX_TOKENS = 2**31 - 1  # lengths are int32 in every kernel
LARGEST_BYTES = 1 << 30  # tens of millions of requests
LONGEST_LINE = 1 << 18  # characters: of two of the longest fields that csv takes
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_WHOLE = re.compile(r"[+-]?[0-9]+")  # int() would also take 1_000, and digits of other scripts


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival: int64 arrays of equal length. `digest` stands for the file in a key, `name` for it
    among length profiles."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    digest: str
    name: str = "requests"


def read_traces(paths: Iterable[str | Path]) -> tuple[Trace, ...]:
    """Several files, named as they are. Raises TraceError, also for two of one name."""
    traces = tuple(read_trace(path) for path in paths)
    for name, count in Counter(trace.name for trace in traces).items():
        if count > 1:
            raise TraceError(f"two traces are called {name}: they could not be told apart")
    return traces


def read_trace(path: str | Path) -> Trace:
    """A CSV file with the columns input_tokens and output_tokens, among others; blank lines are left out.

    Raises TraceError, naming file, line and field.
    """
    try:
        raw = read_file(Path(path), LARGEST_BYTES)
        tokens = _columns(path, raw)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}") from None
    if not tokens:
        raise TraceError(f"{path}: no requests")
    table = np.array(tokens, dtype=np.int64).reshape(-1, len(COLUMNS))
    if not table[:, 1].any():
        raise TraceError(f"{path}: output_tokens: all 0, so that no decode step is in it")
    return Trace(
        table[:, 0], table[:, 1], hashlib.sha256(raw).hexdigest()[:16], _NOT_IN_NAMES.sub("_", Path(path).stem)
    )


def _columns(path: str | Path, raw: bytes) -> array[int]:
    """COLUMNS of each request, one request after the other. Raises TraceError, UnicodeDecodeError, or csv.Error."""
    reader = csv.reader(_lines(io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig", newline="")))
    rows = (row for row in reader if any(map(str.strip, row)))
    header = [name.strip() for name in next(rows, [])]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise TraceError(f"{path}: the first line has no column {', '.join(missing)}")
    where = [header.index(name) for name in COLUMNS]
    tokens = array("q")  # 16 bytes a request, where a list of its texts has 200
    for row in rows:
        tokens.extend(_tokens(path, reader.line_num, row, i, header[i]) for i in where)
    return tokens


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    """The lines, with their ends. Raises csv.Error for one that never ends."""
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise csv.Error(f"a line of more than {LONGEST_LINE} characters")
        yield line


def _tokens(path: str | Path, line: int, row: list[str], i: int, field: str) -> int:
    text = row[i].strip() if i < len(row) else ""
    if not _WHOLE.fullmatch(text):
        raise TraceError(f"{path}:{line}: {field}={shown(text)}: must be a whole number")
    value = float(text)  # takes any number of digits, and is exact where they are allowed
    if not 0 <= value <= MAX_TOKENS:
        raise TraceError(f"{path}:{line}: {field}={shown(text)}: must be from 0 to {MAX_TOKENS}")
    return int(value)
