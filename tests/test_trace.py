"""Reading a trace: what is taken, and what is refused with file, line and column."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dispatch.bench.trace import MAX_TOKENS, Trace, read_trace, read_traces
from dispatch.errors import TraceError

HEADER = "input_tokens,output_tokens\n"


def read(folder: Path, content: str | bytes) -> Trace:
    path = folder / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(path)


def rows(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


GOOD = [
    ("the two columns", HEADER + "100,7\n0,3\n"),
    ("in the other order", "output_tokens,input_tokens\n7,100\n3,0\n"),
    ("others between", "time,input_tokens,model,output_tokens,user\n0.5,100,a,7,x\n0.9,0,b,3,y\n"),
    ("an empty field elsewhere", "input_tokens,output_tokens,user\n100,7,\n0,3\n"),
    ("blank lines", "\n" + HEADER + "\n100,7\n\n   \n,\n0,3\n\n"),
    ("spaces", " input_tokens , output_tokens \n 100 , 7 \n0,\t3\n"),
    ("quotes", '"input_tokens","output_tokens"\n"100","7"\n"0","3"\n'),
    ("a line end in a quoted field", 'input_tokens,prompt,output_tokens\n100,"a\nb, c",7\n0,"",3\n'),
    ("no line end at the end", HEADER + "100,7\n0,3"),
    ("line ends of DOS", (HEADER + "100,7\n0,3\n").replace("\n", "\r\n")),
    ("line ends of an old Mac", (HEADER + "100,7\n0,3\n").replace("\n", "\r")),
    ("a byte order mark, as spreadsheets write it", "\ufeff" + HEADER + "100,7\n0,3\n"),
    ("signs and leading zeros", HEADER + "+100,007\n-0,3\n"),
    ("more leading zeros than Python turns into a number", HEADER + "0" * 5000 + "100,7\n0,3\n"),
    ("other scripts elsewhere", "input_tokens,output_tokens,\u540d\n100,7,\u00fc\u2028x\n0,3,\x0cy\n"),
]


@pytest.mark.parametrize("content", [content for _, content in GOOD], ids=[name for name, _ in GOOD])
def test_a_trace_is_read_in_order(tmp_path: Path, content: str) -> None:
    assert rows(read(tmp_path, content)) == [(100, 7), (0, 3)]


def test_tokens_are_arrays_of_int64(tmp_path: Path) -> None:
    trace = read(tmp_path, HEADER + "1,2\n")
    assert (trace.input_tokens.dtype, trace.output_tokens.dtype) == (np.int64, np.int64)


def test_the_largest_number_of_tokens_is_that_of_int32(tmp_path: Path) -> None:
    assert rows(read(tmp_path, f"{HEADER}{2**31 - 1},1\n")) == [(2147483647, 1)]


def test_requests_without_output_are_taken_beside_others(tmp_path: Path) -> None:
    assert rows(read(tmp_path, HEADER + "5,0\n6,1\n")) == [(5, 0), (6, 1)]


def test_the_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    digests = {read(tmp_path, HEADER + text).digest for text in ("1,2\n", "1,3\n", "1,2,x\n")}
    assert len(digests) == 3
    assert hashlib.sha256((HEADER + "1,2\n").encode()).hexdigest()[:16] in digests


BAD: list[tuple[str, str | bytes, str]] = [
    ("an empty file", b"", "the first line has no column input_tokens, output_tokens"),
    ("only blank lines", "\n \n,\n", "the first line has no column input_tokens, output_tokens"),
    ("no header", "1,2\n3,4\n", "the first line has no column input_tokens, output_tokens"),
    ("a missing column", "input_tokens,generated\n1,2\n", "the first line has no column output_tokens"),
    ("columns in capitals", "Input_Tokens,output_tokens\n1,2\n", "the first line has no column input_tokens"),
    ("another separator", "input_tokens;output_tokens\n1;2\n", "the first line has no column"),
    ("no rows", HEADER, "no requests"),
    ("rows that are all blank", HEADER + "\n,\n", "no requests"),
    ("no output at all", HEADER + "1,0\n2,0\n", "output_tokens: all 0"),
    ("a negative number", HEADER + "1,2\n-3,4\n", ":3: input_tokens='-3': must be from 0 to 2147483647"),
    ("a number beyond int32", f"{HEADER}1,{2**31}\n", ":2: output_tokens='2147483648': must be from 0 to 2147483647"),
    ("a huge number", HEADER + "9" * 5000 + ",2\n", ":2: input_tokens='999"),
    ("a huge field", HEADER + "9" * 200_000 + ",2\n", "not a CSV file"),
    ("a float", HEADER + "1.0,2\n", ":2: input_tokens='1.0': must be a whole number"),
    ("an exponent", HEADER + "1,1e3\n", ":2: output_tokens='1e3': must be a whole number"),
    ("infinity", HEADER + "inf,2\n", ":2: input_tokens='inf': must be a whole number"),
    ("not a number", HEADER + "1,nan\n", ":2: output_tokens='nan': must be a whole number"),
    ("an underscore", HEADER + "1_000,2\n", ":2: input_tokens='1_000': must be a whole number"),
    ("hexadecimal", HEADER + "0x10,2\n", ":2: input_tokens='0x10': must be a whole number"),
    ("digits of another script", HEADER + "\u0663,2\n", "must be a whole number"),
    ("text", HEADER + "1,many\n", ":2: output_tokens='many': must be a whole number"),
    ("an empty field", HEADER + ",2\n", ":2: input_tokens='': must be a whole number"),
    ("a short row", HEADER + "1,2\n3\n", ":3: output_tokens='': must be a whole number"),
    ("a bad row behind blank lines", HEADER + "\n\n1,2\n\nx,2\n", ":6: input_tokens='x'"),
    ("a bad row behind a quoted line end", 'p,input_tokens,output_tokens\n"a\nb",1,2\nc,x,2\n', ":4: input_tokens='x'"),
    ("a NUL", HEADER.encode() + b"1\x00,2\n", "trace.csv"),
    ("binary", bytes(range(256)), "not a CSV file"),
    ("UTF-16", (HEADER + "1,2\n").encode("utf-16"), "not a CSV file"),
    ("a quote that is never closed", HEADER + '"1,2\n3,4\n', ":3: input_tokens="),
]


@pytest.mark.parametrize(("content", "words"), [(c, w) for _, c, w in BAD], ids=[name for name, _, _ in BAD])
def test_a_bad_trace_is_refused_with_file_line_and_column(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(TraceError, match=re.escape(words)) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'trace.csv'}:")


def test_a_refusal_shows_no_more_than_a_line_of_a_long_field(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, HEADER + "x" * 100_000 + ",2\n")
    assert len(str(caught.value)) < len(str(tmp_path)) + 150


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.csv: No such file"):
        read_trace(tmp_path / "trace.csv")


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="directory"):
        read_trace(str(tmp_path))


TEXTS = [HEADER, "input_tokens", "output_tokens", ",", "\n", "\r", '"', " ", "-", "7", "2147483648", "9" * 5000]
pieces = st.sampled_from([*(text.encode() for text in TEXTS), b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8"])


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.lists(pieces | st.binary(max_size=3), max_size=12).map(lambda parts: b"".join(parts)))
@example(HEADER.encode() + b'1,2\n"')
@example(HEADER.encode() + b"1,2\n\x00")
def test_any_bytes_are_a_trace_or_a_refusal(tmp_path: Path, content: bytes) -> None:
    try:
        trace = read(tmp_path, content)
    except TraceError as error:
        assert str(error).startswith(f"{tmp_path / 'trace.csv'}:")
        return
    table = np.array([trace.input_tokens, trace.output_tokens])
    assert table.size > 0
    assert table.min() >= 0
    assert table.max() <= MAX_TOKENS
    assert trace.output_tokens.any()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.integers(1, MAX_TOKENS)), min_size=1))
def test_any_requests_are_read_as_they_were_written(tmp_path: Path, requests: list[tuple[int, int]]) -> None:
    assert rows(read(tmp_path, HEADER + "".join(f"{i},{o}\n" for i, o in requests))) == requests


def test_several_files_are_named_as_they_are_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "chat.csv", tmp_path / "a b[red].csv", tmp_path / "more" / "chat.csv"]
    paths[2].parent.mkdir()
    for path in paths:
        path.write_text(HEADER + "1,2\n")
    assert [trace.name for trace in read_traces(paths[:2])] == ["chat", "a_b_red_"]
    with pytest.raises(TraceError, match="two traces are called chat"):
        read_traces(paths)
