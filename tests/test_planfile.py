"""The plan file: nothing is lost, and nothing that is wrong with it comes out as another exception than its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatch.conclude import conclude
from dispatch.decision import Reason
from dispatch.errors import PlanFileError
from dispatch.key import digest
from dispatch.plan import TIME_BUDGET_OVER, DecidedBox, Excluded, StoredPlan
from dispatch.planfile import FORMAT, plan_from_json, plan_to_json, read_plans, write_plans
from dispatch.samples import TWIN, Box, Exclusion
from tests.make import get_at, make_key, make_plan, make_samples, paths, put_at

RICH = make_plan(
    default="torch_sdpa[page=1,max_kv=4096]",
    boxes=(
        DecidedBox(Box(1, 0, 700, 0, 4096, "torch_chunked[tokens=64]"), Reason.FASTEST, 1.25),
        DecidedBox(Box(1, 701, 2**40, 0, 2**63 - 1, "torch_sdpa"), Reason.NOT_FASTER, 0.1 + 0.2),
    ),
    unmeasured={8: TIME_BUDGET_OVER},
    excluded=(Excluded(1, "torch_chunked", Reason.FAILED, "RuntimeError: \u00fc\u0000\ud800"),),
    refused={"flashinfer_xqa": "needs a GPU", "": ""},
)
# A plan whose JSON is short, for tests that try every byte of it.
SHORT = make_plan(boxes=make_plan().boxes[:1], refused={}, key=make_key(device={}, profiles=[], grid=[]))


def save(path: Path, *plans: StoredPlan) -> bytes:
    write_plans(path, plans)
    return path.read_bytes()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A short file."""
    return save(tmp_path_factory.mktemp("short") / "plan.json", SHORT)


def write_signed(path: Path, body: dict[str, Any]) -> Path:
    """A file whose checksum is right, whatever is in it."""
    path.write_text(json.dumps({**body, "checksum": digest(body)}))
    return path


def write_changed(path: Path, at: tuple[Any, ...], value: Any) -> Path:
    return write_signed(path, {"format": FORMAT, "plans": [put_at(plan_to_json(make_plan()), at, value)]})


def expect_error(path: Path, *words: str) -> None:
    """Reading raises PlanFileError that names the file first, and each of the words, in one line."""
    with pytest.raises(PlanFileError) as caught:
        read_plans(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


# --- nothing is lost


@pytest.mark.parametrize("plans", [(), (make_plan(),), (RICH,), (make_plan(), RICH, SHORT)], ids=len)
def test_plans_are_read_as_they_were_written(tmp_path: Path, plans: tuple[StoredPlan, ...]) -> None:
    save(tmp_path / "plan.json", *plans)
    assert read_plans(tmp_path / "plan.json") == plans


def test_the_table_of_a_plan_is_the_same_after_reading(tmp_path: Path) -> None:
    save(tmp_path / "plan.json", RICH)
    assert read_plans(tmp_path / "plan.json")[0].table().to_bytes() == RICH.table().to_bytes()


def test_the_checksum_does_not_depend_on_the_order_of_fields(tmp_path: Path) -> None:
    turned = replace(RICH, key=dict(reversed(RICH.key.items())))
    checksums = {json.loads(save(tmp_path / "plan.json", plan))["checksum"] for plan in (RICH, turned)}
    assert len(checksums) == 1


texts = st.text(max_size=8)
bounds = st.integers(0, 2**63 - 1)
decided = st.builds(
    lambda mean, longest, reason, speedup: DecidedBox(
        Box(8, *sorted(mean), *sorted(longest), "torch_chunked"), reason, speedup
    ),
    st.tuples(bounds, bounds),
    st.tuples(bounds, bounds),
    st.sampled_from(Reason),
    st.floats(0, 1e9),
)
plans = st.builds(
    partial(make_plan, make_samples(rounds=1)),
    created=texts,
    boxes=st.lists(decided, max_size=1).map(tuple),
    unmeasured=st.dictionaries(st.integers(1, 512), texts, max_size=3),
    excluded=st.lists(
        st.builds(Excluded, st.integers(1, 512), st.just("fa3[a=1]"), st.sampled_from(Reason), texts), max_size=3
    ).map(tuple),
    refused=st.dictionaries(texts, texts, max_size=3),
    seconds=st.floats(0, 1e9),
)


@settings(deadline=None)
@given(plans)
def test_any_plan_survives_json(plan: StoredPlan) -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan), allow_nan=False))) == plan


def test_a_plan_whose_twin_failed_in_a_cell_can_be_read_back(tmp_path: Path) -> None:
    samples = make_samples()
    failed = Exclusion(TWIN, Reason.FAILED, "RuntimeError: out of memory", 0)
    plan = conclude(replace(samples, buckets=(replace(samples.buckets[0], exclusions=(failed,)),)), {})
    save(tmp_path / "plan.json", plan)
    assert read_plans(tmp_path / "plan.json") == (plan,)


# --- truncated, damaged, changed


def test_a_file_that_ends_at_any_byte_is_refused(tmp_path: Path, short: bytes) -> None:
    path = tmp_path / "plan.json"
    for size in range(len(short) - 1):  # the last byte is a line end, which nothing hangs on
        path.write_bytes(short[:size])
        expect_error(path)


def test_a_flipped_bit_is_refused_unless_nothing_changes(tmp_path: Path, short: bytes) -> None:
    path = tmp_path / "plan.json"
    for i in range(len(short)):
        path.write_bytes(short[:i] + bytes([short[i] ^ (1 << i % 8)]) + short[i + 1 :])
        try:
            assert read_plans(path) == (SHORT,)
        except PlanFileError as error:
            assert str(error).startswith(f"{path}: ")


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_is_refused_unless_nothing_changes(tmp_path: Path, short: bytes, data: st.DataObject) -> None:
    path = tmp_path / "plan.json"
    start = data.draw(st.integers(0, len(short)))
    end = data.draw(st.integers(start, min(start + 8, len(short))))
    path.write_bytes(short[:start] + data.draw(st.binary(max_size=8)) + short[end:])
    try:
        assert read_plans(path) == (SHORT,)
    except PlanFileError as error:
        assert str(error).startswith(f"{path}: ")


def test_a_value_changed_by_hand_is_told_by_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(save(path, make_plan()).replace(b'"speedup": 1.', b'"speedup": 9.'))
    expect_error(path, "checksum")


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"format": FORMAT, "plans": []}))
    expect_error(tmp_path / "plan.json", "checksum")


@pytest.mark.parametrize("version", [FORMAT + 1, 0, None, "1", [], 10**400], ids=lambda v: str(v)[:8])
def test_another_format_is_refused_before_anything_else(tmp_path: Path, version: object) -> None:
    expect_error(write_signed(tmp_path / "plan.json", {"format": version}), "format", f"this version reads {FORMAT}")


NOT_A_PLAN_FILE = [
    b"",
    b" ",
    b"[]",
    b"1",
    b"null",
    b'"plan"',
    b"{}",
    b"{",
    b'{"format": 2}',
    b"not JSON",
    b"\x00",
    b"\xff\xfe\x00",
    b"\x1f\x8b\x08\x00",
    bytes(range(256)),
    b"[" * 100_000,
    b"[" * 15_000,
    b'{"format":' * 100_000,
    b'{"format": 2, "plans": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"format": ' + b"9" * 5000 + b"}",
    b'{"format": 1e400}',
    b'{"format": 2, "plans": [NaN]}',
    b'{"format": 2, "plans": [1e400]}',
    '{"format": 2}'.encode("utf-16"),
]


@pytest.mark.parametrize("content", NOT_A_PLAN_FILE, ids=lambda content: repr(content[:24]))
def test_what_is_no_plan_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    expect_error(tmp_path / "plan.json")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    expect_error(tmp_path / "plan.json", "No such file")


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    expect_error(tmp_path, "directory")


# --- a wrong value under a right checksum


@pytest.mark.parametrize("value", [None, 3, "plan", {}])
def test_plans_must_be_a_list(tmp_path: Path, value: object) -> None:
    expect_error(write_signed(tmp_path / "plan.json", {"format": FORMAT, "plans": value}), "plans: ", "not a list")


@pytest.mark.parametrize("value", [None, 3, "plan", []])
def test_a_plan_must_be_an_object(tmp_path: Path, value: object) -> None:
    expect_error(write_changed(tmp_path / "plan.json", (), value), "plans: ", "not an object")


@pytest.mark.parametrize("field", plan_to_json(make_plan()))
def test_a_plan_without_a_field_is_refused_by_name(tmp_path: Path, field: str) -> None:
    data = plan_to_json(make_plan())
    del data[field]
    expect_error(write_signed(tmp_path / "plan.json", {"format": FORMAT, "plans": [data]}), f" {field}: missing")


WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    *((("key",), value, "key: ") for value in (None, 1, "key", [])),
    *((("key", name), None, f"key: {name}: ") for name in ("spec", "buckets", "backends")),
    (("key",), {}, "key: spec: missing"),
    (("key", "spec", "num_kv_heads"), 3, "key: spec: num_qo_heads=8"),
    (("key", "spec", "k_scale"), 10**400, "key: spec: k_scale="),
    *((("created",), value, "created: ") for value in (None, 1, [], {})),
    *((("default",), value, "default: ") for value in (None, 1, [], {}, "", "default/twin", "fa3[max_kv=]")),
    *((("buckets",), value, "buckets: ") for value in (None, 1, "1", {}, ["1"], [1.0], [None], [True], [10**400])),
    *((("buckets",), value, "boxes: bucket") for value in ([0], [8, 1], [1, 1], [-1])),  # the table refuses them
    *((("boxes",), value, "boxes: ") for value in (None, 1, "1", {}, [None], [[]], [{}])),
    *((("boxes", 0, "bucket"), value, "boxes: bucket") for value in (None, "1", 1.0, True, [], 10**400, 3, -1)),
    *((("boxes", 0, name), value, f"boxes: {name}: ") for name in ("mean_kv", "skew") for value in (
        None, 1, "12", {}, [], [1], [1, 2, 3], [1, None], ["1", "2"], [1.5, 2], [False, True], [0, 2**63])),
    *((("boxes", 0, name), value, "boxes: ") for name in ("mean_kv", "skew") for value in ([2, 1], [-1, 1])),
    *((("boxes", 0, "candidate"), value, "boxes: candidate: ") for value in (None, 1, [], "", "fa3[x]", TWIN)),
    (("boxes", 0, "candidate"), "fa3", "boxes: backend 'fa3' is not one of"),
    *((("boxes", 0, "reason"), value, "boxes: reason: ") for value in (None, 1, [], {}, "", "fastest", "SLOWEST")),
    (("boxes", 0, "reason"), "A\nB", "boxes: reason: 'A\\nB' is not a reason"),
    *((("boxes", 0, "speedup"), value, "boxes: speedup: ") for value in (None, "1", [], True, 10**400, 1e301)),
    *((("unmeasured",), value, "unmeasured: ") for value in (None, 1, [], {"8": 1}, {"8": None}, {"x": ""}, {"": ""})),
    *((("excluded",), value, "excluded: ") for value in (None, 1, {}, [1], [[]], [[1, "fa3", "FAILED"]])),
    *((("excluded",), [[*row]], "excluded: ") for row in (
        ("1", "fa3", "FAILED", ""), (1, 3, "FAILED", ""), (1, "", "FAILED", ""), (1, "fa3", "", ""),
        (1, "fa3", [], ""), (1, "fa3", "FAILED", None), (10**400, "fa3", "FAILED", ""))),
    *((("refused",), value, "refused: ") for value in (None, 1, [], {"fa3": None}, {"fa3": 1})),
    *((("seconds",), value, "seconds: ") for value in (None, "1", [], True, 10**400)),
]  # fmt: skip


@pytest.mark.parametrize(("at", "value", "words"), WRONG, ids=lambda v: re.sub(r"\W+", " ", ascii(v))[:40])
def test_a_wrong_value_is_refused_by_the_fields_name(
    tmp_path: Path, at: tuple[Any, ...], value: object, words: str
) -> None:
    expect_error(write_changed(tmp_path / "plan.json", at, value), f"plans: {words}")


def test_a_list_of_the_wrong_length_is_told_the_right_one(tmp_path: Path) -> None:
    expect_error(write_changed(tmp_path / "plan.json", ("boxes", 0, "mean_kv"), [1]), "[1] is not a list of 2")


@pytest.mark.parametrize("value", ["?" * 5000, 10**4000, [[["x" * 50] * 50] * 50] * 50], ids=["text", "number", "list"])
def test_a_refusal_shows_no_more_than_a_line_of_a_long_value(tmp_path: Path, value: object) -> None:
    with pytest.raises(PlanFileError) as caught:
        read_plans(write_changed(tmp_path / "plan.json", ("boxes", 0, "candidate"), value))
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_boxes_that_overlap_are_refused(tmp_path: Path) -> None:
    box = get_at(plan_to_json(make_plan()), ("boxes", 0))
    expect_error(write_changed(tmp_path / "plan.json", ("boxes",), [box, box]), "boxes: ", "overlaps")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from([10**400, -(10**400), 1e308, 2**63, "\ud800", "__class__", "1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_place_gives_a_plan_that_can_be_used_or_the_files_own_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    at = data.draw(st.sampled_from(list(paths(plan_to_json(RICH)))))
    changed = put_at(plan_to_json(RICH), at, data.draw(json_values))
    path = write_signed(tmp_path / "plan.json", {"format": FORMAT, "plans": [changed]})
    try:
        (plan,) = read_plans(path)
    except PlanFileError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert plan.table().frozen
        assert plan.spec


def test_a_plan_that_comes_without_a_file_is_checked_too() -> None:
    with pytest.raises(PlanFileError, match=r"^created: 1 is not a text"):
        plan_from_json({**plan_to_json(make_plan()), "created": 1})
