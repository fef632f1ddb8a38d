"""The store: a hit is exactly the plan of the key, anything else is a miss, and nothing that was stored is lost."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dispatch.atomic
from dispatch.key import digest
from dispatch.plan import StoredPlan
from dispatch.planfile import plan_to_json, write_plans
from dispatch.samples import Samples
from dispatch.samplesfile import samples_path, write_samples
from dispatch.samplesjson import samples_to_json
from dispatch.store import Store
from tests.make import make_plan, make_samples, put_at

SAMPLES = make_samples(rounds=2)
PLAN = make_plan(SAMPLES)
KEY = dict(PLAN.key)
OTHER_KEY = {**KEY, "max_seq_len": 2048}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages of the warnings so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def is_same(a: Samples | None, b: Samples) -> bool:
    return a is not None and samples_to_json(a) == samples_to_json(b)


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


# --- hit and miss


def test_an_empty_store_is_a_miss_without_a_word(store: Store, warnings: Callable[[], list[str]]) -> None:
    assert (store.load(KEY), store.load_samples(KEY), store.newest()) == (None, None, None)
    assert warnings() == []
    assert not store.folder.exists()


def test_what_was_saved_is_found_under_its_key(store: Store, warnings: Callable[[], list[str]]) -> None:
    path = store.save(PLAN, SAMPLES)
    assert path == store.path(KEY)
    assert store.load(KEY) == PLAN
    assert is_same(store.load_samples(KEY), SAMPLES)
    assert warnings() == []


def test_another_process_finds_it_with_a_key_of_equal_content(store: Store, tmp_path: Path) -> None:
    store.save(PLAN, SAMPLES)
    assert Store(str(tmp_path / "cache")).load(json.loads(json.dumps(dict(reversed(KEY.items()))))) == PLAN


def test_another_key_is_a_miss_and_leaves_the_plan_alone(store: Store, warnings: Callable[[], list[str]]) -> None:
    store.save(PLAN, SAMPLES)
    assert (store.load(OTHER_KEY), store.load_samples(OTHER_KEY)) == (None, None)
    assert store.load(KEY) == PLAN
    assert warnings() == []


def test_plans_of_two_keys_lie_side_by_side(store: Store) -> None:
    other = replace(PLAN, key=OTHER_KEY)
    store.save(PLAN, SAMPLES)
    store.save(other, replace(SAMPLES, key=OTHER_KEY))
    assert (store.load(KEY), store.load(OTHER_KEY)) == (PLAN, other)
    assert is_same(store.load_samples(KEY), SAMPLES)


def test_a_plan_saved_again_replaces_the_first(store: Store) -> None:
    later = replace(PLAN, seconds=99.0)
    store.save(PLAN, SAMPLES)
    store.save(later, SAMPLES)
    assert store.load(KEY) == later


def test_samples_of_an_earlier_plan_do_not_linger_beside_one_without(store: Store) -> None:
    store.save(PLAN, SAMPLES)
    store.save(PLAN, None)
    assert store.load(KEY) == PLAN
    assert store.load_samples(KEY) is None
    assert [path.name for path in store.folder.iterdir()] == [store.path(KEY).name]


def test_plan_and_samples_are_all_that_saving_leaves(store: Store) -> None:
    path = store.save(PLAN, SAMPLES)
    assert set(store.folder.iterdir()) == {path, samples_path(path)}


def test_the_platforms_cache_folder_is_used_where_none_is_named() -> None:
    assert Store().folder.parts[-2:] == ("decode-dispatch", "plans")


# --- what cannot be used


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def plan_of_another_version(path: Path) -> None:
    body = {"format": 1, "plans": [plan_to_json(PLAN)]}
    path.write_text(json.dumps({**body, "checksum": digest(body)}))


def plan_with_a_damaged_value(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"seconds": 1.5', b'"seconds": 2.5'))


def plan_of_another_key(path: Path) -> None:
    write_plans(path, [replace(PLAN, key=OTHER_KEY)])


def no_plan(path: Path) -> None:
    write_plans(path, [])


def samples_of_another_version(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"format": 1, "runs": []}'))


def samples_of_another_key(path: Path) -> None:
    write_samples(path, [replace(SAMPLES, key=OTHER_KEY)])


def no_samples(path: Path) -> None:
    write_samples(path, [])


BAD_PLANS = [
    (empty, "not JSON"),
    (truncated, "not JSON"),
    (binary, "not JSON"),
    (plan_of_another_version, "format: 1; this version reads 2"),
    (plan_with_a_damaged_value, "checksum"),
    (plan_of_another_key, "max_seq_len: the plan has 2048, here it is 4096"),
    (no_plan, "nothing is in it"),
]
BAD_SAMPLES = [
    (empty, "not JSON"),
    (truncated, "ends too early"),
    (binary, "not JSON"),
    (samples_of_another_version, "format: 1; this version reads 3"),
    (samples_of_another_key, "max_seq_len: "),
    (no_samples, "nothing is in it"),
]


@pytest.mark.parametrize(("spoil", "words"), BAD_PLANS)
def test_a_plan_that_cannot_be_used_is_a_miss_with_one_warning(
    store: Store, warnings: Callable[[], list[str]], spoil: Callable[[Path], None], words: str
) -> None:
    path = store.save(PLAN, SAMPLES)
    spoil(path)
    assert store.load(KEY) is None
    (message,) = warnings()
    assert [word for word in ("set aside", str(path), words) if word not in message] == []


@pytest.mark.parametrize(("spoil", "words"), BAD_SAMPLES)
def test_samples_that_cannot_be_used_are_a_miss_with_one_warning(
    store: Store, warnings: Callable[[], list[str]], spoil: Callable[[Path], None], words: str
) -> None:
    path = samples_path(store.save(PLAN, SAMPLES))
    spoil(path)
    assert store.load_samples(KEY) is None
    (message,) = warnings()
    assert [word for word in ("set aside", str(path), words) if word not in message] == []


@pytest.mark.parametrize("spoil", [spoil for spoil, _ in BAD_PLANS])
def test_a_bad_plan_is_kept_under_another_name(store: Store, spoil: Callable[[Path], None]) -> None:
    path = store.save(PLAN, None)
    spoil(path)
    content = path.read_bytes()
    store.load(KEY)
    assert not path.exists()
    assert contents(store.folder) == [content]


@pytest.mark.parametrize("spoil", [spoil for spoil, _ in BAD_SAMPLES])
def test_bad_samples_are_kept_under_another_name_and_the_plan_stays(
    store: Store, spoil: Callable[[Path], None]
) -> None:
    path = samples_path(store.save(PLAN, SAMPLES))
    spoil(path)
    content = path.read_bytes()
    store.load_samples(KEY)
    assert not path.exists()
    assert content in contents(store.folder)
    assert store.load(KEY) == PLAN


def test_what_was_set_aside_is_not_met_again(store: Store, warnings: Callable[[], list[str]]) -> None:
    truncated(store.save(PLAN, None))
    assert [store.load(KEY), store.load(KEY), store.newest()] == [None, None, None]
    assert len(warnings()) == 1


def test_each_bad_plan_is_set_aside_under_a_name_of_its_own(store: Store) -> None:
    for content in (b"first", b"second"):
        store.save(PLAN, None).write_bytes(content)
        store.load(KEY)
    assert contents(store.folder) == [b"first", b"second"]


def test_a_new_plan_takes_the_place_of_a_bad_one(store: Store) -> None:
    truncated(store.save(PLAN, SAMPLES))
    store.load(KEY)
    store.save(PLAN, SAMPLES)
    assert store.load(KEY) == PLAN


ELSEWHERE: list[tuple[tuple[str, ...], object, str]] = [
    (("device", "name"), "another GPU", "device.name: the plan has 'another GPU', here it is 'a CPU'"),
    (("device", "torch"), "2.7.0", "device.torch: the plan has '2.7.0'"),
    (("spec", "num_kv_heads"), 4, "spec.num_kv_heads: the plan has 4"),
    (("spec", "sliding_window"), 128, "spec.sliding_window: the plan has 128"),
    (("backends", "torch_chunked"), "2.7.0", "backends.torch_chunked: the plan has '2.7.0'"),
    (("backends", "a_new_one"), "1", "backends.a_new_one: the plan has '1', here it is 'nothing'"),
    (("priority",), ["torch_chunked", "torch_sdpa"], "priority: "),
    (("rule_version",), 2, "rule_version: the plan has 2, here it is 4"),
    (("threshold",), 0.03 + 1e-9, "threshold: "),
    (("exclude",), ["torch_chunked"], "exclude: "),
    # equal to Python, and yet another key: JSON tells true, 1 and 1.0 apart
    (("spec", "num_kv_heads"), 2.0, "spec.num_kv_heads: the plan has 2.0, here it is 2"),
    (("engine", "finite_kv"), 0, "engine.finite_kv: the plan has 0, here it is False"),
    (("device", "capability"), [0, False], "the same values in another form"),
    (("device", "x"), {"y": {}}, "device.x.y: the plan has {}, here it is 'nothing'"),
]


@pytest.mark.parametrize(("at", "value", "words"), ELSEWHERE, ids=lambda v: str(v)[:30])
def test_a_plan_for_something_else_is_a_miss_wherever_it_lies_and_the_warning_names_the_field(
    store: Store, warnings: Callable[[], list[str]], at: tuple[str, ...], value: object, words: str
) -> None:
    path = store.save(PLAN, SAMPLES)
    key = put_at(KEY, at, value)
    if at[0] == "spec" and isinstance(value, float):  # what no spec can have is refused when it is read
        words = "spec: num_kv_heads=2.0: must be a whole number above 0"
    body = {"format": 2, "plans": [{**plan_to_json(PLAN), "key": key}]}
    path.write_text(json.dumps({**body, "checksum": digest(body)}))
    assert store.load(KEY) is None
    (message,) = warnings()
    assert words in message
    assert not path.exists()


def test_a_key_that_is_nested_without_end_or_very_long_is_a_miss_in_one_short_line(
    store: Store, warnings: Callable[[], list[str]]
) -> None:
    path = store.save(PLAN, None)
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"a": deep}
    body = {"format": 2, "plans": [{**plan_to_json(PLAN), "key": {**KEY, "line\nend": 1, "max_seq_len": "x" * 10_000}}]}
    body["plans"][0]["key"]["deep"] = deep
    path.write_text(json.dumps({**body, "checksum": digest(body)}))
    assert store.load(KEY) is None
    (message,) = warnings()
    assert len(message) < len(str(path)) + 200
    assert "\n" not in message


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_plan_that_is_damaged_anywhere_is_a_miss_or_the_same_plan(tmp_path: Path, data: st.DataObject) -> None:
    store = Store(tmp_path)
    path = store.save(PLAN, SAMPLES)
    if data.draw(st.booleans()):
        path = samples_path(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 64))] = data.draw(st.binary(max_size=64))
    path.write_bytes(content)
    assert store.load(KEY) in (None, PLAN)
    samples = store.load_samples(KEY)
    assert samples is None or is_same(samples, SAMPLES)


# --- a folder that does not let us


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def test_a_file_in_place_of_the_folder_is_a_miss(store: Store, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert (store.load(KEY), store.load_samples(KEY), store.newest()) == (None, None, None)


def test_a_folder_that_may_not_be_searched_is_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(PLAN, SAMPLES)
    monkeypatch.setattr(os, "stat", refuse)
    found = store.load(KEY), store.load_samples(KEY)
    monkeypatch.undo()
    assert found == (None, None)


def test_a_file_that_may_not_be_opened_is_a_miss_with_one_warning(
    store: Store, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(PLAN, SAMPLES)
    monkeypatch.setattr(os, "open", refuse)
    assert store.load(KEY) is None
    assert store.load_samples(KEY) is None
    assert ["Permission denied" in message for message in warnings()] == [True, True]  # one for each file


def test_a_bad_plan_that_may_not_be_renamed_is_a_miss_with_one_warning(
    store: Store, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(PLAN, None)
    truncated(path)
    monkeypatch.setattr(Path, "replace", refuse)
    assert store.load(KEY) is None
    (message,) = warnings()
    assert "cannot be set aside (Permission denied)" in message
    assert path.exists()


def test_a_folder_in_place_of_the_plan_is_a_miss(store: Store, warnings: Callable[[], list[str]]) -> None:
    store.path(KEY).mkdir(parents=True)
    assert store.load(KEY) is None
    assert len(warnings()) == 1


# --- saving


@pytest.mark.parametrize("broken", ["replace", "fsync", "chmod"])
def test_a_write_that_fails_leaves_the_old_plan_and_no_remains(
    store: Store, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    store.save(PLAN, SAMPLES)
    before = contents(store.folder)
    monkeypatch.setattr(dispatch.atomic.os, broken, refuse)
    with pytest.raises(OSError, match="Permission denied"):
        store.save(replace(PLAN, seconds=99.0), replace(SAMPLES, priority=("torch_chunked",)))
    monkeypatch.undo()
    assert contents(store.folder) == before
    assert store.load(KEY) == PLAN


def test_an_interrupted_write_leaves_the_old_plan_and_no_remains(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    store.save(PLAN, SAMPLES)
    before = contents(store.folder)
    monkeypatch.setattr(dispatch.atomic.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(replace(PLAN, seconds=99.0), SAMPLES)
    assert contents(store.folder) == before


def test_a_plan_appears_under_its_name_only_when_it_is_complete(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    complete, replace_file = [], os.replace

    def look(source: str, target: Path) -> None:
        complete.append((target.exists(), Path(source).read_bytes()))
        replace_file(source, target)

    monkeypatch.setattr(dispatch.atomic.os, "replace", look)
    path = store.save(PLAN, None)
    assert complete == [(False, path.read_bytes())]


def test_four_writers_at_once_leave_a_whole_plan_at_every_moment(
    store: Store, warnings: Callable[[], list[str]]
) -> None:
    plans = [replace(PLAN, seconds=float(n)) for n in range(4)]
    path = store.save(PLAN, SAMPLES)
    with ThreadPoolExecutor(4) as threads:
        saving = [threads.submit(store.save, plan, SAMPLES) for plan in plans * 4]
        seen = [store.load(KEY) for _ in range(20)]
    assert [saved.result() for saved in saving] == [path] * 16
    assert [plan for plan in [*seen, store.load(KEY)] if plan not in [PLAN, *plans]] == []
    assert is_same(store.load_samples(KEY), SAMPLES)
    assert set(store.folder.iterdir()) == {path, samples_path(path)}
    assert warnings() == []


def test_samples_are_there_before_their_plan(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    targets, replace_file = [], os.replace

    def look(source: str, target: Path) -> None:
        targets.append(target)
        replace_file(source, target)

    monkeypatch.setattr(dispatch.atomic.os, "replace", look)
    path = store.save(PLAN, SAMPLES)
    assert targets == [samples_path(path), path]


def test_saving_where_no_folder_can_be_made_says_so(store: Store, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match="Not a directory"):
        store.save(PLAN, None)


# --- the lock and the newest


def test_the_lock_of_a_key_keeps_others_out_and_lets_other_keys_in(store: Store) -> None:
    ours, theirs, other = store.lock(KEY), store.lock(KEY), store.lock(OTHER_KEY)
    with ours.acquire(timeout=0), other.acquire(timeout=0), pytest.raises(TimeoutError):
        theirs.acquire(timeout=0)
    with theirs.acquire(timeout=0):
        assert theirs.is_locked


def test_the_lock_makes_the_folder_and_is_no_plan(store: Store, warnings: Callable[[], list[str]]) -> None:
    with store.lock(KEY):
        assert store.folder.is_dir()
        assert (store.load(KEY), store.newest()) == (None, None)
    assert warnings() == []


def test_the_newest_is_the_plan_written_last(store: Store) -> None:
    paths = sorted(store.save(replace(PLAN, key={**KEY, "capacity": n}), SAMPLES) for n in (1, 2, 3))
    for path, second in zip(paths, (10, 30, 20), strict=True):
        os.utime(path, (second, second))
    (store.folder / ".hidden.json").write_text("later than all")
    assert store.newest() == paths[1]


def test_a_stored_plan_still_makes_its_table(store: Store) -> None:
    store.save(PLAN, SAMPLES)
    plan = store.load(KEY)
    assert isinstance(plan, StoredPlan)
    assert plan.table().to_bytes() == PLAN.table().to_bytes()
