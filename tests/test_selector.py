"""The deciding rule, one clause a test. Times are microseconds; the default takes 100 unless said otherwise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from dispatch.confirm import cross_fitted_speedup
from dispatch.decision import Reason, Rule
from dispatch.samples import TWIN, Exclusion
from dispatch.selector import select_stable
from tests.tables import DEFAULT, ROUNDS, bucket_of, evidence_of, prepared

XQA, CUDNN, FA2 = "flashinfer_xqa", "flashinfer_cudnn", "flashinfer_fa2_tc"
RULE = Rule()


def verdict(decision, name):
    return next(v for v in decision.verdicts if v.candidate == name)


def rounds(base, *changed):
    """`base` in every round but the first ones, which are given."""
    return [[*changed, *[base] * (ROUNDS - len(changed))]]


def test_the_fastest_of_several_wins():
    decision = select_stable(evidence_of({DEFAULT: 100, XQA: 90, CUDNN: 80}), [0], RULE)
    assert (decision.candidate, decision.reason) == (CUDNN, Reason.FASTEST)
    assert verdict(decision, XQA).reason is Reason.BEATEN


@pytest.mark.parametrize(("time", "winner"), [(97.1, DEFAULT), (96.9, XQA)])  # exp(-0.03) = 0.9704
def test_a_winner_must_gain_three_percent_in_log_time(time, winner):
    assert select_stable(evidence_of({DEFAULT: 100, XQA: time}), [0], RULE).candidate == winner


@pytest.mark.parametrize(("time", "winner"), [(93, DEFAULT), (91, XQA)])
def test_a_winner_must_gain_twice_the_spread_of_the_default_against_itself(time, winner):
    # the twin reads log(1.04) = 3.9% off, so delta is 7.8%: exp(-0.078) = 0.925
    decision = select_stable(evidence_of({DEFAULT: 100, TWIN: 104, XQA: time}), [0], RULE)
    assert decision.candidate == winner
    assert decision.delta == pytest.approx(2 * np.log(1.04))


def test_a_candidate_slower_in_one_cell_is_never_chosen_however_much_it_gains_in_the_others():
    decision = select_stable(evidence_of({DEFAULT: [100, 100, 100], XQA: [50, 50, 102]}), [0, 1, 2], RULE)
    assert decision.candidate == DEFAULT
    assert decision.reason is Reason.INCONSISTENT
    assert verdict(decision, XQA).worst_cell == 2


def test_only_the_cells_of_the_box_count():
    assert select_stable(evidence_of({DEFAULT: [100, 100], XQA: [50, 102]}), [0], RULE).candidate == XQA


@pytest.mark.parametrize(("equal", "winner"), [(3, XQA), (4, DEFAULT)])  # 12 of 15 is 80%, 11 of 15 is 73%
def test_a_winner_must_win_four_rounds_of_five(equal, winner):
    assert select_stable(evidence_of({DEFAULT: 100, XQA: rounds(80, *[100] * equal)}), [0], RULE).candidate == winner


@pytest.mark.parametrize(("missing", "winner"), [(3, XQA), (4, DEFAULT)])  # 12 valid rounds are needed
def test_a_cell_with_too_few_valid_rounds_says_nothing(missing, winner):
    decision = select_stable(evidence_of({DEFAULT: 100, XQA: rounds(50, *[np.nan] * missing)}), [0], RULE)
    assert decision.candidate == winner
    if winner == DEFAULT:
        assert (decision.reason, verdict(decision, XQA).detail) == (Reason.TOO_FEW_ROUNDS, "11 of 12")


def test_a_round_in_which_the_default_has_no_time_is_not_valid():
    decision = select_stable(evidence_of({DEFAULT: rounds(100, *[np.nan] * 4), XQA: 50}), [0], RULE)
    assert decision.reason is Reason.TOO_FEW_ROUNDS


def test_a_time_of_zero_is_not_a_measurement():
    assert select_stable(evidence_of({DEFAULT: 100, XQA: 0.0}), [0], RULE).reason is Reason.NOT_MEASURED


def test_pairing_by_round_cancels_a_drift_that_is_larger_than_the_gain():
    drift = np.linspace(1, 3, ROUNDS)  # the card grows three times slower; the candidate is 5% faster throughout
    times = {DEFAULT: [100 * drift], TWIN: [100 * drift], XQA: [95 * drift]}
    assert select_stable(evidence_of(times), [0], RULE).candidate == XQA


@pytest.mark.parametrize(("time", "winner", "reason"), [(80.7, FA2, Reason.PRIORITY), (80.9, CUDNN, Reason.FASTEST)])
def test_within_one_percent_of_the_fastest_priority_decides(time, winner, reason):
    # cudnn is fastest at 80; log(80.7 / 80) = 0.87%, log(80.9 / 80) = 1.12%; fa2 comes before cudnn
    decision = select_stable(evidence_of({DEFAULT: 100, CUDNN: 80, FA2: time}), [0], RULE)
    assert (decision.candidate, decision.reason) == (winner, reason)


def test_a_near_tie_is_called_so_for_the_one_that_priority_passed_over():
    decision = select_stable(evidence_of({DEFAULT: 100, CUDNN: 80, FA2: 80.1}), [0], RULE)
    assert verdict(decision, CUDNN).reason is Reason.LOWER_PRIORITY


def test_an_incumbent_stays_against_a_challenger_that_gains_less_than_delta():
    evidence = evidence_of({DEFAULT: 100, XQA: 90, CUDNN: 88})  # log(90 / 88) = 2.2%
    assert select_stable(evidence, [0], RULE).candidate == CUDNN
    held = select_stable(evidence, [0], RULE, incumbent=XQA)
    assert (held.candidate, held.reason) == (XQA, Reason.INCUMBENT)
    assert verdict(held, CUDNN).reason is Reason.BEATEN


def test_an_incumbent_yields_to_a_challenger_that_beats_it_by_delta():
    evidence = evidence_of({DEFAULT: 100, XQA: 90, CUDNN: 87})  # log(90 / 87) = 3.4%
    assert select_stable(evidence, [0], RULE, incumbent=XQA).candidate == CUDNN


def test_priority_chooses_only_among_those_that_beat_the_incumbent():
    # cudnn beats xqa by 3.4%; fa2 is within 1% of cudnn and comes first, but beats xqa by 2.7% only
    evidence = evidence_of({DEFAULT: 100, XQA: 90, CUDNN: 87, FA2: 87.6})
    assert select_stable(evidence, [0], RULE).candidate == FA2
    assert select_stable(evidence, [0], RULE, incumbent=XQA).candidate == CUDNN


def test_an_incumbent_stays_when_it_no_longer_gains_delta_but_is_not_slower_than_the_default():
    assert select_stable(evidence_of({DEFAULT: 100, XQA: 99}), [0], RULE, incumbent=XQA).candidate == XQA


@pytest.mark.parametrize(("time", "winner"), [(96.5, DEFAULT), (95.9, XQA)])  # 3.6% and 4.2% against 3% + 1%
def test_a_stored_default_yields_only_to_a_gain_that_is_clearly_more_than_delta(time, winner):
    evidence = evidence_of({DEFAULT: 100, XQA: time})
    assert select_stable(evidence, [0], RULE).candidate == XQA
    assert select_stable(evidence, [0], RULE, incumbent=DEFAULT).candidate == winner


@pytest.mark.parametrize("slower", [101.1, 101.9])
def test_an_incumbent_stays_where_one_cell_is_slower_by_what_noise_may_be(slower):
    evidence = evidence_of({DEFAULT: [100, 100], XQA: [80, slower]})
    assert select_stable(evidence, [0, 1], RULE, incumbent=XQA).reason is Reason.INCUMBENT
    assert select_stable(evidence, [0, 1], RULE).candidate == DEFAULT  # and would not be chosen


@pytest.mark.parametrize("times", [[102, 102], [80, 103]])  # slower on average; a cell of batches that are lost
def test_an_incumbent_that_became_slower_than_the_default_goes(times):
    evidence = evidence_of({DEFAULT: [100, 100], XQA: times})
    assert select_stable(evidence, [0, 1], RULE, incumbent=XQA).candidate == DEFAULT


def test_an_incumbent_level_with_the_default_within_its_own_spread_stays():
    evidence = evidence_of({DEFAULT: [100, 100], TWIN: [101, 100], XQA: [90, 100.5]})  # 0.5% in a spread of 1%
    assert select_stable(evidence, [0, 1], RULE, incumbent=XQA).candidate == XQA


def test_an_incumbent_that_is_slower_on_average_goes_even_within_the_spread():
    evidence = evidence_of({DEFAULT: [100, 100], TWIN: [101, 101], XQA: [100.5, 100.5]})
    assert select_stable(evidence, [0, 1], RULE, incumbent=XQA).candidate == DEFAULT


def test_an_incumbent_that_was_not_measured_is_forgotten():
    evidence = evidence_of({DEFAULT: 100, XQA: np.nan, CUDNN: 90})
    assert select_stable(evidence, [0], RULE, incumbent=XQA).candidate == CUDNN
    assert select_stable(evidence, [0], RULE, incumbent="gone").candidate == CUDNN


@pytest.mark.parametrize("reason", [Reason.GATE_FAILED, Reason.FAILED, Reason.DROPPED])
def test_an_excluded_candidate_is_never_chosen_and_its_reason_is_kept(reason):
    evidence = evidence_of({DEFAULT: 100, XQA: 50}, [Exclusion(XQA, reason, "why")])
    decision = select_stable(evidence, [0], RULE)
    assert (decision.candidate, decision.reason) == (DEFAULT, reason)
    assert verdict(decision, XQA).detail == "why"


def test_a_candidate_excluded_in_one_cell_serves_a_box_without_it():
    evidence = evidence_of({DEFAULT: [100, 100], XQA: [50, 50]}, [Exclusion(XQA, Reason.FAILED, "memory", cell=1)])
    assert select_stable(evidence, [0], RULE).candidate == XQA
    assert select_stable(evidence, [0, 1], RULE).candidate == DEFAULT


def test_a_decision_for_the_default_carries_the_reason_of_the_closest_loser():
    inconsistent = rounds(90, *[102] * 4)
    decision = select_stable(evidence_of({DEFAULT: 100, XQA: 98, CUDNN: inconsistent}), [0], RULE)
    assert decision.reason is Reason.INCONSISTENT  # cudnn was the closest, at 90


def test_what_has_too_few_rounds_tells_no_mean_and_is_no_closest_loser():
    decision = select_stable(evidence_of({DEFAULT: 100, XQA: 98, CUDNN: rounds(90, *[np.nan] * 9)}), [0], RULE)
    assert (decision.reason, verdict(decision, CUDNN).mean_r) == (Reason.NOT_FASTER, None)


def test_a_default_without_rivals_is_not_measured_against_anything():
    decision = select_stable(evidence_of({DEFAULT: 100}), [0], RULE)
    assert (decision.candidate, decision.reason) == (DEFAULT, Reason.NOT_MEASURED)


@pytest.mark.parametrize(("layers", "winner"), [(1, DEFAULT), (64, XQA)])
def test_a_plan_of_150_us_outweighs_a_gain_of_3_us_a_layer_at_one_layer_and_not_at_64(layers, winner):
    samples = bucket_of({DEFAULT: 40, XQA: 37})  # 64 layers: 2560 against 2368 + 150, a gain of 1.7%
    times = samples.times.copy()
    times[0, 2] = 150
    samples = replace(samples, times=times)
    assert select_stable(prepared(samples, layers), [0], Rule(threshold=0.01)).candidate == winner


def test_the_reported_gain_is_scored_on_the_rounds_that_did_not_choose():
    # in even rounds xqa takes 80 and cudnn 100, in odd rounds the reverse: what one half picks, the other scores at 1
    even = np.arange(ROUNDS) % 2 == 0
    times = {DEFAULT: 100, XQA: [np.where(even, 80, 100)], CUDNN: [np.where(even, 100, 80)]}
    assert cross_fitted_speedup(evidence_of(times), [0], RULE) == pytest.approx(1.0)


def test_the_reported_gain_of_a_steady_winner_is_its_gain():
    assert cross_fitted_speedup(evidence_of({DEFAULT: 100, XQA: 80}), [0], RULE) == pytest.approx(1.25)


def test_no_gain_is_reported_for_the_default():
    assert cross_fitted_speedup(evidence_of({DEFAULT: 100, XQA: 99}), [0], RULE) == 1.0


def test_the_selector_imports_neither_torch_nor_a_kernel_library():
    code = (
        "import sys, dispatch.selector, dispatch.regimes, dispatch.conclude;"
        "print([m for m in ('torch', 'flashinfer', 'triton') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(("won", "chosen"), [(13, XQA), (12, DEFAULT)])
def test_each_cell_must_be_won_in_most_rounds(won, chosen):
    # the second cell's median is a gain either way, and on average every round is a gain; 0.85 of 15 are 12.75
    mixed = [98.0] * won + [102.0] * (ROUNDS - won)
    evidence = evidence_of({DEFAULT: [100.0, 100.0], XQA: [[60.0] * ROUNDS, mixed]})
    assert select_stable(evidence, [0, 1], RULE).candidate == chosen


@pytest.mark.parametrize(("lost", "chosen"), [(2, XQA), (3, DEFAULT)])
def test_of_a_cells_batches_three_lost_ones_are_too_many_however_much_the_others_gain(lost, chosen):
    evidence = evidence_of({DEFAULT: 100, XQA: rounds(60, *[103] * lost)})
    decision = select_stable(evidence, [0], replace(RULE, cell_win_share=0.8))
    assert decision.candidate == chosen
    if chosen == DEFAULT:
        assert decision.reason is Reason.LOSES_SOME
        assert verdict(decision, XQA).detail == "3 of 15, by up to 3%"


@pytest.mark.parametrize(("cells", "chosen"), [(3, XQA), (4, DEFAULT)])
def test_of_a_boxs_batches_three_may_be_outliers_and_four_of_60_are_too_many(cells, chosen):
    lost = [[150, *[60] * (ROUNDS - 1)]] * cells + [[60] * ROUNDS] * (4 - cells)
    evidence = evidence_of({DEFAULT: [100] * 4, XQA: lost})
    assert select_stable(evidence, range(4), RULE).candidate == chosen


def test_a_lost_batch_counts_only_beyond_the_noise_of_its_cell():
    # the default against itself is 2% off, one way and the other: 3 x 1.4826 x 2% = 8.9%
    twin = [[100 * (1.02 if i % 2 else 1 / 1.02) for i in range(ROUNDS)]]
    for time, chosen in ((108, XQA), (110, DEFAULT)):
        evidence = evidence_of({DEFAULT: 100, TWIN: twin, XQA: rounds(60, *[time] * 3)})
        assert select_stable(evidence, [0], replace(RULE, cell_win_share=0.8)).candidate == chosen


def test_where_the_default_is_as_far_from_itself_as_often_a_lost_batch_says_nothing():
    lost = rounds(60, *[150] * 4)
    assert select_stable(evidence_of({DEFAULT: 100, XQA: lost}), [0], RULE).candidate == DEFAULT
    twin = [[*[100] * (ROUNDS - 2), 140, 70]]
    # the rounds that both are off in are others: 4 lost, of which 2 and 2 may be outliers
    rule = Rule(win_share=0.7, cell_win_share=0.7)
    assert select_stable(evidence_of({DEFAULT: 100, TWIN: twin, XQA: lost}), [0], rule).candidate == XQA
