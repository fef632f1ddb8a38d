"""Samples that can change no decision: without them, the very same is decided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dispatch.decision import Reason, Rule
from dispatch.futility import Futility
from dispatch.regimes import decide_bucket
from dispatch.samples import TWIN, Cell, Exclusion, log_of_times
from dispatch.selector import select_stable
from tests.tables import DEFAULT, PRIORITY, ROUNDS, bucket_of, evidence_of

XQA, CUDNN, FA2 = "flashinfer_xqa", "flashinfer_cudnn", "flashinfer_fa2_tc"
RULE = Rule()
AFTER = 5  # rounds, as in the harness
MEANS = (128, 256, 512, 1024, 2048, 4096)


def left_out(samples, stored=(), after=AFTER):
    """The samples as they would have been taken: round after round, without those that are skipped by then."""
    futility = Futility(replace(samples, times=np.full_like(samples.times, np.nan)), RULE, stored)
    times, gone = samples.times.copy(), np.isnan(samples.times[-1]).all(axis=-1)
    for e in samples.exclusions:
        gone[samples.candidates.index(e.candidate), e.cell] = True
    for round_ in range(after, times.shape[-1]):
        log_step = log_of_times(replace(samples, times=times).step_us(1))
        so_far = np.where(np.arange(times.shape[-1]) < round_, log_step - log_step[0], np.nan)
        skipped = futility.skipped(so_far, gone)
        times[..., round_][:, skipped[..., round_]] = np.nan
    return replace(samples, times=times)


def drawn(seed):
    """A bucket of equal, of ragged and of one-long cells, with candidates that win where it is short, long, or even.

    Their log times over the default's are straight lines in log mean KV and log skew, through a tie somewhere.
    """
    rng = np.random.default_rng(seed)
    noise = rng.choice([0.002, 0.01, 0.03])
    grid, longest = [], []
    for mean in MEANS:
        for profile, skews in (
            ("equal", np.ones(ROUNDS)),
            ("ragged", np.exp(np.abs(rng.normal(0.8, 0.25, ROUNDS)))),
            ("one-long", np.full(ROUNDS, 8.0)),
        ):
            if rng.random() < 0.9:  # strips of skews may have no cell at a mean
                longest.append(np.rint(mean * skews).astype(np.int64))
                grid.append(Cell(mean, int(np.median(longest[-1])), profile))
    means, longest = np.array([cell.mean_kv for cell in grid]), np.array(longest)
    x, y = np.log(means / 512)[:, None] * np.ones(ROUNDS), np.log(longest / means[:, None])
    times = {DEFAULT: np.full(x.shape, 100.0)}
    for name in (FA2, XQA, CUDNN):
        at, slope, skewed = rng.normal(-0.03, 0.06), rng.choice([0, 0.03, -0.05, 0.1]), rng.choice([0, 0.02, 0.1])
        times[name] = 100 * np.exp(at + slope * x + skewed * y)
    times[TWIN] = times[DEFAULT]
    times = {name: its * np.exp(rng.normal(0, noise, its.shape)) for name, its in times.items()}
    lost = [Exclusion(FA2, Reason.FAILED, "it", cell=int(rng.integers(len(grid))))] if rng.random() < 0.3 else []
    return replace(bucket_of(times, grid, exclusions=lost), longest=longest)


def decided(samples, stored=()):
    return [(regime.box, regime.speedup) for regime in decide_bucket(samples, 1, PRIORITY, RULE, stored)]


@pytest.mark.parametrize("seed", range(16))
def test_without_the_samples_that_are_left_out_boxes_winners_and_gains_are_the_same(seed):
    samples = drawn(seed)
    fewer = left_out(samples)
    assert decided(fewer) == decided(samples)


def overfull(seed):
    """A bucket in which the default takes 1.4 times as long as with its other tactic in half of the batches, and in
    both of a pair of bins between two with many. XQA is faster than the default in all, and slower than the other
    tactic in those.
    """
    rng = np.random.default_rng(seed)
    skews = np.stack([rng.uniform(*ends, ROUNDS) for ends in ((2.0, 2.4), (3.1, 3.8), (2.0, 2.4))])
    between = [(2, 8), (2, 11)]
    full = rng.random(skews.shape) < 0.5
    for at in between:
        skews[at], full[at] = rng.uniform(2.5, 3.0), True
    times = {
        DEFAULT: np.where(full, 140.0, 100.0),
        "fa3[balanced=1]": np.where(full, 100.0, 102.0),
        XQA: np.where(full, 104.0, 92.0),
    }
    grid = [Cell(1000, int(1000 * np.median(its)), f"{i}") for i, its in enumerate(skews)]
    return replace(bucket_of(times, grid), longest=np.rint(1000 * skews).astype(np.int64))


@pytest.mark.parametrize("seed", range(16))
def test_also_where_another_tactic_of_the_default_tells_how_slow_the_default_is(seed):
    samples = overfull(seed)
    assert decided(left_out(samples)) == decided(samples)


@pytest.mark.parametrize("seed", range(8))
def test_against_stored_boxes_too(seed):
    stored = [box for box, _ in decided(drawn(seed))]
    other = drawn(seed)
    rng = np.random.default_rng(seed)
    drifted = replace(other, times=other.times * np.exp(rng.normal(0, 0.02, other.times.shape)))
    names = {box.candidate for box in stored}
    assert decided(left_out(drifted, names), stored) == decided(drifted, stored)


def test_what_is_left_out_is_a_part_of_all_samples_of_the_default_as_well():
    shares = []
    for seed in range(10):
        samples = drawn(seed)
        valid = np.isfinite(left_out(samples).times[-1])
        shares.append([valid[rows].mean() for rows in (slice(0, 2), slice(2, None))])
    default, others = np.mean(shares, axis=0)
    assert 1 - others > 0.05
    assert 1 - default > 0.01


def skipped(times, cells=None, stored=(), gone=None):
    samples = bucket_of(times, cells)
    log_step = log_of_times(samples.step_us(1))
    nobody = np.zeros(log_step.shape[:2], dtype=bool)
    return Futility(samples, RULE, stored).skipped(log_step - log_step[0], nobody if gone is None else gone)


def lost_first(count, apart=1):
    """A candidate that lost `count` rounds so far, of every `apart`, and has none yet of the others."""
    return [[102.0 if i % apart == 0 and i // apart < count else np.nan for i in range(ROUNDS)]]


@pytest.mark.parametrize(("count", "whether"), [(3, False), (4, True)])  # of the 7 odd rounds one may be lost, not two
def test_a_candidate_is_timed_until_neither_half_of_the_rounds_can_be_won(count, whether):
    found = skipped({DEFAULT: 100, XQA: lost_first(count), CUDNN: 80})
    assert found[2].all() if whether else not found[2].any()
    assert not found[[0, 1, 3]].any()


def test_where_another_may_win_a_candidate_that_may_yet_be_chosen_by_half_of_the_rounds_goes_on():
    even = lost_first(6, apart=2)  # none of the odd rounds is lost
    assert not skipped({DEFAULT: 100, XQA: even, CUDNN: 80})[2].any()
    assert skipped({DEFAULT: 100, XQA: even, CUDNN: lost_first(6)})[2].all()


def test_rounds_of_other_skews_are_judged_apart():
    samples = bucket_of({DEFAULT: [100], XQA: [[102.0] * 9 + [80.0] * 6]}, [Cell(1000, 2000, "ragged")])
    samples = replace(samples, longest=np.array([[1500] * 9 + [6000] * 6]))
    log_step = log_of_times(samples.step_us(1))
    found = Futility(samples, RULE).skipped(log_step - log_step[0], np.zeros((3, 1), dtype=bool))
    assert found[2, 0].tolist() == [True] * 9 + [False] * 6
    assert not found[:2].any()  # the noise in the cell counts in the other part


def test_a_part_of_two_rounds_is_never_given_up():
    samples = bucket_of({DEFAULT: [100], XQA: [120.0]}, [Cell(1000, 2000, "ragged")])
    samples = replace(samples, longest=np.array([[1500] * 13 + [6000] * 2]))
    log_step = log_of_times(samples.step_us(1))
    found = Futility(samples, RULE).skipped(log_step - log_step[0], np.zeros((3, 1), dtype=bool))
    assert found[2, 0].tolist() == [True] * 13 + [False] * 2


def test_the_default_goes_on_in_a_cell_until_nobody_is_timed_there():
    assert skipped({DEFAULT: 100, XQA: 120, CUDNN: 120})[:2].all()
    assert not skipped({DEFAULT: 100, XQA: 120, CUDNN: 80})[:2].any()
    assert skipped({DEFAULT: 100, XQA: 120, CUDNN: 80}, gone=np.array([[False]] * 3 + [[True]]))[:2].all()


def test_stored_choices_and_what_they_are_compared_with_are_timed_to_the_end():
    found = skipped({DEFAULT: 100, XQA: 120, CUDNN: 120}, stored={XQA})
    assert found.all(axis=(1, 2)).tolist() == [False, False, False, True]
    assert not found[:3].any()
    found = skipped({DEFAULT: 100, XQA: 120}, stored={DEFAULT})
    assert found.all(axis=(1, 2)).tolist() == [False, False, True]


def test_the_verdict_says_that_it_was_given_up_and_not_that_samples_are_missing():
    decision = select_stable(evidence_of({DEFAULT: 100, XQA: lost_first(6)}), [0], RULE)
    (verdict,) = decision.verdicts
    assert (decision.candidate, verdict.reason) == (DEFAULT, Reason.HOPELESS)
    assert verdict.detail == "at least 6 of 15"


def test_profiles_whose_rounds_lie_in_one_pair_of_bins_are_judged_together():
    grid = [Cell(512, 512, "equal"), Cell(512, 512, "as equal")]
    lost = [102.0 if i < 4 else 80.0 for i in range(ROUNDS)]
    # 4 of 30 rounds are less than 0.15, 8 are more
    assert not skipped({DEFAULT: [100] * 2, XQA: [lost, [80.0] * ROUNDS]}, grid)[2].any()
    assert skipped({DEFAULT: [100] * 2, XQA: [lost, lost]}, grid)[2].all()
