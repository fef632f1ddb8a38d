"""The samples file: every raw time of the tuning runs of a model's layer groups, as gzipped JSON without loss."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dispatch import readfile
from dispatch.atomic import write_atomically
from dispatch.errors import SamplesError
from dispatch.plainjson import each, field, parse
from dispatch.samples import Samples
from dispatch.samplesjson import samples_from_json, samples_to_json

FORMAT = 3  # since 2 with the longest request of each round, since 3 with the mean
SUFFIX = ".samples.json.gz"
# Unpacking stops here, lest a damaged or a hostile file take all memory. A layer group of 23 buckets, 13 candidates,
# 40 cells, 15 rounds and 3 parts, at 8 characters a time, is 4 MiB; few models have more than three groups. Such a text
# is 4 times its compressed size, and where most candidates were dropped, up to 20 times.
LARGEST_BYTES = readfile.LARGEST_BYTES
_MOST_TIMES = 64
_SMALL_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def samples_path(plan_path: Path) -> Path:
    """Where the samples of a plan file lie: beside it."""
    return plan_path.with_name(plan_path.name.removesuffix(".json") + SUFFIX)


def read_beside(plan_path: Path, keys: Sequence[Mapping[str, Any]]) -> list[Samples | None]:
    """The samples of each of these keys, where they lie beside the plan file.

    A plan says everything that serving needs: samples that cannot be read count as absent, with one warning.
    """
    path = samples_path(plan_path)
    try:
        runs = read_samples(path) if path.exists() else ()
    except SamplesError as error:
        _log.warning("the plan is taken without its samples: %s", error)
        runs = ()
    return [next((run for run in runs if run.key == key), None) for key in keys]


def write_samples(path: Path, runs: Sequence[Samples]) -> None:
    """Write a samples file. Raises OSError."""
    body = {"format": FORMAT, "runs": [samples_to_json(run) for run in runs]}
    content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_samples(path: Path) -> tuple[Samples, ...]:
    """Read a samples file, gzipped or not. Raises SamplesError, naming file and field."""
    try:
        content = _content(path)
    except (OSError, ValueError, zlib.error) as error:
        raise SamplesError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    body = parse(content, path, "runs", FORMAT, SamplesError)
    try:
        return field(body, "runs", lambda runs: each(runs, samples_from_json))
    except (ValueError, RecursionError) as error:
        raise SamplesError(f"{path}: {error}") from None


def _content(path: Path) -> bytes:
    content = readfile.read_file(path, LARGEST_BYTES)
    if content[:2] != readfile.GZIP:
        return content
    largest = min(LARGEST_BYTES, _MOST_TIMES * len(content) + _SMALL_BYTES)
    unpacker = zlib.decompressobj(wbits=31)  # gzip's header and checksum too
    text = unpacker.decompress(content, largest + 1)
    if len(text) > largest:
        raise readfile.too_large(largest)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the compressed data ends too early, or is followed by other data")
    return text
