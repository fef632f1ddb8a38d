"""A plan beside its rivals on snapshots of traffic: speeds from times, how they are taken, and the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import dispatch.bench.bandwidth
import dispatch.bench.compare_run
from dispatch.backends import registry
from dispatch.bench.bandwidth import read_bytes_per_s
from dispatch.bench.compare import BEST, BEST_FIXED, EQUAL_PLAN, PLAN, Snapshot, Speed, median_interval
from dispatch.bench.compare_bench import CompareBench
from dispatch.bench.compare_run import NO_SAMPLES, Sizes, run_comparison
from dispatch.bench.compare_summary import Below, summarise
from dispatch.bench.equal_plan import equal_choices
from dispatch.bench.trace import Trace
from dispatch.bench.traffic import Traffic
from dispatch.cli import main
from dispatch.cli.compare_view import comparison_view
from dispatch.decision import Reason
from dispatch.device import current_device
from dispatch.eligible import eligible
from dispatch.errors import MeasureError
from dispatch.gate_inputs import row_sets
from dispatch.plan import DecidedBox, Excluded, StoredPlan
from dispatch.planfile import read_plans, write_plans
from dispatch.request import TuneRequest
from dispatch.samples import TWIN, Box, Cell, skew_of
from dispatch.spec import AttentionSpec
from tests.fakes import ScriptedTimer, backend, device, registry_of, spec_of
from tests.make import TINY, make_samples

ROUNDS = 9
SAME = Speed(1.0, 1.0, 1.0)
MAX_KV = 64


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No warm-up, and a short look at the memory."""
    monkeypatch.setattr("dispatch.bench.harness.WARM_UP_S", 0.0)
    monkeypatch.setattr(dispatch.bench.bandwidth, "SECONDS", 0.0)
    monkeypatch.setitem(dispatch.bench.bandwidth.BYTES, "cpu", 1 << 20)


# --- a snapshot


def snapshot(times, planned=None, equal=None, **changes):
    """`times`: {candidate: microseconds, of all rounds or of each}, the default first; its twin takes as long."""
    default = next(iter(times))
    times = {default: times[default], TWIN: times.get(TWIN, times[default]), **times}
    step_us = np.array([np.broadcast_to(np.asarray(us, dtype=float), ROUNDS) for us in times.values()])
    fields = {"trace": "chat", "bucket": 8, "batch": 8, "mean_kv": 1000, "max_kv": 3000, "kv_bytes": 1000}
    return Snapshot(**{**fields, **changes}, candidates=tuple(times), step_us=step_us, planned=planned, equal=equal)


def test_the_defaults_time_is_the_mean_of_its_two_runs():
    it = snapshot({"fa3": 90.0, TWIN: 110.0, "cudnn": 80.0}, planned="cudnn")
    assert it.speed(PLAN, "fa3").speed == pytest.approx(100 / 80)
    assert it.median_us("fa3") == pytest.approx(100)


def test_times_are_compared_within_a_round():
    default = np.linspace(100, 900, ROUNDS)  # drift
    it = snapshot({"fa3": default, "cudnn": default / 1.25}, planned="cudnn")
    assert it.speed(PLAN, "fa3") == Speed(*(pytest.approx(1.25) for _ in range(3)))


@pytest.mark.parametrize("planned", [None, "fa3", "xqa[max_kv=64]"])
def test_what_the_default_serves_counts_as_one_exactly(planned):
    it = snapshot({"fa3": 90.0, TWIN: 110.0, "xqa[max_kv=64]": np.nan}, planned=planned)
    assert it.served == "fa3"
    assert it.speed(PLAN, "fa3") == SAME


def test_the_noise_is_the_defaults_second_run_beside_its_first():
    assert snapshot({"fa3": 90.0, TWIN: 100.0}).noise.speed == pytest.approx(0.9)


def test_a_round_in_which_one_run_of_the_default_is_missing_counts_with_the_other():
    first = [np.nan, *[100.0] * (ROUNDS - 1)]
    assert snapshot({"fa3": first, TWIN: 100.0, "b": 50.0}, planned="b").speed(PLAN, "fa3").low == pytest.approx(2.0)


def test_a_candidate_that_was_dropped_counts_with_the_rounds_that_it_has():
    two = [210.0, 230.0, *[np.nan] * (ROUNDS - 2)]
    speed = snapshot({"fa3": 100.0, "xqa": two}).speed(PLAN, "xqa")
    assert (speed.low, speed.high) == (pytest.approx(2.1), pytest.approx(2.3))


def test_the_best_is_found_on_even_rounds_and_timed_on_odd_ones():
    even = np.arange(ROUNDS) % 2 == 0
    it = snapshot({"fa3": 100.0, "lucky": np.where(even, 50.0, 200.0)}, planned="fa3")
    assert it.candidate_of(BEST) == "lucky"
    assert it.speed(PLAN, BEST).speed == pytest.approx(2.0)
    assert it.speed(BEST, "fa3").speed == pytest.approx(0.5)


def test_odd_rounds_have_no_say_in_which_is_the_best():
    # a median of 120 over the even rounds, of 80 over all
    times = [80.0, 10.0, 80.0, 10.0, 120.0, 10.0, 120.0, 10.0, 120.0]
    assert snapshot({"fa3": 100.0, "b": times}).candidate_of(BEST) == "fa3"


def test_the_best_may_have_a_tactic_and_the_best_backend_has_none():
    it = snapshot({"fa3": 100.0, "fa3[num_splits=8]": 70.0, "xqa": 80.0})
    assert (it.candidate_of(BEST), it.candidate_of(BEST_FIXED)) == ("fa3[num_splits=8]", "xqa")
    assert it.fixed == ("fa3", "xqa")


def test_the_equal_length_plan_is_the_candidate_that_it_names_and_none_where_that_has_no_time():
    times = {"fa3": 100.0, "cudnn": 120.0, "xqa": np.nan}
    assert snapshot(times, equal="cudnn").speed(PLAN, EQUAL_PLAN).speed == pytest.approx(1.2)
    assert snapshot(times, equal="xqa").candidate_of(EQUAL_PLAN) is None
    assert snapshot(times, equal="xqa").speed(PLAN, EQUAL_PLAN) is None
    assert snapshot(times).speed(PLAN, EQUAL_PLAN) is None


# Heads of n tosses. 9: at most 1 with 10/512 = 2.0%, at most 2 with 46/512 = 9.0%. 6: none 1.6%, at most 1 11%.
# 5: none 3.1%. 17: at most 4 with 2.45%, at most 5 with 7.2%.
@pytest.mark.parametrize(("n", "cut"), [(1, 0), (5, 0), (6, 0), (9, 1), (17, 4)])
def test_an_interval_misses_the_median_at_each_end_with_a_fortieth_at_most(n, cut):
    values = np.random.default_rng(n).permutation(n).astype(float)
    assert median_interval(values) == (cut, n - 1 - cut)


# --- many of them


def test_speeds_over_snapshots_are_a_geometric_mean_and_the_worst():
    snapshots = [
        snapshot({"fa3": 100.0, "b": 50.0}, planned="b"),
        snapshot({"fa3": 100.0, "b": 200.0}, planned="b"),
        snapshot({"fa3": 100.0, "b": np.nan}, planned="b"),  # the default serves
    ]
    found = summarise(snapshots, 1, 1e9)
    assert found.snapshots == 3
    over = found.plan_over["fa3"]
    assert (over.mean, over.worst, over.snapshots) == (pytest.approx(1.0), pytest.approx(0.5), 3)
    assert found.plan_over["b"].snapshots == 2  # it is not compared with what has no time
    assert found.over_default["b"].worst == pytest.approx(0.5)
    assert EQUAL_PLAN not in found.plan_over
    assert found.served == {"b": 2, "fa3": 1}


def test_snapshots_below_a_speed_are_counted_with_those_that_surely_and_possibly_are():
    speeds = [Speed(0.98, 0.97, 0.985), Speed(0.985, 0.98, 1.0), Speed(1.0, 0.98, 1.01), SAME, None]
    assert Below.of(0.99, speeds) == Below(0.99, 0.5, 0.25, 0.75)
    slow, fast = snapshot({"fa3": 98.0, "b": 100.0}, planned="b"), snapshot({"fa3": 100.0, "b": 90.0}, planned="b")
    assert [(b.limit, b.share) for b in summarise([slow, fast], 1, 1e9).below] == [(0.99, 0.5), (0.97, 0.0)]


def test_the_floor_is_what_reading_all_layers_takes_over_what_the_plan_takes():
    # 2 layers of 1000 bytes at 1e8 bytes/s are 20 us, of 80
    assert summarise([snapshot({"fa3": 80.0})], 2, 1e8).floor_share == pytest.approx(0.25)


def test_large_snapshots_are_compared_with_the_best_backend_of_each():
    times = {"fa3": 100.0, "b": 90.0, "c[split=2]": 50.0}
    snapshots = [snapshot(times, planned="fa3", kv_bytes=size) for size in (200_000_000, 200_000_001)]
    large = summarise(snapshots, 1, 1e9).large
    assert (large.mean, large.snapshots) == (pytest.approx(0.9), 1)
    assert summarise(snapshots[:1], 1, 1e9).large is None


def test_tuning_on_equal_lengths_takes_one_candidate_a_bucket_by_its_mean_over_the_grid():
    # at equal lengths, layers of 10 and 40 us against 8 and 48: means 25 and 28. In the ragged cells, xqa would win.
    cells = (Cell(128, 128, "equal"), Cell(1024, 1024, "equal"), Cell(1024, 2900, "lognormal-0.7"))
    times = {"torch_sdpa": (30, 40, 90), "torch_chunked": (8, 48, 90), "torch_chunked[max_kv=2000]": (1, 1, 1)}
    samples = make_samples(times, cells=cells, buckets=(8,))
    assert equal_choices(samples) == {8: "torch_chunked"}
    slow = make_samples({**times, "torch_chunked": (8, 90, 1)}, cells=cells, buckets=(8,))
    assert equal_choices(slow) == {8: "torch_sdpa"}
    bucket = samples.buckets[0]
    bucket.times[:, bucket.candidates.index("torch_chunked"), 1] = np.nan
    assert equal_choices(samples) == {8: "torch_sdpa"}
    bucket.times[:, 0, 0] = np.nan  # no candidate is left that was timed at both lengths
    assert equal_choices(samples) == {}


# --- how it is timed


def bench_of(timer, *backends, lengths, bucket=4):
    cells = Traffic("chat", bucket, np.array(lengths), 1.0).cells(ROUNDS)
    return CompareBench(
        spec_of(), {bucket: cells}, {"fake": 0}, MAX_KV, registry_of(*backends), timer, device(), 1 << 30
    )


def compare(bench, *names, bucket=4):
    return bench.compare(bucket, (names[0], TWIN, *names[1:]), lambda done: None)


def steady(**layer_us):
    return ScriptedTimer(lambda name, lengths, sample: layer_us.get(name, 10.0))


def test_every_candidate_is_timed_on_every_snapshot_of_every_round_in_shuffled_order():
    timer = steady()
    bench = bench_of(timer, backend("a"), backend("b"), lengths=[[5, 6, 7, 8], [10, 20, 30, 40]])
    step_us, failed = compare(bench, "a", "b")
    assert (step_us.shape, failed) == ((3, 2, ROUNDS), ())
    assert (step_us == 20.0).all()  # two layers
    steps = [timer.order[i : i + 3] for i in range(0, len(timer.order), 3)]
    assert [step[0][1] for step in steps] == [(5, 6, 7, 8), (10, 20, 30, 40)] * ROUNDS
    assert all(len({lengths for _, lengths in step}) == 1 for step in steps)
    assert len({tuple(name for name, _ in step) for step in steps}) == 3


def test_pages_come_in_a_new_order_in_every_round(monkeypatch):
    bench = bench_of(steady(), backend("a"), lengths=[[5, 6, 7, 8]])
    shuffles = []
    monkeypatch.setattr(bench.pool, "shuffle", lambda: shuffles.append(1))
    compare(bench, "a")
    assert len(shuffles) == ROUNDS


def test_a_batch_below_its_bucket_is_padded_with_rows_of_one_token():
    timer = steady()
    compare(bench_of(timer, backend("a"), lengths=[[30, 40]]), "a")
    assert {lengths for _, lengths in timer.order} == {(30, 40, 1, 1)}


def test_plan_on_the_host_counts_in_full():
    timer = ScriptedTimer(lambda name, lengths, sample: 10.0, plan_us=lambda name: 7.0)
    step_us, _ = compare(bench_of(timer, backend("a"), lengths=[[5, 6, 7, 8]]), "a")
    assert (step_us == 27.0).all()


def test_what_takes_over_twice_the_defaults_time_in_two_rounds_is_not_timed_there_any_more():
    timer = ScriptedTimer(lambda name, lengths, sample: {"b": 20.5, "c": 19.5}.get(name, 10.0))
    names = ("a", "b", "c")
    step_us, failed = compare(bench_of(timer, *map(backend, names), lengths=[[5, 6, 7, 8]]), *names)
    assert np.isfinite(step_us[:, 0]).sum(axis=1).tolist() == [ROUNDS, ROUNDS, 2, ROUNDS]
    assert failed == ()


def test_everything_is_captured_with_the_longest_request_that_it_is_built_for():
    seen = []

    class Timer(ScriptedTimer):
        def record(self, impl, inputs, chain):
            seen.append((impl.max_kv, tuple(inputs.lengths_host.tolist())))
            return super().record(impl, inputs, chain)

    timer = Timer(lambda name, lengths, sample: 10.0)
    wide = backend("a", tactics=("", "max_kv=20"))
    step_us, _ = compare(bench_of(timer, wide, lengths=[[5, 6, 7, 8], [5, 6, 7, 21]]), "a", "a[max_kv=20]")
    assert seen == [(limit, row_sets(spec_of(), 4, limit)[0]) for limit in (MAX_KV, MAX_KV, 20)]
    assert np.isfinite(step_us[2]).all(axis=1).tolist() == [True, False]  # not beyond its table


def test_a_candidate_that_fails_loses_only_itself():
    def layer_us(name, lengths, sample):
        if name == "c" and sum(lengths) > 50:
            raise RuntimeError("no kernel")
        return 10.0

    broken = backend("b", build_error=RuntimeError("odd"))
    bench = bench_of(ScriptedTimer(layer_us), backend("a"), broken, backend("c"), lengths=[[5] * 4, [20] * 4])
    step_us, failed = compare(bench, "a", "b", "c")
    assert np.isfinite(step_us).all(axis=2).tolist() == [[True, True], [True, True], [False, False], [True, False]]
    assert failed == ("batch 4: b: RuntimeError: odd", "batch 4, chat, mean KV 20: c: RuntimeError: no kernel")


def test_without_the_default_nothing_is_compared():
    bench = bench_of(steady(), backend("a", build_error=RuntimeError("odd")), lengths=[[5] * 4])
    with pytest.raises(MeasureError, match=r"^the default a at batch 4: RuntimeError: odd$"):
        compare(bench, "a")


# --- a run


def trace_of(length):
    return Trace(np.array([length - 1]), np.array([1]), "digest")


def plan_of(backends, boxes=(), buckets=(1, 4), capacity=10_000, excluded=()):
    """A plan for this machine that names candidates by box."""
    here = current_device("cpu")
    request = TuneRequest(spec_of(), buckets, MAX_KV, capacity)
    return StoredPlan(
        key=request.key(here, backends, backends.names()[0]),
        created="2025-06-01T12:00:00+00:00",
        default=backends.names()[0],
        buckets=buckets,
        boxes=tuple(DecidedBox(box, Reason.FASTEST, 1.2) for box in boxes),
        excluded=tuple(excluded),
    )


@pytest.fixture
def run(monkeypatch):
    """Compare with a scripted timer; the comparison."""
    timer = steady(b=8.0)
    monkeypatch.setattr(dispatch.bench.compare_run, "timer_for", lambda device: timer)

    def go(plan, backends, traces, batches=(4,), snapshots=2, samples=None):
        sizes = Sizes(tuple(batches), snapshots, ROUNDS)
        return run_comparison(Path("p.json"), plan, samples, traces, sizes, backends, lambda what: None)

    go.timer = timer
    return go


def test_a_snapshot_is_served_as_the_plans_table_says(run):
    backends = registry_of(backend("a"), backend("b"))
    plan = plan_of(backends, [Box(4, 1, 20, 1000, 1500, "b")])
    compared = run(plan, backends, {"short": trace_of(11), "long": trace_of(21)}, batches=(1, 3, 4))
    rows = [(row.trace, row.batch, [s.served for s in row.snapshots]) for row in compared.rows]
    assert rows == [
        ("short", 1, ["a", "a"]),  # no box of bucket 1
        ("short", 3, ["b", "b"]),
        ("short", 4, ["b", "b"]),
        ("long", 1, ["a", "a"]),
        ("long", 3, ["a", "a"]),  # outside the box
        ("long", 4, ["a", "a"]),
    ]
    assert compared.summary(compared.rows[1].snapshots).plan_over["a"].mean == pytest.approx(1.25)
    assert compared.summary(compared.rows[4].snapshots).plan_over["a"].mean == 1.0
    assert {lengths for _, lengths in run.timer.order} == {
        *((n,) for n in (11, 21)),
        *((n, n, n, m) for n in (11, 21) for m in (n, 1)),
    }


def test_every_snapshot_has_the_times_of_its_own_lengths(run):
    run.timer.layer_us = lambda name, lengths, sample: float(sum(lengths))
    backends = registry_of(backend("a"))
    trace = Trace(np.array([5, 9, 14]), np.array([9, 9, 9]), "digest")
    (row,) = run(plan_of(backends), backends, {"chat": trace}, batches=(1,), snapshots=8).rows
    assert len({s.max_kv for s in row.snapshots}) > 3
    assert [s.median_us("a") for s in row.snapshots] == [pytest.approx(2 * s.max_kv) for s in row.snapshots]  # 2 layers


def test_a_backend_has_the_scratch_that_it_asks_for(run):
    cls = backend("a", workspace_bytes=64)
    run(plan_of(registry_of(cls)), registry_of(cls), {"short": trace_of(11)})
    assert cls.built[0].workspace.numel() == 64


def test_kv_bytes_are_those_that_live_rows_read(run):
    backends = registry_of(backend("a"))
    (row,) = run(plan_of(backends), backends, {"short": trace_of(11)}, batches=(3,)).rows
    assert [s.kv_bytes for s in row.snapshots] == [33 * spec_of().kv_bytes_per_token] * 2


def test_what_failed_or_was_wrong_when_the_plan_was_made_is_not_run_again(run):
    backends = registry_of(backend("a"), backend("b"), backend("c"))
    bad = [Excluded(4, name, Reason.GATE_FAILED, "row 3") for name in ("b", "c")]
    plan = plan_of(backends, [Box(4, 1, 20, 1000, 1500, "c")], excluded=bad)
    compared = run(plan, backends, {"short": trace_of(11)}, batches=(1, 4))
    assert [s.candidates for row in compared.rows for s in row.snapshots[:1]] == [
        ("a", TWIN, "b", "c"),
        ("a", TWIN, "c"),
    ]
    assert [line for line in compared.left_out if "row 3" in line] == ["batch 4: b: wrong numbers: row 3"]


def test_what_was_refused_when_the_plan_was_made_is_not_run(run):
    backends = registry_of(backend("a"), backend("b", tactics=("", "x=1")), backend("c", tactics=("", "x=1")))
    plan = replace(plan_of(backends), refused={"b": "it hung", "c[x=1]": "it died"})
    compared = run(plan, backends, {"short": trace_of(11)})
    assert compared.rows[0].snapshots[0].candidates == ("a", TWIN, "c")
    told = ["batch 4: b: it hung", "batch 4: b[x=1]: it hung", "batch 4: c[x=1]: it died"]
    assert [line for line in compared.left_out if line != NO_SAMPLES] == told


def test_a_planned_candidate_that_is_not_there_leaves_the_default(run):
    backends = registry_of(backend("a"), backend("b"))
    compared = run(plan_of(backends, [Box(4, 1, 20, 1000, 1500, "b[x=1]")]), backends, {"short": trace_of(11)})
    assert [s.served for s in compared.rows[0].snapshots] == ["a", "a"]
    assert "batch 4: b[x=1] is planned and not available" in compared.left_out


def test_batches_that_do_not_fit_are_left_out_and_their_share_is_told(run):
    backends = registry_of(backend("a"))
    plan = plan_of(backends, capacity=64)  # 16 pages of 4: four rows of 11 take 12, of 21 24
    compared = run(plan, backends, {"short": trace_of(11), "long": trace_of(21)})
    assert [(row.share_that_fits, len(row.snapshots)) for row in compared.rows] == [(1.0, 2), (0.0, 0)]
    with pytest.raises(MeasureError, match=r"^no batch of these traces fits into the KV cache of p\.json$"):
        run(plan, backends, {"long": trace_of(21)})


# --- the command


def test_a_batch_size_that_does_not_always_fit_is_shown_with_the_share_that_does(run):
    backends = registry_of(backend("a"))
    mixed = Trace(np.array([10, 20]), np.array([1, 1]), "digest")  # four rows fit if three of them or all are short
    compared = run(plan_of(backends, capacity=64), backends, {"mixed": mixed, "long": trace_of(21)})
    printed = io.StringIO()
    Console(file=printed, width=120).print(comparison_view(compared))
    shares = [row.share_that_fits for row in compared.rows]
    assert 0 < shares[0] < 1 and shares[1] == 0
    assert f"{shares[0]:.0%} fit" in printed.getvalue()
    assert " 0% fit" in printed.getvalue()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A plan file with its samples, made by `tune`, and two traces."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "config.json").write_text(json.dumps(TINY))
    for name, tokens in (("chat", "30,20\n200,40\n"), ("code", "100,5\n")):
        (folder / f"{name}.csv").write_text("input_tokens,output_tokens\n" + tokens)
    options = ["--buckets", "1,4", "--max-seq-len", "256", "--page-size", "4", "--out", str(folder / "plan.json")]
    done = CliRunner().invoke(
        main,
        ["tune", "--model", str(folder / "config.json"), *options],
        env={"DYN_DECODE_CACHE_DIR": str(folder / "store")},
    )
    assert done.exit_code == 0, done.stderr
    return folder


def invoke(*args):
    done = CliRunner().invoke(main, ["compare", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def traces(folder, *names):
    return [item for name in names for item in ("--trace", folder / f"{name}.csv")]


def test_a_row_of_each_trace_and_batch_size_and_a_line_of_each_trace(tuned, tmp_path):
    args = [tuned / "plan.json", *traces(tuned, "chat", "code"), "--batch-size", "4,2", "--snapshots", 3]
    status, out, _ = invoke(*args, "--out", tmp_path / "out.json")
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith(("chat: ", "code: ", "all: "))]
    (compared,) = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert [(row["trace"], row["batch"], row["summary"]["snapshots"]) for row in compared["rows"]] == [
        ("chat", 2, 3),
        ("chat", 4, 3),
        ("code", 2, 3),
        ("code", 4, 3),
    ]
    assert compared["all"]["snapshots"] == 12
    assert {name: trace["snapshots"] for name, trace in compared["traces"].items()} == {"chat": 6, "code": 6}
    assert f"{compared['all']['plan_over']['torch_sdpa']['mean']:.3f}x over torch_sdpa" in out
    (plan,) = read_plans(tuned / "plan.json")
    for found in compared["snapshots"]:
        entry = plan.table().lookup(found["batch"], found["mean_kv"], skew_of(found["mean_kv"], found["max_kv"]))
        assert found["planned"] == (
            None if entry is None else entry.backend + (f"[{entry.tactic}]" if entry.tactic else "")
        )
        assert {"torch_sdpa", "torch_chunked", EQUAL_PLAN, BEST} <= set(found["arms"])
        assert all(len(times) == ROUNDS for times in found["step_us"].values())
        assert found["arms"][EQUAL_PLAN]["us"] > 0


def test_as_json_it_is_the_same_as_in_the_file_and_all_batch_sizes_are_powers_of_two(tuned, tmp_path):
    args = [tuned / "plan.json", *traces(tuned, "code"), "--snapshots", 1, "--rounds", 2, "--json"]
    status, out, _ = invoke(*args, "--out", tmp_path / "out.json")
    assert status == 0
    assert json.loads(out) == json.loads((tmp_path / "out.json").read_text())
    assert [row["batch"] for row in json.loads(out)["comparisons"][0]["rows"]] == [1, 2, 4]


def test_without_samples_beside_the_plan_there_is_no_equal_length_plan(tuned, tmp_path):
    write_plans(tmp_path / "plan.json", read_plans(tuned / "plan.json"))
    status, out, _ = invoke(tmp_path / "plan.json", *traces(tuned, "code"), "--batch-size", 1, "--snapshots", 1)
    assert status == 0
    assert "there is no equal-length plan to compare with" in " ".join(out.split())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("device", {"kind": "cuda", "name": "another GPU"}, "device.kind: the plan has 'cuda', here it is 'cpu'"),
        ("torch_sdpa", "1.0", "backends.torch_sdpa: the plan has '1.0', here it is "),
    ],
)
def test_a_plan_of_another_machine_is_refused_with_the_fields_that_differ(tuned, tmp_path, field, value, said):
    (plan,) = read_plans(tuned / "plan.json")
    changed = {"device": value} if field == "device" else {"backends": {**plan.key["backends"], field: value}}
    write_plans(tmp_path / "plan.json", [replace(plan, key={**plan.key, **changed})])
    status, _, err = invoke(tmp_path / "plan.json", *traces(tuned, "code"))
    assert (status, len(err.splitlines())) == (2, 1)
    assert said in err


def test_a_plan_of_another_rule_or_trace_is_compared(tuned, tmp_path):
    (plan,) = read_plans(tuned / "plan.json")
    write_plans(
        tmp_path / "plan.json", [replace(plan, key={**plan.key, "rule_version": 1, "traces": {"another": "0"}})]
    )
    args = [tmp_path / "plan.json", *traces(tuned, "code"), "--batch-size", 1, "--snapshots", 1, "--rounds", 2]
    assert invoke(*args)[0] == 0


def test_a_key_that_lacks_a_field_is_one_line_that_names_it(tuned, tmp_path):
    (plan,) = read_plans(tuned / "plan.json")
    key = {name: value for name, value in plan.key.items() if name != "engine"}
    write_plans(tmp_path / "plan.json", [replace(plan, key=key)])
    status, _, err = invoke(tmp_path / "plan.json", *traces(tuned, "code"))
    assert (status, len(err.splitlines())) == (2, 1)
    assert "key: engine: missing" in err


@pytest.mark.parametrize("device", [{}, {"device": "cpu"}], ids=["none", "a word"])
def test_a_key_that_does_not_say_its_device_is_one_line_that_names_the_fields(tuned, tmp_path, device):
    (plan,) = read_plans(tuned / "plan.json")
    key = {name: value for name, value in plan.key.items() if name != "device"} | device
    write_plans(tmp_path / "plan.json", [replace(plan, key=key)])
    status, _, err = invoke(tmp_path / "plan.json", *traces(tuned, "code"))
    assert (status, len(err.splitlines())) == (2, 1)
    assert "does not fit here: device" in err


BAD = [
    (["--trace", "CODE", "--batch-size", "8"], "--batch-size 8: the largest bucket of "),
    (["--trace", "CODE", "--batch-size", "1,x"], "--batch-size '1,x': must be whole numbers above 0"),
    (["--trace", "CODE", "--trace", "CODE"], "two traces are called"),
    (["--trace", "absent.csv"], "absent.csv: No such file or directory"),
    (["--trace", "CODE", "--rounds", "1"], "'--rounds': 1 is not in the range x>=2"),
    ([], "Missing option '--trace'"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_a_users_mistake_is_one_line_and_status_2(tuned, args, message):
    status, _, err = invoke(tuned / "plan.json", *(tuned / "code.csv" if arg == "CODE" else arg for arg in args))
    assert status == 2
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("Error")]) == 1


def test_an_out_that_cannot_be_written_is_told_before_anything_is_timed(tuned):
    status, _, err = invoke(tuned / "plan.json", *traces(tuned, "code"), "--out", tuned)
    assert (status, err) == (2, f"Error: {tuned} cannot be written: Is a directory\n")


def test_plain_reads_are_faster_than_nothing_and_slower_than_any_memory():
    assert 1e8 < read_bytes_per_s(device()) < 1e13


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_eligible_candidate_is_timed_and_none_is_faster_than_its_memory():
    run_real_kernels("cuda")


def run_real_kernels(kind):
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, head_dim_vo=128, page_size=16, num_layers=4)
    request, here = TuneRequest(spec, (1, 4), 2048, 4 * 2048), current_device(kind)
    default = eligible(request, here, registry).default
    plan = StoredPlan(request.key(here, registry, default), "2025-06-01T12:00:00+00:00", default, (1, 4), ())
    chat = Trace(np.array([30, 900]), np.array([50, 400]), "digest")
    sizes = Sizes((1, 3, 4), 3, ROUNDS)
    compared = run_comparison(Path("p.json"), plan, None, {"chat": chat}, sizes, registry, lambda what: None)
    assert compared.left_out == (NO_SAMPLES,)
    assert [len(row.snapshots) for row in compared.rows] == [3, 3, 3]
    for found in compared.snapshots:
        assert np.isfinite(found.step_us[:, :2]).all()
        assert found.served == default
    assert 0 < compared.summary(compared.snapshots).floor_share < 1
