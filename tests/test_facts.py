"""What samples say to the facts: made-up times, so that every figure can be told beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dispatch.conclude import conclude
from dispatch.decision import Rule
from dispatch.samples import TWIN, BucketSamples, Cell, Samples
from dispatch.samplesfile import read_samples, write_samples
from smoke.facts.across import speeds as across
from smoke.facts.chosen import gains, held_out
from smoke.facts.fast import compared, in_all
from smoke.facts.from_samples import from_samples
from smoke.facts.replan import main as replan
from smoke.facts.replan import replanned, speeds, summary
from smoke.facts.samples import (
    backend_ratios,
    best_gain,
    equal_tuned,
    fastest_bandwidth,
    kernel_cost,
    own_rule,
    step_cost,
)
from tests.fakes import spec_of
from tests.tables import PRIORITY, ROUNDS, bucket_of

CUDNN, XQA, TC = "flashinfer_cudnn", "flashinfer_xqa", "flashinfer_fa2_tc"
# At mean KV 100 cuDNN is the fastest of equal lengths, and slower where they are ragged.
CELLS = (
    Cell(100, 100, "equal"),
    Cell(100, 110, "lognormal-0.3"),
    Cell(100, 400, "lognormal-0.7"),
    Cell(100, 900, "trace"),
    Cell(1000, 1000, "equal"),
    Cell(1000, 4000, "trace"),
)
TIMES = {
    "fa3": [10.0, 10.0, 10.0, 10.0, 100.0, 100.0],
    CUDNN: [8.0, 8.0, 12.5, 20.0, 110.0, 200.0],
    XQA: [9.0, 9.0, 9.0, 8.0, 120.0, 125.0],
}


def samples_of(*buckets: BucketSamples, num_layers: int = 1, **spec) -> Samples:
    key = {"spec": spec_of(**spec).to_json(), "max_seq_len": 5000}
    key |= {"buckets": [its.bucket for its in buckets], "backends": [*PRIORITY]}
    return Samples(key, num_layers, "fa3", PRIORITY, Rule(), buckets)


def with_plan(bucket: BucketSamples, name: str, plan_us: float) -> BucketSamples:
    times = bucket.times.copy()
    times[0, bucket.candidates.index(name)] = plan_us
    return replace(bucket, times=times)


def test_a_plan_of_equal_lengths_is_scored_where_they_are_ragged():
    """At 100 it takes cuDNN, 10/12.5 = 0.8 and 10/20 = 0.5 of FA3's speed; at 1000 FA3 itself. 0.3 is not ragged."""
    speeds = equal_tuned(samples_of(bucket_of(TIMES, CELLS)), kernel_cost)
    assert speeds.mean == pytest.approx((0.8 * 0.5 * 1.0) ** (1 / 3))
    assert speeds.worst == pytest.approx(0.5)
    assert (speeds.cells, speeds.unmeasured) == (3, 0)


def test_plan_counts_only_where_it_is_asked_for():
    """With 5 us of plan() cuDNN is not the fastest any more: XQA is, 10/9 and 10/8 of FA3's speed."""
    samples = samples_of(with_plan(bucket_of(TIMES, CELLS), CUDNN, 5.0))
    assert equal_tuned(samples, kernel_cost).worst == pytest.approx(0.5)
    assert equal_tuned(samples, step_cost).mean == pytest.approx((10 / 9 * 10 / 8 * 1.0) ** (1 / 3))


def test_a_narrow_table_is_no_plan_for_ragged_batches():
    times = {**TIMES, f"{XQA}[max_kv=4096]": [1.0] * len(CELLS)}
    assert equal_tuned(samples_of(bucket_of(times, CELLS)), kernel_cost).worst == pytest.approx(0.5)


def test_ragged_cells_without_a_time_of_the_pick_are_counted():
    times = {**TIMES, CUDNN: [8.0, 8.0, np.nan, 20.0, 110.0, 200.0]}
    speeds = equal_tuned(samples_of(bucket_of(times, CELLS)), kernel_cost)
    assert (speeds.cells, speeds.unmeasured) == (2, 1)
    assert speeds.mean == pytest.approx((0.5 * 1.0) ** (1 / 2))


def test_a_candidate_that_was_dropped_after_some_rounds_is_compared_with_the_same_rounds():
    """cuDNN has the first five rounds of the trace's cell alone, in which FA3 too took twice as long."""
    slow = np.repeat(np.array(TIMES["fa3"])[:, None], 15, axis=1)
    cudnn = np.repeat(np.array(TIMES[CUDNN])[:, None], 15, axis=1)
    slow[3, :5], cudnn[3, :5], cudnn[3, 5:] = 20.0, 40.0, np.nan
    speeds = equal_tuned(samples_of(bucket_of({**TIMES, "fa3": slow, CUDNN: cudnn}, CELLS)), kernel_cost)
    assert speeds.worst == pytest.approx(0.5)


def test_our_rule_on_the_same_cells():
    """XQA is the faster one in each cell at 100, and FA3 at 1000: 10/9, 10/8 and 1."""
    speeds = own_rule(samples_of(bucket_of(TIMES, CELLS)), step_cost)
    assert speeds.mean == pytest.approx((10 / 9 * 10 / 8 * 1.0) ** (1 / 3))
    assert speeds.worst == pytest.approx(1.0)


def test_samples_without_ragged_lengths_say_so():
    with pytest.raises(ValueError, match="ragged"):
        equal_tuned(samples_of(bucket_of({"fa3": 10.0}, CELLS[:1])), kernel_cost)


def test_backends_are_compared_on_the_trace_alone():
    """cuDNN: 20/10 and 200/100. XQA: 8/10 and 125/100, whose geometric mean is 1."""
    ratios = backend_ratios(samples_of(bucket_of(TIMES, CELLS)), kernel_cost)
    assert ratios[CUDNN].geometric_mean == pytest.approx(2.0)
    assert ratios[XQA].geometric_mean == pytest.approx(1.0)
    assert (ratios[XQA].mean, ratios[XQA].least, ratios[XQA].most) == pytest.approx((1.025, 0.8, 1.25))
    assert TC not in ratios


def test_the_best_of_each_cell_over_fa3():
    """10/8 by XQA, and 1 where FA3 is the fastest. What is not among the compared ones does not count."""
    samples = samples_of(bucket_of({**TIMES, "flashinfer_fa2": 1.0}, CELLS))
    gain = best_gain(samples, kernel_cost)
    assert (gain.mean, gain.share_over_10_percent, gain.most, gain.cells) == pytest.approx((1.125, 0.5, 1.25, 2))
    assert best_gain(samples, kernel_cost, [99]) is None


def test_a_single_request_has_the_lengths_of_any_profile():
    bucket = bucket_of({"fa3": [10.0], CUDNN: [5.0]}, [Cell(100, 100, "equal")], bucket=1)
    assert best_gain(samples_of(bucket), kernel_cost).mean == pytest.approx(2.0)


def test_kernels_count_once_a_layer_and_begin_step_once_a_step():
    """FA3: 1 + 3 * 10 = 31; cuDNN: 3 * 10.3 = 30.9."""
    bucket = bucket_of({"fa3": 10.0, CUDNN: 10.3}, [Cell(100, 300, "trace")])
    times = bucket.times.copy()
    times[1, 0] = 1.0
    ratios = backend_ratios(samples_of(replace(bucket, times=times), num_layers=3), kernel_cost)
    assert ratios[CUDNN].geometric_mean == pytest.approx(30.9 / 31)


def test_bandwidth_is_that_of_the_fastest_layer():
    """8 rows * 1000 tokens * 2 heads * 2 * 16 * 4 bytes = 2.048 MB in 2 us: 1.024 TB/s. Clipped cells are left out."""
    cells = [Cell(1000, 1000, "equal"), Cell(1000, 5000, "trace")]
    samples = samples_of(bucket_of({"fa3": [4.0, 4.0], CUDNN: [2.0, 2.0]}, cells))
    assert fastest_bandwidth(samples) == [(8, 1000, 2.048e6, pytest.approx(1.024))]


def test_the_gains_of_a_plan_are_those_of_its_boxes_and_of_its_batches():
    """One box for XQA, which takes 8 of 10 in one cell and 9 of 10 in the other."""
    samples = samples_of(bucket_of({"fa3": [10.0, 10.0], XQA: [8.0, 9.0]}, CELLS[:2]))
    found = gains(samples)
    speed = (10 / 8 * 10 / 9) ** (1 / 2)
    assert (found.boxes, found.other_boxes, found.batches) == (1, 1, 2 * ROUNDS)
    assert (found.least, found.median, found.most, found.mean) == pytest.approx((speed,) * 4)
    none = gains(samples_of(bucket_of({"fa3": [10.0, 10.0], XQA: [12.0, 12.0]}, CELLS[:2])))
    assert (none.other_boxes, none.mean) == (0, pytest.approx(1.0))


def test_each_half_of_the_rounds_decides_and_the_other_scores():
    """XQA takes 8 of 10 in the even rounds, which choose it, and 12 in the odd ones, which score it and do not."""
    times = [8.0, 12.0] * 7 + [8.0]
    judged = held_out(samples_of(bucket_of({"fa3": [10.0], XQA: [times]}, CELLS[:1])))
    assert (judged.batches, judged.slower, judged.twin_slower) == (7, 7, 0)  # the odd rounds
    assert judged.mean == pytest.approx(1.2 ** (-7 / 15))  # the even ones are the default's
    steady = held_out(samples_of(bucket_of({"fa3": [10.0], TWIN: [[10.0] * 14 + [10.4]], XQA: [8.0]}, CELLS[:1])))
    assert (steady.batches, steady.slower, steady.twin_slower) == (ROUNDS, 0, 1)


def test_a_quick_plan_is_compared_with_a_longer_run_s_on_the_batches_of_either():
    """The longer run saw XQA take 8 of 10 and chose it everywhere; the quick one saw it take 10, and kept FA3."""
    slow = samples_of(bucket_of({"fa3": [10.0, 10.0], XQA: [8.0, 8.0]}, CELLS[:2]))
    quick = samples_of(bucket_of({"fa3": [10.0, 10.0], XQA: [10.0, 10.0]}, CELLS[:2]))
    plans = conclude(quick, {}), conclude(slow, {})
    (row,) = compared(*plans, slow)
    assert (row["batches"], row["differ"], row["costs"], row["timed"]) == (2 * ROUNDS,) * 4
    assert (row["quick_over_default"], row["over_default"]) == pytest.approx((1.0, 1.25))
    by_slow, by_quick = (in_all(compared(*plans, samples)) for samples in (slow, quick))
    assert by_slow == pytest.approx(
        {"differ": 1.0, "cost": 0.25, "cost_over_all": 0.25, "quick_over_default": 1.0, "over_default": 1.25}
    )
    assert by_quick == pytest.approx(
        {"differ": 1.0, "cost": 0.0, "cost_over_all": 0.0, "quick_over_default": 1.0, "over_default": 1.0}
    )


def test_a_plan_is_scored_on_the_rounds_of_another_run():
    """XQA takes 8 of 10 where it was chosen, and there 9, 12 in one round, and nothing is known of another round."""
    decides = samples_of(bucket_of({"fa3": [10.0, 10.0], XQA: [8.0, 8.0]}, CELLS[:2]))
    other = samples_of(bucket_of({"fa3": [10.0], XQA: [[9.0] * 13 + [12.0, np.nan]]}, CELLS[:1]))
    assert across(decides, other) == pytest.approx([10 / 9] * 13 + [10 / 12])
    without = samples_of(bucket_of({"fa3": [10.0], CUDNN: [9.0]}, CELLS[:1]))
    assert across(decides, without) == []  # that run had no XQA
    elsewhere = samples_of(bucket_of({"fa3": [10.0], XQA: [9.0]}, CELLS[:1], bucket=4))
    assert across(decides, elsewhere) == []  # and this one another batch size


def test_rows_of_a_recorded_run(tmp_path):
    """Every fact of the file (a few buckets of it) is in the table, none as a failure."""
    (run,) = read_samples(Path(__file__).parent.parent / "smoke/results/h200/qwen3-8b.samples.json.gz")
    path = tmp_path / "few.samples.json.gz"
    write_samples(path, [replace(run, buckets=run.buckets[::5])])
    found = from_samples([path])
    assert {row.fact.split()[0] for row in found.rows} == {"plan:", "1b", "2", "8"}
    assert not [row for row in found.rows if "failed" in row.now]


def test_a_plan_decided_anew_is_scored_on_what_was_compared(tmp_path, capsys):
    """XQA, chosen from samples in which it takes 8 of 10, takes 12 and then 9 of the default's 10 and its twin's 10."""
    samples = samples_of(bucket_of({"fa3": [10.0], XQA: [8.0]}, CELLS[:1]))
    batch = {"bucket": 8, "batch": 8, "mean_kv": 100, "max_kv": 100, "kv_bytes_per_layer": 1, "trace": "chat"}
    times = {"fa3": [10.0] * 3, TWIN: [10.0] * 3}
    slower = {**batch, "step_us": {**times, XQA: [12.0, 12.0, None]}}
    faster = {**batch, "step_us": {**times, XQA: [9.0, 9.0, 20.0]}}
    elsewhere = {**batch, "max_kv": 900, "trace": "code", "step_us": {**times, XQA: [20.0] * 3}}
    found = replanned(samples, [slower, faster, elsewhere])
    assert [its.trace for its in found] == ["chat", "chat", "code"]
    assert speeds(found, "plan", "fa3") == pytest.approx([10 / 12, 10 / 9, 1.0])
    mean = (10 / 12 * 10 / 9) ** (1 / 3)
    line = f"{mean:.3f}x over the default, worst 0.833x, of 3 batches; 33.3% below 0.99x, 33.3% below 0.97x"
    assert summary(speeds(found, "plan", "fa3")) == line


def test_the_recorded_comparison_is_scored_as_its_file_says(capsys):
    results = Path(__file__).parent.parent / "smoke/results/h200"
    command, *told = (results / "replan-qwen3-8b.txt").read_text().split("$")[1].splitlines(keepends=True)
    replan([str(results / name) for name in command.split()[3:]])
    assert capsys.readouterr().out == "".join(told)
