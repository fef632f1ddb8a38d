"""The C++ table through Python: what it answers, what it refuses, and its bytes."""

from __future__ import annotations

import copy
import math
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch._core import BackendPlan, PlanEntry, batch_of, lookup_ns
from dispatch.bench import lookup as bench
from dispatch.errors import DispatchError, PlanError
from dispatch.samples import Box, skew_of

NAMES = ["fa3", "flashinfer_cudnn", "flashinfer_xqa"]
INT64_MAX = 2**63 - 1
Row = tuple[int, int, int, int, int, str, str]
ROWS: list[Row] = [
    (8, 1, 999, 1, 4095, "fa3", "num_splits=4"),
    (8, 1, 999, 4096, 65536, "flashinfer_xqa", ""),
    (8, 1000, 4096, 1, 65536, "flashinfer_cudnn", ""),
    (32, 1, 4096, 1, 65536, "fa3", ""),
]


def plan_of(rows: list[Row], buckets: tuple[int, ...] = (8, 16, 32)) -> BackendPlan:
    plan = BackendPlan(list(buckets), NAMES)
    for row in rows:
        plan.set(*row)
    return plan


def frozen(rows: list[Row], buckets: tuple[int, ...] = (8, 16, 32)) -> BackendPlan:
    plan = plan_of(rows, buckets)
    plan.freeze()
    return plan


def row_of(entry: PlanEntry) -> Row:
    bounds = (entry.mean_kv_min, entry.mean_kv_max, entry.skew_min, entry.skew_max)
    return (entry.bucket, *bounds, entry.backend, entry.tactic)


def scan(rows: list[Row], buckets: tuple[int, ...], query: tuple[int, int, int]) -> Row | None:
    """What a lookup means, in as few words as possible."""
    batch_size, mean_kv, max_kv = query
    bucket = min((b for b in buckets if 0 < batch_size <= b), default=None)
    for row in rows:
        if row[0] == bucket and row[1] <= mean_kv <= row[2] and row[3] <= max_kv <= row[4]:
            return row
    return None


def answer(plan: BackendPlan, query: tuple[int, int, int]) -> Row | None:
    entry = plan.lookup(*query)
    return None if entry is None else row_of(entry)


# --- lookup


def test_bounds_are_inclusive() -> None:
    plan = frozen([(8, 100, 200, 300, 400, "fa3", "")])
    corners = [(mean, longest) for mean in (100, 200) for longest in (300, 400)]
    assert all(plan.lookup(8, *corner) is not None for corner in corners)
    for mean, longest in [(99, 300), (201, 300), (100, 299), (100, 401)]:
        assert plan.lookup(8, mean, longest) is None


def test_a_batch_runs_in_the_smallest_bucket_that_holds_it() -> None:
    plan = frozen([(b, 0, 10, 0, 10, "fa3", f"b{b}") for b in (8, 16, 32)])
    tactics = {batch: entry.tactic for batch in range(1, 33) if (entry := plan.lookup(batch, 5, 5))}
    assert tactics == {batch: "b8" if batch <= 8 else "b16" if batch <= 16 else "b32" for batch in range(1, 33)}


def test_a_bucket_without_a_box_never_borrows_from_a_larger_one() -> None:
    assert frozen(ROWS).lookup(16, 100, 100) is None


@pytest.mark.parametrize("batch_size", [-(2**63), -1, 0, 33, 65537, INT64_MAX])
def test_a_batch_that_no_bucket_holds_is_a_miss(batch_size: int) -> None:
    assert frozen(ROWS).lookup(batch_size, 100, 100) is None


@pytest.mark.parametrize("length", [-1, -(2**63)])
def test_negative_lengths_are_a_miss(length: int) -> None:
    plan = frozen([(8, 0, INT64_MAX, 0, INT64_MAX, "fa3", "")])
    for lengths in [(length, 0), (0, length), (length, length)]:
        assert plan.lookup(8, *lengths) is None


def test_bounds_may_span_all_of_int64() -> None:
    plan = frozen([(8, 0, INT64_MAX, 5, INT64_MAX, "fa3", "")])
    assert plan.lookup(8, INT64_MAX, INT64_MAX) is not None
    assert plan.lookup(8, 0, 4) is None


def test_buckets_of_any_size_are_found() -> None:
    buckets = (1, 65535, 65536, 65537, 10**6, 2**40)  # around the largest batch that is indexed, and far above
    rows: list[Row] = [(b, 0, 9, 0, 9, "fa3", str(b)) for b in buckets]
    plan = frozen(rows, buckets)
    for batch_size in [b + d for b in buckets for d in (-1, 0, 1)]:
        assert answer(plan, (batch_size, 5, 5)) == scan(rows, buckets, (batch_size, 5, 5))


def test_an_empty_plan_always_misses() -> None:
    for plan in (BackendPlan([], []), BackendPlan([8], ["fa3"])):
        plan.freeze()
        assert plan.lookup(1, 1, 1) is None


def test_lookup_before_freeze_is_refused() -> None:
    plan = plan_of(ROWS)
    with pytest.raises(PlanError, match="before freeze"):
        plan.lookup(8, 100, 100)
    with pytest.raises(PlanError, match="before freeze"):
        lookup_ns(plan, [(8, 100, 100)], 1)


def test_lookup_returns_the_same_object_each_time() -> None:
    plan = frozen(ROWS)
    assert plan.lookup(8, 100, 100) is plan.lookup(7, 200, 200)


def test_an_entry_outlives_its_plan() -> None:
    entry = frozen(ROWS).lookup(32, 1, 1)
    assert entry is not None
    assert row_of(entry) == ROWS[3]


small = st.integers(0, 12)
boxes = st.tuples(st.sampled_from((2, 4)), small, st.integers(0, 4), small, st.integers(0, 4))


@settings(max_examples=150, deadline=None)
@given(st.lists(boxes, max_size=60))
def test_a_plan_refuses_exactly_the_overlaps_and_answers_as_a_scan_does(
    drawn: list[tuple[int, int, int, int, int]],
) -> None:
    buckets = (2, 4)
    plan = BackendPlan(list(buckets), NAMES)
    rows: list[Row] = []
    for i, (bucket, mean, width, longest, height) in enumerate(drawn):
        row: Row = (bucket, mean, mean + width, longest, longest + height, NAMES[i % 3], str(i))
        if any(
            bucket == r[0] and row[1] <= r[2] and r[1] <= row[2] and row[3] <= r[4] and r[3] <= row[4] for r in rows
        ):
            with pytest.raises(PlanError, match="overlaps"):
                plan.set(*row)
        else:
            plan.set(*row)
            rows.append(row)
    plan.freeze()
    assert [row_of(e) for e in plan.entries] == sorted(rows, key=lambda row: (row[0], row[1], row[3]))
    for query in [(batch, mean, longest) for batch in (2, 3) for mean in range(18) for longest in range(18)]:
        assert answer(plan, query) == scan(rows, buckets, query)
    again = BackendPlan.from_bytes(plan.to_bytes())
    assert (again.entries, again.digest()) == (plan.entries, plan.digest())


@pytest.mark.parametrize(("buckets", "boxes_per_bucket"), [(*shape,) for shape in bench.SHAPES] + [(1, 4096)])
def test_large_plans_answer_as_dict_and_bisect_do(buckets: int, boxes_per_bucket: int) -> None:
    rng = random.Random(buckets)
    plan = bench.random_plan(rng, buckets, boxes_per_bucket)
    twin = bench.DictBisect(plan)
    queries = bench.random_queries(rng, plan, 3000)
    for e in rng.sample(plan.entries, 50):  # a random length seldom falls on a bound
        sides = [(e.mean_kv_min, e.skew_min), (e.mean_kv_max, e.skew_max)]
        queries += [(e.bucket, mean + d, longest + d) for mean, longest in sides for d in (-1, 0, 1)]
    assert all(
        plan.lookup(*query) is twin.lookup(*query) or plan.lookup(*query) == twin.lookup(*query) for query in queries
    )
    found = sum(plan.lookup(*query) is not None for query in queries)
    assert 0 < found < len(queries)


# --- writing

REFUSED = [
    ((9, 1, 2, 1, 2, "fa3"), "bucket 9 is not one of"),
    ((8, 5000, 5001, 1, 2, "fa4"), "'fa4' is not one of the plan's names: fa3, flashinfer_cudnn"),
    ((8, 5000, 5001, 1, 2, ""), "is not one of the plan's names"),
    ((8, 5000, 5001, 1, 2, "fa3", "a\nb"), "printable"),
    ((8, -1, 5001, 1, 2, "fa3"), "negative"),
    ((8, 5000, 5001, -2, -1, "fa3"), "negative"),
    ((8, 5001, 5000, 1, 2, "fa3"), "unordered"),
    ((8, 5000, 5001, 2, 1, "fa3"), "unordered"),
    ((8, 1, 999, 1, 4095, "fa3"), "overlaps"),
    ((8, 999, 999, 4095, 4095, "fa3"), "overlaps"),  # one corner of one box
    ((8, 0, 10**6, 0, 10**6, "fa3"), "overlaps mean KV 1..999, skew 1..4095"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_a_refused_write_leaves_the_plan_unchanged(row: tuple[Any, ...], message: str) -> None:
    plan = plan_of(ROWS)
    before = (plan.digest(), plan.entries, plan.to_bytes())
    with pytest.raises(PlanError, match=message):
        plan.set(*row)
    assert (plan.digest(), plan.entries, plan.to_bytes()) == before
    plan.freeze()
    assert answer(plan, (8, 999, 4095)) == ROWS[0]


def test_boxes_that_only_touch_are_accepted() -> None:
    plan = plan_of(ROWS)
    plan.set(8, 4097, 5000, 1, 65536, "fa3")
    plan.set(8, 1, 4096, 65537, 65537, "fa3")
    assert len(plan.entries) == len(ROWS) + 2


def test_writing_after_freeze_is_refused_and_freezing_twice_is_not() -> None:
    plan = frozen(ROWS)
    before = plan.digest()
    plan.freeze()
    with pytest.raises(PlanError, match="frozen"):
        plan.set(16, 1, 2, 1, 2, "fa3")
    assert (plan.frozen, plan.digest(), plan.lookup(16, 1, 1)) == (True, before, None)


def test_lists_that_a_plan_returns_are_copies() -> None:
    plan = plan_of(ROWS)
    plan.buckets.append(64)
    plan.names.clear()
    plan.entries.clear()
    assert (plan.buckets, plan.names, len(plan.entries)) == ([8, 16, 32], NAMES, 4)


@pytest.mark.parametrize("buckets", [[0], [-8], [8, 8], [16, 8], [1, 2, 4, 3]])
def test_buckets_must_be_positive_and_ascending(buckets: list[int]) -> None:
    with pytest.raises(PlanError, match="bucket"):
        BackendPlan(buckets, NAMES)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([""], "not empty"),
        (["fa3", ""], "not empty"),
        (["fa3", "xqa", "fa3"], "'fa3' is listed twice"),
        (["fa3\n"], "printable"),
        (["fä3"], "printable"),
    ],
)
def test_names_must_be_unique_and_printable(names: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        BackendPlan([8], names)


def test_names_keep_their_order() -> None:
    assert BackendPlan([8], ["b", "a", "c"]).names == ["b", "a", "c"]


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: plan.lookup(8.0, 1, 1),
        lambda plan: plan.lookup("8", 1, 1),
        lambda plan: plan.lookup(2**63, 1, 1),
        lambda plan: plan.lookup(8, 1),
        lambda plan: plan.set(8, 1, 2, 1, 2),
        lambda plan: plan.set(8, 1, 2, 1, 2, 3),
        lambda plan: BackendPlan([8.5], ["fa3"]),
        lambda plan: BackendPlan.from_bytes("text"),
    ],
)
def test_a_wrong_argument_type_is_a_type_error(call: Callable[[BackendPlan], object]) -> None:
    with pytest.raises(TypeError):
        call(frozen(ROWS))


def test_plan_error_is_the_packages_own() -> None:
    with pytest.raises(DispatchError):
        BackendPlan([0], NAMES)


# --- entries


def test_entries_compare_hash_and_pickle_by_value() -> None:
    entry = PlanEntry(*ROWS[0])
    assert entry == pickle.loads(pickle.dumps(entry)) == copy.deepcopy(entry)
    assert hash(entry) == hash(PlanEntry(*ROWS[0]))
    assert entry != ROWS[0]
    changed = [9, 2, 998, 2, 4094, "xqa", "num_splits=5"]
    for field, value in enumerate(changed):
        assert entry != PlanEntry(*(value if i == field else old for i, old in enumerate(ROWS[0])))  # type: ignore[arg-type]


def test_an_entrys_repr_evaluates_to_it() -> None:
    entry = PlanEntry(8, 1, 2, 3, 4, "it's", tactic='say "4"')
    assert eval(repr(entry), {"PlanEntry": PlanEntry}) == entry


def test_entries_and_plans_are_read_only() -> None:
    plan = frozen(ROWS)
    for thing, name in [(plan.entries[0], "backend"), (plan, "buckets"), (plan, "frozen")]:
        with pytest.raises(AttributeError):
            setattr(thing, name, None)


# --- bytes


def forge(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with `new` at offset `at`, and a length and a checksum that vouch for it."""
    body = bytearray(data[:-8])
    body[at : at + len(new)] = new
    body[12:20] = struct.pack("<Q", len(body) + 8)
    state = 0xCBF29CE484222325
    for byte in body:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return bytes(body) + struct.pack("<Q", state)


COUNTS_AT = 20
BUCKETS_AT = COUNTS_AT + 3 * 4
NAMES_AT = BUCKETS_AT + 3 * 8
ENTRIES_AT = NAMES_AT + sum(4 + len(name) for name in NAMES)
FIRST_TACTIC_AT = ENTRIES_AT + 5 * 8 + 4 + len("fa3") + 4


def test_bytes_carry_everything() -> None:
    plan = frozen(ROWS)
    again = BackendPlan.from_bytes(plan.to_bytes())
    assert again.frozen
    assert (again.buckets, again.names, again.entries) == (plan.buckets, plan.names, plan.entries)
    assert again.to_bytes() == plan.to_bytes()
    assert again.digest() == plan.digest()


def test_the_format_is_what_other_builds_read() -> None:
    plan = BackendPlan([8], ["fa3"])
    plan.set(8, 1, 2, 3, 4, "fa3", "s=4")
    body = b"\x89DDPLAN\n" + struct.pack("<IQIII", 1, 101, 1, 1, 1) + struct.pack("<Q", 8)
    body += b"\3\0\0\0fa3" + struct.pack("<5q", 8, 1, 2, 3, 4) + b"\3\0\0\0fa3" + b"\3\0\0\0s=4"
    assert plan.to_bytes() == forge(body + bytes(8), 0, b"")
    assert plan.digest() == plan.to_bytes()[:-9:-1].hex()


@settings(max_examples=50, deadline=None)
@given(st.permutations(ROWS))
def test_bytes_and_digest_do_not_depend_on_the_order_of_writing(rows: list[Row]) -> None:
    assert plan_of(rows).to_bytes() == plan_of(ROWS).to_bytes()
    assert plan_of(rows).digest() == plan_of(ROWS).digest()


def test_every_field_changes_the_digest() -> None:
    changed: list[Row] = [
        (32, 1, 4096, 1, 65536, "fa3", "num_splits=1"),
        (32, 1, 4096, 1, 65536, "flashinfer_xqa", ""),
        (32, 1, 4096, 1, 65535, "fa3", ""),
        (32, 1, 4096, 2, 65536, "fa3", ""),
        (32, 1, 4095, 1, 65536, "fa3", ""),
        (32, 2, 4096, 1, 65536, "fa3", ""),
        (16, 1, 4096, 1, 65536, "fa3", ""),
    ]
    plans = [plan_of(ROWS), plan_of(ROWS[:3]), plan_of(ROWS, (8, 16, 32, 64)), BackendPlan([8, 16, 32], NAMES[:2])]
    plans += [plan_of([*ROWS[:3], row]) for row in changed]
    assert len({plan.digest() for plan in plans}) == len(plans)


def test_bytes_cut_anywhere_are_refused() -> None:
    data = plan_of(ROWS).to_bytes()
    for size in range(len(data)):
        with pytest.raises(PlanError, match="truncated"):
            BackendPlan.from_bytes(data[:size])
    with pytest.raises(PlanError, match=f"truncated: {len(data) - 1} bytes, the header says {len(data)}"):
        BackendPlan.from_bytes(data[:-1])


def test_trailing_bytes_are_refused() -> None:
    data = plan_of(ROWS).to_bytes()
    for extra in (b"\0", b"\n", data):
        with pytest.raises(PlanError, match="trailing bytes"):
            BackendPlan.from_bytes(data + extra)


def test_any_change_of_any_byte_is_refused() -> None:
    data = plan_of(ROWS).to_bytes()
    changed = bytearray(data)
    for at, old in enumerate(data):
        for new in range(256):
            if new == old:
                continue
            changed[at] = new
            with pytest.raises(PlanError):
                BackendPlan.from_bytes(bytes(changed))
        changed[at] = old
    assert BackendPlan.from_bytes(bytes(changed)).digest() == plan_of(ROWS).digest()


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"\x00", "not a plan: magic"),
        (8, struct.pack("<I", 2), "plan format 2, this build reads 1"),
        (COUNTS_AT, b"\xff" * 4, "4294967295 buckets in"),
        (COUNTS_AT + 4, b"\xff" * 4, "4294967295 names in"),
        (COUNTS_AT + 8, b"\xff" * 4, "4294967295 entries in"),
        (COUNTS_AT + 8, struct.pack("<I", 3), "after the last entry"),
        (COUNTS_AT + 8, struct.pack("<I", 5), "are left"),
        (NAMES_AT, b"\xff" * 4, "a field of 4294967295 bytes"),
        (BUCKETS_AT, struct.pack("<q", 16), "ascending"),
        (BUCKETS_AT, struct.pack("<q", -8), "positive"),
        (NAMES_AT + 4, b"fa4", "'fa3' is not one of the plan's names"),
        (NAMES_AT + 4, b"\xff\xfe3", "printable"),
        (ENTRIES_AT, struct.pack("<q", 9), "bucket 9"),
        (ENTRIES_AT + 8, struct.pack("<q", -1), "negative"),
        (ENTRIES_AT + 16, struct.pack("<q", 0), "unordered"),
        (ENTRIES_AT + 32, struct.pack("<q", 4096), "overlaps"),
        (FIRST_TACTIC_AT, b"\x80", "printable"),
    ],
)
def test_a_valid_checksum_does_not_excuse_bad_contents(at: int, new: bytes, message: str) -> None:
    data = forge(plan_of(ROWS).to_bytes(), at, new)
    with pytest.raises(PlanError, match=message):
        BackendPlan.from_bytes(data)


NUMBERS = st.sampled_from([0, 1, 2, 3, 8, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]) | st.integers(0, 2**64 - 1)
CHANGES = st.binary(max_size=9) | st.builds(
    lambda n, size: struct.pack("<Q", n)[:size], NUMBERS, st.sampled_from([1, 4, 8])
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(8, ENTRIES_AT + 120), CHANGES), min_size=1, max_size=3), st.integers(0, 3))
def test_any_contents_under_a_valid_checksum_are_a_plan_or_refused(changes: list[tuple[int, bytes]], cut: int) -> None:
    data = plan_of(ROWS).to_bytes()
    for at, new in changes:
        data = forge(data, at, new)
    if cut:
        data = forge(data[: -8 - cut] + bytes(8), 0, b"")
    try:
        plan = BackendPlan.from_bytes(data)
    except PlanError as error:
        assert len(str(error)) < 500
    else:
        assert plan.frozen
        assert BackendPlan.from_bytes(plan.to_bytes()).digest() == plan.digest()
        for row in plan.entries:
            assert plan.lookup(row.bucket, row.mean_kv_max, row.skew_max) == row


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    for content in (data, plan_of(ROWS).to_bytes()[:12] + data):
        with pytest.raises(PlanError):
            BackendPlan.from_bytes(content)


def test_a_frozen_plan_pickles_and_an_unfrozen_one_does_not() -> None:
    plan = frozen(ROWS)
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert (again.frozen, again.digest(), answer(again, (8, 1, 1))) == (True, plan.digest(), ROWS[0])
    with pytest.raises(PlanError, match="frozen"):
        pickle.dumps(plan_of(ROWS))


# --- bench


def test_the_bench_times_each_implementation_on_each_shape() -> None:
    timings = bench.run(rounds=1)
    assert {(t.implementation, t.buckets, t.boxes_per_bucket) for t in timings} == {
        (name, *shape) for name in ("cpp", "python", "dict_bisect") for shape in bench.SHAPES
    }
    assert all(t.ns > 0 for t in timings)
    assert [t.vs_dict for t in timings if t.implementation == "dict_bisect"] == [1.0] * 3


@pytest.mark.parametrize(("queries", "repeats"), [([], 1), ([(1, 1, 1)], 0)])
def test_timing_nothing_is_refused(queries: list[tuple[int, int, int]], repeats: int) -> None:
    with pytest.raises(ValueError, match="needs a query"):
        lookup_ns(frozen(ROWS), queries, repeats)


# --- what a plan is asked


@pytest.mark.parametrize(
    ("lengths", "batch"),
    [
        ([7], (1, 7, 1000, 7)),
        ([5, 5, 5], (3, 5, 1000, 5)),
        ([1, 2], (2, 2, 1000, 2)),  # a mean of 1.5 counts as 2
        ([9, 33], (2, 21, 1571, 33)),  # 33 / 21 = 1.5714
        ([1, 1, 1, 97], (4, 25, 3880, 97)),
        ([2**31 - 1] * 3, (3, 2**31 - 1, 1000, 2**31 - 1)),  # a sum above 32 bits
        ([], (0, 0, 0, 0)),
    ],
)
def test_a_batch_is_its_rows_their_mean_rounded_up_the_longest_over_it_and_the_longest(
    lengths: list[int], batch: tuple[int, int, int, int]
) -> None:
    assert batch_of(np.array(lengths, dtype=np.int32)) == batch


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=40))
def test_a_batch_lies_where_a_box_says_it_does(lengths: list[int]) -> None:
    rows, mean_kv, skew, longest = batch_of(np.array(lengths, dtype=np.int32))
    assert (rows, mean_kv, longest) == (len(lengths), math.ceil(sum(lengths) / len(lengths)), max(lengths))
    assert skew == skew_of(mean_kv, longest) >= 1000
    assert Box(8, mean_kv, mean_kv, skew, skew, "fa3").holds(mean_kv, longest)
    assert not Box(8, mean_kv, mean_kv, skew + 1, skew + 9, "fa3").holds(mean_kv, longest)


@pytest.mark.parametrize(
    "lengths",
    [np.zeros(3, np.int64), np.zeros(3, np.float32), np.zeros((3, 1), np.int32), np.zeros(6, np.int32)[::2]],
    ids=["int64", "float32", "two dimensions", "with gaps"],
)
def test_lengths_of_another_kind_are_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match="contiguous 32-bit integers in one dimension"):
        batch_of(lengths)
