"""A candidate and its text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.candidate import Candidate
from dispatch.errors import DispatchError
from dispatch.samples import TWIN

NOT_CANDIDATES = [
    "",
    " fa3",
    "fa3 ",
    "fa3\n",
    "3fa",
    "fa3/x",
    "fa3[]",
    "fa3[num_splits]",
    "fa3[num_splits=]",
    "fa3[num_splits=-1]",
    "fa3[num_splits=1.5]",
    "fa3[num_splits=4,]",
    "fa3[,num_splits=4]",
    "fa3[NumSplits=4]",
    "fa3[num_splits=4]x",
    "fa3[num_splits=4][max_kv=1]",
    "fa3[num_splits=4",
    "[num_splits=4]",
    "fa3[num_splits=\u0663]",  # a digit of another script
    "\uff46a3",  # letters that only look like ours
    "f\uff413",
    "fa3[num_splits=" + "9" * 19 + "]",  # 2^63 has 19 digits
    "fa3[num_splits=" + "9" * 5000 + "]",
]

backends = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]*", fullmatch=True)
knobs = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True), st.integers(0, 10**18 - 1), max_size=3)


@settings(deadline=None)
@given(backends, knobs)
def test_a_candidate_survives_its_text(backend: str, numbers: dict[str, int]) -> None:
    candidate = Candidate(backend, ",".join(f"{name}={number}" for name, number in numbers.items()))
    assert Candidate.parse(str(candidate)) == candidate
    assert Candidate.parse(str(candidate)).knobs == numbers


@settings(deadline=None)
@given(st.text() | st.from_regex(r"[A-Za-z]\w*\[[a-z]*=\d*\]"))
def test_a_text_is_the_one_form_of_a_candidate_or_is_refused(text: str) -> None:
    try:
        candidate = Candidate.parse(text)
    except DispatchError:
        return
    assert str(candidate) == text


@pytest.mark.parametrize("text", NOT_CANDIDATES, ids=lambda text: text[:24])
def test_what_is_no_candidate_is_refused(text: str) -> None:
    with pytest.raises(DispatchError, match="is not a candidate"):
        Candidate.parse(text)


def test_a_refusal_shows_no_more_than_a_line_of_a_long_text() -> None:
    with pytest.raises(DispatchError) as caught:
        Candidate.parse("?" * 5000)
    assert len(str(caught.value)) < 150


def test_the_twin_of_the_default_is_no_candidate() -> None:
    with pytest.raises(DispatchError):
        Candidate.parse(TWIN)


def test_the_backend_stands_alone_without_a_tactic() -> None:
    assert str(Candidate("fa3")) == "fa3"
    assert Candidate("fa3").knobs == {}


def test_max_kv_is_the_knob_of_that_name() -> None:
    assert Candidate("xqa", "num_splits=4,max_kv=4096").max_kv == 4096


def test_a_candidate_without_the_knob_has_no_max_kv() -> None:
    assert Candidate("xqa", "num_splits=4").max_kv is None
