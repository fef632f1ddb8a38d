"""The samples file: every time survives, and so does every decision; what is wrong with it is said in one line."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import dispatch.samplesfile
from dispatch.conclude import conclude
from dispatch.decision import Reason, Rule
from dispatch.errors import DispatchError, SamplesError
from dispatch.regimes import decide
from dispatch.samples import LONGEST_US, TWIN, Box, Exclusion, Samples
from dispatch.samplesfile import FORMAT, read_samples, samples_path, write_samples
from dispatch.samplesjson import samples_from_json, samples_to_json
from tests.make import CELLS, LAYER_US, make_samples, paths, put_at

TINY = make_samples(cells=CELLS[:1], buckets=(1,), rounds=1, layer_us={"torch_sdpa": [10], "torch_chunked": [8]})
TINY = replace(TINY, key={**TINY.key, "device": {}, "profiles": [], "grid": []})


def with_gaps() -> Samples:
    """A run in which times, a whole cell and a whole bucket are missing, a tactic took part, and a plan was challenged.

    Bucket 8 is left out, the last candidate has no times in cell 2 and half of the rounds in cell 3.
    """
    layer_us = {**LAYER_US, "torch_chunked[tokens=64]": (9, 9.9, 30, 33)}
    samples = make_samples(layer_us)
    measured = samples.buckets[0]
    times = measured.times.copy()
    times[:, 3, 2, :] = np.nan
    times[:, 3, 3, 7:] = np.nan
    exclusions = (
        Exclusion("torch_chunked", Reason.DROPPED, "2.00 times the default's time"),
        Exclusion("torch_chunked[tokens=64]", Reason.FAILED, "RuntimeError: \u00fc\ud800", 2),
        Exclusion(TWIN, Reason.FAILED, "", 0),
    )
    return replace(
        samples,
        buckets=(replace(measured, times=times, exclusions=exclusions),),
        rule=Rule(0.1 + 0.2, 0.0, 7, 1.0),
        unmeasured={8: "the time budget ended before it was measured"},
        incumbent=(Box(1, 128, 1024, 128, 2900, "torch_chunked[tokens=64]"),),
    )


NOTHING_MEASURED = replace(make_samples(), buckets=(), unmeasured={1: "above the KV capacity", 8: ""})
RUNS = [make_samples(), with_gaps(), TINY, NOTHING_MEASURED, make_samples(rounds=0)]


def same(a: Samples, b: Samples) -> bool:
    """Equal to the last bit, NaN included."""
    return (
        samples_to_json(a) == samples_to_json(b)
        and replace(a, buckets=()).key == replace(b, buckets=()).key
        and all(
            x.times.dtype == y.times.dtype == np.float64 and np.array_equal(x.times, y.times, equal_nan=True)
            for x, y in zip(a.buckets, b.buckets, strict=True)
        )
    )


def written(path: Path, *runs: Samples) -> bytes:
    write_samples(path, runs)
    return path.read_bytes()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A short file, compressed."""
    return written(tmp_path_factory.mktemp("tiny") / "run.json.gz", TINY)


def write_changed(path: Path, at: tuple[Any, ...], value: Any, run: Samples = TINY) -> Path:
    path.write_text(json.dumps({"format": FORMAT, "runs": [put_at(samples_to_json(run), at, value)]}))
    return path


def expect_error(path: Path, *words: str) -> None:
    """Reading raises SamplesError that names the file first, and each of the words, in one line."""
    with pytest.raises(SamplesError) as caught:
        read_samples(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


# --- nothing is lost


@pytest.mark.parametrize("name", ["run.samples.json.gz", "run.json"])
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_a_run_is_read_as_it_was_written(tmp_path: Path, name: str, run: int) -> None:
    write_samples(tmp_path / name, [RUNS[run]])
    (again,) = read_samples(tmp_path / name)
    assert same(again, RUNS[run])
    for field in ("num_layers", "default", "priority", "rule", "unmeasured", "incumbent"):
        assert getattr(again, field) == getattr(RUNS[run], field)
    for ours, theirs in zip(again.buckets, RUNS[run].buckets, strict=True):
        for field in ("bucket", "cells", "candidates", "exclusions"):
            assert getattr(ours, field) == getattr(theirs, field)
        assert np.array_equal(ours.longest, theirs.longest)


@pytest.mark.parametrize("run", range(len(RUNS)))
def test_what_is_read_decides_as_what_was_measured(tmp_path: Path, run: int) -> None:
    write_samples(tmp_path / "run.json.gz", [RUNS[run]])
    (again,) = read_samples(tmp_path / "run.json.gz")
    assert decide(again) == decide(RUNS[run])


def test_the_runs_of_several_layer_groups_keep_their_order(tmp_path: Path) -> None:
    write_samples(tmp_path / "run.json.gz", RUNS)
    assert all(same(a, b) for a, b in zip(read_samples(tmp_path / "run.json.gz"), RUNS, strict=True))


def test_no_run_at_all_is_a_file_too(tmp_path: Path) -> None:
    write_samples(tmp_path / "run.json.gz", [])
    assert read_samples(tmp_path / "run.json.gz") == ()


times_us = st.floats(0, LONGEST_US) | st.just(math.nan) | st.sampled_from([0.0, -0.0, 5e-324, 0.1 + 0.2])


@settings(deadline=None, max_examples=50)
@given(arrays(np.float64, (3, 3, 1, 4), elements=times_us))
def test_any_times_survive_to_the_last_bit(times: Any) -> None:
    bucket = replace(TINY.buckets[0], times=times, longest=np.full((1, 4), 128), means=np.full((1, 4), 128))
    (again,) = samples_from_json(json.loads(json.dumps(samples_to_json(replace(TINY, buckets=(bucket,)))))).buckets
    assert np.array_equal(again.times, times, equal_nan=True)
    assert np.array_equal(np.signbit(again.times)[times == 0], np.signbit(times)[times == 0])


def test_a_name_that_ends_in_gz_is_compressed_and_another_is_not(tmp_path: Path) -> None:
    assert gzip.decompress(written(tmp_path / "run.json.gz", TINY)) == written(tmp_path / "run.json", TINY)


def test_what_is_compressed_is_told_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(written(tmp_path / "run.json.gz", TINY))
    assert same(read_samples(tmp_path / "run.json")[0], TINY)


def test_the_time_of_writing_is_not_in_it(packed: bytes) -> None:
    assert packed[4:8] == bytes(4)  # where gzip keeps it


@pytest.mark.parametrize(("plan", "samples"), [("a.json", "a.samples.json.gz"), ("a.b", "a.b.samples.json.gz")])
def test_samples_lie_beside_their_plan(plan: str, samples: str) -> None:
    assert samples_path(Path("folder", plan)) == Path("folder", samples)


# --- truncated, damaged, too large


def test_a_file_that_ends_at_any_byte_is_refused(tmp_path: Path, packed: bytes) -> None:
    for content in (packed, gzip.decompress(packed)):
        for size in range(len(content)):
            (tmp_path / "run").write_bytes(content[:size])
            expect_error(tmp_path / "run")


def test_a_flipped_bit_is_refused_unless_nothing_changes(tmp_path: Path, packed: bytes) -> None:
    path = tmp_path / "run.json.gz"
    for i in range(len(packed)):
        path.write_bytes(packed[:i] + bytes([packed[i] ^ (1 << i % 8)]) + packed[i + 1 :])
        try:
            assert same(read_samples(path)[0], TINY)  # gzip's header holds a time and a system that mean nothing here
        except SamplesError as error:
            assert str(error).startswith(f"{path}: ")


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_is_refused_unless_nothing_changes(tmp_path: Path, packed: bytes, data: st.DataObject) -> None:
    path = tmp_path / "run.json.gz"
    start = data.draw(st.integers(0, len(packed)))
    end = data.draw(st.integers(start, min(start + 8, len(packed))))
    path.write_bytes(packed[:start] + data.draw(st.binary(max_size=8)) + packed[end:])
    try:
        assert same(read_samples(path)[0], TINY)
    except SamplesError as error:
        assert str(error).startswith(f"{path}: ")


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_without_a_checksum_gives_samples_that_can_be_decided_or_the_files_own_error(
    tmp_path: Path, packed: bytes, data: st.DataObject
) -> None:
    path, content = tmp_path / "run.json", gzip.decompress(packed)
    start = data.draw(st.integers(0, len(content) - 1))
    replacement = data.draw(st.sampled_from([b"0", b"9", b"-", b"e", b".", b'"', b"[", b"]", b"null", b"", b"\xff"]))
    path.write_bytes(content[:start] + replacement + content[start + 1 :])
    try:
        runs = read_samples(path)
    except SamplesError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        conclude(runs[0], {})


def test_data_behind_the_compressed_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(written(path, TINY) + b"more")
    expect_error(path, "followed by other data")


@pytest.mark.parametrize("name", ["run.json.gz", "run.json"])
def test_a_file_is_read_up_to_the_largest_size_and_no_further(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    write_samples(path, [TINY])
    size = len(written(tmp_path / "plain.json", TINY))
    monkeypatch.setattr(dispatch.samplesfile, "LARGEST_BYTES", size)
    assert same(read_samples(path)[0], TINY)
    monkeypatch.setattr(dispatch.samplesfile, "LARGEST_BYTES", size - 1)
    expect_error(path, "more than 0 MiB")


MEBIBYTE = 1 << 20


def compressed_bomb(path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    path.write_bytes(b"".join([*(packer.compress(b" " * MEBIBYTE) for _ in range(64)), packer.flush()]))


def large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 * MEBIBYTE)


@pytest.mark.parametrize("make", [compressed_bomb, large_file])
def test_reading_takes_no_more_memory_than_a_few_times_the_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "run.json.gz")
    monkeypatch.setattr(dispatch.samplesfile, "LARGEST_BYTES", MEBIBYTE)
    tracemalloc.start()
    try:
        expect_error(tmp_path / "run.json.gz", "more than 1 MiB")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MEBIBYTE  # of 64


NO_SAMPLES = [
    b"",
    b"[]",
    b"1",
    b"null",
    b'"run"',
    b"{}",
    b"{",
    b'{"format": 1}',
    b"\x00",
    b"\x1f",
    b"\x1f\x8b",
    b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00",
    b"\x1f\x8b\x08\xff" + b"\xff" * 40,
    gzip.compress(b"", mtime=0),
    gzip.compress(b"[]", mtime=0),
    gzip.compress(b"\xff\xfe\x00", mtime=0),
    b"[" * 100_000,
    b"[" * 15_000,
    b'{"format": 1, "runs": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"format": 1, "runs": [' + b'{"key":' * 900 + b"1" + b"}" * 900 + b"]}",
    b'{"format": 1, "runs": [1e400]}',
    b'{"format": 1, "runs": [NaN]}',
    b'{"format": 1, "runs": [' + b"9" * 5000 + b"]}",
]


@pytest.mark.parametrize("content", NO_SAMPLES, ids=lambda content: repr(content[:24]))
def test_what_is_no_samples_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json.gz").write_bytes(content)
    expect_error(tmp_path / "run.json.gz")


@pytest.mark.parametrize("version", [FORMAT + 1, 0, None, "1", []])
def test_another_format_is_refused_before_anything_else(tmp_path: Path, version: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": version}))
    expect_error(tmp_path / "run.json", "format", f"this version reads {FORMAT}")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    expect_error(tmp_path / "run.json.gz", "No such file")


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    expect_error(tmp_path, "directory")


# --- a wrong value


@pytest.mark.parametrize("value", [None, 3, "run", {}])
def test_runs_must_be_a_list(tmp_path: Path, value: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": FORMAT, "runs": value}))
    expect_error(tmp_path / "run.json", "runs: ", "not a list")


@pytest.mark.parametrize("value", [None, 3, "run", []])
def test_a_run_must_be_an_object(tmp_path: Path, value: object) -> None:
    expect_error(write_changed(tmp_path / "run.json", (), value), "runs: ", "not an object")


PLAIN = samples_to_json(TINY)
FIELDS = [(name,) for name in PLAIN]
FIELDS += [("rule", name) for name in PLAIN["rule"]] + [("buckets", 0, name) for name in PLAIN["buckets"][0]]


@pytest.mark.parametrize("at", FIELDS, ids=lambda at: ".".join(map(str, at)))
def test_a_run_without_a_field_is_refused_by_name(tmp_path: Path, at: tuple[Any, ...]) -> None:
    parent = PLAIN
    for name in at[:-1]:
        parent = parent[name]
    less = {name: value for name, value in parent.items() if name != at[-1]}
    expect_error(write_changed(tmp_path / "run.json", at[:-1], less), f"{at[-1]}: missing")


IN_BUCKET = ("buckets", 0)
TIME = (0, 0, 0)  # the first candidate, cell and round
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    *((("key",), value, "key: ") for value in (None, 1, "key", [], {})),
    *((("key", name), None, f"key: {name}: ") for name in ("spec", "buckets", "backends")),
    *((("key", "buckets"), value, "key: buckets: ") for value in (8, "8", {}, [], ["1"], [0], [2, 1])),
    *((("key", "backends"), value, "key: backends: ") for value in (8, [], {"torch_sdpa": 2})),
    (("key", "spec", "k_scale"), 10**400, "key: spec: k_scale="),
    *((("num_layers",), value, "num_layers: ") for value in (None, "4", 4.0, True, [], 10**400)),
    *((("default",), value, "default: ") for value in (None, 1, [], "", TWIN, "fa3[max_kv=]")),
    *((("priority",), value, "priority: ") for value in (None, 1, "fa3", {}, [1], [None])),
    *((("rule",), value, "rule: ") for value in (None, 1, [], {})),
    *((("rule", name), value, f"rule: {name}: ") for name in ("threshold", "cluster_margin", "win_share")
        for value in (None, "0", True, [], 10**400, 1e301)),
    *((("rule", "min_rounds"), value, "rule: min_rounds: ") for value in (None, "12", 12.0, True, 10**400)),
    *((("unmeasured",), value, "unmeasured: ") for value in (None, 1, [], {"8": 1}, {"x": ""}, {"": ""})),
    *((("incumbent",), value, "incumbent: ") for value in (None, 1, {}, [1], [[]], [{}])),
    *((("buckets",), value, "buckets: ") for value in (None, 1, "1", {}, [None], [1], [[]], [{}])),
    *(((*IN_BUCKET, "bucket"), value, "buckets: bucket: ") for value in (None, "1", 1.0, True, [], 10**400)),
    ((*IN_BUCKET, "bucket"), 2, "buckets: [2]: must be among the key's [1]"),
    *(((*IN_BUCKET, "cells"), value, "buckets: cells: ") for value in (None, 1, {}, [1], [[]], [[128, 128]])),
    *(((*IN_BUCKET, "cells", 0), [*row], "buckets: cells: ") for row in (
        (0, 128, "equal"), (129, 128, "equal"), (128, 2**31, "equal"), ("128", 128, "equal"), (128.0, 128, "equal"),
        (128, None, "equal"), (128, 128, None), (True, True, "equal"), (128, 10**400, "equal"))),
    *(((*IN_BUCKET, "candidates"), value, "buckets: candidates: ") for value in (
        None, 1, "torch_sdpa", {}, [], ["torch_sdpa"], ["torch_sdpa", "torch_chunked", TWIN], [TWIN, "torch_sdpa"],
        ["torch_sdpa", TWIN, "torch_sdpa"], ["torch_sdpa", TWIN, TWIN], ["torch_sdpa", TWIN, 1],
        ["torch_sdpa", TWIN, None], ["torch_sdpa", TWIN, ["a"]], ["torch_sdpa", TWIN, ""],
        ["torch_sdpa", TWIN, "torch_chunked[max_kv=" + "9" * 5000 + "]"], ["torch_sdpa", TWIN, "fa3"])),
    *(((*IN_BUCKET, "exclusions"), value, "buckets: exclusions: ") for value in (None, 1, {}, [1], [[]])),
    *(((*IN_BUCKET, "exclusions"), [[*row]], "buckets: exclusions: ") for row in (
        ("a", "FAILED", ""), (1, "FAILED", "", None), ("a", "", "", None), ("a", [], "", None), ("a", None, "", None),
        ("a", "FAILED", 1, None), ("a", "FAILED", "", 1), ("a", "FAILED", "", -1), ("a", "FAILED", "", True),
        ("a", "FAILED", "", "0"), ("a", "FAILED", "", 10**400))),
    *(((*IN_BUCKET, "longest"), value, "buckets: longest: ") for value in (
        None, 1, [], [[1], [1, 2]], [[0]], [[-1]], [[2**31]], [[1.5]], [[None]], [[1, 1]], [[1], [1]])),
    *(((*IN_BUCKET, part), value, f"buckets: {part}: ") for part in ("plan_us", "begin_us", "layer_us")
        for value in (None, 1, "1", {}, [], [1], [[1]], [[[[1]]]], [[[1]]], [[[1]]] * 2, [[[1]]] * 4,
            [[[1], [1]]] * 3, [[[1]], [[1]], [[1, 2]]], [[[1]], [[1]], [[]]], [[[1]], [[1]], []])),
    *(((*IN_BUCKET, "layer_us", *TIME), value, "buckets: layer_us: ") for value in (
        "1.5", "nan", True, [], [1], {}, -0.001, 2e12, 1e308, 10**400, -(10**400))),
]  # fmt: skip


@pytest.mark.parametrize(("at", "value", "words"), WRONG, ids=lambda v: re.sub(r"\W+", " ", ascii(v))[:40])
def test_a_wrong_value_is_refused_by_the_fields_name(
    tmp_path: Path, at: tuple[Any, ...], value: object, words: str
) -> None:
    expect_error(write_changed(tmp_path / "run.json", at, value), f"runs: {words}")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_a_time_that_json_itself_lacks_is_refused(tmp_path: Path, value: str) -> None:
    path = write_changed(tmp_path / "run.json", (*IN_BUCKET, "layer_us", *TIME), "here")
    path.write_text(path.read_text().replace('"here"', value))
    expect_error(path, "layer_us: ")


def test_rows_of_different_lengths_are_no_table(tmp_path: Path) -> None:
    ragged = [[[1]], [[1]], [[1, 2]]]
    expect_error(write_changed(tmp_path / "run.json", (*IN_BUCKET, "layer_us"), ragged), "layer_us: not a table")


def test_parts_with_different_numbers_of_rounds_are_refused(tmp_path: Path) -> None:
    longer = [[[1, 1]]] * 3
    expect_error(write_changed(tmp_path / "run.json", (*IN_BUCKET, "begin_us"), longer), "begin_us: (3, 1, 2)")


def test_a_bucket_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = [PLAIN["buckets"][0]] * 2
    expect_error(write_changed(tmp_path / "run.json", ("buckets",), twice), "buckets: [1, 1]", "each once")


def test_a_tactic_is_of_its_backend(tmp_path: Path) -> None:
    names = ["torch_sdpa", TWIN, "torch_sdpa[max_kv=64]"]
    (run,) = read_samples(write_changed(tmp_path / "run.json", (*IN_BUCKET, "candidates"), names))
    assert run.buckets[0].candidates == tuple(names)


def test_a_time_may_be_as_long_as_the_longest(tmp_path: Path) -> None:
    (run,) = read_samples(write_changed(tmp_path / "run.json", (*IN_BUCKET, "layer_us", *TIME), LONGEST_US))
    assert run.buckets[0].times[(2, *TIME)] == LONGEST_US


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from([10**400, -(10**400), 1e12, 1e308, 2**63, "\ud800", "1", TWIN]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
GAPS = samples_to_json(with_gaps())
PLACES = [at for at in paths(GAPS) if len(at) <= 4 or at[-3:] == TIME]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_place_gives_samples_that_can_be_decided_or_the_files_own_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    at = data.draw(st.sampled_from(PLACES))
    path = write_changed(tmp_path / "run.json", at, data.draw(json_values), with_gaps())
    try:
        (run,) = read_samples(path)
    except SamplesError as error:
        assert str(error).startswith(f"{path}: ")
        return
    try:
        conclude(run, {}).table()
    except DispatchError:  # incumbents that no table holds
        assert at[0] == "incumbent"
