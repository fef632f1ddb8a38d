"""No file makes its reader take more than a few times its size, whatever it holds; each refusal is one line."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dispatch.bench.trace import read_trace
from dispatch.errors import DispatchError
from dispatch.models import load_model
from dispatch.planfile import read_plans
from dispatch.readfile import LARGEST_BYTES, read_file
from dispatch.samplesfile import read_samples, write_samples
from tests.make import CELLS, TINY, make_samples
from tests.test_backend_plan import forge

ROOT = Path(__file__).parents[1]
MEBIBYTE = 1 << 20
# Peak over the input's size. The text and the bytes are there at once, a digest is over another text; numbers, whose
# objects have 32 bytes, come to 10 times a text of "0.0,". Before texts were looked at, a list of empty lists took 24.
TIMES = 16
CONSTANT = 4 * MEBIBYTE


def peak_of(read: Callable[[Path], object], path: Path) -> tuple[int, str]:
    """The most bytes that reading took, and the refusal, or ""."""
    tracemalloc.start()
    try:
        read(path)
    except DispatchError as error:
        return tracemalloc.get_traced_memory()[1], str(error)
    else:
        return tracemalloc.get_traced_memory()[1], ""
    finally:
        tracemalloc.stop()


def filled(piece: str, size: int = MEBIBYTE) -> str:
    return piece * (size // len(piece.encode()))


VALUES = {
    "empty lists": filled("[],") + "0",
    "empty objects": filled("{},") + "0",
    "objects of one field": filled('{"a":1},') + "0",
    "short texts": filled('"ab",') + "0",
    "whole numbers": filled("999,") + "0",
    "times": filled("0.0,") + "0",
    "zeros": filled("0,") + "0",
    "a text of four bytes a character": '"' + filled("\U0001f600") + '"',
    "a text with one such character": '"\U0001f600' + filled("a") + '"',
    "escapes": '"' + filled("\\u00e9") + '"',
    "a number of a million digits": filled("9"),
    "a fraction of a million digits": "0." + filled("9"),
    "depth": filled("[") + filled("]"),
    "depth that Python can still read": filled("[" * 400 + "0" + "]" * 400 + ",") + "0",
    "fields": "{" + ",".join(f'"{i:06x}":1' for i in range(MEBIBYTE // 11)) + "}",
    "spaces": filled(" ") + "0",
}
JSON_READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "plan": (read_plans, '{{"format": 1, "plans": [{}]}}'),
    "samples": (read_samples, '{{"format": 1, "runs": [{}]}}'),
    "config": (lambda path: load_model(str(path)), '{{"num_hidden_layers": [{}]}}'),
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("reader", JSON_READERS)
def test_a_json_file_takes_a_few_times_its_size_and_is_refused_in_one_line(
    tmp_path: Path, reader: str, value: str
) -> None:
    # seen to fail: with json.loads in place of plainjson.load, for lists and objects
    read, frame = JSON_READERS[reader]
    path = tmp_path / "config.json"
    path.write_text(frame.format(VALUES[value]))
    peak, refusal = peak_of(read, path)
    assert refusal.startswith(f"{path}: ")
    assert "\n" not in refusal
    assert len(refusal) < len(str(path)) + 300
    assert peak < TIMES * path.stat().st_size + CONSTANT


def test_samples_of_nothing_but_times_are_read_in_a_few_times_their_size(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    samples = make_samples(rounds=2000)
    for bucket in samples.buckets:
        bucket.times.fill(0.0)  # the shortest text that a time has
    write_samples(path, [samples])
    assert path.stat().st_size > CONSTANT / TIMES
    peak, refusal = peak_of(read_samples, path)
    assert refusal == ""
    assert peak < TIMES * path.stat().st_size


def test_a_config_of_a_thousand_million_layers_is_refused_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "num_hidden_layers": 10**9}))
    peak, refusal = peak_of(lambda path: load_model(str(path)), path)
    assert refusal == f"{path}: num_hidden_layers=1000000000: must be a whole number from 1 to 10000"
    assert peak < MEBIBYTE // 2


HEADER = "input_tokens,output_tokens\n"
TRACES = {
    "short rows": HEADER + filled("1,2\n", MEBIBYTE // 2),
    "blank lines": HEADER + filled("\n", MEBIBYTE // 4),
    "a row of a million fields": HEADER + filled(","),
    "a row of many short fields": HEADER + filled("ab,"),
    "a header of many short fields": HEADER.strip() + "," + filled("ab,") + "\n1,2\n",
    "a line that never ends": HEADER + filled("\U0001f600"),
    "one long character behind short rows": HEADER + filled("1,2\n", MEBIBYTE // 4) + "\U0001f600",
    "a quote that never ends": HEADER + '"' + filled("a\n"),
    "fields over many lines": HEADER + filled('"\na",'),
    "tokens of a million digits": HEADER + filled("9") + ",1\n",
    "many requests of the most tokens": HEADER + filled("2147483647,2147483647\n"),
}


@pytest.mark.parametrize("content", TRACES)
def test_a_trace_takes_a_few_times_its_size(tmp_path: Path, content: str) -> None:
    # seen to fail: with all rows in a list before the first is looked at, short rows take 86 times
    path = tmp_path / "trace.csv"
    path.write_text(TRACES[content])
    peak, refusal = peak_of(read_trace, path)
    assert len(refusal) < len(str(path)) + 300
    assert peak < TIMES * path.stat().st_size + CONSTANT


def bomb(content: bytes, times: int) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return b"".join([*(packer.compress(content) for _ in range(times)), packer.flush()])


@pytest.mark.parametrize("content", [b" ", b"[],", b"0.0,", b"{}"])
def test_a_few_kilobytes_of_gzip_stay_a_few_mebibytes(tmp_path: Path, content: bytes) -> None:
    # seen to fail: unpacked up to 64 MiB and then parsed, 8 KiB of lists took 188 MiB
    path = tmp_path / "run.json.gz"
    path.write_bytes(bomb(content * (MEBIBYTE // len(content)), 64))
    assert path.stat().st_size < 128 << 10
    peak, refusal = peak_of(read_samples, path)
    assert refusal.startswith(f"{path}: more than ")
    assert peak < 4 * 64 * path.stat().st_size


def test_a_small_file_takes_a_small_memory(tmp_path: Path) -> None:
    # seen to fail: read(64 MiB) makes room for 64 MiB first
    path = tmp_path / "run.json.gz"
    write_samples(path, [make_samples()])
    assert peak_of(read_samples, path)[0] < MEBIBYTE // 2


def test_samples_that_compress_as_well_as_samples_can_are_read(tmp_path: Path) -> None:
    # two arms that are all there, and eleven that were dropped after two of 15 rounds
    samples = make_samples({f"b{i}": [10] * 160 for i in range(12)}, cells=CELLS * 40)
    rng = np.random.default_rng(0)
    for bucket in samples.buckets:
        bucket.times[2] = rng.normal(20, 5, bucket.times[2].shape).round(3)
        bucket.times[:, 2:, :, 2:] = np.nan
    path = tmp_path / "run.json.gz"
    write_samples(path, [samples])
    (again,) = read_samples(path)
    assert np.array_equal(again.buckets[1].times, samples.buckets[1].times, equal_nan=True)


@pytest.mark.parametrize("read", [read_plans, read_samples, read_file], ids=lambda read: read.__name__)
def test_a_file_without_end_is_refused(read: Callable[[Path], object]) -> None:
    with pytest.raises((DispatchError, OSError), match="more than 32 MiB"):
        read(Path("/dev/zero"))
    assert LARGEST_BYTES == 32 * MEBIBYTE


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"plan")
    os.close(writing)
    try:
        assert read_file(Path(f"/dev/fd/{reading}")) == b"plan"
    finally:
        os.close(reading)


def plan_bytes(buckets: list[int], names: list[bytes], entries: list[tuple[int, ...]]) -> bytes:
    """A plan of these, with a length and a checksum that vouch for it; every entry names the first of the names."""
    body = b"\x89DDPLAN\n" + struct.pack("<IQIII", 1, 0, len(buckets), len(names), len(entries))
    body += struct.pack(f"<{len(buckets)}q", *buckets)
    body += b"".join(struct.pack("<I", len(name)) + name for name in names)
    backend = struct.pack("<I", len(names[0])) + names[0] + struct.pack("<I", 0)
    return forge(body + b"".join(struct.pack("<5q", *entry) + backend for entry in entries) + bytes(8), 0, b"")


WITHIN = """
import resource, sys
from dispatch._core import BackendPlan
data = sys.stdin.buffer.read()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
BackendPlan.from_bytes(data)
"""


@pytest.mark.parametrize(
    "data",
    [
        plan_bytes(list(range(1, 40_001)), [b"a"], []),
        plan_bytes([8], [bytes(name) for name in itertools.product(b"abcdefghij", repeat=4)], []),
        plan_bytes([8], [b"a"], [(8, i, i, 0, 9) for i in range(5000)]),
    ],
    ids=["buckets", "names", "entries"],
)
def test_plan_bytes_take_a_few_times_their_size(data: bytes) -> None:
    limit = str(TIMES * len(data) + CONSTANT)
    done = subprocess.run([sys.executable, "-c", WITHIN, limit], input=data, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
